"""``scripts``: cost and loss of twenty small scripts in which only the line that builds the optimizer changes.

The optimizers take turns step by step. Each has its own copy of the model, and all get the same batches. The processor
seconds of a step cover ``zero_grad``, forward, loss, backward and ``step``. Those of the first steps count as well.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any, Literal

import torch
from rich.table import Table
from torch import Tensor, nn

from benchmarks import report
from benchmarks.commands.options import Common
from benchmarks.commands.swap import LINES as ORIGINAL
from benchmarks.commands.swap import build
from benchmarks.report import Column, value
from benchmarks.runner import History
from benchmarks.scripts import SCRIPTS, Data, Script
from benchmarks.workloads.base import seeded
from benchmarks.workloads.tiny import found_or_made_up

ADAMW = ORIGINAL["adamw"]
LINES: Mapping[str, str] = {
    "KFAC": 'KFAC(model, lr=LR, weight_decay=WD, graft="adamw")',
    "KFAC, budget 2": 'KFAC(model, lr=LR, weight_decay=WD, graft="adamw", budget=2.0)',
    "KFAC, budget 1.3": 'KFAC(model, lr=LR, weight_decay=WD, graft="adamw", budget=1.3)',
}
"""The lines that replace AdamW's, by their names in the tables."""
SMOKE_STEPS = 4
_LOWER = ("equal_steps_lower", "equal_seconds_lower")
_CAPTION = (
    "Cost, median step: processor seconds of the run, and of its median step, divided by those of AdamW. Losses are "
    "means over the last tenth of the steps: of all steps, and of the steps that fit into the seconds of AdamW's run."
)


@dataclass
class Scripts(Common):
    """Replace AdamW in twenty small scripts, and compare costs and losses."""

    threads: int = 1
    """Number of threads that torch uses. Processor seconds are most comparable with one."""
    size: Literal["smoke", "cpu"] = "cpu"
    """smoke takes 4 steps of each script and generates missing data; cpu takes minutes."""
    only: tuple[str, ...] = ()
    """Scripts to run. Default: all."""
    length: float = 2.0
    """Multiple of the number of steps of each script."""
    lines: tuple[str, ...] = tuple(LINES)
    """Lines that replace that of AdamW: names of default lines, or expressions of model, LR, WD, torch and the names
    in secondorder."""

    def run(self) -> int:
        torch.set_num_threads(self.threads)
        names = self.only or tuple(SCRIPTS)
        if unknown := [name for name in names if name not in SCRIPTS]:
            raise ValueError(f"there is no script {', '.join(unknown)}, only {', '.join(SCRIPTS)}")
        if min(self._steps(SCRIPTS[name]) for name in names) < 1:
            raise ValueError(f"length must be positive, with at least one step of each script, got {self.length}")
        lines = {line: LINES.get(line, line) for line in self.lines}
        results = {}
        with (
            found_or_made_up("convnet", self.data_dir, self.size) as (mnist, _),
            found_or_made_up("chargpt", self.data_dir, self.size) as (shakespeare, _),
        ):
            data = Data(mnist, shakespeare, self.seed)
            for name in report.tracked("scripts", names):
                results[name] = compare(SCRIPTS[name], data, lines, self._steps(SCRIPTS[name]))
        about = {"size": self.size, "seed": self.seed, "length": self.length, "lines": {"AdamW": ADAMW, **lines}}
        tables = [_totals(results, self.lines), _table(results)]
        report.save(self.out_dir, f"scripts-{self.size}", tables, {**about, "scripts": results})
        return 0

    def _steps(self, script: Script) -> int:
        return SMOKE_STEPS if self.size == "smoke" else round(self.length * script.steps)


