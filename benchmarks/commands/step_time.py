"""``step-time``: what a step costs beside SGD's, class by class, against the floor that its FLOPs set.

All optimizers take turns in one process, each on a model of its own, and after every third step stands one of SGD with
momentum, the reference. Ratios are taken between medians, and between minima as a second reading that other load on
the machine hardly touches. The windows of window methods are full of random rows from the start, because a step costs
what its rows cost; ``window`` compares them with a floor.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from rich.table import Table

from benchmarks import flops, report
from benchmarks.commands.options import Common
from benchmarks.contender import Contender, measure
from benchmarks.filling import fill_windows
from benchmarks.flops import LayerShape, Scheme
from benchmarks.kernel_flops import KernelScheme, kernel_work
from benchmarks.machine import CPU, Rate, copy_gbytes, gemm_gflops
from benchmarks.peers import PEERS, set_paths
from benchmarks.precision import Amp, moved
from benchmarks.recipes import METHODS, WINDOW_METHODS, MethodName, Settings
from benchmarks.runner import Trainer, optimizer_bytes
from benchmarks.stages import stage_figures, stage_table
from benchmarks.timing import MEASURED, REPORTED, ROWS_REFRESHED, Intervals, StepClass, Work
from benchmarks.workloads import Size, Workload, WorkloadName, make_workload
from benchmarks.workloads.random_data import random_workload
from secondorder import EKFAC, KFAC, HyLo

CLASSES: tuple[StepClass, ...] = get_args(StepClass)
TIME_COLUMNS = (
    "optimizer",
    *(f"{kind} ms" for kind in CLASSES),
    "intervals",
    "ratio",
    "floor",
    "beyond SGD ms / least",
)


@dataclass(frozen=True)
class _Family:
    """The ways of a method whose steps are of several classes."""

    recipe: MethodName
    """Whose recipe it takes."""
    keyword: Literal["inverse_method", "estimator", "mode"]
    """What makes the difference."""
    schemes: tuple[Scheme | KernelScheme, ...]
    """Its values."""
    intervals: Settings
    """Keywords of the timed run."""
    measured: Intervals = MEASURED
    reported: tuple[Intervals, ...] = REPORTED


# All examples and positions enter, whatever a recipe samples: the floors count them all.
_FACTORED: Settings = {
    "factor_update_steps": MEASURED.factor,
    "inv_update_steps": MEASURED.refresh,
    "factor_batch_size": None,
    "factor_positions": None,
}
# In the other recipes of EKFAC the momentum comes before the preconditioning, and excludes a graft.
_FAMILIES: dict[MethodName, _Family] = {
    "kfac": _Family("kfac", "inverse_method", ("cholesky", "eigen"), _FACTORED),
    "ekfac": _Family("ekfac_natural", "estimator", ("intra", "running"), _FACTORED),
    "hylo": _Family(
        "hylo", "mode", ("kis", "kid"), {"update_steps": ROWS_REFRESHED.refresh}, ROWS_REFRESHED, (ROWS_REFRESHED,)
    ),
}


@dataclass
class StepTime(Common):
    """Time every method's steps against SGD's, those of KFAC, EKFAC and HyLo also against the floor of their FLOPs."""

    workload: WorkloadName = "autoencoder"
    """What to train."""
    optimizers: tuple[MethodName, ...] = ("adamw", "kfac", "ekfac", "hylo", *WINDOW_METHODS)
    """Which ones take turns with SGD."""
    graft: Literal["adam", "sgd"] | None = None
    """Rule that gives a second-order step its size; it adds the work of that rule."""
    inverse_method: Literal["both", "cholesky", "eigen"] = "both"
    """How KFAC inverts its factors."""
    estimator: Literal["both", "intra", "running"] = "both"
    """How EKFAC measures its scale, on every step."""
    mode: Literal["both", "kis", "kid"] = "both"
    """Which rows HyLo keeps."""
    steps: int = 40
    """Timed steps of each optimizer; 10 show every class of the steps of KFAC, EKFAC and HyLo."""
    size: Size = "cpu"
    """Size of the model and of the batch."""
    batch_size: int | None = None
    """Examples per step; unset: the workload's own number."""
    random: bool = False
    """Take random numbers for data, which resnet50 and gpt2_small can do: none has to be there."""
    device: str = "cpu"
    """Where to train."""
    amp: Amp | None = None
    """Type of autocast."""
    peer_path: tuple[str, ...] = ()
    """Checkout of kfac-pytorch, as kfac_pytorch=DIR: it takes turns with the others, at the same intervals."""
    memory: bool = True
    """Measure the peak memory of a step, too."""
    out_dir: Path = Path("bench-output")
    """Folder for the table and the results."""

    def run(self) -> int:
        if self.steps < MEASURED.refresh:
            raise ValueError(f"steps must be at least {MEASURED.refresh}, got {self.steps}")
        torch.set_num_threads(self.threads)
        set_paths(self.peer_path)
        workload = self._workload()
        reference, contenders = self._contenders(workload)
        device = reference.trainer.precision.device
        rates = {"gemm_gflops": gemm_gflops(device=device), "copy_gbytes": copy_gbytes(device=device)}
        with report.progress_bar() as progress:
            task = progress.add_task(f"{self.workload}, batch {workload.batch_size}", total=self.steps)
            measure(reference, contenders, self.steps, lambda: progress.advance(task))
        shapes, training = workload_shapes(workload, self.seed, device)
        work = factored_work(shapes, training, workload.batch_size)
        work |= _rows_work(contenders, shapes, training, workload.batch_size)
        runs = [reference, *contenders]
        results = [_figures(run, reference, work, rates["gemm_gflops"], self.memory) for run in runs]
        data = {
            "workload": self.workload,
            "batch_size": workload.batch_size,
            "device": self.device,
            "amp": self.amp,
            "training_gflop": training / 1e9,
            "factor_bytes": flops.factor_bytes(shapes),
            **{name: asdict(rate) for name, rate in rates.items()},
            "results": results,
        }
        report.save(self.out_dir, f"step-time-{self.workload}", _tables(data), data)
        return 0

    def _workload(self) -> Workload:
        if self.random:
            return random_workload(self.workload, self.size, self.batch_size)
        return make_workload(self.workload, self.data_dir, self.size, self.batch_size)

    def _contenders(self, workload: Workload) -> tuple[Contender, list[Contender]]:
        """Build the reference and the optimizers to time."""
        contenders = []
        for name in self.optimizers:
            if name in _FAMILIES:
                contenders += self._family(workload, name)
            elif name in WINDOW_METHODS:
                # Random rows give no sensible direction, so the weights stay where they are.
                contenders.append(self._contender(workload, name, {"graft": self.graft, "lr": 0.0}))
                fill_windows(contenders[-1].trainer.optimizer, self.seed)
            else:
                contenders.append(self._contender(workload, name, {}))
        if self.peer_path:
            contenders.append(self._peer(workload))
        return self._contender(workload, "sgd", {}), contenders

    def _peer(self, workload: Workload) -> Contender:
        """Build the K-FAC of kfac-pytorch, whose steps are of the same classes as those of ours."""
        changes = dict(
            zip(("factor_update_steps", "inv_update_steps"), (MEASURED.factor, MEASURED.refresh), strict=True)
        )
        peer = PEERS["kfac_pytorch"]
        make = partial(peer.build, workload=self.workload, changes=changes)
        trainer = Trainer(peer.label, workload, make, self.seed, device=self.device, amp=self.amp)
        return Contender(trainer, "eigen")

    def _family(self, workload: Workload, name: MethodName) -> list[Contender]:
        """Build the ways of a method whose steps are of several classes."""
        family = _FAMILIES[name]
        chosen = getattr(self, family.keyword)
        found = []
        for scheme in family.schemes if chosen == "both" else (chosen,):
            changes = {"graft": self.graft, **family.intervals, family.keyword: scheme}
            contender = self._contender(workload, family.recipe, changes, f"{METHODS[name].label} {scheme}")
            found.append(replace(contender, scheme=scheme, measured=family.measured, reported=family.reported))
        return found

    def _contender(
        self, workload: Workload, name: MethodName, changes: Settings, label: str | None = None
    ) -> Contender:
        """Build one optimizer and its model."""
        method = METHODS[name]
        make = partial(method.build, workload=self.workload, changes=changes)
        closure = method.needs_closure(self.workload, changes)
        trainer = Trainer(
            label or method.label, workload, make, self.seed, closure=closure, device=self.device, amp=self.amp
        )
        return Contender(trainer)


