"""deepcopy, pickle and `torch.save` of the optimizer, of the model that it hooks, and of both together."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from secondorder import KFAC
from tests.support.checkpoints import (
    COPIERS,
    COPIES,
    Build,
    Pair,
    Way,
    assert_goes_on,
    assert_same_run,
    builder,
    steps_of,
    through_pickle,
)
from tests.support.methods import Method, Variant
from tests.support.tasks import TRANSFORMER, Task, assert_identical, backward, snapshot, train, values

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


def hook_tables(model: nn.Module) -> list[dict[int, Any]]:
    return [getattr(module, name) for module in model.modules() for name in HOOKS]


# ---------------------------------------------------------------------------------------------------------------------
# The model alone
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.cover(copier=COPIERS)
def test_a_copied_model_computes_the_same_without_any_hook(method: Method, task: Task, copier: Any) -> None:
    """Nor has it any trace of how hooks are left out."""
    model, first = builder(method, task)()
    second = method.build(model)
    train(model, first, task, 2)
    second.detach()  # the other's hooks stay, and stay out of copies
    twin = copier(model)
    assert_identical(values(twin), values(model))
    assert_identical(task.loss(twin, 2).detach(), task.loss(model, 2).detach())
    assert not [table for table in hook_tables(twin) if table or vars(table)]
    averaged = torch.optim.swa_utils.AveragedModel(model)
    assert not [table for table in hook_tables(averaged) if table]
    first.detach()
    assert not [table for table in hook_tables(model) if table or vars(table)]


def test_deepcopy_of_the_model_takes_nothing_of_the_optimizer_along(method: Method, mlp: Task) -> None:
    model, optimizer = builder(method, mlp)()
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
    bare, (hooked, optimizer) = task.model(), builder(method, task)()
    assert saved(hooked) == saved(bare)
    assert b"secondorder" not in pickle.dumps(hooked)
    train(hooked, optimizer, task, 2)
    bare.load_state_dict(hooked.state_dict())
    hooked.zero_grad()
    assert saved(hooked) == saved(bare)


WITHOUT_US = """
import sys
sys.modules["secondorder"] = None  # cannot be imported
import torch
model = torch.load(sys.argv[1], weights_only=False)
print(model(torch.ones(2, 4)).shape)
"""


def test_saved_model_loads_without_this_package(tmp_path: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    KFAC(model, lr=0.1)
    torch.save(model, tmp_path / "model.pt")
    script = [sys.executable, "-c", WITHOUT_US, str(tmp_path / "model.pt")]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["torch.Size([2,", "3])"], done.stderr


class Noting:
    """A hook of the user's, which a copy keeps."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self.calls += 1


@pytest.mark.cover(copier=COPIERS)
def test_hooks_of_the_user_stay_in_copies(method: Method, mlp: Task, copier: Any) -> None:
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
    for handle in handles:  # made before and after the optimizer: both still find their hook
        handle.remove()
    assert not [hook for table in hook_tables(model) for hook in table.values() if isinstance(hook, Noting)]
    optimizer.detach()
    assert not [table for table in hook_tables(model) if table]


def test_hook_that_is_copied_alone_does_nothing(method: Method, mlp: Task) -> None:
    """Where a user copies hooks one by one, what comes out needs neither the optimizer nor this package."""
    model, optimizer = builder(method, mlp)()
    hooks = [hook for table in hook_tables(model) for hook in table.values() if callable(hook)]
    assert bool(hooks) == method.layerwise
    for hook in hooks:
        assert b"secondorder" not in pickle.dumps(hook)
        for copier in (copy.deepcopy, through_pickle):
            assert copier(hook)(model, (), {}, None) is None
    optimizer.detach()


@pytest.mark.cover(copier=COPIERS)
def test_training_a_copied_model_does_not_reach_the_optimizer(method: Method, mlp: Task, copier: Any) -> None:
    (model, optimizer), (alone, undisturbed) = builder(method, mlp)(), builder(method, mlp)()
    train(model, optimizer, mlp, 1)
    train(alone, undisturbed, mlp, 1)
    teacher = copier(model)
    for step in range(1, 6):
        mlp.loss(teacher, 100 + step).backward()
        backward(model, optimizer, mlp, step)
        mlp.loss(teacher, 200 + step).backward()
        optimizer.step()
        train(alone, undisturbed, mlp, 1, start=step)
    assert_same_run((model, optimizer), (alone, undisturbed))


@pytest.mark.cover(copier=COPIERS)
def test_new_optimizer_on_a_copied_model(method: Method, mlp: Task, copier: Any) -> None:
    twin = copier(builder(method, mlp)()[0])
    fresh, other = builder(method, mlp)()
    train(twin, method.build(twin), mlp, 4)
    train(fresh, other, mlp, 4)
    assert_identical(values(twin), values(fresh))


# ---------------------------------------------------------------------------------------------------------------------
# The optimizer
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.cover(way=COPIES)
def test_attached_copy_goes_on_exactly(method: Method, variant: Variant, task: Task, way: Way) -> None:
    model, optimizer = assert_goes_on(builder(method, task, **variant.keywords), steps_of(task), 5, 10, way)
    assert set(optimizer.param_groups[0]["params"]) == set(model.parameters())


@pytest.mark.option("window_size")
@pytest.mark.cover(copier=COPIERS)
def test_copied_window_goes_on_without_attach(method: Method, variant: Variant, mlp: Task, copier: Any) -> None:
    """From the parameters alone; with a module `attach` does no harm either, see above."""

    def build() -> Pair:
        model = mlp.model()
        return model, method.build(model, model.parameters(), **variant.keywords)

    assert_goes_on(build, steps_of(mlp), 5, 10, lambda build, *pair: copier(pair))


