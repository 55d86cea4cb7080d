"""``figures``: the figures of the documentation, drawn from stored results without running anything again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from benchmarks import report
from benchmarks.commands.batch_size import draw_batch_sizes
from benchmarks.commands.density import draw_densities
from benchmarks.commands.overview import load
from benchmarks.compare.figures import draw_histories, draw_losses
from benchmarks.compare.statistics import Results
from benchmarks.plot import INK, OPTIMIZERS, look, save, styled
from benchmarks.runner import History


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
                draw[f"evidence-{results['workload']}.svg"] = partial(draw_losses, results)
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
    rows = results["results"]
    histories = [History(row["label"], losses=row["losses"], step_seconds=row["step_seconds"]) for row in rows]
    draw_histories(histories, f"{results['workload']}, seed {results['seed']}", results["target"], path)
