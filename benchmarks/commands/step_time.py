"""``step-time``: step times relative to SGD for each class of steps, with the lower bounds that FLOPs imply.

All optimizers take turns in one process, each with its own model, and every third step is followed by one of SGD with
momentum, the reference. Ratios are those of medians and, because other load on the machine hardly affects them, also
those of minima. The windows of window methods contain random rows from the start, because the rows determine the cost
of a step. The command ``window`` compares them with a lower bound.

A step of K-FAC or EK-FAC is plain, or it updates the factors, or it also refreshes the inverses. One short run times
all three, and the mean weights them according to longer intervals. A step of HyLo is plain or a refresh.

``spikes`` compares the slowest and the median step, with refreshes at once, spread over steps, in the background, or
both. Its variants do not take turns, because the background work of one would slow down the steps of another. Each
begins with an interval that is not timed. Then its steps are timed by the wall clock.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch

from benchmarks import report
from benchmarks.commands.options import OnWorkload
from benchmarks.compare.runs import find
from benchmarks.counting import counted_flops, factor_flops
from benchmarks.filling import fill_windows
from benchmarks.machine import Rate, copy_gbytes, gemm_gflops, no_collections
from benchmarks.peers import set_paths
from benchmarks.precision import Amp, moved
from benchmarks.recipes import METHODS, WINDOW_METHODS
from benchmarks.recipes.types import MethodName, Settings
from benchmarks.report import Table
from benchmarks.runner import Trainer, optimizer_bytes, trainer_of
from benchmarks.workloads import Workload, WorkloadName
from benchmarks.workloads.random_data import random_workload
from secondorder import EKFAC, KFAC, SecondOrderOptimizer

StepClass = Literal["plain", "factor", "refresh"]
Times = dict[StepClass, list[float]]
Statistic = Callable[[Sequence[float]], float]


@dataclass(frozen=True)
class Intervals:
    """Steps between updates of the factors, and between refreshes, which is a multiple of the former."""

    factor: int
    refresh: int

    @property
    def name(self) -> str:
        """Name in tables: ``10/100``, or ``10`` if both are the same."""
        return f"{self.refresh}" if self.factor == self.refresh else f"{self.factor}/{self.refresh}"

    def step_class(self, step: int) -> StepClass:
        if step % self.refresh == 0:
            return "refresh"
        return "factor" if step % self.factor == 0 else "plain"

    def weights(self) -> dict[StepClass, float]:
        """Return the share of each class of steps in a long run: .90, .09 and .01 for 10/100."""
        refresh = 1 / self.refresh
        factor = 1 / self.factor - refresh
        return {"plain": 1 - factor - refresh, "factor": factor, "refresh": refresh}

    def amortise(self, values: dict[StepClass, float]) -> float:
        return sum(weight * values[kind] for kind, weight in self.weights().items() if weight > 0)


MEASURED = Intervals(2, 10)  # intervals of the timed run, which are short, so that it has many steps of every class
REPORTED = (Intervals(10, 100), Intervals(1, 10))
ROWS_REFRESHED = Intervals(10, 10)
"""Intervals of a method that keeps rows of examples, which every tenth step takes and refreshes by default."""


def summary(times: Times, statistic: Statistic = statistics.median) -> dict[StepClass, float]:
    return {kind: statistic(values) for kind, values in times.items()}


def ratio(times: Times, intervals: Intervals, reference: Times, statistic: Statistic = statistics.median) -> float:
    """Return the amortized step time, relative to plain steps of the reference."""
    own = summary(times, statistic)
    return (intervals.amortise(own) if len(own) > 1 else own["plain"]) / statistic(reference["plain"])


@dataclass(frozen=True)
class Work:
    """FLOPs of a training step, and those that a method adds for the curvature of layers."""

    training: float
    precondition: float
    factor: float = 0.0  # FLOPs of the products that compute the factors
    refresh: float = 0.0
    scale: float = 0.0  # FLOPs of EK-FAC's scale, which every step measures

    def floor(self, intervals: Intervals) -> float:
        """Return the minimum step time relative to plain training, if all FLOPs took the same time."""
        return 1 + self.extra(intervals) / self.training

    def extra(self, intervals: Intervals) -> float:
        return self.precondition + self.scale + self.factor / intervals.factor + self.refresh / intervals.refresh


REFERENCE_EVERY = 3


@dataclass
class Contender:
    trainer: Trainer
    scheme: str | None = None  # how it inverts the curvature; None for a method whose steps all do the same work
    measured: Intervals = MEASURED  # intervals of the timed run
    reported: tuple[Intervals, ...] = REPORTED  # intervals to amortize over
    times: Times = field(default_factory=dict)  # seconds of the steps of each class
    taken: int = 0

    @property
    def next_class(self) -> StepClass:
        return self.measured.step_class(self.taken) if self.scheme else "plain"

    def step(self, record: bool = True) -> None:
        kind, seconds = self.next_class, self.trainer.step()
        self.taken += 1
        if record:
            self.times.setdefault(kind, []).append(seconds)


def measure(
    reference: Contender, contenders: Sequence[Contender], steps: int, on_round: Callable[[], None] = lambda: None
) -> None:
    """Let the contenders take steps in turns, and the reference after every third of those."""
    for contender in (reference, *contenders):
        contender.step(record=False)
    turns = 0
    with no_collections():
        for _ in range(steps):
            for contender in contenders:
                contender.step()
                turns += 1
                if turns % REFERENCE_EVERY == 0:
                    reference.step()
            on_round()


# No sampling of examples or positions, because the lower bounds count all of them.
_FACTORED: Settings = {
    "factor_update_steps": MEASURED.factor,
    "inv_update_steps": MEASURED.refresh,
    "factor_batch_size": None,
    "factor_positions": None,
}
# Other recipes of EKFAC apply momentum before preconditioning, which is not compatible with grafting.
_VARIANTS: dict[MethodName, tuple[MethodName, str, tuple[str, str], Settings]] = {
    "kfac": ("kfac", "inverse_method", ("cholesky", "eigen"), _FACTORED),
    "ekfac": ("ekfac_natural", "estimator", ("intra", "running"), _FACTORED),
    "hylo": ("hylo", "mode", ("kis", "kid"), {"update_steps": ROWS_REFRESHED.refresh}),
}
"""Methods with several classes of steps: their recipes, a keyword with its values, and settings of the timed run."""


@dataclass
class StepTime(OnWorkload):
    """Compare every method's step time with SGD's, and that of KFAC, EKFAC and HyLo with the floor of their FLOPs."""

    workload: WorkloadName = "autoencoder"
    """Workload to train."""
    optimizers: tuple[MethodName, ...] = ("adamw", "kfac", "ekfac", "hylo", *WINDOW_METHODS)
    """Optimizers that alternate with SGD."""
    steps: int = 40
    """Number of timed steps of each optimizer. 10 include every kind of step of KFAC, EKFAC and HyLo."""
    random: bool = False
    """Use random data, for resnet50 and gpt2_small, so that no files are needed."""
    device: str = "cpu"
    """Device to train on."""
    amp: Amp | None = None
    """Data type of autocast."""
    peer_path: tuple[str, ...] = ()
    """Folders of checkouts of other optimizers, as NAME=DIR, for example kfac_pytorch=../kfac-pytorch."""

    def run(self) -> int:
        set_paths(self.peer_path)
        if self.steps < MEASURED.refresh:
            raise ValueError(f"steps must be at least {MEASURED.refresh}, got {self.steps}")
        torch.set_num_threads(self.threads)
        workload = self._workload()
        reference, contenders = self._contenders(workload)
        device = reference.trainer.precision.device
        rates = {"gemm_gflops": gemm_gflops(device=device), "copy_gbytes": copy_gbytes(device=device)}
        with report.progress_bar() as progress:
            task = progress.add_task(f"{self.workload}, batch {workload.batch_size}", total=self.steps)
            measure(reference, contenders, self.steps, lambda: progress.advance(task))
        base = _training(workload, self.seed, device)
        runs = [reference, *contenders]
        results = [_figures(run, reference, base, rates["gemm_gflops"]) for run in runs]
        data = {
            "workload": self.workload, "batch_size": workload.batch_size, "device": self.device, "amp": self.amp,
            "training_gflop": base.training / 1e9, **{name: asdict(rate) for name, rate in rates.items()},
            "results": results,
        }  # fmt: skip
        where = f"{self.threads}-threads" if self.device == "cpu" else self.device
        stem = "step-time" if where == "1-threads" else f"step-time-on-{where}"
        report.save(self.out_dir, f"{stem}-{self.workload}", [_table(data)], data)
        return 0

    def _workload(self) -> Workload:
        if self.random:
            return random_workload(self.workload, self.size, self.batch_size)
        return self.make_workload()

    def _contenders(self, workload: Workload) -> tuple[Contender, list[Contender]]:
        contenders = []
        for name in self.optimizers:
            if name in _VARIANTS:
                contenders += self._family(workload, name)
            elif name in WINDOW_METHODS:
                # Random rows give useless directions, so the weights must not change.
                contenders.append(self._contender(workload, name, {"graft": None, "lr": 0.0}))
                fill_windows(contenders[-1].trainer.optimizer, self.seed)
            else:
                contenders.append(self._contender(workload, name, {}))
        return self._contender(workload, "sgd", {}), contenders

    def _family(self, workload: Workload, name: MethodName) -> list[Contender]:
        recipe, keyword, values, settings = _VARIANTS[name]
        found = []
        for scheme in values:
            changes = {"graft": None, **settings, keyword: scheme}
            contender = self._contender(workload, recipe, changes, f"{METHODS[name].label} {scheme}")
            found.append(replace(contender, scheme=scheme))
        if name == "hylo":
            found = [replace(own, measured=ROWS_REFRESHED, reported=(ROWS_REFRESHED,)) for own in found]
        return found

    def _contender(self, workload: Workload, name: str, changes: Settings, label: str | None = None) -> Contender:
        method = find(name)
        settings, options = method.settings(self.workload, changes), {"device": self.device, "amp": self.amp}
        return Contender(trainer_of(method, workload, settings, self.seed, label, **options))


def _training(workload: Workload, seed: int, device: torch.device) -> Work:
    model, batch = workload.build_model(seed).to(device), moved(next(workload.batches(seed)), device)
    training = counted_flops(lambda: torch.autograd.backward(workload.loss(model, batch)))
    return Work(training, 0.0, factor_flops(model, lambda: workload.loss(model, batch)))


def _work(run: Contender, base: Work) -> Work | None:
    """Return the additional work of a layer method from its plan, which has the mean of a refresh interval."""
    optimizer = run.trainer.optimizer
    if not run.scheme or not isinstance(optimizer, SecondOrderOptimizer):
        return None
    flops = optimizer.plan(batch_size=run.trainer.workload.batch_size).ranks[0].flops
    if not isinstance(optimizer, KFAC | EKFAC):
        base = replace(base, factor=0.0)
    refresh = flops["refresh"] * run.measured.refresh
    return replace(base, precondition=flops["precondition"], refresh=refresh, scale=flops.get("scale", 0.0))


def _figures(run: Contender, reference: Contender, base: Work, gemm: Rate) -> dict[str, Any]:
    sgd, work = summary(reference.times)["plain"], _work(run, base)
    figures: dict[str, Any] = {
        "label": run.trainer.history.label, "times": run.times, "median": summary(run.times),
        "minimum": summary(run.times, min), "optimizer_bytes": optimizer_bytes(run.trainer.optimizer), "amortised": {},
    }  # fmt: skip
    for intervals in run.reported if run.scheme else (MEASURED,):
        entry = {
            "ratio": ratio(run.times, intervals, reference.times),
            "ratio_of_minima": ratio(run.times, intervals, reference.times, min),
        }
        if work is not None:
            entry["floor"] = work.floor(intervals)
            entry["extra_seconds"] = (entry["ratio"] - 1) * sgd
            entry["floor_seconds"] = work.extra(intervals) / (gemm.median * 1e9)
        figures["amortised"][intervals.name if run.scheme else "every step"] = entry
    return figures


def _table(data: dict[str, Any]) -> Table:
    where = f"Threads: {torch.get_num_threads()}." if data["device"] == "cpu" else f"Device: {data['device']}."
    caption = (
        "Ratios are relative to SGD's interleaved steps: of medians (of minima). Floor: FLOPs relative to those of "
        f"SGD's step, {data['training_gflop']:.1f} GFLOP. Extra ms: time of a step beyond SGD's; extra floor ms: the "
        "time of its FLOPs at the measured rate of matrix products, "
        f"{data['gemm_gflops']['median']:.0f} GFLOP/s (best {data['gemm_gflops']['best']:.0f}). "
        f"Copying: {data['copy_gbytes']['median']:.1f} GB/s. {where}"
    )
    title = f"{data['workload']}, batch {data['batch_size']}: step times"
    columns = {
        **report.columns(
            "optimizer = label; plain ms = plain .1f ms; factor ms = factor .1f ms; refresh ms = refresh .1f ms; "
            "intervals"
        ),
        "ratio": lambda row: f"{row['ratio']:.2f} ({row['ratio_of_minima']:.2f})",
        **report.columns("floor = floor .2f; extra ms = extra_seconds .1f ms; extra floor ms = floor_seconds .1f ms"),
    }
    rows = [
        {"label": result["label"], "intervals": name, **result["median"], **entry}
        for result in data["results"]
        for name, entry in result["amortised"].items()
    ]
    return report.table_of(title, rows, columns, caption)


WAYS: Mapping[str, Settings] = {
    "at once": {},
    "stagger": {"stagger": True},
    "overlap": {"overlap": True},
    "stagger, overlap": {"stagger": True, "overlap": True},
}


@dataclass
class Spikes(OnWorkload):
    """Compare the slowest step of K-FAC with the median one, for every way to spread refreshes."""

    workload: WorkloadName = "autoencoder"
    """Workload to train."""
    inverse_methods: tuple[Literal["cholesky", "eigen"], ...] = ("cholesky", "eigen")
    """KFAC's ways to invert factors."""
    factor_update_steps: int = 10
    """Steps between two updates of the factors."""
    inv_update_steps: int = 100
    """Steps between two refreshes."""
    intervals: int = 2
    """Number of timed intervals, after one that is not timed."""

    def run(self) -> int:
        if self.intervals < 1 or self.inv_update_steps < 1:
            raise ValueError(f"there is no step to time in {self.intervals} intervals of {self.inv_update_steps}")
        torch.set_num_threads(self.threads)
        workload = self.make_workload()
        asked: list[tuple[str, str, Settings]] = [
            (method, way, {**changes, "inverse_method": method})
            for method in self.inverse_methods
            for way, changes in WAYS.items()
        ]
        reference = self._times(workload, "sgd", {})
        intervals = {name: getattr(self, name) for name in ("factor_update_steps", "inv_update_steps")}
        results = []
        for method, way, changes in report.tracked(f"{self.workload}, batch {workload.batch_size}", asked):
            times = self._times(workload, "kfac", {**intervals, "refresh_warmup": False, **changes})
            results.append({"method": f"KFAC {method}", "way": way, "times": times})
        data = {"workload": self.workload, "threads": self.threads, "sgd": reference, "results": results}
        report.save(self.out_dir, f"spikes-{self.workload}", [_spike_table(data)], data)
        return 0

    def _times(self, workload: Workload, name: MethodName, changes: Settings) -> list[float]:
        trainer = trainer_of(METHODS[name], workload, METHODS[name].settings(self.workload, changes), self.seed)
        # All variants then have as many refreshes: an overlapping one takes effect a tenth of an interval later.
        for _ in range(self.inv_update_steps + max(1, self.inv_update_steps // 10) + 1):
            trainer.step()
        with no_collections():
            times = [trainer.step() for _ in range(self.intervals * self.inv_update_steps)]
        if isinstance(trainer.optimizer, SecondOrderOptimizer):
            trainer.optimizer.close()  # also ends background work
        return times


def slowest(times: list[float], reference: list[float]) -> tuple[float, float, float, float]:
    median, worst = statistics.median(times), max(times)
    return median, worst, worst / median, statistics.mean(times) / statistics.mean(reference)


def _spike_table(data: Mapping[str, Any]) -> Table:
    keys = ("median", "worst", "ratio", "mean")
    rows = [{**row, **dict(zip(keys, slowest(row["times"], data["sgd"]), strict=True))} for row in data["results"]]
    columns = report.columns(
        "method; refreshes = way; median ms = median .0f ms; worst ms = worst .0f ms; worst / median = ratio .2f; "
        "mean / SGD's mean = mean .2f"
    )
    count = data["threads"]
    title = f"{data['workload']}: wall-clock times of steps, {count} thread{'s' * (count > 1)}"
    return report.table_of(title, rows, columns)
