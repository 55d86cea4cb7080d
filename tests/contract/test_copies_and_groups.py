"""What survives a copy, what a group may say for itself, and the names that layers go by."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW

from tests.support.methods import Method, Variant
from tests.support.tasks import (
    TRANSFORMER,
    Shadow,
    Task,
    assert_changed,
    assert_identical,
    backward,
    snapshot,
    train,
    values,
)


def through_pickle(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


COPIERS = pytest.mark.parametrize("copier", [copy.deepcopy, through_pickle])
Copier = Callable[[Any], Any]


def through_safe_load(thing: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# ---------------------------------------------------------------------------------------------------------------------
# Copies
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.option("module", "skip_layers")
@COPIERS
@pytest.mark.parametrize("generations", [1, 2])
def test_a_layer_left_out_as_a_module_stays_out_of_copies(
    method: Method, mlp: Task, copier: Copier, generations: int
) -> None:
    model = mlp.model()
    optimizer = method.build(model, skip_layers=[model.first])
    train(model, optimizer, mlp, 2)
    other, second = model, optimizer
    for _ in range(generations):
        other, second = copier(other), copier(second)  # apart: together, the module in the rule would be the copy's own
    second.attach(other)
    assert set(second.blocks) == set(optimizer.blocks) == {"second"}
    train(model, optimizer, mlp, 3, start=2)
    train(other, second, mlp, 3, start=2)
    assert_identical(values(other), values(model))


@pytest.mark.option("skip_norm_layers", "skip_biases")
@COPIERS
@pytest.mark.parametrize("attached", [False, True])
def test_what_a_window_leaves_out_stays_out_of_copies(method: Method, copier: Copier, attached: bool) -> None:
    model = TRANSFORMER.model()
    optimizer = method.build(model, skip_norm_layers=True, skip_biases=True)
    train(model, optimizer, TRANSFORMER, 3)
    other, second = copier((model, optimizer))
    if attached:
        second.attach(other)
    assert [state.keys() for state in second.state.values()] == [state.keys() for state in optimizer.state.values()]
    train(model, optimizer, TRANSFORMER, 4, start=3)
    train(other, second, TRANSFORMER, 4, start=3)
    assert_identical(values(other), values(model))
    assert second.describe().count("fallback") == optimizer.describe().count("fallback")


@pytest.mark.option("module", "skip_layers")
@COPIERS
def test_a_copy_neither_loads_nor_changes_before_attach(method: Method, mlp: Task, copier: Copier) -> None:
    model = mlp.model()
    optimizer = method.build(model)
    train(model, optimizer, mlp, 3)
    saved = snapshot(optimizer)
    train(model, optimizer, mlp, 1, start=3)
    second = copier(optimizer)
    assert_identical(snapshot(second), snapshot(optimizer))
    with pytest.raises(RuntimeError, match="attach"):
        second.load_state_dict(saved)
    assert_identical(snapshot(second), snapshot(optimizer))
    other = copier(model)
    second.attach(other)
    second.load_state_dict(saved)
    assert_identical(snapshot(second), saved)


@pytest.mark.option("window_size")
@COPIERS
def test_a_copy_of_a_window_loads_at_once(method: Method, variant: Variant, mlp: Task, copier: Copier) -> None:
    model = mlp.model()
    optimizer = method.build(model, **variant.keywords)
    train(model, optimizer, mlp, 3)
    saved, parameters = snapshot(optimizer), values(model)
    train(model, optimizer, mlp, 3, start=3)
    other, second = copier((model, optimizer))
    second.load_state_dict(saved)
    other.load_state_dict(parameters)
    assert_identical(snapshot(second), saved)
    train(other, second, mlp, 3, start=3)
    assert_identical(values(other), values(model))
    assert_identical(second.state_dict(), optimizer.state_dict())


@pytest.mark.option("damping_mode", "factor_update_steps")
@COPIERS
def test_a_copy_remembers_that_the_damping_mode_was_left_open(method: Method, mlp: Task, copier: Copier) -> None:
    model = mlp.model()
    optimizer = method.cls(model.first.parameters(), module=model)
    other, second = copier((model, optimizer))
    second.attach(other)
    second.add_param_group({"params": list(other.second.parameters()), "damping": 1e-3})
    second.add_param_group({"params": [other.scale.gain]})
    modes = [(group["damping"], group["damping_mode"]) for group in second.param_groups]
    relative = (optimizer.defaults["damping"], "relative")
    assert modes == [relative, (1e-3, "absolute"), relative]


# ---------------------------------------------------------------------------------------------------------------------
# Options of groups
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.option("damping_mode", "factor_update_steps")
def test_damping_is_relative_until_a_number_is_given(method: Method, mlp: Task) -> None:
    def found(**keywords: Any) -> tuple[float, str]:
        (group,) = method.cls(mlp.model(), **keywords).param_groups
        return group["damping"], group["damping_mode"]

    assert found()[1] == "relative"
    assert found(damping=1e-3) == (1e-3, "absolute")
    assert found(damping_mode="relative") == found()
    assert found(damping_mode="absolute")[1] == "absolute"
    assert found(damping=2.0, damping_mode="relative") == (2.0, "relative")


@pytest.mark.option("damping_mode")
def test_damping_is_absolute_until_the_mode_is_given(method: Method, mlp: Task) -> None:
    """Where a default of its own says so: not with factors."""
    if method.accepts("factor_update_steps"):
        return
    default = inspect.signature(method.cls).parameters["damping"].default

    def found(**keywords: Any) -> tuple[float, str]:
        (group,) = method.cls(mlp.model(), **keywords).param_groups
        return group["damping"], group["damping_mode"]

    assert found() == (default, "absolute")
    assert found(damping=1e-3) == (1e-3, "absolute")
    assert found(damping_mode="relative") == (default, "relative")
    assert found(damping=2.0, damping_mode="relative") == (2.0, "relative")


@pytest.mark.option("damping_mode", "skip_layers")
def test_damping_of_a_group_carries_its_own_mode(method: Method, mlp: Task) -> None:
    def found(group: dict[str, Any], **keywords: Any) -> tuple[float, str]:
        model = mlp.model()
        groups = [{"params": model.first.parameters()}, {"params": model.second.parameters(), **group}]
        at_once = method.cls(groups, module=model, **keywords).param_groups[1]
        other = mlp.model()
        late = method.cls(other.first.parameters(), module=other, **keywords)
        late.add_param_group({"params": other.second.parameters(), **group})
        pairs = [(g["damping"], g["damping_mode"]) for g in (at_once, late.param_groups[1])]
        assert pairs[0] == pairs[1]
        return pairs[0]

    assert found({"damping": 1e-3}) == (1e-3, "absolute")
    assert found({"damping": 2.0, "damping_mode": "relative"}) == (2.0, "relative")
    assert found({"damping": 2.0}, damping_mode="relative") == (2.0, "relative")
    assert found({"damping": 0.5}, damping=0.1) == (0.5, "absolute")
    assert found({}, damping=0.1) == (0.1, "absolute")


@pytest.mark.option("damping_mode", "factor_update_steps", "fallback")
def test_none_in_a_group_means_unset(method: Method, mlp: Task) -> None:
    model = mlp.model()
    optimizer = method.cls(model.first.parameters(), module=model)
    unset = {"damping": None, "damping_mode": None, "fallback": None}
    optimizer.add_param_group({"params": list(model.second.parameters()), **unset})
    optimizer.add_param_group({"params": [model.scale.gain], **unset, "damping": 1e-3})
    first, second, third = optimizer.param_groups
    assert {key: second[key] for key in unset} == {key: first[key] for key in unset}
    assert {key: third[key] for key in unset} == {"damping": 1e-3, "damping_mode": "absolute", "fallback": "sgd"}
    train(model, optimizer, mlp, 2)


@pytest.mark.option("fallback", "graft")
def test_an_unset_fallback_of_a_group_follows_its_graft(method: Method, mlp: Task) -> None:
    model = mlp.model()
    optimizer = method.build(model, model.first.parameters(), **method.apart)
    optimizer.add_param_group({"params": list(model.second.parameters()), "graft": "adam", "fallback": None})
    optimizer.add_param_group({"params": [model.scale.gain], "graft": "adam"})
    assert [group["fallback"] for group in optimizer.param_groups] == ["sgd", "adam", "adam"]
    before = values(model)
    train(model, optimizer, mlp, 3)
    assert_changed(model, before)


@pytest.mark.option("checkpoint_curvature", "skip_layers")
@pytest.mark.parametrize(
    ("first", "second"), [("all", "none"), ("none", "all"), ("none", "factors"), ("factors", "all")]
)
def test_each_group_saves_the_curvature_that_it_asks_for(method: Method, mlp: Task, first: str, second: str) -> None:
    if not {first, second} <= {"all", *method.partial}:
        return

    def build() -> tuple[nn.Module, Any]:
        model = mlp.model()
        rest = [*model.scale.parameters(), *model.second.parameters()]
        groups = [
            {"params": list(model.first.parameters()), "checkpoint_curvature": first},
            {"params": rest, "checkpoint_curvature": second},
        ]
        return model, method.build(model, groups)

    model, optimizer = build()
    train(model, optimizer, mlp, 5)
    saved = snapshot(optimizer)
    kinds = {key: entry.kind for key, entry in optimizer.preconditioner.table.entries.items()}
    complete = {kinds[key] for key in method.variants[0].owner_state}
    expected = {"all": complete, "factors": complete - {"second_order"}, "none": set()}
    for owner, kept in ((0, first), (3, second)):
        assert {kinds[key] for key in saved["state"][owner] if key in kinds} == expected[kept]
    other, third = build()
    other.load_state_dict(model.state_dict())
    third.load_state_dict(through_safe_load(saved))
    for name, kept in (("first", first), ("second", second)):
        ours, theirs = (o.state[m.get_submodule(name).weight] for o, m in ((third, other), (optimizer, model)))
        assert ours.keys() == theirs.keys()
        if kept != "none":
            assert_identical(dict(ours), dict(theirs))
        else:
            assert (ours["factor_updates"], ours["refreshes"]) == (0, 0)
    before = values(other)
    train(other, third, mlp, 3, start=5)
    assert_changed(other, before)


@pytest.mark.option("checkpoint_curvature", "window_size")
def test_each_group_saves_the_window_that_it_asks_for(method: Method, mlp: Task) -> None:
    def build() -> tuple[nn.Module, Any]:
        model = mlp.model()
        groups = split_like(model)[:2]
        groups[1]["checkpoint_curvature"] = "none"
        return model, method.build(model, groups, **method.apart)

    model, optimizer = build()
    train(model, optimizer, mlp, 5)
    saved = snapshot(optimizer)
    assert saved["state"][0].keys() >= {"gram", method.landmark}
    assert not saved["state"][2].keys() & {"gram", method.landmark}
    other, third = build()
    other.load_state_dict(model.state_dict())
    third.load_state_dict(through_safe_load(saved))
    for name in ("first.weight", "first.bias"):
        assert_identical(dict(third.state[other.get_parameter(name)]), dict(optimizer.state[model.get_parameter(name)]))
    state = third.state[other.second.weight]
    assert state.keys() == optimizer.state[model.second.weight].keys()
    assert int(state["count"]) == 0
    before = values(other)
    train(other, third, mlp, 3, start=5)
    assert all(torch.equal(value, before[name]) == (name == "scale.gain") for name, value in values(other).items())


@pytest.mark.option("damping", "fallback_betas")
def test_numpy_numbers_become_plain_ones(method: Method, mlp: Task) -> None:
    betas = (np.float64(0.9), np.float64(0.99))
    numbers = {"lr": np.float64(0.1), "damping": np.float64(0.5), "fallback_betas": betas, "fallback": "adamw"}
    model, twin = mlp.model(), mlp.model()
    optimizer = method.build(model, model.first.parameters(), **numbers)
    optimizer.add_param_group({"params": list(model.second.parameters()), "lr": np.float64(0.05), **numbers})
    optimizer.add_param_group({"params": [model.scale.gain], "weight_decay": np.float64(0.01)})
    train(model, optimizer, mlp, 2)
    saved = through_safe_load(optimizer.state_dict())
    assert_identical(saved, optimizer.state_dict())
    second = method.build(twin, [{"params": list(group["params"])} for group in split_like(twin)])
    second.load_state_dict(saved)
    assert_identical(snapshot(second), saved)


def split_like(model: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": model.first.parameters()},
        {"params": model.second.parameters()},
        {"params": [model.scale.gain]},
    ]


def test_betas_given_as_a_list_of_numpy_numbers(method: Method, mlp: Task) -> None:
    model = mlp.model()
    optimizer = method.build(model, fallback_betas=[np.float64(0.9), np.float64(0.99)], fallback="adamw")
    train(model, optimizer, mlp, 1)
    assert_identical(through_safe_load(optimizer.state_dict()), optimizer.state_dict())


@pytest.mark.option("module", "fallback")
def test_an_unnamed_parameter_may_join_named_ones(method: Method, mlp: Task) -> None:
    """An optimizer of a module names its parameters, and torch wants names for all or for none."""
    model = mlp.model()
    optimizer = method.build(model, momentum=0.0, fallback="sgd")
    stranger = nn.Parameter(torch.ones(3, 2, dtype=torch.float64))
    optimizer.add_param_group({"params": [stranger], "lr": 0.5})
    backward(model, optimizer, mlp, 0)
    stranger.grad = torch.full_like(stranger, 0.25)
    optimizer.step()
    if method.layerwise:  # which knows no layer of it
        assert_identical(stranger.detach(), torch.full_like(stranger, 1 - 0.5 * 0.25))
    assert (stranger < 1).any()
    assert len(optimizer.param_groups[1]["param_names"]) == 1
    other = mlp.model()
    second = method.build(other, momentum=0.0, fallback="sgd")
    second.add_param_group({"params": nn.Parameter(stranger.detach().clone()), "lr": 0.5})
    second.load_state_dict(snapshot(optimizer))
    assert_identical(snapshot(second), snapshot(optimizer))


def test_a_set_of_parameters_is_refused_as_torch_does(method: Method, mlp: Task) -> None:
    model, stranger = mlp.model(), nn.Parameter(torch.ones(2, dtype=torch.float64))
    reference = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(TypeError) as theirs:
        reference.add_param_group({"params": {stranger}})
    for params in (None, model.parameters()):
        optimizer = method.build(model, params)
        with pytest.raises(TypeError) as ours:
            optimizer.add_param_group({"params": {stranger}})
        assert str(ours.value) == str(theirs.value)
        assert len(optimizer.param_groups) == 1


# ---------------------------------------------------------------------------------------------------------------------
# Names and wrappers
# ---------------------------------------------------------------------------------------------------------------------


class Namesake(nn.Module):
    """A child that is called as data-parallel wrappers call theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 5)
        self.module = nn.Module()
        self.module.fc = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.module.fc(torch.tanh(self.fc(x)))


