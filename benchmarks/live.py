"""The progress and the metrics of a run, updated in place on a terminal, and a few plain lines elsewhere.

Metrics are read between steps, at most a few times per second, and outside the measured time.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from benchmarks import report
from benchmarks.runner import WINDOW, Trainer

LINES = 10  # number of plain lines per run, if the output is not a terminal
_PAUSE = 0.25  # minimum seconds between two updates of a run


@contextmanager
def board(
    title: str, trainers: Sequence[Trainer], steps: int, shown: bool = True, console: Console | None = None
) -> Iterator[Callable[[Trainer], None]]:
    """Show runs that take turns. The context is a function to call after every step of a run."""
    console = console or report.console()
    on_terminal = shown and console.is_terminal
    figures = TextColumn("{task.fields[figures]}", table_column=Column(overflow="fold"))
    columns = TextColumn("{task.description}"), MofNCompleteColumn(), TimeRemainingColumn(), figures
    progress = Progress(*columns, console=console, auto_refresh=False, transient=True, disable=not on_terminal)
    tasks = {
        id(run): progress.add_task(run.history.label, total=steps, completed=len(run.history.losses), figures="")
        for run in trainers
    }
    due = dict.fromkeys(tasks, 0.0)

    def update(trainer: Trainer) -> None:
        taken, key = len(trainer.history.losses), id(trainer)
        if progress.tasks[tasks[key]].completed == taken:
            return  # the run has diverged and takes no more steps
        progress.update(tasks[key], completed=taken)
        if on_terminal and (time.monotonic() >= due[key] or taken == steps):
            progress.update(tasks[key], figures=figures_of(trainer))
            progress.refresh()
            due[key] = time.monotonic() + _PAUSE
        elif shown and not on_terminal and (taken == steps or taken % -(-steps // LINES) == 0):
            line = f"{trainer.history.label}: step {taken}/{steps}, {figures_of(trainer)}"
            console.print(line, highlight=False, soft_wrap=True)

    if on_terminal:
        console.print(title)
    with progress:
        yield update


def figures_of(trainer: Trainer) -> str:
    """Return the current metrics of a run as text. The loss and the step time are means of ten steps."""
    history, optimizer = trainer.history, trainer.optimizer
    found: Mapping[str, Any] = getattr(optimizer, "diagnostics", dict)()
    recent = history.step_seconds[-WINDOW:]
    factor, ages = found.get("kl_clip_factor"), found.get("staleness") or {}
    damping = [x for x in (found.get("damping_by_layer") or {}).values() if x is not None] or found.get("damping", [])
    figures = {
        "loss": f"{history.loss_at(len(history.losses)):.4g}" if history.losses else "",
        "lr": f"{float(optimizer.param_groups[0]['lr']):.3g}",
        "damping": " – ".join(dict.fromkeys(f"{pick(damping):.2g}" for pick in (min, max) if damping)),
        "kl factor": "" if factor is None else f"{factor:.3g}",
        "staleness": str(max(ages.values())) if ages else "",
        "ms/step": f"{1e3 * sum(recent) / len(recent):.3g}" if recent else "",
    }
    return ", ".join(f"{name} {text}" for name, text in figures.items() if text)
