"""The preconditioned gradient against explicit dense solves, read off the parameters after one step with lr = 1."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from secondorder import EKFAC, KFAC, HyLo
from tests.support import kfac
from tests.support.building import built
from tests.support.kfac import all_factors, assert_close, assert_solves, next_directions, noise, plain_kfac, train_step
from tests.support.models import convnet, images, mlp, seeded_build, vectors
from tests.support.oracles.kfac import expected_factors, grouped, pi_factors, solve_exact, solve_pi

METHODS = {
    "eigen": ({"inverse_method": "eigen"}, solve_exact),
    "eigen pi": ({"inverse_method": "eigen", "damping_split": "pi"}, solve_pi),
    "cholesky": ({"inverse_method": "cholesky"}, solve_pi),
}


def grouped_conv():
    """Groups of very different scale, which must not share one π."""
    scale = torch.tensor([100.0, 100.0, 1.0, 1.0], dtype=torch.float64)[:, None, None]
    layer = seeded_build(lambda: nn.Conv2d(4, 4, 2, groups=2))
    return layer, scale * noise(3, 4, 4, 3), noise(3, 4, 3, 2, seed=1), F.mse_loss


def frozen(part):
    model = mlp()
    getattr(model[0], part).requires_grad_(False)
    return model, *vectors(), F.cross_entropy


PROBLEMS = {
    "mlp": lambda: (mlp(), *vectors(), F.cross_entropy),
    "no bias": lambda: (mlp(bias=False), *vectors(), F.cross_entropy),
    "one example": lambda: (mlp(), *vectors(1), F.cross_entropy),
    "convnet": lambda: (convnet(stride=2, padding=1), *images(), F.cross_entropy),
    "grouped conv": grouped_conv,
    "frozen bias": lambda: frozen("bias"),
    "frozen weight": lambda: frozen("weight"),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_direction_is_the_dense_solve_with_this_batch_s_factors(problem):
    """The first step updates the factors and refreshes before it preconditions.

    A relative λ is a multiple of the mean eigenvalue of each block, and of each group of a convolution.
    """
    model, x, y, loss = PROBLEMS[problem]()
    expected = expected_factors(model, x, y, loss)
    for method, damping, mode in product(METHODS, (1e-1, 1e-4), ("absolute", "relative")):
        (keywords, solve), trained = METHODS[method], kfac.twin(model)
        opt = plain_kfac(trained, damping=damping, damping_mode=mode, **keywords)
        for name, (gradient, V) in next_directions(opt, trained, x, y, loss).items():
            pairs_of_groups = list(zip(*map(grouped, expected[name]), strict=True))
            parts = []
            for (A, B), part in zip(pairs_of_groups, gradient.chunk(len(pairs_of_groups)), strict=True):
                mean = float(A.trace() * B.trace()) / (len(A) * len(B))
                parts.append(solve(B, A, part, damping * mean if mode == "relative" else damping))
            assert_close(V, torch.cat(parts), 1e-8, f"{name}: {method}, {mode} λ={damping}")
            assert float((V - gradient).abs().max()) > 1e-3, "statistics were never used"
            assert float((V * gradient).sum()) > 0, "not a descent direction"


def test_damping_changed_between_refreshes_acts_at_once_for_eigen():
    model, (x, y) = mlp(), vectors()
    opt = plain_kfac(model, damping=1e-2, inverse_method="eigen", factor_update_steps=50, inv_update_steps=50)
    train_step(opt, model, x, y, F.cross_entropy)
    held = all_factors(opt, model)
    for damping in (1.0, 1e-3, 1e9):
        opt.param_groups[0].update(damping=damping, lr=damping)
        assert_solves(next_directions(opt, model, x, y, F.cross_entropy), held, solve_exact, damping, lr=damping)


def test_cholesky_takes_a_changed_damping_at_the_next_refresh_at_the_latest():
    model, (x, y) = mlp(), vectors()
    opt = plain_kfac(model, damping=1e-2, inverse_method="cholesky", factor_update_steps=1, inv_update_steps=2)
    train_step(opt, model, x, y, F.cross_entropy)
    opt.param_groups[0]["damping"] = 0.5
    train_step(opt, model, x, y, F.cross_entropy)
    moved = next_directions(opt, model, x, y, F.cross_entropy)  # t = 2: due
    assert_solves(moved, all_factors(opt, model), solve_pi, 0.5)


@pytest.mark.parametrize("dead", ["inputs", "gradients", "both"])
def test_factors_of_zeros_give_the_gradient_over_lambda(dead):
    """A dead input or output makes F = 0 in the first batch; later gradients are divided by λ."""
    for method, (keywords, solve) in METHODS.items():
        model, (x, y) = mlp((4, 3), bias=False), vectors()
        opt = plain_kfac(model, damping=0.25, factor_update_steps=50, inv_update_steps=50, **keywords)
        first = x if dead == "gradients" else torch.zeros_like(x)
        next_directions(opt, model, first, y, F.cross_entropy, 1.0 if dead == "inputs" else 0.0)
        factors = all_factors(opt, model)
        assert [not factor.any() for factor in factors["0"]] == [dead != "gradients", dead != "inputs"]
        found = next_directions(opt, model, x, y, F.cross_entropy)
        assert_solves(found, factors, solve, 0.25, tolerance=1e-9)
        if dead == "both" or method == "eigen":
            assert_close(found["0"][1], found["0"][0] / 0.25, 1e-9, method)


class Mixed(nn.Module):
    """Four layers of one shape, every other one in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(seeded_build(lambda: nn.Linear(4, 4), seed) for seed in range(4)))
        self.layers[1].float()
        self.layers[3].float()

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x.double()


