"""The runs that a comparison still needs, as a pure function of the finished runs, so that it can be interrupted.

Every optimizer gets the same budget. Learning rates half a decade apart are tried for a sixth of the steps, and up to
two further rates if the best one is the lowest or the highest. The best rate then gets full runs with all seeds. Some
of our methods also run with a schedule that ends early, at the comparison's target share of the steps.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Phase = Literal["sift", "long", "final", "short"]
"""A trial, a full run at a rate that is not the best, a full run that counts, or one with a shorter schedule."""
Run = Mapping[str, Any]  # the results of a finished run, see `benchmarks.compare.runs`

STEP = math.sqrt(10)  # ratio of neighboring learning rates
COMMON = "adamw"  # always treated as a leader, because every reader compares with it
EXTENSIONS = 2  # maximum number of further rates, if the best one is the lowest or the highest


@dataclass(frozen=True)
class Job:
    optimizer: str
    phase: Phase
    factor: float  # factor for the searched keywords of the recipe
    seed: int
    steps: int  # length of the run and of its schedule

    def key(self, settings: Mapping[str, Any], *more: Any) -> str:
        phase = "final" if self.phase == "long" else self.phase  # which of the two it is depends on later runs
        text = json.dumps([asdict(self) | {"phase": phase}, dict(settings), *more], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Budget:
    steps: int  # number of steps of a full run
    factors: tuple[float, ...] = (1 / STEP, 1.0, STEP)  # learning rates to try, as multiples of the recipe's
    seeds: int = 3
    sift_share: float = 1 / 6  # share of the steps that a trial takes
    short_share: float = 0.0
    """Share of the steps in short runs. With 0, there are none."""
    extend: bool = True
    leaders: int = 0
    """Number of our methods, and of first-order optimizers, that also have full runs at a second rate and with further
    seeds. With 0, all optimizers have further seeds and none has a second rate."""

    @property
    def sift_steps(self) -> int:
        return max(1, round(self.steps * self.sift_share))

    @property
    def short_steps(self) -> int:
        return math.ceil(self.steps * self.short_share)


def end_loss(run: Run) -> float:
    """Return the loss at the end of a run, or infinity if it failed or diverged."""
    if run["failed"] or run["diverged"] or not run["curve"]:
        return math.inf
    loss = run["curve"][-1][1]
    return math.inf if loss is None else float(loss)


def of(runs: Sequence[Run], optimizer: str, phase: Phase) -> list[Run]:
    return [run for run in runs if run["optimizer"] == optimizer and run["phase"] == phase]


def winner(runs: Sequence[Run], optimizer: str) -> float | None:
    ranked = sorted((end_loss(run), run["factor"]) for run in of(runs, optimizer, "sift"))
    return ranked[0][1] if ranked and math.isfinite(ranked[0][0]) else None


def chosen(runs: Sequence[Run], optimizer: str, budget: Budget) -> float | None:
    """Return the factor of an optimizer's full runs: the only one, or the best of those that were tried."""
    if len(budget.factors) == 1:
        return budget.factors[0]
    best = winner(runs, optimizer)
    whole: dict[float, float] = {run["factor"]: end_loss(run) for run in rivals(runs, optimizer, best)}
    if best is None or best not in whole:
        return best
    return min(whole, key=lambda factor: (whole[factor], -factor))


def rivals(runs: Sequence[Run], optimizer: str, best: float | None) -> list[Run]:
    """Return the full runs of the first seed at the rate of the best trial and at the next lower rate."""
    if best is None:
        return []
    first = [run for phase in ("final", "long") for run in of(runs, optimizer, phase) if run["seed"] == 0]
    return [run for run in first if run["factor"] == best or math.isclose(run["factor"], best / STEP)]


