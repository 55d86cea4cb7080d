"""The plot of training runs: loss against steps, and against seconds."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.runner import WINDOW, History

# Okabe and Ito's colours, told apart with any colour vision; the styles tell the lines apart in grey, too.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000", "#999999")
STYLES = ("-", "--", "-.", ":")


def styled() -> AbstractContextManager[None]:
    """Return a context in which figures have the look of all plots."""
    return mpl.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})


def plot_losses(histories: Sequence[History], title: str, target: float, path: Path) -> None:
    """Draw the smoothed loss of every run against steps and against seconds, side by side."""
    with styled():
        figure = Figure(figsize=(10, 4.2), layout="constrained")
        by_step, by_second = figure.subplots(1, 2, sharey=True)
        for index, history in enumerate(histories):
            start = min(WINDOW, len(history.losses)) - 1
            losses = history.smoothed[start:]
            style = {"color": COLOURS[index % len(COLOURS)], "linestyle": STYLES[index % len(STYLES)]}
            by_step.plot(range(start + 1, len(history.losses) + 1), losses, label=history.label, linewidth=1.8, **style)
            by_second.plot(history.seconds[start:], losses, linewidth=1.8, **style)
        _dress(by_step, "optimizer steps", target)
        _dress(by_second, "training seconds", target)
        by_step.set_ylabel(f"training loss (mean of {WINDOW} steps)")
        by_second.annotate(
            f"target {target:g}", (1, target), (0, 3), xycoords=("axes fraction", "data"),
            textcoords="offset points", ha="right", va="bottom", color="0.35", fontsize=9,
        )  # fmt: skip
        figure.legend(loc="outside upper right", ncols=len(histories), frameon=False)
        figure.suptitle(title, x=0.01, ha="left")
        figure.savefig(path, dpi=150)


def _dress(axes: Axes, label: str, target: float) -> None:
    axes.set_yscale("log")
    axes.set_xlabel(label)
    axes.set_xlim(left=0)
    axes.axhline(target, color="0.5", linewidth=0.8, zorder=0)
    axes.grid(axis="y", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
