"""A checkpoint is loaded whether a layer is frozen in the run that saves it, in the one that loads it, or in both."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from torch import nn

from tests.support.checkpoints import assert_same_run, through_a_file
from tests.support.methods import Method, Variant
from tests.support.tasks import Task, assert_identical, snapshot, train, values

BREAK, THAW, END = 5, 7, 12


def trained(method: Method, task: Task, variant: Variant, frozen_at: int | None) -> tuple[nn.Module, Any]:
    """A model and its optimizer after some steps; the first layer is frozen before one of them, or not at all."""
    model = task.model()
    model.first.requires_grad_(frozen_at != 0)
    optimizer = method.build(model, **variant.keywords)
    train(model, optimizer, task, frozen_at or BREAK)
    if frozen_at:
        model.first.requires_grad_(False)
        train(model, optimizer, task, BREAK - frozen_at, start=frozen_at)
    return model, optimizer


def loaded(
    method: Method, task: Task, variant: Variant, model: nn.Module, state: Any, frozen: bool
) -> tuple[nn.Module, Any]:
    """Another model and optimizer with the state of the first, its first layer frozen before construction or not."""
    other = task.model()
    other.load_state_dict(model.state_dict())
    other.first.requires_grad_(not frozen)
    second = method.build(other, **variant.keywords)
    second.load_state_dict(through_a_file(state))
    return other, second


@pytest.mark.cover(frozen_at=[0, 3])
def test_a_run_with_a_frozen_layer_resumes_to_the_bit(method: Method, mlp: Task, frozen_at: int) -> None:
    model, optimizer = trained(method, mlp, method.variants[0], frozen_at)
    other, second = loaded(method, mlp, method.variants[0], model, optimizer.state_dict(), frozen=True)
    train(model, optimizer, mlp, END - BREAK, start=BREAK)
    train(other, second, mlp, END - BREAK, start=BREAK)
    assert_same_run((other, second), (model, optimizer))


def test_a_layer_that_is_unfrozen_after_loading_goes_on(method: Method, variant: Variant, mlp: Task) -> None:
    """What was known of the layer is kept, and used again as soon as it is unfrozen."""
    model, optimizer = trained(method, mlp, variant, frozen_at=3)
    other, second = loaded(method, mlp, variant, model, optimizer.state_dict(), frozen=True)
    assert_identical(second.state_dict(), optimizer.state_dict())
    for net, opt in ((model, optimizer), (other, second)):
        train(net, opt, mlp, THAW - BREAK, start=BREAK)
        net.first.requires_grad_(True)
        train(net, opt, mlp, END - THAW, start=THAW)
    assert_same_run((other, second), (model, optimizer))


def test_a_frozen_part_of_a_layer_resumes_to_the_bit(method: Method, mlp: Task) -> None:
    model, other = mlp.model(), mlp.model()
    optimizer = method.build(model, **method.variants[0].keywords)
    train(model, optimizer, mlp, 3)
    for net in (model, other):
        net.first.bias.requires_grad_(False)
    train(model, optimizer, mlp, BREAK - 3, start=3)
    other.load_state_dict(model.state_dict())
    second = method.build(other, **method.variants[0].keywords)
    second.load_state_dict(through_a_file(optimizer.state_dict()))
    for net, opt in ((model, optimizer), (other, second)):
        train(net, opt, mlp, END - BREAK, start=BREAK)
    assert_identical(values(other), values(model))


def test_a_layer_that_was_frozen_all_along_begins_when_it_is_trained(method: Method, mlp: Task) -> None:
    """Unfrozen between two runs, it does what one does that is unfrozen in the middle of a run."""
    model, optimizer = trained(method, mlp, method.variants[0], frozen_at=0)
    other, second = loaded(method, mlp, method.variants[0], model, optimizer.state_dict(), frozen=False)
    model.first.requires_grad_(True)
    for net, opt in ((model, optimizer), (other, second)):
        train(net, opt, mlp, END - BREAK, start=BREAK)
    assert_identical(values(other), values(model))


def test_a_layer_that_was_trained_may_be_frozen_when_it_is_loaded(method: Method, mlp: Task) -> None:
    model, optimizer = trained(method, mlp, method.variants[0], frozen_at=None)
    other, second = loaded(method, mlp, method.variants[0], model, optimizer.state_dict(), frozen=True)
    model.first.requires_grad_(False)
    for net, opt in ((model, optimizer), (other, second)):
        train(net, opt, mlp, THAW - BREAK, start=BREAK)
        net.first.requires_grad_(True)
        train(net, opt, mlp, END - THAW, start=THAW)
    assert_identical(values(other), values(model))


def test_a_refused_checkpoint_changes_nothing_beside_a_frozen_layer(method: Method, mlp: Task) -> None:
    model, optimizer = trained(method, mlp, method.variants[0], frozen_at=3)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][3].pop(method.landmark)
    other = mlp.model()
    other.first.requires_grad_(False)
    second = method.build(other)
    train(other, second, mlp, 2)
    before = snapshot(second)
    with pytest.raises((ValueError, RuntimeError), match="second.weight"):
        second.load_state_dict(saved)
    assert_identical(snapshot(second), before)