def namesake() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Namesake().double()


@pytest.mark.option("module", "skip_layers")
def test_a_child_called_module_keeps_its_name(method: Method) -> None:
    model = namesake()
    optimizer = method.build(model)
    assert list(optimizer.blocks) == ["fc", "module.fc"]
    x = torch.randn(6, 4, dtype=torch.float64)
    F.cross_entropy(model(x), torch.arange(6) % 3).backward()
    optimizer.step()
    assert optimizer.dense_curvature("fc").shape == (25, 25)
    assert optimizer.dense_curvature("module.fc").shape == (18, 18)
    saved, other = snapshot(optimizer), namesake()
    second = method.build(other)
    second.load_state_dict(saved)
    assert_identical(snapshot(second), saved)


@pytest.mark.option("module", "skip_layers")
@pytest.mark.parametrize(("rule", "left"), [("fc", "module.fc"), ("module.fc", "fc")])
def test_a_name_leaves_out_the_layer_of_that_name_alone(method: Method, rule: str, left: str) -> None:
    optimizer = method.build(namesake(), skip_layers=rule)
    assert list(optimizer.blocks) == [left]


@pytest.mark.option("module", "skip_layers")
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
@pytest.mark.parametrize("wrapped", [False, True], ids=["bare", "compiled"])
def test_wrapper_prefixes_may_be_given_or_left_out(method: Method, mlp: Task, prefix: str, wrapped: bool) -> None:
    model = mlp.model()
    outer = torch.compile(model, backend="eager") if wrapped else model
    optimizer = method.build(outer, skip_layers=f"{prefix}second")
    assert list(optimizer.blocks) == ["first"]
    train(model, optimizer, mlp, 1)
    assert_identical(optimizer.dense_curvature(f"{prefix}first"), optimizer.dense_curvature("first"))
    with pytest.raises(ValueError, match="no block is named"):
        optimizer.dense_curvature(f"{prefix}second")


