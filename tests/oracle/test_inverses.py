"""The inverses of Kronecker factors on plain dicts, and split damping for factors of a realistic width."""

import pytest
import torch
from torch import nn

from secondorder import KFAC
from secondorder.curvature.factorization import factorise
from secondorder.curvature.factors import STORAGES, KroneckerFactors
from secondorder.curvature.inverse import Cholesky, Eigen, Entrywise
from secondorder.curvature.layer import LayerOptions
from secondorder.curvature.layer_plan import plan_layers
from secondorder.curvature.schema import tensors
from secondorder.linalg.dense import Workspace
from tests.support.building import built
from tests.support.oracles.kfac import pi_factors

N_A, N_G, DAMPING = 4, 3, 0.3


def group_of(max_factor_dim=None, split="exact"):
    return {
        "approx": "expand", "damping": DAMPING, "damping_mode": "absolute", "damping_split": split, "power": 1.0,
        "weight_decay": 0.0, "weight_decay_in_curvature": False, "max_factor_dim": max_factor_dim,
    }  # fmt: skip


def refreshed(kind, group, diagonal=""):
    """An inverse and its refreshed state."""
    torch.manual_seed(0)
    model = nn.Linear(N_A, N_G, bias=False).double()
    (layer,) = plan_layers(model, model.parameters(), LayerOptions()).layers
    inverse, state = kind(KroneckerFactors(layer, LayerOptions(), STORAGES["dense"])), {}
    for side, n in (("a", N_A), ("g", N_G)):
        rows = torch.randn(2 * n, n, dtype=torch.float64)
        state[f"factor_{side}"] = rows.square().mean(0) if side in diagonal else rows.mT @ rows / len(rows)
    for key, like in tensors(inverse.schema(group)).items():
        state[key] = torch.zeros_like(like, device="cpu")
    found = factorise(inverse.tasks(state, group), True)
    assert all(ok for _, ok in found.values())
    inverse.adopt(state, {side: result for side, (result, _) in found.items()}, torch.tensor(True))
    return inverse, state


def damped_curvature(state, split):
    """The damped curvature over row-major ``vec``."""
    a, g = (x if x.dim() > 1 else torch.diag(x) for x in (state["factor_a"], state["factor_g"]))
    if split == "pi":
        return torch.kron(*pi_factors(g, a, DAMPING))
    return torch.kron(g, a) + DAMPING * torch.eye(N_A * N_G, dtype=torch.float64)


@pytest.mark.parametrize(
    ("kind", "split", "bound", "diagonal"),
    [
        (Eigen, "exact", None, ""),
        (Eigen, "exact", N_G, "a"),
        (Eigen, "pi", None, ""),
        (Cholesky, "pi", None, ""),
        (Cholesky, "pi", N_G, "a"),
        (Entrywise, "exact", 1, "ag"),
    ],
)
def test_an_inverse_solves_with_the_damped_curvature_and_has_its_extremes(kind, split, bound, diagonal):
    group = group_of(bound, split)
    inverse, state = refreshed(kind, group, diagonal)
    damped, gradient = damped_curvature(state, split), torch.randn(N_G, N_A, dtype=torch.float64)
    expected = torch.linalg.solve(damped, gradient.flatten()).reshape(N_G, N_A)
    torch.testing.assert_close(inverse.apply(state, group, gradient, Workspace()), expected)
    values = torch.linalg.eigvalsh(damped)
    found, above = inverse.extremes(state, group), inverse.bounds(state, group)
    torch.testing.assert_close(found.damping.double(), torch.tensor(DAMPING, dtype=torch.float64))
    if kind is not Cholesky:
        torch.testing.assert_close(torch.stack([found.smallest, found.largest]), values[[0, -1]])
        assert inverse.extremes({}, group) is None
    assert above.largest >= values[-1] * (1 - 1e-12)


def test_mirrored_inverses_are_symmetric_bit_by_bit():
    group = group_of(split="pi")
    inverse, state = refreshed(Cholesky, group)
    assert inverse.bounds({}, group) is None
    for (found,), _ in factorise(inverse.tasks(state, group), True, mirrors=True).values():
        assert torch.equal(found, found.mT)


def direction_of_one_step(width, out, examples, **keywords):
    """The optimizer, its layer, the gradient and the direction, in float32."""
    torch.manual_seed(0)
    layer = nn.Linear(width, out, bias=False)
    opt = built(KFAC, layer, lr=0.1, damping_split="pi", kl_clip=None, **keywords)
    # With positive inputs, one eigenvalue is hundreds of times the mean, and its rounding is comparable to λ's share.
    x, y = torch.rand(examples, width) + 1, torch.randn(examples, out) + 1
    (layer(x) * y).sum(1).mean().backward()
    gradient = layer.weight.grad.clone()
    with opt.keep_directions() as kept:
        opt.step()
    return opt.state[layer.weight], gradient, kept["weight"]


@pytest.mark.parametrize("method", ["eigen", "cholesky"])
def test_float32_solves_with_split_damping_are_accurate(method):
    """The reference is a solve in float64 with the factors of the optimizer."""
    state, gradient, found = direction_of_one_step(512, 64, 96, damping=0.1, inverse_method=method)
    g, a = pi_factors(state["factor_g"].double(), state["factor_a"].double(), 0.1)
    expected = torch.linalg.solve(g, torch.linalg.solve(a, gradient.double().mT).mT)
    error = torch.linalg.vector_norm(found.double() - expected) / torch.linalg.vector_norm(expected)
    assert error < 1e-3


def test_a_split_damping_below_rounding_leaves_finite_steps():
    *_, found = direction_of_one_step(32, 8, 4, damping=1e-30)
    assert torch.isfinite(found).all()
