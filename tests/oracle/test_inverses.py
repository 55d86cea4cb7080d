"""The inverses of Kronecker factors on plain dicts, in float64, against the dense curvature."""

import pytest
import torch
from torch import nn

from secondorder.curvature.factorization import factorise
from secondorder.curvature.factors import STORAGES, KroneckerFactors
from secondorder.curvature.inverse import Cholesky, Eigen, Entrywise
from secondorder.curvature.layer import Choices, LayerOptions
from secondorder.curvature.layer_plan import plan_layers
from secondorder.curvature.schema import tensors
from secondorder.linalg.dense import Workspace

N_A, N_G, DAMPING = 4, 3, 0.3


def group_of(max_factor_dim=None, split="exact"):
    return {
        "damping": DAMPING, "damping_mode": "absolute", "damping_split": split, "power": 1.0,
        "weight_decay": 0.0, "weight_decay_in_curvature": False, "max_factor_dim": max_factor_dim,
    }  # fmt: skip


def refreshed(kind, group, diagonal=""):
    """An inverse, and a state that it has refreshed."""
    torch.manual_seed(0)
    model = nn.Linear(N_A, N_G, bias=False).double()
    (layer,) = plan_layers(model, model.parameters(), Choices()).layers
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


def dense(state, split):
    """The damped curvature over row-major ``vec``, and λ's two parts."""
    a, g = (x if x.dim() > 1 else torch.diag(x) for x in (state["factor_a"], state["factor_g"]))
    if not split:
        return torch.kron(g, a) + DAMPING * torch.eye(N_A * N_G, dtype=torch.float64)
    pi = ((a.trace() / N_A) / (g.trace() / N_G)).sqrt()
    eye_a, eye_g = torch.eye(N_A, dtype=torch.float64), torch.eye(N_G, dtype=torch.float64)
    return torch.kron(g + DAMPING**0.5 / pi * eye_g, a + pi * DAMPING**0.5 * eye_a)


CASES = [
    (Eigen, "exact", None, ""),
    (Eigen, "exact", N_G, "a"),
    (Eigen, "pi", None, ""),
    (Cholesky, "pi", None, ""),
    (Cholesky, "pi", N_G, "a"),
    (Entrywise, "exact", 1, "ag"),
]


@pytest.mark.parametrize(("kind", "split", "bound", "diagonal"), CASES)
def test_an_inverse_solves_with_the_damped_curvature_and_knows_its_extremes(kind, split, bound, diagonal):
    group = group_of(bound, split)
    inverse, state = refreshed(kind, group, diagonal)
    damped, gradient = dense(state, split == "pi"), torch.randn(N_G, N_A, dtype=torch.float64)
    expected = torch.linalg.solve(damped, gradient.flatten()).reshape(N_G, N_A)
    torch.testing.assert_close(inverse.apply(state, group, gradient, Workspace()), expected)
    values = torch.linalg.eigvalsh(damped)
    found, above = inverse.extremes(state, group), inverse.bounds(state, group)
    torch.testing.assert_close(found.damping.double(), torch.tensor(DAMPING, dtype=torch.float64))
    if kind is not Cholesky:
        torch.testing.assert_close(torch.stack([found.smallest, found.largest]), values[[0, -1]])
    assert above.largest >= values[-1] * (1 - 1e-12)


def test_a_refresh_that_failed_changes_nothing():
    group = group_of()
    inverse, state = refreshed(Eigen, group)
    before = {key: value.clone() for key, value in state.items()}
    inverse.adopt(state, {side: (torch.zeros(n),) for side, n in (("a", N_A), ("g", N_G))}, torch.tensor(False))
    torch.testing.assert_close(state, before)


def test_an_inverse_without_its_state_has_no_extremes():
    inverse, _ = refreshed(Eigen, group_of())
    assert inverse.extremes({}, group_of()) is None
    assert Cholesky(inverse.factors).bounds({}, group_of()) is None


def test_mirrored_inverses_are_symmetric_bit_by_bit():
    group = group_of(split="pi")
    inverse, state = refreshed(Cholesky, group)
    for (found,), _ in factorise(inverse.tasks(state, group), True, mirrors=True).values():
        assert torch.equal(found, found.mT)
