"""``robustness``: the defaults of every method on every workload, without tuning, compared with those of AdamW.

Every optimizer is built with the defaults of its constructor, including the learning rate, and trains every workload
for a part of its usual steps. To evaluate a change of a default, the table shows how often a method reaches the loss of
AdamW with lr 1e-3, the decrease of the loss relative to AdamW, and whether a run diverges.
"""

import hashlib
import inspect
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import get_args

from torch import nn

from benchmarks import evidence, report
from benchmarks.checkpoints import Pause
from benchmarks.compare.runs import find
from benchmarks.evidence import Cells, Figures, Repeated, Shown
from benchmarks.plot import Row
from benchmarks.recipes import OWN
from benchmarks.report import Table, value
from benchmarks.runner import WINDOW, trainer_of
from benchmarks.workloads import DataMissingError, Size, Workload, WorkloadName, make_workload

SHARES: dict[Size, float] = {"smoke": 1.0, "cpu": 1 / 3, "paper": 1.0}
"""Share of a workload's steps that a run takes."""
TOLERANCE = 0.02
"""Tolerance of "at least as good", as a share of the decrease of AdamW's loss."""
REFERENCE = "adamw"
"""The reference, with torch's defaults: lr 1e-3, weight decay 1e-2."""


@dataclass
class Robustness(Repeated):
    """Train every workload with every method's defaults, and count how often they are at least as good as AdamW's."""

    workloads: tuple[WorkloadName, ...] = get_args(WorkloadName)
    """Workloads to train. Those whose data is missing are reported and left out."""
    optimizers: tuple[str, ...] = OWN
    """Optimizers to compare. AdamW is always included."""
    share: float | None = None
    """Share of each workload's steps. Default: all at size smoke, otherwise a third."""
    seeds: int = 1

    @property
    def stem(self) -> str:
        share = "" if self.share is None else f"-{self.share:g}"
        return f"robustness-{self.workloads[0] if len(self.workloads) == 1 else 'all'}{share}"

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys((REFERENCE, *self.optimizers)))

    def check_options(self) -> None:
        if not self.workloads:
            raise ValueError("workloads must name at least one, got none")
        self.check(positive=("seeds",), shares=("share",))
        for name in self.optimizers:
            find(name)

    def rows(self, cells: Cells) -> list[Figures]:
        rows: list[Figures] = []
        missing: list[DataMissingError] = []
        for kind in self.workloads:
            try:
                workload = make_workload(kind, self.data_dir, self.size)
                found = {name: self._runs(cells, workload, name) for name in self.names}
            except DataMissingError as err:
                missing.append(err)
                continue
            rows += _rows(kind, found)
        if missing and not rows:
            raise missing[0]
        for gap in missing:
            print(f"left out: {gap}")
        return rows

    def show(self, rows: list[Figures]) -> Shown:
        about = {"reference": REFERENCE, "tolerance": TOLERANCE, "share": self._share()}
        return Shown(_tables(self.names, rows), about)

    def _share(self) -> float:
        return SHARES[self.size] if self.share is None else self.share

    def _runs(self, cells: Cells, workload: Workload, name: str) -> list[Figures]:
        """Train one workload with one optimizer, once for each seed."""
        steps = max(WINDOW, round(self._share() * workload.steps[self.size]))
        runs = []
        for seed in self.seeds_to_run:
            more = {"defaults": _defaults(name), "steps": steps, "seed": seed}
            identity = self.about(workload, name, {}, **more)
            runs.append(cells.run(identity, evidence.attempted(partial(_train, name, workload, seed, steps))))
        return runs


def _train(name: str, workload: Workload, seed: int, steps: int, pause: Pause) -> Figures:
    trainer = trainer_of(find(name), workload, {}, seed)
    return evidence.figures_of(trainer, evidence.train_until(trainer, steps, pause=pause))


def _defaults(name: str) -> str | None:
    """Return a hash of the defaults of a constructor, so that runs are repeated if the defaults change."""
    try:
        optimizer = find(name).construct(nn.Linear(4, 3))
    except (TypeError, ValueError, RuntimeError):
        return None  # a run will report the error
    kind: type = type(optimizer)
    options = {key: value for key, value in optimizer.param_groups[0].items() if not key.startswith("param")}
    known = inspect.signature(kind).parameters.values()
    text = repr((sorted(options.items()), [(found.name, found.default) for found in known]))
    if close := getattr(optimizer, "close", None):
        close()
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _rows(kind: str, found: Mapping[str, Sequence[Figures]]) -> list[Figures]:
    rows = [
        {
            "workload": kind,
            "optimizer": name,
            "label": find(name).label,
            **evidence.over_seeds(runs, ("loss", "first", "processor_seconds")),
        }
        for name, runs in found.items()
    ]
    reference = next(row for row in rows if row["optimizer"] == REFERENCE)
    for row in rows:
        row["as_good"], row["progress"] = _judged(row, reference)
    return rows


def _judged(row: Figures, reference: Figures) -> tuple[bool | None, float | None]:
    """Return whether a loss is at least as good as the reference's, and its decrease relative to the reference's."""
    if reference["loss"] is None:
        return None, None
    if row["loss"] is None:
        return False, None
    way = reference["first"] - reference["loss"]
    as_good = row["loss"] <= reference["loss"] + TOLERANCE * max(0.0, way)
    return as_good, (row["first"] - row["loss"]) / way if way > 0 else None


def _tables(names: Sequence[str], rows: Sequence[Row]) -> list[Table]:
    by_workload: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_workload.setdefault(row["workload"], {})[row["optimizer"]] = row
    columns: dict[str, report.Column] = {
        "workload": lambda own: str(own[REFERENCE]["workload"]),
        "initial loss": lambda own: value("first", ".4g")(own[REFERENCE]),
        **{find(name).label: partial(_cell, name) for name in names},
    }
    caption = (
        f"Final training loss, as a mean of {WINDOW} steps, with the defaults of every constructor. Initial loss: that "
        "of the first batch. +: at least as good as AdamW's defaults (lr 1e-3)."
    )
    untuned = report.table_of("Untuned", list(by_workload.values()), columns, caption)
    caption = (
        f"As good: the final loss is at most AdamW's plus {TOLERANCE:g} of AdamW's decrease. Decrease: how far the "
        "loss falls relative to AdamW, as a median over the workloads. Smallest: the worst workload."
    )
    verdicts = [_verdict(name, rows) for name in names]
    heads = ("optimizer", "as good", "decrease", "smallest", "diverged on", "failed on")
    title = "How often at least as good as AdamW's defaults"
    return [untuned, report.table_of(title, verdicts, {head: value(head) for head in heads}, caption)]


def _cell(name: str, own: Mapping[str, Row]) -> str:
    row = own[name]
    if row["loss"] is None:
        return evidence.why_lost(row)
    return f"{row['loss']:.4g}" + (" +" if row["as_good"] and name != REFERENCE else "")


def _verdict(name: str, rows: Sequence[Row]) -> Row:
    own = [row for row in rows if row["optimizer"] == name and row["as_good"] is not None]
    ways = [row["progress"] for row in own if row["progress"] is not None]
    return {
        "optimizer": find(name).label,
        "as good": f"{sum(bool(row['as_good']) for row in own)} of {len(own)}",
        "decrease": f"{statistics.median(ways):.2f}" if ways else None,
        "smallest": f"{min(ways):.2f}" if ways else None,
        "diverged on": ", ".join(row["workload"] for row in own if row["diverged"]) or "none",
        "failed on": "; ".join(f"{row['workload']}: {row['failed'][0]}" for row in own if row["failed"]) or "none",
    }
