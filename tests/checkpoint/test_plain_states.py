"""What a checkpoint checks, on plain states without an optimizer."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from secondorder import options
from secondorder.checkpoint.checkpoint import Checkpoint, KnownOptions
from secondorder.checkpoint.comparison import absent, matched_by_name, was_never_trained
from secondorder.comm import Local
from secondorder.curvature.schema import ESTIMATE, FOUND, Place, Schema
from secondorder.parameters import ParameterTable
from secondorder.preconditioners.base import SavedStates, StateForm
from secondorder.preconditioners.group_options import GroupRules
from secondorder.runtime import Runtime


class Curvature:
    """A vector for each parameter."""

    form = StateForm()

    def schema_of(self, p: nn.Parameter, group: Any, held: Any) -> Schema:
        return {"factor_a": ESTIMATE._replace(like=torch.empty(3, device="meta"))}

    def covers(self, p: nn.Parameter) -> bool:
        return True

    def places_here(self, p: nn.Parameter) -> frozenset[Place]:
        return frozenset(Place)

    def placed(self) -> list[Any]:
        return []

    def is_a_copy(self) -> str:
        return ""

    def settle(self, follow: Any) -> None:
        pass

    def misfits(self, states: SavedStates) -> list[str]:
        return []

    def while_loading(self, states: SavedStates, rebuild: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def translated(self, states: SavedStates, group_of: Any) -> SavedStates:
        return states

    def expected(self, p: nn.Parameter, schema: Schema, theirs: Any) -> Schema:
        return schema

    def loaded(self, rebuild: Any) -> None:
        pass


def made() -> tuple[Checkpoint, ParameterTable]:
    group = {**options.DEFAULTS, "params": [nn.Parameter(torch.zeros(2))], "lr": 0.1, "fallback_base_lr": 0.1}
    group["fallback"] = "sgd"
    table = ParameterTable("Method", groups=[group], entries={"factor_a": ESTIMATE})
    table.regroup()
    table.names = dict.fromkeys(table.group_of, "weight")
    known = KnownOptions({}, {}, GroupRules())
    return Checkpoint("Method", Local(), table, Runtime(), Curvature(), lambda p, group: (), known), table


def saved(table: ParameterTable, **state: torch.Tensor | int) -> dict[str, Any]:
    group = {k: v for k, v in table.groups[0].items() if k != "params"}
    return {
        "state": {0: {"step": torch.ones(()), "global_step": 1, **state}},
        "param_groups": [group | {"params": [0]}],
    }


def test_a_state_that_fits_is_copied_and_installed() -> None:
    checkpoint, table = made()
    given = saved(table, factor_a=torch.arange(3.0))
    checkpoint.install(checkpoint.read(given, lambda: False))
    (state,) = table.state.values()
    assert torch.equal(state["factor_a"], torch.arange(3.0))
    assert state["factor_a"] is not given["state"][0]["factor_a"]


def test_all_that_differs_is_listed_and_nothing_changes() -> None:
    checkpoint, table = made()
    with pytest.raises(ValueError, match=r"(?s)factor_a is a tensor of shape \(2,\).*other is unknown"):
        checkpoint.read(saved(table, factor_a=torch.zeros(2), other=1), lambda: False)
    assert not table.state


def test_what_a_rank_lacks_is_absent_only_if_the_numbers_are_there() -> None:
    number, tensor = FOUND._replace(like=0), FOUND._replace(like=torch.empty(2), kind="second_order")
    assert absent({"refreshes": 1}, {"refreshes": number, "basis_a": tensor}) == ["basis_a"]
    assert absent({}, {"refreshes": number, "basis_a": tensor}) == []


def test_a_frozen_parameter_was_never_trained() -> None:
    assert was_never_trained({"step": torch.zeros(()), "gram": 1}, frozenset({"gram"}))
    assert not was_never_trained({"step": torch.ones(())}, frozenset())


def test_groups_are_matched_by_the_names_of_their_parameters() -> None:
    groups = [{"params": [0], "param_names": ["b"]}, {"params": [1], "param_names": ["a"]}]
    state = {0: {"global_step": 3, "x": 1}, 1: {"x": 2}}
    found = matched_by_name({"state": state, "param_groups": groups}, [["a"], ["b"]])
    assert [g["params"] for g in found["param_groups"]] == [[1], [0]]
    assert found["state"] == {0: {"x": 1}, 1: {"x": 2, "global_step": 3}}
