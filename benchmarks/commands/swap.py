"""``swap``: checks that changing one line of a script is enough.

Each workload has a script that is tuned for AdamW and one for SGD, with its learning rate, weight decay and a cosine
schedule. The command replaces only the line that builds the optimizer, with the line from the README, and the loss
after the same number of steps must be at least as low.

``scripts`` measures the cost and the loss of twenty small scripts in which only this line changes. The optimizers take
turns step by step. Each has its own copy of the model, and all get the same batches. The processor seconds of a step
cover ``zero_grad``, forward, loss, backward and ``step``. Those of the first steps count as well.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, islice
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import secondorder
from benchmarks import report
from benchmarks.commands.options import Common
from benchmarks.recipes.types import Schedule, make_schedule
from benchmarks.report import Column, Table, value
from benchmarks.runner import History, Trainer, race
from benchmarks.scripts import SCRIPTS as TWENTY
from benchmarks.scripts import Data, Script
from benchmarks.workloads import Size, Workload, make_workload
from benchmarks.workloads.base import seeded
from benchmarks.workloads.tiny import found_or_made_up

Base = Literal["adamw", "sgd"]
ScriptName = Literal["digits", "autoencoder", "resnet20", "chargpt"]

LINES: dict[Base, str] = {
    "adamw": "torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WD)",
    "sgd": "torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, weight_decay=WD)",
}
"""The original lines of the scripts."""

REPLACEMENTS: dict[Base, str] = {
    "adamw": 'KFAC(model, lr=LR, weight_decay=WD, graft="adamw", budget=2.0)',
    "sgd": 'KFAC(model, lr=LR, momentum=0.9, weight_decay=WD, graft="sgd", budget=2.0)',
}
"""The lines that replace them. A test compares them with the README."""


SCRIPTS: dict[ScriptName, dict[Base, tuple[float, float]]] = {
    "digits": {"adamw": (1e-2, 1e-2), "sgd": (0.1, 5e-4)},
    "autoencoder": {"adamw": (1e-3, 1e-2), "sgd": (5e-3, 1e-5)},
    "resnet20": {"adamw": (3e-3, 1e-2), "sgd": (0.1, 5e-4)},
    "chargpt": {"adamw": (3e-3, 1e-2), "sgd": (0.3, 1e-4)},
}
"""Learning rate and weight decay of each script, tuned for its optimizer with a cosine schedule."""


@dataclass
class Swap(Common):
    """Check on every workload that changing the line that builds the optimizer lowers the loss."""

    size: Size = "smoke"
    """smoke takes seconds and generates missing data; cpu takes minutes."""
    workload: ScriptName | None = None
    """Workload. Default: all that have a script."""
    steps: int | None = None
    """Number of optimizer steps. Default: that of the workload at this size."""

    def run(self) -> int:
        """Run the command. Return 0 if every script passed, and 1 otherwise."""
        torch.set_num_threads(self.threads)
        names = list(SCRIPTS) if self.workload is None else [self.workload]
        outcomes = []
        for name in report.tracked("scripts", names):
            with found_or_made_up(name, self.data_dir, self.size) as (data_dir, _):
                workload = make_workload(name, data_dir, self.size)
                outcomes += [self._compare(name, base, workload) for base in LINES]
        lines = {base: (line, REPLACEMENTS[base]) for base, line in LINES.items()}
        data = {"size": self.size, "seed": self.seed, "lines": lines, "outcomes": outcomes}
        report.save(self.out_dir, f"swap-{self.size}", [_table(self.size, outcomes)], data)
        return int(not all(outcome["passed"] for outcome in outcomes))

    def _compare(self, name: ScriptName, base: Base, workload: Workload) -> dict[str, Any]:
        steps = workload.steps[self.size] if self.steps is None else self.steps
        lr, decay = SCRIPTS[name][base]
        schedule = partial(make_schedule, Schedule("cosine"), steps)
        runs = [
            Trainer(base, workload, partial(build, line, LR=lr, WD=decay), self.seed, schedule)
            for line in (LINES[base], REPLACEMENTS[base])
        ]
        race(runs, steps)
        window, places = max(1, min(10, steps // 4)), [max(1, steps * quarter // 4) for quarter in (1, 2, 3, 4)]
        before, after = (tuple(run.history.loss_at(place, window) for place in places) for run in runs)
        found = {"workload": name, "base": base, "steps": steps, "before": before, "after": after}
        return {**found, "passed": after[-1] <= before[-1]}


def build(line: str, model: nn.Module, **values: Any) -> Optimizer:
    names = {name: getattr(secondorder, name) for name in secondorder.__all__}
    # The exact line that users read. It comes from this repository or from the command line.
    optimizer: Optimizer = eval(line, {"torch": torch, **names, "model": model, **values})
    return optimizer


def _table(size: Size, outcomes: Sequence[dict[str, Any]]) -> Table:
    rows = []
    for found in outcomes:
        losses = [f"{_short(a)} -> {_short(b)}" for a, b in zip(found["before"], found["after"], strict=True)]
        head = [found["workload"], found["base"], str(found["steps"])]
        rows.append([*head, *losses, "PASS" if found["passed"] else "FAIL"])
    caption = "Training losses after 25 %, 50 %, 75 % and 100 % of the steps: before the change -> after the change."
    columns = ("workload", "script", "steps", "25 %", "50 %", "75 %", "end", "verdict")
    return Table(f"One changed line, kfac, {size}", columns, rows, caption)


def _short(loss: float) -> str:
    return f"{loss:.4g}" if loss >= 1 else f"{loss:.2g}"


BUDGETS: Mapping[str, str] = {
    "KFAC": 'KFAC(model, lr=LR, weight_decay=WD, graft="adamw")',
    "KFAC, budget 2": REPLACEMENTS["adamw"],
    "KFAC, budget 1.3": 'KFAC(model, lr=LR, weight_decay=WD, graft="adamw", budget=1.3)',
    "KFAC, budget 2, power 0.5": (
        'KFAC(model, lr=LR, weight_decay=WD, graft="adamw", budget=2.0, '
        'power=0.5, damping=0.1, damping_mode="relative")'
    ),
    "orthogonal": 'KFAC(model, lr=LR, weight_decay=WD, graft="adamw", orthogonalize=True, inv_update_steps=0)',
}
"""The lines that replace AdamW's, by their names in the tables."""
SMOKE_STEPS = 4
_LOWER = ("equal_steps_lower", "equal_seconds_lower")
_CAPTION = (
    "Cost, median step: processor seconds of the run, and of its median step, divided by those of AdamW. Losses are "
    "means over the last tenth of the steps: of all steps, and of the steps that fit into the seconds of AdamW's run."
)

