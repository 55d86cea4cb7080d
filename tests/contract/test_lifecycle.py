"""Hooks come and go: `detach`, `close`, `attach`, context manager, several optimizers on one module.

A window method has no hooks: the same calls exist and do no harm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.methods import Method, Variant
from tests.support.tasks import Task, assert_identical, backward, snapshot, train, values

pytestmark = pytest.mark.option("module")

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def hooks(model: nn.Module) -> list[int]:
    """The length of every hook table of every module and parameter."""
    counts = [len(getattr(module, name)) for module in model.modules() for name in HOOKS]
    for parameter in model.parameters():
        counts.append(len(parameter._backward_hooks or ()))
        counts.append(len(getattr(parameter, "_post_accumulate_grad_hooks", None) or ()))
    return counts


def with_it(optimizer: Any) -> None:
    with optimizer as entered:
        assert entered is optimizer


ENDS: dict[str, Callable[[Any], object]] = {
    "detach": lambda optimizer: optimizer.detach(),
    "close": lambda optimizer: optimizer.close(),
    "both, twice": lambda optimizer: [end() for end in (optimizer.detach, optimizer.close) * 2],
    "with": with_it,
}


@pytest.mark.cover(steps=[0, 3], end=ENDS)
def test_module_is_as_it_was(method: Method, task: Task, end: Callable[[Any], object], steps: int) -> None:
    model = task.model()
    keys = [set(vars(module)) for module in model.modules()]
    types = [type(module) for module in model.modules()]
    before = hooks(model)
    optimizer = method.build(model)
    train(model, optimizer, task, steps)
    assert (hooks(model) != before) == method.layerwise
    end(optimizer)
    assert hooks(model) == before
    assert [set(vars(module)) for module in model.modules()] == keys
    assert [type(module) for module in model.modules()] == types


def test_a_hooked_model_computes_and_is_what_it_is_without_to_the_bit(method: Method, task: Task) -> None:
    """Hooked with capture due, and detached."""
    plain, hooked = task.model(), task.model()
    optimizer = method.build(hooked)
    assert hooked.state_dict().keys() == plain.state_dict().keys()
    assert str(hooked) == str(plain)
    assert [name for name, _ in hooked.named_modules()] == [name for name, _ in plain.named_modules()]
    inputs = task.batch(0)[0]
    assert_identical(hooked(inputs).detach(), plain(inputs).detach())
    task.loss(plain, 0).backward()
    task.loss(hooked, 0).backward()
    assert_identical([p.grad for p in hooked.parameters()], [p.grad for p in plain.parameters()])
    optimizer.detach()
    assert_identical(hooked(inputs).detach(), plain(inputs).detach())


def test_context_manager_closes_on_an_error_and_lets_it_through(method: Method, mlp: Task) -> None:
    model = mlp.model()
    before = hooks(model)
    with pytest.raises(KeyError, match="mine"), method.build(model):
        raise KeyError("mine")
    assert hooks(model) == before


def test_second_optimizer_keeps_its_hooks_and_its_statistics(method: Method, mlp: Task) -> None:
    """Two on one module, then one of them leaves: the other one trains as if it had been alone all the time."""
    model, alone = mlp.model(), mlp.model()
    before = hooks(model)
    stays = method.build(model)
    with_one = hooks(model)
    leaves = method.build(model)
    assert (hooks(model) != with_one) == method.layerwise
    only = method.build(alone)
    for step in range(3):
        train(alone, only, mlp, 1, start=step)
        backward(model, stays, mlp, step)
        stays.step()
    assert_identical(values(model), values(alone))
    leaves.detach()
    assert hooks(model) == with_one
    for step in range(3, 7):
        train(alone, only, mlp, 1, start=step)
        train(model, stays, mlp, 1, start=step)
    assert_identical(values(model), values(alone))
    assert_identical(stays.state_dict(), only.state_dict())
    stays.close()
    assert hooks(model) == before


def test_two_optimizers_each_count_a_batch_once(method: Method, mlp: Task) -> None:
    model, alone = mlp.model(), mlp.model()
    first, second = method.build(model), method.build(model)
    only = method.build(alone)
    mlp.loss(model, 0).backward()
    mlp.loss(alone, 0).backward()
    only.step()
    expected = snapshot(only)["state"]
    start = values(model)
    for optimizer in (first, second):
        optimizer.step()
        assert_identical(snapshot(optimizer)["state"], expected)
        assert_identical(values(model), values(alone))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(start[name])


def test_dropped_optimizer_leaves_a_working_module(method: Method, mlp: Task) -> None:
    """Nobody called `close`: the module must neither keep the optimizer alive nor break."""
    import gc
    import weakref

    model, optimizer = method.start(mlp, 2)
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    mlp.loss(model, 2).backward()
    fresh = method.build(model)
    train(model, fresh, mlp, 2, start=3)


def test_attach_after_detach_goes_on(method: Method, mlp: Task) -> None:
    model, twin = mlp.model(), mlp.model()
    optimizer, undisturbed = method.build(model), method.build(twin)
    train(model, optimizer, mlp, 3)
    hooked = hooks(model)
    optimizer.detach()
    optimizer.attach(model)
    assert hooks(model) == hooked
    train(model, optimizer, mlp, 4, start=3)
    train(twin, undisturbed, mlp, 7)
    assert_identical(values(model), values(twin))


def test_attach_twice_hooks_once(method: Method, mlp: Task) -> None:
    model, twin = mlp.model(), mlp.model()
    optimizer, undisturbed = method.build(model), method.build(twin)
    hooked = hooks(model)
    optimizer.attach(model)
    assert hooks(model) == hooked
    train(model, optimizer, mlp, 4)
    train(twin, undisturbed, mlp, 4)
    assert_identical(values(model), values(twin))


def test_pause_capture_leaves_the_state_alone(method: Method, mlp: Task) -> None:
    model, twin = mlp.model(), mlp.model()
    optimizer, undisturbed = method.build(model), method.build(twin)
    for step in range(5):
        with optimizer.pause_capture():
            mlp.loss(model, 100 + step).backward()
        train(model, optimizer, mlp, 1, start=step)
        train(twin, undisturbed, mlp, 1, start=step)
    assert_identical(optimizer.state_dict(), undisturbed.state_dict())
    assert_identical(values(model), values(twin))


@pytest.mark.option("skip_layers")
def test_blocks_are_listed_by_module_name(method: Method, mlp: Task) -> None:
    model, optimizer = method.start(mlp)
    assert set(optimizer.blocks) == {"first", "second"}
    assert optimizer.blocks["first"].weight is model.first.weight
    assert optimizer.blocks["first"].bias is model.first.bias
    assert optimizer.blocks["second"].name == "second"


@pytest.mark.option("window_size")
@pytest.mark.cover(from_module={"module": True, "parameters": False})
def test_window_goes_on_after_detach(method: Method, variant: Variant, mlp: Task, from_module: bool) -> None:
    model, twin = mlp.model(), mlp.model()
    optimizer = method.build(model, None if from_module else model.parameters(), **variant.keywords)
    undisturbed = method.build(twin, None if from_module else twin.parameters(), **variant.keywords)
    for step in range(8):
        train(model, optimizer, mlp, 1, start=step)
        if step in (2, 3):
            optimizer.detach()
        train(twin, undisturbed, mlp, 1, start=step)
    assert_identical(values(model), values(twin))
    assert_identical(optimizer.state_dict(), undisturbed.state_dict())


@pytest.mark.option("window_size")
def test_window_of_parameters_alone_has_the_same_life(method: Method, mlp: Task) -> None:
    """Every call of the life of an optimizer, without a module anywhere."""
    model, twin = mlp.model(), mlp.model()
    undisturbed = method.build(twin, twin.parameters())
    with method.build(model, model.parameters()) as optimizer:
        for step in range(6):
            with optimizer.pause_capture():
                mlp.loss(model, 100 + step).backward()
            train(model, optimizer, mlp, 1, start=step)
        saved = snapshot(optimizer)
    train(twin, undisturbed, mlp, 6)
    assert_identical(values(model), values(twin))
    assert_identical(saved, snapshot(undisturbed))
    optimizer.close()
    optimizer.detach()
    assert_identical(snapshot(optimizer), saved)
    assert optimizer.memory_usage()["total"] > 0


@pytest.mark.option("window_size")
def test_attach_gives_a_window_nothing_that_it_needs(method: Method, mlp: Task) -> None:
    model, twin = mlp.model(), mlp.model()
    optimizer, undisturbed = method.build(model, model.parameters()), method.build(twin, twin.parameters())
    before = hooks(model)
    for step in range(6):
        if step % 2:
            optimizer.attach(model)
        train(model, optimizer, mlp, 1, start=step)
        train(twin, undisturbed, mlp, 1, start=step)
    assert hooks(model) == before
    assert_identical(values(model), values(twin))


def test_observe_and_mask_are_members_of_every_method(method: Method, mlp: Task) -> None:
    model, optimizer = method.start(mlp)
    with optimizer.mask(None):
        outputs = model(mlp.batch(0)[0])
    optimizer.observe(outputs, "gaussian")
    with pytest.raises(ValueError, match="likelihood"):
        optimizer.observe(outputs, "no such likelihood")
    with pytest.raises(TypeError, match="mask takes a bool or integer tensor"), optimizer.mask(torch.ones(2, 2)):
        pass
    assert optimizer.blocks
    optimizer.close()
