"""deepcopy, pickle and `torch.save` of the optimizer, of the model with its hooks, and of both together."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import checkpoints
from tests.support.checkpoints import COPIERS, COPIES, Build, Pair, Way, assert_goes_on, builder, steps_of
from tests.support.methods import Method, Variant
from tests.support.tasks import TRANSFORMER, Task, assert_identical, snapshot, train, values


def hook_tables(model: nn.Module) -> list[dict[int, Any]]:
    kinds = ("_forward_hooks", "_forward_pre_hooks")
    names = (*kinds, *(f"{kind}_with_kwargs" for kind in kinds), "_forward_hooks_always_called")
    return [getattr(module, name) for module in model.modules() for name in names]


# ------------------------------------------------------------------------------------------------------ The model alone
def test_a_copied_model_computes_the_same_without_any_hook(method: Method, task: Task) -> None:
    """It has no trace of the optimizer, and another optimizer trains it like any model."""
    fresh = method.trained(task, 4)
    for copier in COPIERS.values():
        model, first = method.start(task)
        new = copier(model)
        train(new, method.build(new), task, 4)
        assert_identical(values(new), fresh)
        second = method.build(model)
        train(model, first, task, 2)
        second.detach()  # the hooks of the other optimizer remain, and are not copied
        twin = copier(model)
        assert_identical(values(twin), values(model))
        assert_identical(task.loss(twin, 2).detach(), task.loss(model, 2).detach())
        for bare in (twin, torch.optim.swa_utils.AveragedModel(model)):
            assert not [table for table in hook_tables(bare) if table]
        assert not [table for table in hook_tables(twin) if vars(table)]
        first.detach()
        assert not [table for table in hook_tables(model) if table or vars(table)]


def test_deepcopy_of_the_model_copies_nothing_of_the_optimizer(method: Method, mlp: Task) -> None:
    model, optimizer = method.start(mlp)
    train(model, optimizer, mlp, 2)
    memo: dict[int, Any] = {}
    copy.deepcopy(model, memo)
    copied = memo[id(memo)]  # the originals, which deepcopy keeps alive
    assert not [thing for thing in copied if isinstance(thing, torch.optim.Optimizer)]
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    own |= {id(parameter.grad) for parameter in model.parameters()}
    strangers = [tuple(thing.shape) for thing in copied if isinstance(thing, Tensor) and id(thing) not in own]
    assert strangers == []


def saved(model: nn.Module) -> bytes:
    file = io.BytesIO()
    torch.save(model, file)
    return file.getvalue()


def test_saved_model_is_that_of_a_model_without_optimizer(method: Method, task: Task) -> None:
    """So it loads without this package."""
    bare, (hooked, optimizer) = task.model(), method.start(task)
    assert saved(hooked) == saved(bare)
    assert b"secondorder" not in pickle.dumps(hooked)
    train(hooked, optimizer, task, 2)
    bare.load_state_dict(hooked.state_dict())
    hooked.zero_grad()
    assert saved(hooked) == saved(bare)


class Noting:
    """A hook of the user, which a copy keeps."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self.calls += 1


def test_hooks_of_the_user_stay_in_copies(method: Method, mlp: Task) -> None:
    for copier in COPIERS.values():
        model = mlp.model()
        handles = [model.first.register_forward_hook(Noting(), with_kwargs=True)]
        optimizer = method.build(model)
        handles.append(model.register_forward_hook(Noting(), with_kwargs=True, always_call=True))
        twin = copier(model)
        mlp.loss(twin, 0)
        mlp.loss(twin, 1)
        for module in (twin.first, twin):
            assert [(type(hook), hook.calls) for hook in module._forward_hooks.values()] == [(Noting, 2)]
            assert list(module._forward_hooks_with_kwargs) == list(module._forward_hooks)
        assert list(twin._forward_hooks_always_called) == list(twin._forward_hooks)
        train(model, optimizer, mlp, 1)
        for handle in handles:  # registered before and after the construction of the optimizer
            handle.remove()
        assert not [hook for table in hook_tables(model) for hook in table.values() if isinstance(hook, Noting)]
        optimizer.detach()
        assert not [table for table in hook_tables(model) if table]


def test_a_copy_of_a_single_hook_does_nothing(method: Method, mlp: Task) -> None:
    """It needs neither the optimizer nor this package."""
    model, optimizer = method.start(mlp)
    hooks = [hook for table in hook_tables(model) for hook in table.values() if callable(hook)]
    assert bool(hooks) == method.layerwise
    for hook in hooks:
        assert b"secondorder" not in pickle.dumps(hook)
        for copier in (copy.deepcopy, checkpoints.through_pickle):
            assert copier(hook)(model, (), {}, None) is None
    optimizer.detach()


# -------------------------------------------------------------------------------------------------------- The optimizer
@pytest.mark.cover(way=COPIES)
def test_attached_copy_goes_on_exactly(method: Method, variant: Variant, task: Task, way: Way) -> None:
    model, optimizer = assert_goes_on(builder(method, task, **variant.keywords), steps_of(task), 5, 10, way)
    assert set(optimizer.param_groups[0]["params"]) == set(model.parameters())


