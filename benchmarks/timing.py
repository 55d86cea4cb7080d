"""Step times: classes of steps, optimizers that are timed in turns, and the lower bound that the FLOPs imply.

A step of K-FAC or EK-FAC is plain, or it updates the factors, or it also refreshes the inverses. One short run times
all three, and the mean weights them according to longer intervals. A step of HyLo is plain or a refresh. The time of a
stage is compared with the time that its FLOPs take at the rate of large matrix products.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rich.table import Table

from benchmarks import report
from benchmarks.machine import Rate, no_collections, peak_bytes
from benchmarks.report import value
from benchmarks.runner import Trainer
from secondorder import SecondOrderOptimizer
from secondorder.diagnostics import StageClock

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
    triangles: float = 0.0
    """FLOPs of the factors if only one triangle of each symmetric product is computed."""

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

    def peaks(self) -> dict[StepClass, int]:
        peaks: dict[StepClass, int] = {}
        for _ in range(self.measured.refresh if self.scheme else 1):
            kind = self.next_class
            if kind in peaks:
                self.step(record=False)
            else:
                self.trainer.optimizer.zero_grad()  # gradients of the last step must not raise the initial level
                peaks[kind] = peak_bytes(lambda: self.step(record=False), self.trainer.precision.device)
        return peaks


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


ROUNDS = 3
"""Number of refresh intervals in which stages are timed."""
SHOWN: Mapping[str, StepClass] = {"precondition": "plain", "capture": "factor", "refresh": "refresh"}
"""The stages with a lower bound from FLOPs, and the class of steps in which each is timed."""


def stage_times(run: Contender) -> dict[str, float]:
    optimizer = run.trainer.optimizer
    assert isinstance(optimizer, SecondOrderOptimizer)
    clock = StageClock(run.trainer.precision.device)
    times: dict[str, list[float]] = {stage: [] for stage in SHOWN}
    optimizer.time_stages(clock)
    try:
        for _ in range(ROUNDS * run.measured.refresh):
            kind = run.next_class
            run.step(record=False)
            found = clock.last_step()
            for stage, shown in SHOWN.items():
                if kind == shown:
                    times[stage].append(found.get(stage, 0.0) / 1e3)
    finally:
        optimizer.time_stages(None)
    return {stage: statistics.median(values) for stage, values in times.items() if values}


def stage_figures(run: Contender, work: Work, gemm: Rate) -> dict[str, dict[str, float]]:
    flops = {"precondition": work.precondition, "capture": work.triangles + work.scale, "refresh": work.refresh}
    return {
        stage: {"flops": flops[stage], "seconds": spent, "floor": flops[stage] / (1e9 * gemm.median)}
        for stage, spent in stage_times(run).items()
    }


def stage_table(results: list[dict[str, Any]]) -> Table:
    rows = [
        {"label": result["label"], "stage": stage, **found, "ratio": found["seconds"] / found["floor"]}
        for result in results
        for stage, found in result.get("stages", {}).items()
    ]
    caption = (
        "Medians. Floor: the time of the stage's FLOPs at the measured rate of matrix products; only one triangle of "
        "each symmetric product counts. Capture is measured in a step that updates factors. It includes EK-FAC's scale "
        "if that is measured for each example."
    )
    columns = {
        "optimizer": value("label"),
        "stage": value("stage"),
        "GFLOP": value("flops", ".2f", 1e-9),
        "ms": value("seconds", ".2f", 1e3),
        "floor ms": value("floor", ".2f", 1e3),
        "ratio": value("ratio", ".2f"),
    }
    return report.table_of("Stages of a step", rows, columns, caption)
