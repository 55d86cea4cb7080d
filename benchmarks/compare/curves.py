"""The curves of one optimizer's runs, brought onto the same points."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from benchmarks.compare import statistics
from benchmarks.compare.statistics import Results, Run

Against = Literal["steps", "seconds"]
Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Course:
    """The curves of one optimizer's runs that finished, at the points of the first of them."""

    steps: Array
    seconds: Array
    losses: Array
    """[seeds, points]"""

    @property
    def mean(self) -> Array:
        """Over the seeds."""
        return np.asarray(self.losses.mean(axis=0))

    def along(self, against: Against) -> Array:
        """Return the steps, or the mean seconds at those."""
        return self.steps if against == "steps" else self.seconds


def course(results: Results, optimizer: str, phase: statistics.Phase = "final") -> Course | None:
    """Return the curves of the runs that finished, None where none did."""
    column = statistics.clock_column(results)
    runs = [run for run in statistics.select(results, phase, optimizer) if not statistics.flaw(run)]
    if not runs:
        return None
    steps = np.array([point[0] for point in known(runs[0])], dtype=float)
    return Course(
        steps,
        np.mean([_resampled(run, column, steps) for run in runs], axis=0),
        np.array([_resampled(run, 1, steps) for run in runs]),
    )


def known(run: Run) -> list[Sequence[float]]:
    """Return the points of a curve that have a loss."""
    return [point for point in run["curve"] if statistics.finite(point[1])]


def _resampled(run: Run, column: int, steps: Array) -> Array:
    points = known(run)
    return np.asarray(np.interp(steps, [point[0] for point in points], [point[column] for point in points]))
