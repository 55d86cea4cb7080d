"""Options of the running estimate and of the direction: weights, burn-in, decay, weight decay as curvature, power."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secondorder import EKFAC, KFAC
from tests.support.grid import each, pairs
from tests.support.kfac import (
    PLAIN,
    assert_close,
    backward,
    directions,
    held_factors,
    layer_state,
    noise,
    plain_kfac,
    train_step,
    twin,
)
from tests.support.models import mlp, seeded_build, vectors
from tests.support.oracles.fisher import METHODS, STILL, quiet
from tests.support.oracles.kfac import expected_factors, layer_values, solve_exact, solve_pi

both = each(method=METHODS)
SIZES = [5, 2, 7, 1, 4, 3, 6, 2]


def running(sizes, method=KFAC, **keywords):
    """Train at fixed weights on batches of unequal size; per layer the list of (examples, batch A, batch B)."""
    model = mlp()
    plain = twin(model)
    opt = quiet(lambda: method(model, **{**STILL, **keywords}))
    history = {"0": [], "2": []}
    for seed, n in enumerate(sizes):
        x, y = vectors(n, seed=seed)
        for name, (A, B) in expected_factors(plain, x, y, F.cross_entropy).items():
            history[name].append((n, A, B))
        train_step(opt, model, x, y, F.cross_entropy)
    return opt, model, history


def averaged(batches: list[tuple[float, float, Tensor]]) -> tuple[float, Tensor]:
    """(W, X) after batches of (β, w, value): each β multiplies all that came before it."""
    total, value = 0.0, None
    for decay, weight, batch in batches:
        total = decay * total + weight
        value = batch if value is None else value + weight / total * (batch - value)
    return total, value


def assert_running(opt, model, history, decays, weights) -> None:
    """Factors and their weight are those of a plain list; ``history`` holds the due batches only."""
    for name, batches in history.items():
        for side, factor in enumerate(held_factors(opt, model, name)):
            rows = [(b, w, batch[1 + side]) for b, w, batch in zip(decays, weights, batches, strict=True)]
            total, value = averaged(rows)
            assert_close(factor, value, 1e-10, f"{name}, factor {side}")
        assert float(layer_state(opt, model, name)["factor_weight"]) == pytest.approx(total, rel=1e-12)


# ---------------------------------------------------------------------------------------------------------------------
# Weights
# ---------------------------------------------------------------------------------------------------------------------


@pairs(method=METHODS, weighting=["samples", "update"], decay=[0.0, 0.6, 1.0])
def test_weights_of_batches(method, weighting, decay):
    told = {} if weighting == "samples" and decay == 0.6 else {"weighting": weighting}  # the default
    opt, model, history = running(SIZES, method, factor_decay=decay, **told)
    weights = SIZES if weighting == "samples" else [1] * len(SIZES)
    assert_running(opt, model, history, [decay] * len(SIZES), weights)


def test_micro_batches_are_one_update():
    model, (x, y) = mlp(), vectors(6)
    opt = KFAC(model, **{**STILL, "weighting": "update", "factor_decay": 1.0})
    for a, b in zip(x.split(2), y.split(2), strict=True):
        backward(model, a, b, F.cross_entropy, 1 / 3)
    opt.step()
    assert float(layer_state(opt, model, "0")["factor_weight"]) == 1


# ---------------------------------------------------------------------------------------------------------------------
# Burn-in
# ---------------------------------------------------------------------------------------------------------------------


@pairs(method=METHODS, weighting=["samples", "update"], burnin=[0, 1, 3, 100])
def test_burn_in_keeps_everything(method, weighting, burnin):
    """β = 1 in the first steps: their estimate is the pooled mean."""
    opt, model, history = running(SIZES, method, weighting=weighting, factor_decay=0.6, burnin_steps=burnin)
    decays = [1.0 if t < burnin else 0.6 for t in range(len(SIZES))]
    assert_running(opt, model, history, decays, SIZES if weighting == "samples" else [1] * len(SIZES))


def test_burn_in_counts_updates():
    """Not optimizer steps: with long intervals those would hold one update or none."""
    opt, model, history = running(SIZES, factor_decay=0.6, burnin_steps=2, factor_update_steps=2, inv_update_steps=2)
    due = {name: batches[::2] for name, batches in history.items()}
    assert_running(opt, model, due, [1.0, 1.0, 0.6, 0.6], SIZES[::2])


def test_scales_burn_in_too():
    """Of their own updates, the first of which is in the second step."""
    found = {}
    for keywords in ({"scale_decay": 0.0}, {"scale_decay": 0.6, "burnin_steps": 3}):
        model = mlp()
        opt = EKFAC(model, **{**STILL, "factor_decay": 1.0, "inv_update_steps": 1000, **keywords})
        values = []
        for t, n in enumerate(SIZES):
            train_step(opt, model, *vectors(n, seed=t), F.cross_entropy)
            values.append(layer_state(opt, model, "0")["scale"].clone())
        found[keywords["scale_decay"]] = values
    batches = [(1.0 if t < 3 else 0.6, n, s) for t, (n, s) in enumerate(zip(SIZES[1:], found[0.0][1:], strict=True))]
    for t in range(1, len(SIZES)):
        assert_close(found[0.6][t], averaged(batches[:t])[1], 1e-10, f"step {t}")


# ---------------------------------------------------------------------------------------------------------------------
# Decay per step
# ---------------------------------------------------------------------------------------------------------------------


@pairs(method=METHODS, interval=[1, 2, 3], per_step=[False, True])
def test_decay_per_step(method, interval, per_step):
    keywords = {"factor_decay": 0.8, "factor_update_steps": interval, "inv_update_steps": 6}
    opt, model, history = running(SIZES, method, decay_per_step=per_step, **keywords)
    due = {name: batches[::interval] for name, batches in history.items()}
    decay = 0.8**interval if per_step else 0.8
    assert_running(opt, model, due, [decay] * len(SIZES[::interval]), SIZES[::interval])


def test_burn_in_goes_before_decay_per_step():
    keywords = {"factor_decay": 0.8, "factor_update_steps": 2, "inv_update_steps": 2}
    opt, model, history = running(SIZES, decay_per_step=True, burnin_steps=2, **keywords)
    due = {name: batches[::2] for name, batches in history.items()}
    assert_running(opt, model, due, [1.0, 1.0, 0.8**2, 0.8**2], SIZES[::2])


def test_the_interval_of_the_moment_counts():
    model = mlp()
    plain = twin(model)
    opt = quiet(lambda: KFAC(model, **{**STILL, "factor_decay": 0.8, "decay_per_step": True, "inv_update_steps": 12}))
    batches = []
    for t in range(9):
        if t == 3:
            opt.param_groups[0]["factor_update_steps"] = 2
        n = SIZES[t % len(SIZES)]
        x, y = vectors(n, seed=t)
        interval = 1 if t < 3 else 2
        if t % interval == 0:
            batches.append((0.8**interval, n, expected_factors(plain, x, y, F.cross_entropy)["0"][0]))
        train_step(opt, model, x, y, F.cross_entropy)
    assert_close(held_factors(opt, model, "0")[0], averaged(batches)[1], 1e-10)


class Constant(nn.Module):
    """A layer whose A is the square of what it is given, and which may rest."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(1, 2, bias=False), nn.Linear(1, 2, bias=False)
        self.rests = False

    def forward(self, x):
        return self.other(x) if self.rests else self.layer(x) + self.other(x)


