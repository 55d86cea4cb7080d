"""Options of the running estimate and of the direction: weights, burn-in, decay, weight decay as curvature, power."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secondorder import EKFAC, KFAC
from tests.support import kfac
from tests.support.building import built
from tests.support.grid import each, pairs
from tests.support.kfac import PLAIN, assert_close, backward, held_factors, layer_state, noise, plain_kfac, train_step
from tests.support.models import Net, mlp, seeded_build, vectors
from tests.support.oracles.ekfac import damped_power
from tests.support.oracles.fisher import METHODS, STILL, quiet
from tests.support.oracles.kfac import expected_factors, layer_values, pi_factors, solve, solve_pi
from tests.support.warned import silent

SIZES = [5, 2, 7, 1, 4, 3, 6, 2]


def running(sizes, method=KFAC, **keywords):
    """Train at fixed weights on batches of unequal size; per layer the list of (examples, batch A, batch B)."""
    model = mlp()
    plain = kfac.twin(model)
    opt = quiet(lambda: built(method, model, **{**STILL, **keywords}))
    history = {"0": [], "2": []}
    for seed, n in enumerate(sizes):
        x, y = vectors(n, seed=seed)
        for name, (A, B) in expected_factors(plain, x, y, F.cross_entropy).items():
            history[name].append((n, A, B))
        train_step(opt, model, x, y, F.cross_entropy)
    return opt, model, history


def averaged(batches: list[tuple[float, float, Tensor]]) -> tuple[float, Tensor]:
    """(W, X) after batches of (β, w, value), where each β multiplies all earlier ones."""
    total, value = 0.0, None
    for decay, weight, batch in batches:
        total = decay * total + weight
        value = batch if value is None else value + weight / total * (batch - value)
    return total, value


def assert_running(opt, model, history, decays, weights) -> None:
    """Factors and their weight are those of a plain list; ``history`` holds only the due batches."""
    for name, batches in history.items():
        for side, factor in enumerate(held_factors(opt, model, name)):
            rows = [(b, w, batch[1 + side]) for b, w, batch in zip(decays, weights, batches, strict=True)]
            total, value = averaged(rows)
            assert_close(factor, value, 1e-10, f"{name}, factor {side}")
            assert torch.equal(factor, factor.mT)
        assert float(layer_state(opt, model, name)["factor_weight"]) == pytest.approx(total, rel=1e-12)


@pairs(
    method=METHODS,
    weighting=["samples", "update"],
    decay=[0.0, 0.6, 1.0],
    burnin=[0, 1, 3, 100],
    interval=[1, 2, 3],
    per_step=[False, True],
)
def test_factors_are_those_of_a_plain_list(method, weighting, decay, burnin, interval, per_step):
    """β = 1 during burn-in, which counts updates and not steps, so that the estimate is the pooled mean."""
    options = {"factor_decay": decay, "burnin_steps": burnin, "decay_per_step": per_step, "inv_update_steps": 6}
    if (weighting, decay) != ("samples", 0.6):  # once it is the default
        options["weighting"] = weighting
    options["factor_update_steps"] = interval
    opt, model, history = running(SIZES, method, **options)
    sizes = SIZES[::interval]
    later = decay**interval if per_step else decay
    decays = [1.0 if update < burnin else later for update in range(len(sizes))]
    due = {name: batches[::interval] for name, batches in history.items()}
    assert_running(opt, model, due, decays, sizes if weighting == "samples" else [1] * len(sizes))


def test_micro_batches_are_one_update():
    model, (x, y) = mlp(), vectors(6)
    opt = built(KFAC, model, **{**STILL, "weighting": "update", "factor_decay": 1.0})
    kfac.accumulate(model, x, y, 2)
    opt.step()
    assert float(layer_state(opt, model, "0")["factor_weight"]) == 1


# ---------------------------------------------------------------- Burn-in
def test_the_burn_in_of_scales_counts_their_own_updates():
    """The first step makes the basis, which stays. `tests/ekfac/test_schedule.py` tests decays without a burn-in."""
    found = []
    for decays in ({"scale_decay": 0.0}, {"scale_decay": 0.6, "burnin_steps": 3}):
        model = mlp()
        opt = built(EKFAC, model, **{**STILL, "inv_update_steps": 1000, "factor_decay": 1.0, **decays})
        values = []
        for t, n in enumerate(SIZES):
            train_step(opt, model, *vectors(n, seed=t), F.cross_entropy)
            values.append(layer_state(opt, model, "0")["scale"].clone())
        found.append(values)
    single, averages = found
    batches = [(1.0 if t < 3 else 0.6, n, s) for t, (n, s) in enumerate(zip(SIZES[1:], single[1:], strict=True))]
    for t in range(1, len(SIZES)):
        total, expected = averaged(batches[:t])
        assert_close(averages[t], expected, 1e-10, f"step {t}")
    assert float(layer_state(opt, model, "0")["scale_weight"]) == pytest.approx(total, rel=1e-12)


# ---------------------------------------------------------------- Decay per step
def constant() -> Net:
    """A layer whose A is the square of its input, and which may be left out."""
    layers = {"layer": nn.Linear(1, 2, bias=False), "other": nn.Linear(1, 2, bias=False)}
    return Net(lambda net, x: net.other(x) if net.rests else net.layer(x) + net.other(x), rests=False, **layers)


def of_step(t: int) -> tuple[Tensor, Tensor]:
    return torch.full((4, 1), float(t), dtype=torch.float64), noise(4, 2, seed=t)


def assert_mean_of_squares(state, updates: list[tuple[float, int]]) -> None:
    """A is the mean of t² over updates with a decay before each and a weight of 4."""
    total, value = averaged([(decay, 4, torch.tensor(float(t * t))) for decay, t in updates])
    assert float(state["factor_weight"]) == pytest.approx(total)
    assert float(state["factor_a"]) == pytest.approx(float(value))


@pytest.mark.parametrize(
    "changed", [{"factor_update_steps": 2}, {"decay_per_step": True}, {"factor_decay": 0.2}], ids=str
)
def test_options_may_change_during_a_run(changed):
    (option,), model = changed, seeded_build(constant)
    per_step = option == "decay_per_step"
    options = {"decay_per_step": option == "factor_update_steps", "factor_update_steps": 2 if per_step else 1}
    opt = quiet(lambda: plain_kfac(model, lr=0.0, factor_decay=0.8, inv_update_steps=12, **options))
    updates = {
        "factor_update_steps": [(0.8, t) for t in range(3)] + [(0.8**2, t) for t in range(4, 9, 2)],
        "decay_per_step": [(0.8 if t <= 4 else 0.8**2, t) for t in range(0, 9, 2)],
        "factor_decay": [(0.8 if t < 3 else 0.2, t) for t in range(9)],
    }
    for t in range(9):
        opt.param_groups[0].update(changed if t == (5 if per_step else 3) else {})
        train_step(opt, model, *of_step(t), F.mse_loss)
    assert_mean_of_squares(opt.state[model.layer.weight], updates[option])


# name: options, steps of the updates, steps in which the layer is called
SCHEDULES = {
    "warm-up": (
        {"refresh_warmup": True, "factor_update_steps": 4, "inv_update_steps": 8}, [*range(8), 8, 12, 16], range(17)
    ),
    "grid": ({"factor_update_steps": 3, "inv_update_steps": 3}, [0, 3, 6, 9, 12, 15], range(17)),
    "every step": ({}, [*range(17)], range(17)),
    "late": (
        {"refresh_warmup": False, "factor_update_steps": 5, "inv_update_steps": 5}, [4, 5, 10, 15], range(4, 17)
    ),
    "resting": ({"refresh_warmup": False, "factor_update_steps": 5, "inv_update_steps": 5}, [0, 10, 15], (0, 10, 15)),
}  # fmt: skip


@each(schedule=SCHEDULES.keys(), method=METHODS, resumes=[False, True])
def test_decay_per_step_counts_the_steps_between_updates(method, schedule, resumes):
    """The first update of a layer may be off the grid, and it may miss later ones."""
    options, times, active = SCHEDULES[schedule]
    options = {"lr": 0.0, "decay_per_step": True, "factor_decay": 0.9, **options}
    model = seeded_build(constant)
    opt = built(method, model, **options)
    for t in range(17):
        model.rests = t not in active
        train_step(opt, model, *of_step(t), F.mse_loss)
        if resumes and t in (3, 7, 12):
            saved = opt.state_dict()
            model = seeded_build(constant)
            opt = built(method, model, **options)
            opt.load_state_dict(saved)
    state = opt.state[model.layer.weight]
    assert state["factor_updates"] == len(times)
    assert_mean_of_squares(state, [(0.9 ** (t - before), t) for before, t in zip([0, *times], times, strict=False)])


# ---------------------------------------------------------------- Weight decay as curvature
@pairs(
    lambda kind, as_curvature, **_: kind != "cholesky" or as_curvature,
    kind=["kfac", "cholesky", "ekfac"],
    as_curvature=[False, True],
    decoupled=[False, True],
)
def test_weight_decay_in_curvature(kind, as_curvature, decoupled):
    """Its Hessian, weight_decay·I, is added to λ, and the decay itself is applied as usual; groups may differ."""
    model, (x, y) = mlp(), vectors()
    groups = [{"params": list(model[i].parameters()), "weight_decay": 0.3 * (i == 0)} for i in (0, 2)]
    options = {"decoupled_weight_decay": decoupled, "weight_decay_in_curvature": as_curvature}
    inverse = {"inverse_method": "cholesky"} if kind == "cholesky" else {}
    opt = built(EKFAC if kind == "ekfac" else KFAC, groups, module=model, **PLAIN, **options, **inverse)
    opt.param_groups[0]["weight_decay"] = 0.5  # options are read when they are used
    backward(model, x, y, F.cross_entropy)
    before = {name: layer_values(model.get_submodule(name)) for name in ("0", "2")}
    for name, (gradient, step) in kfac.directions(opt, model).items():
        decay, block = 0.5 if name == "0" else 0.0, opt.dense_curvature(name)
        damping = 1e-2 + decay * as_curvature
        if kind == "cholesky":
            A, B = held_factors(opt, model, name)
            V = solve_pi(B, A, gradient, damping)
        else:
            V = solve(block, gradient, damping)
        assert_close(step, V + decay * before[name], 1e-9, name)


# ---------------------------------------------------------------- Power
@each(kind=["absolute", "relative", "pi"], power=[0.25, 0.5, 0.8])
def test_power_is_that_of_the_damped_matrix(kind, power):
    """This includes the product of two damped factors. `tests/ekfac/test_exact.py` tests powers of EK-FAC."""
    options = {"relative": {"damping_mode": "relative"}, "pi": {"damping_split": "pi"}}.get(kind, {})
    model = mlp()
    opt = built(KFAC, model, **PLAIN, **options)
    opt.param_groups[0]["power"] = power  # options are read when they are used
    backward(model, *vectors(), F.cross_entropy)
    for name, (gradient, V) in kfac.directions(opt, model).items():
        block = opt.dense_curvature(name)
        damping = 1e-2 * (float(block.diagonal().mean()) if kind == "relative" else 1.0)
        if kind == "pi":
            A, B = held_factors(opt, model, name)
            block, damping = torch.kron(*pi_factors(B, A, 1e-2)), 0.0
        assert_close(V, damped_power(block, damping, power, gradient), 1e-8, name)


def test_power_needs_eigenvalues_in_every_group():
    model = mlp()
    cholesky = {"inverse_method": "cholesky"}
    groups = [{"params": list(model[0].parameters()), **cholesky}, {"params": list(model[2].parameters())}]
    for params, keywords in ((mlp(), cholesky), (groups, {"module": model})):
        with pytest.raises((ValueError, RuntimeError), match="power"):
            built(KFAC, params, **keywords, power=0.5)
    with silent():
        built(KFAC, mlp(), **cholesky, power=1.0)
