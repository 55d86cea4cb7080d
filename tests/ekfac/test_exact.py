"""Exact relations of EK-FAC's block to that of K-FAC and to the Fisher of per-example gradients, and the direction."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from secondorder import EKFAC, KFAC
from tests.support.building import built
from tests.support.ekfac import PLAIN, held_bases, held_scales, measured, next_directions, state_of
from tests.support.grid import each
from tests.support.kfac import assert_close, labels, noise, twin
from tests.support.models import Tokens, convnet, images, mlp, seeded_build, vectors
from tests.support.networks import squares
from tests.support.oracles import ekfac as oracle
from tests.support.oracles.ekfac import damped_power, exact_fisher, layer_gradients, operator
from tests.support.oracles.kfac import covered_names, grouped, kron

PLAIN_KFAC = {key: value for key, value in PLAIN.items() if key != "scale_update_steps"}
approximations = pytest.mark.parametrize("approx", ["expand", "reduce"])

PROBLEMS = {
    "mlp": lambda: (mlp(), *vectors(), F.cross_entropy),
    "mlp without bias": lambda: (mlp(bias=False), *vectors(), F.cross_entropy),
    "convnet": lambda: (convnet(stride=2, padding=1), *images(), F.cross_entropy),
    "tokens": lambda: (seeded_build(lambda: Tokens(read="mean")), noise(5, 4, 3), labels(5, 3), F.cross_entropy),
    "grouped conv": lambda: (
        nn.Sequential(seeded_build(lambda: nn.Conv2d(4, 4, 2, groups=2))),
        noise(6, 4, 4, 3),
        noise(6, 4, 3, 2, seed=1),
        squares,
    ),
}


@each(
    lambda problem, mode, **_: problem != "grouped conv" or mode == "absolute",  # relative: each group has its own
    problem=list(PROBLEMS),
    approx=["expand", "reduce"],
    damping=[1e-1, 1e-4],
    mode=["absolute", "relative"],
    power=[1.0, 0.5, 0.25],
)
def test_block_and_direction_are_those_of_dense_matrices(problem, approx, damping, mode, power):
    """The block has the trace of the exact one and its diagonal in the eigenbasis; a relative λ multiplies its mean.

    Positions are summed before the square, even under reduce, so the direction is not that of K-FAC.
    """
    model, x, y, loss = PROBLEMS[problem]()
    opt = measured(model, x, y, loss, approx=approx, damping=damping, damping_mode=mode, power=power)
    names, plain, expected = covered_names(model), twin(model), {}
    for name in names:
        layer = model.get_submodule(name)
        s, (Q_B, Q_A) = held_scales(opt, layer), held_bases(opt, layer)
        exact = exact_fisher(layer_gradients(plain, name, x, y, loss))
        factors = [state_of(opt, layer)[f"factor_{side}"] for side in "ga"]
        assert_close(s, oracle.over_null_spaces(oracle.diagonal_in(exact, Q_B, Q_A, s), *factors), 1e-9, name)
        assert float(s.min()) >= 0
        assert float(s.sum()) == pytest.approx(float(exact.trace()), rel=1e-10)
        assert_close(opt.dense_curvature(name), operator(Q_B, s, Q_A), 1e-9, name)
        for Q, factor in zip((Q_B, Q_A), factors, strict=True):
            assert_close(Q.mT @ Q, torch.eye(Q.shape[-1], dtype=Q.dtype).expand_as(Q), 1e-10)
            rotated = Q.mT @ grouped(factor) @ Q
            assert_close(rotated, torch.diag_embed(rotated.diagonal(dim1=-2, dim2=-1)), 1e-9, name)
        added = damping * (float(s.mean()) if mode == "relative" else 1)
        expected[name] = operator(Q_B, s, Q_A), kron(*factors), added
    for name, (gradient, V) in next_directions(opt, model, x, y, loss, names).items():
        fisher, kfac, added = expected[name]
        assert_close(V, damped_power(fisher, added, power, gradient), 1e-8, name)
        for other in (gradient, damped_power(kfac, added, power, gradient)):
            assert float((V - other).abs().max()) > 1e-3 * float(other.abs().max())
        assert float((V * gradient).sum()) > 0, "not a descent direction"


@approximations
def test_the_first_step_has_no_scales_and_is_that_of_kfac(approx):
    """There is no basis to project to, so s = s_B s_Aᵀ, which has no weight in the average."""
    x, y = images()
    found = []
    for cls, keywords in ((KFAC, {"inverse_method": "eigen"}), (EKFAC, {})):
        model = convnet()
        opt = built(cls, model, **PLAIN_KFAC, **keywords, approx=approx)
        found.append(next_directions(opt, model, x, y, F.cross_entropy, covered_names(model)))
    state = state_of(opt, model.first)
    assert float(state["scale_weight"]) == 0
    assert_close(state["scale"], torch.outer(state["eigenvalues_g"], state["eigenvalues_a"]), 1e-12)
    for name, (_, V) in found[0].items():
        assert_close(found[1][name][1], V, 1e-10, name)
