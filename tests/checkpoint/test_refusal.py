"""A wrong checkpoint is refused with a list of what differs, and changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import secondorder
from tests.support.checkpoints import assert_same_run, builder, by_file
from tests.support.methods import Method, Variant
from tests.support.tasks import Scale, Task, assert_changed, assert_identical, snapshot, train, values

Saved = dict[str, Any]


def saved_by(build: Callable[[nn.Module], torch.optim.Optimizer]) -> Callable[[Method, Task], Saved]:
    def make(method: Method, task: Task) -> Saved:
        model = task.model()
        optimizer = build(model)
        train(model, optimizer, task, 2)
        return optimizer.state_dict()

    return make


def with_change(index: int, change: Callable[[dict[str, Any], Method], object]) -> Callable[[Method, Task], Saved]:
    """The state of one parameter, changed."""

    def make(method: Method, task: Task) -> Saved:
        saved = own(method, task)
        change(saved["state"][index], method)
        return saved

    return make


def own(method: Method, task: Task, **keywords: Any) -> Saved:
    model, optimizer = method.start(task, 2, **keywords)
    return snapshot(optimizer)


def without_a_parameter(method: Method, task: Task) -> Saved:
    saved = own(method, task)
    del saved["state"][3]
    return saved


def without_state(method: Method, task: Task) -> Saved:
    return {**own(method, task), "state": {}}


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
    "saved by SGD": (
        saved_by(lambda model: torch.optim.SGD(model.named_parameters(), 0.1, momentum=0.9)),
        ["{landmark}"],
    ),
    "saved by AdamW": (saved_by(lambda model: torch.optim.AdamW(model.parameters(), 0.1)), ["{landmark}"]),
    "a state key is missing": (with_change(0, lambda state, method: state.pop("momentum_buffer")), ["momentum_buffer"]),
    "a factor or a window is missing": (
        with_change(3, lambda state, method: state.pop(method.landmark)),
        ["{landmark}"],
    ),
    "a parameter is missing": (without_a_parameter, ["second.weight"]),
    "all state is missing": (without_state, ["first.weight", "{last}"]),
    "an unknown state key": (with_change(1, lambda state, method: state.update(surprise=torch.zeros(2))), ["surprise"]),
    "a state value of another kind": (
        with_change(0, lambda state, method: state.update(global_step="seven")),
        ["global_step"],
    ),
    "another width": (of_another_width, ["{sized}", "6", "4"]),
    "another number of groups": (with_another_number_of_groups, ["group"]),
    "a smaller group": (with_a_smaller_group, ["group"]),
}


@pytest.mark.cover(wrong=[*WRONG])
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
    eigen = builder(method, mlp, inverse_method="eigen")()
    train(*eigen, mlp, 5)
    cholesky = by_file(builder(method, mlp, inverse_method="cholesky"), *eigen)
    assert cholesky[1].param_groups[0]["inverse_method"] == "eigen"
    for pair in (eigen, cholesky):
        train(*pair, mlp, 4, start=5)
    assert_same_run(cholesky, eigen)


@pytest.mark.option("inverse_method")
def test_state_of_another_inverse_method_than_the_groups_say_is_refused(method: Method, mlp: Task) -> None:
    saved = own(method, mlp, inverse_method="eigen")
    saved["param_groups"][0]["inverse_method"] = "cholesky"
    refuse(method.build(mlp.model(), inverse_method="cholesky"), saved, "inverse_a")


ROWS: dict[str, dict[str, Any]] = {
    "drawn": {"mode": "kis"},
    "all": {"mode": "sngd"},
    "switching": {"mode": "auto"},
    "expanded": {"approx": "expand"},
    "fewer": {"max_rank": 1},
    "factors where cheaper": {"kfac_when_cheaper": True, "rank_fraction": 0.8},
}


@pytest.mark.option("update_steps")
@pytest.mark.cover(rows=[*ROWS], mode=["kid", "auto"], changed={"at construction": False, "between two steps": True})
def test_choice_of_rows_comes_from_the_checkpoint(
    method: Method, mlp: Task, rows: str, mode: str, changed: bool
) -> None:
    """What a group says, and what the state is: the optimizer that takes them over was told otherwise."""
    model, optimizer = builder(method, mlp, **({"mode": mode} if changed else ROWS[rows]))()
    train(model, optimizer, mlp, 3)
    optimizer.param_groups[0].update(ROWS[rows])
    train(model, optimizer, mlp, 4, start=3)
    other = by_file(builder(method, mlp, mode=mode), model, optimizer)
    assert_same_run(other, (model, optimizer))
    for pair in (other, (model, optimizer)):
        train(*pair, mlp, 4, start=7)
    assert_same_run(other, (model, optimizer))


def test_every_difference_is_listed_at_once(method: Method, mlp: Task) -> None:
    saved = own(method, mlp)
    del saved["state"][0][method.landmark]
    saved["state"][1]["momentum_buffer"] = torch.zeros(9)
    saved["state"][3]["surprise"] = 1
    words = ("first.weight", method.landmark, "first.bias", "momentum_buffer", "9", "second.weight", "surprise")
    refuse(method.build(mlp.model()), saved, *words)


def test_other_names_are_refused(method: Method, mlp: Task) -> None:
    """Names are compared where both sides have them: a permuted model would load into the wrong parameters."""
    saved = own(method, mlp)
    saved["param_groups"][0]["param_names"][0] = "renamed.weight"
    refuse(method.build(mlp.model()), saved, "renamed.weight")


def refuse(optimizer: Any, saved: Saved, *words: str) -> None:
    before, untouched = snapshot(optimizer), copy.deepcopy(saved)
    with pytest.raises(ValueError) as refusal:
        optimizer.load_state_dict(saved)
    for word in words:
        assert word in str(refusal.value)
    assert_identical(snapshot(optimizer), before)
    assert_identical(saved, untouched)


def test_every_key_and_every_shape_of_the_curvature_is_checked(method: Method, variant: Variant, mlp: Task) -> None:
    """And the right checkpoint loads after all the wrong ones."""
    saved = own(method, mlp, **variant.keywords)
    optimizer = method.build(mlp.model(), **variant.keywords)
    names = [name for name, _ in mlp.model().named_parameters()]
    before = snapshot(optimizer)
    for index, state in saved["state"].items():
        for key in state.keys() & (variant.dtypes(torch.float64).keys() | variant.owner_state):
            wrong = [{k: v for k, v in state.items() if k != key}]
            if isinstance(state[key], torch.Tensor):
                flat = state[key].reshape(-1)
                wrong.append({**state, key: torch.cat([flat, flat[:1]])})
            for broken in wrong:
                with pytest.raises(ValueError, match=rf"{names[index]}.*\b{key}\b"):
                    optimizer.load_state_dict({**saved, "state": {**saved["state"], index: broken}})
    assert_identical(snapshot(optimizer), before)
    optimizer.load_state_dict(saved)
    assert_identical(snapshot(optimizer), saved)


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
@pytest.mark.cover(change=[{"density": 0.6}, {"block_size": 4}, {"error_bits": 8}, {"error_feedback": False}])
def test_another_compressor_is_refused(method: Method, mlp: Task, change: dict[str, Any]) -> None:
    given = {"density": 0.3, "block_size": 8}
    saved = own(method, mlp, compression=secondorder.TopK(**given))
    optimizer = method.build(mlp.model(), compression=secondorder.TopK(**{**given, **change}))
    refuse(optimizer, saved, "first.weight")


SIZES = {"longer": (6, 12), "shorter": (12, 6), "unknown": (6, None), "known": (None, 6)}


@pytest.mark.option("batch_size")
@pytest.mark.cover(sizes=SIZES)
def test_rows_of_another_batch_load(method: Method, mlp: Task, sizes: tuple[int | None, int | None]) -> None:
    """As they are; the next ones are as many as the optimizer itself keeps."""
    old, new = sizes
    model, optimizer = builder(method, mlp, batch_size=old)()
    train(model, optimizer, mlp, 5)
    other, second = by_file(builder(method, mlp, batch_size=new), model, optimizer)
    assert_identical(snapshot(second), snapshot(optimizer))
    train(model, optimizer, mlp, 1, start=5)
    train(other, second, mlp, 1, start=5)
    assert_identical(values(other), values(model))
    train(other, second, mlp, 4, start=6)
    assert second.state[other.first.weight]["rows_g"].shape == ((new or 6) // 2, 1, 4)
    assert all(value.isfinite().all() for value in values(other).values())


@pytest.mark.option("window_size")
@pytest.mark.cover(lengths={"longer": (4, 6), "shorter": (4, 2), "of six": (6, 4)})
def test_a_window_of_another_length_loads(
    method: Method, variant: Variant, mlp: Task, lengths: tuple[int, int]
) -> None:
    """The newest rows are kept; training goes on with a window of one length or the other, all of it."""
    old, new = lengths
    model, optimizer = builder(method, mlp, **variant.keywords, window_size=old)()
    train(model, optimizer, mlp, 9)
    other, second = by_file(builder(method, mlp, **variant.keywords, window_size=new), model, optimizer)
    rows = second.param_groups[0]["window_size"]
    for names in variant.units(other).values():
        state = second.state[other.get_parameter(names[0])]
        assert state["gram"].shape == (rows * (rows + 1) // 2,)
        assert 0 <= int(state["pos"]) < rows
        assert int(state["count"]) >= min(rows, old)
    before = values(other)
    train(other, second, mlp, 9, start=9)
    assert_changed(other, before)
    third = method.build(mlp.model(), **variant.keywords, window_size=rows)
    third.load_state_dict(snapshot(second))
    assert_identical(snapshot(third), snapshot(second))
