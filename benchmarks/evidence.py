"""What the experiments of the evidence share: options, and results that are kept cell by cell.

A cell is one run. It is named by everything that it depends on, and is written to the JSON file as soon as it is done:
a command that is started again, after an interruption or with more cells to fill, runs only those that are missing.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from rich.table import Table

from benchmarks import report
from benchmarks.commands.options import Common
from benchmarks.compare.roster import find
from benchmarks.compare.runs import curve
from benchmarks.compare.store import processor
from benchmarks.peers import PeerMissingError
from benchmarks.peers.by_path import set_paths
from benchmarks.recipes import Settings
from benchmarks.runner import FAILURES, WINDOW, MakeScheduler, Trainer, memory_usage, optimizer_bytes
from benchmarks.workloads import DataMissingError, Size, Workload

RESULTS = Path(__file__).parent / "results"
"""Where results lie that are kept under version control."""

VERSION = 2
"""Of the format of the files."""

Identity = Mapping[str, Any]
"""Everything that the figures of a cell depend on, beside the code and the machine."""
Figures = dict[str, Any]
Machine = dict[str, Any]


@dataclass
class Evidence(Common):
    """What the experiments take."""

    threads: int = 1
    """Threads that torch computes with; processor seconds compare best with one."""
    size: Size = "cpu"
    """Size of the model and of the batch."""
    minutes: float | None = None
    """Begin no further run after so many minutes; the next call goes on from there."""
    peer_path: tuple[str, ...] = ()
    """Checkouts of optimizers that are no package, as NAME=DIR."""
    keep: bool = False
    """Keep the results under benchmarks/results, rather than in the folder of this run only."""
    out_dir: Path = Path("bench-output")
    """Folder for tables, pictures and results."""

    def check(self, positive: Sequence[str] = (), shares: Sequence[str] = ()) -> None:
        """Refuse options that are out of range; one that is unset is in it.

        Args:
            positive: Names of options that are numbers above 0, or several of them.
            shares: Names of those that are also at most 1.

        Raises:
            ValueError: For one that is not.
        """
        for names, most, words in ((positive, math.inf, "positive"), (shares, 1.0, "in (0, 1]")):
            for name in names:
                given = getattr(self, name)
                each = given if isinstance(given, tuple) else (given,)
                if any(number is not None and not 0 < number <= most for number in each):
                    raise ValueError(f"{name} must be {words}, got {given}")

    def about(self, workload: Workload, optimizer: str, settings: Settings, **more: Any) -> Identity:
        """Return what a cell of one optimizer depends on.

        Args:
            workload: What it trains.
            optimizer: Its name.
            settings: Its keywords.
            more: What else.

        Returns:
            The identity.
        """
        own = {"workload": workload.name, "size": self.size, "batch_size": workload.batch_size}
        return {**own, "optimizer": optimizer, "settings": dict(settings), **more}

    def open_cells(self, stem: str) -> "Cells":
        """Set the threads, and read what is there already.

        Args:
            stem: Name of the file of results, without its suffix.

        Returns:
            The cells.

        Raises:
            ValueError: For a number of minutes that is not positive, or a file that holds something else.
        """
        if self.minutes is not None and self.minutes <= 0:
            raise ValueError(f"minutes must be positive, got {self.minutes}")
        torch.set_num_threads(self.threads)
        set_paths(self.peer_path)
        folder = RESULTS if self.keep else self.out_dir
        return Cells(folder / f"{stem}.json", None if self.minutes is None else 60 * self.minutes)

    def publish(self, cells: "Cells", tables: Sequence[Table], data: Mapping[str, Any]) -> Path:
        """Print and save tables and results.

        Args:
            cells: All cells.
            tables: What to show.
            data: What else to keep, such as summaries.

        Returns:
            Path of a picture of the same name, in the folder of this run.
        """
        stem = cells.path.stem
        if cells.left:
            print(f"{cells.left} runs are still to be done: the same command again goes on with them")
        cells.summary = dict(data)
        cells.write()
        report.save(self.out_dir, stem, tables, cells.payload())
        if self.keep:
            report.print_path("kept", cells.path)
        return self.out_dir / f"{stem}.png"


@dataclass
class Cells:
    """The finished runs of one experiment, in a file."""

    path: Path
    budget: float | None = None
    """Seconds after which no further run begins."""
    left: int = 0
    """Runs that were wanted and not begun."""
    summary: dict[str, Any] = field(default_factory=dict)
    _started: float = field(default_factory=time.monotonic)

    @cached_property
    def _found(self) -> dict[str, tuple[Identity, Figures, Machine]]:
        if not self.path.is_file():
            return {}
        data = json.loads(self.path.read_text(encoding="utf-8"))
        if not isinstance(data, dict) or data.get("version") != VERSION or "cells" not in data:
            raise ValueError(f"{self.path} is no file of finished runs of this version: move it away")
        machines = data["machines"]
        return {_key(cell["of"]): (cell["of"], cell["figures"], machines[cell["machine"]]) for cell in data["cells"]}

    def get(self, identity: Identity) -> Figures | None:
        """Return the figures of a cell, None while it is not done.

        Args:
            identity: What it depends on.

        Returns:
            The figures.
        """
        return self._found.get(_key(_timed(identity)), (None, None, None))[1]

    def run(
        self, identity: Identity, measure: Callable[[], Figures], counts: Callable[[Figures], bool] = lambda _: True
    ) -> Figures | None:
        """Return the figures of a cell; run it if it is not done and there is time for it.

        Args:
            identity: What it depends on.
            measure: Runs it.
            counts: Whether figures that are there are of use; else it is run again, and replaced.

        Returns:
            The figures, None when the time is over.
        """
        found = self.get(identity)
        if found is not None and counts(found):
            return found
        if self.budget is not None and time.monotonic() - self._started > self.budget:
            self.left += 1
            return None
        identity = _timed(identity)  # before the measurement, which may set other threads
        figures: Figures = _plain(measure())
        self._found[_key(identity)] = _plain(identity), figures, machine()
        self.write()
        return figures

    def write(self) -> None:
        """Write the file, a cell a line, in one move: an interruption leaves the old one or the new one."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(f".{os.getpid()}.part")
        head = _plain(self.payload())
        lines = ",\n".join(json.dumps(cell, allow_nan=False) for cell in head.pop("cells"))
        text = json.dumps(head, indent=1, allow_nan=False)[:-2] + ',\n "cells": [\n' + lines + "\n]}\n"
        draft.write_text(text, encoding="utf-8")
        draft.replace(self.path)

    def payload(self) -> dict[str, Any]:
        """Return all that the file holds."""
        found = list(self._found.values())
        machines = [used for index, (_, _, used) in enumerate(found) if used not in [m for _, _, m in found[:index]]]
        cells = [{"of": of, "figures": figures, "machine": machines.index(used)} for of, figures, used in found]
        return {"version": VERSION, "machines": machines, **self.summary, "cells": cells}


