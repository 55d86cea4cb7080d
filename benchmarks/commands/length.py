"""``length``: long runs that evaluate on held-out data, and the seconds in which the metric reaches given values.

Each optimizer trains with multiples of the rates of its recipe, and its best run is shown. The same optimizer can be
compared with itself under several settings. On a CPU, seconds are processor time, which steps of SGD in between scale
to the speed of the processor at the start of the study. On a GPU, they are wall-clock time.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from benchmarks import report
from benchmarks.compare.plan import Job, end_loss
from benchmarks.compare.runs import Setting, find, measure_reference, recipe_on, train
from benchmarks.evidence import Cells, Evidence, Figures, Shown, attempted, why_lost
from benchmarks.plot import Row
from benchmarks.precision import Amp, DeviceName, Precision
from benchmarks.recipes.building import parse_settings, split_settings
from benchmarks.recipes.types import RATES, Schedule
from benchmarks.report import Column, Table, value
from benchmarks.workloads import Workload, WorkloadName

_WARM_UP = 0.05


@dataclass
class Length(Evidence):
    """Train for many steps, and measure how long each optimizer takes to reach given values of the held-out metric."""

    workload: WorkloadName = "resnet20"
    """Workload to train."""
    workload_set: tuple[str, ...] = ()
    """Fields of the workload to change, such as augment=crops of resnet20."""
    optimizers: tuple[str, ...] = ("sgd", "adamw", "muon", "soap", "orthogonal", "ekfac_orthogonal")
    """Optimizers to compare. A colon begins settings that replace those of the recipe, as in adamw:lr=1e-3."""
    steps: int = 5865
    """Number of steps."""
    factors: tuple[float, ...] = (1.0,)
    """Multiples of the rates to try. The table has the run with the best metric."""
    evaluations: int = 15
    """Number of evaluations on all held-out data during a run."""
    targets: tuple[float, ...] = (0.8, 0.85, 0.88)
    """Values of the metric to reach."""
    schedule: Literal["cosine", "linear", "trapezoid"] = "cosine"
    """Schedule of the rates, after a warm-up over 5 % of the steps."""
    device: DeviceName = "cpu"
    """Device to train on."""
    amp: Amp | None = None
    """Data type of autocast."""

    @property
    def stem(self) -> str:
        where = self.size if self.device == "cpu" else f"{self.size}-{self.device}"
        return f"length-{self.workload}-{self.steps}-{where}"

    def check_options(self) -> None:
        self.check(positive=("steps", "factors", "evaluations"))
        if self.evaluations > self.steps:
            raise ValueError(f"evaluations must be at most steps={self.steps}, got {self.evaluations}")
        Precision(self.device, self.amp)  # raises an error if there is no such device

    def rows(self, cells: Cells) -> list[Figures]:
        fields = parse_settings(self.workload_set)
        setting = Setting(
            self.workload, self.size, self.data_dir, self.threads, everything=True, workload_changes=fields,
            schedule=Schedule(self.schedule, _WARM_UP), evaluate_every=self.steps // self.evaluations,
            device=self.device, amp=self.amp,
        )  # fmt: skip
        about = {"workload": self.workload, "size": self.size, "fields": fields}
        if self.device == "cpu":
            found = cells.run({**about, "what": "a step of SGD"}, lambda _: {"seconds": measure_reference(setting)})
            setting = replace(setting, reference_seconds=found["seconds"])
        return [self._row(name, setting, cells) for name in self.optimizers]

    def _row(self, name: str, setting: Setting, cells: Cells) -> Figures:
        runs = [self._run(name, times, setting, cells) for times in self.factors]
        fine = [run for run in runs if _is_fine(run)]
        sign = _sign(setting.make_workload())
        best = max(fine, key=lambda run: sign * run["metric"]) if fine else runs[0]
        method = find(split_settings(name)[0])
        label = ", ".join([method.label, *self._distinctive(name)])
        return {"label": label, "ours": method.ours, "tried": len(runs), **best}

    def _distinctive(self, name: str) -> list[str]:
        """Return the settings in which an optimizer differs from others of the same name in the comparison."""
        base, changes = split_settings(name)
        others = [found for key, found in map(split_settings, self.optimizers) if key == base]
        nothing = object()
        differ = (key for key in changes if any(found.get(key, nothing) != changes[key] for found in others))
        return [f"{key}={changes[key]}" for key in differ]

    def _run(self, name: str, times: float, setting: Setting, cells: Cells) -> Figures:
        base, changes = split_settings(name)
        workload = setting.make_workload()
        recipe = recipe_on(base, workload, self.size, self.data_dir)
        recipe = replace(recipe, settings={**recipe.settings, **changes}).times(times, RATES)
        identity = self.about(
            workload, base, recipe.settings, fields=dict(setting.workload_changes), seed=self.seed, steps=self.steps,
            schedule=self.schedule, evaluations=self.evaluations,
            **({} if self.device == "cpu" else {"device": self.device, "amp": self.amp}),
        )  # fmt: skip
        job = Job(base, "final", times, self.seed, self.steps)
        found = cells.run(identity, attempted(partial(train, job, setting, find(base), recipe)))
        return {"optimizer": base, "settings": dict(recipe.settings), **found}

    def show(self, rows: list[Figures]) -> Shown:
        workload = Setting(self.workload, self.size, self.data_dir).make_workload()
        about = {"workload": self.workload, "steps": self.steps, "metric": workload.metric, "targets": self.targets}
        return Shown([self._table(rows, workload)], about)

    def _table(self, rows: Sequence[Figures], workload: Workload) -> Table:
        columns: dict[str, Column] = {
            "optimizer": value("label"),
            "rate": lambda row: value("lr", "g")(row["settings"]),
            "runs": value("tried", "d"),
            "training loss": lambda row: f"{_loss(row):.4g}" if _is_fine(row) else "-",
            workload.metric: lambda row: f"{row['metric']:.4g}" if _is_fine(row) else why_lost(row),
            **{key: partial(_quality, key) for key in sorted({key for row in rows for key in row.get("quality", ())})},
            "seconds": lambda row: f"{row['curve'][-1][2]:,.0f}" if _is_fine(row) else "-",
            **{f"to {target:g}": partial(_reached, target, _sign(workload)) for target in self.targets},
            "state, MB": value("optimizer_bytes", ".3g", 1e-6),
        }
        return report.table_of(f"{self.workload}, {self.steps:,} steps", rows, columns, _CAPTION)


_CAPTION = (
    "Of runs with several rates, the table shows the one with the best metric. The training loss is the mean of the "
    "last points of the curve, each of which is a mean of ten steps. The columns with a value of the metric show the "
    "seconds until the first evaluation that is at least as good."
)
_POINTS = 3


def _sign(workload: Workload) -> int:
    return 1 if workload.higher_is_better else -1


def _is_fine(row: Row) -> bool:
    return math.isfinite(end_loss(row))


def _quality(key: str, row: Row) -> str:
    return value(key, ".2f")(row.get("quality", {}))


def _loss(row: Row) -> float:
    return statistics.fmean(point[1] for point in row["curve"][-_POINTS:])


def _reached(target: float, sign: int, row: Row) -> str:
    found = (seconds for _, seconds, metric in row.get("evaluations", ()) if sign * (metric - target) >= 0)
    first = next(found, None)
    return "-" if first is None else f"{first:,.0f}"
