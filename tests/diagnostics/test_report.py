"""What a report reads from a table of parameters and from what covers them, without an optimizer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from secondorder.curvature.schema import ESTIMATE
from secondorder.diagnostics.report import Report, representation
from secondorder.parameters import ParameterTable
from secondorder.runtime import Runtime


class Curvature:
    """Covers one parameter; it is its own report."""

    sizes_are, nbytes, pending_bytes = "size of its block", 10, 20

    def __init__(self, covered: nn.Parameter) -> None:
        self.covered, self.report = {covered}, self

    def coverage(self, p: nn.Parameter) -> tuple[str, str, str]:
        return ("diagonal", "3", "0") if p in self.covered else ("", "", "")

    def summary(self) -> str:
        return "one block"


def made(combines: bool = False) -> tuple[Report, nn.Parameter, nn.Parameter]:
    """A report on a covered and on another parameter of three and two numbers in single precision."""
    p, q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    group = {"params": [p, q], "param_names": ["p", "q"], "fallback": "sgd"}
    table = ParameterTable("Newton", groups=[group], entries={"factor": ESTIMATE})
    table.regroup()
    table.name_parameters()
    table.state = {p: {"factor": torch.ones(9), "refreshes": 3}, q: {}}
    comm = SimpleNamespace(combines=combines, rank=1, world=4, nbytes=100)
    return Report(table, cast(Any, Curvature(p)), cast(Any, comm), Runtime()), p, q


def test_bytes_are_counted_by_kind() -> None:
    """Every kind of the schema is listed, even if nothing of it is stored."""
    report, p, _ = made()
    assert report.memory_usage() == {
        "factors": 36, "momentum": 0, "fallback": 0, "pending": 20, "workspace": 0, "buffers": 110, "total": 166,
    }  # fmt: skip
    del report.table.state[p]["factor"]
    assert report.memory_usage()["factors"] == 0


def test_kinds_of_the_state() -> None:
    report, p, q = made()
    for key, covered, other in (
        ("factor", "factors", "factors"),
        ("momentum_buffer", "momentum", "momentum"),
        ("exp_avg", "momentum", "fallback"),
        ("exp_avg_sq", "momentum", "fallback"),
        ("step", "buffers", "buffers"),
    ):
        assert (report.kind(p, key), report.kind(q, key)) == (covered, other)


def test_a_description_has_a_row_for_each_parameter_and_the_bytes_of_its_state() -> None:
    report, _, _ = made()
    title, *lines, footer = report.describe().splitlines()
    assert title == "Newton · one block"
    assert footer == "state: factors 36 B, pending 20 B, buffers 110 B, total 166 B"
    (covered,) = (line.split() for line in lines if line.startswith("p "))
    assert covered == ["p", "3", "3", "0", "36", "B", "diagonal"]


def test_a_parameter_without_curvature_has_its_reason() -> None:
    for reason, frozen, expected in (
        ("", False, "sgd fallback: not covered"),
        ("too large", False, "sgd fallback: too large"),
        ("", True, "frozen"),
    ):
        report, _, q = made()
        if reason:
            report.table.reasons[q] = reason
        if frozen:
            q.requires_grad_(False)
            report.table.name_parameters()
        (line,) = (line for line in report.describe().splitlines() if line.startswith("q "))
        assert line.endswith(f"  {expected}")


def test_ranks_are_named_where_there_are_several() -> None:
    assert "ranks: this is 1 of 4, comm=" in made(combines=True)[0].describe()
    assert "ranks:" not in made()[0].describe()


class Newton:
    """A method with three options."""

    def __init__(self, params: Any, lr: float = 1.0, weight_decay: float = 0.0, damping: float = 0.1) -> None: ...


DEFAULTS = {"lr": 1.0, "weight_decay": 0.0, "damping": 0.1}


def shown(*groups: dict[str, Any]) -> list[str]:
    whole = [{"params": [], "param_names": [], **DEFAULTS, **group} for group in groups]
    return representation(Newton, whole, DEFAULTS, (0.9, 0.99)).splitlines()


def test_a_representation_shows_options_that_are_not_the_default() -> None:
    lines = shown({"lr": 0.5})
    assert lines[:2] == ["Newton (", "Parameter Group 0"]
    assert "    lr: 0.5" in lines
    assert "    damping: 0.2" in shown({"damping": 0.2})
    # ... and no parameters or their names
    assert not [line for line in shown({}) if "param" in line and not line.startswith(("Parameter", "    other"))]


def test_equal_groups_are_shown_once() -> None:
    groups = [line for line in shown({}, {}, {"lr": 0.5}) if line.startswith("Parameter")]
    assert groups == ["Parameter Groups 0 to 1", "Parameter Group 2"]
