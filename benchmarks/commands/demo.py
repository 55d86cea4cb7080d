"""``demo``: a table and a plot of all optimizers on one workload. ``figures``: those of the documentation."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks import report
from benchmarks.commands.batch_size import draw_batch_sizes
from benchmarks.commands.density import draw_densities
from benchmarks.commands.options import TARGETS, Common
from benchmarks.commands.overview import load
from benchmarks.compare.figures import draw_histories, draw_losses
from benchmarks.compare.statistics import Results
from benchmarks.live import board
from benchmarks.recipes import METHODS, OWN
from benchmarks.recipes.types import MethodName
from benchmarks.report import Table, value
from benchmarks.runner import WINDOW, History, Trainer, optimizer_bytes, race, trainer_of
from benchmarks.workloads import Workload, WorkloadName, make_workload


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
        "label": history.label, "steps_to_target": steps,
        "seconds_to_target": None if steps is None else history.seconds[steps - 1],
        "final_loss": math.nan if trainer.diverged else history.loss_at(len(history.losses)),
        "metric": workload.evaluate(trainer.model), "seconds_per_step": fmean(history.step_seconds),
        "step_time_ratio": fmean(history.step_seconds) / fmean(reference.history.step_seconds),
        "optimizer_bytes": optimizer_bytes(trainer.optimizer), "losses": history.losses,
        "step_seconds": history.step_seconds,
    }  # fmt: skip


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


@dataclass
class Drawn:
    """Draw the figures of the documentation from stored results."""

    results: Path = Path("benchmarks/results")
    """Folder that contains the results."""
    out_dir: Path = Path("docs/images")
    """Folder to write the figures to."""

    def run(self) -> int:
        found = load(self.results)
        if not found:
            raise ValueError(f"{self.results} contains no results")
        draw = {}
        for stem, results in found.items():
            if "runs" in results:
                draw[f"evidence-{results['workload']}.svg"] = partial(draw_losses, results)
            elif stem.startswith("batch-size-"):
                reached = [row for row in results["rows"] if row["steps"]]
                draw["evidence-batch-size.svg"] = partial(draw_batch_sizes, reached, _title(results))
            elif stem.startswith("density-"):
                title = f"{_title(results)}: loss against the entries kept"
                draw["evidence-density.svg"] = partial(draw_densities, results["rows"], title)
            elif stem == "demo":
                draw["demo.png"] = partial(draw_demo, results)
        self.out_dir.mkdir(parents=True, exist_ok=True)
        for name, function in draw.items():
            function(self.out_dir / name)
            report.print_path("figure", self.out_dir / name)
        return 0


def _title(results: Results) -> str:
    return str(results["tables"][0]["title"])


def draw_demo(results: Mapping[str, Any], path: Path) -> None:
    rows = results["results"]
    histories = [History(row["label"], losses=row["losses"], step_seconds=row["step_seconds"]) for row in rows]
    draw_histories(histories, f"{results['workload']}, seed {results['seed']}", results["target"], path)