_RATIO = "Mean ratio: geometric mean over the scripts of the loss divided by AdamW's."


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
    lines: tuple[str, ...] = ("KFAC", "KFAC, budget 2", "KFAC, budget 1.3")
    """Lines that replace that of AdamW: "KFAC", "KFAC, budget 2", "KFAC, budget 1.3", "KFAC, budget 2, power 0.5",
    "orthogonal", or expressions of model, LR, WD, torch and the names in secondorder."""

    def run(self) -> int:
        torch.set_num_threads(self.threads)
        names = self.only or tuple(TWENTY)
        if unknown := [name for name in names if name not in TWENTY]:
            raise ValueError(f"there is no script {', '.join(unknown)}, only {', '.join(TWENTY)}")
        if min(self._steps(TWENTY[name]) for name in names) < 1:
            raise ValueError(f"length must be positive, with at least one step of each script, got {self.length}")
        lines = {line: BUDGETS.get(line, line) for line in self.lines}
        results = {}
        with (
            found_or_made_up("logistic", self.data_dir, self.size) as (mnist, _),
            found_or_made_up("chargpt", self.data_dir, self.size) as (shakespeare, _),
        ):
            data = Data(mnist, shakespeare, self.seed)
            for name in report.tracked("scripts", names):
                results[name] = compare(TWENTY[name], data, lines, self._steps(TWENTY[name]))
        about = {
            "size": self.size, "seed": self.seed, "length": self.length, "lines": {"AdamW": LINES["adamw"], **lines},
        }  # fmt: skip
        tables = [totals_of(results, self.lines), _each(results)]
        report.save(self.out_dir, f"scripts-{self.size}", tables, {**about, "scripts": results})
        return 0

    def _steps(self, script: Script) -> int:
        return SMOKE_STEPS if self.size == "smoke" else round(self.length * script.steps)


class Run:
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
    with seeded(data.seed):
        model, batches, loss = script.build(data)
    Run(LINES["adamw"], script, model).step(loss, next(batches))  # warms up torch before the measured runs
    before, *others = (Run(line, script, model) for line in (LINES["adamw"], *lines.values()))
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


def totals_of(results: Mapping[str, Any], lines: Sequence[str]) -> Table:
    groups = {line: [row for row in _rows(results) if row["line"] == line] for line in lines}
    totals = [
        {
            "line": line,
            "largest": max(row["cost"] for row in rows),
            "median": statistics.median(row["cost"] for row in rows),
            **{key: f"{sum(row[key] for row in rows)} of {len(rows)}" for key in _LOWER},
            **{key: _mean_ratio(key, rows) for key in ("equal_steps", "equal_seconds")},
        }
        for line, rows in groups.items()
    ]
    columns = report.columns(
        "line; lower at equal steps = equal_steps_lower; mean ratio, steps = equal_steps .2f; "
        "lower at equal seconds = equal_seconds_lower; mean ratio, seconds = equal_seconds .2f; "
        "median cost = median .2f; largest cost = largest .2f"
    )
    return report.table_of("Scripts whose loss is lower than with AdamW", totals, columns, _RATIO)


def _mean_ratio(key: str, rows: Sequence[dict[str, Any]]) -> float | None:
    ratios = [row[key] / row["adamw"] for row in rows if row[key]]
    return statistics.geometric_mean(ratios) if len(ratios) == len(rows) else None


def _each(results: Mapping[str, Any]) -> Table:
    columns = {
        **report.columns(
            "script; steps; optimizer = line; cost = cost .2f; median step = median_cost .2f; AdamW's loss = adamw .3g"
        ),
        "equal steps": _marked("equal_steps"),
        "equal seconds": _marked("equal_seconds"),
    }
    return report.table_of("Each script", _rows(results), columns, _CAPTION)


def _marked(key: str) -> Column:
    return lambda row: value(key, ".3g")(row) + ", lower" * row[f"{key}_lower"]
