"""The progress and the metrics of a run, updated in place on a terminal, and a few plain lines elsewhere.

Metrics are read between steps, at most a few times per second, and outside the measured time. Stages are timed only if
the output is a terminal, so that the timers do not affect a run whose output goes to a file.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from benchmarks import report
from benchmarks.runner import WINDOW, Trainer
from secondorder import SecondOrderOptimizer
from secondorder.diagnostics import StageClock

LINES = 10
"""Number of plain lines per run, if the output is not a terminal."""
_PAUSE = 0.25  # minimum seconds between two updates
_SHARE = 0.05  # maximum share of the time that updates take


class Board:
    """Shows runs that take turns.

    ::

        with Board("digits", trainers, steps) as board:
            race(trainers, steps, board.update)
    """

    def __init__(
        self,
        title: str,
        trainers: Sequence[Trainer],
        steps: int,
        shown: bool = True,
        timed: bool = True,
        console: Console | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._title, self._trainers, self._steps, self._now = title, list(trainers), steps, now
        self._console = report.console() if console is None else console
        self._renewed = shown and self._console.is_terminal
        self._lines = shown and not self._renewed
        self._due, self._times = 0.0, timed and self._renewed
        figures = TextColumn("{task.fields[figures]}", table_column=Column(overflow="fold"))
        columns = TextColumn("{task.description}"), MofNCompleteColumn(), TimeRemainingColumn(), figures
        off = not self._renewed
        self._progress = Progress(*columns, console=self._console, auto_refresh=False, transient=True, disable=off)
        self._tasks = {}
        for trainer in trainers:
            done = len(trainer.history.losses)  # not 0 if the run was resumed
            task = self._progress.add_task(trainer.history.label, total=steps, completed=done, figures="")
            self._tasks[id(trainer)] = task

    def __enter__(self) -> "Board":
        self._time_stages(self._times)
        if self._renewed:
            self._console.print(self._title)
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._time_stages(False)
        self._progress.stop()

    def _time_stages(self, on: bool) -> None:
        for trainer in self._trainers if self._times else ():
            if isinstance(trainer.optimizer, SecondOrderOptimizer):
                device = next(trainer.model.parameters()).device
                trainer.optimizer.time_stages(StageClock(device) if on else None)

    def update(self, trainer: Trainer) -> None:
        start, taken, task = self._now(), len(trainer.history.losses), self._tasks[id(trainer)]
        if self._progress.tasks[task].completed == taken:
            return  # the run has diverged and takes no more steps
        self._progress.update(task, completed=taken)
        if self._renewed and (start >= self._due or taken == self._steps):
            for each in self._trainers:
                self._progress.update(self._tasks[id(each)], figures=figures_of(each))
            self._progress.refresh()
            self._due = start + max(_PAUSE, (self._now() - start) / _SHARE)
        elif self._lines and (taken == self._steps or taken % -(-self._steps // LINES) == 0):
            line = f"{trainer.history.label}: step {taken}/{self._steps}, {figures_of(trainer)}"
            self._console.print(line, highlight=False, soft_wrap=True)


def figures_of(trainer: Trainer) -> str:
    """Return the current metrics of a run as text. The loss and the step time are means of ten steps."""
    history, optimizer = trainer.history, trainer.optimizer
    diagnose = getattr(optimizer, "diagnostics", dict)
    found: Mapping[str, Any] = diagnose()
    recent = history.step_seconds[-WINDOW:]
    factor, ages = found.get("kl_clip_factor"), found.get("staleness") or {}
    damping = [x for x in (found.get("damping_by_layer") or {}).values() if x is not None] or found.get("damping", [])
    figures = {
        "loss": f"{history.loss_at(len(history.losses)):.4g}" if history.losses else "",
        "lr": f"{float(optimizer.param_groups[0]['lr']):.3g}",
        "damping": _range(damping),
        "kl factor": "" if factor is None else f"{factor:.3g}",
        "staleness": str(max(ages.values())) if ages else "",
        "ms/step": f"{1e3 * sum(recent) / len(recent):.3g}" if recent else "",
        "stages, ms": " ".join(f"{stage} {spent:.2f}" for stage, spent in found.get("stage_ms", {}).items()),
    }
    return ", ".join(f"{name} {text}" for name, text in figures.items() if text)


def _range(values: Sequence[float]) -> str:
    if not values:
        return ""
    low, high = f"{min(values):.2g}", f"{max(values):.2g}"
    return low if low == high else f"{low} – {high}"
