"""``memory``: the bytes that every method stores in addition to parameters and gradients, measured and planned.

For one process, each optimizer takes a few steps, so that its state is complete. Its bytes are counted by kind and
compared with ``plan()``. For several ranks, the bytes are those of ``plan()``. The tests of the package check that they
are equal to the bytes of runs with 2 to 4 processes.

``estimates``: a comparison of the slowdown that ``secondorder.estimate`` predicts with the measured one.

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
from benchmarks.compare.runs import find, recipe_on
from benchmarks.compare.wording import NOTHING
from benchmarks.evidence import Cells, Evidence, Figures, Shown, attempted, notes_text
from benchmarks.filling import fill_windows
from benchmarks.machine import no_collections
from benchmarks.peers import PEERS
from benchmarks.recipes import OWN
from benchmarks.recipes.building import adamw, sgd
from benchmarks.recipes.types import Recipe
from benchmarks.report import Table
from benchmarks.runner import Trainer, memory_usage, trainer_of
from benchmarks.workloads import Workload, WorkloadName, make_workload
from secondorder import CommOpt, HybridOpt, MachineRates, MemOpt, RefreshOptions, SecondOrderOptimizer
from secondorder.comm import CommStrategy
from secondorder.plan.rates import measure_rates

TEMPORARY = ("workspace", "pending")  # kinds of temporary memory, which contain no state between steps
COUNTERS = "buffers"
UNPLANNED = 256  # bytes of counters of a whole method, such as those of HyLo's policy, that plans do not count
_FRACTION = 0.5  # share of the ranks that precondition a layer
_MOMENTUM = ("momentum", "fallback")


@dataclass
class Memory(Evidence):
    """Count the bytes of every method, by kind and by rank. The status is 1 if they differ from its plan."""

    workload: WorkloadName = "autoencoder"
    """Workload whose model to use."""
    optimizers: tuple[str, ...] = (*OWN, "ekfac_whiten", *PEERS)
    """Optimizers, including third-party ones. Those that are not installed or have no recipe are left out."""
    batch_size: int | None = None
    """Batch size of a rank. Default: that of the workload."""
    steps: int = 12
    """Number of steps before bytes are counted."""
    world: int = 4
    """Number of ranks of the plans."""

    @property
    def stem(self) -> str:
        return f"memory-{self.workload}"

    def check_options(self) -> None:
        self.check(positive=("steps", "world"))
        for name in self.optimizers:
            find(name)  # an unknown name is an error, unlike an optimizer that cannot be built

    def rows(self, cells: Cells) -> list[Figures]:
        workload = self._make_workload()
        more = {"steps": self.steps, "world": self.world, "worker_fraction": _FRACTION}
        found: list[Figures] = []
        for name in self.optimizers:
            try:
                recipe = recipe_on(name, workload, self.size, self.data_dir)
                identity = self.about(workload, name, recipe.settings, **more, beside="plan")
                found.append(cells.run(identity, partial(self._measure, name, recipe, workload)))
            except ValueError as err:
                print(f"left out: {err}")
        return found

    def show(self, rows: list[Figures]) -> Shown:
        tables = [_table(self.workload, self._make_workload().batch_size, rows), _spread_table(self.world, rows)]
        wrong = any(abs(difference(figures) or 0) > UNPLANNED for figures in rows)
        return Shown(tables, {"workload": self.workload, "optimizers": list(self.optimizers)}, int(wrong))

    def _make_workload(self) -> Workload:
        return make_workload(self.workload, self.data_dir, self.size, self.batch_size)

    def _measure(self, name: str, recipe: Recipe, workload: Workload, pause: Pause) -> Figures:
        trainer = trainer_of(find(name), workload, recipe.settings, self.seed)
        for _ in range(self.steps):
            trainer.step()
        model, optimizer = trainer.model, trainer.optimizer
        figures = {
            "label": trainer.history.label, "note": recipe.note,
            "parameter_bytes": sum(p.nbytes for p in model.parameters() if p.requires_grad),
            "memory": memory_usage(optimizer), "planned": None, "plans": {},
        }  # fmt: skip
        if isinstance(optimizer, SecondOrderOptimizer):
            (alone,) = optimizer.plan(1, batch_size=workload.batch_size).ranks
            figures["planned"] = _sum(alone.stored)
            figures["plans"] = self._plans(optimizer, workload.batch_size)
            optimizer.close()
        return figures

    def _plans(self, optimizer: SecondOrderOptimizer, examples: int) -> dict[str, list[int]]:
        hybrid = f"HybridOpt({_FRACTION:g})"
        strategies: dict[str, CommStrategy] = {"CommOpt": CommOpt(), hybrid: HybridOpt(_FRACTION), "MemOpt": MemOpt()}
        return {
            name: [_sum(rank.stored, COUNTERS) for rank in optimizer.plan(self.world, comm, batch_size=examples).ranks]
            for name, comm in strategies.items()
        }


def _sum(kinds: Mapping[str, int], *left_out: str) -> int:
    """Return the bytes of the state, without workspace."""
    return sum(n for kind, n in kinds.items() if kind not in (*TEMPORARY, *left_out))


def state_bytes(figures: Figures) -> int:
    memory: dict[str, int] = figures["memory"]
    return memory["total"] - sum(memory.get(kind, 0) for kind in TEMPORARY)


def difference(figures: Figures) -> int | None:
    """Return the bytes of the state of one process minus those of its plan."""
    return None if figures["planned"] is None else state_bytes(figures) - int(figures["planned"])


def _table(workload: str, batch_size: int, found: Sequence[Figures]) -> Table:
    rows = [_row(figures) for figures in found]
    size = f"{found[0]['parameter_bytes'] / 1e6:.2f} MB of parameters" if found else "nothing measured"
    caption = (
        "All columns are in MB, except for the difference from plan(), which is in bytes. Rest: counters. Workspace is "
        "kept from step to step and is not part of checkpoints. Total: everything that is kept between steps. The plan "
        "is that of the state, without workspace. Third-party optimizers are counted tensor by tensor and have no plan."
    ) + notes_text(found)
    columns = report.columns(
        "optimizer = label; curvature = curvature .3f MB; momentum = momentum .3f MB; rest = rest .3f MB; "
        "workspace = workspace .3f MB; total = total .3f MB; × parameters = multiple .2f; difference = difference +,"
    )
    title = f"{workload}, batch {batch_size}, {size}: state of one process"
    return report.table_of(title, rows, columns, caption)


def _row(figures: Figures) -> Figures:
    memory, state = figures["memory"], state_bytes(figures)
    momentum, rest = sum(memory.get(kind, 0) for kind in _MOMENTUM), memory.get(COUNTERS, 0)
    parts = {"curvature": state - momentum - rest, "momentum": momentum, "rest": rest}
    return {
        "label": figures["label"],
        # Of third-party optimizers, only the total is known.
        **(parts | {"workspace": memory["total"] - state} if len(memory) > 1 else {}),
        "total": memory["total"],
        "multiple": memory["total"] / figures["parameter_bytes"],
        "difference": difference(figures),
    }


def _spread_table(world: int, found: Sequence[Figures]) -> Table:
    rows = [
        {
            "label": figures["label"],
            "strategy": name,
            "mean": sum(ranks) / len(ranks),
            "most": max(ranks),
            "multiple": max(ranks) / figures["parameter_bytes"],
        }
        for figures in found
        for name, ranks in figures["plans"].items()
    ]
    caption = "Planned MB of a rank, without counters. × parameters: for the fullest rank."
    columns = report.columns(
        "optimizer = label; strategy; mean of ranks = mean .3f MB; fullest = most .3f MB; × parameters = multiple .2f"
    )
    return report.table_of(f"{world} ranks", rows, columns, caption)


_RATE = 1e-5
_EARLY: dict[str, Any] = {"refresh": RefreshOptions(warmup=False)}
_WINDOWS = ("mfac", "sparse_mfac", "ggt")
_CURVATURE = ("kfac", "ekfac", "hylo", "from_adamw", "from_muon", "orthogonal_momentum")
_BLOCK, _REST, _SETTLE = 10, 5, 2  # timed steps of a method and of SGD per block, and untimed steps before them


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
        return Shown([_slowdown_table(rows, self.methods, self.tolerance)], {"tolerance": self.tolerance})

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


def _slowdown_table(rows: list[Figures], methods: Sequence[str], tolerance: float) -> Table:
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
    lines = report.grouped(rows, "workload", "method")
    return report.table_of("Estimated and measured slowdowns", lines, columns, caption)


def _cell(name: str, tolerance: float, own: Mapping[str, Figures]) -> str:
    row = own.get(name)
    if row is None or row["failed"]:
        return NOTHING if row is None else "failed"
    return f"{row['estimated']:.2f} / {row['measured']:.2f}" + ("" if _is_close(row, tolerance) else " *")


def _is_close(row: Figures, tolerance: float) -> bool:
    return bool(abs(row["estimated"] / row["measured"] - 1) <= tolerance)
