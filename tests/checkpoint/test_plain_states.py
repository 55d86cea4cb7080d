"""What a checkpoint checks, on plain states without an optimizer."""

from __future__ import annotations

import warnings
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


# ------------------------------------------------------------------ saving
class SomeRanks:
    """A strategy of several ranks."""

    combines, identity = True, "rank 0 of 2"


def packed(table: ParameterTable, kept: str = "all", **state: torch.Tensor | int) -> dict[str, Any]:
    found = saved(table, **state)
    found["param_groups"][0]["checkpoint_curvature"] = kept
    return found


def of_several_ranks() -> tuple[Checkpoint, ParameterTable]:
    _, table = made()
    known = KnownOptions({}, {}, GroupRules())
    runtime, comm = Runtime(step=1), SomeRanks()
    return Checkpoint("Method", comm, table, runtime, Curvature(), lambda p, group: (), known), table  # type: ignore[arg-type]


@pytest.mark.parametrize(("kept", "keys"), [("all", {"factor_a"}), ("factors", {"factor_a"}), ("none", set())])
def test_what_an_option_leaves_out_is_not_saved(kept: str, keys: set[str]) -> None:
    checkpoint, table = made()
    found = checkpoint.completed(packed(table, kept, factor_a=torch.ones(3)))
    assert found["state"][0].keys() == {"step", "global_step", *keys}
    assert "partial" not in found


def test_names_of_a_module_are_saved() -> None:
    checkpoint, table = made()
    assert "param_names" not in checkpoint.completed(packed(table))["param_groups"][0]
    table.root = nn.Module()
    table.root.register_parameter("weight", table.first)
    assert checkpoint.completed(packed(table))["param_groups"][0]["param_names"] == ["weight"]


def test_a_state_that_lacks_curvature_of_other_ranks_says_so_and_warns_once() -> None:
    checkpoint, table = of_several_ranks()
    with pytest.warns(UserWarning, match=r"this state_dict\(\) is partial, rank 0 of 2 holds a part"):
        assert checkpoint.completed(packed(table))["partial"] == {"rank 0 of 2": {}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "partial" in checkpoint.completed(packed(table))


def test_a_state_with_all_curvature_is_not_partial() -> None:
    checkpoint, table = of_several_ranks()
    assert "partial" not in checkpoint.completed(packed(table, factor_a=torch.ones(3)))
    assert "partial" not in checkpoint.completed(packed(table, "none"))


# ------------------------------------------------------------------ loading
def test_a_partial_state_is_refused_elsewhere() -> None:
    checkpoint, table = made()
    given = {**saved(table, factor_a=torch.ones(3)), "partial": {"rank 1 of 2": {}}}
    with pytest.raises(RuntimeError, match="it was saved by rank 1 of 2, and this is .*consolidate_state_dict"):
        checkpoint.read(given, lambda: False)
    assert not table.state


@pytest.mark.parametrize("given", [{}, {"state": {}}, {"param_groups": []}])
def test_what_is_no_state_of_an_optimizer_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="not an optimizer state_dict: it needs 'state' and 'param_groups'"):
        made()[0].read(given, lambda: False)


def test_curvature_that_is_missing_is_named() -> None:
    checkpoint, table = made()
    with pytest.raises(ValueError, match="parameter 'weight': factor_a is missing"):
        checkpoint.read(saved(table), lambda: False)


def test_curvature_that_was_left_out_is_not_missed() -> None:
    checkpoint, table = made()
    (state,) = checkpoint.read(packed(table, "none"), lambda: False).states.values()
    assert state.keys() == {"step", "global_step"}


def test_installing_replaces_options_and_keeps_the_parameters() -> None:
    checkpoint, table = made()
    params = table.groups[0]["params"]
    given = saved(table, factor_a=torch.ones(3))
    given["param_groups"][0]["lr"] = 0.7
    checkpoint.install(checkpoint.read(given, lambda: False))
    assert table.groups[0]["lr"] == 0.7
    assert table.groups[0]["params"] is params