def mean_of_squares(times: list[int], decay: float) -> float:
    """The running mean of t² over updates at some steps, each of weight 4."""
    weight = mean = 0.0
    for i, t in enumerate(times):
        weight = weight * (decay ** (t - times[i - 1]) if i else 1.0) + 4
        mean += 4 / weight * (t * t - mean)
    return mean


SCHEDULES = {
    "warm-up": ({"refresh_warmup": True, "factor_update_steps": 4, "inv_update_steps": 8}, [*range(8), 8, 12, 16]),
    "grid": ({"factor_update_steps": 3, "inv_update_steps": 3}, [0, 3, 6, 9, 12, 15]),
    "every step": ({}, [*range(17)]),
}


@each(schedule=SCHEDULES.keys(), method=METHODS)
def test_decay_per_step_counts_the_steps_that_went_by(method, schedule):
    options, times = SCHEDULES[schedule]
    model = seeded_build(Constant)
    opt = method(model, **{"lr": 0.0, "decay_per_step": True, "factor_decay": 0.9, **options})
    for t in range(17):
        train_step(opt, model, torch.full((4, 1), float(t), dtype=torch.float64), noise(4, 2, seed=t), F.mse_loss)
    state = opt.state[model.layer.weight]
    assert state["factor_updates"] == len(times)
    assert float(state["factor_a"]) == pytest.approx(mean_of_squares(times, 0.9))


