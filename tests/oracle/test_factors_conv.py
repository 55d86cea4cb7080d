"""Factors of convolutions against the naive oracle over all of their options, and against curvlinops."""

import pytest
import torch.nn.functional as F

from tests.support.grid import each, pairs
from tests.support.kfac import all_factors, assert_close, assert_factors, noise, one_step, twin
from tests.support.models import convnet, images, seeded_build
from tests.support.networks import CONVS
from tests.support.oracles.curvlinops import curvlinops_blocks
from tests.support.oracles.kfac import example_rows, expected_factors, factors, grouped, kron, objective

SIZES = {1: (7,), 2: (5, 4), 3: (4, 3, 3)}
KERNELS = {1: (3,), 2: (3, 2), 3: (2, 1, 2)}
STRIDES = {1: (2,), 2: (2, 1), 3: (1, 2, 2)}
UNEQUAL = {1: (2,), 2: (1, 2), 3: (0, 1, 2)}
CHANNELS = {"1": (4, 4, 1), "2": (4, 4, 2), "depthwise": (4, 4, 4), "multiplied": (3, 6, 3)}
TRAINED = ["all", "no bias", "weight", "bias"]
PADDING = ["none", 1, "unequal", "same", "valid"]


def convolution(dims, channels=(4, 4, 1), *, trained="all", padding="none", strided=False, **options):
    padding = {"none": 0, "unequal": UNEQUAL[dims]}.get(padding, padding)
    c_in, c_out, groups = channels
    options |= {"stride": STRIDES[dims] if strided else 1, "padding": padding, "groups": groups}
    layer = seeded_build(lambda: CONVS[dims](c_in, c_out, KERNELS[dims], bias=trained != "no bias", **options))
    if trained in ("weight", "bias"):
        getattr(layer, "bias" if trained == "weight" else "weight").requires_grad_(False)
    return layer


def check_layer(layer, x, approx="expand", batched=True):
    y = noise(*layer(x).shape, seed=1)
    A, B = factors(example_rows(twin(layer), [""], x, y, F.mse_loss, batched)[""], approx)
    opt = one_step(layer, x, y, F.mse_loss, approx=approx)
    state = opt.state[layer.weight if layer.weight.requires_grad else layer.bias]
    assert_close(grouped(state["factor_a"]), A, what="A")
    assert_close(grouped(state["factor_g"]), B, what="B")
    assert state["factor_a"].ndim == state["factor_g"].ndim == (3 if layer.groups > 1 else 2)
    assert_close(opt.dense_curvature(""), kron(B, A), what="dense block")


def torch_allows(padding, strided, **_):
    return not (padding == "same" and strided)


@pairs(
    torch_allows,
    dims=[1, 2, 3],
    mode=["zeros", "reflect", "replicate", "circular"],
    padding=PADDING,
    channels=CHANNELS,
    trained=TRAINED,
    strided=[False, True],
    dilation=[1, 2],
    approx=["expand", "reduce"],
)
def test_factors_and_dense_block_are_those_of_the_definitions(
    dims, mode, padding, channels, trained, strided, dilation, approx
):
    options = {"padding": padding, "padding_mode": mode, "dilation": dilation}
    layer = convolution(dims, channels, trained=trained, strided=strided, **options)
    check_layer(layer, noise(2, channels[0], *SIZES[dims]), approx)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_unbatched_input_is_one_example(dims):
    check_layer(convolution(dims, padding=1), noise(4, *SIZES[dims]), batched=False)


@each(
    conv={
        "plain": {},
        "stride": {"stride": 2},
        "padding": {"padding": 1},
        "both": {"stride": 2, "padding": 1},
        "dilation": {"dilation": 2, "padding": 2},
        "no bias": {"bias": False},
    },
    approx=["expand", "reduce"],
    kind=["ce", "mse"],
    reduction=["mean", "sum"],
)
def test_conv2d_network_equals_curvlinops_and_the_definitions(conv, approx, kind, reduction):
    model, (x, y) = convnet(**conv), images()
    loss = objective(kind, reduction, outputs=3)
    y = y if loss.classes else noise(len(x), 3, seed=3)
    plain = twin(model)
    theirs = curvlinops_blocks(plain, x, y, loss, approx)
    own = expected_factors(plain, x, y, loss, approx=approx, loss_terms=loss.loss_terms)
    opt = one_step(model, x, y, loss, approx=approx, loss_reduction=reduction, loss_terms=loss.loss_terms)
    assert_factors(own, theirs, 1e-11)
    assert_factors(all_factors(opt, model), theirs)
    for name, (A, B) in theirs.items():
        assert_close(opt.dense_curvature(name), kron(B, A), what=name)
