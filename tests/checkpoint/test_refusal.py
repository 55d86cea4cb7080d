"""A wrong checkpoint is refused with a list of differences, and changes nothing."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from secondorder import KFAC, AdaptationOptions
from tests.support.checkpoints import assert_same_run, builder, by_file
from tests.support.methods import Method, Variant
from tests.support.quadratic import Loop, batch
from tests.support.quadratic import mlp as small
from tests.support.tasks import Scale, Task, assert_identical, snapshot, train, values

Saved = dict[str, Any]


def own(method: Method, task: Task, **keywords: Any) -> Saved:
    return snapshot(method.start(task, 2, **keywords)[1])


def of(build: Callable[[nn.Module], torch.optim.Optimizer]) -> Callable[[Method, Task], Saved]:
    """The state of one of torch's optimizers."""

    def make(method: Method, task: Task) -> Saved:
        model = task.model()
        optimizer = build(model)
        train(model, optimizer, task, 2)
        return optimizer.state_dict()

    return make


def changed(change: Callable[[dict[int, dict[str, Any]], Method], object]) -> Callable[[Method, Task], Saved]:
    """A valid checkpoint with a change in its state."""

    def make(method: Method, task: Task) -> Saved:
        saved = own(method, task)
        change(saved["state"], method)
        return saved

    return make


def of_groups(*layers: str) -> Callable[[Method, Task], Saved]:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        return [{"params": list(model.get_submodule(layer).parameters())} for layer in layers]

    return lambda method, task: snapshot(method.start(task, params=groups)[1])


def of_another_width(method: Method, task: Task) -> Saved:
    wide = nn.Sequential(nn.Linear(5, 6), Scale(6), nn.Linear(6, 3)).double()
    saved = snapshot(method.build(wide, wide.parameters()))
    saved["param_groups"][0].pop("param_names", None)  # otherwise, the names would be refused first
    return saved


def refuse(optimizer: Any, saved: Saved, *words: str) -> None:
    before, untouched = snapshot(optimizer), copy.deepcopy(saved)
    with pytest.raises(ValueError) as refusal:
        optimizer.load_state_dict(saved)
    assert [word for word in words if word not in str(refusal.value)] == []
    assert_identical(snapshot(optimizer), before)
    assert_identical(saved, untouched)


#: Functions that build a checkpoint, and words of the error.
WRONG: dict[str, tuple[Callable[[Method, Task], Saved], list[str]]] = {
    "saved by SGD": (of(lambda model: torch.optim.SGD(model.named_parameters(), 0.1, momentum=0.9)), ["{landmark}"]),
    "saved by AdamW": (of(lambda model: torch.optim.AdamW(model.parameters(), 0.1)), ["{landmark}"]),
    "a state key is missing": (changed(lambda state, method: state[0].pop("momentum_buffer")), ["momentum_buffer"]),
    "a parameter is missing": (changed(lambda state, method: state.pop(3)), ["second.weight"]),
    "all state is missing": (changed(lambda state, method: state.clear()), ["first.weight", "{last}"]),
    "an unknown state key": (changed(lambda state, method: state[1].update(surprise=torch.zeros(2))), ["surprise"]),
    "a state value of another kind": (
        changed(lambda state, method: state[0].update(global_step="seven")),
        ["global_step"],
    ),
    "another width": (of_another_width, ["{sized}", "6", "4"]),
    "another number of groups": (of_groups("first", "second"), ["group"]),
    "a smaller group": (of_groups("first"), ["group"]),
}


@pytest.mark.cover(wrong=[*WRONG])
def test_wrong_checkpoint_is_refused_by_name_and_changes_nothing(method: Method, mlp: Task, wrong: str) -> None:
    make, words = WRONG[wrong]
    model, optimizer = method.start(mlp, 3)
    sized = "factor_g" if method.accepts("factor_update_steps") else method.landmark
    last = "second.weight" if method.layerwise else " more"  # a long list is truncated
    words = [word.format(landmark=method.landmark, sized=sized, last=last) for word in words]
    refuse(optimizer, make(method, mlp), *words)
    train(model, optimizer, mlp, 4, start=3)
    assert_identical(values(model), method.trained(mlp, 7))


