"""Factors of every convolution against the naive oracle over the whole grid, and against curvlinops where it can."""

import itertools

import pytest
import torch.nn.functional as F
from torch import nn

from tests.support.kfac import all_factors, assert_close, assert_factors, noise, one_step, twin
from tests.support.models import convnet, images, seeded_build
from tests.support.oracles.kfac import example_rows, expected_factors, factors, grouped, kron, objective
from tests.support.oracles.trajectory import curvlinops_blocks, curvlinops_dense

CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
SIZES = {1: (7,), 2: (5, 4), 3: (4, 3, 3)}
KERNELS = {1: (3,), 2: (3, 2), 3: (2, 1, 2)}
STRIDES = {1: (2,), 2: (2, 1), 3: (1, 2, 2)}
TUPLES = {1: (2,), 2: (1, 2), 3: (0, 1, 2)}


def held(opt, layer):
    state = opt.state[layer.weight if layer.weight.requires_grad else layer.bias]
    return state["factor_a"], state["factor_g"]


def check_layer(layer, x, approx="expand", loss=F.mse_loss, batched=True, tolerance=1e-9, what="", **keywords):
    layer = layer.double()
    y = noise(*layer(x).shape, seed=1)
    A, B = factors(example_rows(twin(layer), [""], x, y, loss, batched)[""], approx)
    opt = one_step(layer, x, y, loss, approx=approx, **keywords)
    held_a, held_b = held(opt, layer)
    assert_close(grouped(held_a), A, tolerance, f"A {what}")
    assert_close(grouped(held_b), B, tolerance, f"B {what}")
    if layer.groups > 1:
        assert held_a.ndim == held_b.ndim == 3
    return opt, A, B


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_grid_of_padding_stride_dilation_groups_bias(dims, mode):
    x = noise(2, 4, *SIZES[dims])
    ones = (1,) * dims
    for padding, stride, dilation, groups in itertools.product(
        (0, 1, TUPLES[dims], "same", "valid"), (ones, STRIDES[dims]), (1, 2), (1, 2, 4)
    ):
        if padding == "same" and stride != ones:
            continue  # torch refuses it
        layer = seeded_build(
            lambda: CONVS[dims](
                4,
                4,
                KERNELS[dims],
                stride=stride,  # noqa: B023
                padding=padding,  # noqa: B023
                dilation=dilation,  # noqa: B023
                groups=groups,  # noqa: B023
                padding_mode=mode,
                bias=groups != 2,  # noqa: B023
            )
        )
        what = f"{padding=} {stride=} {dilation=} {groups=}"
        check_layer(layer, x, "expand", what=what)


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_reduce_of_every_dimension(dims, groups, bias):
    layer = seeded_build(lambda: CONVS[dims](4, 4, KERNELS[dims], padding=1, groups=groups, bias=bias))
    check_layer(layer, noise(3, 4, *SIZES[dims]), "reduce")


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("approx", ["expand", "reduce"])
def test_depthwise_with_multiplier(dims, approx):
    """Two output channels for each input channel: B is 2×2 per group."""
    layer = seeded_build(lambda: CONVS[dims](3, 6, KERNELS[dims], groups=3))
    opt, _, B = check_layer(layer, noise(2, 3, *SIZES[dims]), approx)
    assert B.shape == (3, 2, 2)
    assert held(opt, layer)[1].shape == (3, 2, 2)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_frozen_bias(dims, groups):
    layer = seeded_build(lambda: CONVS[dims](4, 4, KERNELS[dims], groups=groups))
    layer.bias.requires_grad_(False)
    _, A, _ = check_layer(layer, noise(2, 4, *SIZES[dims]))
    assert A.shape[-1] == layer.weight[0].numel()


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_frozen_weight_with_trained_bias(dims, groups):
    layer = seeded_build(lambda: CONVS[dims](4, 4, KERNELS[dims], groups=groups))
    layer.weight.requires_grad_(False)
    _, A, _ = check_layer(layer, noise(2, 4, *SIZES[dims]))
    assert A.shape[-1] == 1
    assert (A == 1).all()


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_unbatched_input_is_one_example(dims):
    layer = seeded_build(lambda: CONVS[dims](2, 3, KERNELS[dims], padding=1))
    check_layer(layer, noise(2, *SIZES[dims]), batched=False)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_dense_curvature_is_block_diagonal_over_groups(dims, groups):
    layer = seeded_build(lambda: CONVS[dims](4, 4, KERNELS[dims], groups=groups))
    opt, A, B = check_layer(layer, noise(2, 4, *SIZES[dims]))
    dense = opt.dense_curvature("")
    rows = layer.weight[0].numel() + 1
    assert dense.shape == (4 * rows, 4 * rows)
    assert_close(dense, kron(B, A))


@pytest.mark.parametrize(
    "conv",
    [{}, {"stride": 2}, {"padding": 1}, {"stride": 2, "padding": 1}, {"dilation": 2, "padding": 2}, {"bias": False}],
    ids=["plain", "stride", "padding", "stride and padding", "dilation", "no bias"],
)
@pytest.mark.parametrize("approx", ["expand", "reduce"])
@pytest.mark.parametrize(("kind", "reduction"), [("ce", "mean"), ("ce", "sum"), ("mse", "mean"), ("mse", "sum")])
def test_conv2d_network_equals_curvlinops(conv, approx, kind, reduction):
    model, (x, y) = convnet(**conv), images()
    loss = objective(kind, reduction, outputs=3)
    y = y if loss.classes else noise(len(x), 3, seed=3)
    theirs = curvlinops_blocks(twin(model), x, y, loss, approx)
    own = expected_factors(twin(model), x, y, loss, approx=approx, loss_terms=loss.loss_terms)
    opt = one_step(model, x, y, loss, approx=approx, loss_reduction=reduction, loss_terms=loss.loss_terms)
    assert_factors(all_factors(opt, model), theirs)
    assert_factors(all_factors(opt, model), own)


def test_conv2d_dense_curvature_equals_curvlinops():
    model, (x, y) = convnet(stride=2, padding=1), images()
    loss = objective("ce", "mean", 3)
    theirs = curvlinops_dense(twin(model), x, y, loss, "expand")
    opt = one_step(model, x, y, loss)
    for name, block in theirs.items():
        assert_close(opt.dense_curvature(name), block, what=name)
