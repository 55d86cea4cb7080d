"""``seconds``: losses and held-out metrics at equal processor seconds.

1. Each optimizer is tuned with full runs and one seed: rates are bracketed on both sides, and momentum, β₂ and the
   schedule are chosen among the same values for all optimizers that have them. See :func:`search`.
2. The time T is that of the best first-order optimizer for all steps of the workload.
3. Each optimizer then trains for 0.5, 0.7, 1 and 1.5 times T with seeds that no search has used. The number of steps
   follows from its step time, and its schedule ends with the run.

Seconds are processor time, which steps of SGD in between scale to the speed of the processor at the start of the study.

The search changes the settings of one optimizer along one axis after the other. Rates are bracketed: the search
continues in steps of ``10^¼`` until the best value has a worse neighbor on both sides. The other axes are lists of
choices. The first axis is searched again at the end, because the choices move its optimum. The search depends only on
the losses, so an interrupted search can be repeated with the known losses.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from scipy import stats

from benchmarks import report
from benchmarks.compare.plan import Job, end_loss
from benchmarks.compare.runs import Setting as RunSetting
from benchmarks.compare.runs import find, measure_reference, recipe_on, train
from benchmarks.evidence import Cells, Evidence, Figures, Shown, attempted
from benchmarks.recipes.building import split_settings
from benchmarks.recipes.types import RATES, Recipe, Schedule, Setting, Settings
from benchmarks.report import Table
from benchmarks.workloads import Workload, WorkloadName

STEP = 10**0.25  # ratio of two neighboring rates
_MOST = 12
"""Maximum number of rates on each side. A search that leaves this range has no optimum."""

LossOf = Callable[[Settings], float]
"""Trains with some settings, and returns the final loss, which is infinite for a failed run."""


@dataclass(frozen=True)
class Axis:
    """Keywords that are multiplied by the same power of :data:`STEP`, or one keyword with its choices."""

    keywords: tuple[str, ...]
    choices: tuple[Setting, ...] = ()

    def best(self, start: Settings, loss_of: LossOf) -> Settings:
        """Return the best settings on the axis through ``start``; ``start`` if it and both of its neighbors fail."""
        if self.choices:
            found = [{**start, **dict.fromkeys(self.keywords, choice)} for choice in self.choices]
            return min([start, *found], key=loss_of)
        losses = {0: loss_of(start)}
        while True:
            best = min(losses, key=lambda power: (losses[power], -power))
            beyond = [power for power in (best - 1, best + 1) if power not in losses and abs(power) <= _MOST]
            fails = len(losses) > 1 and math.isinf(losses[best])
            if fails or not beyond:
                return self._moved(start, 0 if fails else best)
            losses.update({power: loss_of(self._moved(start, power)) for power in beyond})

    def _moved(self, start: Settings, power: int) -> Settings:
        if power == 0:
            return start
        rates = {key: float(start[key] or 0) for key in self.keywords if key in start}
        return {**start, **{key: float(f"{rate * STEP**power:.4g}") for key, rate in rates.items()}}


def search(start: Settings, axes: Sequence[Axis], loss_of: LossOf) -> Settings:
    """Return the best settings that were found.

    Args:
        start: The settings to begin with.
        axes: The axes to search, in this order.
        loss_of: Returns the loss of a run. It may be called several times for the same settings.
    """
    best = start
    for axis in (*axes, axes[0]):
        best = axis.best(best, loss_of)
    return best


_COURSES = {
    "cosine": Schedule("cosine", 0.05), "linear": Schedule("linear", 0.05), "trapezoid": Schedule("trapezoid", 0.05),
    "long warm-up": Schedule("cosine", 0.5), "constant": Schedule("constant"),
}  # fmt: skip
"""Schedules by name. Optimizers without a schedule use the last one."""
_SCHEDULES = Axis(("schedule",), ("cosine", "linear", "trapezoid", "long warm-up"))
_MOMENTA = Axis(("momentum",), (0.8, 0.9, 0.95))
AXES: Mapping[str, Sequence[Axis]] = {
    "adamw": (Axis(("lr",)), Axis(("beta2",), (0.95, 0.99, 0.999)), _SCHEDULES),
    "muon": (Axis(("lr", "adamw_lr")), Axis(("adamw_lr",)), _MOMENTA, _SCHEDULES),
    "orthogonal": (Axis(("lr", "plain_lr")), Axis(("plain_lr",)), _MOMENTA, _SCHEDULES),
    "lbfgs": (Axis(("history_size",), (10, 30, 100)),),
    "gauss_newton": (Axis(("damping",), (1e-3, 1e-2, 0.1, 1.0, 10.0)),),
    "ekfac_orthogonal": (Axis(RATES), Axis(("plain_lr", "fallback_lr")), _MOMENTA, _SCHEDULES),
}
"""Axes of the search by optimizer, in this order. :func:`axes_of` returns the axes of any optimizer."""
_STARTS: Mapping[str, Settings] = {"adamw": {"beta2": 0.999}, "muon": {"momentum": 0.95}}
"""Searched settings that recipes do not contain, with the defaults of the optimizers."""


def axes_of(name: str, recipe: Recipe) -> Sequence[Axis]:
    """Return the axes of the search: those of :data:`AXES`, or the rates of the recipe and the schedule."""
    schedules = () if recipe.own_schedule else (_SCHEDULES,)
    return AXES.get(name, (Axis(recipe.searched), *schedules))


@dataclass
class Seconds(Evidence):
    """Compare optimizers at equal processor seconds, with searched settings and seeds that no search has used."""

    workload: WorkloadName = "chargpt"
    """Workload to train."""
    optimizers: tuple[str, ...] = ("adamw", "muon", "soap", "orthogonal", "ekfac_orthogonal", "from_adamw")
    """Optimizers to compare. At least one must be a first-order optimizer. A colon begins settings that replace those
    of the recipe, as in ekfac_orthogonal:inv_update_steps=100,max_factor_dim=256."""
    shares: tuple[float, ...] = (0.5, 0.7, 1.0, 1.5)
    """Lengths of the runs, as multiples of the time of the best first-order optimizer."""
    steps: int | None = None
    """Number of steps of a run of this time, and of each trial. Default: that of the workload."""
    seeds: int = 5
    """Number of seeds of the final runs, starting with --first-seed. Trials use --seed."""
    first_seed: int = 100
    """First seed of the final runs."""

    @property
    def stem(self) -> str:
        return f"seconds-{self.workload}-{self.size}"

    def check_options(self) -> None:
        self.check(positive=("seeds", "steps", "shares"))
        if not any(find(split_settings(name)[0]).order == "first" for name in self.optimizers):
            raise ValueError(f"at least one of the optimizers must be a first-order one, got {self.optimizers}")
        if self.seed >= self.first_seed:
            raise ValueError(f"seed must be below first_seed={self.first_seed}, got {self.seed}")

    @cached_property
    def task(self) -> Workload:
        return RunSetting(self.workload, self.size, self.data_dir).make_workload()

    @property
    def length(self) -> int:
        return self.task.steps[self.size] if self.steps is None else self.steps

    def rows(self, cells: Cells) -> list[Figures]:
        about = {"workload": self.workload, "size": self.size, "batch_size": self.task.batch_size}
        setting = RunSetting(self.workload, self.size, self.data_dir, self.threads)
        reference = cells.run({**about, "what": "a step of SGD"}, lambda _: {"seconds": measure_reference(setting)})
        course = _Course(self, cells, replace(setting, reference_seconds=reference["seconds"]))
        tuned = [found for name in self.optimizers if (found := course.tuned(name))]
        if not any(found.first_order for found in tuned):
            return []
        best = min((found for found in tuned if found.first_order), key=lambda found: found.loss)
        rows = [
            {"share": share, **course.row(found, share, best.cost * self.length)}
            for share in sorted(self.shares, key=lambda share: abs(math.log(share)))
            for found in tuned
        ]
        return _judged(sorted(rows, key=lambda row: row["share"]))

    def show(self, rows: list[Figures]) -> Shown:
        about = {"workload": self.workload, "steps": self.length, "metric": self.task.metric}
        return Shown(_tables(rows, self.workload, self.task.metric), about)


@dataclass(frozen=True)
class _Tuned:
    name: str
    settings: Settings
    chosen: Settings  # the searched settings
    loss: float
    cost: float  # median over all trials of the seconds per step
    trials: int

    @property
    def first_order(self) -> bool:
        return find(split_settings(self.name)[0]).order == "first"


@dataclass(frozen=True)
class _Course:
    """Performs the runs of a study and stores their results."""

    study: Seconds
    cells: Cells
    setting: RunSetting

    def tuned(self, name: str) -> _Tuned | None:
        """Return the best settings of an optimizer, or None if every trial failed."""
        study, trials = self.study, dict[str, Figures]()
        base, changes = split_settings(name)
        recipe = recipe_on(base, study.task, study.size, study.data_dir)

        def loss_of(settings: Settings) -> float:
            found = self.run(base, settings, study.seed, study.length, "sift")
            trials[repr(sorted(settings.items()))] = found
            return end_loss(found)

        schedule = recipe.schedule.shape if recipe.own_schedule else "cosine"
        start = {**_STARTS.get(base, {}), **recipe.settings, **changes, "schedule": schedule}
        axes = axes_of(base, recipe)
        best = search(start, axes, loss_of)
        costs = [found["curve"][-1][2] / found["taken"] for found in trials.values() if math.isfinite(end_loss(found))]
        chosen = {key: best[key] for axis in axes for key in axis.keywords if key in best}
        return _Tuned(name, best, chosen, loss_of(best), statistics.median(costs), len(trials)) if costs else None

    def row(self, tuned: _Tuned, share: float, seconds: float) -> Figures:
        base, _, changes = tuned.name.partition(":")
        study, method = self.study, find(base)
        steps = max(1, math.floor(share * seconds / tuned.cost))
        seeds = range(study.first_seed, study.first_seed + study.seeds)
        whole = [self.run(base, tuned.settings, seed, steps, "final") for seed in seeds]
        ends = [run["curve"][-1][2] for run in whole if math.isfinite(end_loss(run))]
        return {
            "optimizer": base, "label": f"{method.label}, {changes}" if changes else method.label,
            "order": method.order, "ours": method.ours, "settings": dict(tuned.settings), "chosen": dict(tuned.chosen),
            "trials": tuned.trials, "cost": tuned.cost / (self.setting.reference_seconds or math.nan), "steps": steps,
            "seconds": statistics.median(ends) if ends else None, "losses": [end_loss(run) for run in whole],
            "metrics": [run["metric"] for run in whole if run.get("metric") is not None],
            "curves": [[point[1:3] for point in run["curve"]] for run in whole if share == 1 and run.get("curve")],
            "failed": [run["failed"] for run in whole if run["failed"]],
        }  # fmt: skip

    def run(self, name: str, settings: Settings, seed: int, steps: int, phase: Any) -> Figures:
        study, own = self.study, dict(settings)
        schedule = str(own.pop("schedule"))
        identity = study.about(study.task, name, own, schedule=schedule, seed=seed, steps=steps, phase=phase)
        job = Job(name, phase, 1.0, seed, steps)
        setting = replace(self.setting, schedule=_COURSES[schedule])
        recipe = replace(recipe_on(name, study.task, study.size, study.data_dir), settings=own)
        return self.cells.run(identity, attempted(partial(train, job, setting, find(name), recipe)))


def _judged(rows: list[Figures]) -> list[Figures]:
    """Add the comparison with the best first-order optimizer of the same time to each row."""
    for share in dict.fromkeys(row["share"] for row in rows):
        own = [row for row in rows if row["share"] == share]
        best = min((row for row in own if row["order"] == "first"), key=lambda row: statistics.fmean(row["losses"]))
        for row in own:
            pairs = list(zip(row["losses"], best["losses"], strict=True))
            row["reference"] = best is row
            row["lower"] = sum(mine < theirs for mine, theirs in pairs)
            row["ratio"] = statistics.fmean(mine / theirs for mine, theirs in pairs)
            row["crossing"] = _crossing(row["curves"], best["curves"])
    for row in rows:
        del row["curves"]  # they are still in the cells
    return rows


def _crossing(mine: Sequence[Sequence[Any]], theirs: Sequence[Sequence[Any]]) -> float | None:
    """Return the seconds to the reference's final loss, divided by those in which the reference first reaches it.

    Return None if a run does not reach it.
    """
    ratios = []
    for own, other in zip(mine, theirs, strict=True):
        target = other[-1][0]
        if target is None:
            return None
        crossed = [
            next((s for loss, s in curve if loss is not None and loss <= target), None) for curve in (own, other)
        ]
        if crossed[0] is None or not crossed[1]:
            return None
        ratios.append(crossed[0] / crossed[1])
    return statistics.fmean(ratios) if ratios else None


def _tables(rows: Sequence[Figures], workload: str, metric: str) -> list[Table]:
    shares = list(dict.fromkeys(row["share"] for row in rows))
    lines = [{"label": next(iter(line.values()))["label"], **line} for line in report.grouped(rows, "label", "share")]

    def named(cell: Callable[[Figures], str]) -> dict[str, report.Column]:
        columns = {f"{share:g} T": partial(lambda share, line: cell(line[share]), share) for share in shares}
        return {"optimizer": report.value("label"), **columns}

    mean = "Mean over the seeds ± half of the 95 % confidence interval (Student's t)."
    at_one = [line[1.0] for line in lines if 1.0 in line]
    return [
        report.table_of(
            f"Training loss at equal seconds, {workload}", lines, named(partial(_interval, "losses")), mean
        ),
        report.table_of(f"Held-out {metric} at equal seconds", lines, named(partial(_interval, "metrics")), mean),
        report.table_of("Relative to the best first-order optimizer of the same time", lines, named(_relative), _RATIO),
        report.table_of("Searches, and runs of time T", at_one, _SEARCHED, _SEARCH),
    ]


_RATIO = (
    "Change of the training loss, as a mean over the seeds, and the number of seeds with a lower loss. For 1 T also "
    "the seconds in which the curve crosses the final loss of the reference, divided by the seconds in which the curve "
    "of the reference itself first crosses it."
)
_SEARCH = (
    "Trials are runs with all steps of the workload on a seed that is not among those of the other tables. Cost is the "
    "time of a step divided by that of a step of SGD."
)


def _interval(key: str, row: Figures) -> str:
    values = row[key]
    if not values:
        return ", ".join(row["failed"][:1]) or "-"
    if not all(map(math.isfinite, values)):
        return "diverged"
    mean = statistics.fmean(values)
    if len(values) == 1:
        return f"{mean:.4g}"
    half = stats.t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean:.4g} ± {half:.2g}" + (f" ({len(values)} seeds)" if len(values) < 3 else "")


def _relative(row: Figures) -> str:
    if row["reference"]:
        return "reference"
    if not math.isfinite(row["ratio"]):
        return "-"
    crossing = "" if row["crossing"] is None else f", crosses at {row['crossing']:.2f}"
    return f"{100 * (row['ratio'] - 1):+.1f} %, {row['lower']} of {len(row['losses'])}{crossing}"


_SEARCHED: dict[str, report.Column] = {
    **report.columns("optimizer = label; trials = trials d"),
    "chosen": lambda row: ", ".join(f"{key} {value}" for key, value in row["chosen"].items()),
    **report.columns("cost = cost .2f; steps = steps d; seconds = seconds .1f"),
}
