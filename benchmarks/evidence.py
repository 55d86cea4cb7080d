"""The runner of all studies: options, stored results, and their output.

A study defines its cells, and how to make rows and tables of their results. A cell is one run, and its key contains
everything that it depends on. It is written to the JSON file as soon as it is finished. A command that is started
again, after an interruption or with more cells, runs only the missing cells, and resumes the run that was interrupted.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.checkpoints import Pause
from benchmarks.commands.options import Common, check_ranges
from benchmarks.compare.runs import curve
from benchmarks.compare.wording import notes
from benchmarks.peers.checkouts import set_paths
from benchmarks.recipes.types import Settings
from benchmarks.report import Table
from benchmarks.runner import FAILURES, WINDOW, Trainer, memory_usage, optimizer_bytes
from benchmarks.store import Cells, Figures, Identity
from benchmarks.workloads import DataMissingError, PackageMissingError, Size, Workload

__all__ = ["Cells", "Evidence", "Figures", "Identity", "Repeated", "Shown"]

RESULTS = Path(__file__).parent / "results"  # folder of the results that are under version control


@dataclass
class Evidence(Common):
    threads: int = 1
    """Number of threads that torch uses. Processor seconds are most comparable with one."""
    size: Size = "cpu"
    """Size of the model and of the batch."""
    minutes: float | None = None
    """Start no further run after this many minutes. The next call continues from there."""
    peer_path: tuple[str, ...] = ()
    """Checkouts of third-party optimizers that are not packages, as NAME=DIR."""
    keep: bool = False
    """Store the results in benchmarks/results, in addition to --out-dir."""

    @property
    def stem(self) -> str:
        raise NotImplementedError

    def check_options(self) -> None:
        """Raise an error for invalid options."""

    def rows(self, cells: Cells) -> list[Figures]:
        """Run the missing cells, and return the rows of all cells."""
        raise NotImplementedError

    def show(self, rows: list[Figures]) -> "Shown":
        raise NotImplementedError

    def run(self) -> int:
        """Run the study. Return 1 if a run failed that should not fail, and 0 otherwise."""
        self.check(positive=("minutes",))
        self.check_options()
        torch.set_num_threads(self.threads)
        set_paths(self.peer_path)
        folder = RESULTS if self.keep else self.out_dir
        cells = Cells(folder / f"{self.stem}.json", None if self.minutes is None else 60 * self.minutes)
        try:
            rows = self.rows(cells)
        except TimeoutError:
            print(f"{self.minutes:g} minutes are over. Run the same command again to continue")
            return 0
        shown = self.show(rows)
        cells.summary = {**shown.about, "rows": rows, "tables": list(map(asdict, shown.tables))}
        cells.write()
        report.save(self.out_dir, self.stem, shown.tables, cells.payload())
        if self.keep:
            report.print_path("kept", cells.path)
        return shown.status

    check = check_ranges

    def about(self, workload: Workload, optimizer: str, settings: Settings, **more: Any) -> Identity:
        own = {"workload": workload.name, "size": self.size, "batch_size": workload.batch_size}
        return {**own, "optimizer": optimizer, "settings": dict(settings), **more}


@dataclass
class Repeated(Evidence):
    """Options of the studies that train with several seeds."""

    seeds: int = 3
    """Number of seeds, starting with --seed."""

    @property
    def seeds_to_run(self) -> range:
        return range(self.seed, self.seed + self.seeds)


@dataclass(frozen=True)
class Shown:
    tables: Sequence[Table]
    about: Mapping[str, Any]  # data that is stored with the rows
    status: int = 0


def notes_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the notes of the recipes, as text for a caption."""
    return "".join(f" {text}" for text in notes(rows))


def figures_of(trainer: Trainer, end: str) -> Figures:
    history = trainer.history
    return {
        "label": history.label, "end": end, "diverged": end == "diverged", "taken": len(history.losses),
        "lr": trainer.optimizer.param_groups[0]["lr"], "first": history.losses[0],
        "loss": history.loss_at(len(history.losses)), "processor_seconds": sum(history.processor_seconds),
        "optimizer_bytes": optimizer_bytes(trainer.optimizer), "memory": memory_usage(trainer.optimizer),
        "curve": curve(history),
    }  # fmt: skip


def over_seeds(
    runs: Sequence[Figures], keys: Sequence[str], typical: Callable[[list[float]], float] = statistics.median
) -> Figures:
    """Return typical values of runs that differ in the seed, and the counts of those that failed or diverged.

    If a run failed, there are no values, because a mean or median of the others is biased.
    """
    failed = [run["failed"] for run in runs if run["failed"]]
    diverged = sum(bool(run.get("diverged")) for run in runs)
    row: Figures = {"runs": len(runs), "failed": failed, "diverged": diverged}
    for key in keys:
        values = [] if failed or diverged else [run[key] for run in runs]
        row[key] = typical(values) if values and None not in values else None
    return row


def why_lost(row: Mapping[str, Any]) -> str:
    return "failed" if row["failed"] else "diverged"


def train_until(
    trainer: Trainer, steps: int, target: float | None = None, seconds: float | None = None, pause: Pause | None = None
) -> str:
    """Train, and return the reason for the end: ``"target"``, ``"steps"``, ``"seconds"`` or ``"diverged"``.

    The target is a mean loss of :data:`benchmarks.runner.WINDOW` steps, and seconds are those of the processor. A run
    has diverged if its loss is not finite or its mean exceeds twice the first loss. An interrupted run is resumed.
    """
    if pause:
        pause.resume(trainer)
    history = trainer.history
    spent = sum(history.processor_seconds)
    for step in range(len(history.losses) + 1, steps + 1):
        trainer.step()
        spent += history.processor_seconds[-1]
        if trainer.diverged:
            return "diverged"
        if step >= WINDOW:
            if target is not None and history.loss_at(step) <= target:
                return "target"
            if history.risen:
                return "diverged"
            if seconds is not None and spent > seconds:
                return "seconds"
        if pause:
            pause.after_step(trainer)
    return "steps"


def train_and_evaluate(trainer: Trainer, steps: int, pause: Pause, everything: bool = False) -> Figures:
    end = train_until(trainer, steps, pause=pause)
    metric = None if end == "diverged" else trainer.evaluate(everything)[trainer.workload.metric]
    return {**figures_of(trainer, end), "metric": metric}


def attempted(measure: Callable[[Pause], Figures]) -> Callable[[Pause], Figures]:
    """Return a measurement that returns its error, so that a study stores the error and continues."""

    def attempt(pause: Pause) -> Figures:
        try:
            return {"failed": None, **measure(pause)}
        except (DataMissingError, PackageMissingError):
            raise
        except FAILURES as err:
            return {"failed": f"{type(err).__name__}: {err}"}

    return attempt
