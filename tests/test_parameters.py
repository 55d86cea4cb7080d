"""The table of parameters on plain values: names, groups, gradients, and parameters that others have replaced."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from secondorder.parameters import ParameterTable


def parameters(*sizes: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(size)) for size in sizes]


def table_of(*groups: dict[str, Any], root: nn.Module | None = None) -> ParameterTable:
    table = ParameterTable("Newton", ("width",), groups=list(groups), root=root)
    table.regroup()
    table.name_parameters()
    return table


# ------------------------------------------------------------------ groups and names
def test_every_parameter_has_its_group_and_the_first_one_is_known() -> None:
    p, q = parameters(2, 3)
    first, second = {"params": [p]}, {"params": [q]}
    table = table_of(first, second)
    assert table.group_of[p] is first
    assert table.group_of[q] is second
    assert table.first is p


def test_a_table_without_parameters_has_no_first_one() -> None:
    assert table_of().first is None


def test_a_group_names_its_parameters_before_the_module_does() -> None:
    layer = nn.Linear(2, 2)
    named = {"params": [layer.weight], "param_names": ["kernel"]}
    assert [*table_of(named, {"params": [layer.bias]}, root=layer).names.values()] == ["kernel", "bias"]


def test_without_names_and_module_parameters_are_named_by_their_position() -> None:
    table = table_of({"params": parameters(1)}, {"params": parameters(1, 1)})
    assert [*table.names.values()] == ["group 0 parameter 0", "group 1 parameter 0", "group 1 parameter 1"]


def test_a_frozen_parameter_has_that_as_its_reason() -> None:
    p, q = parameters(1, 1)
    p.requires_grad_(False)
    assert table_of({"params": [p, q]}).reasons == {p: "frozen"}


def test_names_of_a_group_are_given_those_of_the_module_or_unknown() -> None:
    layer, (alien,) = nn.Linear(2, 2), parameters(1)
    table = table_of(
        {"params": [layer.weight], "param_names": ["kernel"]}, {"params": [layer.bias]}, {"params": [alien]}, root=layer
    )
    assert table.names_of_groups() == [["kernel"], ["bias"], None]


def test_a_module_that_is_not_followed_gives_names_only() -> None:
    layer = nn.Linear(2, 2)
    table = table_of({"params": [*layer.parameters()]}, root=layer)
    assert table.module is layer
    table.is_followed = False
    assert table.module is None
    assert [*table.inside().values()] == ["weight", "bias"]


def test_a_late_group_is_named_if_the_others_are() -> None:
    p, q = parameters(1, 1)
    named = table_of({"params": [p], "param_names": ["p"]})
    assert named.named_like_the_others({"params": q, "lr": 1.0}) == {"params": [("group1.0", q)], "lr": 1.0}
    assert table_of({"params": [p]}).named_like_the_others({"params": q}) == {"params": [q]}


def test_names_that_were_given_to_a_late_group_stay() -> None:
    p, q = parameters(1, 1)
    table = table_of({"params": [p], "param_names": ["p"]})
    assert table.named_like_the_others({"params": [("mine", q)]}) == {"params": [("mine", q)]}


def test_a_set_is_left_for_torch_to_refuse() -> None:
    group: dict[str, Any] = {"params": set(parameters(1))}
    assert table_of().named_like_the_others(group) is group


def test_a_parameter_that_is_forgotten_leaves_nothing() -> None:
    p, q = parameters(1, 1)
    table = table_of({"params": [p, q]})
    table.state = {p: {"step": 1}, q: {"step": 2}}
    table.skipped_by_user, table.reasons = {q}, {q: "skipped"}
    table.groups[0]["params"].remove(q)
    table.forget([q])
    assert (*table.names, *table.state, *table.group_of) == (p, p, p)
    assert not table.reasons
    assert not table.skipped_by_user


# ------------------------------------------------------------------ what was moved or replaced
@pytest.mark.parametrize("change", ["requires_grad", "dtype", "order", "option"])
def test_a_layout_shows_what_a_plan_depends_on(change: str) -> None:
    p, q = parameters(1, 1)
    table = table_of({"params": [p, q], "width": 1, "lr": 1.0})
    before = table.layout()
    table.groups[0]["lr"] = 2.0
    assert table.layout() == before
    if change == "requires_grad":
        p.requires_grad_(False)
    elif change == "dtype":
        p.data = p.data.double()
    elif change == "order":
        table.groups[0]["params"].reverse()
    else:
        table.groups[0]["width"] = 2
    assert table.layout() != before


def test_parameters_count_as_replaced_once_there_is_a_plan() -> None:
    table = table_of({"params": parameters(1)})
    table.groups[0]["params"] = parameters(1)
    assert not table.was_replaced
    table.note_plan()
    assert table.was_replaced
    table.regroup()
    assert not table.was_replaced


@pytest.mark.parametrize("steps", [0, 3])
def test_state_of_replaced_parameters_is_dropped_with_a_warning_after_the_first_step(steps: int) -> None:
    p, q = parameters(1, 1)
    table = table_of({"params": [p], "param_names": ["p"]})
    table.state = {p: {"momentum_buffer": p.detach()}}
    table.groups[0]["params"] = [q]
    table.regroup()
    table.name_parameters()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        table.forget_replaced(steps)
    assert [*table.names] == [q]
    assert not table.state
    texts = [str(warning.message) for warning in caught]
    assert ["after 3 steps other parameters" in text for text in texts] == [True] * bool(steps)


def test_a_module_with_other_parameters_is_refused() -> None:
    layer = nn.Linear(2, 2)
    table = table_of({"params": [*layer.parameters()]}, root=layer)
    table.require_live()
    layer.bias = nn.Parameter(torch.ones(2))
    with pytest.raises(RuntimeError, match="the module has another 'bias' than when the optimizer was made"):
        table.require_live()


def test_parameters_of_another_module_take_over_groups_and_state() -> None:
    layer, other = nn.Linear(2, 2), nn.Linear(2, 2)
    table = table_of({"params": [layer.weight]}, {"params": [layer.bias]}, root=layer)
    table.state = {layer.weight: {"step": 1}, layer.bias: {"step": 2}}
    found = table.repoint(dict(other.named_parameters()))
    assert found == {layer.weight: other.weight, layer.bias: other.bias}
    assert [group["params"] for group in table.groups] == [[other.weight], [other.bias]]
    assert table.state == {other.weight: {"step": 1}, other.bias: {"step": 2}}


def test_a_module_that_does_not_fit_changes_nothing() -> None:
    layer = nn.Linear(2, 2)
    table = table_of({"params": [*layer.parameters()]}, root=layer)
    table.state = {p: {} for p in layer.parameters()}
    with pytest.raises(ValueError, match=r"no parameter 'bias' of shape \(2,\)"):
        table.repoint({"weight": nn.Linear(2, 2).weight, "bias": nn.Linear(2, 3).bias})
    assert table.groups[0]["params"] == [layer.weight, layer.bias]
    assert [*table.state] == [layer.weight, layer.bias]


# ------------------------------------------------------------------ what a step needs
def test_gradients_are_those_that_exist_and_negated_where_a_group_maximizes() -> None:
    p, q, r = parameters(2, 2, 2)
    p.grad, q.grad = torch.ones(2), torch.ones(2)
    found = table_of({"params": [p, r], "maximize": False}, {"params": [q], "maximize": True}).gradients()
    assert [*found] == [p, q]
    assert found[p] is p.grad
    assert torch.equal(found[q], -torch.ones(2))


def test_sparse_gradients_become_dense() -> None:
    (p,) = parameters(3)
    p.grad = torch.tensor([0.0, 2.0, 0.0]).to_sparse()
    found = table_of({"params": [p], "maximize": False}).gradients()
    assert torch.equal(found[p], torch.tensor([0.0, 2.0, 0.0]))


# ------------------------------------------------------------------ warnings
def uncovered(table: ParameterTable, covered: list[nn.Parameter]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        table.warn_uncovered(set(covered))
    return [str(warning.message) for warning in caught]


def test_uncovered_parameters_are_named_by_their_reason() -> None:
    p, q, r = parameters(1, 1, 1)
    table = table_of({"params": [p, q, r], "param_names": ["p", "q", "r"], "fallback": "sgd"})
    table.reasons = {q: "too large"}
    (text,) = uncovered(table, [p])
    assert "Newton: some parameters get no curvature and follow the fallback rule" in text
    assert "too large: q" in text
    assert "not covered: r" in text


def test_nothing_is_said_of_frozen_and_skipped_parameters() -> None:
    p, q, r = parameters(1, 1, 1)
    q.requires_grad_(False)
    table = table_of({"params": [p, q, r], "fallback": "sgd"})
    table.skipped_by_user = {r}
    assert uncovered(table, [p]) == []


def test_a_model_without_curvature_is_told_the_rules_that_it_follows() -> None:
    table = table_of({"params": parameters(1), "fallback": "sgd"}, {"params": parameters(1), "fallback": "adam"})
    (text,) = uncovered(table, [])
    assert "nothing is covered" in text
    assert "'adam' or 'sgd'" in text
