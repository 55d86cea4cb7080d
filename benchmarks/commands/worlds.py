"""``worlds``: time of a step of K-FAC, DP-KFAC and HyLo against the number of ranks, measured at few and modelled on.

Every rank has the same number of examples. Measured are processes of this machine, one thread each, over gloo: the
processor seconds of the busiest rank, so that ranks that share a core do not disturb each other. What a step of one
rank spends on training, preconditioning, statistics and refresh is then scaled with the FLOPs that ``plan()`` counts
for every rank of a world, and where those are more than one rank's, they take what matrix products take: the line. The
points at two and four ranks check it; beyond them it is a model. The tests run the real code of K-FAC as one rank of
1,024 in a process group that sends nothing, and find what was planned; HyLo's figures at large worlds are counted only.
The network is a model everywhere: bytes and messages of the plan over a given link, nothing overlapping; the processes
of one machine do not have one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from matplotlib.axes import Axes

from benchmarks import report, timed_ranks
from benchmarks.commands.scaling import Scaling
from benchmarks.evidence import Cells, Evidence, Figures, Identity, progress
from benchmarks.machine import gemm_gflops
from benchmarks.plot import Panel, Row, plot_rows
from benchmarks.report import value
from benchmarks.timed_ranks import Timed
from benchmarks.timing import MEASURED, REPORTED, ROWS_REFRESHED, Intervals, StepClass
from benchmarks.workloads import WorkloadName
from secondorder.comm import CommStrategy
from secondorder.comm.names import from_name
from secondorder.plan.plan import Plan, RankPlan

Way = Literal["kfac", "kfac_mem_opt", "dp_kfac", "hylo"]


@dataclass(frozen=True)
class _Method:
    """One line of the picture."""

    label: str
    name: str
    """For ``secondorder.create``."""
    strategy: str
    timed: Intervals
    """Of the measured run."""
    reported: Intervals
    """Of a run as it is meant."""


_FACTORS = REPORTED[0]
_METHODS: dict[Way, _Method] = {
    "kfac": _Method("K-FAC", "kfac", "comm_opt", MEASURED, _FACTORS),
    "kfac_mem_opt": _Method("K-FAC, MemOpt", "kfac", "mem_opt", MEASURED, _FACTORS),
    "dp_kfac": _Method("DP-KFAC", "dp_kfac", "local_factors", MEASURED, _FACTORS),
    "hylo": _Method("HyLo", "hylo", "comm_opt", ROWS_REFRESHED, ROWS_REFRESHED),
}
_SGD = _Method("SGD", "", "comm_opt", ROWS_REFRESHED, ROWS_REFRESHED)


@dataclass
class Worlds(Evidence):
    """Model the step time of distributed methods up to 1,024 ranks, with points measured on this machine."""

    workload: WorkloadName = "autoencoder"
    """What to train."""
    methods: tuple[Way, ...] = get_args(Way)
    """Lines of the picture."""
    batch_size: int = 128
    """Examples of each rank."""
    worlds: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    """Numbers of ranks."""
    measured: tuple[int, ...] = (1, 2, 4)
    """Those that are run, 1 among them."""
    rounds: int = 3
    """Refresh intervals that are timed."""
    link_gbps: float = 100.0
    """Rate of the network, in gigabits per second and rank."""
    node_gbps: float = 2400.0
    """Rate inside a node of 8 ranks."""
    latency_us: float = 10.0
    """Of one message between two ranks, in microseconds."""

    def run(self) -> int:
        self._check()
        cells = self.open_cells(f"worlds-{self.workload}")
        rows: list[Figures] = []
        with progress(f"worlds, {self.workload}", len(self.methods) * (1 + len(self.measured)) + 1) as advance:
            advance("SGD")
            training = self._cell(cells, None, 1)
            rates = cells.run({"rates": "matrix products", "threads": self.threads}, _rates)
            for way in self.methods:
                points: dict[int, Figures] = {}
                for world in sorted({1, *self.measured}):
                    advance(f"{_METHODS[way].label}, {world} ranks")
                    found = self._cell(cells, way, world)
                    points |= {world: found} if found else {}
                if training and rates and 1 in points:
                    advance(f"{_METHODS[way].label}, plans")
                    rows += self._lines(way, points, training, rates)
        path = self.publish(cells, [report.table_of(self._title(), rows, _columns(), _caption(self._assumptions()))], {
            "workload": self.workload, "batch_size": self.batch_size, "assumptions": self._assumptions(), "rows": rows,
        })  # fmt: skip
        if rows:
            _plot(rows, self._title(), self._assumptions(), path)
            report.print_path("plot", path)
        return 0

    def _check(self) -> None:
        self.check(positive=("worlds", "measured", "link_gbps", "node_gbps", "batch_size", "rounds"))

    def _title(self) -> str:
        return f"{self.workload}, {self.batch_size} examples per rank: step of the busiest rank"

    def _assumptions(self) -> str:
        return (
            f"lines are a model of one rank's measured step and planned FLOPs; network of {self.link_gbps:g} Gbit/s, "
            f"{self.node_gbps:g} inside a node of 8, {self.latency_us:g} µs, no overlap"
        )

    # ------------------------------------------------------------------ measuring
    def _cell(self, cells: Cells, way: Way | None, world: int) -> Figures | None:
        identity: Identity = {
            "workload": self.workload,
            "size": self.size,
            "batch_size": self.batch_size,
            "method": way or "sgd",
            "world": world,
            "rounds": self.rounds,
            "seed": self.seed,
        }
        return cells.run(identity, partial(self._measure, way, world))

    def _measure(self, way: Way | None, world: int) -> Figures:
        return {"ranks": timed_ranks.measure(self._timed(way), world)}

    def _timed(self, way: Way | None) -> Timed:
        method = _METHODS[way] if way else _SGD
        own = (self.workload, self.size, self.data_dir, self.batch_size, self.seed, self.rounds)
        return Timed(*own, method.name or None, method.strategy, method.timed)

    # ------------------------------------------------------------------ modelling
    def _lines(self, way: Way, points: Mapping[int, Figures], training: Figures, rates: Figures) -> list[Figures]:
        method = _METHODS[way]
        base = training["ranks"][0]["plain"]
        own = points[1]["ranks"][0]
        spent = _spent(method, own, base)
        optimizer = self._optimizer_after_a_step(way)
        alone = optimizer.plan(1, from_name(method.strategy), batch_size=self.batch_size).ranks[0]
        nbytes = sum(p.numel() * p.element_size() for group in optimizer.param_groups for p in group["params"])
        rows = []
        for world in sorted({*self.worlds, *points}):
            comm = from_name(method.strategy)
            plan = optimizer.plan(world, comm, batch_size=self.batch_size)
            computing = [base + _computing(rank, alone, spent, rates) for rank in plan.ranks]
            row: Figures = {"method": way, "label": method.label, "world": world, "training": base}
            row["computing"] = max(computing)
            row["network"] = self._network(comm, plan, nbytes)
            row["measured"] = _busiest(method, points[world]["ranks"]) if world in points else None
            row["notes"] = plan.notes
            rows.append(row)
        optimizer.close()
        return rows

    def _optimizer_after_a_step(self, way: Way) -> Any:
        timed = replace(self._timed(way), intervals=_METHODS[way].reported)
        workload = timed.make_workload()
        model = workload.build_model(self.seed)
        optimizer = timed.make_optimizer(model, None)
        workload.loss(model, next(workload.batches(self.seed))).backward()
        optimizer.step()
        return optimizer

    def _network(self, comm: CommStrategy, plan: Plan, nbytes: int) -> float:
        world = plan.world_size
        if world == 1:
            return 0.0
        link = Scaling(link_gbps=self.link_gbps, node_gbps=self.node_gbps, latency_us=self.latency_us)
        gradients = 2 * (world - 1) / world * nbytes / link.link(world)
        different = {tuple(rank.wire.items()): rank for rank in plan.ranks}
        return gradients + max(link.messages(comm, rank, world) for rank in different.values())


def _rates() -> Figures:
    """Measure matrix products: float64 for kernels and their inverses, float32 for all else."""
    single, double = (1e9 * gemm_gflops(3, dtype=dtype).median for dtype in (torch.float32, torch.float64))
    return {"precondition": single, "statistics": single, "refresh": double}


def _spent(method: _Method, own: Mapping[str, float], base: float) -> dict[str, float]:
    """Return what a step of one rank spends on each stage, on average over the reported intervals."""
    plain = max(0.0, own["plain"] - base)
    with_factors = own.get("factor", own["plain"])
    spent = {"precondition": plain, "refresh": max(0.0, own["refresh"] - with_factors) / method.reported.refresh}
    if "factor" in own:
        spent["statistics"] = max(0.0, with_factors - own["plain"]) / method.reported.factor
    return spent


def _computing(rank: RankPlan, alone: RankPlan, spent: Mapping[str, float], rates: Mapping[str, float]) -> float:
    """Return the seconds of a rank beyond training.

    Fewer FLOPs than one rank alone does take time in proportion. More of them, of HyLo whose rows come from all ranks,
    take what matrix products take: the time of one rank is too little work to be a rate.
    """
    total = 0.0
    for stage, seconds in spent.items():
        whole, own = alone.flops.get(stage, 0.0), rank.flops.get(stage, 0.0)
        share = min(1.0, own / whole) if whole else 1.0
        total += share * seconds + max(0.0, own - whole) / rates[stage]
    return total


def _busiest(method: _Method, ranks: Sequence[Mapping[StepClass, float]]) -> float:
    return max(method.reported.amortise(dict(rank)) for rank in ranks)


# ---------------------------------------------------------------------- what is shown
def _columns() -> Mapping[str, report.Column]:
    def total(row: Row) -> float:
        return float(row["computing"] + row["network"])

    return {
        "optimizer": value("label"),
        "ranks": value("world", ","),
        "computing ms": value("computing", ".1f", 1e3),
        "measured ms": value("measured", ".1f", 1e3),
        "measured / model": lambda row: f"{row['measured'] / row['computing']:.2f}" if row["measured"] else "-",
        "network ms": value("network", ".1f", 1e3),
        "sum ms": lambda row: f"{1e3 * total(row):.1f}",
        "share of SGD": lambda row: f"{row['training'] / total(row):.0%}",
    }


def _caption(assumptions: str) -> str:
    return (
        "Computing: processor time of the busiest rank, modelled from one rank. Measured: the same of real processes, "
        "with the work of sending to each other. Share of SGD: its step over the sum. Assumed: "
        f"{assumptions}."
    )


def _plot(rows: Sequence[Row], title: str, assumptions: str, path: Path) -> None:
    def reference(panels: Sequence[Axes]) -> None:
        axes = panels[0]
        axes.axhline(1e3 * rows[0]["training"], color="0.6", linewidth=1.2, label="SGD")
        axes.plot([], [], "o", color="0.4", label="measured")
        axes.plot([], [], "--", color="0.4", label="with the network (model)")
        axes.set_title(assumptions, fontsize=7, color="0.4", wrap=True)

    series: dict[str, Callable[[Row], float | None]] = {
        "-": lambda row: 1e3 * row["computing"],
        "--": lambda row: 1e3 * (row["computing"] + row["network"]),
        "o": lambda row: None if row["measured"] is None else 1e3 * row["measured"],
    }
    panels = [Panel("processor ms of a step", series, log=False)]
    plot_rows(rows, panels, lambda row: row["world"], lambda row: row["label"], (title, "ranks"), path, reference)
