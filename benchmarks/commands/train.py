"""``train``: one workload, one optimizer, any keywords; for tuning and for the tables of the docs."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LRScheduler

from benchmarks import report
from benchmarks.commands.options import Common
from benchmarks.recipes import METHODS, MethodName, Settings
from benchmarks.runner import WINDOW, History, Trainer, memory_usage, race
from benchmarks.settings import parse_settings
from benchmarks.workloads import Size, WorkloadName, make_workload

CHECKPOINTS = (40, 75, 100, 140, 300)
"""Steps whose loss is reported, those of published runs of the autoencoder."""

Schedule = Literal["constant", "cosine"]


@dataclass
class Train(Common):
    """Train one workload with one optimizer and print the loss along the way."""

    workload: WorkloadName = "digits"
    """What to train."""
    optimizer: MethodName = "kfac"
    """Whose recipe to start from."""
    set: tuple[str, ...] = ()
    """Keywords that replace the recipe's, such as lr=0.3 graft=none adaptive_damping=true; for a layer method also
    skip_layers=LayerNorm,Embedding,head; for a window method also density=0.01 block_size=4096 value_dtype=bfloat16
    error_bits=4, or rank=4."""
    recipe: bool = True
    """Start from the recipe; --no-recipe starts from the constructor's defaults."""
    steps: int | None = None
    """Optimizer steps; unset: the workload's own number."""
    workload_set: tuple[str, ...] = ()
    """Fields of the workload that are changed, such as dice=0.5 of unet."""
    schedule: Schedule = "constant"
    """Learning rate over the run."""
    size: Size = "full"
    """Size of the model and of the batch."""
    batch_size: int | None = None
    """Examples per step; unset: the workload's own number."""
    evaluate: bool = False
    """At the end take all held-out data, where the workload would take a part of it to save time."""
    out_dir: Path = Path("bench-output")
    """Folder for the results."""

    def run(self) -> int:
        """Run the command.

        Returns:
            0, or 1 when the loss was no longer finite.
        """
        torch.set_num_threads(self.threads)
        changes = parse_settings(self.set)
        of_workload = parse_settings(self.workload_set)
        workload = make_workload(self.workload, self.data_dir, self.size, self.batch_size, of_workload)
        steps = workload.steps[self.size] if self.steps is None else self.steps
        method = METHODS[self.optimizer]
        recipe = self.workload if self.recipe else None
        settings, closure = method.settings(recipe, changes), method.needs_closure(recipe, changes)
        make = partial(method.build, workload=recipe, changes=changes)
        schedule = partial(make_schedule, self.schedule, steps)
        trainer = Trainer(method.label, workload, make, self.seed, schedule, closure)
        with report.progress_bar() as progress:
            task = progress.add_task(f"{self.workload}, {method.label}", total=steps)
            race([trainer], steps, lambda _: progress.advance(task))
        self._report(trainer, settings)
        return int(trainer.diverged)

    def _report(self, trainer: Trainer, settings: Settings) -> None:
        """Print and save what the run did.

        Args:
            trainer: The run, done.
            settings: Keywords of its optimizer.
        """
        history, metric = trainer.history, trainer.workload.metric
        memory = memory_usage(trainer.optimizer)
        figures = {
            "losses": history.losses,
            "step_seconds": history.step_seconds,
            "optimizer_bytes": memory["total"],
            "memory": memory,
            "evaluated_on": "all held-out data" if self.evaluate else "the workload's own choice of held-out data",
            metric: trainer.workload.evaluate(trainer.model, self.evaluate),
        }
        columns, cells = losses_at(history, CHECKPOINTS)
        seconds = f"{sum(history.step_seconds):.1f}"
        keywords = " ".join(f"{key}={value}" for key, value in settings.items())
        table = report.make_table(
            f"{self.workload}: {history.label} {keywords}",
            ("loss at step", *columns, metric, "seconds", "optimizer bytes"),
            [(f"mean of {WINDOW}", *cells, f"{figures[metric]:.4g}", seconds, f"{memory['total']:,}")],
        )
        data = {"workload": self.workload, "optimizer": self.optimizer, "settings": dict(settings), "seed": self.seed}
        data["workload_settings"] = parse_settings(self.workload_set)
        report.save(self.out_dir, f"train-{self.workload}-{self.optimizer}", [table], {**data, **figures})


def make_schedule(schedule: Schedule, steps: int, optimizer: Optimizer) -> LRScheduler:
    """Return a learning-rate schedule.

    Args:
        schedule: Its shape.
        steps: Length of the run.
        optimizer: Whose learning rate.

    Returns:
        The schedule.
    """
    if schedule == "cosine":
        return CosineAnnealingLR(optimizer, T_max=steps)
    return ConstantLR(optimizer, factor=1.0)


def losses_at(history: History, checkpoints: tuple[int, ...]) -> tuple[list[str], list[str]]:
    """Return table heads and cells for the loss at some steps and at the last one.

    Args:
        history: A run.
        checkpoints: Steps of interest; those beyond the run are left out.

    Returns:
        Heads and cells.
    """
    last = len(history.losses)
    steps = [*(step for step in checkpoints if step < last), last]
    return [str(step) for step in steps], [f"{history.loss_at(step):.4g}" for step in steps]
