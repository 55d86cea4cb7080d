"""deepcopy and pickle of the optimizer, of the model that it hooks, and of both together."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from secondorder import KFAC
from tests.support.methods import Method, Variant
from tests.support.tasks import Task, assert_identical, backward, snapshot, train, values


def through_pickle(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


def through_torch_save(thing: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIERS = pytest.mark.parametrize("copier", [copy.deepcopy, through_pickle, through_torch_save])
Copier = Callable[[Any], Any]


@COPIERS
def test_copied_model_computes_the_same(method: Method, task: Task, copier: Copier) -> None:
    model = task.model()
    optimizer = method.build(model)
    train(model, optimizer, task, 2)
    twin = copier(model)
    assert_identical(values(twin), values(model))
    assert_identical(task.loss(twin, 2).detach(), task.loss(model, 2).detach())


def test_deepcopy_of_the_model_takes_nothing_of_the_optimizer_along(method: Method, mlp: Task) -> None:
    model = mlp.model()
    optimizer = method.build(model)
    train(model, optimizer, mlp, 2)
    memo: dict[int, Any] = {}
    copy.deepcopy(model, memo)
    copied = memo[id(memo)]  # the originals, which deepcopy keeps alive
    assert not [thing for thing in copied if isinstance(thing, torch.optim.Optimizer)]
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    own |= {id(parameter.grad) for parameter in model.parameters()}
    strangers = [tuple(thing.shape) for thing in copied if isinstance(thing, Tensor) and id(thing) not in own]
    assert strangers == []


HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


def hook_tables(model: nn.Module) -> list[dict[int, Any]]:
    return [getattr(module, name) for module in model.modules() for name in HOOKS]


def saved(model: nn.Module) -> bytes:
    file = io.BytesIO()
    torch.save(model, file)
    return file.getvalue()


def test_saved_model_is_that_of_a_model_without_optimizer(method: Method, task: Task) -> None:
    bare, hooked = task.model(), task.model()
    optimizer = method.build(hooked)
    assert saved(hooked) == saved(bare)
    assert b"secondorder" not in pickle.dumps(hooked)
    train(hooked, optimizer, task, 2)
    bare.load_state_dict(hooked.state_dict())
    hooked.zero_grad()
    assert saved(hooked) == saved(bare)


@COPIERS
def test_copied_model_has_no_hook_of_the_optimizer(method: Method, task: Task, copier: Copier) -> None:
    """Nor has it any trace of how they are left out."""
    model = task.model()
    first, second = method.build(model), method.build(model)
    second.detach()  # the other's hooks stay, and stay out of copies
    twin = copier(model)
    assert not [table for table in hook_tables(twin) if table or vars(table)]
    first.detach()
    assert not [table for table in hook_tables(model) if table or vars(table)]


class Noting:
    """A hook of the user's, which a copy keeps."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self.calls += 1


@COPIERS
def test_hooks_of_the_user_stay_in_copies(method: Method, mlp: Task, copier: Copier) -> None:
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


def test_averaged_model_has_no_hook_of_the_optimizer(method: Method, mlp: Task) -> None:
    model = mlp.model()
    method.build(model)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    assert not [table for table in hook_tables(averaged) if table]


def test_hook_that_is_copied_alone_does_nothing(method: Method, mlp: Task) -> None:
    """Where a user copies hooks one by one, what comes out needs neither the optimizer nor this package."""
    model = mlp.model()
    optimizer = method.build(model)
    hooks = [hook for table in hook_tables(model) for hook in table.values() if callable(hook)]
    assert bool(hooks) == method.layerwise
    for hook in hooks:
        assert b"secondorder" not in pickle.dumps(hook)
        for copier in (copy.deepcopy, through_pickle):
            assert copier(hook)(model, (), {}, None) is None
    optimizer.detach()


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


@COPIERS
def test_training_a_copied_model_does_not_reach_the_optimizer(method: Method, mlp: Task, copier: Copier) -> None:
    model, alone = mlp.model(), mlp.model()
    optimizer, undisturbed = method.build(model), method.build(alone)
    train(model, optimizer, mlp, 1)
    train(alone, undisturbed, mlp, 1)
    teacher = copier(model)
    for step in range(1, 6):
        mlp.loss(teacher, 100 + step).backward()
        backward(model, optimizer, mlp, step)
        mlp.loss(teacher, 200 + step).backward()
        optimizer.step()
        train(alone, undisturbed, mlp, 1, start=step)
    assert_identical(optimizer.state_dict(), undisturbed.state_dict())
    assert_identical(values(model), values(alone))


@COPIERS
def test_new_optimizer_on_a_copied_model(method: Method, mlp: Task, copier: Copier) -> None:
    model = mlp.model()
    method.build(model)
    twin, fresh = copier(model), mlp.model()
    train(twin, method.build(twin), mlp, 4)
    train(fresh, method.build(fresh), mlp, 4)
    assert_identical(values(twin), values(fresh))


@COPIERS
def test_copied_optimizer_keeps_state_and_groups(method: Method, variant: Variant, mlp: Task, copier: Copier) -> None:
    model = mlp.model()
    optimizer = method.build(model, **variant.keywords)
    train(model, optimizer, mlp, 3)
    twin = copier(optimizer)
    assert type(twin) is type(optimizer)
    assert_identical(snapshot(twin), snapshot(optimizer))
    assert {key: twin.defaults[key] for key in optimizer.defaults} == optimizer.defaults  # torch adds a key of its own
    assert repr(twin) == repr(optimizer)


