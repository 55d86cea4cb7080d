"""A run that is saved, loaded elsewhere and continued is bitwise equal to an uninterrupted one."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)

from tests.support import checkpoints
from tests.support.checkpoints import DCP, Pair, Way, assert_goes_on, assert_same_run, builder, by_file, steps_of
from tests.support.contract import RULES
from tests.support.methods import Method, Variant
from tests.support.tasks import CLASSES, Task, assert_identical, snapshot, train, values

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # tests run without a process group

# Refreshes are every 4 steps, so that the break is within an interval and two more refreshes follow. Windows have 4
# rows, so that the break is within the second round of the ring.
MIDDLE, END = 5, 11

OWN_RULES: dict[str, dict[str, Any]] = {
    "small-damping": {"damping": 1e-10},
    "sgd-weight": {"betas": (0.9, 0.99), "bias_correction": True, "sgd_weight": 0.5},
    "one-row": {"window_size": 1},
}


@pytest.mark.full
@pytest.mark.cover(middle=[MIDDLE, 0, 1])
def test_resume_is_exact_mid_interval(method: Method, variant: Variant, task: Task, middle: int) -> None:
    assert_goes_on(builder(method, task, **variant.keywords), steps_of(task), middle, END)


@pytest.mark.cover(dtype=[torch.float64, torch.bfloat16, torch.float32], way={**DCP, "file": by_file})
def test_resume_is_exact_in_every_way_and_precision(
    method: Method, variant: Variant, task: Task, dtype: torch.dtype, way: Way
) -> None:
    """`torch.optim.Optimizer.load_state_dict` would round every factor to the dtype of the parameter."""
    assert_goes_on(builder(method, task, dtype, **variant.keywords), steps_of(task), MIDDLE, END, way)


@pytest.mark.rules(RULES | OWN_RULES)
def test_resume_is_exact_under_every_rule(method: Method, mlp: Task, rule: str) -> None:
    assert_goes_on(builder(method, mlp, **(RULES | OWN_RULES)[rule]), steps_of(mlp), MIDDLE, END)


def by_trainers(build: checkpoints.Build, model: nn.Module, optimizer: Any) -> Pair:
    """Transfer model and optimizer together, by the functions of DCP that trainers call."""
    other, second = build()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    set_state_dict(other, second, model_state_dict=model_state, optim_state_dict=optimizer_state)
    return other, second


@pytest.mark.cover(way={"file": by_file, **DCP, "both": by_trainers})
def test_several_groups_resume_exactly(method: Method, mlp: Task, way: Way) -> None:
    def build() -> Pair:
        model = mlp.model()
        decayed = [(name, p) for name, p in model.named_parameters() if p.ndim > 1]
        rest = [(name, p) for name, p in model.named_parameters() if p.ndim <= 1]
        return model, method.build(model, [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "lr": 0.01}])

    def run(model: nn.Module, optimizer: Any, first: int, last: int) -> None:
        train(model, optimizer, mlp, last - first, start=first)
        if first == 0:
            optimizer.param_groups[1]["lr"] = 0.02

    assert_goes_on(build, run, MIDDLE, END, way)


@pytest.mark.cover(build=checkpoints.DEFAULT_BUILDS)
def test_resume_is_exact_with_every_default(method: Method, mlp: Task, build: Callable[..., Any]) -> None:
    def start() -> Pair:
        model = mlp.model(torch.float32)
        return model, build(method, model)

    assert_goes_on(start, steps_of(mlp), MIDDLE, END)


# -------------------------------------------------------------------------------------------- Dtypes and group values
@pytest.mark.option("window_size")
def test_a_window_keeps_its_dtypes_in_a_model_of_another_dtype(method: Method, variant: Variant, mlp: Task) -> None:
    """Torch itself would cast indices, Gram matrix and rows to the dtype of the parameter."""
    model, optimizer = builder(method, mlp, torch.float32, **variant.keywords)()
    train(model, optimizer, mlp, MIDDLE)
    other, second = by_file(builder(method, mlp, torch.bfloat16, **variant.keywords), model, optimizer)
    dtypes = variant.dtypes(torch.float32)
    kept = dtypes.keys() | variant.owner_state

    def curvature(opt: Any) -> list[dict[str, Any]]:
        return [{key: state[key] for key in kept & state.keys()} for state in opt.state.values()]

    assert_identical(curvature(second), curvature(optimizer))
    for state in second.state.values():
        assert all(state[key].dtype == dtypes[key] for key in state.keys() & dtypes.keys())
    before = values(other)
    train(other, second, mlp, 3, start=MIDDLE)
    after = values(other)
    assert all(value.isfinite().all() for value in after.values())
    assert any(not torch.equal(value, before[name]) for name, value in after.items())


def test_loading_neither_shares_nor_changes_the_dict(method: Method, variant: Variant, mlp: Task) -> None:
    """Loading the current state changes nothing either, which Accelerate's wrapper does at construction."""
    build = builder(method, mlp, torch.bfloat16, **variant.keywords)
    first, second, undisturbed = build(), build(), build()
    first[1].load_state_dict(first[1].state_dict())
    train(*first, mlp, 3)
    saved = first[1].state_dict()
    before = copy.deepcopy(saved)
    second[0].load_state_dict(first[0].state_dict())
    second[1].load_state_dict(saved)

    def memory(states: Any) -> set[int]:
        return {v.untyped_storage().data_ptr() for s in states for v in s.values() if isinstance(v, Tensor)}

    assert not memory(second[1].state.values()) & memory(saved["state"].values())
    train(*second, mlp, 3, start=3)
    assert_identical(saved, before)
    first[1].load_state_dict(saved)
    train(*first, mlp, 3, start=3)
    train(*undisturbed, mlp, 6)
    assert_same_run(first, undisturbed)
    assert_same_run(second, undisturbed)


