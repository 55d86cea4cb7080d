"""``density``: what a sparse window of gradients loses and saves: loss and metric at the end against entries kept.

Sparse M-FAC keeps of each gradient the largest entries of every block and feeds the rest back (EFCP, Modoranu,
Kalinov, Kurtic, Frantar and Alistarh, "Error feedback can accurately compress preconditioners", 2023, arXiv
2306.06098, which claims up to 99 % without a loss of accuracy). All densities, the dense window and the methods
without a window train with the same seeds, batches and schedule; dense and sparse windows share their settings, too.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from rich.table import Table

from benchmarks import report
from benchmarks.compare.roster import find, recipe_on
from benchmarks.compare.runs import curve
from benchmarks.evidence import Evidence, Figures, Identity, attempt, notes_text, progress, train_until
from benchmarks.footprint import kept
from benchmarks.peers import evaluating
from benchmarks.plot import COLOURS, styled
from benchmarks.recipes import COSINE, Settings, window_keywords
from benchmarks.runner import WINDOW, Trainer, memory_usage
from benchmarks.schedules import make_schedule
from benchmarks.workloads import Workload, WorkloadName, make_workload
from secondorder import TopK

Choice = Literal["tuned", "published"]

PUBLISHED: Settings = {
    "lr": 1e-3,
    "momentum": 0.0,
    "damping": 1e-4,
    "weight_decay": 1e-4,
    "window_size": 1024,
    "scale": "window",
}
"""For ResNet-20 on CIFAR-10 with density 0.01, batch 128 and 164 epochs."""
SOURCE = "README and scripts of github.com/IST-DASLab/EFCP, ResNet-20 on CIFAR-10; 164 epochs there"

COLUMNS = ("window", "kept", "loss", "spread", "metric", "spread", "seconds", "window MB", "state MB", "dense / this")
_WINDOW = ("window", "error", "gram")


@dataclass(frozen=True)
class _Entry:
    """One line of the table."""

    label: str
    optimizer: str
    settings: Settings
    share: float | None
    """Of the entries of a gradient that a row keeps; None without a window."""
    note: str = ""


@dataclass
class Density(Evidence):
    """Train with windows of several densities, with a dense one and without, and compare the end and the bytes."""

    workload: WorkloadName = "resnet20"
    """What to train."""
    densities: tuple[float, ...] = (0.001, 0.003, 0.01, 0.03, 0.1)
    """Shares of the entries of a block that are kept; of a block of 4096 never fewer than 8."""
    references: tuple[str, ...] = ("sgd", "adamw")
    """Methods without a window, with their recipes."""
    settings: Choice = "tuned"
    """Keywords of all windows: the recipe of sparse_mfac, or those published for ResNet-20."""
    factor: float = 1.0
    """Multiple of the learning rate of all windows."""
    window_size: int | None = None
    """Rows; unset: as the settings have it."""
    steps: int | None = None
    """Optimizer steps; unset: the workload's own number."""
    seeds: int = 3
    """Runs of each, from --seed on."""
    evaluate: bool = False
    """Take all held-out data, where the workload would take a part of it to save time."""

    def run(self) -> int:
        """Run the command, and return 0, or 1 when a run failed or diverged."""
        if min(self.densities, default=0.5) <= 0 or max(self.densities, default=0.5) > 1:
            raise ValueError(f"densities must be in (0, 1], got {self.densities}")
        for name in ("seeds", "window_size", "steps", "factor"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")
        stem = f"density-{self.workload}" + ("-published" if self.settings == "published" else "")
        cells = self.open_cells(stem)
        workload = make_workload(self.workload, self.data_dir, self.size)
        steps = workload.steps[self.size] if self.steps is None else self.steps
        entries = list(self._entries(workload))
        runs: dict[str, list[Figures]] = {entry.label: [] for entry in entries}
        with progress(f"density, {self.workload}", self.seeds * len(entries)) as advance:
            for seed in range(self.seed, self.seed + self.seeds):
                for entry in entries:
                    advance(f"{entry.label}, seed {seed}")
                    identity = self._identity(entry, workload, steps, seed)
                    found = cells.run(identity, partial(attempt, partial(self._train, entry, workload, steps, seed)))
                    runs[entry.label] += [found] if found else []
        rows = [_summary(entry, runs[entry.label]) for entry in entries]
        about = {"workload": self.workload, "steps": steps, "metric": workload.metric, "settings": self.settings}
        source = SOURCE if self.settings == "published" else "the benchmarks' recipe"
        path = self.publish(cells, [self._table(about, rows)], {**about, "source": source, "rows": rows})
        if any(row["loss"] is not None and row["share"] is not None for row in rows):
            plot_density(rows, f"{self.workload}, {steps} steps: loss against the entries kept", path)
            report.print_path("plot", path)
        return int(any(run["failed"] or run["diverged"] for own in runs.values() for run in own))

    def _entries(self, workload: Workload) -> Iterator[_Entry]:
        """Yield the lines of the table."""
        for name in self.references:
            recipe = recipe_on(name, workload, self.size, self.data_dir)
            yield _Entry(find(name).label, name, recipe.settings, None, recipe.note)
        sizes = [p.numel() for p in workload.build_model(self.seed).parameters()]
        recipe = recipe_on("sparse_mfac", workload, self.size, self.data_dir)
        note = "" if self.settings == "published" else recipe.note
        shared = dict(PUBLISHED) if self.settings == "published" else dict(recipe.settings)
        shared["lr"] = float(f"{float(shared['lr'] or 0) * self.factor:.6g}")
        if self.window_size is not None:
            shared["window_size"] = self.window_size
        for density in sorted(self.densities):
            own = {**shared, "density": density}
            yield _Entry(f"{100 * density:g} %", "sparse_mfac", own, _kept_share(sizes, own), note)
        dense = {key: value for key, value in shared.items() if key not in window_only(shared)}
        yield _Entry("dense", "mfac", dense, 1.0, note)

    def _identity(self, entry: _Entry, workload: Workload, steps: int, seed: int) -> Identity:
        return {
            "optimizer": entry.optimizer,
            "settings": dict(entry.settings),
            "workload": self.workload,
            "size": self.size,
            "batch_size": workload.batch_size,
            "steps": steps,
            "seed": seed,
            "everything": self.evaluate,
        }

    def _train(self, entry: _Entry, workload: Workload, steps: int, seed: int) -> Figures:
        method = find(entry.optimizer)
        make = partial(method.construct, **entry.settings)
        schedule = partial(make_schedule, COSINE, steps)
        trainer = Trainer(entry.label, workload, make, seed, schedule, method.needs_closure(None, entry.settings))
        end = train_until(trainer, steps)
        history = trainer.history
        metric = None
        if end != "diverged":
            with evaluating(trainer.optimizer, trainer.model, workload):
                metric = workload.evaluate(trainer.model, self.evaluate)
        return {
            "diverged": end == "diverged",
            "loss": history.loss_at(len(history.losses)),
            "metric": metric,
            "processor_seconds": sum(history.processor_seconds),
            "memory": memory_usage(trainer.optimizer),
            "curve": curve(history),
        }

    def _table(self, about: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Table:
        dense = next((row["window_bytes"] for row in rows if row["share"] == 1.0 and row["window_bytes"]), None)
        columns = [about["metric"] if column == "metric" else column for column in COLUMNS]
        cells = [_cells(row, dense) for row in rows]
        caption = (
            f"Means over {self.seeds} seeds, none where a run was lost; spread: largest minus smallest. "
            f"Loss: mean of the last {WINDOW} steps. "
            "Kept: of all entries of a gradient; a block keeps at least 8. Window: rows, residual and Gram matrix. "
            "Schedule: warm-up over a twentieth, then cosine to nothing. "
        )
        caption += f"Windows: {SOURCE}." if self.settings == "published" else "Windows: the recipe of sparse_mfac."
        caption += notes_text(rows)
        return report.make_table(f"{self.workload}, {about['steps']} steps", columns, cells, caption)


def window_only(settings: Settings) -> set[str]:
    """Return the keywords that a dense window does not take."""
    return {"density", "block_size", "value_dtype", "error_feedback", "error_bits", "rank"} & set(settings)


def _kept_share(sizes: Sequence[int], settings: Settings) -> float:
    """Return the share of the entries of a gradient that a row really keeps."""
    rule = window_keywords(settings)["compression"]
    assert isinstance(rule, TopK)
    if rule.density >= 1:
        return 1.0
    entries = 0
    for size in sizes:
        whole, rest = divmod(size, rule.block_size)
        entries += whole * kept(rule.block_size, rule) + (kept(rest, rule) if rest else 0)
    return entries / sum(sizes)


def _summary(entry: _Entry, runs: Sequence[Figures]) -> Figures:
    """Return one row."""
    whole = [run for run in runs if not run["failed"] and not run["diverged"]]
    row: Figures = {
        "label": entry.label,
        "optimizer": entry.optimizer,
        "settings": dict(entry.settings),
        "share": entry.share,
        "note": entry.note,
        "runs": len(runs),
        "failed": [run["failed"] for run in runs if run["failed"]],
        "diverged": sum(bool(run.get("diverged")) for run in runs),
    }
    for key in ("loss", "metric", "processor_seconds"):
        values = [run[key] for run in whole] if len(whole) == len(runs) else []
        row[key] = statistics.fmean(values) if values else None
        row[f"{key}_spread"] = max(values) - min(values) if values else None
    memory = whole[0]["memory"] if whole else {}
    row["window_bytes"] = sum(memory.get(kind, 0) for kind in _WINDOW) if whole else None
    row["state_bytes"] = memory.get("total")
    return row


def _cells(row: Mapping[str, Any], dense: int | None) -> tuple[str, ...]:
    label, share = row["label"], "-" if row["share"] is None else f"{100 * row['share']:.2f} %"
    window, state = row["window_bytes"], row["state_bytes"]
    nbytes = (
        f"{window / 1e6:.2f}" if window else "-",
        "-" if state is None else f"{state / 1e6:.2f}",
        f"{dense / window:.1f}" if dense and window else "-",
    )
    if row["loss"] is None:
        reason = row["failed"][0] if row["failed"] else "diverged" if row["diverged"] else "not run"
        bad = len(row["failed"]) + row["diverged"]
        lost = f" ({bad} of {row['runs']} lost)" if 0 < bad < row["runs"] else ""
        return (label, share, reason + lost, "-", "-", "-", "-", *nbytes)
    return (
        label,
        share,
        f"{row['loss']:.4g}",
        f"{row['loss_spread']:.2g}",
        f"{row['metric']:.4g}",
        f"{row['metric_spread']:.2g}",
        f"{row['processor_seconds']:.1f}",
        *nbytes,
    )


def plot_density(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Draw the loss at the end against the entries kept, and the bytes of the window beside it."""
    windows = [row for row in rows if row["share"] is not None and row["loss"] is not None]
    sizes = [(100 * row["share"], row["window_bytes"] / 1e6) for row in rows if row["share"] and row["window_bytes"]]
    with styled():
        figure = Figure(figsize=(9, 3.8), layout="constrained")
        by_loss, by_bytes = figure.subplots(1, 2)
        shares = [100 * row["share"] for row in windows]
        spreads = [row["loss_spread"] / 2 for row in windows]
        by_loss.errorbar(
            shares, [row["loss"] for row in windows], spreads, marker="o", color=COLOURS[0], capsize=3, label="M-FAC"
        )
        for index, row in enumerate(row for row in rows if row["share"] is None and row["loss"] is not None):
            by_loss.axhline(row["loss"], color=COLOURS[index + 1], linestyle="--", linewidth=1.2, label=row["label"])
        by_bytes.plot([share for share, _ in sizes], [size for _, size in sizes], marker="o", color=COLOURS[0])
        by_bytes.set_yscale("log")
        for axes, label in ((by_loss, f"training loss (mean of {WINDOW} steps)"), (by_bytes, "window, MB")):
            axes.set_xscale("log")
            axes.set_xlabel("entries kept, %")
            axes.set_ylabel(label)
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.grid(axis="y", color="0.9", linewidth=0.6)
            axes.set_axisbelow(True)
        figure.legend(loc="outside upper right", ncols=4, frameon=False)
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        figure.savefig(path, dpi=150)
