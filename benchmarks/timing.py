"""Arithmetic of step times: classes of steps, their amortised sums, and the floor that FLOPs set.

A step of K-FAC or EK-FAC is plain, or it updates the factors, or it also refreshes the inverses. All three are timed in
one short run and weighed as longer intervals would weigh them. A step of HyLo is plain or a refresh.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

StepClass = Literal["plain", "factor", "refresh"]
Times = dict[StepClass, list[float]]


@dataclass(frozen=True)
class Intervals:
    """Steps between updates of the factors, and between refreshes of the inverses: a multiple of the former."""

    factor: int
    refresh: int

    @property
    def name(self) -> str:
        """As in tables: ``10/100``, or ``10`` where both are the same."""
        return f"{self.refresh}" if self.factor == self.refresh else f"{self.factor}/{self.refresh}"

    def step_class(self, step: int) -> StepClass:
        if step % self.refresh == 0:
            return "refresh"
        return "factor" if step % self.factor == 0 else "plain"

    def weights(self) -> dict[StepClass, float]:
        """Return the share of each class of steps in the long run: 10/100 gives .90, .09, .01."""
        refresh = 1 / self.refresh
        factor = 1 / self.factor - refresh
        return {"plain": 1 - factor - refresh, "factor": factor, "refresh": refresh}

    def amortise(self, values: dict[StepClass, float]) -> float:
        return sum(weight * values[kind] for kind, weight in self.weights().items() if weight > 0)


MEASURED = Intervals(2, 10)
"""Intervals of the timed run: short, so that every class comes up often."""
REPORTED = (Intervals(10, 100), Intervals(1, 10))
ROWS_REFRESHED = Intervals(10, 10)
"""Of a method that keeps rows of examples, renewed by the same step that takes them: by default every tenth."""


@dataclass
class Row:
    """Step times of one optimizer and of the reference steps taken in between."""

    label: str
    times: Times = field(default_factory=dict)

    def summary(self, statistic: Callable[[Sequence[float]], float] = statistics.median) -> dict[StepClass, float]:
        return {kind: statistic(values) for kind, values in self.times.items()}

    def ratio(self, intervals: Intervals, reference: "Row", minima: bool = False) -> float:
        """Return the amortised step time over that of plain reference steps."""
        statistic: Callable[[Sequence[float]], float] = min if minima else statistics.median
        own, other = self.summary(statistic), reference.summary(statistic)["plain"]
        has_classes = len(own) > 1
        return (intervals.amortise(own) if has_classes else own["plain"]) / other


@dataclass(frozen=True)
class Work:
    """FLOPs of a training step and of what a method with curvature of layers adds to it."""

    training: float
    precondition: float
    factor: float = 0.0
    """Of the products behind the factors."""
    refresh: float = 0.0
    scale: float = 0.0
    """Of EK-FAC's scale, which every step measures."""
    triangles: float = 0.0
    """Of the factors, where of a symmetric product one triangle is computed."""

    def floor(self, intervals: Intervals) -> float:
        """Return the least ratio to a plain training step, were every FLOP equally fast."""
        return 1 + self.extra(intervals) / self.training

    def extra(self, intervals: Intervals) -> float:
        return self.precondition + self.scale + self.factor / intervals.factor + self.refresh / intervals.refresh
