"""``swap``: checks that changing one line of a script is enough.

Each workload has a script that is tuned for AdamW and one for SGD, with its learning rate, weight decay and a cosine
schedule. The command replaces only the line that builds the optimizer, with the line from the README, and the loss
after the same number of steps must be at least as low. The lines of other methods differ only in names and options.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from rich.table import Table
from torch import nn
from torch.optim import Optimizer

import secondorder
from benchmarks import report
from benchmarks.commands.options import Common
from benchmarks.recipes.types import Schedule, make_schedule
from benchmarks.runner import Trainer, race
from benchmarks.workloads import Size, Workload, make_workload
from benchmarks.workloads.tiny import found_or_made_up
from secondorder.methods.names import METHODS

Base = Literal["adamw", "sgd"]
ScriptName = Literal["digits", "autoencoder", "resnet20", "chargpt"]
SwapMethod = Literal["kfac", "ekfac", "hylo", "mfac", "sparse_mfac", "ggt"]

LINES: dict[Base, str] = {
    "adamw": "torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WD)",
    "sgd": "torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, weight_decay=WD)",
}
"""The original lines of the scripts."""

REPLACEMENTS: dict[SwapMethod, dict[Base, str]] = {
    method: {
        "adamw": f'{METHODS[method].__name__}(model, lr=LR, weight_decay=WD, graft="adamw"{more})',
        "sgd": f'{METHODS[method].__name__}(model, lr=LR, momentum=0.9, weight_decay=WD, graft="sgd"{more})',
    }
    for method in get_args(SwapMethod)
    for more in [", budget=2.0" if method == "kfac" else ""]
}
"""The lines that replace them. A test compares those of K-FAC with the README."""


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
    method: SwapMethod = "kfac"
    """Method that the new line builds."""
    base: Base | None = None
    """Script to change. Default: both."""
    steps: int | None = None
    """Number of optimizer steps. Default: that of the workload at this size."""
    tolerance: float = 0.0
    """Tolerance above the script's own loss: 0.02 is two percent."""

    def run(self) -> int:
        """Run the command. Return 0 if every script passed, and 1 otherwise."""
        torch.set_num_threads(self.threads)
        names = list(SCRIPTS) if self.workload is None else [self.workload]
        bases = list(LINES) if self.base is None else [self.base]
        outcomes = []
        for name in report.tracked("scripts", names):
            with found_or_made_up(name, self.data_dir, self.size) as (data_dir, _):
                workload = make_workload(name, data_dir, self.size)
                outcomes += [self._compare(name, base, workload) for base in bases]
        lines = {base: (line, REPLACEMENTS[self.method][base]) for base, line in LINES.items()}
        data = {"size": self.size, "seed": self.seed, "lines": lines, "outcomes": outcomes}
        stem = f"swap-{self.size}" if self.method == "kfac" else f"swap-{self.size}-{self.method}"
        report.save(self.out_dir, stem, [_table(self.size, outcomes)], data)
        return int(not all(outcome["passed"] for outcome in outcomes))

    def _compare(self, name: ScriptName, base: Base, workload: Workload) -> dict[str, Any]:
        steps = workload.steps[self.size] if self.steps is None else self.steps
        lr, decay = SCRIPTS[name][base]
        schedule = partial(make_schedule, Schedule("cosine"), steps)
        runs = [
            Trainer(base, workload, partial(build, line, LR=lr, WD=decay), self.seed, schedule)
            for line in (LINES[base], REPLACEMENTS[self.method][base])
        ]
        race(runs, steps)
        window, places = max(1, min(10, steps // 4)), [max(1, steps * quarter // 4) for quarter in (1, 2, 3, 4)]
        before, after = (tuple(run.history.loss_at(place, window) for place in places) for run in runs)
        passed = after[-1] <= before[-1] * (1 + self.tolerance)
        found = {"workload": name, "method": self.method, "base": base, "steps": steps}
        return {**found, "before": before, "after": after, "passed": passed}


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
    return report.make_table(f"One changed line, {outcomes[0]['method']}, {size}", columns, rows, caption)


def _short(loss: float) -> str:
    return f"{loss:.4g}" if loss >= 1 else f"{loss:.2g}"
