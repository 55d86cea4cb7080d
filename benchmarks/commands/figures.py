"""``figures``: draws the figures of the documentation from stored results."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from benchmarks import report
from benchmarks.commands.batch_size import draw_batch_sizes
from benchmarks.commands.density import draw_densities
from benchmarks.commands.overview import load
from benchmarks.compare.figures import draw_histories, draw_losses
from benchmarks.compare.statistics import Results
from benchmarks.plot import INK, OPTIMIZERS, Panel, Row, plot_rows
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
                reached = [row for row in results["rows"] if row["steps"]]
                draw["evidence-batch-size.svg"] = partial(draw_batch_sizes, reached, _title(results))
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


def _title(results: Results) -> str:
    return str(results["tables"][0]["title"])


# ---------------------------------------------------------------------- ranks and the demo
def draw_worlds(results: Results, path: Path) -> None:
    """Draw the step time of the busiest rank over the number of ranks: measured points, and an extrapolation."""
    rows = results["rows"]
    last = max(row["world"] for row in rows if row["measured"] is not None)

    def modeled(row: Row) -> float:
        return 1e3 * float(row["computing"] + row["network"])

    def more(panels: Sequence[Axes]) -> None:
        panels[0].axhline(1e3 * rows[0]["training"], color=OPTIMIZERS["SGD"], linewidth=1.2, label="SGD")
        panels[0].plot([], [], "o", color=INK, label="measured")
        panels[0].plot([], [], "--", color=INK, label="extrapolated")

    series: dict[str, Callable[[Row], float | None]] = {
        "-": lambda row: modeled(row) if row["world"] <= last else None,
        "--": lambda row: modeled(row) if row["world"] >= last else None,
        "o": lambda row: None if row["measured"] is None else 1e3 * row["measured"],
    }
    panel, words = Panel("processor milliseconds of a step", series, log=False), (_title(results), "ranks")
    plot_rows(rows, [panel], lambda row: row["world"], lambda row: row["label"], words, path, more)


def draw_demo(results: Mapping[str, Any], path: Path) -> None:
    rows = results["results"]
    histories = [History(row["label"], losses=row["losses"], step_seconds=row["step_seconds"]) for row in rows]
    draw_histories(histories, f"{results['workload']}, seed {results['seed']}", results["target"], path)
