"""Options of layer methods for the estimation and use of curvature, each on every task."""

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import secondorder
from tests.support.checkpoints import COPIES, DCP, Way, assert_goes_on, builder, by_file
from tests.support.device import SimulatedDevice
from tests.support.device_runs import DeviceRun, late
from tests.support.methods import METHODS, Method
from tests.support.tasks import CNN, TASKS, Task, assert_changed, assert_identical, backward, train, values

pytestmark = pytest.mark.option("skip_layers")

MIDDLE, END = 3, 6  # refreshes are at 0 and 4; updates of factors or rows are at 0, 2 and 4

RULES: dict[str, dict[str, Any]] = {
    "reduced": {"approx": "reduce"},
    "half the power": {"power": 0.5},
    "diagonal factors": {"max_factor_dim": 4},
    "norms by number": {"norm_curvature": "diagonal"},
    "batches weigh alike": {"weighting": "update", "burnin_steps": 2},
    "decay per step": {"decay_per_step": True},
    "some rows": {"factor_batch_size": 3, "factor_positions": 2, "deterministic_seed": 7},
    "decay as curvature": {"weight_decay": 0.1, "weight_decay_in_curvature": True},
    "no gradients": {"fisher": "forward_only"},
    "some squares": {"scale_batch_size": 3},
    "rare squares": {"scale_update_steps": 3, "scale_decay": 0.5},
    "squares of tokens": {"token_is_example": True},
    "from eigenvalues": {"transport": "kfac"},
    "by index": {"transport": "none"},
    "recomputed": {"transport": "recompute"},
    "cheap bases": {"basis_update": "qr", "full_every": 2},
    "expanded": {"approx": "expand"},
    "rows of every example": {"mode": "sngd"},
    "drawn": {"mode": "kis"},
    "drawn with replacement": {"mode": "kis", "kis_sampling": "replacement"},
    "drawn uniformly": {"mode": "kis", "kis_sampling": "uniform"},
    "pivots among columns": {"kid_pivoting": "qr"},
    "no residual": {"kid_residual": "none"},
    "all of the residual": {"kid_residual": "full"},
    "few rows": {"max_rank": 1},
    "rows by energy": {"rank_energy": 0.5},
    "in proportion to damping": {"normalize_damping": True},
    "as published": {"conv_scale": "hylo"},
    "factors where cheaper": {"kfac_when_cheaper": True, "rank_fraction": 0.8},
    "factors where cheaper, expanded": {"kfac_when_cheaper": True, "rank_fraction": 0.8, "approx": "expand"},
    "decay in the gradient": {"weight_decay": 0.1, "weight_decay_mode": "reg"},
}
OBSERVED: dict[str, dict[str, Any]] = {
    "sampled": {"fisher": "mc", "fisher_samples": 2},
    "signs": {"fisher": "curvature_prop"},
    "every column": {"fisher": "exact"},
}
JUDGED: dict[str, dict[str, Any]] = {
    "adaptive": {"adaptive_damping": True, "damping_interval": 2},
    "adaptive, bounded": {"adaptive_damping": True, "damping_interval": 1, "min_damping": 0.005, "max_damping": 0.02},
    "rejecting": {"reject_steps": True},
    "modelled": {"quadratic_model": True, "lr": 1.0, "include_damping_in_model": True},
    "modelled exactly": {"quadratic_model": True, "lr": 0.1, "likelihood": "categorical"},
    "calibrated": {"calibrate_damping": True},
    "everything": {
        "adaptive_damping": True, "damping_interval": 2, "reject_steps": True, "calibrate_damping": True,
        "quadratic_model": True, "likelihood": "categorical",
    },
    "rejecting long steps": {"reject_steps": True, "lr": 3.0},
    "adaptive, relative": {"adaptive_damping": True, "damping_mode": "relative", "damping": 3.0},
}  # fmt: skip
WAITING = {"rows by energy"}  # a refresh has to read the number of rows
Run = Callable[[nn.Module, Any, Task, int, int], None]


