"""What a report reads from a table of parameters and from their curvature, without an optimizer."""

import re
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from secondorder.curvature.schema import ESTIMATE
from secondorder.diagnostics.report import Report
from secondorder.parameters import ParameterTable
from secondorder.runtime import Runtime


class Curvature:
    """Covers one parameter; it is its own report."""

    sizes_are, nbytes, pending_bytes = "size of its block", 10, 20

    def __init__(self, covered: nn.Parameter, table: ParameterTable, comm: Any) -> None:
        self.covered, self.report, self.table, self.comm = {covered}, self, table, comm

    def coverage(self, p: nn.Parameter) -> tuple[str, str, str]:
        return ("diagonal", "3", "0") if p in self.covered else ("", "", "")

    def summary(self) -> str:
        return "one block"


def made(combines: bool = False) -> tuple[Report, nn.Parameter]:
    """A report on a covered parameter of three numbers and another one of two, in single precision."""
    p, q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    group = {"params": [p, q], "param_names": ["p", "q"], "fallback": "sgd"}
    table = ParameterTable("Newton", groups=[group], entries={"factor": ESTIMATE})
    table.regroup()
    table.name_parameters()
    table.state = {p: {"factor": torch.ones(9), "refreshes": 3}, q: {}}
    comm = SimpleNamespace(combines=combines, rank=1, world=4, nbytes=100)
    return Report(cast(Any, Curvature(p, table, comm)), Runtime()), q


def row_of(report: Report, name: str) -> list[str]:
    (line,) = (line for line in report.describe().splitlines() if line.startswith(f"{name} "))
    return re.split("  +", line)


def test_a_description_has_a_row_for_each_parameter_and_the_bytes_of_its_state() -> None:
    """With several ranks, the rank is named, too; a parameter without curvature has its reason."""
    report, q = made()
    title, *_, footer = report.describe().splitlines()
    assert title == "Newton · one block"
    assert footer == "state: factors 36 B, pending 20 B, buffers 110 B, total 166 B"
    assert row_of(report, "p") == ["p", "3", "3", "0", "36 B", "diagonal"]
    assert "ranks: this is 1 of 4, comm=" in made(combines=True)[0].describe()
    assert row_of(report, "q")[-1] == "sgd fallback: not covered"
    report.curvature.table.reasons[q] = "too large"
    assert row_of(report, "q")[-1] == "sgd fallback: too large"
    report, q = made()
    q.requires_grad_(False)
    report.curvature.table.name_parameters()
    assert row_of(report, "q")[-1] == "frozen"