@pytest.mark.option("window_size")
@pytest.mark.cover(copier=COPIERS)
def test_a_copied_window_continues_and_loads_without_attach(
    method: Method, variant: Variant, mlp: Task, copier: Any
) -> None:
    """It is built from parameters only; `attach` is optional with a module, too."""

    def build() -> Pair:
        model = mlp.model()
        return model, method.build(model, model.parameters(), **variant.keywords)

    def copied(build: Build, *pair: Any) -> Pair:
        earlier, parameters = snapshot(pair[1]), values(pair[0])
        later, (model, optimizer) = copier(pair), copier(pair)
        train(*later, mlp, 3)
        later[1].load_state_dict(earlier)
        later[0].load_state_dict(parameters)
        checkpoints.assert_same_run(later, (model, optimizer))
        return model, optimizer

    assert_goes_on(build, steps_of(mlp), 5, 10, copied)


def test_copied_optimizer_keeps_state_groups_and_attributes(method: Method, mlp: Task) -> None:
    """This includes state that the user has replaced."""
    model, optimizer = method.start(mlp)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps `step`
    train(model, optimizer, mlp, 3)
    optimizer.remark = "mine"
    first = next(model.parameters())
    optimizer.state = copy.copy(optimizer.state)
    optimizer.state[first] = {**optimizer.state[first], "step": torch.tensor(77.0)}

    def public(thing: Any) -> set[str]:
        return {name for name in vars(thing) if not name.startswith("_")}

    for copier in COPIERS.values():
        twin = copier(optimizer)
        assert type(twin) is type(optimizer)
        assert_identical(snapshot(twin), snapshot(optimizer))
        assert twin.state[twin.param_groups[0]["params"][0]]["step"] == 77.0
        assert {key: twin.defaults[key] for key in optimizer.defaults} == optimizer.defaults  # torch adds its own
        assert repr(twin) == repr(optimizer)
        assert public(twin) >= public(optimizer) - {"remark", "step"}  # a scheduler wrapped it


@pytest.mark.option("skip_layers")
@pytest.mark.cover(copier=COPIERS)
def test_a_copy_neither_steps_nor_loads_nor_changes_before_attach(method: Method, mlp: Task, copier: Any) -> None:
    model, optimizer = method.start(mlp, 3)
    earlier = snapshot(optimizer)
    train(model, optimizer, mlp, 1, start=3)
    second = copier(optimizer)
    for parameter in second.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    for act in (second.step, lambda: second.load_state_dict(earlier)):
        with pytest.raises(RuntimeError, match="attach"):
            act()
    assert_identical(snapshot(second), snapshot(optimizer))
    second.attach(copier(model))
    second.load_state_dict(earlier)
    assert_identical(snapshot(second), earlier)


@pytest.mark.option("skip_layers")
def test_attach_refuses_a_module_without_the_parameters(method: Method, mlp: Task) -> None:
    """Otherwise, all parameters would use the fallback without a message."""
    optimizer = copy.deepcopy(method.build(mlp.model()))
    with pytest.raises((ValueError, RuntimeError), match="attach"):
        optimizer.attach(nn.Sequential(nn.Linear(2, 2)))


# ------------------------------------------------------------------------------------------- Options of the constructor
@pytest.mark.option("skip_layers")
@pytest.mark.cover(generations=[1, 2], copier=COPIERS)
def test_copies_skip_a_layer_that_was_passed_as_a_module(
    method: Method, mlp: Task, copier: Any, generations: int
) -> None:
    def build() -> Pair:
        model = mlp.model()
        return model, method.build(model, skip_layers=[model.first])

    def copied(build: Build, model: nn.Module, optimizer: Any) -> Pair:
        for _ in range(generations):  # copied separately, so that the rule does not contain the copied module
            model, optimizer = copier(model), copier(optimizer)
        optimizer.attach(model)
        assert set(optimizer.blocks) == {"second"}
        return model, optimizer

    assert_goes_on(build, steps_of(mlp), 2, 5, copied)


@pytest.mark.option("skip_norm_layers", "skip_biases")
@pytest.mark.cover(attached=[False, True], copier=COPIERS)
def test_copies_of_a_window_leave_out_the_same_parameters(method: Method, copier: Any, attached: bool) -> None:
    def copied(build: Build, model: nn.Module, optimizer: Any) -> Pair:
        other, second = copier((model, optimizer))
        if attached:
            second.attach(other)
        assert [state.keys() for state in second.state.values()] == [state.keys() for state in optimizer.state.values()]
        assert second.describe().count("fallback") == optimizer.describe().count("fallback")
        return other, second

    build = builder(method, TRANSFORMER, skip_norm_layers=True, skip_biases=True)
    assert_goes_on(build, steps_of(TRANSFORMER), 3, 7, copied)


@pytest.mark.option("damping_mode", "factor_update_steps")
@pytest.mark.cover(copier=COPIERS)
def test_a_copy_keeps_an_unset_damping_mode(method: Method, mlp: Task, copier: Any) -> None:
    model = mlp.model()
    optimizer = method.cls(model.first.parameters(), module=model)
    other, second = copier((model, optimizer))
    second.attach(other)
    second.add_param_group({"params": list(other.second.parameters()), "damping": 1e-3})
    second.add_param_group({"params": [other.scale.gain]})
    modes = [(group["damping"], group["damping_mode"]) for group in second.param_groups]
    relative = (optimizer.defaults["damping"], "relative")
    assert modes == [relative, (1e-3, "absolute"), relative]
