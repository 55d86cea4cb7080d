"""`describe()` has one row per parameter, which starts with its name and mentions the fallback if it is used.

`repr(optimizer)` is short: learning rate, weight decay, and options that differ from their defaults.
"""

import copy
from typing import Any

import pytest
from torch import nn

from tests.support.building import built
from tests.support.methods import Method
from tests.support.tasks import TRANSFORMER, Task, train


def rows(optimizer: Any, model: nn.Module) -> dict[str, str]:
    names = {name for name, _ in model.named_parameters()}
    found: dict[str, str] = {}
    for line in optimizer.describe().splitlines():
        first = line.split()[0] if line.split() else ""
        if first in names:
            assert line.startswith(first)
            assert first not in found, f"{first} has two rows"
            found[first] = line
    return found


def reason(row: str) -> str:
    return row.partition("fallback")[2].strip()


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


@pytest.mark.option("skip_norm_layers", "skip_biases")
def test_norm_layers_and_biases_outside_a_window_have_different_reasons(method: Method) -> None:
    model = TRANSFORMER.model()
    found = rows(method.build(model, skip_norm_layers=True, skip_biases=True), model)
    out = {"norm.weight", "norm.bias", "qkv.bias", "out.bias"}
    assert {name for name, row in found.items() if "fallback" in row} == out
    assert reason(found["norm.weight"]) != reason(found["qkv.bias"])


@pytest.mark.option("skip_layers")
def test_a_skipped_layer_and_a_bare_parameter_have_different_reasons(method: Method, mlp: Task) -> None:
    model = mlp.model()
    found = rows(method.build(model, skip_layers=("second",)), model)
    assert reason(found["scale.gain"]) != reason(found["second.bias"])


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
    lines = lines_of(optimizer)
    assert lines[0] == f"{method.cls.__name__} ("
    assert lines[-1] == ")"
    assert {"lr: 0.03", "weight_decay: 0.25"} <= set(lines)
    assert len(lines) < 24
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
