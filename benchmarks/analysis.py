"""Numbers and plots of an analysis, from its event files alone.

The files are those of :class:`secondorder.diagnostics.Analysis`, and ``train.jsonl`` of the command ``analyse``.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from benchmarks.plot import COLOURS, INK, STYLES, save, styled
from secondorder.diagnostics import read_events

Event = dict[str, Any]

TRAIN = "train"
FILES = ("rank", "trend", "error", "profile", TRAIN)  # file names without their suffix
TRAIN_COLUMNS = ("step", "epoch", "loss", "lr", "damping", "mode", "elapsed_s")
ALL = "all"  # value of the column `layer` that represents all layers together
STAGES = {
    "capture": "capture_ms", "exchange": "exchange_ms", "statistics": "statistics_ms", "select": "select_ms",
    "kernel": "kernel_ms", "invert": "invert_ms", "rest of refresh": "", "share": "share_ms",
    "precondition": "precondition_ms", "update": "update_ms",
}  # fmt: skip
"""Consecutive stages of a step, with their columns."""
_WITHIN_REFRESH = ("select", "kernel", "invert")
KINDS = ("plain", "capture", "refresh")
"""Kinds of steps: those that only use the curvature, those that gather statistics, and those that refresh it."""
_IDLE_MS = 0.05  # upper bound of the refresh stage in a step without a refresh


def load(folder: Path) -> dict[str, list[Event]]:
    paths = {name: folder / f"{name}.jsonl" for name in FILES}
    return {name: read_events(path) if path.exists() else [] for name, path in paths.items()}


def layers(events: Iterable[Event]) -> list[str]:
    return [name for name in dict.fromkeys(event["layer"] for event in events) if name != ALL]


def series(events: Iterable[Event], x: str, y: str | Callable[[Event], float | None]) -> tuple[list[Any], list[float]]:
    values = ((event[x], event[y] if isinstance(y, str) else y(event)) for event in events)
    points = [(at, value) for at, value in values if value is not None]
    return [at for at, _ in points], [value for _, value in points]


def where(events: Iterable[Event], **values: object) -> list[Event]:
    return [event for event in events if all(event[key] == value for key, value in values.items())]


def rank_share(event: Event) -> float | None:
    return None if event["rank90"] is None else event["rank90"] / event["m"]


def median(events: Iterable[Event], y: str | Callable[[Event], float | None]) -> float | None:
    found = series(events, "step", y)[1]
    return statistics.median(found) if found else None


def spans(events: Sequence[Event], mode: str) -> list[tuple[int, int]]:
    modes: dict[int, set[str]] = {}
    for event in events:
        modes.setdefault(event["step"], set()).add(event["mode"])
    found: list[tuple[int, int]] = []
    for step, following in zip(modes, [*list(modes)[1:], max(modes, default=0) + 1], strict=True):
        if mode not in modes[step]:
            continue
        if found and found[-1][1] == step:
            found[-1] = found[-1][0], following
        else:
            found.append((step, following))
    return found


def stage_times(profile: Sequence[Event]) -> dict[str, dict[str, float]]:
    """Return the median time of every stage by kind of step. Step 0, which allocates, is used only as a fallback."""
    steps: dict[str, list[Event]] = {kind: [] for kind in KINDS}
    for kind, event in zip(_kinds(profile), profile, strict=True):
        steps[kind].append(event)
    found = {}
    for kind, own in steps.items():
        counted = [event for event in own if event["step"] > 0] or own
        if counted:
            found[kind] = {stage: statistics.median(_stage(event, stage) for event in counted) for stage in STAGES}
    return found


def _kinds(profile: Sequence[Event]) -> list[str]:
    times = [event["refresh_ms"] for event in profile]
    # Even on a busy machine, that stage takes much less time in steps without a refresh than in the others.
    shortest, longest = min(times, default=0.0), max(times, default=0.0)
    least = max(_IDLE_MS, min(longest / 10, math.sqrt(shortest * longest)))
    return [
        "refresh" if event["refresh_ms"] >= least else "capture" if event["capture_ms"] > 0 else "plain"
        for event in profile
    ]


def _stage(event: Event, stage: str) -> float:
    if STAGES[stage]:
        return float(event[STAGES[stage]])
    rest: float = event["refresh_ms"] - sum(event[STAGES[part]] for part in _WITHIN_REFRESH)
    return max(0.0, rest)


_NAMED = 8  # maximum number of layers that the legend lists
_SHADE = "#E69F00"
_SHADES = (0.3, 0.8)  # range of the color scale that is neither too dark nor too light for lines
_HEIGHT = 4.2  # inches


def plot_analysis(folder: Path, suffix: str = ".png") -> list[Path]:
    draw = {"rank": plot_rank, "trend": plot_trend, "error": plot_error, "profile": plot_stages}
    found = load(folder)
    paths = []
    for name, plot in draw.items():
        if found[name]:
            paths.append(folder / f"{name}{suffix}")
            plot(found[name], paths[-1])
    return paths


@contextmanager
def _panel(path: Path, title: str, size: tuple[float, float], grid: Literal["x", "y"] = "y") -> Iterator[Axes]:
    """Yield the axes of a new figure, and then write the figure with its legend and title."""
    with styled():
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        yield axes
        axes.grid(axis=grid)
        axes.set_axisbelow(True)
        figure.legend(loc="outside right upper", frameon=False)
        figure.suptitle(title, x=0.01, ha="left")
        save(figure, path)


def plot_rank(rank: Sequence[Event], path: Path) -> None:
    """Draw rank90 / m for each layer and for all layers: medians over the run, and bars from quartile to quartile."""
    names, sizes = layers(rank), sorted({event["m"] for event in rank})
    rows = ["all layers", *names]
    title = "Share of the eigenvalues that make up 90 % of the curvature"
    with _panel(path, title, (8, 1.6 + 0.24 * len(rows)), "x") as axes:
        for index, m in enumerate(sizes):
            own = where(rank, m=m)
            shares = [_shares(own), *(_shares(where(own, layer=name)) for name in names)]
            found = [(place, values) for place, values in enumerate(shares) if values]
            offset = 0.22 * (index - (len(sizes) - 1) / 2)
            low, middle, high = np.transpose([np.quantile(values, (0.25, 0.5, 0.75)) for _, values in found])
            axes.errorbar(
                middle, [place + offset for place, _ in found], xerr=(middle - low, high - middle), linestyle="",
                marker="os^Dv"[index % 5], markersize=4, elinewidth=1.4, color=COLOURS[index % len(COLOURS)],
                label=f"batch size {m}",
            )  # fmt: skip
        axes.set_yticks(range(len(rows)), rows, fontsize=9)
        axes.axhline(0.5, color=INK, linewidth=0.8)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlim(left=0)
        axes.set_xlabel("rank90 / batch size (median and middle half over the run)")


def plot_trend(trend: Sequence[Event], path: Path) -> None:
    """Draw the norm of the gradient over steps, for every layer and for all together, with shaded KID periods."""
    with _panel(path, "Norm of the gradient", (10, _HEIGHT)) as axes:
        _lines(axes, trend, "grad_norm")
        totals: dict[int, float] = {}
        for step, norm in zip(*series(trend, "step", "grad_norm"), strict=True):
            totals[step] = math.hypot(totals.get(step, 0.0), norm)
        axes.plot(list(totals), list(totals.values()), color=INK, linewidth=1.8, label="all layers")
        for index, (start, end) in enumerate(spans(trend, "kid")):
            label = "_" if index else "KID"
            axes.axvspan(start - 0.5, end - 0.5, color=_SHADE, alpha=0.2, linewidth=0, zorder=0, label=label)
        _format_axes(axes, "norm of the gradient", any(totals.values()))


def plot_error(error: Sequence[Event], path: Path) -> None:
    """Draw the distance of KID and KIS updates from the exact ones, for all layers and (thin) for each."""
    ranks = sorted({event["r"] for event in error if event["r"] is not None})
    rows = f"{ranks[0]}" if len(ranks) == 1 else "few"
    title = f"Error of updates from {rows} rows (thin lines: single layers)" if ranks else "Error of updates"
    with _panel(path, title, (8, _HEIGHT)) as axes:
        for index, mode in enumerate(dict.fromkeys(event["mode"] for event in error)):
            color, style = COLOURS[index % len(COLOURS)], STYLES[index % len(STYLES)]
            own = where(error, mode=mode)
            for name in layers(own):
                points = series(where(own, layer=name), "step", "rel_error")
                axes.plot(*points, color=color, linewidth=0.6, alpha=0.45, linestyle=style)
            points = series(where(own, layer=ALL), "step", "rel_error")
            label = mode.replace("kid", "KID").replace("kis", "KIS")
            axes.plot(*points, color=color, linewidth=1.8, linestyle=style, marker="o", markersize=3, label=label)
        _format_axes(axes, "‖u − u*‖ / ‖u*‖", any(event["rel_error"] for event in error))


def plot_stages(profile: Sequence[Event], path: Path) -> None:
    """Draw the median times of the stages as a stacked bar for each kind of step."""
    times = stage_times(profile)
    title = "Stages of an optimizer step (without forward and backward pass)"
    with _panel(path, title, (9, 1.5 + 0.7 * len(times)), "x") as axes:
        left = dict.fromkeys(times, 0.0)
        for index, stage in enumerate(STAGES):
            widths = {kind: found[stage] for kind, found in times.items()}
            if not any(widths.values()):
                continue
            axes.barh(
                list(widths), list(widths.values()), left=list(left.values()), height=0.55, label=stage,
                color=COLOURS[index % len(COLOURS)], hatch=("", "//")[index >= len(COLOURS)], edgecolor="none",
            )  # fmt: skip
            left = {kind: left[kind] + width for kind, width in widths.items()}
        axes.invert_yaxis()
        axes.set_xlabel("milliseconds")


def _lines(axes: Axes, found: Sequence[Event], column: str) -> None:
    """Draw one line per layer. The colors of many layers range from dark for the first to light for the last."""
    names = layers(found)
    colors = mpl.colormaps["viridis"]
    for index, name in enumerate(names):
        points = series(where(found, layer=name), "step", column)
        if len(names) <= _NAMED:
            axes.plot(*points, color=COLOURS[index % len(COLOURS)], linewidth=1.0, label=name)
        else:
            ends = {0: f"{name} (first)", len(names) - 1: f"{name} (last)"}
            depth = _SHADES[0] + (_SHADES[1] - _SHADES[0]) * index / (len(names) - 1)
            axes.plot(*points, color=colors(depth), linewidth=0.7, label=ends.get(index, "_"))


def _shares(rank: Sequence[Event]) -> list[float]:
    return series(rank, "step", rank_share)[1]


def _format_axes(axes: Axes, label: str, logarithmic: bool) -> None:
    if logarithmic:
        axes.set_yscale("log")
    axes.set_ylabel(label)
    axes.set_xlabel("optimizer step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