@pytest.mark.parametrize("resumes", [False, True], ids=["straight", "resumed"])
@pytest.mark.parametrize(("active", "times"), [(range(4, 17), [4, 5, 10, 15]), ((0, 10, 15), [0, 10, 15])], ids=str)
def test_decay_per_step_of_a_layer_that_comes_late_or_rests(active, times, resumes):
    """Its first update may be off the grid, and it may miss others."""
    options = {"lr": 0.0, "decay_per_step": True, "factor_decay": 0.9, "factor_update_steps": 5, "inv_update_steps": 5}
    model = seeded_build(Constant)
    opt = plain_kfac(model, **options)
    for t in range(17):
        model.rests = t not in active
        train_step(opt, model, torch.full((4, 1), float(t), dtype=torch.float64), noise(4, 2, seed=t), F.mse_loss)
        if resumes and t in (3, 7, 12):
            saved = opt.state_dict()
            model = seeded_build(Constant)
            opt = plain_kfac(model, **options)
            opt.load_state_dict(saved)
    state = opt.state[model.layer.weight]
    assert state["factor_updates"] == len(times)
    assert float(state["factor_a"]) == pytest.approx(mean_of_squares(times, 0.9))


def test_decay_per_step_may_be_switched_on_later():
    model = seeded_build(Constant)
    opt = plain_kfac(model, lr=0.0, factor_decay=0.9, factor_update_steps=2, inv_update_steps=2)
    weight = 0.0
    for t in range(9):
        opt.param_groups[0]["decay_per_step"] = t > 4
        train_step(opt, model, torch.full((4, 1), float(t), dtype=torch.float64), noise(4, 2, seed=t), F.mse_loss)
        if t % 2 == 0:
            weight = weight * (0.9 if t <= 4 else 0.81) + 4
    assert float(opt.state[model.layer.weight]["factor_weight"]) == pytest.approx(weight)


# ---------------------------------------------------------------------------------------------------------------------
# Scales of EK-FAC
# ---------------------------------------------------------------------------------------------------------------------


def test_scales_have_a_decay_of_their_own():
    """One basis, so that the scales are a plain list too."""
    found = {}
    for decay in (0.0, 0.7):
        model = mlp()
        opt = EKFAC(model, **{**STILL, "inv_update_steps": 1000, "factor_decay": 1.0, "scale_decay": decay})
        values = []
        for t, n in enumerate(SIZES):
            x, y = vectors(n if t else 5, seed=t)
            train_step(opt, model, x, y, F.cross_entropy)
            values.append(layer_state(opt, model, "0")["scale"].clone())
        found[decay] = values
    single = [(0.7, float(n), s) for n, s in zip(SIZES[1:], found[0.0][1:], strict=True)]
    for t in range(1, len(SIZES)):
        total, expected = averaged(single[:t])
        assert_close(found[0.7][t], expected, 1e-10, f"step {t}")
    assert float(layer_state(opt, model, "0")["scale_weight"]) == pytest.approx(total, rel=1e-12)


def test_scales_follow_the_factors_decay_where_none_is_given():
    held = []
    for keywords in ({}, {"scale_decay": 0.7}):
        model = mlp()
        opt = EKFAC(model, **{**STILL, "factor_decay": 0.7, "inv_update_steps": 1000, **keywords})
        for t, n in enumerate(SIZES):
            train_step(opt, model, *vectors(n, seed=t), F.cross_entropy)
        held.append(layer_state(opt, model, "0")["scale"])
    assert torch.equal(*held)


# ---------------------------------------------------------------------------------------------------------------------
# Weight decay as curvature
# ---------------------------------------------------------------------------------------------------------------------


def moved(opt, model) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """(θ, ∇, θ − θ') of every layer, for a step with the gradients that are there."""
    before = {name: layer_values(model.get_submodule(name)) for name in ("0", "2")}
    return {name: (before[name], gradient, V) for name, (gradient, V) in directions(opt, model).items()}


@pairs(method=METHODS, as_curvature=[False, True], decoupled=[False, True])
def test_weight_decay_in_curvature(method, as_curvature, decoupled):
    """Its Hessian is weight_decay·I: added to λ, while the decay itself is applied as ever."""
    model, (x, y) = mlp(), vectors()
    opt = method(
        model,
        **PLAIN,
        weight_decay=0.3,
        decoupled_weight_decay=decoupled,
        weight_decay_in_curvature=as_curvature,
    )
    backward(model, x, y, F.cross_entropy)
    for name, (theta, gradient, step) in moved(opt, model).items():
        block = opt.dense_curvature(name)
        damped = block + (1e-2 + 0.3 * as_curvature) * torch.eye(len(block), dtype=torch.float64)
        V = torch.linalg.solve(damped, gradient.reshape(-1)).view_as(gradient)
        assert_close(step, V + 0.3 * theta, 1e-9, name)


