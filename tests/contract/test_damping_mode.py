"""Damping is a number or a share of the curvature: which one, where nothing is said, and for each group."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from tests.support.methods import Method
from tests.support.tasks import Task


@pytest.mark.option("damping_mode", "factor_update_steps")
def test_damping_is_relative_until_a_number_is_given(method: Method, mlp: Task) -> None:
    def found(**keywords: Any) -> tuple[float, str]:
        (group,) = method.cls(mlp.model(), **keywords).param_groups
        return group["damping"], group["damping_mode"]

    assert found()[1] == "relative"
    assert found(damping=1e-3) == (1e-3, "absolute")
    assert found(damping_mode="relative") == found()
    assert found(damping_mode="absolute")[1] == "absolute"
    assert found(damping=2.0, damping_mode="relative") == (2.0, "relative")


@pytest.mark.option("damping_mode")
def test_damping_is_absolute_until_the_mode_is_given(method: Method, mlp: Task) -> None:
    """Where a default of its own says so: not with factors."""
    if method.accepts("factor_update_steps"):
        return
    default = inspect.signature(method.cls).parameters["damping"].default

    def found(**keywords: Any) -> tuple[float, str]:
        (group,) = method.cls(mlp.model(), **keywords).param_groups
        return group["damping"], group["damping_mode"]

    assert found() == (default, "absolute")
    assert found(damping=1e-3) == (1e-3, "absolute")
    assert found(damping_mode="relative") == (default, "relative")
    assert found(damping=2.0, damping_mode="relative") == (2.0, "relative")


@pytest.mark.option("damping_mode", "skip_layers")
def test_damping_of_a_group_carries_its_own_mode(method: Method, mlp: Task) -> None:
    def found(group: dict[str, Any], **keywords: Any) -> tuple[float, str]:
        model = mlp.model()
        groups = [{"params": model.first.parameters()}, {"params": model.second.parameters(), **group}]
        at_once = method.cls(groups, module=model, **keywords).param_groups[1]
        other = mlp.model()
        late = method.cls(other.first.parameters(), module=other, **keywords)
        late.add_param_group({"params": other.second.parameters(), **group})
        pairs = [(g["damping"], g["damping_mode"]) for g in (at_once, late.param_groups[1])]
        assert pairs[0] == pairs[1]
        return pairs[0]

    assert found({"damping": 1e-3}) == (1e-3, "absolute")
    assert found({"damping": 2.0, "damping_mode": "relative"}) == (2.0, "relative")
    assert found({"damping": 2.0}, damping_mode="relative") == (2.0, "relative")
    assert found({"damping": 0.5}, damping=0.1) == (0.5, "absolute")
    assert found({}, damping=0.1) == (0.1, "absolute")
