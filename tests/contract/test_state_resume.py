"""Saving, loading and going on as if nothing had happened, to the bit."""

from __future__ import annotations

import copy
import io
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.methods import Method, Variant
from tests.support.tasks import CLASSES, Task, assert_identical, covered_layers, snapshot, train, values

# Refreshes every 4 steps: the first break is inside an interval, and the last goes over two more. Windows of 4 rows:
# the first break is inside the second turn of the ring, and the last goes over two more.
MIDDLE, END = 5, 11


def through_a_file(saved: Any) -> Any:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def size(saved: Any) -> int:
    file = io.BytesIO()
    torch.save(saved, file)
    return len(file.getvalue())


def resumed(method: Method, task: Task, model: nn.Module, optimizer: Any, **keywords: Any) -> tuple[nn.Module, Any]:
    """A new model and optimizer, as a new process would make them, loaded from a file."""
    other = task.model(next(model.parameters()).dtype)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    second = method.build(other, **keywords)
    other.load_state_dict(through_a_file(model.state_dict()))
    second.load_state_dict(through_a_file(optimizer.state_dict()))
    return other, second


RULES: dict[str, dict[str, Any]] = {
    "sgd": {},
    "nesterov": {"nesterov": True, "weight_decay": 0.01},
    "plain": {"momentum": 0.0},
    "inner-adamw": {"inner": "adamw", "lr": 1e-3},
    "graft-adam": {"graft": "adam", "lr": 1e-3, "decoupled_weight_decay": True, "weight_decay": 0.1},
    "adamw-fallback": {"fallback": "adamw", "fallback_lr": 0.01},
    "ema": {"momentum_mode": "ema", "weight_decay": 0.01},
    "graft-sgd": {"graft": "sgd"},
    "legacy-decay": {"weight_decay": 0.01, "weight_decay_mode": "legacy"},
    "decay-beside": {"weight_decay": 0.1, "weight_decay_mode": "reg"},
    "relative-damping": {"damping": 0.1, "damping_mode": "relative"},
    "window-scale": {"scale": "window"},
    "small-damping": {"damping": 1e-10},
    "bias-correction": {"betas": (0.9, 0.99), "bias_correction": True, "sgd_weight": 0.5},
    "one-row": {"window_size": 1},
}


