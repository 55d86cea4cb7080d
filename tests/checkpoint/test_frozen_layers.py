"""A checkpoint can be loaded if a layer is frozen in the run that saves it, in the one that loads it, or in both."""

from typing import Any

import pytest
from torch.nn.utils import prune

from tests.support.checkpoints import Pair, assert_same_run, through_a_file
from tests.support.methods import Method, Variant
from tests.support.tasks import Task, assert_identical, train, values

BREAK, THAW, END = 5, 7, 12


def saved_and_loaded(method: Method, task: Task, keywords: Any, frozen_at: int | None, frozen: bool) -> list[Pair]:
    """A run whose first layer is frozen before step ``frozen_at``, if at all, and its continuation elsewhere."""
    model, other = task.model(), task.model()
    model.first.requires_grad_(frozen_at != 0)
    optimizer = method.build(model, **keywords)
    train(model, optimizer, task, frozen_at or BREAK)
    if frozen_at:
        model.first.requires_grad_(False)
        train(model, optimizer, task, BREAK - frozen_at, start=frozen_at)
    other.load_state_dict(model.state_dict())
    other.first.requires_grad_(not frozen)
    second = method.build(other, **keywords)
    second.load_state_dict(through_a_file(optimizer.state_dict()))
    return [(model, optimizer), (other, second)]


def go_on(pairs: list[Pair], task: Task, thaw: int | None) -> None:
    """Continue both runs, and unfreeze the layer in between, if at all."""
    for model, optimizer in pairs:
        train(model, optimizer, task, (thaw or END) - BREAK, start=BREAK)
        if thaw:
            model.first.requires_grad_(True)
            train(model, optimizer, task, END - thaw, start=thaw)


def test_a_layer_that_is_unfrozen_after_loading_uses_its_old_estimate(
    method: Method, variant: Variant, mlp: Task
) -> None:
    first, second = saved_and_loaded(method, mlp, variant.keywords, frozen_at=3, frozen=True)
    assert_identical(second[1].state_dict(), first[1].state_dict())
    go_on([first, second], mlp, THAW)
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
    first, second = saved_and_loaded(method, mlp, method.variants[0].keywords, frozen_at, frozen)
    first[0].first.requires_grad_(not frozen)
    go_on([first, second], mlp, thaw)
    assert_identical(values(second[0]), values(first[0]))
    if frozen_at is not None and frozen:
        assert_same_run(second, first)


@pytest.mark.cover(order=["frozen before the optimizer is built", "frozen before the state is loaded"])
def test_a_run_with_a_frozen_bias_resumes_exactly(method: Method, mlp: Task, order: str) -> None:
    (model, optimizer), other = method.start(mlp, 3), mlp.model()
    model.first.bias.requires_grad_(False)
    train(model, optimizer, mlp, BREAK - 3, start=3)
    other.load_state_dict(model.state_dict())
    other.first.bias.requires_grad_("built" not in order)
    second = method.build(other)
    other.first.bias.requires_grad_(False)
    second.load_state_dict(through_a_file(optimizer.state_dict()))
    go_on([(model, optimizer), (other, second)], mlp, None)
    assert_identical(values(other), values(model))


def test_a_checkpoint_loads_if_a_layer_is_pruned_later(method: Method, mlp: Task) -> None:
    """Its weight is then no parameter of the layer any more, so the layer has no block."""
    (model, optimizer), (other, second) = method.start(mlp, 3), method.start(mlp)
    other.load_state_dict(model.state_dict())
    prune.l1_unstructured(other.first, "weight", amount=0.5)
    second.load_state_dict(through_a_file(optimizer.state_dict()))
    assert "first" not in getattr(second, "blocks", {})
    train(other, second, mlp, 2, start=3)
