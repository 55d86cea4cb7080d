"""Step times: classes of steps, optimizers that are timed in turns, and the lower bound that the FLOPs imply.

A step of K-FAC or EK-FAC is plain, or it updates the factors, or it also refreshes the inverses. One short run times
all three, and the mean weights them according to longer intervals. A step of HyLo is plain or a refresh.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from benchmarks.machine import no_collections
from benchmarks.runner import Trainer

StepClass = Literal["plain", "factor", "refresh"]
Times = dict[StepClass, list[float]]
Statistic = Callable[[Sequence[float]], float]


@dataclass(frozen=True)
class Intervals:
    """Steps between updates of the factors, and between refreshes, which is a multiple of the former."""

    factor: int
    refresh: int

    @property
    def name(self) -> str:
        """Name in tables: ``10/100``, or ``10`` if both are the same."""
        return f"{self.refresh}" if self.factor == self.refresh else f"{self.factor}/{self.refresh}"

    def step_class(self, step: int) -> StepClass:
        if step % self.refresh == 0:
            return "refresh"
        return "factor" if step % self.factor == 0 else "plain"

    def weights(self) -> dict[StepClass, float]:
        """Return the share of each class of steps in a long run: .90, .09 and .01 for 10/100."""
        refresh = 1 / self.refresh
        factor = 1 / self.factor - refresh
        return {"plain": 1 - factor - refresh, "factor": factor, "refresh": refresh}

    def amortise(self, values: dict[StepClass, float]) -> float:
        return sum(weight * values[kind] for kind, weight in self.weights().items() if weight > 0)


MEASURED = Intervals(2, 10)
"""Intervals of the timed run, which are short, so that it has many steps of every class."""
REPORTED = (Intervals(10, 100), Intervals(1, 10))
ROWS_REFRESHED = Intervals(10, 10)
"""Intervals of a method that keeps rows of examples, which every tenth step takes and refreshes by default."""


def summary(times: Times, statistic: Statistic = statistics.median) -> dict[StepClass, float]:
    return {kind: statistic(values) for kind, values in times.items()}


def ratio(times: Times, intervals: Intervals, reference: Times, statistic: Statistic = statistics.median) -> float:
    """Return the amortized step time, relative to plain steps of the reference."""
    own = summary(times, statistic)
    return (intervals.amortise(own) if len(own) > 1 else own["plain"]) / statistic(reference["plain"])


@dataclass(frozen=True)
class Work:
    """FLOPs of a training step, and those that a method adds for the curvature of layers."""

    training: float
    precondition: float
    factor: float = 0.0
    """FLOPs of the products that compute the factors."""
    refresh: float = 0.0
    scale: float = 0.0
    """FLOPs of EK-FAC's scale, which every step measures."""

    def floor(self, intervals: Intervals) -> float:
        """Return the minimum step time relative to plain training, if all FLOPs took the same time."""
        return 1 + self.extra(intervals) / self.training

    def extra(self, intervals: Intervals) -> float:
        return self.precondition + self.scale + self.factor / intervals.factor + self.refresh / intervals.refresh


REFERENCE_EVERY = 3


@dataclass
class Contender:
    """One optimizer that is timed."""

    trainer: Trainer
    scheme: str | None = None
    """How it inverts the curvature; None for a method whose steps all do the same work."""
    measured: Intervals = MEASURED
    """Intervals of the timed run."""
    reported: tuple[Intervals, ...] = REPORTED
    """Intervals to amortize over."""
    times: Times = field(default_factory=dict)
    """Seconds of the steps of each class."""
    taken: int = 0

    @property
    def next_class(self) -> StepClass:
        return self.measured.step_class(self.taken) if self.scheme else "plain"

    def step(self, record: bool = True) -> None:
        kind, seconds = self.next_class, self.trainer.step()
        self.taken += 1
        if record:
            self.times.setdefault(kind, []).append(seconds)


def measure(
    reference: Contender, contenders: Sequence[Contender], steps: int, on_round: Callable[[], None] = lambda: None
) -> None:
    """Let the contenders take steps in turns, and the reference after every third of those."""
    for contender in (reference, *contenders):
        contender.step(record=False)
    turns = 0
    with no_collections():
        for _ in range(steps):
            for contender in contenders:
                contender.step()
                turns += 1
                if turns % REFERENCE_EVERY == 0:
                    reference.step()
            on_round()