def test_a_dict_that_is_no_state_of_an_optimizer_is_refused(method: Method, mlp: Task) -> None:
    for given in ({}, {"state": {}}, {"param_groups": []}):
        with pytest.raises(ValueError, match="not an optimizer state_dict: it needs 'state' and 'param_groups'"):
            method.build(mlp.model()).load_state_dict(given)


@pytest.mark.option("inverse_method")
def test_inverse_method_comes_from_the_checkpoint_like_every_group_value(method: Method, mlp: Task) -> None:
    """A different value is no mismatch, unless the loaded groups disagree with the loaded state."""
    eigen = method.start(mlp, 5, inverse_method="eigen")
    cholesky = by_file(builder(method, mlp, inverse_method="cholesky"), *eigen)
    assert cholesky[1].param_groups[0]["inverse_method"] == "eigen"
    for pair in (eigen, cholesky):
        train(*pair, mlp, 4, start=5)
    assert_same_run(cholesky, eigen)
    saved = snapshot(eigen[1])
    saved["param_groups"][0]["inverse_method"] = "cholesky"
    refuse(method.build(mlp.model(), inverse_method="cholesky"), saved, "inverse_a")


def test_every_difference_is_listed_at_once(method: Method, mlp: Task) -> None:
    """Names are compared if both sides have them, because a permuted model would load into the wrong parameters."""
    saved = own(method, mlp)
    del saved["state"][0][method.landmark]
    saved["state"][1]["momentum_buffer"] = torch.zeros(9)
    saved["state"][3]["surprise"] = 1
    words = ("first.weight", method.landmark, "first.bias", "momentum_buffer", "9", "second.weight", "surprise")
    refuse(method.build(mlp.model()), saved, *words)
    saved = own(method, mlp)
    saved["param_groups"][0]["param_names"][0] = "renamed.weight"
    refuse(method.build(mlp.model()), saved, "renamed.weight")


def test_every_key_and_every_shape_of_the_curvature_is_checked(method: Method, variant: Variant, mlp: Task) -> None:
    """The valid checkpoint can be loaded after all the wrong ones."""
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


SIZES = {"longer": (6, 12), "shorter": (12, 6), "unknown": (6, None), "known": (None, 6)}


@pytest.mark.option("batch_size")
@pytest.mark.cover(sizes=SIZES)
def test_rows_of_another_batch_load(method: Method, mlp: Task, sizes: tuple[int | None, int | None]) -> None:
    """Loaded rows are used until the next update, which has the number of rows of the optimizer itself."""
    old, new = sizes
    model, optimizer = method.start(mlp, 5, batch_size=old)
    other, second = by_file(builder(method, mlp, batch_size=new), model, optimizer)
    assert_identical(snapshot(second), snapshot(optimizer))
    train(model, optimizer, mlp, 1, start=5)
    train(other, second, mlp, 1, start=5)
    assert_identical(values(other), values(model))
    train(other, second, mlp, 4, start=6)
    assert second.state[other.first.weight]["rows_g"].shape == ((new or 6) // 2, 1, 4)
    assert all(value.isfinite().all() for value in values(other).values())


def test_checkpoints_with_and_without_adaptation_can_be_exchanged() -> None:
    x, y = batch()
    plain, adaptive = small(), small()
    a = KFAC(plain, damping=0.1, lr=0.1)
    options = AdaptationOptions(adaptive_damping=True, reject_steps=True, calibrate_damping=True)
    b = KFAC(adaptive, damping=0.3, lr=0.1, adaptation=options)
    a.step(Loop(plain, a, x, y))
    b.load_state_dict(a.state_dict())
    loop = Loop(adaptive, b, x, y)
    for _ in range(2):
        b.step(loop)
    assert loop.calls == 4  # rejection calls the closure twice; damping is not calibrated again after loading
    a.load_state_dict(b.state_dict())
    a.step(Loop(plain, a, x, y))
