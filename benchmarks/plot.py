"""The style of all figures, and figures of the rows of a study."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

INK = "#7D8590"  # color of text and axes, which is readable on light and on dark pages
COLOURS = (
    "#3B82D0", "#E69F00", "#00A077", "#CC79A7", "#D9622B", "#56B4E9", "#8C8C8C", "#9670D8", "#A6761D", "#1AA5B8",
)  # fmt: skip
"""Colors of lines that do not represent optimizers, for example batch sizes."""
STYLES = ("-", "--", "-.", ":")
OPTIMIZERS = {
    "SGD": "#8C8C8C", "AdamW": "#E69F00", "Muon": "#D6456B", "KFAC": "#3B82D0", "EKFAC": "#00A077", "HyLo": "#CC79A7",
    "M-FAC": "#D9622B", "sparse M-FAC": "#56B4E9", "GGT": "#9670D8", "SOAP": "#A6761D", "Shampoo": "#7BA829",
    "PSGD-Kron": "#1AA5B8", "schedule-free AdamW": "#BFA800", "SINGD": "#7283E0",
    "orthogonal momentum": "#E065C8", "L-BFGS": "#B08968", "Gauss-Newton": "#C94F4F",
    "K-FAC, MemOpt": "#2FB5C4", "DP-KFAC": "#7A6BD8",
}  # fmt: skip
"""The color of each optimizer, and of two strategies, in all figures. They contrast with white and with dark gray."""

_INKED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "legend.labelcolor")
_TICKS = 7  # maximum number of labels below a panel

Row = Mapping[str, Any]


def look(label: str, index: int) -> dict[str, str]:
    """Return the color and style of a line. An optimizer has the same ones in all figures.

    A variant of an optimizer has the same color and another style. Other lines are styled by their index.
    """
    if label in OPTIMIZERS:
        return {"color": OPTIMIZERS[label], "linestyle": STYLES[0]}
    name = label.replace("K-FAC", "KFAC")
    method = name.split(",")[0].split(" (")[0]
    if method not in OPTIMIZERS:
        return {"color": COLOURS[index % len(COLOURS)], "linestyle": STYLES[index // len(COLOURS) % len(STYLES)]}
    return {"color": OPTIMIZERS[method], "linestyle": STYLES[int(name != method)]}


def styled() -> AbstractContextManager[None]:
    """Return the settings of all figures: a transparent background, and text that is readable on dark pages."""
    settings: dict[Any, Any] = {
        "font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "figure.facecolor": "none",
        "axes.facecolor": "none", "grid.color": INK, "grid.alpha": 0.25, "grid.linewidth": 0.6,
        "svg.fonttype": "none", "svg.hashsalt": "rows", "font.family": "sans-serif", **dict.fromkeys(_INKED, INK),
    }  # fmt: skip
    return mpl.rc_context(settings)


def save(figure: Figure, path: Path) -> None:
    """Write a figure. Equal data gives equal bytes, so that the file in the repository changes only with its data."""
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


@dataclass(frozen=True)
class Panel:
    label: str
    series: Mapping[str, Callable[[Row], float | None]]
    """Functions that return a row's value, by line format. "" is a line with points in the style of the label."""
    log: bool = True
    modeled: bool = False
    """Whether the values are modeled, not counted or measured. They are drawn dashed, with open points."""


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
    """Draw panels side by side, with a line for each group of rows and a point for each row that has a value."""
    with styled():
        figure = Figure(figsize=(1.5 + 3.7 * len(panels), 4.4), layout="constrained")
        every = figure.subplots(1, len(panels), squeeze=False)[0]
        for index, label in enumerate(dict.fromkeys(map(line, rows))):
            own = sorted((row for row in rows if line(row) == label), key=x)
            style = look(label, index)
            for axes, panel in zip(every, panels, strict=True):
                for form, figure_of in panel.series.items():
                    points = [(x(row), y) for row in own if (y := figure_of(row)) is not None and (y or not panel.log)]
                    first = axes is every[0] and form == next(iter(panel.series))
                    kind: dict[str, Any] = {"linestyle": style["linestyle"], "marker": "o"} if not form else {}
                    kind |= {"linestyle": "--", "markerfacecolor": "none"} if panel.modeled else {}
                    axes.plot(
                        [place for place, _ in points], [y for _, y in points], *([form] if form else []), markersize=4,
                        color=style["color"], label=label if first else None, **kind,
                    )  # fmt: skip
        more(every)
        for axes, panel in zip(every, panels, strict=True):
            _format_axes(axes, panel, words[1], sorted({float(x(row)) for row in rows}), base)
        handles, labels = every[0].get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside lower center", ncols=min(6, 3 * len(panels)), frameon=False, fontsize=9
        )
        figure.suptitle(words[0], x=0.01, ha="left", fontsize=11)
        save(figure, path)


def _format_axes(axes: Axes, panel: Panel, label: str, places: Sequence[float], base: int) -> None:
    axes.set_xscale("log", base=base)
    axes.set_xlabel(label)
    axes.set_ylabel(panel.label)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda place, _: f"{place:,g}"))
    if base == 2:
        axes.xaxis.set_major_locator(FixedLocator(places[:: -(-len(places) // _TICKS)]))
        axes.xaxis.set_minor_locator(NullLocator())
    if panel.log:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        low, high = axes.get_ylim()
        few = high / low < 20  # there are hardly any powers of ten to label
        axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}") if few else NullFormatter())
    else:
        axes.set_ylim(bottom=0)
    axes.grid(axis="y")
    axes.set_axisbelow(True)
