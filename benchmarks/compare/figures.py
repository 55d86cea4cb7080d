"""Figures of a comparison: loss against steps and seconds, and every optimizer on its own.

A dozen lines or more do not stay readable in one panel. So the first figure names a few, in the colors that optimizers
have in all pictures, and leaves the others thin and grey; the second gives each optimizer a panel of its own, before
the lines of all.
"""

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from benchmarks.compare import statistics
from benchmarks.compare.statistics import Results, Run, Target
from benchmarks.plot import INK, look, styled

Against = Literal["steps", "seconds"]
Array = np.ndarray[Any, np.dtype[np.float64]]

_OURS = 3  # of ours, at most, that a panel names
_THIN: dict[str, Any] = {"color": INK, "alpha": 0.4, "linewidth": 0.8, "zorder": 1}
_LOG_FROM = 5  # ratio of the largest to the smallest loss
_HEIGHT, _FOOT, _LINE = 3.7, 0.7, 0.19  # inches: of the axes, of what lies below, of one line of the legend
_COLUMNS, _ROW, _HEAD, _BELOW = 4, 1.75, 0.25, 0.55  # of small panels, the rest in inches
_LETTERS = 24  # of a label
_LONGEST = 2.5  # of a panel, in seconds of the reference's run


@dataclass(frozen=True)
class Course:
    """The curves of one optimizer's runs that finished, at the points of the first of them."""

    label: str
    steps: Array
    seconds: Array
    losses: Array
    """[seeds, points]"""

    @property
    def mean(self) -> Array:
        return np.asarray(self.losses.mean(axis=0))

    def along(self, against: Against) -> Array:
        """Return the steps, or the mean seconds at those."""
        return self.steps if against == "steps" else self.seconds


def course(results: Results, optimizer: str, phase: statistics.Phase = "final") -> Course | None:
    column = statistics.clock_column(results)
    runs = [run for run in statistics.select(results, phase, optimizer) if not statistics.flaw(run)]
    if not runs:
        return None
    steps = np.array([point[0] for point in known(runs[0])], dtype=float)
    seconds = np.mean([_resampled(run, column, steps) for run in runs], axis=0)
    return Course(runs[0]["label"], steps, seconds, np.array([_resampled(run, 1, steps) for run in runs]))


def known(run: Run) -> list[Sequence[float]]:
    return [point for point in run["curve"] if statistics.finite(point[1])]


def _resampled(run: Run, column: int, steps: Array) -> Array:
    points = known(run)
    return np.asarray(np.interp(steps, [point[0] for point in points], [point[column] for point in points]))


def _courses(results: Results) -> dict[str, Course]:
    names = [found.optimizer for found in statistics.summaries(results)]
    return {name: found for name in names if (found := course(results, name))}


def highlighted(results: Results) -> list[str]:
    """Return the optimizers that a panel names: at most three of ours, the best first-order one, AdamW and SGD.

    Of ours the one that comes nearest to the target comes first, then those of lowest final loss.
    """
    target = _target(results)
    best = statistics.best_of_ours(results, target) if target else None
    ranked = [found.optimizer for found in statistics.summaries(results) if found.ours and found.loss]
    ours = list(dict.fromkeys([*([best.optimizer] if best else []), *ranked]))[:_OURS]
    first = statistics.best_first(results)
    others = [name for name in ("adamw", "sgd") if name in statistics.optimizers(results)]
    return list(dict.fromkeys([*ours, *([first] if first else []), *others]))


def _target(results: Results) -> Target | None:
    return next(iter(statistics.targets(results)), None)


def losses_figure(results: Results, against: Against) -> Figure:
    with styled():
        figure = Figure(figsize=(5.8, _HEIGHT))
        axes = figure.subplots()
        named, courses, handles = highlighted(results), _courses(results), list[Artist]()
        for name, found in courses.items():
            if name not in named:
                axes.plot(found.along(against), found.mean, **_THIN)
        for index, name in enumerate(named):
            style = _style(results, name, index)
            label = statistics.label_of(results, name)
            if name in courses:
                _draw(axes, courses[name], against, style)
                reference = ", reference" * (name == statistics.best_first(results))
                handles.append(Line2D([], [], label=escaped(label) + reference, **style))
            _draw_broken(axes, results, name, against, style)
            short = course(results, name, "short")
            if short is not None and not any("short" in str(handle.get_label()) for handle in handles):
                style |= {"marker": "o", "markersize": 6, "linewidth": 1.4}
                axes.plot(short.along(against), short.mean, markevery=[-1], **style)
                handles.append(Line2D([], [], label=f"{escaped(label)}, short schedule", **style))
        if len(courses) > len(named):
            handles.append(Line2D([], [], label="others", **_THIN))
        _frame(axes, results, courses, against)
        handles += _goal(axes, results, against)
        below = _FOOT + _LINE * math.ceil(len(handles) / 2)  # of the axes: their labels and the legend
        figure.set_size_inches(5.8, _HEIGHT + below)
        figure.subplots_adjust(left=0.135, right=0.985, top=0.985, bottom=below / (_HEIGHT + below))
        figure.legend(handles=handles, loc="lower center", ncols=2, frameon=False, fontsize=9, columnspacing=1.2)
    return figure


def _style(results: Results, optimizer: str, index: int) -> dict[str, Any]:
    return {**look(statistics.label_of(results, optimizer), index), "linewidth": 1.8, "zorder": 4}