class Run:
    """One optimizer with its copy of the model."""

    def __init__(self, line: str, script: Script, model: nn.Module) -> None:
        self.model, self.history = deepcopy(model), History(line)
        try:
            self.optimizer = build(line, self.model, LR=script.lr, WD=script.weight_decay)
        except (NameError, SyntaxError, TypeError) as err:
            raise ValueError(f"the line {line!r} does not build an optimizer: {err}") from err

    def step(self, loss: Callable[..., Tensor], batch: tuple[Tensor, ...]) -> None:
        start = time.process_time()
        self.optimizer.zero_grad()
        found = loss(self.model, *batch)
        found.backward()
        self.optimizer.step()
        self.history.processor_seconds.append(time.process_time() - start)
        self.history.losses.append(float(found.detach()))


def compare(script: Script, data: Data, lines: Mapping[str, str], steps: int) -> dict[str, Any]:
    """Train with AdamW and with each line, in turns, and return the results of all of them."""
    with seeded(data.seed):
        model, batches, loss = script.build(data)
    Run(ADAMW, script, model).step(loss, next(batches))  # warms up torch before the measured runs
    before, *others = (Run(line, script, model) for line in (ADAMW, *lines.values()))
    for batch in islice(batches, steps):
        for run in (before, *others):
            run.step(loss, batch)
    found = {line: figures(run.history, before.history) for line, run in zip(lines, others, strict=True)}
    own = {"seconds": sum(before.history.processor_seconds), "loss": last_loss(before.history, steps)}
    return {"steps": steps, "adamw": own, "lines": found}


def figures(history: History, before: History) -> dict[str, Any]:
    """Return the cost and the losses of a run relative to AdamW."""
    seconds, steps = sum(before.processor_seconds), len(before.losses)
    fit = sum(total <= seconds for total in accumulate(history.processor_seconds))
    losses = {"equal_steps": last_loss(history, steps), "equal_seconds": last_loss(history, fit) if fit else None}
    return {
        "cost": sum(history.processor_seconds) / seconds,
        "median_cost": statistics.median(history.processor_seconds) / statistics.median(before.processor_seconds),
        "steps_that_fit": fit,
        **losses,
        **{f"{key}_lower": loss is not None and loss < last_loss(before, steps) for key, loss in losses.items()},
    }


def last_loss(history: History, steps: int) -> float:
    """Return the mean loss of the last tenth of the first ``steps`` steps."""
    return history.loss_at(steps, max(1, steps // 10))


def _rows(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {"script": name, "steps": found["steps"], "line": line, "adamw": found["adamw"]["loss"], **row}
        for name, found in results.items()
        for line, row in found["lines"].items()
    ]


def _totals(results: Mapping[str, Any], lines: Sequence[str]) -> Table:
    groups = {line: [row for row in _rows(results) if row["line"] == line] for line in lines}
    totals = [
        {
            "line": line,
            "largest": max(row["cost"] for row in rows),
            "median": statistics.median(row["cost"] for row in rows),
            **{key: f"{sum(row[key] for row in rows)} of {len(rows)}" for key in _LOWER},
        }
        for line, rows in groups.items()
    ]
    columns = {
        "line": value("line"),
        "lower at equal steps": value("equal_steps_lower"),
        "lower at equal seconds": value("equal_seconds_lower"),
        "median cost": value("median", ".2f"),
        "largest cost": value("largest", ".2f"),
    }
    return report.table_of("Scripts whose loss is lower than with AdamW", totals, columns)


def _table(results: Mapping[str, Any]) -> Table:
    columns = {
        "script": value("script"),
        "steps": value("steps"),
        "optimizer": value("line"),
        "cost": value("cost", ".2f"),
        "median step": value("median_cost", ".2f"),
        "AdamW's loss": value("adamw", ".3g"),
        "equal steps": _marked("equal_steps"),
        "equal seconds": _marked("equal_seconds"),
    }
    return report.table_of("Each script", _rows(results), columns, _CAPTION)


def _marked(key: str) -> Column:
    return lambda row: value(key, ".3g")(row) + ", lower" * row[f"{key}_lower"]
