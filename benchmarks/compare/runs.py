"""Performs one run of a comparison, and returns its results as JSON values."""

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch

from benchmarks.checkpoints import Pause
from benchmarks.compare.plan import Job
from benchmarks.peers import PEERS, set_paths, versions
from benchmarks.peers.checkouts import CHECKOUTS
from benchmarks.precision import Amp, DeviceName
from benchmarks.recipes import METHODS
from benchmarks.recipes.types import COSINE, Method, Recipe, Schedule, make_schedule
from benchmarks.runner import FAILURES, WINDOW, History, Trainer, optimizer_bytes, trainer_of
from benchmarks.workloads import DataMissingError, PackageMissingError, Size, Workload, WorkloadName, make_workload


def find(name: str) -> Method:
    everyone = {**PEERS, **METHODS}
    if name not in everyone:
        raise ValueError(f"optimizers must be of {', '.join(everyone)}, got {name!r}")
    return everyone[name]


def recipe_on(name: str, workload: Workload, size: Size, data_dir: Path) -> Recipe:
    """Return the recipe of an optimizer for the workload of a comparison, in one process.

    If the recipe is for another number of ranks or batch size, its rule scales the rates. Fields of the workload that
    belong to a recipe cannot differ between optimizers. If the workload has other values, the note lists them.
    """
    recipe = find(name).recipe(workload.name, size)
    own = make_workload(cast("WorkloadName", workload.name), data_dir, size).batch_size
    other = [f"{key}={value}" for key, value in recipe.workload.items() if getattr(workload, key, None) != value]
    if other:
        note = f"published with {', '.join(other)}, which {'are' if len(other) > 1 else 'is'} not applied here"
        recipe = replace(recipe, note="; ".join(text for text in (recipe.note, note) if text))
    if recipe.batch_size is None and recipe.world == 1 and workload.batch_size == own:
        return recipe
    return recipe.at(1, workload.batch_size, own)


POINTS = 60  # maximum number of points of a stored curve
REFERENCE_EVERY = 5  # number of steps between two steps of the reference


@dataclass(frozen=True)
class Setting:
    """The settings that all runs of a comparison share, as plain values, which can be sent to other processes."""

    workload: WorkloadName
    size: Size
    data_dir: Path
    threads: int = 1
    batch_size: int | None = None
    everything: bool = False  # whether to evaluate on all held-out data
    schedule: Schedule = COSINE
    peer_paths: tuple[str, ...] = ()
    reference_seconds: float | None = None
    """Seconds of a step of SGD when the comparison started. With None, seconds are not scaled."""
    deadline: float = math.inf  # time in seconds since the epoch at which unfinished runs are interrupted
    workload_changes: Mapping[str, Any] = field(default_factory=dict)
    evaluate_every: int | None = None  # steps between evaluations during a run
    device: DeviceName = "cpu"
    amp: Amp | None = None
    pauses: Path | None = None
    """Folder for checkpoints of unfinished runs. With None, there are no checkpoints."""

    def make_workload(self) -> Workload:
        """Return the workload, which is cached because reading its data may take longer than a short run."""
        changes = tuple(sorted(self.workload_changes.items()))
        return _read_once(self.workload, self.data_dir, self.size, self.batch_size, changes)


@lru_cache(maxsize=1)
def _read_once(
    name: WorkloadName, data_dir: Path, size: Size, batch_size: int | None, changes: tuple[tuple[str, Any], ...]
) -> Workload:
    return make_workload(name, data_dir, size, batch_size, dict(changes))


def recipe_of(job: Job, setting: Setting) -> Recipe:
    workload = setting.make_workload()
    return recipe_on(job.optimizer, workload, setting.size, setting.data_dir).times(job.factor)


def key_of(job: Job, recipe: Recipe) -> str:
    return job.key(recipe.settings, *([asdict(recipe.schedule)] if recipe.own_schedule else []))


def schedule_of(recipe: Recipe, setting: Setting) -> Schedule:
    """Return the schedule of a run: that of the comparison, unless the optimizer has its own."""
    return recipe.schedule if recipe.own_schedule else setting.schedule


def execute(job: Job, setting: Setting) -> dict[str, Any]:
    torch.set_num_threads(setting.threads)
    set_paths(setting.peer_paths)
    method, recipe = find(job.optimizer), recipe_of(job, setting)
    entry: dict[str, Any] = {
        "key": key_of(job, recipe), "optimizer": job.optimizer, "label": method.label, "ours": method.ours,
        "order": method.order, "phase": job.phase, "factor": job.factor, "settings": dict(recipe.settings),
        "seed": job.seed, "steps": job.steps, "versions": versions(job.optimizer), "source": recipe.source,
        "note": recipe.note,
    }  # fmt: skip
    try:
        return entry | train(job, setting, method, recipe, pause_of(job, setting, key_of(job, recipe)))
    except (TimeoutError, DataMissingError, PackageMissingError):
        raise
    except FAILURES as err:  # the report shows the error, and other runs continue
        empty = {"taken": 0, "diverged": False, "curve": [], "metric": None, "quality": {}, "optimizer_bytes": 0}
        return entry | empty | {"failed": f"{type(err).__name__}: {err}"}


