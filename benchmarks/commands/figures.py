"""``figures``: draws the figures of the documentation from stored results."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.commands.batch_size import draw_batch_sizes
from benchmarks.commands.density import draw_densities
from benchmarks.commands.overview import load
from benchmarks.compare.figures import draw_histories, draw_losses
from benchmarks.compare.statistics import Results
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
            elif stem == "demo":
                draw["demo.png"] = partial(draw_demo, results)
        self.out_dir.mkdir(parents=True, exist_ok=True)
        for name, function in draw.items():
            function(self.out_dir / name)
            report.print_path("figure", self.out_dir / name)
        return 0


def _title(results: Results) -> str:
    return str(results["tables"][0]["title"])


def draw_demo(results: Mapping[str, Any], path: Path) -> None:
    rows = results["results"]
    histories = [History(row["label"], losses=row["losses"], step_seconds=row["step_seconds"]) for row in rows]
    draw_histories(histories, f"{results['workload']}, seed {results['seed']}", results["target"], path)