def _draw(axes: Axes, found: Course, against: Against, style: dict[str, Any]) -> None:
    axes.plot(found.along(against), found.mean, **style)
    if len(found.losses) > 1:
        low, high = found.losses.min(axis=0), found.losses.max(axis=0)
        axes.fill_between(found.along(against), low, high, color=style["color"], alpha=0.15, linewidth=0, zorder=1)


def _draw_broken(axes: Axes, results: Results, optimizer: str, against: Against, style: dict[str, Any]) -> None:
    column = 0 if against == "steps" else statistics.clock_column(results)
    for run in statistics.select(results, "final", optimizer):
        if statistics.flaw(run) and (points := known(run)):
            axes.plot([p[column] for p in points], [p[1] for p in points], **{**style, "linewidth": 0.8})
            axes.plot(points[-1][column], points[-1][1], "x", color=style["color"], zorder=6)


def _frame(axes: Axes, results: Results, courses: dict[str, Course], against: Against) -> None:
    clock = "processor" if results["clock"] == "processor" else "wall-clock"
    axes.set_xlabel("optimizer steps" if against == "steps" else f"{clock} seconds")
    axes.set_ylabel(f"training loss ({results['loss']})")
    _dress(axes, list(courses.values()))
    if courses:
        ends = [float(found.along(against)[-1]) for found in courses.values()]
        target = _target(results)
        limit = _LONGEST * target.seconds if target and against == "seconds" else math.inf
        axes.set_xlim(0, 1.02 * max(min(max(ends), limit), min(ends)))


def cut_off(results: Results) -> list[str]:
    """Return the optimizers whose full runs are longer than the panel of seconds."""
    target = _target(results)
    found = [(s.label, s.seconds.mean) for s in statistics.summaries(results) if s.seconds]
    return [label for label, seconds in found if target and seconds > _LONGEST * target.seconds]


def _dress(axes: Axes, courses: Sequence[Course]) -> None:
    """Show from the lowest loss to where most curves begin; one that rises beyond leaves the panel."""
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    if not courses:
        return
    low, top = min(float(c.mean.min()) for c in courses), median(float(c.mean[0]) for c in courses)
    if low > 0 and top > _LOG_FROM * low:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_ylim(low / 1.15, top * 1.15)
    else:
        room = 0.05 * max(top - low, 1e-9)
        axes.set_ylim(low - room, top + room)


def _goal(axes: Axes, results: Results, against: Against) -> list[Artist]:
    """Mark the target: its loss as a line, and against steps the corner that the share of them cuts out below."""
    target = _target(results)
    if target is None:
        return []
    low = axes.get_ylim()[0]
    line = axes.axhline(target.loss, color="0.5", linewidth=0.8, zorder=0, label="the reference's final loss")
    if against == "seconds":
        return [line]
    aim = results["share_target"]
    corner = Rectangle((0, low), aim * target.steps, target.loss - low, color="#F0E6C8", zorder=0, linewidth=0)
    corner.set_label(f"target: {aim:g} of its steps")
    axes.add_patch(corner)
    return [line, corner]


def each_figure(results: Results) -> Figure:
    finals = {run["optimizer"] for run in statistics.select(results, "final") if known(run)}
    shown = [found for found in statistics.summaries(results) if found.optimizer in finals]
    courses, target = _courses(results), _target(results)
    rows = max(1, math.ceil(len(shown) / _COLUMNS))
    height = _BELOW + _ROW * rows
    with styled():
        figure = Figure(figsize=(10.5, height))
        edges = {"top": 1 - _HEAD / height, "bottom": _BELOW / height, "left": 0.075, "right": 0.99}
        figure.subplots_adjust(**edges, wspace=0.08, hspace=0.42)
        grid = list(np.ravel(figure.subplots(rows, _COLUMNS, sharex=True, sharey=True, squeeze=False)))
        for axes in grid[len(shown) :]:
            axes.set_visible(False)
        for axes in grid[max(0, len(shown) - _COLUMNS) : len(shown)]:
            axes.tick_params(labelbottom=True)
        for index, (axes, own) in enumerate(zip(grid, shown, strict=False)):
            for other in courses.values():
                axes.plot(other.steps, other.mean, **_THIN)
            if target is not None:
                axes.axhline(target.loss, color="0.6", linewidth=0.6, zorder=0)
            style = _style(results, own.optimizer, index)
            if own.optimizer in courses:
                _draw(axes, courses[own.optimizer], "steps", style)
            _draw_broken(axes, results, own.optimizer, "steps", style)
            done = own.loss.count if own.loss else 0
            more = "" if done == own.seeds else f" ({done} of {own.seeds})"
            axes.set_title(escaped(own.label) + more, loc="left", fontsize=9.5)
            _dress(axes, list(courses.values()))
        figure.text(0.53, 0.06 / height, "optimizer steps", ha="center", va="bottom")
        figure.text(0.004, 0.5, "training loss", ha="left", va="center", rotation="vertical")
    return figure


def escaped(text: str) -> str:
    """Return a label that has room, and that matplotlib does not take for mathematics."""
    short = text if len(text) <= _LETTERS else f"{text[: _LETTERS - 1].rstrip()}…"
    return short.replace("$", r"\$")


def svg(figure: Figure, name: str, description: str) -> str:
    stream = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(stream, format="svg", metadata=nothing)
    text = stream.getvalue()
    text = re.sub(r"<!--.*?-->\s*", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'\b(id="|href="#|url\(#)', rf"\1{name}-", text)
    head, rest = text.split(">", 1)
    head = re.sub(r'\s(width|height|version)="[^"]*"', "", head)
    label = description.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return f'{head} role="img" aria-label="{label}">{rest}'.strip()