@pytest.mark.parametrize("inverse", ["eigen", "cholesky"])
def test_weight_decay_in_curvature_is_each_group_s_own(inverse):
    model, (x, y) = mlp(), vectors()
    groups = [
        {"params": list(model[0].parameters()), "weight_decay": 0.3},
        {"params": list(model[2].parameters()), "weight_decay": 0.0},
    ]
    opt = KFAC(groups, module=model, **PLAIN, weight_decay_in_curvature=True, inverse_method=inverse)
    opt.param_groups[0]["weight_decay"] = 0.5  # read where it is used
    backward(model, x, y, F.cross_entropy)
    for name, (theta, gradient, step) in moved(opt, model).items():
        decay = 0.5 if name == "0" else 0.0
        A, B = held_factors(opt, model, name)
        solve = solve_exact if inverse == "eigen" else solve_pi
        assert_close(step, solve(B, A, gradient, 1e-2 + decay) + decay * theta, 1e-9, name)


def test_without_weight_decay_the_flag_changes_nothing():
    held = []
    for flag in (False, True):
        model, (x, y) = mlp(), vectors()
        opt = plain_kfac(model, weight_decay_in_curvature=flag)
        train_step(opt, model, x, y, F.cross_entropy)
        held.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*held, strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# Power
# ---------------------------------------------------------------------------------------------------------------------


def applied(model, method, gradients: dict[str, Tensor] | None, power: float, **keywords):
    """The direction of every layer at one curvature; with ``gradients``, of these instead of the loss's."""
    opt = method(model, **{**PLAIN, "factor_update_steps": 10, "inv_update_steps": 10, **keywords})
    opt.param_groups[0]["power"] = power  # read where it is used
    backward(model, *vectors(), F.cross_entropy)
    if gradients is not None:
        for name, matrix in gradients.items():
            layer = model.get_submodule(name)
            layer.weight.grad, layer.bias.grad = matrix[:, :-1].clone(), matrix[:, -1].clone()
    return opt, directions(opt, model)


@each(method=METHODS, keywords={"absolute": {}, "relative": {"damping_mode": "relative"}})
def test_half_the_power_twice_is_the_whole(method, keywords):
    _, whole = applied(mlp(), method, None, 1.0, **keywords)
    _, once = applied(mlp(), method, None, 0.5, **keywords)
    _, twice = applied(mlp(), method, {name: V for name, (_, V) in once.items()}, 0.5, **keywords)
    for name, (_, V) in whole.items():
        assert_close(twice[name][1], V, 1e-10, name)
        assert not torch.allclose(once[name][1], V)


@each(method=METHODS, power=[0.25, 0.5, 0.8, 1.0])
def test_power_is_that_of_the_damped_matrix(method, power):
    opt, found = (model := mlp()) and applied(model, method, None, power)
    for name, (gradient, V) in found.items():
        block = opt.dense_curvature(name)
        values, vectors_ = torch.linalg.eigh(block + 1e-2 * torch.eye(len(block), dtype=torch.float64))
        root = vectors_ @ torch.diag(values**-power) @ vectors_.T
        assert_close(V, (root @ gradient.reshape(-1)).view_as(V), 1e-8, name)


def test_power_with_the_pi_split():
    """Of the product of the two damped factors, which has their eigenvalues' products."""
    model = mlp()
    opt, found = applied(model, KFAC, None, 0.5, damping_split="pi")
    _, whole = applied(mlp(), KFAC, {name: V for name, (_, V) in found.items()}, 0.5, damping_split="pi")
    for name, (_, V) in whole.items():
        A, B = held_factors(opt, model, name)
        gradient = found[name][0]
        assert_close(V, solve_pi(B, A, gradient, 1e-2), 1e-9, name)


def test_power_needs_eigenvalues():
    with pytest.raises((ValueError, RuntimeError), match="power.*eigen|eigen.*power"):
        KFAC(mlp(), inverse_method="cholesky", power=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        KFAC(mlp(), inverse_method="cholesky", power=1.0)


def test_power_needs_eigenvalues_in_every_group():
    model = mlp()
    groups = [
        {"params": list(model[0].parameters()), "inverse_method": "cholesky"},
        {"params": list(model[2].parameters())},
    ]
    with pytest.raises((ValueError, RuntimeError), match="power"):
        KFAC(groups, module=model, power=0.5)


@both
def test_bad_values_are_refused_by_name(method):
    for option, value, error in (
        *(("power", power, ValueError) for power in (0.0, -1.0, float("nan"), float("inf"))),
        ("power", "half", TypeError),
        ("decay_per_step", 1, TypeError),
        ("weighting", "examples", ValueError),
        ("burnin_steps", -1, ValueError),
        ("burnin_steps", 1.5, TypeError),
    ):
        with pytest.raises(error, match=option):
            method(mlp(), **{option: value})
