"""Hooks are added and removed by `attach`, `detach`, `close` and the context manager, also for several optimizers.

A window method has no hooks, and the same calls have no effect. `test_undisturbed.py` tests `attach` during a run.
"""

import copy
import gc
import weakref
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from secondorder.preconditioners.allocation import Allocator
from tests.support.checkpoints import assert_same_run
from tests.support.kfac import hook_counts
from tests.support.methods import Method
from tests.support.tasks import Task, assert_identical, put_back, train, values

pytestmark = pytest.mark.option("module")


def with_it(optimizer: Any, fails: bool = False) -> None:
    with pytest.raises(KeyError, match="mine") if fails else nullcontext(), optimizer as entered:
        assert entered is optimizer
        if fails:
            raise KeyError("mine")


ENDS: dict[str, Callable[[Any], object]] = {
    "detach": lambda optimizer: optimizer.detach(),
    "close": lambda optimizer: optimizer.close(),
    "both, twice": lambda optimizer: [end() for end in (optimizer.detach, optimizer.close) * 2],
    "with": with_it,
    "with an error": partial(with_it, fails=True),
}


def test_module_is_as_it_was(method: Method, task: Task) -> None:
    """Only hooks are added; `test_layer_types.py` tests that outputs and gradients have the same bits."""

    def anatomy() -> Any:
        return [(name, type(module), set(vars(module))) for name, module in model.named_modules()], str(model)

    for steps, end in ((0, "detach"), (3, "close"), (0, "both, twice"), (3, "with"), (0, "with an error")):
        model = task.model()
        bare, before, keys = hook_counts(model), anatomy(), model.state_dict().keys()
        optimizer = method.build(model)
        train(model, optimizer, task, steps)
        hooked = hook_counts(model)
        assert (hooked != bare) == method.layerwise
        optimizer.attach(model)
        assert hook_counts(model) == hooked
        assert anatomy() == before
        assert model.state_dict().keys() == keys
        ENDS[end](optimizer)
        assert hook_counts(model) == bare, end
        assert anatomy() == before, end


def test_second_optimizer_keeps_its_hooks_and_its_statistics(method: Method, mlp: Task) -> None:
    model = mlp.model()
    before = hook_counts(model)
    stays = method.build(model)
    with_one = hook_counts(model)
    leaves = method.build(model)
    assert (hook_counts(model) != with_one) == method.layerwise
    train(model, stays, mlp, 3)
    leaves.detach()
    assert hook_counts(model) == with_one
    train(model, stays, mlp, 4, start=3)
    assert_same_run((model, stays), method.start(mlp, 7))
    stays.close()
    assert hook_counts(model) == before


def test_two_optimizers_each_count_a_batch_once(method: Method, mlp: Task) -> None:
    alone, model = method.start(mlp, 1), mlp.model()
    both, start = [method.build(model), method.build(model)], values(model)
    mlp.loss(model, 0).backward()
    for optimizer in both:
        optimizer.step()
        assert_same_run((model, optimizer), alone)
        put_back(model, start)


def test_the_optimizer_and_replaced_parameters_are_freed_without_a_call_of_close(method: Method, mlp: Task) -> None:
    """The module must neither keep the optimizer alive nor break."""
    model, optimizer = method.start(mlp, 2)
    gone, other = [weakref.ref(parameter) for parameter in model.parameters()], copy.deepcopy(model)
    optimizer.attach(other)
    del model
    train(other, optimizer, mlp, 2, start=2)
    gone.append(weakref.ref(optimizer))
    del optimizer
    gc.collect()
    assert not any(reference() is not None for reference in gone)
    mlp.loss(other, 4).backward()
    train(other, method.build(other), mlp, 2, start=5)


def test_the_optimizer_may_end_while_capture_is_paused(method: Method, mlp: Task) -> None:
    model, optimizer = method.start(mlp, 1)
    hooked = hook_counts(model)
    with optimizer.pause_capture():
        optimizer.detach()
    optimizer.attach(model)
    assert hook_counts(model) == hooked
    train(model, optimizer, mlp, 2, start=1)


CLEARED: dict[str, Callable[[Any], object]] = {
    "clear": lambda optimizer: optimizer.state.clear(),
    "replace": lambda optimizer: setattr(optimizer, "state", defaultdict(dict)),
    "empty": lambda optimizer: [state.clear() for state in optimizer.state.values()],
    "pop": lambda optimizer: [optimizer.state.pop(p) for p in list(optimizer.state)[1:]],
}


@pytest.mark.cover(how=[*CLEARED])
def test_a_step_without_state_is_that_of_a_new_optimizer(method: Method, task: Task, how: str) -> None:
    """As in torch, users may remove the state of all parameters, or of some, to begin again."""
    model, optimizer = method.start(task, 3)
    CLEARED[how](optimizer)
    other = copy.deepcopy(model)
    train(other, method.build(other), task, 1, start=3)
    train(model, optimizer, task, 1, start=3)
    if how != "pop":
        assert_identical(values(model), values(other))
    train(model, optimizer, task, 2, start=4)
    assert all(p.isfinite().all() for p in model.parameters())


def test_reading_the_state_of_another_parameter_makes_no_new_plan(
    method: Method, mlp: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``optimizer.state`` is a ``defaultdict``, so reading it leaves an empty entry."""
    model, optimizer = method.start(mlp, 2)
    assert optimizer.state[nn.Parameter(torch.ones(1))] == {}
    plans, rebuild = [], Allocator.rebuild
    monkeypatch.setattr(Allocator, "rebuild", lambda self: plans.append(self) or rebuild(self))
    train(model, optimizer, mlp, 2, start=2)
    assert not plans


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


def test_a_model_with_hooks_is_bitwise_equal_to_one_without(method: Method, task: Task) -> None:
    plain, (hooked, optimizer) = task.model(), method.start(task)
    assert hooked.state_dict().keys() == plain.state_dict().keys()
    assert str(hooked) == str(plain)
    assert [name for name, _ in hooked.named_modules()] == [name for name, _ in plain.named_modules()]
    inputs = task.batch(0)[0]
    assert_identical(hooked(inputs).detach(), plain(inputs).detach())
    for model in (plain, hooked):
        task.loss(model, 0).backward()
    assert_identical([p.grad for p in hooked.parameters()], [p.grad for p in plain.parameters()])
    optimizer.detach()
    assert_identical(hooked(inputs).detach(), plain(inputs).detach())
