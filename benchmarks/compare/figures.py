"""Figures of a comparison: the losses of a few optimizers over steps and seconds.

A dozen lines are not readable in one panel. Therefore, a figure shows only a few of them, in the colors that optimizers
have in all figures.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from benchmarks.compare import statistics
from benchmarks.compare.statistics import Results
from benchmarks.plot import INK, look, save, styled
from benchmarks.runner import WINDOW, History

Against = Literal["steps", "seconds"]
Array = np.ndarray[Any, np.dtype[np.float64]]

_SHADE = 0.18  # opacity of the range over the seeds


@dataclass(frozen=True)
class Course:
    label: str
    steps: Array
    seconds: Array
    losses: Array  # [seeds, points]

    @property
    def mean(self) -> Array:
        return np.asarray(self.losses.mean(axis=0))

    def along(self, against: Against) -> Array:
        """Return the steps, or the mean seconds at these steps."""
        return self.steps if against == "steps" else self.seconds


def course(results: Results, optimizer: str) -> Course | None:
    column = statistics.clock_column(results)
    runs = [run for run in statistics.select(results, "final", optimizer) if not statistics.flaw(run)]
    if not runs:
        return None
    curves = np.array([run["curve"] for run in runs], dtype=float)  # all at the same steps
    return Course(runs[0]["label"], curves[0, :, 0], curves[..., column].mean(axis=0), curves[..., 1])


def draw_losses(results: Results, path: Path) -> None:
    courses = [found for name in shown(results) if (found := course(results, name))]
    styles = [{"color": look(found.label, 0)["color"]} for found in courses]
    title = f"{results['workload']}, {results['steps']} steps"
    draw_courses(courses, styles, title, statistics.clock_name(results), path)


def draw_histories(histories: Sequence[History], title: str, target: float, path: Path) -> None:
    courses = []
    for history in histories:
        losses = np.array(history.smoothed)
        kept = np.isfinite(losses) & (np.arange(len(losses)) >= WINDOW - 1)
        if kept.any():
            steps, seconds = np.arange(1.0, len(losses) + 1), np.array(history.seconds)
            courses.append(Course(history.label, steps[kept], seconds[kept], losses[None, kept]))
    styles = [look(found.label, index) for index, found in enumerate(courses)]
    draw_courses(courses, styles, title, "training", path, target)


def draw_courses(
    courses: Sequence[Course],
    styles: Sequence[Mapping[str, Any]],
    title: str,
    clock: str,
    path: Path,
    target: float | None = None,
) -> None:
    with styled():
        figure = Figure(figsize=(9, 2.5 + 0.5 * math.ceil(len(courses) / 4)), layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        handles = {}
        for axes, against in zip(panels, get_args(Against), strict=True):
            for found, style in zip(courses, styles, strict=True):
                _draw(axes, found, against, {**style, "linewidth": 1.6})
                handles[found.label] = Line2D([], [], label=found.label, **style, linewidth=1.6)
            axes.set_xlim(left=0)
            axes.xaxis.set_major_locator(MaxNLocator(4, steps=(1, 2, 2.5, 5, 10)))
            axes.set_xlabel("steps" if against == "steps" else f"{clock} seconds", fontsize=9)
            axes.tick_params(labelsize=8)
            if courses:
                _format_axes(axes, courses, max(found.mean[0] for found in courses))
            if target is not None:
                name = f"target {target:g}"
                handles[name] = axes.axhline(target, color=INK, linewidth=0.8, zorder=0, label=name)
                axes.set_ylim(bottom=min(axes.get_ylim()[0], target / 1.15))
        panels[0].set_ylabel("training loss", fontsize=9)
        figure.suptitle(title, x=0.01, ha="left")
        ordered = sorted(handles.items(), key=lambda pair: (not pair[0].startswith(("AdamW", "Muon", "SOAP")), pair[0]))
        figure.legend(handles=[line for _, line in ordered], loc="outside lower center", ncols=4, frameon=False)
        save(figure, path)


def shown(results: Results) -> list[str]:
    """Return AdamW, the best variant of Muon, the best first-order optimizer, and the best of our methods."""
    first, best = statistics.best_first(results), statistics.leaders(results)[1]
    ranked = [found.optimizer for found in statistics.summaries(results) if found.loss]
    muon = next((name for name in ranked if name.startswith("muon")), None)
    names = ["adamw", muon, first, best.optimizer if best else None]
    return [name for name in dict.fromkeys(names) if name in ranked] or ranked[:4]


def _draw(axes: Axes, found: Course, against: Against, style: dict[str, Any]) -> None:
    axes.plot(found.along(against), found.mean, **style)
    if len(found.losses) > 1:
        low, high = found.losses.min(axis=0), found.losses.max(axis=0)
        axes.fill_between(found.along(against), low, high, color=style["color"], alpha=_SHADE, linewidth=0)


def _format_axes(axes: Axes, courses: Sequence[Course], top: float) -> None:
    """Show losses from the lowest one to ``top``, on a logarithmic scale with labeled ticks."""
    low = min(float(found.mean.min()) for found in courses)
    axes.grid(axis="y")
    if low <= 0:
        return
    subs = (1, 1.5, 2, 3, 4, 5, 7) if top < 5 * low else (1, 2, 5) if top < 100 * low else (1,)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=subs))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_ylim(low / 1.15, top * 1.15)
