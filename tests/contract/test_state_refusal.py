"""A wrong checkpoint is refused with a list of what differs, and changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.contract.methods import Method
from tests.contract.tasks import Scale, Task, assert_identical, snapshot, train, values

Saved = dict[str, Any]


def saved_by_sgd(method: Method, task: Task) -> Saved:
    model = task.model()
    optimizer = torch.optim.SGD(model.named_parameters(), 0.1, momentum=0.9)
    train(model, optimizer, task, 2)
    return optimizer.state_dict()


def saved_by_adamw(method: Method, task: Task) -> Saved:
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    train(model, optimizer, task, 2)
    return optimizer.state_dict()


def own(method: Method, task: Task, **keywords: Any) -> Saved:
    model = task.model()
    optimizer = method.build(model, **keywords)
    train(model, optimizer, task, 2)
    return snapshot(optimizer)


def without_a_key(method: Method, task: Task) -> Saved:
    saved = own(method, task)
    del saved["state"][0]["momentum_buffer"]
    return saved


def without_a_factor(method: Method, task: Task) -> Saved:
    saved = own(method, task)
    del saved["state"][3]["factor_a"]
    return saved


def without_a_parameter(method: Method, task: Task) -> Saved:
    saved = own(method, task)
    del saved["state"][3]
    return saved


def without_state(method: Method, task: Task) -> Saved:
    return {**own(method, task), "state": {}}


def with_an_unknown_key(method: Method, task: Task) -> Saved:
    saved = own(method, task)
    saved["state"][1]["surprise"] = torch.zeros(2)
    return saved


def with_a_word_for_a_count(method: Method, task: Task) -> Saved:
    saved = own(method, task)
    saved["state"][0]["global_step"] = "seven"
    return saved


def of_another_width(method: Method, task: Task) -> Saved:
    wide = nn.Sequential(nn.Linear(5, 6), Scale(6), nn.Linear(6, 3)).double()
    optimizer = method.build(wide, wide.parameters())
    return snapshot(optimizer)


def with_another_number_of_groups(method: Method, task: Task) -> Saved:
    model = task.model()
    groups = [{"params": list(model.first.parameters())}, {"params": list(model.second.parameters())}]
    return snapshot(method.build(model, groups))


def with_a_smaller_group(method: Method, task: Task) -> Saved:
    model = task.model()
    return snapshot(method.build(model, model.first.parameters()))


WRONG: dict[str, tuple[Callable[[Method, Task], Saved], list[str]]] = {
    "saved by SGD": (saved_by_sgd, ["factor_a"]),
    "saved by AdamW": (saved_by_adamw, ["factor_a"]),
    "a state key is missing": (without_a_key, ["momentum_buffer"]),
    "a factor is missing": (without_a_factor, ["factor_a"]),
    "a parameter is missing": (without_a_parameter, ["second.weight"]),
    "all state is missing": (without_state, ["first.weight", "second.weight"]),
    "an unknown state key": (with_an_unknown_key, ["surprise"]),
    "a state value of another kind": (with_a_word_for_a_count, ["global_step"]),
    "another width": (of_another_width, ["factor_g", "6", "4"]),
    "another number of groups": (with_another_number_of_groups, ["group"]),
    "a smaller group": (with_a_smaller_group, ["group"]),
}


@pytest.mark.option("factor_decay")
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_checkpoint_is_refused_by_name_and_changes_nothing(method: Method, mlp: Task, wrong: str) -> None:
    make, words = WRONG[wrong]
    saved = make(method, mlp)
    untouched = copy.deepcopy(saved)
    model, twin = mlp.model(), mlp.model()
    optimizer, silent = method.build(model), method.build(twin)
    train(model, optimizer, mlp, 3)
    train(twin, silent, mlp, 3)
    before = snapshot(optimizer)
    with pytest.raises(ValueError) as refusal:
        optimizer.load_state_dict(saved)
    for word in words:
        assert word in str(refusal.value)
    assert_identical(snapshot(optimizer), before)
    assert_identical(saved, untouched)
    train(model, optimizer, mlp, 4, start=3)
    train(twin, silent, mlp, 4, start=3)
    assert_identical(values(model), values(twin))


@pytest.mark.option("inverse_method")
def test_inverse_method_comes_from_the_checkpoint_like_every_group_value(method: Method, mlp: Task) -> None:
    """It is no mismatch: the loaded groups say what the loaded state is, and training goes on exactly."""
    model, other = mlp.model(), mlp.model()
    eigen, cholesky = method.build(model, inverse_method="eigen"), method.build(other, inverse_method="cholesky")
    train(model, eigen, mlp, 5)
    other.load_state_dict(model.state_dict())
    cholesky.load_state_dict(eigen.state_dict())
    assert cholesky.param_groups[0]["inverse_method"] == "eigen"
    train(model, eigen, mlp, 4, start=5)
    train(other, cholesky, mlp, 4, start=5)
    assert_identical(values(other), values(model))
    assert_identical(cholesky.state_dict(), eigen.state_dict())


@pytest.mark.option("inverse_method")
def test_state_of_another_inverse_method_than_the_groups_say_is_refused(method: Method, mlp: Task) -> None:
    saved = own(method, mlp, inverse_method="eigen")
    saved["param_groups"][0]["inverse_method"] = "cholesky"
    optimizer = method.build(mlp.model(), inverse_method="cholesky")
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match="inverse_a"):
        optimizer.load_state_dict(saved)
    assert_identical(snapshot(optimizer), before)


@pytest.mark.option("factor_decay")
def test_every_difference_is_listed_at_once(method: Method, mlp: Task) -> None:
    saved = own(method, mlp)
    del saved["state"][0]["factor_a"]
    saved["state"][1]["momentum_buffer"] = torch.zeros(9)
    saved["state"][3]["surprise"] = 1
    with pytest.raises(ValueError) as refusal:
        method.build(mlp.model()).load_state_dict(saved)
    text = str(refusal.value)
    for word in ("first.weight", "factor_a", "first.bias", "momentum_buffer", "9", "second.weight", "surprise"):
        assert word in text


def test_other_names_are_refused(method: Method, mlp: Task) -> None:
    """Names are compared where both sides have them: a permuted model would load into the wrong parameters."""
    saved = own(method, mlp)
    saved["param_groups"][0]["param_names"][0] = "renamed.weight"
    optimizer = method.build(mlp.model())
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=r"renamed\.weight"):
        optimizer.load_state_dict(saved)
    assert_identical(snapshot(optimizer), before)


def test_right_checkpoint_loads_after_a_wrong_one(method: Method, mlp: Task) -> None:
    optimizer = method.build(mlp.model())
    with pytest.raises(ValueError):
        optimizer.load_state_dict(saved_by_sgd(method, mlp))
    saved = own(method, mlp)
    optimizer.load_state_dict(saved)
    assert_identical(snapshot(optimizer), saved)
