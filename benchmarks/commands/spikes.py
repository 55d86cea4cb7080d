"""``spikes``: the slowest and the median step, with refreshes at once, spread over steps, in the background, or both.

The variants do not take turns, because the background work of one would slow down the steps of another. Each begins
with an interval that is not timed. Then its steps are timed by the wall clock.
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from benchmarks import report
from benchmarks.commands.options import OnWorkload
from benchmarks.machine import no_collections
from benchmarks.recipes import METHODS
from benchmarks.recipes.types import MethodName, Settings
from benchmarks.report import Table, value
from benchmarks.runner import trainer_of
from benchmarks.workloads import Workload, WorkloadName
from secondorder import SecondOrderOptimizer

WAYS: Mapping[str, Settings] = {
    "at once": {},
    "stagger": {"stagger": True},
    "overlap": {"overlap": True},
    "stagger, overlap": {"stagger": True, "overlap": True},
}


@dataclass
class Spikes(OnWorkload):
    """Compare the slowest step of K-FAC with the median one, for every way to spread refreshes."""

    workload: WorkloadName = "autoencoder"
    """Workload to train."""
    inverse_methods: tuple[Literal["cholesky", "eigen"], ...] = ("cholesky", "eigen")
    """KFAC's ways to invert factors."""
    factor_update_steps: int = 10
    """Steps between two updates of the factors."""
    inv_update_steps: int = 100
    """Steps between two refreshes."""
    intervals: int = 2
    """Number of timed intervals, after one that is not timed."""

    def run(self) -> int:
        if self.intervals < 1 or self.inv_update_steps < 1:
            raise ValueError(f"there is no step to time in {self.intervals} intervals of {self.inv_update_steps}")
        torch.set_num_threads(self.threads)
        workload = self.make_workload()
        asked: list[tuple[str, str, Settings]] = [
            (method, way, {**changes, "inverse_method": method})
            for method in self.inverse_methods
            for way, changes in WAYS.items()
        ]
        reference = self._times(workload, "sgd", {})
        intervals = {name: getattr(self, name) for name in ("factor_update_steps", "inv_update_steps")}
        results = []
        for method, way, changes in report.tracked(f"{self.workload}, batch {workload.batch_size}", asked):
            times = self._times(workload, "kfac", {**intervals, "refresh_warmup": False, **changes})
            results.append({"method": f"KFAC {method}", "way": way, "times": times})
        data = {"workload": self.workload, "threads": self.threads, "sgd": reference, "results": results}
        report.save(self.out_dir, f"spikes-{self.workload}", [_table(data)], data)
        return 0

    def _times(self, workload: Workload, name: MethodName, changes: Settings) -> list[float]:
        trainer = trainer_of(METHODS[name], workload, METHODS[name].settings(self.workload, changes), self.seed)
        # All variants then have as many refreshes: an overlapping one takes effect a tenth of an interval later.
        for _ in range(self.inv_update_steps + max(1, self.inv_update_steps // 10) + 1):
            trainer.step()
        with no_collections():
            times = [trainer.step() for _ in range(self.intervals * self.inv_update_steps)]
        if isinstance(trainer.optimizer, SecondOrderOptimizer):
            trainer.optimizer.close()  # also ends background work
        return times


def summary(times: list[float], reference: list[float]) -> tuple[float, float, float, float]:
    median, worst = statistics.median(times), max(times)
    return median, worst, worst / median, statistics.mean(times) / statistics.mean(reference)


def _table(data: Mapping[str, Any]) -> Table:
    keys = ("median", "worst", "ratio", "mean")
    rows = [{**row, **dict(zip(keys, summary(row["times"], data["sgd"]), strict=True))} for row in data["results"]]
    columns = {
        "method": value("method"),
        "refreshes": value("way"),
        "median ms": value("median", ".0f", 1e3),
        "worst ms": value("worst", ".0f", 1e3),
        "worst / median": value("ratio", ".2f"),
        "mean / SGD's mean": value("mean", ".2f"),
    }
    count = data["threads"]
    title = f"{data['workload']}: wall-clock times of steps, {count} thread{'s' * (count > 1)}"
    return report.table_of(title, rows, columns)
