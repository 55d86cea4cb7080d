"""``step-time``: what a step costs beside SGD's, class by class, against the floor that its FLOPs set.

All optimizers take turns in one process, each on a model of its own, and after every third step stands one of SGD with
momentum, the reference. Ratios are taken between medians, and between minima as a second reading that other load on
the machine hardly touches. The windows of window methods are full of random rows from the start, because a step costs
what its rows cost; ``window`` compares them with a floor.
"""

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from rich.table import Table

from benchmarks import flops, report
from benchmarks.commands.options import Common
from benchmarks.contender import Contender, measure
from benchmarks.filling import fill_windows
from benchmarks.flops import Scheme
from benchmarks.machine import Rate, copy_gbytes, gemm_gflops
from benchmarks.recipes import METHODS, WINDOW_METHODS, MethodName, Settings
from benchmarks.runner import Trainer, optimizer_bytes
from benchmarks.timing import MEASURED, REPORTED, StepClass, Work
from benchmarks.workloads import Workload, WorkloadName, make_workload

CLASSES: tuple[StepClass, ...] = get_args(StepClass)
TIME_COLUMNS = (
    "optimizer",
    *(f"{kind} ms" for kind in CLASSES),
    "intervals",
    "ratio",
    "floor",
    "beyond SGD ms / least",
)
# Whose recipe each method takes, the keyword that makes the difference, and its values. In the other recipes of EKFAC
# the momentum comes before the preconditioning, and excludes a graft.
_SCHEMES: dict[MethodName, tuple[MethodName, Literal["inverse_method", "estimator"], tuple[Scheme, ...]]] = {
    "kfac": ("kfac", "inverse_method", ("cholesky", "eigen")),
    "ekfac": ("ekfac_natural", "estimator", ("intra", "running")),
}


@dataclass
class StepTime(Common):
    """Time every method's steps against SGD's, those of KFAC and EKFAC also against the floor that their FLOPs set."""

    workload: WorkloadName = "autoencoder"
    """What to train."""
    optimizers: tuple[MethodName, ...] = ("adamw", "kfac", "ekfac", *WINDOW_METHODS)
    """Which ones take turns with SGD."""
    graft: Literal["adam", "sgd"] | None = None
    """Rule that gives a second-order step its size; it adds the work of that rule."""
    inverse_method: Literal["both", "cholesky", "eigen"] = "both"
    """How KFAC inverts its factors."""
    estimator: Literal["both", "intra", "running"] = "both"
    """How EKFAC measures its scale, on every step."""
    steps: int = 40
    """Timed steps of each optimizer; 10 show every class of the steps of KFAC and EKFAC."""
    batch_size: int | None = None
    """Examples per step; unset: the workload's own number."""
    memory: bool = True
    """Measure the peak memory of a step, too."""
    out_dir: Path = Path("bench-output")
    """Folder for the table and the results."""

    def run(self) -> int:
        """Run the command.

        Returns:
            0.

        Raises:
            ValueError: When the steps do not show every class.
        """
        if self.steps < MEASURED.refresh:
            raise ValueError(f"steps must be at least {MEASURED.refresh}, got {self.steps}")
        torch.set_num_threads(self.threads)
        workload = make_workload(self.workload, self.data_dir, batch_size=self.batch_size)
        reference, contenders = self._contenders(workload)
        rates = {"gemm_gflops": gemm_gflops(), "copy_gbytes": copy_gbytes()}
        with report.progress_bar() as progress:
            task = progress.add_task(f"{self.workload}, batch {workload.batch_size}", total=self.steps)
            measure(reference, contenders, self.steps, lambda: progress.advance(task))
        work, factors = workload_flops(workload, self.seed)
        runs = [reference, *contenders]
        results = [_figures(run, reference, work, rates["gemm_gflops"], self.memory) for run in runs]
        data = {
            "workload": self.workload,
            "batch_size": workload.batch_size,
            "training_gflop": work["cholesky"].training / 1e9,
            "factor_bytes": factors,
            **{name: asdict(rate) for name, rate in rates.items()},
            "results": results,
        }
        report.save(self.out_dir, f"step-time-{self.workload}", _tables(data), data)
        return 0

    def _contenders(self, workload: Workload) -> tuple[Contender, list[Contender]]:
        """Build the reference and the optimizers to time.

        Args:
            workload: What to train.

        Returns:
            The reference, and all others.
        """
        intervals = {"factor_update_steps": MEASURED.factor, "inv_update_steps": MEASURED.refresh}
        contenders = []
        for name in self.optimizers:
            if name in _SCHEMES:
                recipe, keyword, schemes = _SCHEMES[name]
                chosen = getattr(self, keyword)
                for scheme in schemes if chosen == "both" else (chosen,):
                    changes = {"graft": self.graft, **intervals, keyword: scheme}
                    contenders.append(
                        self._contender(workload, recipe, changes, f"{METHODS[name].label} {scheme}", scheme)
                    )
            elif name in WINDOW_METHODS:
                # Random rows give no sensible direction, so the weights stay where they are.
                contenders.append(self._contender(workload, name, {"graft": self.graft, "lr": 0.0}))
                fill_windows(contenders[-1].trainer.optimizer, self.seed)
            else:
                contenders.append(self._contender(workload, name, {}))
        return self._contender(workload, "sgd", {}), contenders

    def _contender(
        self,
        workload: Workload,
        name: MethodName,
        changes: Settings,
        label: str | None = None,
        scheme: Scheme | None = None,
    ) -> Contender:
        """Build one optimizer and its model.

        Args:
            workload: What to train.
            name: Whose recipe.
            changes: Keywords that replace the recipe's.
            label: Its name in the tables; unset: the method's.
            scheme: How it inverts curvature; None for one whose steps are all alike.

        Returns:
            The optimizer, ready to be timed.
        """
        method = METHODS[name]
        make = partial(method.build, workload=self.workload, changes=changes)
        closure = method.needs_closure(self.workload, changes)
        return Contender(Trainer(label or method.label, workload, make, self.seed, closure=closure), scheme)


