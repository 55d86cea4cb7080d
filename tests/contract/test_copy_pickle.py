"""deepcopy and pickle of the optimizer, of the model that it hooks, and of both together."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.contract.methods import Method, Variant
from tests.contract.tasks import Task, assert_identical, backward, snapshot, train, values


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


def test_pickle_of_the_model_takes_nothing_of_the_optimizer_along(method: Method, mlp: Task) -> None:
    bare, hooked = mlp.model(), mlp.model()
    train(hooked, method.build(hooked), mlp, 2)
    hooked.zero_grad()
    per_module = 500  # room for an inert stub, far below the bytes of the factors
    modules = len(list(bare.modules()))
    assert len(pickle.dumps(hooked)) - len(pickle.dumps(bare)) < per_module * modules
    assert method.cls.__name__.encode() not in pickle.dumps(hooked)


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
