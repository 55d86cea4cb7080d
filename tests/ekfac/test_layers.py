"""The intra estimate of one batch equals its definition for all layers.

Expected scales are per-example gradients of autograd, rotated by the bases of the optimizer.
"""

import pytest
import torch
import torch.nn.functional as F

from tests.support.ekfac import assert_scales, held, held_bases, measured, next_directions, plain_ekfac, standing
from tests.support.grid import each
from tests.support.kfac import assert_close, labels, noise
from tests.support.layer_cases import CASES, CONVOLUTIONS, ONE_OF_EACH
from tests.support.models import mlp, seeded_build
from tests.support.networks import NORMED, TOKENS, Words
from tests.support.oracles.ekfac import exact_fisher, layer_gradients, operator, over_null_spaces, scales
from tests.support.oracles.kfac import solve

#: Layers that do not know which rows belong to which example have no squares of examples.
KINDS = [name for name, case in CASES.items() if not case.expand_only]
#: The ways to compute squares of examples differ between convolutions, and so do those of lookup tables.
DEFAULT = {
    *ONE_OF_EACH, *CONVOLUTIONS, "embedding-called-twice", "embedding-two-axes", "bag-empty-mean", "bag-mean-padding",
}  # fmt: skip


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