def test_copy_and_original_are_independent(method: Method, variant: Variant, mlp: Task) -> None:
    model, optimizer = builder(method, mlp, **variant.keywords)()
    train(model, optimizer, mlp, 3)
    other, second = copy.deepcopy((model, optimizer))
    second.attach(other)
    before, parameters = snapshot(optimizer), values(model)
    train(other, second, mlp, 3, start=3)
    assert_identical(snapshot(optimizer), before)
    assert_identical(values(model), parameters)


@pytest.mark.cover(copier=COPIERS)
def test_copied_optimizer_keeps_state_groups_and_attributes(method: Method, mlp: Task, copier: Any) -> None:
    model, optimizer = builder(method, mlp)()
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # which wraps `step`
    train(model, optimizer, mlp, 3)
    optimizer.remark = "mine"
    twin = copier(optimizer)
    assert type(twin) is type(optimizer)
    assert_identical(snapshot(twin), snapshot(optimizer))
    assert {key: twin.defaults[key] for key in optimizer.defaults} == optimizer.defaults  # torch adds a key of its own
    assert repr(twin) == repr(optimizer)

    def public(thing: Any) -> set[str]:
        return {name for name in vars(thing) if not name.startswith("_")}

    assert public(twin) >= public(optimizer) - {"remark", "step"}  # a scheduler wrapped it


@pytest.mark.cover(copier=COPIERS)
def test_copies_have_the_state_that_was_put_in_the_place_of_the_old_one(method: Method, mlp: Task, copier: Any) -> None:
    model, optimizer = builder(method, mlp)()
    train(model, optimizer, mlp, 3)
    first = next(model.parameters())
    optimizer.state = copy.copy(optimizer.state)
    optimizer.state[first] = {**optimizer.state[first], "step": torch.tensor(77.0)}
    copied = copier(optimizer)
    assert copied.state[copied.param_groups[0]["params"][0]]["step"] == 77.0


@pytest.mark.option("skip_layers")
@pytest.mark.cover(copier=COPIERS)
def test_a_copy_neither_steps_nor_loads_nor_changes_before_attach(method: Method, mlp: Task, copier: Any) -> None:
    model, optimizer = builder(method, mlp)()
    train(model, optimizer, mlp, 3)
    earlier = snapshot(optimizer)
    train(model, optimizer, mlp, 1, start=3)
    second = copier(optimizer)
    for parameter in second.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(RuntimeError, match="attach"):
        second.step()
    with pytest.raises(RuntimeError, match="attach"):
        second.load_state_dict(earlier)
    assert_identical(snapshot(second), snapshot(optimizer))
    second.attach(copier(model))
    second.load_state_dict(earlier)
    assert_identical(snapshot(second), earlier)


@pytest.mark.option("window_size")
@pytest.mark.cover(copier=COPIERS)
def test_a_copy_of_a_window_loads_at_once(method: Method, variant: Variant, mlp: Task, copier: Any) -> None:
    model, optimizer = builder(method, mlp, **variant.keywords)()
    train(model, optimizer, mlp, 3)
    earlier, parameters = snapshot(optimizer), values(model)
    train(model, optimizer, mlp, 3, start=3)
    other, second = copier((model, optimizer))
    second.load_state_dict(earlier)
    other.load_state_dict(parameters)
    train(other, second, mlp, 3, start=3)
    assert_same_run((other, second), (model, optimizer))


@pytest.mark.option("skip_layers")
def test_attach_refuses_a_module_without_the_parameters(method: Method, mlp: Task) -> None:
    """Hooks on a module whose layers hold none of the optimizer's parameters would silently train by the fallback."""
    optimizer = copy.deepcopy(method.build(mlp.model()))
    with pytest.raises((ValueError, RuntimeError), match="attach"):
        optimizer.attach(nn.Sequential(nn.Linear(2, 2)))


# ---------------------------------------------------------------------------------------------------------------------
# Choices of the constructor
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.option("skip_layers")
@pytest.mark.cover(generations=[1, 2], copier=COPIERS)
def test_a_layer_left_out_as_a_module_stays_out_of_copies(
    method: Method, mlp: Task, copier: Any, generations: int
) -> None:
    def build() -> Pair:
        model = mlp.model()
        return model, method.build(model, skip_layers=[model.first])

    def copied(build: Build, model: nn.Module, optimizer: Any) -> Pair:
        for _ in range(generations):  # apart: together, the module in the rule would be the copy's own
            model, optimizer = copier(model), copier(optimizer)
        optimizer.attach(model)
        assert set(optimizer.blocks) == {"second"}
        return model, optimizer

    assert_goes_on(build, steps_of(mlp), 2, 5, copied)


@pytest.mark.option("skip_norm_layers", "skip_biases")
@pytest.mark.cover(attached=[False, True], copier=COPIERS)
def test_what_a_window_leaves_out_stays_out_of_copies(method: Method, copier: Any, attached: bool) -> None:
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
def test_a_copy_remembers_that_the_damping_mode_was_left_open(method: Method, mlp: Task, copier: Any) -> None:
    model = mlp.model()
    optimizer = method.cls(model.first.parameters(), module=model)
    other, second = copier((model, optimizer))
    second.attach(other)
    second.add_param_group({"params": list(other.second.parameters()), "damping": 1e-3})
    second.add_param_group({"params": [other.scale.gain]})
    modes = [(group["damping"], group["damping_mode"]) for group in second.param_groups]
    relative = (optimizer.defaults["damping"], "relative")
    assert modes == [relative, (1e-3, "absolute"), relative]