def test_layers_of_one_shape_in_groups_of_their_own_do_not_mix():
    """Refreshes are batched over equal shapes, but layers in other groups or of other dtypes have their own results."""
    x, y, model = noise(6, 4), noise(6, 4, seed=1), Mixed()
    groups = [
        {"params": list(model.layers[:2].parameters()), "damping": 0.3},
        {"params": list(model.layers[2:].parameters()), "damping": 0.02},
    ]
    expected = expected_factors(kfac.twin(model), x, y, F.mse_loss)
    opt = plain_kfac(groups, module=model)
    moved = next_directions(opt, model, x, y, F.mse_loss)
    kfac.assert_factors(all_factors(opt, model), expected, 1e-4)  # all pass through float32 layers
    for i, damping in enumerate((0.3, 0.3, 0.02, 0.02)):
        name, double = f"layers.{i}", i in (0, 2)
        A, B = kfac.held_factors(opt, model, name)
        assert A.dtype == B.dtype == moved[name][1].dtype == (torch.float64 if double else torch.float32)
        assert_solves({name: moved[name]}, {name: (A, B)}, solve_exact, damping, tolerance=1e-8 if double else 1e-4)


# ---------------------- Layers without biases whose sides are multiples of 16, as in transformers and residual networks


def aligned() -> nn.Sequential:
    """Matrices need neither padding nor ones, so a direction could be memory that the next layer overwrites."""
    convolutions = [nn.Conv2d(16, 64, 3, padding=1, bias=False), nn.Conv2d(64, 80, 1, bias=False)]
    linear = [nn.Linear(80, 96, bias=False), nn.Tanh(), nn.Linear(96, 64, bias=False), nn.Linear(64, 64, bias=False)]
    return nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), *linear)


def kept_directions(opt, model):
    x, y = noise(24, 16, 4, 4), kfac.labels(24, 64)
    F.cross_entropy(model(x), y).backward()
    with opt.keep_directions() as kept:
        opt.step()
    return dict(kept)


@pytest.mark.parametrize("way", ["eigen", "cholesky", "intra", "running"])
def test_every_layer_has_its_own_direction(way):
    """The reference is an explicit solution with the factors in the state, layer by layer."""
    model = seeded_build(aligned)
    kind, keywords = (EKFAC, {"estimator": way}) if way in ("intra", "running") else (KFAC, {"inverse_method": way})
    opt = built(kind, model, lr=0.1, damping=0.1, kl_clip=None, **keywords)
    kept = kept_directions(opt, model)
    for name, p in model.named_parameters():
        state, gradient = opt.state[p], p.grad.flatten(1)
        if way == "cholesky":
            g, a = pi_factors(state["factor_g"], state["factor_a"], 0.1)
            wanted = torch.linalg.solve(g, torch.linalg.solve(a, gradient.mT).mT)
        else:
            scale = torch.outer(state["eigenvalues_g"], state["eigenvalues_a"]) if way == "eigen" else state["scale"]
            q_a, q_g = state["basis_a"], state["basis_g"]
            wanted = q_g @ ((q_g.mT @ gradient @ q_a) / (scale + 0.1)) @ q_a.mT
        assert_close(kept[name].flatten(1), wanted, 1e-8, name)


@pytest.mark.parametrize("mode", ["kid", "sngd"])
def test_rows_of_every_layer_give_their_own_direction(mode):
    """It is that of the same layer when all others are skipped."""
    whole, keywords = seeded_build(aligned), {"damping": 0.1, "mode": mode, "rank_fraction": 0.5}
    kept = kept_directions(built(HyLo, whole, **keywords), whole)
    for name, _ in whole.named_parameters():
        model = seeded_build(aligned)
        others = [other for other, _ in model.named_children() if other != name.partition(".")[0]]
        found = kept_directions(built(HyLo, model, **keywords, skip_layers=others), model)
        torch.testing.assert_close(kept[name], found[name], rtol=1e-9, atol=1e-12)
