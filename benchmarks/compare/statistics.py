"""Statistics of a comparison: pure functions of the results of one workload.

A loss is the mean of ten training steps. A curve has about sixty points, so a loss is reached at the first of two
consecutive points at or below it. This is never too early, at most one point too late, and single outliers do not
count, except for the last point. A run that failed or diverged does not reach any loss and has no final loss, but it
counts among the seeds.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Any

from benchmarks.compare.plan import Phase, Run, end_loss
from benchmarks.runner import WINDOW

Results = Mapping[str, Any]

_CLOCKS = {"processor": 2, "wall": 3}  # columns of a curve
_LOSS = 1


@dataclass(frozen=True)
class Spread:
    """The distribution of a number over the seeds."""

    mean: float
    low: float
    high: float
    deviation: float | None  # standard deviation of the sample, or None for a single value
    count: int


@dataclass(frozen=True)
class Target:
    """A loss to reach, and the cost of the optimizer that defines it."""

    optimizer: str
    label: str
    loss: float
    steps: float
    """Number of steps of its full run. :attr:`seconds` also refers to this run."""
    seconds: float
    crossing: float  # seconds in which its own curves first reach the loss, as a mean over the seeds that reach it


@dataclass(frozen=True)
class Reach:
    optimizer: str
    label: str
    ours: bool
    phase: Phase  # `"final"` if full runs reached it, and `"short"` for the end of short runs
    reached: int  # number of seeds that reached the target
    seeds: int
    loss: float | None  # mean final loss of the runs that finished
    steps: float | None  # mean over the seeds that reached the target, like the following attributes
    seconds: float | None
    steps_share: float | None  # share of the steps of the target's optimizer
    seconds_share: float | None  # share of the seconds in which the target's optimizer first reaches the loss

    @property
    def everywhere(self) -> bool:
        return 0 < self.reached == self.seeds

    def met(self, share: float) -> bool:
        """Return whether every seed reached the target, on average within a share of the steps.

        Seconds do not matter here, because the time to a loss is not comparable with the time of a full run.
        """
        return self.everywhere and self.steps_share is not None and self.steps_share <= share


@dataclass(frozen=True)
class Summary:
    optimizer: str
    label: str
    ours: bool
    order: str
    factor: float | None  # factor for the learning rate of its full runs
    seeds: int  # number of full runs, including those that did not finish
    loss: Spread | None
    metric: Spread | None
    seconds: Spread | None
    step_cost: float | None  # seconds per step relative to SGD
    megabytes: float | None  # largest state of the optimizer over its full runs

    @property
    def incomplete(self) -> bool:
        """Whether a full run did not finish."""
        return self.loss is None or self.loss.count < self.seeds


def finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def flaw(run: Run) -> str:
    if run["failed"]:
        return f"failed: {run['failed']}"
    return "" if finite(end_loss(run)) else f"diverged after {run['taken']} of {run['steps']} steps"


def select(results: Results, phase: Phase | None = None, optimizer: str | None = None) -> list[Run]:
    return [run for run in results["runs"] if phase in {None, run["phase"]} and optimizer in {None, run["optimizer"]}]


def optimizers(results: Results) -> list[str]:
    return list(dict.fromkeys(run["optimizer"] for run in results["runs"]))


def label_of(results: Results, optimizer: str) -> str:
    return str(select(results, optimizer=optimizer)[0]["label"])


def unfinished(results: Results) -> list[tuple[Run, str]]:
    return [(run, why) for run in results["runs"] if (why := flaw(run))]


def clock_column(results: Results) -> int:
    clock = results["clock"]
    if clock not in _CLOCKS:
        raise ValueError(f"clock is {clock!r}: it must be one of {', '.join(_CLOCKS)}")
    return _CLOCKS[clock]


def clock_name(results: Results) -> str:
    return "processor" if results["clock"] == "processor" else "wall-clock"


def spread(values: Iterable[float | None]) -> Spread | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return None
    deviation = stdev(known) if len(known) > 1 else None
    return Spread(fmean(known), min(known), max(known), deviation, len(known))


def rounded(factor: float) -> float:
    return float(f"{factor:.4g}")


def sift_losses(results: Results, optimizer: str) -> dict[float, float]:
    found: dict[float, list[float]] = {}
    for run in select(results, "sift", optimizer):
        found.setdefault(rounded(run["factor"]), []).append(end_loss(run))
    return {factor: fmean(found[factor]) for factor in sorted(found)}


def best_factor(results: Results, optimizer: str) -> float | None:
    tried = {factor: loss for factor, loss in sift_losses(results, optimizer).items() if math.isfinite(loss)}
    return min(tried, key=lambda factor: (tried[factor], factor), default=None)


def at_edge(results: Results, optimizer: str) -> bool:
    tried, best = sift_losses(results, optimizer), best_factor(results, optimizer)
    return len(tried) > 1 and best in {min(tried), max(tried)}


def seconds_per_step(results: Results, optimizer: str) -> float | None:
    """Return the median over full runs of the mean seconds per step, which includes all refreshes."""
    column = clock_column(results)
    found = [run["curve"][-1][column] / run["taken"] for run in select(results, "final", optimizer) if not flaw(run)]
    return median(found) if found else None


def summarize(results: Results, optimizer: str) -> Summary:
    runs, column = select(results, "final", optimizer), clock_column(results)
    done = [run for run in runs if not flaw(run)]
    own, base = seconds_per_step(results, optimizer), seconds_per_step(results, "sgd")
    known = select(results, optimizer=optimizer)[0]
    sizes = [run["optimizer_bytes"] for run in runs if run["optimizer_bytes"] is not None and not run["failed"]]
    return Summary(
        optimizer=optimizer, label=known["label"], ours=known["ours"], order=known["order"],
        factor=runs[0]["factor"] if runs else best_factor(results, optimizer), seeds=len(runs),
        loss=spread(map(end_loss, done)), metric=spread(run["metric"] for run in done),
        seconds=spread(run["curve"][-1][column] for run in done),
        step_cost=own / base if own is not None and base else None, megabytes=max(sizes) / 1e6 if sizes else None,
    )  # fmt: skip


def summaries(results: Results) -> list[Summary]:
    found = (summarize(results, name) for name in optimizers(results))
    return sorted(found, key=lambda s: s.loss.mean if s.loss else math.inf)


def best_first(results: Results) -> str | None:
    """Return the first-order optimizer with the lowest mean final loss.

    Optimizers with unfinished seeds count only if all have such seeds.
    """
    ranked = [found for found in summaries(results) if found.order == "first" and found.loss]  # by their losses
    return next((found.optimizer for found in sorted(ranked, key=lambda found: found.incomplete)), None)


def target_of(results: Results, optimizer: str | None) -> Target | None:
    """Return the mean final loss of an optimizer as a target, or None if no full run finished."""
    done = [run for run in select(results, "final", optimizer) if optimizer is not None and not flaw(run)]
    if optimizer is None or not done:
        return None
    column = clock_column(results)
    loss, seconds = fmean(map(end_loss, done)), fmean(run["curve"][-1][column] for run in done)
    crossings = [hit[1] for run in done if (hit := first_reach(run, loss, column))]
    return Target(
        optimizer=optimizer, label=label_of(results, optimizer), loss=loss, steps=fmean(run["taken"] for run in done),
        seconds=seconds, crossing=fmean(crossings) if crossings else seconds,
    )  # fmt: skip


def targets(results: Results) -> list[Target]:
    names = dict.fromkeys(name for name in (best_first(results), "adamw") if name)
    return [target for name in names if (target := target_of(results, name))]


def first_reach(run: Run, loss: float, column: int) -> tuple[int, float] | None:
    """Return the step and the seconds at which a run reached a loss. For a short run, only its end counts."""
    if flaw(run):
        return None
    points = run["curve"][-1:] if run["phase"] == "short" else run["curve"]
    whole = [p for p in points if p[0] >= min(WINDOW, run["taken"])]  # earlier means have fewer steps
    below = [finite(p[_LOSS]) and p[_LOSS] <= loss for p in whole]
    pairs = zip(whole, below, [*below[1:], True], strict=True)  # nothing follows the last one
    return next(((p[0], p[column]) for p, here, after in pairs if here and after), None)


def reach(results: Results, optimizer: str, target: Target, phase: Phase) -> Reach | None:
    """Return how the runs of one phase reached a target, or None if there are no such runs."""
    runs = select(results, phase, optimizer)
    if not runs:
        return None
    column = clock_column(results)
    found = [hit for run in runs if (hit := first_reach(run, target.loss, column))]
    steps = fmean(step for step, _ in found) if found else None
    seconds = fmean(time for _, time in found) if found else None
    loss = spread(map(end_loss, runs))
    return Reach(
        optimizer=optimizer, label=runs[0]["label"], ours=runs[0]["ours"], phase=phase, reached=len(found),
        seeds=len(runs), loss=loss.mean if loss else None, steps=steps, seconds=seconds,
        steps_share=None if steps is None else steps / target.steps,
        seconds_share=seconds / target.crossing if seconds is not None and target.crossing else None,
    )  # fmt: skip


def reaches(results: Results, target: Target) -> list[Reach]:
    phases: tuple[Phase, ...] = ("final", "short")
    found = [reach(results, name, target, phase) for name in optimizers(results) for phase in phases]

    def rank(item: Reach) -> tuple[float, float, float]:
        share, loss = item.steps_share, item.loss
        return (-item.reached / item.seeds, math.inf if share is None else share, math.inf if loss is None else loss)

    return sorted((item for item in found if item), key=rank)


def best_of_ours(results: Results, target: Target) -> Reach | None:
    """Return the best of our methods: the one with the most seeds that reached the target, then with the fewest steps.

    If no seed reached it, return the method with the lowest final loss.
    """
    return next((item for item in reaches(results, target) if item.ours), None)


def leaders(results: Results) -> tuple[Target | None, Reach | None]:
    """Return the best first-order optimizer as a target, and the best of our methods that aims at it."""
    target = target_of(results, best_first(results))
    return target, best_of_ours(results, target) if target else None


def whole_share(results: Results, item: Reach, target: Target) -> float | None:
    """Return the seconds of complete runs relative to those of the target's optimizer, or None if unknown."""
    runs = [run for run in select(results, item.phase, item.optimizer) if not flaw(run)]
    if not runs or not target.seconds:
        return None
    column = clock_column(results)
    return fmean(run["curve"][-1][column] for run in runs) / target.seconds


def trials(results: Results) -> tuple[int, int]:
    counts = [len(sift_losses(results, name)) for name in optimizers(results) if select(results, "final", name)]
    return min(counts, default=0), max(counts, default=0)
