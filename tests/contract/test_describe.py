"""`describe()`: one row per parameter, starting with its name; "fallback" only where a parameter takes it."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from tests.support.methods import Method, Variant
from tests.support.tasks import TRANSFORMER, Task


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


def test_one_row_per_parameter(method: Method, task: Task) -> None:
    model = task.model()
    found = rows(method.build(model), model)
    assert list(found) == [name for name, _ in model.named_parameters()]


def test_the_word_fallback_stands_in_rows_of_fallback_parameters_only(method: Method, task: Task) -> None:
    model, optimizer = method.start(task, **method.leave_out)
    found, left_out = rows(optimizer, model), method.left_out(model)
    assert left_out
    for name in left_out:
        assert "fallback" in found[name], name
    for name in method.covered(model) - set(left_out):
        assert "fallback" not in found[name], name
    with_it = [line for line in optimizer.describe().splitlines() if "fallback" in line.lower()]
    assert set(with_it) <= set(found.values())


def test_rows_agree_with_the_state(method: Method, task: Task) -> None:
    """A weight that holds curvature is not in the fallback, and the other way round."""
    model, optimizer = method.start(task, **method.leave_out)
    plain = {"step", "momentum_buffer", "global_step"}
    for name, row in rows(optimizer, model).items():
        if name.endswith("weight") or not method.layerwise:
            assert ("fallback" in row) == (optimizer.state[model.get_parameter(name)].keys() <= plain), name


@pytest.mark.option("window_size")
def test_nothing_is_left_out_of_a_window_unasked(method: Method, variant: Variant, task: Task) -> None:
    model = task.model()
    for params in (None, model.named_parameters(), model.parameters()):
        text = method.build(model, params, **variant.keywords).describe()
        assert "fallback" not in text
        assert len(text.splitlines()) >= len(list(model.parameters()))


@pytest.mark.option("skip_norm_layers", "skip_biases")
def test_two_ways_out_of_a_window_have_two_reasons(method: Method) -> None:
    model = TRANSFORMER.model()
    found = rows(method.build(model, skip_norm_layers=True, skip_biases=True), model)
    assert {name for name, row in found.items() if "fallback" in row} == {
        "norm.weight", "norm.bias", "qkv.bias", "out.bias",
    }  # fmt: skip
    reasons = {name: found[name].partition("fallback")[2].strip() for name in ("norm.weight", "qkv.bias")}
    assert reasons["norm.weight"] != reasons["qkv.bias"]


@pytest.mark.option("skip_layers")
@pytest.mark.cover(skipped=["second", "sec*", nn.Linear])
def test_skipped_layers_say_so(method: Method, mlp: Task, skipped: Any) -> None:
    model = mlp.model()
    found = rows(method.build(model, skip_layers=(skipped,)), model)
    for name in ("second.weight", "second.bias"):
        assert "fallback" in found[name]
        assert "skip" in found[name]
    assert ("fallback" in found["first.weight"]) == (skipped is nn.Linear)


@pytest.mark.option("skip_layers")
def test_reasons_differ(method: Method, mlp: Task) -> None:
    """The row says *why*: a skipped layer and a bare parameter are two different stories."""
    model = mlp.model()
    found = rows(method.build(model, skip_layers=("second",)), model)
    assert found["scale.gain"].partition("fallback")[2].strip() != found["second.bias"].partition("fallback")[2].strip()


def test_parameter_that_joins_late_gets_a_row(method: Method, mlp: Task) -> None:
    model = mlp.model()
    optimizer = method.build(model, model.first.parameters(), module=model)  # a window takes the names from there
    assert set(rows(optimizer, model)) == {"first.weight", "first.bias"}
    optimizer.add_param_group({"params": [*model.scale.parameters(), *model.second.parameters()]})
    found = rows(optimizer, model)
    assert len(found) == 5
    assert "fallback" not in found["second.weight"]
    assert ("fallback" in found["scale.gain"]) == method.layerwise


@pytest.mark.option("skip_layers")
def test_parameter_outside_the_module_gets_a_row_with_its_reason(method: Method, mlp: Task) -> None:
    model = mlp.model()
    optimizer = method.build(model, model.parameters())
    before = optimizer.describe()
    optimizer.add_param_group({"params": [nn.Parameter(model.scale.gain.detach().clone())]})
    after = optimizer.describe()
    count = [sum("fallback" in line for line in text.splitlines()) for text in (before, after)]
    assert count == [1, 2]


def test_shapes_stand_in_the_rows_and_training_does_not_disturb(method: Method, mlp: Task) -> None:
    model, optimizer = method.start(mlp, 3)
    found = rows(optimizer, model)
    assert "4" in found["first.weight"]
    assert "5" in found["first.weight"]
