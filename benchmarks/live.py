"""A run while it runs: a table that is renewed in place on a terminal, a few plain lines anywhere else.

Figures are read between steps and at most a few times per second, outside the time that is measured. Stages are timed
for the table alone, so that a run whose output goes to a file is measured as it is.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from benchmarks import report
from benchmarks.runner import WINDOW, Trainer
from secondorder import SecondOrderOptimizer
from secondorder.diagnostics import StageClock

LINES = 10
"""Plain lines of a run, where there is no terminal."""
_PAUSE = 0.25  # seconds between two looks, at least
_SHARE = 0.05  # of the time that may go into looks
COLUMNS = ("run", "step", "loss", "lr", "damping", "kl factor", "staleness", "ms/step")


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
        self._table = shown and self._console.is_terminal
        self._lines = shown and not self._table
        self._due, self._times = 0.0, timed and self._table
        self._timed: list[SecondOrderOptimizer] = []
        self._taken: dict[int, int] = {}
        self._stages: dict[str, None] = {}  # in the order in which they were first seen, so that columns stay
        self._progress = report.progress_bar(self._console)
        done = sum(len(trainer.history.losses) for trainer in self._trainers)  # more than none in a run that goes on
        self._task = self._progress.add_task(title, total=steps * len(self._trainers), completed=done)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)

    def __enter__(self) -> "Board":
        for trainer in self._trainers if self._times else ():
            optimizer = trainer.optimizer
            if isinstance(optimizer, SecondOrderOptimizer):
                optimizer.time_stages(StageClock(next(trainer.model.parameters()).device))
                self._timed.append(optimizer)
        if self._table:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for optimizer in self._timed:
            optimizer.time_stages(None)
        if self._table:
            self._live.stop()

    def update(self, trainer: Trainer) -> None:
        self._progress.advance(self._task)
        start, taken = self._now(), len(trainer.history.losses)
        if self._taken.get(id(trainer)) == taken:
            return  # it diverged, and waits for the others
        self._taken[id(trainer)] = taken
        if self._table and (start >= self._due or taken == self._steps):
            self._live.update(self.render(), refresh=True)
            took = self._now() - start
            self._due = start + max(_PAUSE, took / _SHARE)
        elif self._lines and (taken == self._steps or taken % -(-self._steps // LINES) == 0):
            figures = figures_of(trainer)
            told = ", ".join(f"{name} {figures[name]}" for name in COLUMNS[2:] if figures[name])
            self._console.print(
                f"{trainer.history.label}: step {figures['step']}/{self._steps}, {told}",
                highlight=False, soft_wrap=True,
            )  # fmt: skip

    def render(self) -> Group:
        found = [figures_of(trainer) for trainer in self._trainers]
        caption = f"loss and ms/step: mean of {WINDOW} steps; staleness: steps since the oldest refresh"
        rows = [[figures[name] for name in COLUMNS] for figures in found]
        tables = [report.make_table(self._title, COLUMNS, rows, caption)]
        self._stages.update(dict.fromkeys(stage for figures in found for stage in figures["stages"]))
        if self._stages:
            tables.append(_stage_table(found, list(self._stages)))
        return Group(*tables, self._progress.get_renderable())


def figures_of(trainer: Trainer) -> dict[str, Any]:
    """Return what a run has come to, as text."""
    history, optimizer = trainer.history, trainer.optimizer
    diagnose = getattr(optimizer, "diagnostics", dict)
    told: Mapping[str, Any] = diagnose()
    steps = len(history.losses)
    recent = history.step_seconds[-WINDOW:]
    factor, ages = told.get("kl_clip_factor"), told.get("staleness") or {}
    return {
        "run": history.label,
        "step": str(steps),
        "loss": f"{history.loss_at(steps):.4g}" if steps else "",
        "lr": f"{float(optimizer.param_groups[0]['lr']):.3g}",
        "damping": _range([x for x in (told.get("damping_by_layer") or {}).values() if x is not None])
        or _range(told.get("damping", [])),
        "kl factor": "" if factor is None else f"{factor:.3g}",
        "staleness": str(max(ages.values())) if ages else "",
        "ms/step": f"{1e3 * sum(recent) / len(recent):.3g}" if recent else "",
        "stages": dict(told.get("stage_ms", {})),
    }


def _range(values: Sequence[float]) -> str:
    if not values:
        return ""
    low, high = f"{min(values):.2g}", f"{max(values):.2g}"
    return low if low == high else f"{low} – {high}"


def _stage_table(found: Sequence[Mapping[str, Any]], stages: Sequence[str]) -> Table:
    rows = [
        [figures["run"], *(f"{figures['stages'].get(stage, 0.0):.2f}" for stage in stages)]
        for figures in found
        if figures["stages"]
    ]
    return report.make_table("Milliseconds of the last step", ("run", *stages), rows)
