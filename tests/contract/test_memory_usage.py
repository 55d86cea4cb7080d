"""`memory_usage()` agrees exactly with the formulas for each kind, and counts all memory of the state.

`diagnostics()` of the same training is plain data, and no step is skipped.
"""

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.methods import Method, Variant
from tests.support.storages import shapes
from tests.support.tasks import Task, train

KINDS = {
    "factors", "second_order", "scale", "window", "error", "gram", "rows", "kernel", "momentum", "fallback",
    "pending", "directions", "buffers", "workspace", "total",
}  # fmt: skip


def check_diagnostics(optimizer: Any) -> None:
    report = optimizer.diagnostics()
    assert json.loads(json.dumps(report)) == report
    assert type(report["skipped_steps"]) is int
    assert report["skipped_steps"] == 0


@pytest.mark.cover(dtype=[torch.float64, torch.float32, torch.bfloat16])
def test_curvature_agrees_with_the_formula_and_kinds_sum_to_the_total(
    method: Method, variant: Variant, task: Task, dtype: torch.dtype
) -> None:
    """The total of a window method is its state and the workspace, which does not grow."""
    model = task.model(dtype)
    optimizer, workspace = method.build(model, **variant.keywords), []
    for step in range(6):
        check_diagnostics(optimizer)
        optimizer.zero_grad()
        usage = optimizer.memory_usage()
        assert usage.keys() <= KINDS
        assert all(type(value) is int and value >= 0 for value in usage.values())
        assert usage["total"] == sum(value for kind, value in usage.items() if kind != "total")
        if step in (0, 5):
            for kind, expected in variant.sizes(model, dtype).items():
                assert usage[kind] in expected, kind
        if not method.layerwise and step > 2:
            check_total(optimizer)
            workspace.append(usage.get("workspace", 0))
        train(model, optimizer, task, 1, start=step)
    assert len(set(workspace)) <= 1


def check_total(optimizer: Any) -> None:
    """The total is the state, except for scalars (counts and step counters), plus the workspace."""
    held = sum(v.nbytes for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor))
    usage = optimizer.memory_usage()
    assert abs(usage["total"] - usage.get("workspace", 0) - held) <= 8 * 2 * len(optimizer.state)


@pytest.mark.option("skip_layers")
def test_the_workspace_holds_the_temporaries_of_the_largest_block(method: Method, mlp: Task) -> None:
    model, optimizer = method.start(mlp, 2)
    held = optimizer.memory_usage().get("workspace", 0)
    # the gradient matrix, both bases or inverses and two products, with rows padded to multiples of 16 elements
    padded = [(block.n_a + 16, block.n_g + 16) for block in shapes(model)]
    assert held <= 8 * max(a * a + g * g + 3 * g * a for a, g in padded)
    train(model, optimizer, mlp, 2, start=2)
    assert optimizer.memory_usage().get("workspace", 0) == held


def test_momentum_and_fallback_bytes(method: Method, mlp: Task) -> None:
    model = mlp.model(torch.float32)
    left_out = method.left_out(model)
    covered = sum(p.numel() for name, p in model.named_parameters() if name not in left_out)
    usage = method.build(model, momentum=0.9, fallback="adamw", **method.leave_out).memory_usage()
    assert usage["momentum"] == 4 * covered
    rest = sum(model.get_parameter(name).numel() for name in left_out)
    assert 0 <= usage["fallback"] - 2 * 4 * rest <= 8 * len(left_out)  # step counters may be reported with it
    assert method.build(model, momentum=0.0).memory_usage().get("momentum", 0) == 0
    for rule in ({}, {"momentum": 0.0}, {"fallback": "adamw"}, {"graft": "adam"}):
        _, optimizer = method.start(mlp, 3, **rule)
        optimizer.zero_grad()
        check_total(optimizer)


@pytest.mark.option("skip_layers")
def test_pending_statistics_are_counted_and_freed_by_the_step(method: Method, mlp: Task) -> None:
    model, optimizer = method.start(mlp, 1)
    optimizer.zero_grad()
    at_rest = optimizer.memory_usage()["total"]
    optimizer.param_groups[0][method.capture_keyword] = 1
    mlp.loss(model, 0).backward()
    during = optimizer.memory_usage()
    assert during.get("pending", 0) >= 8 * method.pending(model)
    optimizer.step()
    assert optimizer.memory_usage()["total"] == at_rest
