"""``train``: one workload, one optimizer, any keywords; for tuning and for the tables of the docs.

Under ``torchrun`` all ranks train together, each on its share of every batch, and rank 0 reports for all.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.table import Table
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LRScheduler

from benchmarks import report
from benchmarks.commands.options import Common
from benchmarks.live import Board
from benchmarks.ranks import RankFigures, Ranks, joined
from benchmarks.recipes import AliasName, MethodName, Settings, find_method
from benchmarks.runner import WINDOW, History, Trainer, memory_usage, race
from benchmarks.settings import parse_settings
from benchmarks.workloads import Size, WorkloadName, make_workload
from secondorder import SecondOrderOptimizer
from secondorder.comm.counter import Counter

CHECKPOINTS = (40, 75, 100, 140, 300)
"""Steps whose loss is reported, those of published runs of the autoencoder."""

RANK_COLUMNS = 8
"""Ranks that a table has a column for."""

Schedule = Literal["constant", "cosine"]


@dataclass
class Train(Common):
    """Train one workload with one optimizer and print the loss along the way."""

    workload: WorkloadName = "digits"
    """What to train."""
    optimizer: Annotated[MethodName | AliasName, tyro.conf.arg(aliases=["--optim"])] = "kfac"
    """Whose recipe to start from; the names of other programs take the recipe of the method that they mean."""
    comm: str | None = None
    """Under torchrun: who does what, such as mem_opt, hybrid_opt:0.5, chief_only:deliver=inverses; unset: comm_opt."""
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
    size: Size = "cpu"
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
        with joined() as ranks:
            return self._run(ranks)

    def _run(self, ranks: Ranks) -> int:
        """Train, and report on the first rank.

        Args:
            ranks: The processes that train together.

        Returns:
            Exit status.
        """
        changes = parse_settings(self.set)
        if self.comm is not None and self.optimizer in {"sgd", "adamw"}:
            raise ValueError(f"--comm {self.comm}: {self.optimizer} has no curvature to place, leave it out")
        if self.comm is not None:
            changes["comm"] = self.comm
        workload = make_workload(
            self.workload, self.data_dir, self.size, self.batch_size, parse_settings(self.workload_set)
        )
        steps = workload.steps[self.size] if self.steps is None else self.steps
        method = find_method(self.optimizer)
        recipe = self.workload if self.recipe else None
        settings, closure = method.settings(recipe, changes), method.needs_closure(recipe, changes)
        make = partial(method.build, workload=recipe, changes=changes)
        schedule = partial(make_schedule, self.schedule, steps)
        trainer = Trainer(method.label, workload, make, self.seed, schedule, closure, ranks)
        with Board(f"{self.workload}, {method.label}", [trainer], steps, ranks.first) as board:
            mine = _train(trainer, ranks, steps, board.update)
        figures = ranks.gather(mine)
        trainer.history.losses = _mean_losses(figures)
        if ranks.first:
            self._report(trainer, settings, figures)
        return int(trainer.history.diverged)

    def _report(self, trainer: Trainer, settings: Settings, ranks: Sequence[RankFigures]) -> None:
        """Print and save what the run did.

        Args:
            trainer: The run, done.
            settings: Keywords of its optimizer.
            ranks: What each rank measured.
        """
        history, metric, memory = trainer.history, trainer.workload.metric, ranks[0].memory
        figures = {
            "losses": history.losses,
            "step_seconds": history.step_seconds,
            "optimizer_bytes": memory["total"],
            "memory": memory,
            "ranks": [{key: value for key, value in asdict(rank).items() if key != "losses"} for rank in ranks],
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
        tables = [table, *([rank_table(ranks, len(history.losses))] if len(ranks) > 1 else [])]
        data = {"workload": self.workload, "optimizer": self.optimizer, "settings": dict(settings), "seed": self.seed}
        data["workload_settings"] = parse_settings(self.workload_set)
        report.save(self.out_dir, f"train-{self.workload}-{self.optimizer}", tables, {**data, **figures})


def _train(trainer: Trainer, ranks: Ranks, steps: int, on_step: Callable[[Trainer], None]) -> RankFigures:
    """Do this rank's part of a run.

    Args:
        trainer: The run.
        ranks: The processes that train together.
        steps: Steps to take.
        on_step: Called after every step.

    Returns:
        What this rank measured.
    """
    optimizer = trainer.optimizer
    comm: Any = getattr(optimizer, "comm", None)  # an optimizer of torch has none
    role = getattr(comm, "role", "gradient")
    counter = getattr(getattr(comm, "collectives", None), "counter", Counter())  # nor has one process
    counter.clear()  # of the messages of the constructor
    if role == "inverse":
        comm.serve(optimizer)
    else:
        race([trainer], steps, on_step)
    sent = {stage: count / max(1, steps) for stage, count in counter.bytes_by_stage().items()}
    figures = RankFigures(ranks.rank, role, trainer.history.losses, memory_usage(optimizer), sent)
    if isinstance(optimizer, SecondOrderOptimizer):
        optimizer.close()
    return figures


def _mean_losses(ranks: Sequence[RankFigures]) -> list[float]:
    """Return the loss of each whole batch.

    Args:
        ranks: What each rank measured on equal shares of it.

    Returns:
        Means over the ranks that compute gradients.
    """
    return [fmean(losses) for losses in zip(*(r.losses for r in ranks if r.role == "gradient"), strict=True)]


def rank_table(ranks: Sequence[RankFigures], steps: int) -> Table:
    """Return what each rank sent and kept; of many ranks the least, the mean and the most.

    Args:
        ranks: What each rank measured.
        steps: Steps of the run.

    Returns:
        A table with a row for each stage and each kind.
    """
    stages = list(dict.fromkeys(stage for rank in ranks for stage in rank.sent))
    kinds = list(dict.fromkeys(kind for rank in ranks for kind, count in rank.memory.items() if count))
    lines = [(f"sent per step, {stage}", [rank.sent.get(stage, 0.0) for rank in ranks]) for stage in stages]
    lines += [(f"kept, {kind}", [float(rank.memory.get(kind, 0)) for rank in ranks]) for kind in kinds]
    heads = [f"rank {rank.rank}" if rank.role == "gradient" else f"rank {rank.rank} ({rank.role})" for rank in ranks]
    if len(ranks) > RANK_COLUMNS:
        heads = ["least", "mean", "most"]
        lines = [(what, [min(counts), fmean(counts), max(counts)]) for what, counts in lines]
    return report.make_table(
        f"Bytes of each rank over {steps} steps",
        ("bytes", *heads),
        [(what, *(f"{count:,.0f}" for count in counts)) for what, counts in lines],
        "Sent: what a rank hands to the collectives of its optimizer, without what DistributedDataParallel sends.",
    )


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
