"""Reports of every method: `describe()`, `repr(optimizer)`, `memory_usage()` and `diagnostics()`.

`describe()` has one row per parameter, which starts with its name and mentions the fallback if it is used. `repr` is
short: learning rate, weight decay, and options that differ from their defaults. `memory_usage()` agrees exactly with
the formulas for each kind, and counts all memory of the state. `diagnostics()` is plain data.
"""

import copy
import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.building import built
from tests.support.methods import Method, Variant
from tests.support.storages import shapes
from tests.support.tasks import TRANSFORMER, Task, train

KINDS = {
    "factors", "second_order", "scale", "window", "error", "gram", "rows", "kernel", "momentum", "fallback",
    "pending", "directions", "buffers", "workspace", "total",
}  # fmt: skip


def rows(optimizer: Any, model: nn.Module) -> dict[str, str]:
    """The row of every parameter of a model that the optimizer describes; a name has one row at most."""
    names = {name for name, _ in model.named_parameters()}
    lines = [(line.split(" ")[0], line) for line in optimizer.describe().splitlines()]
    found = [(name, line) for name, line in lines if name in names]
    assert len(found) == len(dict(found))
    return dict(found)


def test_exactly_the_rows_of_parameters_that_use_the_fallback_mention_it(method: Method, task: Task) -> None:
    model, optimizer = method.start(task, **method.leave_out)
    found, left_out = rows(optimizer, model), method.left_out(model)
    assert list(found) == [name for name, _ in model.named_parameters()]
    assert left_out
    plain = {"step", "momentum_buffer", "global_step"}
    for name, row in found.items():
        if name in left_out:
            assert "fallback" in row, name
        elif name in method.covered(model):
            assert "fallback" not in row, name
        if name.endswith("weight") or not method.layerwise:
            assert ("fallback" in row) == (optimizer.state[model.get_parameter(name)].keys() <= plain), name
    with_it = [line for line in optimizer.describe().splitlines() if "fallback" in line.lower()]
    assert set(with_it) <= set(found.values())


def test_different_reasons_are_described(method: Method) -> None:
    """Of a skipped layer and a bare parameter, or of a norm layer and a bias outside a window."""
    options, *names = {"skip_norm_layers": True, "skip_biases": True}, "norm.weight", "qkv.bias"
    if method.layerwise:
        options, *names = {"skip_layers": "head"}, "head.weight", "scale.gain"
    model = TRANSFORMER.model()
    found = rows(method.build(model, **options), model)
    reasons = {found[name].partition("fallback")[2].strip() for name in names}
    assert len(reasons - {""}) == 2


def test_a_parameter_that_is_added_later_gets_a_row(method: Method, mlp: Task) -> None:
    model = mlp.model()
    optimizer = method.build(model, model.first.parameters(), module=model)  # for a window method, because of the names
    assert set(rows(optimizer, model)) == {"first.weight", "first.bias"}
    optimizer.add_param_group({"params": [*model.scale.parameters(), *model.second.parameters()]})
    train(model, optimizer, mlp, 2)
    found = rows(optimizer, model)
    assert len(found) == 5
    assert "fallback" not in found["second.weight"]
    assert ("fallback" in found["scale.gain"]) == method.layerwise
    assert all(size in found["first.weight"] for size in "45")  # the shape of the weight
    if method.layerwise:
        before = optimizer.describe().count("fallback")
        optimizer.add_param_group({"params": [nn.Parameter(model.scale.gain.detach().clone())]})
        assert optimizer.describe().count("fallback") == before + 1  # the parameter is outside the module


def lines_of(optimizer: object) -> list[str]:
    return [line.strip() for line in repr(optimizer).splitlines()]


def test_repr_leaves_out_defaults_and_shows_other_and_scheduled_values(method: Method) -> None:
    optimizer = method.cls(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), lr=0.03, weight_decay=0.25)
    first, *lines, last = lines_of(optimizer)
    assert (first, last) == (f"{method.cls.__name__} (", ")")
    assert {"lr: 0.03", "weight_decay: 0.25"} <= set(lines)
    assert len(lines) < 22
    assert not any(line.startswith(("foreach", "nesterov", "param_names", "fallback_base_lr")) for line in lines)
    group = optimizer.param_groups[0]
    group.update(clip_norm=2.5, initial_lr=0.5)  # a scheduler adds the latter
    lines = lines_of(copy.deepcopy(optimizer))
    assert {"clip: ClipOptions(norm=2.5)", "initial_lr: 0.5", "weight_decay: 0.25"} <= set(lines)
    group.update(weight_decay=0.0, clip_norm=None)
    assert "weight_decay: 0.0" in lines_of(optimizer)
    assert not any("clip" in line for line in lines_of(optimizer))


def test_repr_shows_equal_groups_once(method: Method) -> None:
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(30)))
    groups = [{"params": list(layer.parameters())} for layer in model]
    groups[7]["lr"] = 0.5
    optimizer = built(method.cls, groups, lr=0.03, **{"module": model} if method.layerwise else {})
    lines = lines_of(optimizer)
    titles = [line for line in lines if line.startswith("Parameter Group")]
    assert titles == ["Parameter Groups 0 to 6", "Parameter Group 7", "Parameter Groups 8 to 29"]
    assert [line for line in lines if line.startswith("lr:")] == ["lr: 0.03", "lr: 0.5", "lr: 0.03"]


@pytest.mark.cover(dtype=[torch.float64, torch.float32, torch.bfloat16])
def test_curvature_agrees_with_the_formula_and_kinds_sum_to_the_total(
    method: Method, variant: Variant, task: Task, dtype: torch.dtype
) -> None:
    """The total of a window method is its state and the workspace, which does not grow."""
    model = task.model(dtype)
    optimizer, workspace = method.build(model, **variant.keywords), []
    for step in range(6):
        report = optimizer.diagnostics()
        assert json.loads(json.dumps(report)) == report
        assert (type(report["skipped_steps"]), report["skipped_steps"]) == (int, 0)
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