@pytest.mark.option("module", "skip_layers")
@pytest.mark.parametrize("inside", [False, True], ids=["root", "inside"])
def test_data_parallel_on_several_devices_is_refused_by_name(method: Method, mlp: Task, inside: bool) -> None:
    model = mlp.model()
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    wrapper = nn.DataParallel(model)
    wrapper.device_ids = [0, 1]  # as on a machine with two
    wrapped = nn.Sequential(wrapper) if inside else wrapper
    with pytest.raises(NotImplementedError, match=r"DataParallel.*2 devices"):
        method.build(wrapped)
    with pytest.raises(NotImplementedError, match="DataParallel"):
        method.cls(model.parameters(), module=wrapped)
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()) == hooks


def test_data_parallel_without_a_choice_of_devices_changes_nothing(method: Method, mlp: Task) -> None:
    bare, model = mlp.model(), mlp.model()
    wrapped = nn.DataParallel(model)
    wrapped.device_ids = [0]
    method.build(wrapped).close()  # on one device it calls the model itself, as it does on none
    wrapped.device_ids = []
    first, second = method.build(bare), method.build(wrapped)
    train(bare, first, mlp, 4)
    train(wrapped, second, mlp, 4)
    assert_identical(values(model), values(bare))


# ---------------------------------------------------------------------------------------------------------------------
# Rules
# ---------------------------------------------------------------------------------------------------------------------