def workload_flops(workload: Workload, seed: int) -> tuple[dict[Scheme, Work], int]:
    """Count the FLOPs of one training step and of what K-FAC or EK-FAC adds.

    Args:
        workload: What is trained.
        seed: Seed of the model and the batch.

    Returns:
        The FLOPs for each way to invert curvature, and the bytes of all factors.
    """
    model, batch = workload.build_model(seed), next(workload.batches(seed))
    shapes = flops.layer_shapes(model, lambda: workload.loss(model, batch))
    training = flops.counted_flops(lambda: torch.autograd.backward(workload.loss(model, batch)))
    schemes: tuple[Scheme, ...] = get_args(Scheme)
    work = {
        scheme: Work(
            training,
            flops.precondition_flops(shapes, scheme),
            flops.factor_flops(shapes),
            flops.refresh_flops(shapes, scheme),
            flops.scale_flops(shapes, scheme, workload.batch_size),
        )
        for scheme in schemes
    }
    return work, flops.factor_bytes(shapes)


def _figures(
    run: Contender, reference: Contender, work: dict[Scheme, Work], gemm: Rate, memory: bool
) -> dict[str, Any]:
    """Return the figures of one optimizer.

    Args:
        run: The optimizer, timed.
        reference: The reference, timed.
        work: FLOPs for each way to invert curvature.
        gemm: Measured rate of matrix products.
        memory: Measure the peak of a step, too.

    Returns:
        Figures by name; times in seconds.
    """
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
    for intervals in REPORTED if run.scheme else (MEASURED,):
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
    return figures


def _tables(data: dict[str, Any]) -> list[Table]:
    """Return the tables of times and of memory.

    Args:
        data: Figures of the run.

    Returns:
        The tables.
    """
    results = data["results"]
    threads = torch.get_num_threads()
    caption = (
        "Ratios to SGD's interleaved steps: of medians (of minima). Floor: FLOPs over those of SGD's step, "
        f"{data['training_gflop']:.1f} GFLOP. Beyond SGD: ms a step, and what its FLOPs take at the measured rate of "
        "matrix products, "
        f"{data['gemm_gflops']['median']:.0f} GFLOP/s (best {data['gemm_gflops']['best']:.0f}). "
        f"Copying: {data['copy_gbytes']['median']:.1f} GB/s. Threads: {threads}."
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
    return [times, memory]


def _time_rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return one row of the table of times for each pair of intervals.

    Args:
        result: Figures of one optimizer.

    Returns:
        The rows; the steps' own times stand in the first.
    """
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
