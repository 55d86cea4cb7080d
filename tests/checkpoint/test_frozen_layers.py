"""A checkpoint can be loaded if a layer is frozen in the run that saves it, in the one that loads it, or in both."""

from typing import Any

import pytest
from torch import nn

from tests.support.checkpoints import assert_same_run, through_a_file
from tests.support.methods import Method, Variant
from tests.support.tasks import Task, assert_identical, train, values

BREAK, THAW, END = 5, 7, 12


def trained(method: Method, task: Task, variant: Variant, frozen_at: int | None) -> tuple[nn.Module, Any]:
    """A model and its optimizer after some steps, with the first layer frozen before step ``frozen_at``, if at all."""
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
    """Another model and optimizer with the state of the first, with the first layer frozen or not."""
    other = task.model()
    other.load_state_dict(model.state_dict())
    other.first.requires_grad_(not frozen)
    second = method.build(other, **variant.keywords)
    second.load_state_dict(through_a_file(state))
    return other, second


def test_a_layer_that_is_unfrozen_after_loading_uses_its_old_estimate(
    method: Method, variant: Variant, mlp: Task
) -> None:
    first = trained(method, mlp, variant, frozen_at=3)
    second = loaded(method, mlp, variant, first[0], first[1].state_dict(), frozen=True)
    assert_identical(second[1].state_dict(), first[1].state_dict())
    for net, opt in (first, second):
        train(net, opt, mlp, THAW - BREAK, start=BREAK)
        net.first.requires_grad_(True)
        train(net, opt, mlp, END - THAW, start=THAW)
    assert_same_run(second, first)


#: The step that freezes the layer in the run that saves, whether it is frozen in the run that loads, and the step in
#: which both unfreeze it.
RUNS = {
    "always frozen": (0, True, None),
    "frozen later": (3, True, None),
    "trained after loading": (0, False, BREAK),  # equivalent to unfreezing in the middle of a run
    "frozen while loading": (None, True, THAW),
}


@pytest.mark.cover(run=RUNS)
def test_a_run_with_a_frozen_layer_resumes_exactly(method: Method, mlp: Task, run: Any) -> None:
    frozen_at, frozen, thaw = run
    first = trained(method, mlp, method.variants[0], frozen_at)
    second = loaded(method, mlp, method.variants[0], first[0], first[1].state_dict(), frozen)
    first[0].first.requires_grad_(not frozen)
    for net, opt in (first, second):
        train(net, opt, mlp, (thaw or END) - BREAK, start=BREAK)
        if thaw:
            net.first.requires_grad_(True)
            train(net, opt, mlp, END - thaw, start=thaw)
    assert_identical(values(second[0]), values(first[0]))
    if frozen_at is not None and frozen:
        assert_same_run(second, first)


def test_a_run_with_a_frozen_bias_resumes_exactly(method: Method, mlp: Task) -> None:
    (model, optimizer), other = method.start(mlp, 3), mlp.model()
    for net in (model, other):
        net.first.bias.requires_grad_(False)
    train(model, optimizer, mlp, BREAK - 3, start=3)
    other.load_state_dict(model.state_dict())
    second = method.build(other)
    second.load_state_dict(through_a_file(optimizer.state_dict()))
    for net, opt in ((model, optimizer), (other, second)):
        train(net, opt, mlp, END - BREAK, start=BREAK)
    assert_identical(values(other), values(model))
