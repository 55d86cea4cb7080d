"""The table of parameters without an optimizer: names, what a plan depends on, and replaced parameters.

Its effects on training are tested in `tests/contract/test_groups.py` and `tests/capture/test_messages.py`.
"""

from itertools import combinations
from typing import Any

import pytest
import torch
from torch import nn

from secondorder.parameters import ParameterTable
from tests.support.warned import silent


def parameters(*sizes: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(size)) for size in sizes]


def table_of(*groups: dict[str, Any], root: nn.Module | None = None) -> ParameterTable:
    table = ParameterTable("Newton", ("width",), groups=list(groups), root=root)
    table.regroup()
    table.name_parameters()
    return table


# ------------------------------------------------------------------ groups and names
def test_the_table_contains_groups_the_first_parameter_and_frozen_ones() -> None:
    p, q = parameters(2, 3)
    first, second = {"params": [p]}, {"params": [q]}
    table = table_of(first, second)
    assert table.group_of[p] is first
    assert table.group_of[q] is second
    assert table.first is p
    assert table_of().first is None
    p.requires_grad_(False)
    assert table_of({"params": [p, q]}).reasons == {p: "frozen"}


def test_names_come_from_the_group_then_from_the_module_then_from_the_position() -> None:
    layer, (alien, other) = nn.Linear(2, 2), parameters(1, 1)
    named, bias = {"params": [layer.weight], "param_names": ["kernel"]}, {"params": [layer.bias]}
    assert [*table_of(named, bias, root=layer).names.values()] == ["kernel", "bias"]
    assert table_of(named, bias, {"params": [alien]}, root=layer).names_of_groups() == [["kernel"], ["bias"], None]
    by_position = table_of({"params": [layer.bias]}, {"params": [alien, other]})
    assert [*by_position.names.values()] == ["group 0 parameter 0", "group 1 parameter 0", "group 1 parameter 1"]


def test_a_module_that_is_not_followed_gives_names_only() -> None:
    layer = nn.Linear(2, 2)
    table = table_of({"params": [*layer.parameters()]}, root=layer)
    assert table.module is layer
    table.is_followed = False
    assert table.module is None
    assert [*table.inside().values()] == ["weight", "bias"]


def test_forgetting_a_parameter_removes_all_of_its_entries() -> None:
    p, q = parameters(1, 1)
    table = table_of({"params": [p, q]})
    table.state = {p: {"step": 1}, q: {"step": 2}}
    table.skipped_by_user, table.reasons = {q}, {q: "skipped"}
    table.groups[0]["params"].remove(q)
    table.forget([q])
    assert (*table.names, *table.state, *table.group_of) == (p, p, p)
    assert not table.reasons
    assert not table.skipped_by_user


# ------------------------------------------------------------------ moved and replaced parameters
def test_a_layout_shows_what_a_plan_depends_on() -> None:
    p, q = parameters(1, 1)
    table = table_of({"params": [p, q], "width": 1, "lr": 1.0})
    layouts = [table.layout()]
    table.groups[0]["lr"] = 2.0
    assert table.layout() == layouts[0]
    for change in (
        lambda: p.requires_grad_(False),
        lambda: setattr(p, "data", p.data.double()),
        lambda: table.groups[0]["params"].reverse(),
        lambda: table.groups[0].update(width=2),
    ):
        change()
        layouts.append(table.layout())
    assert all(a != b for a, b in combinations(layouts, 2))


def test_parameters_count_as_replaced_once_there_is_a_plan() -> None:
    table = table_of({"params": parameters(1)})
    table.groups[0]["params"] = parameters(1)
    assert not table.has_changed
    table.signature = table.layout()
    assert table.has_changed
    table.regroup()
    assert not table.has_changed


def test_a_module_with_other_parameters_is_refused() -> None:
    layer = nn.Linear(2, 2)
    table = table_of({"params": [*layer.parameters()]}, root=layer)
    table.require_live()
    layer.bias = nn.Parameter(torch.ones(2))
    with pytest.raises(RuntimeError, match="the module has another 'bias' than when the optimizer was made"):
        table.require_live()


def test_a_module_that_does_not_fit_changes_nothing() -> None:
    layer = nn.Linear(2, 2)
    table = table_of({"params": [*layer.parameters()]}, root=layer)
    table.state = {p: {} for p in layer.parameters()}
    with pytest.raises(ValueError, match=r"no parameter 'bias' of shape \(2,\)"):
        table.repoint({"weight": nn.Linear(2, 2).weight, "bias": nn.Linear(2, 3).bias})
    assert table.groups[0]["params"] == [layer.weight, layer.bias]
    assert [*table.state] == [layer.weight, layer.bias]


def test_uncovered_parameters_are_named_by_their_reason() -> None:
    p, q, r = parameters(1, 1, 1)
    table = table_of({"params": [p, q, r], "param_names": ["p", "q", "r"], "fallback": "sgd"})
    table.reasons = {q: "too large"}
    with pytest.warns(UserWarning, match=r"(?s)Newton: some parameters get no curvature.*too large: q.*not covered: r"):
        table.warn_uncovered({p})
    q.requires_grad_(False)  # frozen and skipped parameters cause no warning
    table.skipped_by_user = {r}
    with silent():
        table.warn_uncovered({p})
