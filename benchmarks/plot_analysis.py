"""Plots of an analysis, from its files alone: rank by layer, gradient norms, errors of few rows, stage times."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from benchmarks import events
from benchmarks.events import ALL, Event
from benchmarks.plot import COLOURS, STYLES, styled

_NAMED = 8  # layers that a legend names one by one
_SHADE = "#F0E6C8"
_DARKER = 0.85  # of a scale of colours whose other end is too light for lines
_HEIGHT, _PER_LETTER = 4.2, 0.055  # inches
_UPRIGHT = 4  # layers whose names have room side by side


def plot_analysis(folder: Path) -> list[Path]:
    draw: dict[str, Callable[[Sequence[Event], Path], None]] = {
        "rank": plot_rank,
        "trend": plot_trend,
        "error": plot_error,
        "profile": plot_stages,
    }
    found = events.load(folder)
    paths = []
    for name, plot in draw.items():
        if found[name]:
            paths.append(folder / f"{name}.png")
            plot(found[name], paths[-1])
    return paths


def plot_rank(rank: Sequence[Event], path: Path) -> None:
    """Draw boxes of rank90 / m: by layer, and over all layers by batch size."""
    names, sizes = events.layers(rank), sorted({event["m"] for event in rank})
    with styled():
        turned = len(names) > _UPRIGHT
        height = _HEIGHT + _PER_LETTER * max(map(len, names)) * turned
        figure = Figure(figsize=(max(9.0, 0.2 * len(names) * len(sizes) + 5), height), layout="constrained")
        ratios = {"width_ratios": [max(3.0, len(names) / 5), 1]}
        by_layer, by_size = figure.subplots(1, 2, sharey=True, gridspec_kw=ratios)
        for index, m in enumerate(sizes):
            shares = [_shares(events.where(rank, layer=name, m=m)) for name in names]
            places = [at + (index - (len(sizes) - 1) / 2) * 0.8 / len(sizes) for at in range(len(names))]
            _boxes(by_layer, shares, places, 0.64 / len(sizes), COLOURS[index % len(COLOURS)])
            _boxes(by_size, [_shares(events.where(rank, m=m))], [index], 0.6, COLOURS[index % len(COLOURS)])
        by_layer.set_xticks(
            range(len(names)), names, rotation=45 * turned, ha="right" if turned else "center", rotation_mode="anchor"
        )
        by_size.set_xticks(range(len(sizes)), [str(m) for m in sizes])
        by_layer.set_ylabel("rank90 / m")
        by_layer.set_title("by layer", loc="left")
        by_size.set_title("all layers", loc="left")
        by_layer.set_xlabel("layer")
        by_size.set_xlabel("batch size m")
        for axes in (by_layer, by_size):
            _dress(axes)
            axes.set_ylim(bottom=0)
        if len(sizes) > 1:
            handles = [Patch(color=COLOURS[i % len(COLOURS)], label=f"m = {m}") for i, m in enumerate(sizes)]
            figure.legend(handles=handles, loc="outside upper right", ncols=len(sizes), frameon=False)
        _save(figure, "Share of the examples that hold nine tenths of the curvature", path)


def plot_trend(trend: Sequence[Event], path: Path) -> None:
    """Draw the norm of the gradient against steps, for every layer and all together, KID periods shaded."""
    with styled():
        figure = Figure(figsize=(10, _HEIGHT), layout="constrained")
        axes = figure.subplots()
        periods = events.spans(trend, "kid")
        for start, end in periods:
            axes.axvspan(start - 0.5, end - 0.5, color=_SHADE, linewidth=0, zorder=0)
        _lines(axes, trend, "grad_norm")
        totals: dict[int, float] = {}
        for step, norm in zip(*events.series(trend, "step", "grad_norm"), strict=True):
            totals[step] = math.hypot(totals.get(step, 0.0), norm)
        axes.plot(list(totals), list(totals.values()), color="black", linewidth=1.8, label="all layers")
        _dress(axes)
        if any(totals.values()):
            axes.set_yscale("log")
        _dress_steps(axes)
        axes.set_ylabel("norm of the gradient")
        handles, _ = axes.get_legend_handles_labels()
        if periods:
            handles = [*handles, Patch(color=_SHADE, label="KID")]
        figure.legend(handles=handles, loc="outside right upper", frameon=False)
        _save(figure, "Norm of the gradient", path)


def plot_error(error: Sequence[Event], path: Path) -> None:
    """Draw how far the updates of KID and KIS are from the exact one against steps: all layers, and each one thin."""
    with styled():
        figure = Figure(figsize=(8, _HEIGHT), layout="constrained")
        axes = figure.subplots()
        for index, mode in enumerate(dict.fromkeys(event["mode"] for event in error)):
            colour, style = COLOURS[index % len(COLOURS)], STYLES[index % len(STYLES)]
            own = events.where(error, mode=mode)
            for name in events.layers(own):
                points = events.series(events.where(own, layer=name), "step", "rel_error")
                axes.plot(*points, color=colour, linewidth=0.6, alpha=0.45, linestyle=style)
            points = events.series(events.where(own, layer=ALL), "step", "rel_error")
            label = mode.replace("kid", "KID").replace("kis", "KIS")
            axes.plot(*points, color=colour, linewidth=1.8, linestyle=style, marker="o", markersize=3, label=label)
        _dress(axes)
        if any(event["rel_error"] for event in error):
            axes.set_yscale("log")
        _dress_steps(axes)
        axes.set_ylabel("‖u − u*‖ / ‖u*‖")
        figure.legend(loc="outside right upper", frameon=False)
        ranks = sorted({event["r"] for event in error if event["r"] is not None})
        rows = f"{ranks[0]}" if len(ranks) == 1 else "few"
        _save(figure, f"Error of updates from {rows} rows; thin: each layer" if ranks else "Error of updates", path)


def plot_stages(profile: Sequence[Event], path: Path) -> None:
    """Draw the median time of each stage, stacked, for each kind of steps: plain ones, and those that refresh."""
    times = events.stage_times(profile)
    with styled():
        figure = Figure(figsize=(9, 1.5 + 0.7 * len(times)), layout="constrained")
        axes = figure.subplots()
        left = dict.fromkeys(times, 0.0)
        for index, stage in enumerate(events.STAGES):
            widths = {kind: found[stage] for kind, found in times.items()}
            if not any(widths.values()):
                continue
            axes.barh(
                list(widths), list(widths.values()), left=list(left.values()), height=0.55, label=stage,
                color=COLOURS[index % len(COLOURS)], hatch=("", "//")[index >= len(COLOURS)], edgecolor="white",
            )  # fmt: skip
            left = {kind: left[kind] + width for kind, width in widths.items()}
        axes.invert_yaxis()
        axes.set_xlabel("milliseconds")
        axes.grid(axis="x", color="0.9", linewidth=0.6)
        axes.set_axisbelow(True)
        figure.legend(loc="outside right upper", frameon=False)
        _save(figure, "Stages of a step, forward and backward pass aside", path)


def _lines(axes: Axes, found: Sequence[Event], column: str) -> None:
    """Draw one line per layer, from the first one dark to the last one light where they are many."""
    names = events.layers(found)
    colours = mpl.colormaps["viridis"]
    for index, name in enumerate(names):
        points = events.series(events.where(found, layer=name), "step", column)
        if len(names) <= _NAMED:
            axes.plot(*points, color=COLOURS[index % len(COLOURS)], linewidth=1.0, label=name)
        else:
            ends = {0: f"{name} (first)", len(names) - 1: f"{name} (last)"}
            depth = _DARKER * index / (len(names) - 1)
            axes.plot(*points, color=colours(depth), linewidth=0.7, label=ends.get(index, "_"))


def _shares(rank: Sequence[Event]) -> list[float]:
    return events.series(rank, "step", events.rank_share)[1]


def _boxes(axes: Axes, values: Sequence[Sequence[float]], places: Sequence[float], width: float, colour: str) -> None:
    axes.boxplot(
        list(values),
        positions=list(places),
        widths=width,
        manage_ticks=False,
        patch_artist=True,
        boxprops={"facecolor": colour, "alpha": 0.55, "edgecolor": "0.2"},
        medianprops={"color": "black"},
        flierprops={"markersize": 3},
    )


def _dress(axes: Axes) -> None:
    axes.grid(axis="y", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)


def _dress_steps(axes: Axes) -> None:
    axes.set_xlabel("optimizer step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _save(figure: Figure, title: str, path: Path) -> None:
    figure.suptitle(title, x=0.01, ha="left")
    figure.savefig(path, dpi=150)
