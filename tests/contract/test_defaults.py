"""What a user writes first: the class and the model, or its parameters, and nothing else."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.methods import Method
from tests.support.tasks import (
    Task,
    assert_changed,
    backward,
    put_back,
    train,
    values,
)

BUILDS: dict[str, Callable[[Method, nn.Module], Any]] = {
    "module": lambda method, model: method.cls(model),
    "parameters": lambda method, model: method.cls(model.parameters(), **needed(method, model)),
    "named": lambda method, model: method.cls(model.named_parameters(), **needed(method, model)),
    "groups": lambda method, model: method.cls(
        [{"params": list(module.parameters())} for module in model.children() if list(module.parameters())],
        **needed(method, model),
    ),
}


def needed(method: Method, model: nn.Module) -> dict[str, nn.Module]:
    return {"module": model} if method.layerwise else {}


@pytest.mark.cover(way=[*BUILDS])
def test_trains(method: Method, task: Task, way: str) -> None:
    trains(method, task, way, torch.float32)


@pytest.mark.cover(dtype=[torch.float64, torch.bfloat16])
def test_trains_in_another_precision(method: Method, task: Task, dtype: torch.dtype) -> None:
    trains(method, task, "module", dtype)


def trains(method: Method, task: Task, way: str, dtype: torch.dtype) -> None:
    model = task.model(dtype)
    optimizer, before = BUILDS[way](method, model), values(model)
    losses = [float(backward(model, optimizer, task, 0))]
    for _ in range(6):
        optimizer.step()
        losses.append(float(backward(model, optimizer, task, 0)))
    if dtype is torch.bfloat16:  # in which a small step may round to nothing
        assert all(value.isfinite().all() for value in values(model).values())
    else:
        assert_changed(model, before)
        assert losses[-1] < losses[0]


@pytest.mark.cover(way=[*BUILDS])
def test_speaks_of_every_parameter(method: Method, task: Task, way: str) -> None:
    model = task.model()
    optimizer = BUILDS[way](method, model)
    train(model, optimizer, task, 2)
    assert sum(bool(line.strip()) for line in optimizer.describe().splitlines()) >= len(list(model.parameters()))
    assert repr(optimizer).startswith(method.cls.__name__)
    usage = optimizer.memory_usage()
    assert usage["total"] == sum(size for kind, size in usage.items() if kind != "total") > 0
    assert optimizer.diagnostics()["skipped_steps"] == 0


@pytest.mark.option("window_size")
def test_window_says_nothing_unasked(method: Method, task: Task) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for build in BUILDS.values():
            model = task.model()
            train(model, build(method, model), task, 3)


@pytest.mark.option("window_size")
@pytest.mark.cover(repeats=[3, 12])
def test_one_batch_over_and_over(method: Method, mlp: Task, repeats: int) -> None:
    """Rows that are (nearly) the same again and again, at the small damping that is the default."""
    for dtype in (torch.float32, torch.float64):
        model = mlp.model(dtype)
        optimizer, start = method.cls(model, lr=1.0), values(model)
        for _ in range(repeats):
            backward(model, optimizer, mlp, 0)
            gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
            optimizer.step()
            moved = {name: value - start[name] for name, value in values(model).items()}
            put_back(model, start)
            assert all(value.isfinite().all() for value in moved.values())
            if not method.variants[0].lingers:
                assert sum(float((moved[name] * gradients[name]).sum()) for name in moved) < 0
        assert optimizer.diagnostics()["skipped_steps"] == 0
