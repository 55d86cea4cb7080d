"""``figures``: the figures of the documentation, drawn from stored results without running anything again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from benchmarks import report
from benchmarks.commands.batch_size import draw_batch_sizes
from benchmarks.commands.density import draw_densities
from benchmarks.commands.overview import load
from benchmarks.compare import statistics
from benchmarks.compare.figures import Against, course
from benchmarks.compare.statistics import Results
from benchmarks.plot import INK, OPTIMIZERS, look, plot_losses, save, styled
from benchmarks.runner import History

_SHADE = 0.18  # opacity of the range over the seeds


@dataclass
class Drawn:
    """Draw the figures of the documentation from stored results."""

    results: Path = Path("benchmarks/results")
    """Folder that contains the results."""
    out_dir: Path = Path("docs/images")
    """Folder to write the figures to."""

    def run(self) -> int:
        found = load(self.results)
        if not found:
            raise ValueError(f"{self.results} contains no results")
        draw = {}
        for stem, results in found.items():
            if "runs" in results:
                draw[f"evidence-{results['workload']}.svg"] = partial(draw_curves, results)
            elif stem.startswith("batch-size-"):
                draw["evidence-batch-size.svg"] = partial(draw_batch_sizes, _done(results["rows"]), _title(results))
            elif stem.startswith("density-"):
                title = f"{_title(results)}: loss against the entries kept"
                draw["evidence-density.svg"] = partial(draw_densities, results["rows"], title)
            elif stem.startswith("worlds-"):
                draw["evidence-worlds.svg"] = partial(draw_worlds, results)
            elif stem == "demo":
                draw["demo.png"] = partial(draw_demo, results)
        self.out_dir.mkdir(parents=True, exist_ok=True)
        for name, function in draw.items():
            function(self.out_dir / name)
            report.print_path("figure", self.out_dir / name)
        return 0


def _done(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [row for row in rows if row["steps"]]


def _title(results: Results) -> str:
    return str(results["tables"][0]["title"])


# ---------------------------------------------------------------------- comparisons
def draw_curves(results: Results, path: Path) -> None:
    """Draw the loss against steps and seconds: AdamW, Muon, the best first-order optimizer and the best of ours."""
    with styled():
        figure = Figure(figsize=(9, 3.0), layout="constrained")
        by_step, by_second = figure.subplots(1, 2, sharey=True)
        handles = _curves(by_step, results, "steps") | _curves(by_second, results, "seconds")
        figure.suptitle(f"{results['workload']}, {results['steps']} steps", x=0.01, ha="left")
        figure.legend(
            handles=[handles[label] for label in sorted(handles, key=_order)],
            loc="outside lower center", ncols=4, frameon=False,
        )  # fmt: skip
        save(figure, path)


def _order(label: str) -> tuple[bool, str]:
    return not label.startswith(("AdamW", "Muon", "SOAP")), label


def _shown(results: Results) -> list[str]:
    """Return AdamW, the better Muon, the best first-order optimizer, and the best of ours."""
    first = statistics.best_first(results)
    target = statistics.target_of(results, first)
    best = statistics.best_of_ours(results, target) if target else None
    ranked = [found.optimizer for found in statistics.summaries(results) if found.loss]
    muon = next((name for name in ranked if name.startswith("muon")), None)
    names = ["adamw", muon, first, best.optimizer if best else None]
    return [name for name in dict.fromkeys(names) if name in ranked]


def _curves(axes: Axes, results: Results, against: Against) -> dict[str, Line2D]:
    handles, low, top = {}, [], []
    for name in _shown(results):
        if (found := course(results, name)) is None:
            continue
        style: dict[str, Any] = {"color": look(found.label, 0)["color"], "linewidth": 1.6}
        axes.plot(found.along(against), found.mean, **style)
        if len(found.losses) > 1:
            ends = found.losses.min(axis=0), found.losses.max(axis=0)
            axes.fill_between(found.along(against), *ends, color=style["color"], alpha=_SHADE, linewidth=0)
        handles[found.label] = Line2D([], [], label=found.label, **style)
        low.append(float(found.mean.min()))
        top.append(float(found.mean[0]))
    axes.set_xlim(left=0)
    axes.set_yscale("log")
    span = max(top) / min(low)
    subs = (1, 1.5, 2, 3, 4, 5, 7) if span < 5 else (1, 2, 5) if span < 100 else (1,)
    axes.yaxis.set_major_locator(LogLocator(subs=subs))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_ylim(min(low) / 1.15, max(top) * 1.15)
    axes.xaxis.set_major_locator(MaxNLocator(4, steps=(1, 2, 2.5, 5, 10)))
    axes.set_xlabel("steps" if against == "steps" else "processor seconds", fontsize=9)
    if against == "steps":
        axes.set_ylabel("training loss", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(axis="y")
    return handles


# ---------------------------------------------------------------------- ranks and the demo
def draw_worlds(results: Results, path: Path) -> None:
    """Draw the step of the busiest rank against the number of ranks: measured as points, extrapolated as dashes."""
    rows = results["rows"]
    last = max(row["world"] for row in rows if row["measured"] is not None)
    with styled():
        figure = Figure(figsize=(8, 4.4), layout="constrained")
        axes = figure.subplots()
        for index, label in enumerate(dict.fromkeys(row["label"] for row in rows)):
            own = [row for row in rows if row["label"] == label]
            color = _WORLDS.get(label, look(label, index)["color"])
            for part, style in (
                ([row for row in own if row["world"] <= last], "-"),
                ([row for row in own if row["world"] >= last], "--"),
            ):
                values = [1e3 * (row["computing"] + row["network"]) for row in part]
                axes.plot([row["world"] for row in part], values, color=color, linestyle=style, linewidth=1.8)
            known = [row for row in own if row["measured"] is not None]
            values = [1e3 * row["measured"] for row in known]
            axes.plot([row["world"] for row in known], values, "o", color=color, markersize=6)
            axes.plot([], [], color=color, linewidth=1.8, label=label)
        axes.axhline(1e3 * rows[0]["training"], color=OPTIMIZERS["SGD"], linewidth=1.2, label="SGD")
        axes.plot([], [], "o", color=INK, label="measured")
        axes.plot([], [], "--", color=INK, label="extrapolated")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda place, _: f"{place:,g}"))
        axes.set_ylim(bottom=0)
        axes.set_xlabel("ranks")
        axes.set_ylabel("processor milliseconds of a step")
        axes.grid(axis="y")
        figure.legend(loc="outside lower center", ncols=4, frameon=False)
        figure.suptitle(_title(results), x=0.01, ha="left")
        save(figure, path)


_WORLDS = {"K-FAC, MemOpt": "#2FB5C4", "DP-KFAC": "#7A6BD8"}
"""Colors of strategies of K-FAC, which has one color otherwise."""


def draw_demo(results: Mapping[str, Any], path: Path) -> None:
    histories = []
    for row in results["results"]:
        history = History(row["label"])
        history.losses = row["losses"]
        history.step_seconds = row["step_seconds"]
        histories.append(history)
    plot_losses(histories, f"{results['workload']}, seed {results['seed']}", results["target"], path)