@pytest.mark.option("module", "skip_layers")
@COPIERS
def test_copied_optimizer_asks_for_attach_before_it_steps(method: Method, mlp: Task, copier: Copier) -> None:
    model = mlp.model()
    optimizer = method.build(model)
    train(model, optimizer, mlp, 2)
    twin = copier(optimizer)
    before = snapshot(twin)
    for parameter in twin.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(RuntimeError, match="attach"):
        twin.step()
    assert_identical(snapshot(twin), before)


@pytest.mark.option("window_size")
@COPIERS
def test_copied_window_goes_on_without_attach(method: Method, variant: Variant, mlp: Task, copier: Copier) -> None:
    """From the parameters alone; with a module `attach` does no harm either, see below."""
    model = mlp.model()
    optimizer = method.build(model, model.parameters(), **variant.keywords)
    train(model, optimizer, mlp, 5)
    other, second = copier((model, optimizer))
    assert set(second.param_groups[0]["params"]) == set(other.parameters())
    train(model, optimizer, mlp, 5, start=5)
    train(other, second, mlp, 5, start=5)
    assert_identical(values(other), values(model))
    assert_identical(second.state_dict(), optimizer.state_dict())


@pytest.mark.option("window_size")
def test_copy_of_a_window_shares_no_memory(method: Method, variant: Variant, mlp: Task) -> None:
    model = mlp.model()
    optimizer = method.build(model, **variant.keywords)
    train(model, optimizer, mlp, 3)
    other, second = copy.deepcopy((model, optimizer))
    before, parameters = snapshot(optimizer), values(model)
    train(other, second, mlp, 3, start=3)
    assert_identical(snapshot(optimizer), before)
    assert_identical(values(model), parameters)


@pytest.mark.option("module", "skip_layers")
@COPIERS
def test_attached_copy_goes_on_exactly(method: Method, variant: Variant, mlp: Task, copier: Copier) -> None:
    go_on_with_a_copy(method, mlp, copier, **variant.keywords)


@pytest.mark.option("module")
def test_attached_copy_goes_on_exactly_on_every_task(method: Method, task: Task) -> None:
    go_on_with_a_copy(method, task, copy.deepcopy)


def go_on_with_a_copy(method: Method, task: Task, copier: Copier, **keywords: Any) -> None:
    model = task.model()
    optimizer = method.build(model, **keywords)
    train(model, optimizer, task, 5)
    other, second = copier((model, optimizer))
    second.attach(other)
    assert set(second.param_groups[0]["params"]) == set(other.parameters())
    train(model, optimizer, task, 5, start=5)
    train(other, second, task, 5, start=5)
    assert_identical(values(other), values(model))
    assert_identical(second.state_dict(), optimizer.state_dict())


@pytest.mark.option("module")
def test_copy_and_original_are_independent(method: Method, mlp: Task) -> None:
    model = mlp.model()
    optimizer = method.build(model)
    train(model, optimizer, mlp, 3)
    other, second = copy.deepcopy((model, optimizer))
    second.attach(other)
    before, parameters = snapshot(optimizer), values(model)
    train(other, second, mlp, 3, start=3)
    assert_identical(snapshot(optimizer), before)
    assert_identical(values(model), parameters)


@COPIERS
def test_copies_have_the_state_that_was_put_in_the_place_of_the_old_one(
    method: Method, mlp: Task, copier: Copier
) -> None:
    model = mlp.model()
    optimizer = method.build(model)
    train(model, optimizer, mlp, 3)
    first = next(model.parameters())
    optimizer.state = copy.copy(optimizer.state)
    optimizer.state[first] = {**optimizer.state[first], "step": torch.tensor(77.0)}
    copied = copier(optimizer)
    assert copied.state[copied.param_groups[0]["params"][0]]["step"] == 77.0


def test_observe_and_mask_are_members_of_every_method(method: Method, mlp: Task) -> None:
    model = mlp.model()
    optimizer = method.build(model)
    with optimizer.mask(None):
        outputs = model(mlp.batch(0)[0])
    optimizer.observe(outputs, "gaussian")
    with pytest.raises(ValueError, match="likelihood"):
        optimizer.observe(outputs, "no such likelihood")
    with pytest.raises(TypeError, match="mask takes a bool or integer tensor"), optimizer.mask(torch.ones(2, 2)):
        pass
    assert optimizer.blocks
    optimizer.close()


@pytest.mark.option("module", "skip_layers")
def test_attach_refuses_a_module_without_the_parameters(method: Method, mlp: Task) -> None:
    """Hooks on a module whose layers hold none of the optimizer's parameters would silently train by the fallback."""
    model = mlp.model()
    optimizer = copy.deepcopy(method.build(model))
    with pytest.raises((ValueError, RuntimeError), match="attach"):
        optimizer.attach(nn.Sequential(nn.Linear(2, 2)))


def test_public_attributes_survive_deepcopy(method: Method, mlp: Task) -> None:
    optimizer = method.build(mlp.model())
    optimizer.remark = "mine"
    twin = copy.deepcopy(optimizer)

    def public(thing: Any) -> set[str]:
        return {name for name in vars(thing) if not name.startswith("_")}

    assert public(twin) >= public(optimizer) - {"remark"}


def test_optimizer_wrapped_by_a_scheduler_is_copied(method: Method, mlp: Task) -> None:
    model = mlp.model()
    optimizer = method.build(model)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train(model, optimizer, mlp, 1)
    assert_identical(snapshot(copy.deepcopy(optimizer)), snapshot(optimizer))
    assert_identical(snapshot(through_pickle(optimizer)), snapshot(optimizer))
