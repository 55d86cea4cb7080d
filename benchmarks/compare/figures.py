"""Figures of a comparison: loss against steps and seconds, every optimizer on its own, and the rates that were tried.

A dozen lines or more do not stay readable in one panel. So the first figure names a few, ours solid and in colours, and
leaves the others thin and grey; the second gives each optimizer a panel of its own, before the lines of all.
"""

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from benchmarks.compare import statistics
from benchmarks.compare.curves import Against, Array, Course, course, known
from benchmarks.compare.statistics import Results
from benchmarks.plot import COLOURS, styled

OURS = (COLOURS[0], COLOURS[4], COLOURS[2])  # blue, vermilion, green
REFERENCE, _FIRST, _THIN_OURS, _THIN = "#000000", "#666666", "#9CC3DE", "#C8C8C8"
LOG_FROM = 5  # ratio of the largest to the smallest loss
_HEIGHT, _FOOT, _LINE = 3.7, 0.7, 0.19  # inches: of the axes, of what lies below, of one line of the legend
_LETTERS = 24  # of a label
_LONGEST = 2.5  # of a panel, in seconds of the reference's run


@dataclass(frozen=True)
class Look:
    """How a line is drawn, and what the legend calls it."""

    label: str
    style: dict[str, Any] = field(default_factory=dict)
    band: bool = True


def highlighted(results: Results) -> dict[str, Look]:
    """Return the optimizers that a panel names: at most three of ours, the best first-order one, AdamW and SGD.

    Of ours the one that comes nearest to the target comes first, then those of lowest final loss.
    """
    ours = _best_ours(results)
    looks = {
        name: Look(escaped(statistics.label_of(results, name)), {"color": colour, "linewidth": 2.0, "zorder": 4})
        for name, colour in zip(ours, OURS, strict=False)
    }
    first = statistics.best_first(results)
    if first is not None:
        label = f"{escaped(statistics.label_of(results, first))}, reference"
        looks[first] = Look(label, {"color": REFERENCE, "linewidth": 1.8, "linestyle": "--", "zorder": 5})
    for name, line in (("adamw", "-."), ("sgd", ":")):
        if name != first and name in statistics.optimizers(results):
            style = {"color": _FIRST, "linewidth": 1.5, "linestyle": line, "zorder": 3}
            looks[name] = Look(escaped(statistics.label_of(results, name)), style, band=False)
    return looks


def _best_ours(results: Results) -> list[str]:
    target = next(iter(statistics.targets(results)), None)
    best = statistics.best_of_ours(results, target) if target else None
    ranked = [found.optimizer for found in statistics.summaries(results) if found.ours and found.loss]
    return list(dict.fromkeys([*([best.optimizer] if best else []), *ranked]))[: len(OURS)]


def losses_figure(results: Results, against: Against) -> Figure:
    """Draw the loss of all full runs against steps or seconds, the named ones with the range of their seeds."""
    with styled():
        figure = Figure(figsize=(5.8, _HEIGHT))
        axes = figure.subplots()
        looks = highlighted(results)
        handles: list[Artist] = _thin_lines(axes, results, against, looks)
        for name, look in looks.items():
            found = course(results, name)
            if found is not None:
                draw_line(axes, found, against, look)
                handles = [*handles, Line2D([], [], label=look.label, **look.style)]
            draw_broken(axes, results, name, against, look)
        handles += _short_line(axes, results, against, looks)
        _frame(axes, results, against)
        handles = [*_in_order(handles), *_goal(axes, results, against)]
        below = _FOOT + _LINE * math.ceil(len(handles) / 2)  # of the axes: their labels and the legend
        figure.set_size_inches(5.8, _HEIGHT + below)
        figure.subplots_adjust(left=0.135, right=0.985, top=0.985, bottom=below / (_HEIGHT + below))
        figure.legend(handles=handles, loc="lower center", ncols=2, frameon=False, fontsize=9, columnspacing=1.2)
    return figure


def _thin_lines(axes: Axes, results: Results, against: Against, looks: dict[str, Look]) -> list[Artist]:
    """Draw those that are not named, and return what the legend says of them."""
    handles = {}
    for found in statistics.summaries(results):
        own = course(results, found.optimizer)
        if found.optimizer not in looks and own is not None:
            colour, line = (_THIN_OURS, "-") if found.ours else (_THIN, "--")
            label = "further ones of ours" if found.ours else "further ones of others"
            style: dict[str, Any] = {"color": colour, "linestyle": line, "linewidth": 1.0, "zorder": 2}
            axes.plot(own.along(against), own.mean, **style)
            handles[label] = Line2D([], [], label=label, **style)
    return list(handles.values())