@pytest.mark.parametrize("middle", [0, 1, MIDDLE])
def test_resume_is_exact_mid_interval(method: Method, variant: Variant, task: Task, middle: int) -> None:
    model = task.model()
    optimizer = method.build(model, **variant.keywords)
    train(model, optimizer, task, middle)
    other, second = resumed(method, task, model, optimizer, **variant.keywords)
    train(model, optimizer, task, END - middle, start=middle)
    train(other, second, task, END - middle, start=middle)
    assert_identical(values(other), values(model))
    assert_identical(second.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("frozen", ["first.weight", "second.bias"])
def test_resume_is_exact_beside_a_frozen_parameter(method: Method, variant: Variant, mlp: Task, frozen: str) -> None:
    model, other = mlp.model(), mlp.model()
    for net in (model, other):
        net.get_parameter(frozen).requires_grad_(False)
    optimizer, second = method.build(model, **variant.keywords), method.build(other, **variant.keywords)
    train(model, optimizer, mlp, MIDDLE)
    other.load_state_dict(model.state_dict())
    second.load_state_dict(through_a_file(optimizer.state_dict()))
    train(model, optimizer, mlp, END - MIDDLE, start=MIDDLE)
    train(other, second, mlp, END - MIDDLE, start=MIDDLE)
    assert_identical(values(other), values(model))
    assert_identical(second.state_dict(), optimizer.state_dict())


@pytest.mark.rules(RULES)
def test_resume_is_exact_under_every_rule(method: Method, mlp: Task, rule: str) -> None:
    model = mlp.model()
    optimizer = method.build(model, **RULES[rule])
    train(model, optimizer, mlp, MIDDLE)
    other, second = resumed(method, mlp, model, optimizer, **RULES[rule])
    train(model, optimizer, mlp, END - MIDDLE, start=MIDDLE)
    train(other, second, mlp, END - MIDDLE, start=MIDDLE)
    assert_identical(values(other), values(model))
    assert_identical(second.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_resume_is_exact_in_low_precision(method: Method, variant: Variant, mlp: Task, dtype: torch.dtype) -> None:
    """`Optimizer.load_state_dict` alone would round every factor to the parameter's dtype."""
    model = mlp.model(dtype)
    optimizer = method.build(model, **variant.keywords)
    train(model, optimizer, mlp, MIDDLE)
    other, second = resumed(method, mlp, model, optimizer, **variant.keywords)
    assert_identical(second.state_dict(), optimizer.state_dict())
    train(model, optimizer, mlp, END - MIDDLE, start=MIDDLE)
    train(other, second, mlp, END - MIDDLE, start=MIDDLE)
    assert_identical(values(other), values(model))


@pytest.mark.option("window_size")
def test_a_window_keeps_its_dtypes_in_a_model_of_another(method: Method, variant: Variant, mlp: Task) -> None:
    """Indices stay whole, S double, rows as they are: torch alone would cast everything to the parameter's dtype."""
    model, other = mlp.model(torch.float32), mlp.model(torch.bfloat16)
    optimizer, second = method.build(model, **variant.keywords), method.build(other, **variant.keywords)
    train(model, optimizer, mlp, MIDDLE)
    other.load_state_dict(model.state_dict())
    second.load_state_dict(through_a_file(optimizer.state_dict()))
    kept = variant.dtypes(torch.float32).keys() | variant.owner_state

    def curvature(opt: Any) -> list[dict[str, Any]]:
        return [{key: state[key] for key in kept & state.keys()} for state in opt.state.values()]

    assert_identical(curvature(second), curvature(optimizer))
    for state in second.state.values():
        assert {key: state[key].dtype for key in state.keys() & variant.dtypes(torch.float32).keys()} == {
            key: dtype for key, dtype in variant.dtypes(torch.float32).items() if key in state
        }
    before = values(other)
    train(other, second, mlp, 3, start=MIDDLE)
    assert all(value.isfinite().all() for value in values(other).values())
    assert any(not torch.equal(value, before[name]) for name, value in values(other).items())


def test_loading_makes_no_memory_common_with_the_dict(method: Method, variant: Variant, mlp: Task) -> None:
    model = mlp.model()
    optimizer = method.build(model, **variant.keywords)
    train(model, optimizer, mlp, 3)
    saved = optimizer.state_dict()
    second = method.build(mlp.model(), **variant.keywords)
    second.load_state_dict(saved)

    def memory(states: Any) -> set[int]:
        return {v.untyped_storage().data_ptr() for s in states for v in s.values() if isinstance(v, Tensor)}

    assert not memory(second.state.values()) & memory(saved["state"].values())


def test_loading_leaves_the_dict_as_it_was(method: Method, variant: Variant, mlp: Task) -> None:
    model = mlp.model(torch.bfloat16)
    optimizer = method.build(model, **variant.keywords)
    train(model, optimizer, mlp, 3)
    saved = through_a_file(optimizer.state_dict())
    before = copy.deepcopy(saved)
    other = mlp.model(torch.bfloat16)
    second = method.build(other, **variant.keywords)
    second.load_state_dict(saved)
    train(other, second, mlp, 3, start=3)
    assert_identical(saved, before)


def test_loading_ones_own_state_changes_nothing(method: Method, variant: Variant, mlp: Task) -> None:
    """Accelerate's wrapper does it at every construction."""
    model, twin = mlp.model(), mlp.model()
    optimizer, silent = method.build(model, **variant.keywords), method.build(twin, **variant.keywords)
    optimizer.load_state_dict(optimizer.state_dict())
    train(model, optimizer, mlp, 3)
    optimizer.load_state_dict(optimizer.state_dict())
    train(model, optimizer, mlp, 3, start=3)
    train(twin, silent, mlp, 6)
    assert_identical(optimizer.state_dict(), silent.state_dict())
    assert_identical(values(model), values(twin))


def test_missing_group_keys_take_their_default(method: Method, mlp: Task) -> None:
    """A checkpoint from before a keyword existed."""
    model = mlp.model()
    optimizer = method.build(model, lr=0.125)
    train(model, optimizer, mlp, 2)
    saved = snapshot(optimizer)
    kept = {"params", "lr"}
    for group in saved["param_groups"]:
        for key in group.keys() - kept:
            del group[key]
    second = method.build(mlp.model(), weight_decay=0.25, maximize=True)
    second.load_state_dict(saved)
    (group,) = second.param_groups
    assert group["lr"] == 0.125
    assert {key: group[key] for key in second.defaults if key not in kept} == {
        key: value for key, value in second.defaults.items() if key not in kept
    }


def test_group_values_come_from_the_checkpoint(method: Method, mlp: Task) -> None:
    model = mlp.model()
    optimizer = method.build(model, lr=0.125, weight_decay=0.5)
    second = method.build(mlp.model(), lr=1.0)
    second.load_state_dict(optimizer.state_dict())
    assert (second.param_groups[0]["lr"], second.param_groups[0]["weight_decay"]) == (0.125, 0.5)


def test_step_as_a_number_is_read_as_a_tensor(method: Method, mlp: Task) -> None:
    model = mlp.model()
    optimizer = method.build(model)
    train(model, optimizer, mlp, 3)
    saved = snapshot(optimizer)
    for state in saved["state"].values():
        state["step"] = float(state["step"])
    other = mlp.model()
    second = method.build(other)
    other.load_state_dict(model.state_dict())
    second.load_state_dict(saved)
    assert_identical(second.state_dict(), optimizer.state_dict())


def test_several_groups_resume_exactly(method: Method, mlp: Task) -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        decayed = [p for p in model.parameters() if p.ndim > 1]
        rest = [p for p in model.parameters() if p.ndim <= 1]
        return [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "lr": 0.01}]

    model, other = mlp.model(), mlp.model()
    optimizer, second = method.build(model, groups(model)), method.build(other, groups(other))
    train(model, optimizer, mlp, MIDDLE)
    other.load_state_dict(through_a_file(model.state_dict()))
    second.load_state_dict(through_a_file(optimizer.state_dict()))
    train(model, optimizer, mlp, 4, start=MIDDLE)
    train(other, second, mlp, 4, start=MIDDLE)
    assert_identical(values(other), values(model))
    assert_identical(second.state_dict(), optimizer.state_dict())


# -- curvature in checkpoints --------------------------------------------------------------------------------------

DERIVED = ("basis_a", "basis_g", "eigenvalues_a", "eigenvalues_g", "inverse_a", "inverse_g")
FACTORS = ("factor_a", "factor_g")


def checkpoint(
    method: Method, variant: Variant, task: Task, curvature: str, steps: int = MIDDLE
) -> tuple[Any, Any, Any]:
    keywords = {**variant.keywords, "checkpoint_curvature": curvature}
    model = task.model()
    optimizer = method.build(model, **keywords)
    train(model, optimizer, task, steps)
    return model, optimizer, keywords


@pytest.mark.option("checkpoint_curvature", "factor_update_steps")
def test_sizes_of_the_three_kinds_of_checkpoint(method: Method, variant: Variant, mlp: Task) -> None:
    full, factors, none = (
        size(checkpoint(method, variant, mlp, kind)[1].state_dict()) for kind in ("all", "factors", "none")
    )
    assert none < factors < full


@pytest.mark.option("checkpoint_curvature", "window_size")
def test_a_checkpoint_holds_all_of_a_window_or_nothing(method: Method, variant: Variant, mlp: Task) -> None:
    sizes, plain = [], {"step", "global_step", "momentum_buffer"}
    for kind in ("all", "none"):
        model, optimizer, _ = checkpoint(method, variant, mlp, kind)
        state = optimizer.state_dict()["state"]
        sizes.append(size(optimizer.state_dict()))
        for index, (name, parameter) in enumerate(model.named_parameters()):
            complete = variant.own_state(parameter) | (variant.owner_state if index == 0 else set())
            assert optimizer.state[parameter].keys() >= complete, name
            if kind == "all":
                assert state[index].keys() >= complete, name
            else:
                assert state[index].keys() <= plain, name
    everything, nothing = sizes
    assert nothing < everything


@pytest.mark.option("checkpoint_curvature", "update_steps")
def test_a_checkpoint_holds_all_rows_or_none(method: Method, variant: Variant, mlp: Task) -> None:
    sizes = []
    for kind in ("all", "none"):
        model, optimizer, _ = checkpoint(method, variant, mlp, kind)
        packed = optimizer.state_dict()
        sizes.append(size(packed))
        for index, (name, parameter) in enumerate(model.named_parameters()):
            assert optimizer.state[parameter].keys() >= packed["state"][index].keys()
            expected = {"step", "momentum_buffer"} | ({"global_step"} if index == 0 else set())
            expected |= variant.first_state if index == 0 else set()  # of a policy, which is no curvature
            if kind == "all" and name.endswith("weight"):
                expected |= variant.of(model.get_submodule(name.rpartition(".")[0]))
            assert packed["state"][index].keys() == expected, name
    everything, nothing = sizes
    assert nothing < everything


@pytest.mark.option("checkpoint_curvature", "factor_update_steps")
def test_what_is_left_out(method: Method, variant: Variant, mlp: Task) -> None:
    derived = variant.owner_state & set(DERIVED)
    for kind, kept, absent in (
        ("all", variant.owner_state, frozenset()),
        ("factors", frozenset(FACTORS), derived),
        ("none", frozenset(), derived | set(FACTORS)),
    ):
        model, optimizer, _ = checkpoint(method, variant, mlp, kind)
        keys = optimizer.state_dict()["state"][0].keys()
        own = variant.own_state(model.first.weight)  # a mean of gradients belongs to the curvature that it is used with
        momentum = {"momentum_buffer"} if variant.heavy_ball else own if kind != "none" else set()
        assert keys >= kept | {"step"} | momentum, kind
        assert not keys & (absent | (own if kind == "none" else set())), kind
        assert optimizer.state[model.first.weight].keys() >= variant.owner_state, kind


@pytest.mark.option("checkpoint_curvature", "factor_update_steps")
def test_factors_alone_are_refreshed_at_load(method: Method, variant: Variant, mlp: Task) -> None:
    """Saved right after a refresh, the next step is the same one up to rounding."""
    model, optimizer, keywords = checkpoint(method, variant, mlp, "factors", steps=1)
    other, second = resumed(method, mlp, model, optimizer, **keywords)
    for names in covered_layers(model).values():
        old, new = optimizer.state[model.get_parameter(names[0])], second.state[other.get_parameter(names[0])]
        assert_identical({key: new[key] for key in FACTORS}, {key: old[key] for key in FACTORS})
        for key in variant.owner_state & {*DERIVED, "scale"} - {"basis_a", "basis_g"}:
            torch.testing.assert_close(new[key], old[key], rtol=1e-9, atol=1e-12)
    train(model, optimizer, mlp, 1, start=1)
    train(other, second, mlp, 1, start=1)
    for name, value in values(model).items():
        torch.testing.assert_close(other.get_parameter(name).detach(), value, rtol=1e-9, atol=1e-12)


@pytest.mark.option("checkpoint_curvature")
def test_without_curvature_momentum_and_counters_survive(method: Method, variant: Variant, mlp: Task) -> None:
    model, optimizer, keywords = checkpoint(method, variant, mlp, "none")
    other, second = resumed(method, mlp, model, optimizer, **keywords)
    for name, old, new in zip(values(model), optimizer.state.values(), second.state.values(), strict=True):
        assert ("momentum_buffer" in old) == (variant.heavy_ball or name not in method.covered(model))
        kept = {key for key in ("momentum_buffer", "step") if key in old}
        assert_identical({key: new[key] for key in kept}, {key: old[key] for key in kept})
    assert second.state[other.first.weight]["global_step"] == MIDDLE
    assert second.state[other.first.weight].keys() >= variant.of(other.first)


@pytest.mark.option("checkpoint_curvature")
def test_without_curvature_the_next_step_estimates_anew(method: Method, variant: Variant, mlp: Task) -> None:
    """The direction after the load is that of a new optimizer at this point, whatever the interval says."""
    keywords = {**variant.keywords, "checkpoint_curvature": "none", **method.bare(lr=0.05)}
    model = mlp.model()
    optimizer = method.build(model, **keywords)
    train(model, optimizer, mlp, MIDDLE)
    other, second = resumed(method, mlp, model, optimizer, **keywords)
    fresh = mlp.model()
    fresh.load_state_dict(model.state_dict())
    train(fresh, method.build(fresh, **keywords), mlp, 1, start=MIDDLE)
    train(other, second, mlp, 1, start=MIDDLE)
    assert_identical(values(other), values(fresh))


@pytest.mark.option("checkpoint_curvature")
def test_partial_checkpoint_loads_twice_alike(method: Method, variant: Variant, mlp: Task) -> None:
    """Loading into an optimizer that has already trained leaves nothing of its own curvature."""
    for kind in method.partial:
        load_twice(method, variant, mlp, kind)


def load_twice(method: Method, variant: Variant, mlp: Task, kind: str) -> None:
    model, optimizer, keywords = checkpoint(method, variant, mlp, kind)
    saved = through_a_file(optimizer.state_dict())
    other, second = resumed(method, mlp, model, optimizer, **keywords)
    used = mlp.model()
    third = method.build(used, **keywords)
    train(used, third, mlp, 3, start=50)
    used.load_state_dict(model.state_dict())
    third.load_state_dict(saved)
    train(other, second, mlp, 4, start=MIDDLE)
    train(used, third, mlp, 4, start=MIDDLE)
    assert_identical(values(used), values(other))


# ---------------------------------------------------------------------------------------------------------------------
# Curvature that is zero, and not missing
# ---------------------------------------------------------------------------------------------------------------------


def test_a_first_step_whose_gradients_are_all_zero_can_be_resumed(method: Method, mlp: Task) -> None:
    model = mlp.model()
    optimizer = method.build(model)
    (mlp.loss(model, 0) * 0).backward()
    optimizer.step()
    other, second = resumed(method, mlp, model, optimizer)
    for net, opt in ((model, optimizer), (other, second)):
        train(net, opt, mlp, 3, start=1)
    assert_identical(values(other), values(model))


class Closed(nn.Module):
    """A branch between two gates that are closed: its layer sees inputs and gradients of zero."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.branch, self.second = nn.Linear(5, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, CLASSES)
        self.entry, self.exit = (nn.Parameter(torch.zeros(())) for _ in range(2))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        return self.second(hidden + self.exit * self.branch(self.entry * hidden))


def test_a_layer_that_sees_zeros_alone_can_be_resumed(method: Method, mlp: Task) -> None:
    task = replace(mlp, build=Closed)
    model = task.model()
    optimizer = method.build(model)
    train(model, optimizer, task, 3)
    assert not model.get_parameter("branch.weight").grad.any()
    other, second = resumed(method, task, model, optimizer)
    for net, opt in ((model, optimizer), (other, second)):
        train(net, opt, task, 2, start=3)
    assert_identical(values(other), values(model))
