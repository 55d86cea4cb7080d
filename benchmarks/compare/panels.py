"""One small panel for each optimizer: its runs before the lines of all, and the learning rates that were tried."""

import math
from collections.abc import Sequence
from statistics import median

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

from benchmarks.compare import statistics
from benchmarks.compare.curves import Course, course, known
from benchmarks.compare.figures import (
    LOG_FROM,
    OURS,
    REFERENCE,
    Look,
    draw_broken,
    draw_line,
    dress,
    escaped,
    set_log,
    set_losses,
)
from benchmarks.compare.statistics import Results, Target
from benchmarks.plot import styled

_COLUMNS = 4
_ROW, _HEAD, _FOOT = 1.75, 0.25, 0.55  # inches: of a row, above the first, below the last
_ABOVE = 0.06  # of the height of a panel: room for marks of what lies above it


def each_figure(results: Results) -> Figure:
    """Draw one small panel for each optimizer: its seeds, before the mean curves of all."""
    names = [found.optimizer for found in statistics.summaries(results) if _known_finals(results, found.optimizer)]
    target = next(iter(statistics.targets(results)), None)
    courses = {name: found for name in names if (found := course(results, name))}
    with styled():
        figure, panels = _small_panels(len(names), "optimizer steps", "training loss")
        for axes, name in zip(panels, names, strict=True):
            _one(axes, results, name, courses, target)
        if courses and panels:
            set_losses(panels[0], [found.mean for found in courses.values()])
    return figure


def _known_finals(results: Results, optimizer: str) -> bool:
    return any(known(run) for run in statistics.select(results, "final", optimizer))


def _one(axes: Axes, results: Results, name: str, courses: dict[str, Course], target: Target | None) -> None:
    for other in courses.values():
        axes.plot(other.steps, other.mean, color="#DDDDDD", linewidth=0.6, zorder=1)
    if target is not None and target.optimizer in courses:
        owner = courses[target.optimizer]
        axes.plot(owner.steps, owner.mean, color=REFERENCE, linewidth=0.9, linestyle="--", zorder=2)
        axes.axhline(target.loss, color="0.6", linewidth=0.6, zorder=0)
    known = statistics.summarize(results, name)
    look = Look(known.label, {"color": OURS[0] if known.ours else OURS[1], "linewidth": 1.6, "zorder": 3})
    if name in courses:
        draw_line(axes, courses[name], "steps", look)
    draw_broken(axes, results, name, "steps", look)
    dress(axes)
    done = known.loss.count if known.loss else 0
    _title(axes, known.label, "" if done == known.seeds else f" ({done} of {known.seeds})")


def _title(axes: Axes, label: str, more: str = "") -> None:
    axes.set_title(escaped(label) + more, loc="left", fontsize=9.5)


def _small_panels(count: int, below: str, beside: str) -> tuple[Figure, list[Axes]]:
    """Return a figure with so many panels, which share their axes, and the names of those."""
    rows = max(1, math.ceil(count / _COLUMNS))
    height = _FOOT + _ROW * rows
    figure = Figure(figsize=(10.5, height))
    edges = {"top": 1 - _HEAD / height, "bottom": _FOOT / height, "left": 0.075, "right": 0.99}
    figure.subplots_adjust(**edges, wspace=0.08, hspace=0.42)
    grid = list(np.ravel(figure.subplots(rows, _COLUMNS, sharex=True, sharey=True, squeeze=False)))
    for axes in grid[count:]:
        axes.set_visible(False)
    for axes in grid[max(0, count - _COLUMNS) : count]:
        axes.tick_params(labelbottom=True)
    figure.text(0.53, 0.06 / height, below, ha="center", va="bottom")
    figure.text(0.004, 0.5, beside, ha="left", va="center", rotation="vertical")
    return figure, grid[:count]


def sift_figure(results: Results) -> Figure:
    """Draw the loss of a trial against its learning rate, one small panel for each optimizer."""
    found = {name: statistics.sift_losses(results, name) for name in statistics.optimizers(results)}
    found = {name: losses for name, losses in found.items() if losses}
    with styled():
        words = ("multiple of the recipe's learning rate", "loss at the end of the trial")
        figure, panels = _small_panels(len(found), *words)
        top = _set_trials(panels, list(found.values()))
        for axes, (name, losses) in zip(panels, found.items(), strict=True):
            _trials(axes, losses, statistics.best_factor(results, name), top, bool(_is_ours(results, name)))
            _title(axes, statistics.label_of(results, name))
    return figure


def _is_ours(results: Results, optimizer: str) -> bool:
    return bool(statistics.select(results, optimizer=optimizer)[0]["ours"])


def _set_trials(panels: Sequence[Axes], found: Sequence[dict[float, float]]) -> float:
    """Set the axes that all panels share, and return the height of marks for what lies above."""
    known = [loss for losses in found for loss in losses.values() if math.isfinite(loss)]
    factors = sorted({factor for losses in found for factor in losses})
    if not panels or not known:
        return 1.0
    low, high = min(known), 2 * median(known)
    log = low > 0 and high > LOG_FROM * low
    room = _ABOVE * (math.log(high / low) if log else high - low)
    limits = (low * math.exp(-room), high * math.exp(2 * room)) if log else (low - room, high + 2 * room)
    for axes in panels[:1]:
        if log:
            set_log(axes)
        axes.set_ylim(*limits)
        axes.set_xscale("log")
        axes.set_xlim(factors[0] / 1.6, factors[-1] * 1.6)
        axes.xaxis.set_major_locator(FixedLocator(factors))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xticks(factors, [f"{factor:.2g}" for factor in factors])
    return float(high * math.exp(room) if log else high + room)


def _trials(axes: Axes, losses: dict[float, float], best: float | None, top: float, ours: bool) -> None:
    colour = OURS[0] if ours else OURS[1]
    shown = {factor: min(loss, top) for factor, loss in losses.items() if math.isfinite(loss)}
    axes.plot(list(shown), list(shown.values()), color=colour, linewidth=1.4, marker="o", markersize=4, mfc="white")
    above = [factor for factor, loss in losses.items() if math.isfinite(loss) and loss > top]
    lost = [factor for factor, loss in losses.items() if not math.isfinite(loss)]
    axes.plot(above, [top] * len(above), "^", color=colour, markersize=6)
    axes.plot(lost, [top] * len(lost), "x", color="#B00000", markersize=6)
    if best is not None:
        axes.plot(best, shown[best], "o", color=colour, markersize=6)
    dress(axes)
