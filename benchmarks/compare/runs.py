"""One run of a comparison: train, and return plain values that JSON can hold."""

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.compare.plan import Job
from benchmarks.compare.roster import find
from benchmarks.peers import evaluating, set_paths, versions
from benchmarks.recipes import COSINE, Method, Recipe, Schedule
from benchmarks.runner import WINDOW, History, Trainer, optimizer_bytes
from benchmarks.schedules import make_schedule
from benchmarks.workloads import Size, Workload, WorkloadName, make_workload

POINTS = 60
"""Of a curve that is kept."""


@dataclass(frozen=True)
class Setting:
    """What all runs of a comparison share; plain values, because other processes get it."""

    workload: WorkloadName
    size: Size
    data_dir: Path
    threads: int = 1
    batch_size: int | None = None
    everything: bool = False
    """Evaluate on all held-out data."""
    schedule: Schedule = COSINE
    peer_paths: tuple[str, ...] = ()
    deadline: float = math.inf
    """Time of day, in seconds since the epoch, at which runs that are not done are given up."""
    workload_changes: Mapping[str, Any] = field(default_factory=dict)

    def make_workload(self) -> Workload:
        """Return the workload, the same one each time: reading its data may take longer than a short run."""
        changes = tuple(sorted(self.workload_changes.items()))
        return _read_once(self.workload, self.data_dir, self.size, self.batch_size, changes)


@lru_cache(maxsize=1)
def _read_once(
    name: WorkloadName, data_dir: Path, size: Size, batch_size: int | None, changes: tuple[tuple[str, Any], ...]
) -> Workload:
    return make_workload(name, data_dir, size, batch_size, dict(changes))


def recipe_of(job: Job, setting: Setting) -> Recipe:
    """Return the recipe of a run.

    Args:
        job: The run.
        setting: The comparison.

    Returns:
        The recipe with the searched keywords multiplied.
    """
    return find(job.optimizer).recipe(setting.workload, setting.size).times(job.factor)


def key_of(job: Job, recipe: Recipe) -> str:
    """Return what tells a run from others.

    Args:
        job: The run.
        recipe: Its recipe.

    Returns:
        A short text.
    """
    return job.key(recipe.settings, *([asdict(recipe.schedule)] if recipe.own_schedule else []))


def schedule_of(recipe: Recipe, setting: Setting) -> Schedule:
    """Return the schedule of a run: the comparison's, unless the optimizer is its own schedule.

    Args:
        recipe: The recipe.
        setting: The comparison.

    Returns:
        The schedule.
    """
    return recipe.schedule if recipe.own_schedule else setting.schedule


def execute(job: Job, setting: Setting) -> dict[str, Any]:
    """Do one run.

    Args:
        job: What to run.
        setting: What all runs share.

    Returns:
        The entry of the results. A run that raises is one with the text of the error.
    """
    torch.set_num_threads(setting.threads)
    set_paths(setting.peer_paths)
    method, recipe = find(job.optimizer), recipe_of(job, setting)
    entry: dict[str, Any] = {
        "key": key_of(job, recipe),
        "optimizer": job.optimizer,
        "label": method.label,
        "ours": method.ours,
        "order": method.order,
        "phase": job.phase,
        "factor": job.factor,
        "settings": dict(recipe.settings),
        "seed": job.seed,
        "steps": job.steps,
        "versions": versions(),
        "note": recipe.note,
    }
    try:
        return entry | _train(job, setting, method, recipe)
    except TimeoutError:
        raise
    except Exception as err:
        empty = {"taken": 0, "diverged": False, "curve": [], "metric": None, "quality": {}, "optimizer_bytes": 0}
        return entry | empty | {"failed": f"{type(err).__name__}: {err}"}


def _train(job: Job, setting: Setting, method: Method, recipe: Recipe) -> dict[str, Any]:
    workload = setting.make_workload()
    make = partial(method.construct, **recipe.settings)
    schedule = partial(make_schedule, schedule_of(recipe, setting), job.steps)
    closure = method.needs_closure(None, recipe.settings)
    trainer = Trainer(method.label, workload, make, job.seed, schedule, closure)
    for _ in range(job.steps):
        if time.time() > setting.deadline:
            raise TimeoutError(f"{method.label}: out of time after {len(trainer.history.losses)} steps")
        if trainer.diverged:
            break
        trainer.step()
    return _figures(trainer, job, setting)


def _figures(trainer: Trainer, job: Job, setting: Setting) -> dict[str, Any]:
    history = trainer.history
    metric, quality = None, {}
    if job.phase != "sift" and not history.diverged:
        with evaluating(trainer.optimizer, trainer.model, trainer.workload):
            metric = trainer.workload.evaluate(trainer.model, setting.everything)
            quality = dict(trainer.workload.quality(trainer.model)) if setting.everything else {}
    figures = {
        "taken": len(history.losses),
        "diverged": history.diverged,
        "failed": None,
        "curve": curve(history),
        "metric": metric,
        "quality": quality,
        "optimizer_bytes": optimizer_bytes(trainer.optimizer),
    }
    if close := getattr(trainer.optimizer, "close", None):
        close()
    return figures


def curve(history: History, points: int = POINTS) -> list[list[float]]:
    """Return a run as a few points.

    Args:
        history: The run.
        points: About how many.

    Returns:
        Step, mean loss of the ten steps that end there, seconds of the processor and of the clock, for each point. Up
        to the tenth step the mean is of fewer.
    """
    taken = len(history.losses)
    stride = max(1, math.ceil(taken / points))
    kept = sorted({taken, *range(taken, 0, -stride)} - {0})
    worked, passed, rows, last = 0.0, 0.0, [], 0
    for step in kept:
        worked += sum(history.processor_seconds[last:step])
        passed += sum(history.step_seconds[last:step])
        rows.append([step, _short(history.loss_at(step, WINDOW)), _short(worked), _short(passed)])
        last = step
    return rows


def _short(value: float) -> float:
    return float(f"{value:.6g}")
