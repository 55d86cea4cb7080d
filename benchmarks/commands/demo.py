"""``demo``: a table and a plot of all optimizers on one workload, trained from the same weights."""

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.table import Table

from benchmarks import report
from benchmarks.commands.options import Common
from benchmarks.compare.figures import draw_histories
from benchmarks.live import board
from benchmarks.recipes import METHODS, OWN
from benchmarks.recipes.types import MethodName
from benchmarks.report import value
from benchmarks.runner import WINDOW, Trainer, optimizer_bytes, race, trainer_of
from benchmarks.workloads import Workload, WorkloadName, make_workload

TARGETS: dict[WorkloadName, float] = {
    "digits": 0.02,
    "autoencoder": 120.0,
    "resnet20": 1.4,
    "chargpt": 2.5,
    "logistic": 0.2,
    "multi30k": 4.5,
    "unet": 0.3,
}
"""Training loss to reach. The table shows the steps and seconds that each optimizer needs."""


@dataclass
class Demo(Common):
    """Train one workload with every optimizer from the same seed and its own recipe, and write a table and a plot."""

    workload: WorkloadName = "digits"
    """Workload to train. digits needs no data files."""
    steps: int | None = None
    """Number of optimizer steps. Default: that of the workload."""
    target: float | None = None
    """Training loss to reach. Default: that of the workload."""
    optimizers: tuple[MethodName, ...] = ("sgd", "adamw", "from_adamw", *OWN[2:])
    """Optimizers. Step times are relative to the first one. ``from_adamw`` is the preset, at AdamW's learning rate."""
    out_dir: Path = Path("demo-output")
    """Folder to write the table, the results and the plot to."""

    def run(self) -> int:
        torch.set_num_threads(self.threads)
        workload = make_workload(self.workload, self.data_dir)
        steps = workload.steps["cpu"] if self.steps is None else self.steps
        target = TARGETS[self.workload] if self.target is None else self.target
        methods = [METHODS[name] for name in self.optimizers]
        trainers = [trainer_of(method, workload, method.settings(self.workload), self.seed) for method in methods]
        with board(f"{self.workload}: {len(trainers)} optimizers", trainers, steps) as update:
            race(trainers, steps, update)
        results = [_summary(trainer, workload, target, trainers[0]) for trainer in trainers]
        report.save(self.out_dir, "demo", [_table(self.workload, steps, workload, target, results)], {
            "workload": self.workload, "seed": self.seed, "target": target, "results": results,
        })  # fmt: skip
        plot = self.out_dir / "demo.png"
        draw_histories([trainer.history for trainer in trainers], f"{self.workload}, seed {self.seed}", target, plot)
        report.print_path("plot", plot)
        return 0


def _summary(trainer: Trainer, workload: Workload, target: float, reference: Trainer) -> dict[str, Any]:
    history, steps = trainer.history, trainer.history.steps_to(target)
    return {
        "label": history.label,
        "steps_to_target": steps,
        "seconds_to_target": None if steps is None else history.seconds[steps - 1],
        "final_loss": math.nan if trainer.diverged else history.loss_at(len(history.losses)),
        "metric": workload.evaluate(trainer.model),
        "seconds_per_step": fmean(history.step_seconds),
        "step_time_ratio": fmean(history.step_seconds) / fmean(reference.history.step_seconds),
        "optimizer_bytes": optimizer_bytes(trainer.optimizer),
        "losses": history.losses,
        "step_seconds": history.step_seconds,
    }


def _table(name: str, steps: int, workload: Workload, target: float, results: list[dict[str, Any]]) -> Table:
    columns: dict[str, report.Column] = {
        "optimizer": value("label"),
        f"steps to loss {target:g}": lambda row: str(row["steps_to_target"] or "not reached"),
        "seconds to it": value("seconds_to_target", ".2f"),
        "final loss": value("final_loss", ".4g"),
        workload.metric: value("metric", ".4g"),
        f"step time / {results[0]['label']}'s": value("step_time_ratio", ".2f"),
        "optimizer bytes": value("optimizer_bytes", ","),
    }
    count = torch.get_num_threads()
    threads = f"{count} thread{'s' * (count > 1)}"
    caption = f"The training loss is a mean of {WINDOW} steps. The step time is a mean over all steps. {threads}."
    return report.table_of(f"{name}: {steps} steps from the same weights and batches", results, columns, caption)