RULES: dict[str, dict[str, Any]] = {
    "sgd": {},
    "nesterov": {"nesterov": True},
    "decay": {"weight_decay": 0.1},
    "decoupled decay": {"weight_decay": 0.1, "decoupled_weight_decay": True},
    "adamw fallback": {"fallback": "adamw", "fallback_lr": 0.01, "weight_decay": 0.1},
    "inner adamw": {"inner": "adamw"},
    "graft sgd": {"graft": "sgd"},
    "graft adam": {"graft": "adam", "weight_decay": 0.1, "decoupled_weight_decay": True},
    "switched off": {"inv_update_steps": 0},
    "switched off, with rows": {"update_steps": 0},
}


@pytest.mark.parametrize("foreach", [None, True])
@pytest.mark.rules(RULES)
def test_lr_as_a_tensor_of_one_dimension(method: Method, mlp: Task, rule: str, foreach: bool | None) -> None:
    model, twin = mlp.model(), mlp.model()
    keywords = {**RULES[rule], "foreach": foreach}
    optimizer = method.build(model, **{**keywords, "lr": torch.tensor([0.1], dtype=torch.float64)})
    plain = method.build(twin, **{**keywords, "lr": 0.1})
    before = values(model)
    train(model, optimizer, mlp, 4)
    train(twin, plain, mlp, 4)
    assert_changed(model, before)
    for name, value in values(twin).items():
        torch.testing.assert_close(model.get_parameter(name).detach(), value, rtol=1e-11, atol=1e-13)


@pytest.mark.option("inner", "skip_layers")
def test_a_block_without_estimate_follows_adamw_under_inner_adamw(method: Method, task: Task) -> None:
    model = task.model()
    optimizer = method.build(
        model, lr=0.02, inner="adamw", weight_decay=0.1, fallback_betas=(0.8, 0.95), fallback_eps=1e-6
    )
    own = [model.get_parameter(name) for name in sorted(method.covered(model))]
    shadow = Shadow(own, lambda copies: AdamW(copies, 0.02, (0.8, 0.95), 1e-6, 0.1))
    with warnings.catch_warnings(), optimizer.pause_capture():
        warnings.simplefilter("ignore")  # nothing is captured, on purpose
        for step in range(4):
            backward(model, optimizer, task, step)
            shadow.step()
            optimizer.step()
    assert all(optimizer.state[block.owner]["refreshes"] == 0 for block in optimizer.blocks.values())
    shadow.assert_identical()
