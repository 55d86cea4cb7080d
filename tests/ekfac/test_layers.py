"""The intra estimate of one batch equals its definition for all layers.

Expected scales are per-example gradients of autograd, rotated by the bases of the optimizer.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.ekfac import assert_scales, held, held_bases, measured, next_directions, plain_ekfac, standing
from tests.support.grid import each
from tests.support.kfac import assert_close, labels, noise, twin
from tests.support.layer_cases import CASES, ONE_OF_EACH
from tests.support.models import mlp, seeded_build
from tests.support.networks import CONVS, NORMED, SIZES, TOKENS, Words, squares
from tests.support.oracles.ekfac import exact_fisher, layer_gradients, operator, over_null_spaces, scales, solve
from tests.support.oracles.kfac import covered_names


def check(build, x, y, loss=squares, **keywords):
    """Scales, and the dense solve with them, of a model that is built twice."""
    model, plain = build(), build()
    opt = measured(model, x, y, loss, **keywords)
    assert_scales(opt, model, plain, x, y, loss)
    for name, (gradient, V) in next_directions(opt, model, x, y, loss, covered_names(model)).items():
        Q_B, Q_A = held_bases(opt, model.get_submodule(name))
        fisher = operator(Q_B, scales(layer_gradients(plain, name, x, y, loss), Q_B, Q_A), Q_A)
        assert_close(V, solve(fisher, gradient, 1e-2), 1e-8, name)
    return opt, model


#: Layers that do not know which rows belong to which example have no squares of examples.
KINDS = [name for name, case in CASES.items() if not case.expand_only]
#: Lookup tables compute squares of examples in another way.
DEFAULT = {*ONE_OF_EACH, "embedding-called-twice", "embedding-two-axes", "bag-empty-mean", "bag-mean-padding"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in DEFAULT else pytest.mark.slow) for n in KINDS])
def test_every_kind_of_layer(name):
    """Scales and direction are those of per-example gradients by hand."""
    case = CASES[name]
    model, (inputs, y) = case.ready(case.model()), case.data()
    opt = plain_ekfac(model, damping=0.02, **case.keywords)
    with standing(opt):
        for _ in range(2):
            opt.zero_grad()
            case.loss(model(*inputs), y).backward()
            opt.step()
    expected, before, gradients = {}, {}, {}
    opt.zero_grad()
    case.loss(model(*inputs), y).backward()
    for block, groups in case.rows(case.model()).items():
        state = opt.state[opt.blocks[block].owner]
        s, (Q_B, Q_A) = held(state)
        G = torch.stack([torch.cat([rows.gradient(n) for rows in groups]) for n in range(case.number)])
        A = torch.eye(s.shape[-1]) if block in case.tables else state["factor_a"]  # diagonals have no null spaces
        assert_close(s, over_null_spaces(scales(G, Q_B, Q_A), state["factor_g"], A), 1e-9, block)
        expected[block] = operator(Q_B, s, Q_A)
        gradients[block] = case.matrix(model, block, lambda p: p.grad.clone())
        before[block] = case.matrix(model, block)
    opt.step()
    for block, fisher in expected.items():
        moved = before[block] - case.matrix(model, block)
        assert_close(moved, solve(fisher, gradients[block], 0.02), 1e-8, block)


SHAPES = {  # (channels in, channels out, groups, kernel): on both sides of the rule for the way to form squares
    "few": (2, 3, 1, 2),
    "many": (12, 12, 1, 2),
    "groups": (4, 4, 2, 2),
    "depthwise": (4, 8, 4, 2),
    "pixel": (2, 3, 1, 1),
    "whole": (2, 3, 1, SIZES),
}


@each(
    lambda padding, stride, shape, dilation, **_: (
        not (padding == "same" and stride > 1)
        and not (shape[3] is SIZES and (padding in (1, "same") or dilation > 1 or stride > 1))
    ),
    axes=[1, 2, 3],
    padding=[0, 1, "same", "valid"],
    mode=["zeros", "reflect", "replicate", "circular"],
    shape=SHAPES,
    stride=[1, 2],
    dilation=[1, 2],
    bias={"bias": True, "no bias": False},
    limit={"dense": None, "diagonal": 3},
)
def test_convolutions(axes, padding, mode, shape, stride, dilation, bias, limit):
    """A side above the limit has no basis."""
    c_in, c_out, groups, kernel = shape
    kernel = SIZES[axes] if kernel is SIZES else kernel
    options = {"padding": padding, "padding_mode": mode, "stride": stride, "dilation": dilation, "bias": bias}
    layer = seeded_build(lambda: CONVS[axes](c_in, c_out, kernel, groups=groups, **options))
    x = noise(3, c_in, *SIZES[axes])
    check(lambda: nn.Sequential(twin(layer)), x, noise(*layer(x).shape, seed=1), max_factor_dim=limit)


def test_dense_curvature_of_an_embedding_is_in_the_order_of_its_weight():
    model, y = seeded_build(Words), labels(5, 3)
    opt = measured(model, TOKENS, y, F.cross_entropy)
    Q_B, Q_A = held_bases(opt, model.words)
    assert_close(Q_A[0], torch.eye(6, dtype=Q_A.dtype), 0.0)
    s = scales(layer_gradients(seeded_build(Words), "words", TOKENS, y, F.cross_entropy), Q_B, Q_A)
    swap = torch.arange(18).view(3, 6).T.reshape(-1)  # the operator is over vec of [D, V]
    assert_close(opt.dense_curvature("words"), operator(Q_B, s, Q_A)[swap][:, swap], 1e-9)


@each(kind=NORMED.keys(), curvature=["unit", "diagonal"])
def test_norm_layers_have_the_exact_block_of_a_unit(kind, curvature):
    """K-FAC's block of a unit is exact, so EK-FAC's is the same."""
    build, data = NORMED[kind]
    model, plain, x, y = seeded_build(build), seeded_build(build), data(), labels(6, 3)
    opt = measured(model, x, y, F.cross_entropy, norm_curvature=curvature)
    G = layer_gradients(plain, "norm", x, y, F.cross_entropy)
    expected = exact_fisher(G) if curvature == "unit" else torch.diag(exact_fisher(G).diagonal())
    assert_close(opt.dense_curvature("norm"), expected, 1e-9)
    gradient, V = next_directions(opt, model, x, y, F.cross_entropy, ["norm"])["norm"]
    assert_close(V, solve(expected, gradient, 1e-2), 1e-8)


@pytest.mark.parametrize("function", [F.mse_loss, F.binary_cross_entropy_with_logits])
def test_a_mean_over_outputs_multiplies_by_their_number(function):
    """With T = C it is the block of the summed loss, divided by C, in the unit of the factors."""
    for outputs, estimator in ((2, "intra"), (3, "intra"), (3, "running")):
        x, y = noise(6, 4), (noise(6, outputs, seed=1) > 0).double()
        model, total = mlp((4, 3, outputs)), mlp((4, 3, outputs))
        opt = measured(model, x, y, function, loss_terms=outputs, estimator=estimator)
        assert_scales(opt, model, total, x, y, function, factor=outputs, estimator=estimator)
        summed = {"loss_reduction": "sum", "estimator": estimator}
        other = measured(total, x, y, lambda o, t: function(o, t, reduction="sum"), **summed)
        for name in ("0", "2"):
            assert_close(opt.dense_curvature(name), other.dense_curvature(name) / outputs, 1e-7)