def workload_shapes(workload: Workload, seed: int, device: torch.device = CPU) -> tuple[list[LayerShape], int]:
    """Return the layers of a workload, and count the FLOPs of one training step."""
    model, batch = workload.build_model(seed).to(device), moved(next(workload.batches(seed)), device)
    shapes = flops.layer_shapes(model, lambda: workload.loss(model, batch))
    return shapes, flops.counted_flops(lambda: torch.autograd.backward(workload.loss(model, batch)))


def factored_work(shapes: Sequence[LayerShape], training: int, examples: int) -> dict[str, Work]:
    """Count what K-FAC or EK-FAC adds to a training step."""
    schemes: tuple[Scheme, ...] = get_args(Scheme)
    return {
        scheme: Work(
            training,
            flops.precondition_flops(shapes, scheme),
            flops.factor_flops(shapes),
            flops.refresh_flops(shapes, scheme),
            flops.scale_flops(shapes, scheme, examples),
            flops.factor_flops(shapes, triangle=True),
        )
        for scheme in schemes
    }


def _rows_work(
    contenders: Sequence[Contender], shapes: Sequence[LayerShape], training: int, examples: int
) -> dict[str, Work]:
    """Count what methods add that keep rows of examples."""
    work = {}
    for run in contenders:
        optimizer, scheme = run.trainer.optimizer, cast("KernelScheme", run.scheme)
        if isinstance(optimizer, HyLo):
            group = optimizer.param_groups[0]
            rank = cast("Any", optimizer.preconditioner).plan.rank_of(group, examples)
            work[str(run.scheme)] = kernel_work(shapes, training, examples, rank, scheme, group["approx"])
    return work