def machine() -> Machine:
    """Return what the figures of a cell depend on beside its identity."""
    return {**report.environment(), "processor": processor()}


def _timed(identity: Identity) -> Identity:
    """Return an identity with the threads, which times among the figures depend on."""
    return {**identity, "threads": torch.get_num_threads()}


def _key(identity: Identity) -> str:
    return json.dumps(_plain(identity), sort_keys=True)


def _plain(value: Any) -> Any:
    """Return what JSON can hold: a number that is not finite becomes None, a path its text, a tuple a list."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, int | str | bool | None) else str(value)


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[str], None]]:
    """Show how many runs are done.

    Args:
        title: Of the experiment.
        total: Number of runs.

    Yields:
        A function that counts one more, and says which comes next.
    """
    bar: Progress
    with report.progress_bar() as bar:
        task = bar.add_task(title, total=total)

        def advance(what: str) -> None:
            bar.update(task, description=f"{title}: {what}", advance=1)

        yield advance


def notes_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the notes of recipes for a caption, each once, with the optimizers that have it.

    Args:
        rows: With a label, and often a note.

    Returns:
        A sentence for each note, with a space before.
    """
    labels: dict[str, dict[str, None]] = {}
    for row in rows:
        if row.get("note"):
            labels.setdefault(row["note"], {})[row["label"]] = None
    return "".join(f" {', '.join(found)}: {note}." for note, found in labels.items())


def trainer_of(
    name: str, settings: Settings, workload: Workload, seed: int, schedule: MakeScheduler | None = None
) -> Trainer:
    """Return a run of an optimizer that has not begun."""
    method = find(name)
    make = partial(method.construct, **settings)
    return Trainer(method.label, workload, make, seed, schedule, method.needs_closure(None, settings))


def figures_of(trainer: Trainer, end: str) -> Figures:
    """Return what is kept of a run that has ended.

    Args:
        trainer: The run.
        end: What :func:`train_until` returned.

    Returns:
        Its figures.
    """
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
    """Return the runs that count, none where one of them was lost (the others would flatter it), and what was lost."""
    whole = [run for run in runs if not run["failed"] and not run["diverged"]]
    failed = [run["failed"] for run in runs if run["failed"]]
    told = {"runs": len(runs), "failed": failed, "diverged": sum(bool(run.get("diverged")) for run in runs)}
    return whole if len(whole) == len(runs) else [], told


def why_lost(row: Mapping[str, Any]) -> str:
    """Return why a row has no loss."""
    return "failed" if row["failed"] else "diverged" if row["diverged"] else "not run"


def train_until(trainer: Trainer, steps: int, target: float | None = None, seconds: float | None = None) -> str:
    """Train until something ends it.

    Args:
        trainer: A run that has not begun.
        steps: Most steps.
        target: Mean loss of :data:`benchmarks.runner.WINDOW` steps at which it ends.
        seconds: Processor seconds after which it ends.

    Returns:
        ``"target"``, ``"steps"``, ``"seconds"`` or ``"diverged"``: not finite, or a mean of twice the first loss.
    """
    history, spent = trainer.history, 0.0
    for step in range(1, steps + 1):
        trainer.step()
        spent += history.processor_seconds[-1]
        if trainer.diverged:
            return "diverged"
        if step < WINDOW:
            continue
        if target is not None and history.loss_at(step) <= target:
            return "target"
        if history.risen:
            return "diverged"
        if seconds is not None and spent > seconds:
            return "seconds"
    return "steps"


def attempt(measure: Callable[[], Figures]) -> Figures:
    """Run a cell in which an optimizer may fail: that is a result, too.

    Args:
        measure: Runs it.

    Returns:
        Its figures with ``failed`` None, or nothing but the error's text there.

    Raises:
        DataMissingError: When there is no data, which is nobody's failure.
        PeerMissingError: When an optimizer is not installed.
    """
    try:
        return {"failed": None, **measure()}
    except (DataMissingError, PeerMissingError):
        raise
    except FAILURES as err:  # its text is kept with the cell, and the others go on
        return {"failed": f"{type(err).__name__}: {err}"}