def leaders(runs: Sequence[Run], optimizers: Sequence[str], budget: Budget) -> list[str]:
    if not budget.leaders:
        return list(optimizers)
    first = [run for name in optimizers for run in of(runs, name, "final") if run["seed"] == 0]
    ranked = sorted(first, key=end_loss)
    ours = [run["optimizer"] for run in ranked if run["ours"]]
    others = [run["optimizer"] for run in ranked if run["order"] == "first"]
    ahead = ours[: budget.leaders] + others[: budget.leaders]
    known = [run["optimizer"] for run in first if run["optimizer"] == COMMON and COMMON not in ahead]
    return ahead + known


def sift(runs: Sequence[Run], optimizer: str, budget: Budget) -> list[Job]:
    if len(budget.factors) == 1:
        return []
    done = sorted(run["factor"] for run in of(runs, optimizer, "sift"))
    missing = [factor for factor in budget.factors if not any(math.isclose(factor, other) for other in done)]
    if not missing and budget.extend and len(done) < len(budget.factors) + EXTENSIONS:
        best = winner(runs, optimizer)
        if best is None or best == done[0]:
            missing = [done[0] / STEP]
        elif best == done[-1]:
            missing = [done[-1] * STEP]
    return [Job(optimizer, "sift", factor, 0, budget.sift_steps) for factor in missing]


def current(runs: Sequence[Run], optimizers: Sequence[str], budget: Budget) -> list[Run]:
    """Return the runs that count, which excludes full runs at a rate that is no longer the best one."""
    best = {name: chosen(runs, name, budget) for name in optimizers}
    tried = [run for name in optimizers for run in rivals(runs, name, winner(runs, name))]
    kept: list[Run] = []
    for run in runs:
        whole = run["phase"] in {"final", "long"}
        if run["phase"] == "sift" or run["optimizer"] not in best:
            kept.append(run)
        elif run["factor"] == best[run["optimizer"]]:
            kept.append({**run, "phase": "final"} if whole else run)
        elif run in tried:
            kept.append({**run, "phase": "long"})
    return kept


def pending(runs: Sequence[Run], optimizers: Sequence[str], short: Sequence[str], budget: Budget) -> Iterator[Job]:
    """Yield the jobs that can be done now, in the order of their usefulness if the comparison is interrupted.

    Trials come first, then the first seed of every optimizer, then that of the leaders at a second rate, then short
    runs, and then the other seeds.
    """
    trials = {name: sift(runs, name, budget) for name in optimizers}
    for jobs in trials.values():
        yield from jobs
    best = {name: chosen(runs, name, budget) for name in optimizers if not trials[name]}
    ready = {name: factor for name, factor in best.items() if factor is not None}
    first = list(_missing(runs, [Job(name, "final", factor, 0, budget.steps) for name, factor in ready.items()]))
    yield from first
    if budget.leaders and (first or any(trials.values())):
        return  # the leaders are not known yet
    ahead = [name for name in leaders(runs, list(ready), budget) if name in ready]
    seconds = list(_missing(runs, _seconds(runs, ahead, budget)))
    yield from seconds
    if seconds:
        return
    for seed in range(budget.seeds):
        if seed:
            yield from _missing(runs, [Job(name, "final", ready[name], seed, budget.steps) for name in ahead])
        if budget.short_share:
            some = [name for name in ready if name in short]
            yield from _missing(runs, [Job(name, "short", ready[name], seed, budget.short_steps) for name in some])


def _seconds(runs: Sequence[Run], ahead: Sequence[str], budget: Budget) -> list[Job]:
    if not budget.leaders or len(budget.factors) == 1:
        return []
    lower = {name: best / STEP for name in ahead if (best := winner(runs, name)) is not None}
    return [Job(name, "final", factor, 0, budget.steps) for name, factor in lower.items()]


def _missing(runs: Sequence[Run], jobs: Sequence[Job]) -> Iterator[Job]:
    whole = {"long": "final"}
    done = {(r["optimizer"], whole.get(r["phase"], r["phase"]), r["seed"], r["steps"], r["factor"]) for r in runs}
    for job in jobs:
        if (job.optimizer, job.phase, job.seed, job.steps, job.factor) not in done:
            yield job