def _figures(
    run: Contender, reference: Contender, work: Mapping[str, Work], gemm: Rate, memory: bool
) -> dict[str, Any]:
    """Return the figures of one optimizer."""
    sgd = reference.row.summary()["plain"]
    figures: dict[str, Any] = {
        "label": run.row.label,
        "times": run.row.times,
        "median": run.row.summary(),
        "minimum": run.row.summary(min),
        "optimizer_bytes": optimizer_bytes(run.trainer.optimizer),
        "peak_bytes": run.peaks() if memory else {},
        "amortised": {},
    }
    for intervals in run.reported if run.scheme else (MEASURED,):
        entry = {
            "ratio": run.row.ratio(intervals, reference.row),
            "ratio_of_minima": run.row.ratio(intervals, reference.row, minima=True),
        }
        if run.scheme:
            extra = work[run.scheme].extra(intervals)
            entry["floor"] = work[run.scheme].floor(intervals)
            entry["extra_seconds"] = (entry["ratio"] - 1) * sgd
            entry["floor_seconds"] = extra / (gemm.median * 1e9)
        figures["amortised"][intervals.name if run.scheme else "every step"] = entry
    if run.measured == MEASURED and isinstance(run.trainer.optimizer, KFAC | EKFAC):
        figures["stages"] = stage_figures(run, work[str(run.scheme)], gemm)
    return figures


def _tables(data: dict[str, Any]) -> list[Table]:
    """Return the tables of times and of memory."""
    results = data["results"]
    where = f"Threads: {torch.get_num_threads()}." if data["device"] == "cpu" else f"Device: {data['device']}."
    caption = (
        "Ratios to SGD's interleaved steps: of medians (of minima). Floor: FLOPs over those of SGD's step, "
        f"{data['training_gflop']:.1f} GFLOP. Beyond SGD: ms a step, and what its FLOPs take at the measured rate of "
        "matrix products, "
        f"{data['gemm_gflops']['median']:.0f} GFLOP/s (best {data['gemm_gflops']['best']:.0f}). "
        f"Copying: {data['copy_gbytes']['median']:.1f} GB/s. {where}"
    )
    title = f"{data['workload']}, batch {data['batch_size']}: step times"
    times = report.make_table(title, TIME_COLUMNS, [row for r in results for row in _time_rows(r)], caption)
    memory = report.make_table(
        "Memory in MB",
        ("optimizer", "state", *(f"peak of a {kind} step" for kind in CLASSES)),
        [
            (r["label"], _mb(r["optimizer_bytes"]), *(_mb(r["peak_bytes"].get(kind)) for kind in CLASSES))
            for r in results
        ],
        f"State beside parameters and gradients; the factors alone are {_mb(data['factor_bytes'])}. Peak: what torch "
        "allocates in a step above the level between steps, gradients included, scratch memory of oneDNN and MKL not.",
    )
    stages = [stage_table(results)] if any("stages" in r for r in results) else []
    return [times, *stages, memory]


def _time_rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return one row of the table of times for each pair of intervals."""
    rows = []
    for index, (name, entry) in enumerate(result["amortised"].items()):
        own = (result["label"], *(_ms(result["median"].get(kind)) for kind in CLASSES)) if not index else ("",) * 4
        ratio = f"{entry['ratio']:.2f} ({entry['ratio_of_minima']:.2f})"
        floor = f"{entry['floor']:.2f}" if "floor" in entry else "-"
        beyond = f"{_ms(entry['extra_seconds'])} / {_ms(entry['floor_seconds'])}" if "floor" in entry else "-"
        rows.append((*own, name, ratio, floor, beyond))
    return rows


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.1f}"


def _mb(count: int | None) -> str:
    return "-" if count is None else f"{count / 1e6:.2f}"
