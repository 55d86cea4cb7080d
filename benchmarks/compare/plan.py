"""Which runs a comparison needs, given those that are done: pure, so that an interrupted one goes on where it stopped.

Every optimizer gets the same: learning rates half a decade apart, sifted at a sixth of the steps; up to two further
rates where the best one is the last of the row; then the winner over the whole run with each seed. Some of ours run
once more with a schedule that ends early, at the share of the steps that the comparison has as its target.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Phase = Literal["sift", "final", "short"]
Run = Mapping[str, Any]
"""What a finished run left, see :mod:`benchmarks.compare.runs`."""

STEP = math.sqrt(10)
"""Between neighbouring learning rates."""
EXTENSIONS = 2
"""Further rates, at most, where the best is the last of the row."""


@dataclass(frozen=True)
class Job:
    """One run that is to be done."""

    optimizer: str
    phase: Phase
    factor: float
    """By which the searched keywords of the recipe are multiplied."""
    seed: int
    steps: int
    """Length of the run and of its schedule."""

    def key(self, settings: Mapping[str, Any], *more: Any) -> str:
        """Return what tells this run from others; the seed of a sift, say, or a recipe that has changed.

        Args:
            settings: Keywords of the optimizer.
            *more: What else a run depends on: a schedule that is not the comparison's.

        Returns:
            A short text.
        """
        text = json.dumps([asdict(self), dict(settings), *more], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Budget:
    """What every optimizer gets."""

    steps: int
    """Of a whole run."""
    factors: tuple[float, ...] = (1 / STEP, 1.0, STEP)
    """Learning rates to try, as multiples of the recipe's."""
    seeds: int = 3
    sift_share: float = 1 / 6
    """Share of the steps that a trial takes."""
    short_share: float = 0.0
    """Share of the steps of the short runs; 0: none."""
    extend: bool = True

    @property
    def sift_steps(self) -> int:
        """Steps of a trial."""
        return max(1, round(self.steps * self.sift_share))

    @property
    def short_steps(self) -> int:
        """Steps of a short run."""
        return math.ceil(self.steps * self.short_share)


def end_loss(run: Run) -> float:
    """Return the loss at the end of a run, infinite where it failed or diverged.

    Args:
        run: A finished run.

    Returns:
        Mean of its last ten steps.
    """
    if run["failed"] or run["diverged"] or not run["curve"]:
        return math.inf
    loss = run["curve"][-1][1]
    return math.inf if loss is None else float(loss)


def of(runs: Sequence[Run], optimizer: str, phase: Phase) -> list[Run]:
    """Return the runs of one optimizer in one phase.

    Args:
        runs: Finished runs.
        optimizer: Whose.
        phase: Which.

    Returns:
        The runs.
    """
    return [run for run in runs if run["optimizer"] == optimizer and run["phase"] == phase]


def winner(runs: Sequence[Run], optimizer: str) -> float | None:
    """Return the best factor of an optimizer's sift; of equals the smaller.

    Args:
        runs: Finished runs.
        optimizer: Whose.

    Returns:
        The factor, or None when no trial ended with a finite loss.
    """
    ranked = sorted((end_loss(run), run["factor"]) for run in of(runs, optimizer, "sift"))
    return ranked[0][1] if ranked and math.isfinite(ranked[0][0]) else None


def chosen(runs: Sequence[Run], optimizer: str, budget: Budget) -> float | None:
    """Return the factor of an optimizer's whole runs: the only one there is, or the best of its sift.

    Args:
        runs: Finished runs.
        optimizer: Whose.
        budget: What it gets.

    Returns:
        The factor, or None when no trial ended with a finite loss.
    """
    return budget.factors[0] if len(budget.factors) == 1 else winner(runs, optimizer)


def sift(runs: Sequence[Run], optimizer: str, budget: Budget) -> list[Job]:
    """Return the trials that an optimizer still needs.

    Args:
        runs: Finished runs.
        optimizer: Whose.
        budget: What it gets.

    Returns:
        Jobs; none once its best rate is known, or where there is one rate only.
    """
    if len(budget.factors) == 1:
        return []
    done = sorted(run["factor"] for run in of(runs, optimizer, "sift"))
    missing = [factor for factor in budget.factors if not any(math.isclose(factor, other) for other in done)]
    if not missing and budget.extend and len(done) < len(budget.factors) + EXTENSIONS:
        missing = _beyond(done, winner(runs, optimizer))
    return [Job(optimizer, "sift", factor, 0, budget.sift_steps) for factor in missing]


def _beyond(done: Sequence[float], best: float | None) -> list[float]:
    """Return the rate beyond the end of the row at which the best one lies.

    Args:
        done: Factors that were tried, sorted.
        best: The best one; None where every trial diverged, which asks for a smaller rate.

    Returns:
        One factor, or none where the best lies inside.
    """
    if best is None or best == done[0]:
        return [done[0] / STEP]
    return [done[-1] * STEP] if best == done[-1] else []


def current(runs: Sequence[Run], optimizers: Sequence[str], budget: Budget) -> list[Run]:
    """Return the runs that count: whole runs of a rate that is no longer the best one do not.

    Args:
        runs: Finished runs.
        optimizers: Whose are looked at; those of others stay.
        budget: What each gets.

    Returns:
        The runs that stay.
    """
    best = {name: chosen(runs, name, budget) for name in optimizers}
    return [
        run
        for run in runs
        if run["phase"] == "sift" or run["optimizer"] not in best or run["factor"] == best[run["optimizer"]]
    ]


def pending(runs: Sequence[Run], optimizers: Sequence[str], short: Sequence[str], budget: Budget) -> Iterator[Job]:
    """Yield the jobs that can be done now, the most useful first.

    Trials come first, then the first seed of every optimizer, then short runs, then the other seeds: an interrupted
    comparison has something to show.

    Args:
        runs: Finished runs.
        optimizers: Who takes part.
        short: Those of them that also run with a schedule that ends early.
        budget: What each gets.

    Yields:
        Jobs that are not among the finished runs.
    """
    trials = {name: sift(runs, name, budget) for name in optimizers}
    for jobs in trials.values():
        yield from jobs
    best = {name: chosen(runs, name, budget) for name in optimizers if not trials[name]}
    ready = [(name, factor) for name, factor in best.items() if factor is not None]
    for seed in range(budget.seeds):
        yield from _missing(runs, [Job(name, "final", factor, seed, budget.steps) for name, factor in ready])
        if budget.short_share:
            some = [(name, factor) for name, factor in ready if name in short]
            yield from _missing(runs, [Job(name, "short", factor, seed, budget.short_steps) for name, factor in some])


def _missing(runs: Sequence[Run], jobs: Sequence[Job]) -> Iterator[Job]:
    done = {(run["optimizer"], run["phase"], run["seed"], run["steps"], run["factor"]) for run in runs}
    for job in jobs:
        if (job.optimizer, job.phase, job.seed, job.steps, job.factor) not in done:
            yield job