def observe(model: nn.Module, optimizer: Any, task: Task, steps: int, start: int = 0) -> None:
    for step in range(start, start + steps):
        optimizer.zero_grad()
        inputs, targets = task.batch(step, next(model.parameters()).dtype)
        outputs = model(inputs)
        optimizer.observe(outputs, secondorder.Categorical(), targets)
        F.cross_entropy(outputs.flatten(0, -2), targets.flatten()).backward()
        optimizer.step()


def by_closure(model: nn.Module, optimizer: Any, task: Task, steps: int, start: int = 0) -> None:
    def closure(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = F.cross_entropy(outputs.flatten(0, -2), targets.flatten())
        loss.backward()
        return loss, outputs

    for step in range(start, start + steps):
        optimizer.step(partial(closure, *task.batch(step, next(model.parameters()).dtype)))


def assert_trains_and_resumes(
    method: Method, task: Task, run: Run, way: Way = by_file, **keywords: Any
) -> dict[str, Tensor]:
    """All parameters change and remain finite, and a run that is saved and loaded continues exactly."""
    build = builder(method, task, **keywords)
    before = values(build()[0])

    def from_to(model: nn.Module, optimizer: Any, first: int, last: int) -> None:
        run(model, optimizer, task, last - first, first)

    model, optimizer = assert_goes_on(build, from_to, MIDDLE, END, way)
    assert_changed(model, before)
    assert optimizer.diagnostics()["skipped_steps"] == 0
    return values(model)


@functools.cache
def plainly(method: str, task: Task) -> dict[str, Tensor]:
    """The final parameters under the method's settings alone."""
    return next(m for m in METHODS if m.name == method).trained(task, END)


@pytest.mark.rules(RULES)
def test_every_choice_trains_resumes_and_changes_the_steps(method: Method, rule: str) -> None:
    """Each option changes the result on at least one model, unless it is the default; none waits for a device."""
    ends = [(assert_trains_and_resumes(method, t, train, **RULES[rule]), plainly(method.name, t)) for t in TASKS[1:]]
    if not method.build(CNN.model()).defaults.items() >= RULES[rule].items():
        assert any(not torch.equal(value, plain[name]) for end, plain in ends for name, value in end.items())
    if rule not in WAITING:
        with SimulatedDevice() as device:
            DeviceRun(partial(method.build, **RULES[rule]), CNN, device).steps(7)
        assert late(device) == []


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.rules(OBSERVED | JUDGED)
def test_curvature_that_is_observed_and_steps_that_are_judged(method: Method, task: Task, rule: str) -> None:
    """Checkpoints and copies contain all adapted state; the way to transfer a run alternates between cases."""
    rules, ways = OBSERVED | JUDGED, [by_file, *DCP.values(), *COPIES.values()]
    way = ways[([*rules].index(rule) + METHODS.index(method) + TASKS.index(task)) % len(ways)]
    assert_trains_and_resumes(method, task, observe if rule in OBSERVED else by_closure, way, **rules[rule])


@pytest.mark.rules({name: rule for name, rule in JUDGED.items() if name != "everything"})
def test_judged_steps_without_a_closure_are_refused_before_any_change(method: Method, mlp: Task, rule: str) -> None:
    model, optimizer = method.start(mlp, **JUDGED[rule])
    before = values(model)
    backward(model, optimizer, mlp, 0)
    if rule == "modelled":
        optimizer.step()  # the quadratic model of the blocks needs no loss
        assert_changed(model, before)
        return
    with pytest.raises(RuntimeError, match="likelihood=" if "exactly" in rule else next(iter(JUDGED[rule]))):
        optimizer.step()
    assert_identical(values(model), before)


@pytest.mark.rules({name: RULES[name] for name in ("some rows", "some squares", "drawn")} | OBSERVED)
def test_random_choices_only_depend_on_the_seed_of_the_optimizer(method: Method, rule: str) -> None:
    keywords, results = {**RULES, **OBSERVED}[rule], []
    run = observe if rule in OBSERVED else train
    for seed in (0, 1):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            state = torch.get_rng_state()
            model = CNN.model()
            run(model, method.build(model, **keywords), CNN, 5)
            assert_identical(torch.get_rng_state(), state)
        results.append(values(model))
    assert_identical(results[1], results[0])