def pause_of(job: Job, setting: Setting, key: str) -> Pause | None:
    """Return the checkpoint of a run, or None for code of checkouts, whose ``state_dict`` may be incomplete."""
    if setting.pauses is None or job.optimizer in CHECKOUTS:
        return None
    about: dict[str, Any] = {"fields": dict(setting.workload_changes), "versions": versions(job.optimizer)}
    about |= {"workload": setting.workload, "size": setting.size, "batch_size": setting.batch_size, "key": key}
    return Pause(setting.pauses / f"{job.optimizer}-{key}.pt", about)


def train(job: Job, setting: Setting, method: Method, recipe: Recipe, pause: Pause | None = None) -> dict[str, Any]:
    workload = setting.make_workload()
    schedule = partial(make_schedule, schedule_of(recipe, setting), job.steps)
    torch.manual_seed(job.seed)  # for example for dropout
    where: dict[str, Any] = {"device": setting.device, "amp": setting.amp}
    trainer = trainer_of(method, workload, recipe.settings, job.seed, make_scheduler=schedule, **where)
    reference = reference_of(workload, setting) if setting.reference_seconds else None
    seconds: list[float] = (pause and pause.resume(trainer)) or []  # of the reference
    for step in range(len(trainer.history.losses), job.steps):
        if time.time() > setting.deadline:
            if pause:
                pause.keep(trainer, seconds)
            raise TimeoutError(f"{method.label}: out of time after {len(trainer.history.losses)} steps")
        if trainer.diverged:
            break
        trainer.step()
        if reference is not None and step % REFERENCE_EVERY == 0:
            with torch.random.fork_rng(devices=[]):  # the reference must not affect the dropout of the run
                reference.step()
            seconds.append(reference.history.processor_seconds[-1])
        if setting.evaluate_every and (step + 1) % setting.evaluate_every == 0 and not trainer.diverged:
            found = trainer.evaluate(setting.everything)[workload.metric]
            trainer.history.evaluations.append((step + 1, found))
        if pause:
            pause.after_step(trainer, seconds)
    return _figures(trainer, job, setting) | _scaled(trainer.history, seconds, setting)


def reference_of(workload: Workload, setting: Setting) -> Trainer:
    """Return a run of SGD, whose steps measure the current speed of the machine."""
    sgd = find("sgd").recipe(setting.workload, setting.size).times(1e-3)  # so small that it cannot diverge
    return trainer_of(find("sgd"), workload, sgd.settings, label="reference")


def measure_reference(setting: Setting, steps: int = 12) -> float:
    torch.set_num_threads(setting.threads)
    reference = reference_of(setting.make_workload(), setting)
    for _ in range(steps + 3):
        reference.step()
    return median(reference.history.processor_seconds[3:])


def _scaled(history: History, reference: list[float], setting: Setting) -> dict[str, Any]:
    """Return the curve with seconds that are scaled to the speed of the machine when the comparison started.

    Other work on the machine slows a run down, because it shares caches, memory and clock rate. Steps of SGD in between
    slow down in the same way.
    """
    worked = list(accumulate(history.processor_seconds))
    if setting.reference_seconds is None or not reference:
        found = [[step, _short(worked[step - 1]), metric] for step, metric in history.evaluations]
        return {"evaluations": found} if found else {}
    now = median(reference)
    scale = setting.reference_seconds / now
    points = [[step, loss, _short(spent * scale), passed] for step, loss, spent, passed in curve(history)]
    found = [[step, _short(worked[step - 1] * scale), metric] for step, metric in history.evaluations]
    return {"curve": points, "reference_seconds": _short(now), **({"evaluations": found} if found else {})}


def _figures(trainer: Trainer, job: Job, setting: Setting) -> dict[str, Any]:
    history = trainer.history
    lost = history.diverged or history.risen
    metric, quality = None, {}
    if job.phase != "sift" and not lost:
        quality = trainer.evaluate(setting.everything, quality=setting.everything)
        metric = quality.pop(trainer.workload.metric)
    figures = {
        "taken": len(history.losses), "diverged": lost, "failed": None, "curve": curve(history), "metric": metric,
        "quality": quality, "optimizer_bytes": optimizer_bytes(trainer.optimizer),
    }  # fmt: skip
    if close := getattr(trainer.optimizer, "close", None):
        close()
    return figures


def curve(history: History, points: int = POINTS) -> list[list[float]]:
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
