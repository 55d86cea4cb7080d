"""`torch.distributed.checkpoint`: state by parameter name, plain and flattened, in memory and through files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from tests.support.methods import Method, Variant
from tests.support.tasks import Task, assert_identical, snapshot, train, values

pytestmark = [
    pytest.mark.parametrize("flat", [False, True], ids=["plain", "flat"]),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),  # that is what is wanted here
]


def trained(method: Method, task: Task, steps: int, dtype: torch.dtype = torch.float64, **keywords: Any) -> Any:
    model = task.model(dtype)
    optimizer = method.build(model, **keywords)
    train(model, optimizer, task, steps)
    return model, optimizer


def get(model: nn.Module, optimizer: Any, flat: bool) -> dict[str, Any]:
    return get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))


def put(model: nn.Module, optimizer: Any, saved: dict[str, Any], flat: bool) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    set_optimizer_state_dict(model, optimizer, saved, options=options)


def test_state_goes_from_one_optimizer_to_another(method: Method, variant: Variant, task: Task, flat: bool) -> None:
    model, optimizer = trained(method, task, 5, **variant.keywords)
    other, second = trained(method, task, 2, **variant.keywords)
    other.load_state_dict(model.state_dict())
    put(other, second, get(model, optimizer, flat), flat)
    assert_identical(second.state_dict(), optimizer.state_dict())
    train(model, optimizer, task, 4, start=5)
    train(other, second, task, 4, start=5)
    assert_identical(values(other), values(model))


def test_keys_are_parameter_names(method: Method, mlp: Task, flat: bool) -> None:
    model, optimizer = trained(method, mlp, 1)
    saved = get(model, optimizer, flat)
    names = {name for name, _ in model.named_parameters()}
    if flat:
        assert {key.removeprefix("state.").rpartition(".")[0] for key in saved if key.startswith("state.")} == names
    else:
        assert saved["state"].keys() == names


def test_getting_it_changes_nothing(method: Method, mlp: Task, flat: bool) -> None:
    """In particular no step is taken to make state appear, as DCP does where there is none."""
    model = mlp.model()
    optimizer = method.build(model)
    before, at_start = snapshot(optimizer), values(model)
    get(model, optimizer, flat)
    assert_identical(snapshot(optimizer), before)
    assert_identical(values(model), at_start)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_factors_of_a_bfloat16_model_keep_their_precision(
    method: Method, variant: Variant, mlp: Task, flat: bool
) -> None:
    model, optimizer = trained(method, mlp, 3, torch.bfloat16, **variant.keywords)
    other, second = trained(method, mlp, 0, torch.bfloat16, **variant.keywords)
    put(other, second, get(model, optimizer, flat), flat)
    assert_identical(second.state_dict(), optimizer.state_dict())


def test_several_groups(method: Method, mlp: Task, flat: bool) -> None:
    def build() -> Any:
        model = mlp.model()
        named = list(model.named_parameters())
        return model, method.build(model, [{"params": named[:2]}, {"params": named[2:], "lr": 0.25}])

    (model, optimizer), (other, second) = build(), build()
    train(model, optimizer, mlp, 3)
    optimizer.param_groups[1]["lr"] = 0.125
    put(other, second, get(model, optimizer, flat), flat)
    assert_identical(second.state_dict(), optimizer.state_dict())


@pytest.mark.fixed_layout
def test_through_files_without_a_process_group(
    method: Method, variant: Variant, mlp: Task, flat: bool, tmp_path: Path
) -> None:
    model, optimizer = trained(method, mlp, 5, **variant.keywords)
    expected = snapshot(optimizer)
    checkpoint.save({"optimizer": get(model, optimizer, flat)}, checkpoint_id=tmp_path, no_dist=True)
    other, second = trained(method, mlp, 0, **variant.keywords)
    target = {"optimizer": get(other, second, flat)}
    checkpoint.load(target, checkpoint_id=tmp_path, no_dist=True)
    put(other, second, target["optimizer"], flat)
    other.load_state_dict(model.state_dict())
    assert_identical(second.state_dict(), expected)
    train(model, optimizer, mlp, 4, start=5)
    train(other, second, mlp, 4, start=5)
    assert_identical(values(other), values(model))


def test_model_and_optimizer_together(method: Method, mlp: Task, flat: bool) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizer = trained(method, mlp, 3)
    other, second = trained(method, mlp, 0)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    set_state_dict(other, second, model_state_dict=model_state, optim_state_dict=optimizer_state, options=options)
    train(model, optimizer, mlp, 4, start=3)
    train(other, second, mlp, 4, start=3)
    assert_identical(values(other), values(model))


@pytest.mark.option("checkpoint_curvature")
def test_partial_checkpoints(method: Method, variant: Variant, mlp: Task, flat: bool) -> None:
    """Flattened, DCP hands back an empty dict for every state key that the checkpoint does not have."""
    for kind in method.partial:
        partial_checkpoint(method, mlp, flat, checkpoint_curvature=kind, **variant.keywords)


def partial_checkpoint(method: Method, mlp: Task, flat: bool, **keywords: Any) -> None:
    model, optimizer = trained(method, mlp, 5, **keywords)
    by_dcp, second = trained(method, mlp, 0, **keywords)
    by_hand, third = trained(method, mlp, 0, **keywords)
    for other in (by_dcp, by_hand):
        other.load_state_dict(model.state_dict())
    try:
        put(by_dcp, second, get(model, optimizer, flat), flat)
    except KeyError:  # older releases of torch want every key of a flattened state, and say so themselves
        assert flat
        assert torch.__version__ < "2.13"
        return
    third.load_state_dict(optimizer.state_dict())
    train(by_dcp, second, mlp, 4, start=5)
    train(by_hand, third, mlp, 4, start=5)
    assert_identical(values(by_dcp), values(by_hand))
