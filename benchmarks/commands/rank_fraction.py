"""``rank-fraction``: HyLo beside K-FAC: time of a refresh, bytes kept and sent, error, against batch and rows kept.

Time and bytes are of the real optimizers in training: a refresh is what its step takes beyond a plain step, capturing
included. Sent: bytes of one refresh that a rank hands to the collectives under ``CommOpt``, from ``plan()``. Errors are
of one batch, the same for all ways (``benchmarks/few_rows.py``), after a few steps of training: relative distance from
the update that all rows of the batch give with the same damping. K-FAC's factors there are of that batch alone, too;
in training it averages them, which no error of one batch shows.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from benchmarks import few_rows, report
from benchmarks.evidence import Cells, Evidence, Figures, Shown, trainer_of
from benchmarks.few_rows import kept_rows
from benchmarks.plot import Panel, Row, plot_rows
from benchmarks.recipes import METHODS, MethodName, Settings
from benchmarks.report import value
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

    @property
    def stem(self) -> str:
        return f"rank-fraction-{self.workload}"

    @property
    def runs(self) -> int:
        return (2 + len(self.fractions) * len(self.modes)) * len(self.batch_sizes)

    def check_options(self) -> None:
        self.check(positive=("batch_sizes", "dampings", "refreshes", "world"), shares=("fractions",))
        if self.warmup < 0:
            raise ValueError(f"warmup must not be negative, got {self.warmup}")

    def rows(self, cells: Cells, advance: Callable[[str], None]) -> list[Figures]:
        rows: list[Figures] = []
        ways = [(None, None), *((mode, fraction) for fraction in sorted(self.fractions) for mode in self.modes)]
        for batch_size in self.batch_sizes:
            workload = make_workload(self.workload, self.data_dir, self.size, batch_size)
            advance(f"errors, batch {batch_size}")
            errors = self._errors(cells, workload)
            rows.append(_descent(workload.batch_size, errors))
            for mode, fraction in ways:
                advance(
                    f"KFAC, batch {batch_size}" if mode is None else f"HyLo, batch {batch_size}, {mode} {fraction:g}"
                )
                rows += self._row(cells, workload, mode, fraction, errors)
        return rows

    def show(self, rows: list[Figures]) -> Shown:
        table = report.table_of(
            f"{self.workload}: rows kept, and K-FAC", rows, _columns(self.dampings), _caption(self.world)
        )
        timed = [row for row in rows if row["refresh_seconds"] is not None]
        title = f"{self.workload}: HyLo with shares of its rows, and K-FAC"
        draw = partial(_plot, timed, self.dampings, title) if timed else None
        return Shown([table], {"workload": self.workload, "world": self.world}, draw)

    def _trainer(self, name: MethodName, workload: Workload, changes: Settings) -> Trainer:
        return trainer_of(name, METHODS[name].settings(self.workload, changes), workload, self.seed)

    # ------------------------------------------------------------------ time and bytes
    def _row(
        self, cells: Cells, workload: Workload, mode: Mode | None, fraction: float | None, errors: Figures | None
    ) -> list[Figures]:
        name: MethodName = "kfac" if mode is None else "hylo"
        changes = self._changes(workload, mode, fraction)
        settings = METHODS[name].settings(self.workload, changes)
        more = {"seed": self.seed, "refreshes": self.refreshes, "world": self.world}
        identity = self.about(workload, name, settings, **more)
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
        identity = self.about(
            workload, "kfac", METHODS["kfac"].settings(self.workload), seed=self.seed, errors_after=self.warmup,
            fractions=sorted(self.fractions), dampings=list(self.dampings),
        )  # fmt: skip
        identity = {key: found for key, found in identity.items() if key != "optimizer"}
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
    return {} if errors is None else {key: own.get(way) for key, own in errors["errors"].items()}


def _descent(batch_size: int, errors: Figures | None) -> Figures:
    head = {"label": "gradient", "batch_size": batch_size, "mode": None, "fraction": None, "rows": None}
    return {**head, "refresh_seconds": None, "errors": _distances_of(errors, "none")}


def _columns(dampings: Sequence[float]) -> Mapping[str, report.Column]:
    columns = {
        "optimizer": lambda row: row["label"] + (f" {row['mode'].upper()} {row['fraction']:g}" if row["mode"] else ""),
        "batch": value("batch_size", ","),
        "rows": value("rows", ","),
        "refresh ms": value("refresh_seconds", ".0f", 1e3),
        "plain ms": value("plain_seconds", ".0f", 1e3),
        "held MB": value("held", ".2f", 1e-6),
        "sent MB": value("sent", ".2f", 1e-6),
    }
    for damping in dampings:
        columns[f"error, λ {damping:g}"] = partial(_distance, damping, "error")
        columns[f"cosine, λ {damping:g}"] = partial(_distance, damping, "cos")
    return columns


def _distance(damping: float, key: str, row: Row) -> str:
    return value(key, ".3g")(row["errors"].get(f"{damping:g}") or {})


def _caption(world: int) -> str:
    return (
        "Refresh: processor time of a step that refreshes, statistics included, beyond that of a plain one. Held: "
        "factors and their eigenvectors or inverses, rows and kernels. Sent: by a rank at a refresh, CommOpt on "
        f"{world} ranks. Error: distance from the update of all rows of one batch, relative, λ as a multiple of the "
        "mean diagonal of the kernel; that of the gradient is with its best length on each layer."
    )


def _plot(rows: Sequence[Row], dampings: Sequence[float], title: str, path: Path) -> None:
    """Draw refresh time, bytes held and error at the first damping against the batch, a line for each share of rows.

    Of HyLo the first mode is drawn.
    """
    mode = next((row["mode"] for row in rows if row["mode"] is not None), None)
    panels = [
        Panel("refresh, ms", {"": lambda row: 1e3 * row["refresh_seconds"]}),
        Panel("held, MB", {"": lambda row: row["held"] / 1e6}),
    ]
    if dampings:
        first = f"{dampings[0]:g}"
        panels.append(Panel(f"error, λ {first}", {"": lambda row: (row["errors"].get(first) or {}).get("error")}))
    drawn = [row for row in rows if row["mode"] in (None, mode)]
    plot_rows(
        drawn, panels, lambda row: row["batch_size"],
        lambda row: "KFAC" if row["mode"] is None else f"{row['mode'].upper()} {row['fraction']:g}",
        (title, "examples of a step"), path,
    )  # fmt: skip