def test_group_values_come_from_the_checkpoint_and_missing_ones_take_their_default(method: Method, mlp: Task) -> None:
    """A value is missing in checkpoints of versions without this keyword."""
    _, optimizer = method.start(mlp, 2, lr=0.125, weight_decay=0.5)
    saved = snapshot(optimizer)
    second, third = (method.build(mlp.model(), weight_decay=0.25, maximize=True) for _ in range(2))
    second.load_state_dict(saved)
    (group,) = second.param_groups
    assert (group["lr"], group["weight_decay"], group["maximize"]) == (0.125, 0.5, False)
    kept = {"params", "lr"}
    saved["param_groups"] = [{key: own[key] for key in kept} for own in saved["param_groups"]]
    third.load_state_dict(saved)
    (group,) = third.param_groups
    assert group["lr"] == 0.125
    changing = third.defaults.keys() - kept
    assert {key: group[key] for key in changing} == {key: third.defaults[key] for key in changing}


def test_a_step_that_is_a_number_is_converted_to_a_tensor(method: Method, mlp: Task) -> None:
    _, optimizer = method.start(mlp, 3)
    saved = snapshot(optimizer)
    for state in saved["state"].values():
        state["step"] = float(state["step"])
    second = method.build(mlp.model())
    second.load_state_dict(saved)
    assert_identical(second.state_dict(), optimizer.state_dict())


def test_numpy_numbers_are_converted_to_python_numbers(method: Method, mlp: Task) -> None:
    """`torch.load` with `weights_only=True` does not support others."""
    import numpy as np

    betas = (np.float64(0.9), np.float64(0.99))
    given = {"lr": np.float64(0.1), method.damping: np.float64(0.5), "fallback_betas": betas, "fallback": "adamw"}

    def build() -> Pair:
        model = mlp.model()
        optimizer = method.build(model, model.first.parameters(), **given, **method.apart)
        optimizer.add_param_group({"params": list(model.second.parameters()), **given, "fallback_betas": [*betas]})
        optimizer.add_param_group({"params": [model.scale.gain], "weight_decay": np.float64(0.01)})
        return model, optimizer

    assert_goes_on(build, steps_of(mlp), 2, 3)


@pytest.mark.cover(flat={"plain": False, "flat": True})
def test_keys_are_names_and_dcp_takes_no_step(method: Method, mlp: Task, flat: bool) -> None:
    """DCP takes a step if the optimizer has no state."""
    model, optimizer = builder(method, mlp)()
    before, at_start = snapshot(optimizer), values(model)
    saved = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))
    assert_identical(snapshot(optimizer), before)
    assert_identical(values(model), at_start)
    assert all(parameter.grad is None for parameter in model.parameters())
    if flat:
        keys = {key.removeprefix("state.").rpartition(".")[0] for key in saved if key.startswith("state.")}
    else:
        keys = saved["state"].keys()
    assert keys == at_start.keys()


# ----------------------------------------------------------------------------------------------- Curvature that is zero
class Closed(nn.Module):
    """A branch between two gates of zero, whose layer has inputs and gradients of zero."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.branch, self.second = nn.Linear(5, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, CLASSES)
        self.entry, self.exit = (nn.Parameter(torch.zeros(())) for _ in range(2))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        return self.second(hidden + self.exit * self.branch(self.entry * hidden))


def test_a_layer_with_inputs_and_gradients_of_zero_can_be_resumed(method: Method, mlp: Task) -> None:
    task = replace(mlp, build=Closed)
    model, _ = assert_goes_on(builder(method, task), steps_of(task), 3, 5)
    assert not checkpoints.through_a_file(model.get_parameter("branch.weight").grad).any()


def test_a_first_step_whose_gradients_are_all_zero_can_be_resumed(method: Method, mlp: Task) -> None:
    def run(model: nn.Module, optimizer: Any, first: int, last: int) -> None:
        for step in range(first, last):
            optimizer.zero_grad()
            (mlp.loss(model, step) * min(step, 1)).backward()
            optimizer.step()

    assert_goes_on(builder(method, mlp), run, 1, 4)
