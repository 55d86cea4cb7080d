"""A wrong checkpoint is refused with a list of what differs, and changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import secondorder
from tests.support.methods import Method, Variant
from tests.support.tasks import Scale, Task, assert_identical, snapshot, train, values

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
    del saved["state"][3][method.landmark]
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
    saved = snapshot(method.build(wide, wide.parameters()))
    saved["param_groups"][0].pop("param_names", None)  # or the names would be refused first
    return saved


def with_another_number_of_groups(method: Method, task: Task) -> Saved:
    model = task.model()
    groups = [{"params": list(model.first.parameters())}, {"params": list(model.second.parameters())}]
    return snapshot(method.build(model, groups))


def with_a_smaller_group(method: Method, task: Task) -> Saved:
    model = task.model()
    return snapshot(method.build(model, model.first.parameters()))


WRONG: dict[str, tuple[Callable[[Method, Task], Saved], list[str]]] = {
    "saved by SGD": (saved_by_sgd, ["{landmark}"]),
    "saved by AdamW": (saved_by_adamw, ["{landmark}"]),
    "a state key is missing": (without_a_key, ["momentum_buffer"]),
    "a factor or a window is missing": (without_a_factor, ["{landmark}"]),
    "a parameter is missing": (without_a_parameter, ["second.weight"]),
    "all state is missing": (without_state, ["first.weight", "{last}"]),
    "an unknown state key": (with_an_unknown_key, ["surprise"]),
    "a state value of another kind": (with_a_word_for_a_count, ["global_step"]),
    "another width": (of_another_width, ["{sized}", "6", "4"]),
    "another number of groups": (with_another_number_of_groups, ["group"]),
    "a smaller group": (with_a_smaller_group, ["group"]),
}


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
    sized = "factor_g" if method.accepts("factor_update_steps") else method.landmark
    last = "second.weight" if method.layerwise else " more"  # a long list is cut
    for word in words:
        assert word.format(landmark=method.landmark, sized=sized, last=last) in str(refusal.value)
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


ROWS: dict[str, dict[str, Any]] = {
    "drawn": {"mode": "kis"},
    "all": {"mode": "sngd"},
    "switching": {"mode": "auto"},
    "expanded": {"approx": "expand"},
    "fewer": {"max_rank": 1},
    "factors where cheaper": {"kfac_when_cheaper": True, "rank_fraction": 0.8},
}


@pytest.mark.option("update_steps")
@pytest.mark.parametrize("changed", [False, True], ids=["at construction", "between two steps"])
@pytest.mark.parametrize("mode", ["kid", "auto"])
@pytest.mark.parametrize("rows", ROWS)
def test_choice_of_rows_comes_from_the_checkpoint(
    method: Method, mlp: Task, rows: str, mode: str, changed: bool
) -> None:
    """What a group says, and what the state is: the optimizer that takes them over was told otherwise."""
    model, other = mlp.model(), mlp.model()
    optimizer = method.build(model, **({"mode": mode} if changed else ROWS[rows]))
    train(model, optimizer, mlp, 3)
    optimizer.param_groups[0].update(ROWS[rows])
    train(model, optimizer, mlp, 4, start=3)
    second = method.build(other, mode=mode)
    other.load_state_dict(model.state_dict())
    second.load_state_dict(snapshot(optimizer))
    assert_identical(snapshot(second), snapshot(optimizer))
    train(model, optimizer, mlp, 4, start=7)
    train(other, second, mlp, 4, start=7)
    assert_identical(values(other), values(model))
    assert_identical(second.state_dict(), optimizer.state_dict())


def test_every_difference_is_listed_at_once(method: Method, mlp: Task) -> None:
    saved = own(method, mlp)
    del saved["state"][0][method.landmark]
    saved["state"][1]["momentum_buffer"] = torch.zeros(9)
    saved["state"][3]["surprise"] = 1
    with pytest.raises(ValueError) as refusal:
        method.build(mlp.model()).load_state_dict(saved)
    text = str(refusal.value)
    for word in ("first.weight", method.landmark, "first.bias", "momentum_buffer", "9", "second.weight", "surprise"):
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


def refuse(optimizer: Any, saved: Saved, *words: str) -> None:
    before, untouched = snapshot(optimizer), copy.deepcopy(saved)
    with pytest.raises(ValueError) as refusal:
        optimizer.load_state_dict(saved)
    for word in words:
        assert word in str(refusal.value)
    assert_identical(snapshot(optimizer), before)
    assert_identical(saved, untouched)


def test_every_key_of_the_curvature_is_needed(method: Method, variant: Variant, mlp: Task) -> None:
    saved = own(method, mlp, **variant.keywords)
    optimizer = method.build(mlp.model(), **variant.keywords)
    names = [name for name, _ in mlp.model().named_parameters()]
    before = snapshot(optimizer)
    for index, state in saved["state"].items():
        for key in state.keys() & (variant.dtypes(torch.float64).keys() | variant.owner_state):
            kept = {k: v for k, v in state.items() if k != key}
            with pytest.raises(ValueError, match=rf"{names[index]}.*\b{key}\b"):
                optimizer.load_state_dict({**saved, "state": {**saved["state"], index: kept}})
    assert_identical(snapshot(optimizer), before)


def test_every_shape_of_the_curvature_is_checked(method: Method, variant: Variant, mlp: Task) -> None:
    saved = own(method, mlp, **variant.keywords)
    optimizer = method.build(mlp.model(), **variant.keywords)
    names = [name for name, _ in mlp.model().named_parameters()]
    before = snapshot(optimizer)
    for index, state in saved["state"].items():
        for key in state.keys() & (variant.dtypes(torch.float64).keys() | variant.owner_state):
            if isinstance(state[key], torch.Tensor):
                wide = torch.cat([state[key].reshape(-1), state[key].reshape(-1)[:1]])
                broken = {**state, key: wide}
                with pytest.raises(ValueError, match=rf"{names[index]}.*\b{key}\b"):
                    optimizer.load_state_dict({**saved, "state": {**saved["state"], index: broken}})
    assert_identical(snapshot(optimizer), before)


@pytest.mark.option("window_size")
def test_state_of_another_kind_of_window_is_refused(method: Method, mlp: Task) -> None:
    """Rows that are stored in different ways are not made into each other."""
    weight = mlp.model().first.weight

    def rows(variant: Variant) -> object:
        return variant.own_state(weight) - {"gradient_momentum"}, len(variant.units(mlp.model()))

    for one in method.variants:
        saved = own(method, mlp, **one.keywords)
        for other in method.variants:
            if rows(one) != rows(other):
                refuse(method.build(mlp.model(), **other.keywords), saved)


@pytest.mark.option("compression")
@pytest.mark.parametrize(
    "change", [{"density": 0.6}, {"block_size": 4}, {"error_bits": 8}, {"error_feedback": False}], ids=str
)
def test_another_compressor_is_refused(method: Method, mlp: Task, change: dict[str, Any]) -> None:
    given = {"density": 0.3, "block_size": 8}
    saved = own(method, mlp, compression=secondorder.TopK(**given))
    optimizer = method.build(mlp.model(), compression=secondorder.TopK(**{**given, **change}))
    refuse(optimizer, saved, "first.weight")


@pytest.mark.option("batch_size")
@pytest.mark.parametrize(("old", "new"), [(6, 12), (12, 6), (6, None), (None, 6)])
def test_rows_of_another_batch_load(method: Method, mlp: Task, old: int | None, new: int | None) -> None:
    """As they are; the next ones are as many as the optimizer itself keeps."""
    model, other = mlp.model(), mlp.model()
    optimizer = method.build(model, batch_size=old)
    train(model, optimizer, mlp, 5)
    second = method.build(other, batch_size=new)
    other.load_state_dict(model.state_dict())
    second.load_state_dict(snapshot(optimizer))
    assert_identical(snapshot(second), snapshot(optimizer))
    train(model, optimizer, mlp, 1, start=5)
    train(other, second, mlp, 1, start=5)
    assert_identical(values(other), values(model))
    train(other, second, mlp, 4, start=6)
    assert second.state[other.first.weight]["rows_g"].shape == ((new or 6) // 2, 1, 4)
    assert all(value.isfinite().all() for value in values(other).values())


@pytest.mark.option("window_size")
@pytest.mark.parametrize(("old", "new"), [(4, 6), (4, 2), (6, 4)])
def test_a_window_of_another_length_loads(method: Method, variant: Variant, mlp: Task, old: int, new: int) -> None:
    """The newest rows are kept; training goes on with a window of one length or the other, all of it."""
    model, other = mlp.model(), mlp.model()
    optimizer = method.build(model, **variant.keywords, window_size=old)
    train(model, optimizer, mlp, 9)
    second = method.build(other, **variant.keywords, window_size=new)
    other.load_state_dict(model.state_dict())
    second.load_state_dict(snapshot(optimizer))
    rows = second.param_groups[0]["window_size"]
    for names in variant.units(other).values():
        state = second.state[other.get_parameter(names[0])]
        assert state["gram"].shape == (rows * (rows + 1) // 2,)
        assert 0 <= int(state["pos"]) < rows
        assert int(state["count"]) >= min(rows, old)
    before = values(other)
    train(other, second, mlp, 9, start=9)
    assert all(value.isfinite().all() for value in values(other).values())
    assert all(not torch.equal(value, before[name]) for name, value in values(other).items())
    third = method.build(mlp.model(), **variant.keywords, window_size=rows)
    third.load_state_dict(snapshot(second))
    assert_identical(snapshot(third), snapshot(second))
