"""`repr(optimizer)` fits on a screen: learning rate, weight decay, and what was not left at its default."""

from __future__ import annotations

import copy

from torch import nn

from tests.support.methods import Method


def lines_of(optimizer: object) -> list[str]:
    return [line.strip() for line in repr(optimizer).splitlines()]


def test_defaults_are_left_out(method: Method) -> None:
    optimizer = method.cls(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), lr=0.03)
    lines = lines_of(optimizer)
    assert lines[0] == f"{method.cls.__name__} ("
    assert lines[-1] == ")"
    assert "lr: 0.03" in lines
    assert len(lines) < 24
    assert "weight_decay: 0.0" in lines
    assert not any(line.startswith(("foreach", "nesterov", "param_names", "fallback_base_lr")) for line in lines)


def test_what_was_chosen_or_scheduled_is_shown(method: Method) -> None:
    optimizer = method.cls(nn.Linear(3, 4), weight_decay=0.25)
    assert "weight_decay: 0.25" in lines_of(optimizer)
    optimizer.param_groups[0]["clip_norm"] = 2.5
    optimizer.param_groups[0]["initial_lr"] = 0.5  # as a scheduler adds it
    lines = lines_of(copy.deepcopy(optimizer))
    assert {"clip_norm: 2.5", "initial_lr: 0.5", "weight_decay: 0.25"} <= set(lines)
    optimizer.param_groups[0]["weight_decay"] = 0.0
    optimizer.param_groups[0]["clip_norm"] = None
    assert "weight_decay: 0.0" in lines_of(optimizer)
    assert not any("clip_norm" in line for line in lines_of(optimizer))


def test_equal_groups_are_shown_once(method: Method) -> None:
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(30)))
    groups = [{"params": list(layer.parameters())} for layer in model]
    groups[7]["lr"] = 0.5
    optimizer = method.cls(groups, lr=0.03, **({"module": model} if method.layerwise else {}))
    lines = lines_of(optimizer)
    titles = [line for line in lines if line.startswith("Parameter Group")]
    assert titles == ["Parameter Groups 0 to 6", "Parameter Group 7", "Parameter Groups 8 to 29"]
    assert [line for line in lines if line.startswith("lr:")] == ["lr: 0.03", "lr: 0.5", "lr: 0.03"]
