"""``rank-fraction``: HyLo beside K-FAC: time of a refresh, bytes kept and sent, error, against batch and rows kept.

Time and bytes are of the real optimizers in training: a refresh is what its step takes beyond a plain step, capturing
included. Sent: bytes of one refresh that a rank hands to the collectives under ``CommOpt``, from ``plan()``. Errors are
of one batch, the same for all ways (``benchmarks/few_rows.py``), after a few steps of training: relative distance from
the update that all rows of the batch give with the same damping. K-FAC's factors there are of that batch alone, too;
in training it averages them, which no error of one batch shows.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator
from rich.table import Table

from benchmarks import few_rows, report
from benchmarks.evidence import Cells, Evidence, Figures, Identity, progress
from benchmarks.formulas import kept_rows
from benchmarks.plot import COLOURS, STYLES, styled
from benchmarks.recipes import METHODS, Method, MethodName, Settings
from benchmarks.runner import Trainer, memory_usage
from benchmarks.workloads import Workload, WorkloadName, make_workload
from secondorder import CommOpt, SecondOrderOptimizer

Mode = Literal["kid", "kis"]

INTERVAL = 5
"""Steps from one timed refresh to the next."""
_KINDS = ("factors", "second_order", "rows", "kernel")
_AGREEMENT = "words"
"""Stage of the messages that are no curvature."""


@dataclass
class RankFraction(Evidence):
    """Measure refresh time, bytes and error of HyLo at several batch sizes and shares of rows, beside K-FAC."""

    workload: WorkloadName = "autoencoder"
    """What to train."""
    batch_sizes: tuple[int, ...] = (128, 512, 2048)
    """Examples of a step."""
    fractions: tuple[float, ...] = (0.05, 0.1, 0.25, 0.5, 1.0)
    """Shares of the examples whose rows are kept."""
    modes: tuple[Mode, ...] = get_args(Mode)
    """Ways to choose them."""
    dampings: tuple[float, ...] = (0.1, 1.0)
    """λ of the errors, as a multiple of the mean diagonal of each layer's kernel."""
    refreshes: int = 4
    """Timed refreshes of each."""
    warmup: int = 30
    """Steps of K-FAC, with its recipe, before the errors are looked at."""
    world: int = 4
    """Ranks of the plan whose bytes are sent."""

    def run(self) -> int:
        self._check()
        cells = self.open_cells(f"rank-fraction-{self.workload}")
        rows: list[Figures] = []
        per_batch = 2 + len(self.fractions) * len(self.modes)
        with progress(f"rank fraction, {self.workload}", per_batch * len(self.batch_sizes)) as advance:
            for batch_size in self.batch_sizes:
                workload = make_workload(self.workload, self.data_dir, self.size, batch_size)
                advance(f"errors, batch {batch_size}")
                errors = self._errors(cells, workload)
                rows.append(_descent(workload.batch_size, errors))
                advance(f"KFAC, batch {batch_size}")
                rows += self._row(cells, workload, None, None, errors)
                for fraction in sorted(self.fractions):
                    for mode in self.modes:
                        advance(f"HyLo, batch {batch_size}, {mode} {fraction:g}")
                        rows += self._row(cells, workload, mode, fraction, errors)
        path = self.publish(cells, [_table(self.workload, self.world, self.dampings, rows)], {
            "workload": self.workload, "world": self.world, "rows": rows,
        })  # fmt: skip
        if any(row["refresh_seconds"] is not None for row in rows):
            plot_rows(rows, self.dampings, f"{self.workload}: HyLo with shares of its rows, and K-FAC", path)
            report.print_path("plot", path)
        return 0

    def _check(self) -> None:
        if min(self.batch_sizes, default=0) < 1:
            raise ValueError(f"batch_sizes must be numbers of examples, got {self.batch_sizes}")
        if min(self.fractions, default=0.0) <= 0 or max(self.fractions, default=0.0) > 1:
            raise ValueError(f"fractions must be in (0, 1], got {self.fractions}")
        if min(self.dampings, default=1.0) <= 0:
            raise ValueError(f"dampings must be positive, got {self.dampings}")
        for name in ("refreshes", "world"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.warmup < 0:
            raise ValueError(f"warmup must not be negative, got {self.warmup}")

    def _about(self, workload: Workload) -> dict[str, Any]:
        return {"workload": self.workload, "size": self.size, "batch_size": workload.batch_size, "seed": self.seed}

    def _trainer(self, name: MethodName, workload: Workload, changes: Settings) -> Trainer:
        method: Method = METHODS[name]
        make = partial(method.build, workload=self.workload, changes=changes)
        closure = method.needs_closure(self.workload, changes)
        return Trainer(method.label, workload, make, self.seed, closure=closure)

    # ------------------------------------------------------------------ time and bytes
    def _row(
        self, cells: Cells, workload: Workload, mode: Mode | None, fraction: float | None, errors: Figures | None
    ) -> list[Figures]:
        """Return one row of the table."""
        name: MethodName = "kfac" if mode is None else "hylo"
        changes = self._changes(workload, mode, fraction)
        identity: Identity = {
            **self._about(workload),
            "optimizer": name,
            "settings": dict(METHODS[name].settings(self.workload, changes)),
            "refreshes": self.refreshes,
            "world": self.world,
        }
        found = cells.run(identity, partial(self._measure, name, workload, changes))
        if found is None:
            return []
        way = "kfac" if mode is None else f"{mode} {fraction:g}"
        kept = None if fraction is None else kept_rows(workload.batch_size, fraction, workload.batch_size)
        by_damping = _distances_of(errors, way)
        head = {"batch_size": workload.batch_size, "mode": mode, "fraction": fraction, "rows": kept}
        return [{**head, **found, "errors": by_damping}]

    def _changes(self, workload: Workload, mode: Mode | None, fraction: float | None) -> Settings:
        if mode is None:
            return {"factor_update_steps": INTERVAL, "inv_update_steps": INTERVAL, "refresh_warmup": False}
        most = workload.batch_size * self.world
        return {"mode": mode, "rank_fraction": fraction, "max_rank": most, "update_steps": INTERVAL}

    def _measure(self, name: MethodName, workload: Workload, changes: Settings) -> Figures:
        """Train, and time the steps with a refresh and those without."""
        trainer = self._trainer(name, workload, changes)
        for _ in range(INTERVAL * (self.refreshes + 1)):  # the first refresh allocates, and is not counted
            trainer.step()
        seconds = trainer.history.processor_seconds[INTERVAL:]
        with_refresh = statistics.median(seconds[::INTERVAL])
        plain = statistics.median(s for step, s in enumerate(seconds) if step % INTERVAL)
        optimizer = trainer.optimizer
        assert isinstance(optimizer, SecondOrderOptimizer)
        memory = memory_usage(optimizer)
        plan = optimizer.plan(self.world, CommOpt(), batch_size=workload.batch_size)
        sent = max(sum(n for stage, n in rank.sent.items() if stage != _AGREEMENT) for rank in plan.ranks)
        optimizer.close()
        return {
            "label": trainer.history.label,
            "refresh_seconds": max(0.0, with_refresh - plain),
            "plain_seconds": plain,
            "held": sum(memory.get(kind, 0) for kind in _KINDS),
            "sent": sent * INTERVAL,
        }

    # ------------------------------------------------------------------ errors
    def _errors(self, cells: Cells, workload: Workload) -> Figures | None:
        identity: Identity = {
            **self._about(workload),
            "errors_after": self.warmup,
            "settings": dict(METHODS["kfac"].settings(self.workload)),
            "fractions": sorted(self.fractions),
            "dampings": list(self.dampings),
        }
        return cells.run(identity, partial(self._distances, workload))

    def _distances(self, workload: Workload) -> Figures:
        trainer = self._trainer("kfac", workload, {})
        for _ in range(self.warmup):
            trainer.step()
        layers = few_rows.captured(trainer, workload, self.seed + 1)
        size = workload.batch_size
        ranks = {f"{fraction:g}": kept_rows(size, fraction, size) for fraction in self.fractions}
        found = {f"{damping:g}": few_rows.errors(layers, damping, ranks, self.seed) for damping in self.dampings}
        return {"errors": found, "layers": len(layers), "loss": trainer.history.loss_at(self.warmup)}


def _distances_of(errors: Figures | None, way: str) -> dict[str, dict[str, float] | None]:
    """Return error and cosine of one way, by damping."""
    return {} if errors is None else {key: own.get(way) for key, own in errors["errors"].items()}


def _descent(batch_size: int, errors: Figures | None) -> Figures:
    """Return the row of the gradient itself, which costs nothing."""
    head = {"label": "gradient", "batch_size": batch_size, "mode": None, "fraction": None, "rows": None}
    return {**head, "refresh_seconds": None, "errors": _distances_of(errors, "none")}


def _table(workload: str, world: int, dampings: Sequence[float], rows: Sequence[Mapping[str, Any]]) -> Table:
    columns = ["optimizer", "batch", "rows", "refresh ms", "plain ms", "held MB", "sent MB"]
    for damping in dampings:
        columns += [f"error, λ {damping:g}", "cosine"]
    cells = [(*_costs(row), *_errors_of(row, dampings)) for row in rows]
    caption = (
        "Refresh: processor time of a step that refreshes, statistics included, beyond that of a plain one. Held: "
        "factors and their eigenvectors or inverses, rows and kernels. Sent: by a rank at a refresh, CommOpt on "
        f"{world} ranks. Error: distance from the update of all rows of one batch, relative, λ as a multiple of the "
        "mean diagonal of the kernel; that of the gradient is with its best length on each layer."
    )
    return report.make_table(f"{workload}: rows kept, and K-FAC", columns, cells, caption)


def _costs(row: Mapping[str, Any]) -> tuple[str, ...]:
    label = row["label"] if row["mode"] is None else f"{row['label']} {row['mode'].upper()} {row['fraction']:g}"
    head = (label, f"{row['batch_size']:,}", "-" if row["rows"] is None else f"{row['rows']:,}")
    if row["refresh_seconds"] is None:
        return (*head, "-", "-", "-", "-")
    times = f"{1e3 * row['refresh_seconds']:.0f}", f"{1e3 * row['plain_seconds']:.0f}"
    return (*head, *times, f"{row['held'] / 1e6:.2f}", f"{row['sent'] / 1e6:.2f}")


def _errors_of(row: Mapping[str, Any], dampings: Sequence[float]) -> list[str]:
    cells = []
    for damping in dampings:
        found = row["errors"].get(f"{damping:g}") or {}
        cells += [_short(found.get("error")), _short(found.get("cos"))]
    return cells


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


# ---------------------------------------------------------------------- the picture
def plot_rows(rows: Sequence[Mapping[str, Any]], dampings: Sequence[float], title: str, path: Path) -> None:
    """Draw refresh time, bytes held and error against the batch size, a line for each share of rows."""
    rows = [row for row in rows if row["refresh_seconds"] is not None]
    mode = next((row["mode"] for row in rows if row["mode"] is not None), None)
    fractions = list(dict.fromkeys(row["fraction"] for row in rows if row["mode"] in (None, mode)))
    sizes = sorted({row["batch_size"] for row in rows})
    with styled():
        figure = Figure(figsize=(12, 4), layout="constrained")
        panels = figure.subplots(1, 3)
        for index, fraction in enumerate(fractions):
            own = [row for row in rows if row["fraction"] == fraction and row["mode"] in (None, mode)]
            label = "KFAC" if fraction is None else f"{str(mode).upper()} {fraction:g}"
            style = {"color": COLOURS[index % len(COLOURS)], "linestyle": STYLES[index % len(STYLES)], "marker": "o"}
            x = [row["batch_size"] for row in own]
            panels[0].plot(x, [1e3 * row["refresh_seconds"] for row in own], label=label, markersize=4, **style)
            panels[1].plot(x, [row["held"] / 1e6 for row in own], markersize=4, **style)
            known = (
                []
                if not dampings
                else [(row["batch_size"], (row["errors"].get(f"{dampings[0]:g}") or {}).get("error")) for row in own]
            )
            points = [(size, error) for size, error in known if error]  # with all rows there is none to draw
            panels[2].plot([size for size, _ in points], [error for _, error in points], markersize=4, **style)
        heads = ("refresh, ms", "held, MB", f"error, λ {dampings[0]:g}" if dampings else "error")
        for axes, head in zip(panels, heads, strict=True):
            _dress(axes, head, sizes)
        figure.legend(loc="outside upper right", ncols=len(fractions), frameon=False, fontsize=9)
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        figure.savefig(path, dpi=150)


def _dress(axes: Axes, label: str, sizes: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("examples of a step")
    axes.set_title(label, loc="left", fontsize=10)
    axes.xaxis.set_major_locator(FixedLocator([float(size) for size in sizes]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:,.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="y", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