def _in_order(handles: list[Artist]) -> list[Artist]:
    """Return the named lines before the thin ones."""
    return sorted(handles, key=lambda handle: str(handle.get_label()).startswith("further"))


def draw_line(axes: Axes, found: Course, against: Against, look: Look) -> None:
    axes.plot(found.along(against), found.mean, **look.style)
    if look.band and len(found.losses) > 1:
        low, high = found.losses.min(axis=0), found.losses.max(axis=0)
        axes.fill_between(found.along(against), low, high, color=look.style["color"], alpha=0.15, linewidth=0, zorder=1)


def draw_broken(axes: Axes, results: Results, optimizer: str, against: Against, look: Look) -> None:
    """Draw the full runs that did not finish, each up to a cross."""
    column = 0 if against == "steps" else statistics.clock_column(results)
    for run in statistics.select(results, "final", optimizer):
        if statistics.flaw(run) and (points := known(run)):
            style = {**look.style, "linewidth": 0.8}
            axes.plot([p[column] for p in points], [p[1] for p in points], **style)
            axes.plot(points[-1][column], points[-1][1], "x", color=style["color"], zorder=6)


def _short_line(axes: Axes, results: Results, against: Against, looks: dict[str, Look]) -> list[Artist]:
    """Draw the short runs of the first named one that has some, ending in a dot."""
    for name, look in looks.items():
        found = course(results, name, "short")
        if found is not None:
            style = {**look.style, "linewidth": 1.4, "zorder": 6}
            axes.plot(found.along(against), found.mean, marker="o", markevery=[-1], markersize=6, **style)
            return [Line2D([], [], label=f"{look.label}, short schedule", marker="o", **style)]
    return []


def _frame(axes: Axes, results: Results, against: Against) -> None:
    courses = [found for name in statistics.optimizers(results) if (found := course(results, name))]
    axes.set_xlabel("optimizer steps" if against == "steps" else f"{_clock(results)} seconds")
    axes.set_ylabel(f"training loss ({results['loss']})")
    dress(axes)
    if not courses:
        return
    set_losses(axes, [found.mean for found in courses])
    ends = [float(found.along(against)[-1]) for found in courses]
    target = next(iter(statistics.targets(results)), None)
    limit = _LONGEST * target.seconds if target and against == "seconds" else math.inf
    axes.set_xlim(0, 1.02 * max(min(max(ends), limit), min(ends)))


def cut_off(results: Results) -> list[str]:
    """Return the optimizers whose full runs are longer than the panel of seconds."""
    target = next(iter(statistics.targets(results)), None)
    if target is None:
        return []
    known = [found for found in statistics.summaries(results) if found.seconds]
    return [s.label for s in known if s.seconds and s.seconds.mean > _LONGEST * target.seconds]


def _clock(results: Results) -> str:
    return "processor" if results["clock"] == "processor" else "wall-clock"


def set_losses(axes: Axes, curves: Sequence[Array]) -> None:
    """Show from the lowest loss to where most curves begin; one that rises beyond leaves the panel."""
    low, top = min(float(curve.min()) for curve in curves), median(float(curve[0]) for curve in curves)
    if low > 0 and top > LOG_FROM * low:
        set_log(axes)
        axes.set_ylim(low / 1.15, top * 1.15)
    else:
        room = 0.05 * max(top - low, 1e-9)
        axes.set_ylim(low - room, top + room)


def set_log(axes: Axes) -> None:
    """Make the losses logarithmic, with plain numbers beside them."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def dress(axes: Axes) -> None:
    axes.grid(axis="y", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)


def _goal(axes: Axes, results: Results, against: Against) -> list[Artist]:
    """Mark the target: its loss as a line, and against steps the corner that the share of them cuts out below."""
    target = next(iter(statistics.targets(results)), None)
    if target is None:
        return []
    low = axes.get_ylim()[0]
    line = axes.axhline(target.loss, color="0.5", linewidth=0.8, zorder=0)
    line.set_label("the reference's final loss")
    if against == "seconds":
        return [line]
    aim = results["share_target"]
    corner = Rectangle((0, low), aim * target.steps, target.loss - low, color="#F0E6C8", zorder=0, linewidth=0)
    corner.set_label(f"target: {aim:g} of its steps")
    axes.add_patch(corner)
    return [line, corner]


def escaped(text: str) -> str:
    """Return a label that has room, and that matplotlib does not take for mathematics."""
    short = text if len(text) <= _LETTERS else f"{text[: _LETTERS - 1].rstrip()}…"
    return short.replace("$", r"\$")


def svg(figure: Figure, name: str, description: str) -> str:
    """Return a figure as an element of a page."""
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
