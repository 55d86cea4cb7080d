"""``estimates``: a comparison of the slowdown that ``secondorder.estimate`` predicts with the measured one.

Each method uses the defaults of its constructor, except that the curvature has no warm-up, which estimates ignore.
Blocks of its steps alternate with blocks of SGD until all steps of one interval between refreshes are timed. The first
steps of a block may be excluded, because the caches still contain the other model. Windows are full from the start.
"""

import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

import secondorder
from benchmarks import report
from benchmarks.checkpoints import Pause
from benchmarks.compare.wording import NOTHING
from benchmarks.evidence import Cells, Evidence, Figures, Shown, attempted
from benchmarks.filling import fill_windows
from benchmarks.machine import no_collections
from benchmarks.recipes.building import adamw, sgd
from benchmarks.report import Table
from benchmarks.runner import Trainer
from benchmarks.workloads import Workload, WorkloadName, make_workload
from secondorder import MachineRates, RefreshOptions
from secondorder.plan.rates import measure_rates

_RATE = 1e-5
_EARLY: dict[str, Any] = {"refresh": RefreshOptions(warmup=False)}
_WINDOWS = ("mfac", "sparse_mfac", "ggt")
_CURVATURE = ("kfac", "ekfac", "hylo", "from_adamw", "from_muon", "orthogonal_momentum")
_BLOCK, _REST, _SETTLE = 10, 5, 2
"""Timed steps of a method and of SGD per block, and untimed steps before them."""


@dataclass
class Estimates(Evidence):
    """Compare the slowdown that secondorder.estimate predicts with the measured one."""

    workloads: tuple[WorkloadName, ...] = (
        "digits", "logistic", "poisson", "autoencoder", "resnet20", "chargpt", "unet", "multi30k",
    )  # fmt: skip
    """Workloads whose steps are timed."""
    methods: tuple[str, ...] = ("adamw", *_CURVATURE, *_WINDOWS)
    """Methods and presets to compare."""
    window_size: int = 64
    """Number of rows of the windows."""
    steps: int = 30
    """Minimum number of timed steps of a method. At least one full interval between refreshes is timed."""
    tolerance: float = 0.25
    """Largest relative error of an estimate that counts as close."""

    @property
    def stem(self) -> str:
        return "estimates"

    def check_options(self) -> None:
        self.check(positive=("window_size", "steps", "tolerance"))

    def rows(self, cells: Cells) -> list[Figures]:
        rates, rows = measure_rates("cpu"), []
        for kind in self.workloads:
            workload = make_workload(kind, self.data_dir, self.size)
            for name in self.methods:
                identity = self.about(workload, name, {}, window_size=self.window_size, steps=self.steps)
                found = cells.run(identity, attempted(partial(self._compare, workload, name, rates)))
                shown = {key: value for key, value in found.items() if key != "rates"}
                rows.append({"workload": kind, "method": name, **shown})
        return rows

    def show(self, rows: list[Figures]) -> Shown:
        return Shown([_table(rows, self.methods, self.tolerance)], {"tolerance": self.tolerance})

    def _build(self, name: str, model: nn.Module) -> Optimizer:
        if name in ("sgd", "adamw"):
            return sgd(model, lr=_RATE, momentum=0.9) if name == "sgd" else adamw(model, lr=_RATE)
        if name in _WINDOWS:  # random rows give useless directions, so the weights must not change
            return secondorder.create(name, model, lr=0.0, window_size=self.window_size)
        return secondorder.create(name, model, lr=_RATE, **({} if name == "hylo" else _EARLY))

    def _compare(self, workload: Workload, name: str, rates: MachineRates, _: Pause) -> Figures:
        model, batch = _WithLoss(workload, self.seed), next(workload.batches(self.seed))
        methods = {name: partial(self._build, name)}
        found = secondorder.estimate(model, inputs=batch, methods=methods, rates=rates).methods[name]
        if found.failure:
            raise RuntimeError(found.failure)
        own, base = self._seconds(workload, name)
        return {"estimated": found.slowdown, "measured": own / base, "sgd_seconds": base, "rates": asdict(rates)}

    def _seconds(self, workload: Workload, name: str) -> tuple[float, float]:
        """Return the processor seconds of a step of a method, as the mean over an interval, and of a step of SGD."""
        own, base = (Trainer(n, workload, partial(self._build, n), self.seed) for n in (name, "sgd"))
        own.step()
        if name in _WINDOWS:
            fill_windows(own.optimizer, self.seed)
        group = own.optimizer.param_groups[0]
        interval = group.get("inv_update_steps") or group.get("update_steps") or 1
        steps = max(interval, self.steps)
        seconds: list[float] = []
        others: list[float] = []
        while len(seconds) < steps:
            others += _take(base, _SETTLE, _REST)
            seconds += _take(own, _SETTLE if interval == 1 else 0, _BLOCK)
        # A median is robust to other load, but steps of several kinds need a mean.
        typical = statistics.median if interval == 1 else statistics.fmean
        return typical(seconds[:steps]), statistics.median(others)


class _WithLoss(nn.Module):
    """A model that returns the loss of a workload."""

    def __init__(self, workload: Workload, seed: int) -> None:
        super().__init__()
        self.model = workload.build_model(seed)
        self._loss: Callable[..., Tensor] = workload.loss

    def forward(self, *batch: Tensor) -> Tensor:
        return self._loss(self.model, batch)


def _take(trainer: Trainer, settle: int, steps: int) -> list[float]:
    gc.collect()
    with no_collections():
        for _ in range(settle + steps):
            trainer.step()
    return trainer.history.processor_seconds[-steps:]


def _table(rows: list[Figures], methods: Sequence[str], tolerance: float) -> Table:
    by_workload: dict[str, dict[str, Figures]] = {}
    for row in rows:
        by_workload.setdefault(row["workload"], {})[row["method"]] = row
    columns: dict[str, report.Column] = {
        "workload": lambda own: str(next(iter(own.values()))["workload"]),
        **{name: partial(_cell, name, tolerance) for name in methods},
    }
    measured = [row for row in rows if not row["failed"]]
    close = sum(_is_close(row, tolerance) for row in measured)
    caption = (
        "Estimated slowdown / measured slowdown, relative to SGD with momentum. A star marks estimates that differ by "
        f"more than {tolerance:.0%} from what was measured: {close} of {len(measured)} are within it."
    )
    return report.table_of("Estimated and measured slowdowns", list(by_workload.values()), columns, caption)


def _cell(name: str, tolerance: float, own: Mapping[str, Figures]) -> str:
    row = own.get(name)
    if row is None or row["failed"]:
        return NOTHING if row is None else "failed"
    return f"{row['estimated']:.2f} / {row['measured']:.2f}" + ("" if _is_close(row, tolerance) else " *")


def _is_close(row: Figures, tolerance: float) -> bool:
    return bool(abs(row["estimated"] / row["measured"] - 1) <= tolerance)
