"""The look of all plots, that of training runs, and that of the rows of a study."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from benchmarks.runner import WINDOW, History

# Okabe and Ito's colours, told apart with any colour vision; the styles tell the lines apart in grey, too.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000", "#999999")
STYLES = ("-", "--", "-.", ":")
_OPTIMIZERS = (
    "KFAC", "AdamW", "EKFAC", "HyLo", "M-FAC", "sparse M-FAC", "SGD", "GGT", "Muon", "SOAP", "Shampoo", "PSGD-Kron",
    "schedule-free AdamW", "SINGD",
)  # fmt: skip

Row = Mapping[str, Any]


def look(label: str, index: int) -> dict[str, str]:
    """Return color and style of a line: those of an optimizer are the same in all pictures.

    A variant has the color of its method in another style; a line of anything else goes by its index.
    """
    name = label.replace("K-FAC", "KFAC")
    method = name.split(",")[0].split(" (")[0]
    place = _OPTIMIZERS.index(method) if method in _OPTIMIZERS else index
    style = place + place // len(COLOURS) + 2 * (name != method)
    return {"color": COLOURS[place % len(COLOURS)], "linestyle": STYLES[style % len(STYLES)]}


def styled() -> AbstractContextManager[None]:
    return mpl.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})


def plot_losses(histories: Sequence[History], title: str, target: float, path: Path) -> None:
    with styled():
        figure = Figure(figsize=(10, 4.6), layout="constrained")
        by_step, by_second = figure.subplots(1, 2, sharey=True)
        for index, history in enumerate(histories):
            start = min(WINDOW, len(history.losses)) - 1
            losses = history.smoothed[start:]
            style = look(history.label, index)
            by_step.plot(range(start + 1, len(history.losses) + 1), losses, label=history.label, linewidth=1.8, **style)
            by_second.plot(history.seconds[start:], losses, linewidth=1.8, **style)
        _dress(by_step, "optimizer steps", target)
        _dress(by_second, "training seconds", target)
        by_step.set_ylabel(f"training loss (mean of {WINDOW} steps)")
        by_second.annotate(
            f"target {target:g}", (1, target), (0, 3), xycoords=("axes fraction", "data"),
            textcoords="offset points", ha="right", va="bottom", color="0.35", fontsize=9,
        )  # fmt: skip
        figure.legend(loc="outside lower center", ncols=min(5, len(histories)), frameon=False)
        figure.suptitle(title, x=0.01, ha="left")
        figure.savefig(path, dpi=150)


def _dress(axes: Axes, label: str, target: float) -> None:
    axes.set_yscale("log")
    axes.set_xlabel(label)
    axes.set_xlim(left=0)
    axes.axhline(target, color="0.5", linewidth=0.8, zorder=0)
    axes.grid(axis="y", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)


@dataclass(frozen=True)
class Panel:
    """One panel of a picture of rows."""

    label: str
    series: Mapping[str, Callable[[Row], float | None]]
    """What is drawn of a row, by the format of the line; "" is a line with points in the style of the label."""
    log: bool = True


def plot_rows(
    rows: Sequence[Row],
    panels: Sequence[Panel],
    x: Callable[[Row], float],
    line: Callable[[Row], str],
    words: tuple[str, str],
    path: Path,
    more: Callable[[Sequence[Axes]], None] = lambda _: None,
    base: int = 2,
) -> None:
    """Draw panels side by side: a line for each group of rows, with a point for each row that has the figure."""
    # The same bytes for the same figures, so that a picture under version control changes only when they do.
    with styled(), mpl.rc_context({"svg.hashsalt": "rows"}):
        figure = Figure(figsize=(3.5 + 3.4 * len(panels), 4.2), layout="constrained")
        every = figure.subplots(1, len(panels), squeeze=False)[0]
        for index, label in enumerate(dict.fromkeys(map(line, rows))):
            own = sorted((row for row in rows if line(row) == label), key=x)
            style = look(label, index)
            for axes, panel in zip(every, panels, strict=True):
                for form, figure_of in panel.series.items():
                    points = [(x(row), y) for row in own if (y := figure_of(row)) is not None and (y or not panel.log)]
                    first = axes is every[0] and form == next(iter(panel.series))
                    kind = {"linestyle": style["linestyle"], "marker": "o"} if not form else {}
                    axes.plot(
                        [place for place, _ in points], [y for _, y in points], *([form] if form else []), markersize=4,
                        color=style["color"], label=label if first else None, **kind,
                    )  # fmt: skip
        more(every)
        for axes, panel in zip(every, panels, strict=True):
            _dress_rows(axes, panel, words[1], sorted({float(x(row)) for row in rows}), base)
        handles, labels = every[0].get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside upper right", ncols=min(6, 3 * len(panels)), frameon=False, fontsize=9
        )
        figure.suptitle(words[0], x=0.01, ha="left", fontsize=11)
        figure.savefig(path, dpi=150, metadata={"Date": None} if str(path).endswith(".svg") else None)


def _dress_rows(axes: Axes, panel: Panel, label: str, places: Sequence[float], base: int) -> None:
    axes.set_xscale("log", base=base)
    axes.set_xlabel(label)
    axes.set_ylabel(panel.label)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda place, _: f"{place:,g}"))
    if base == 2:
        axes.xaxis.set_major_locator(FixedLocator(places))
        axes.xaxis.set_minor_locator(NullLocator())
    if panel.log:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        low, high = axes.get_ylim()
        few = high / low < 20  # hardly a power of ten to be named
        axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}") if few else NullFormatter())
    else:
        axes.set_ylim(bottom=0)
    axes.grid(axis="y", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
