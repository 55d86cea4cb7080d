"""The runner of all studies: options, stored results, and their output.

A study defines its cells, and how to make rows, tables and a picture of their results. A cell is one run, and its key
contains everything that it depends on. It is written to the JSON file as soon as it is finished. A command that is
started again, after an interruption or with more cells, runs only the missing cells, and resumes the run that was
interrupted.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from rich.table import Table

from benchmarks import report
from benchmarks.checkpoints import Pause
from benchmarks.commands.options import Common, check_ranges
from benchmarks.compare.runs import curve, find
from benchmarks.compare.wording import notes
from benchmarks.peers import PeerMissingError
from benchmarks.peers.checkouts import set_paths
from benchmarks.recipes.types import Settings
from benchmarks.runner import FAILURES, WINDOW, Trainer, memory_usage, optimizer_bytes, trainer_of
from benchmarks.store import Cells, Figures, Identity
from benchmarks.workloads import DataMissingError, Size, Workload

__all__ = ["Cells", "Evidence", "Figures", "Identity", "Shown"]

RESULTS = Path(__file__).parent / "results"
"""Folder of the results that are under version control."""


@dataclass
class Evidence(Common):
    """Options of the studies."""

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

    @property
    def runs(self) -> int:
        """Number of times that :meth:`rows` calls ``advance``."""
        raise NotImplementedError

    def check_options(self) -> None:
        """Raise an error for invalid options."""

    def rows(self, cells: "Cells", advance: Callable[[str], None]) -> list[Figures]:
        """Run the missing cells, and return the rows of all cells."""
        raise NotImplementedError

    def show(self, rows: list[Figures]) -> "Shown":
        raise NotImplementedError

    def run(self) -> int:
        """Run the study. Return 1 if a run failed that should not fail, and 0 otherwise."""
        self.check_options()
        cells = self.open_cells(self.stem)
        with progress(self.stem.replace("-", " "), self.runs) as advance:
            rows = self.rows(cells, advance)
        shown = self.show(rows)
        path = self.publish(cells, shown.tables, {**shown.about, "rows": rows})
        if shown.draw is not None:
            shown.draw(path)
            report.print_path("plot", path)
        return shown.status

    check = check_ranges

    def about(self, workload: Workload, optimizer: str, settings: Settings, **more: Any) -> Identity:
        own = {"workload": workload.name, "size": self.size, "batch_size": workload.batch_size}
        return {**own, "optimizer": optimizer, "settings": dict(settings), **more}

    def open_cells(self, stem: str) -> "Cells":
        if self.minutes is not None and self.minutes <= 0:
            raise ValueError(f"minutes must be positive, got {self.minutes}")
        torch.set_num_threads(self.threads)
        set_paths(self.peer_path)
        folder = RESULTS if self.keep else self.out_dir
        return Cells(folder / f"{stem}.json", None if self.minutes is None else 60 * self.minutes)

    def publish(self, cells: "Cells", tables: Sequence[Table], data: Mapping[str, Any]) -> Path:
        stem = cells.path.stem
        if cells.left:
            print(f"{cells.left} runs remain. Run the same command again to continue")
        cells.summary = {**data, "tables": [report.texts(table) for table in tables]}
        cells.write()
        report.save(self.out_dir, stem, tables, cells.payload())
        if self.keep:
            report.print_path("kept", cells.path)
        return self.out_dir / f"{stem}.png"


@dataclass(frozen=True)
class Shown:
    """The output of a study."""

    tables: Sequence[Table]
    about: Mapping[str, Any]
    """Data that is stored with the rows."""
    draw: Callable[[Path], None] | None = None
    status: int = 0


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[str], None]]:
    bar: Progress
    with report.progress_bar() as bar:
        task = bar.add_task(title, total=total)

        def advance(what: str) -> None:
            bar.update(task, description=f"{title}: {what}", advance=1)

        yield advance


def notes_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the notes of the recipes, as text for a caption."""
    return "".join(f" {text}" for text in notes(rows))


def figures_of(trainer: Trainer, end: str) -> Figures:
    history = trainer.history
    return {
        "label": history.label,
        "end": end,
        "diverged": end == "diverged",
        "taken": len(history.losses),
        "lr": trainer.optimizer.param_groups[0]["lr"],
        "first": history.losses[0],
        "loss": history.loss_at(len(history.losses)),
        "processor_seconds": sum(history.processor_seconds),
        "optimizer_bytes": optimizer_bytes(trainer.optimizer),
        "memory": memory_usage(trainer.optimizer),
        "curve": curve(history),
    }


def lost(runs: Sequence[Figures]) -> tuple[list[Figures], Figures]:
    """Return the runs to average, and the failures. If a run failed, there are none: a mean of the others is biased."""
    whole = [run for run in runs if not run["failed"] and not run["diverged"]]
    failed = [run["failed"] for run in runs if run["failed"]]
    counts = {"runs": len(runs), "failed": failed, "diverged": sum(bool(run.get("diverged")) for run in runs)}
    return whole if len(whole) == len(runs) else [], counts


def why_lost(row: Mapping[str, Any]) -> str:
    return "failed" if row["failed"] else "diverged" if row["diverged"] else "not run"


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


def run_of(
    name: str, settings: Settings, workload: Workload, seed: int, steps: int, pause: Pause | None = None
) -> Figures:
    trainer = trainer_of(find(name), workload, settings, seed)
    return figures_of(trainer, train_until(trainer, steps, pause=pause))


def attempt(measure: Callable[[], Figures]) -> Figures:
    try:
        return {"failed": None, **measure()}
    except (DataMissingError, PeerMissingError):
        raise
    except FAILURES as err:  # the message is stored with the cell, and the study continues
        return {"failed": f"{type(err).__name__}: {err}"}
