"""What a checkpoint checks, on plain states without an optimizer."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from secondorder import options
from secondorder.checkpoint.checkpoint import Checkpoint, KnownOptions
from secondorder.checkpoint.comparison import absent, was_never_trained
from secondorder.comm import Local
from secondorder.curvature.schema import ESTIMATE, FOUND, Place, Schema
from secondorder.parameters import ParameterTable
from secondorder.preconditioners.base import StateForm
from secondorder.preconditioners.group_options import GroupRules
from secondorder.runtime import Runtime


class Curvature:
    """A vector for each parameter."""

    form = StateForm()

    def schema_of(self, p: nn.Parameter, group: Any, held: Any) -> Schema:
        return {"factor_a": ESTIMATE._replace(like=torch.empty(3, device="meta"))}

    def places_here(self, p: nn.Parameter) -> frozenset[Place]:
        return frozenset(Place)

    def __getattr__(self, name: str) -> Any:
        """Nothing else is special about it."""
        answers: dict[str, Any] = {
            "covers": lambda p: True,
            "placed": list,
            "is_a_copy": str,
            "settle": lambda follow: None,
            "misfits": lambda states: [],
            "while_loading": lambda states, rebuild: nullcontext(),
            "translated": lambda states, group_of: states,
            "expected": lambda p, schema, theirs: schema,
            "loaded": lambda rebuild: None,
        }
        return answers[name]


def made(comm: Any = None, step: int = 0) -> tuple[Checkpoint, ParameterTable]:
    group = {**options.DEFAULTS, "params": [nn.Parameter(torch.zeros(2))], "lr": 0.1, "fallback_base_lr": 0.1}
    group["fallback"] = "sgd"
    table = ParameterTable("Method", groups=[group], entries={"factor_a": ESTIMATE})
    table.regroup()
    table.names = dict.fromkeys(table.group_of, "weight")
    known = KnownOptions({}, {}, GroupRules())
    runtime = Runtime(step=step)
    return Checkpoint("Method", comm or Local(), table, runtime, Curvature(), lambda p, group: (), known), table


def of_several_ranks() -> tuple[Checkpoint, ParameterTable]:
    return made(SimpleNamespace(combines=True, identity="rank 0 of 2"), step=1)


def saved(table: ParameterTable, **state: torch.Tensor | int) -> dict[str, Any]:
    group = {k: v for k, v in table.groups[0].items() if k != "params"}
    return {
        "state": {0: {"step": torch.ones(()), "global_step": 1, **state}},
        "param_groups": [group | {"params": [0]}],
    }


def test_what_a_rank_lacks_is_absent_only_if_the_numbers_are_there() -> None:
    number, tensor = FOUND._replace(like=0), FOUND._replace(like=torch.empty(2), kind="second_order")
    assert absent({"refreshes": 1}, {"refreshes": number, "basis_a": tensor}) == ["basis_a"]
    assert absent({}, {"refreshes": number, "basis_a": tensor}) == []


def test_a_frozen_parameter_was_never_trained() -> None:
    assert was_never_trained({"step": torch.zeros(()), "gram": 1}, frozenset({"gram"}))
    assert not was_never_trained({"step": torch.ones(())}, frozenset())


# ------------------------------------------------------------------ saving
def packed(table: ParameterTable, kept: str = "all", **state: torch.Tensor | int) -> dict[str, Any]:
    found = saved(table, **state)
    found["param_groups"][0]["checkpoint_curvature"] = kept
    return found


@pytest.mark.parametrize(("kept", "keys"), [("all", {"factor_a"}), ("factors", {"factor_a"}), ("none", set())])
def test_what_an_option_leaves_out_is_not_saved(kept: str, keys: set[str]) -> None:
    checkpoint, table = made()
    found = checkpoint.completed(packed(table, kept, factor_a=torch.ones(3)))
    assert found["state"][0].keys() == {"step", "global_step", *keys}
    assert "partial" not in found


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
