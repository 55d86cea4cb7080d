"""``density``: the final loss, metric and memory of sparse windows of gradients, as a function of their density.

Sparse M-FAC keeps the largest entries in every block of a gradient and feeds the rest back (EFCP, Modoranu, Kalinov,
Kurtic, Frantar and Alistarh, "Error feedback can accurately compress preconditioners", 2023, arXiv 2306.06098, which
claims a sparsity of up to 99 % without loss of accuracy). All densities, the dense window and the methods without a
window train with the same seeds, batches and schedule. Dense and sparse windows also share their settings.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from matplotlib.axes import Axes

from benchmarks import evidence, report
from benchmarks.checkpoints import Pause
from benchmarks.compare.runs import find, recipe_on
from benchmarks.evidence import Cells, Figures, Repeated, Shown, attempted, over_seeds, train_and_evaluate
from benchmarks.plot import OPTIMIZERS, Panel, Row, look, plot_rows
from benchmarks.recipes.building import settings_of, window_keywords
from benchmarks.recipes.types import COSINE, Settings, make_schedule
from benchmarks.report import value
from benchmarks.runner import WINDOW, trainer_of
from benchmarks.workloads import Workload, WorkloadName, make_workload
from secondorder import TopK

PUBLISHED = settings_of("lr=1e-3 momentum=0.0 damping=1e-4 weight_decay=1e-4 window_size=1024 scale=window")
"""Settings for ResNet-20 on CIFAR-10 with density 0.01, batch size 128 and 164 epochs."""
SOURCE = "README and scripts of github.com/IST-DASLab/EFCP, ResNet-20 on CIFAR-10, where a run has 164 epochs"

_WINDOW = ("window", "error", "gram")


def _entry(label: str, optimizer: str, settings: Settings, share: float | None, note: str = "") -> Figures:
    """Return a row without results. Its share of the kept entries of a gradient is None without a window."""
    return {"label": label, "optimizer": optimizer, "settings": dict(settings), "share": share, "note": note}


@dataclass
class Density(Repeated):
    """Train with sparse windows of several densities, with a dense one and without, and compare losses and memory."""

    workload: WorkloadName = "resnet20"
    """Workload to train."""
    densities: tuple[float, ...] = (0.001, 0.003, 0.01, 0.03, 0.1)
    """Shares of the entries of a block that are kept. A block of 4096 keeps at least 8."""
    references: tuple[str, ...] = ("sgd", "adamw")
    """Optimizers without a window, which use their recipes."""
    factor: float = 1.0
    """Factor for the learning rate of all windows, whose other settings are those published for ResNet-20."""
    window_size: int = 1024
    """Number of rows."""
    steps: int | None = None
    """Number of optimizer steps. Default: that of the workload."""
    evaluate: bool = False
    """Evaluate on all held-out data, even if the workload uses a part of it to save time."""

    @property
    def stem(self) -> str:
        return f"density-{self.workload}"

    @cached_property
    def task(self) -> Workload:
        return make_workload(self.workload, self.data_dir, self.size)

    @property
    def length(self) -> int:
        return self.task.steps[self.size] if self.steps is None else self.steps

    def check_options(self) -> None:
        self.check(positive=("seeds", "window_size", "steps", "factor"), shares=("densities",))

    def rows(self, cells: Cells) -> list[Figures]:
        entries = list(self._entries())
        runs: dict[str, list[Figures]] = {entry["label"]: [] for entry in entries}
        for seed in self.seeds_to_run:
            for entry in entries:
                own = {"steps": self.length, "seed": seed, "everything": self.evaluate}
                identity = self.about(self.task, entry["optimizer"], entry["settings"], **own)
                run = cells.run(identity, attempted(partial(self._train, entry, seed)))
                runs[entry["label"]].append(run)
        return [entry | _summary(runs[entry["label"]]) for entry in entries]

    def show(self, rows: list[Figures]) -> Shown:
        metric, title = self.task.metric, f"{self.workload}, {self.length} steps"
        about = {"workload": self.workload, "steps": self.length, "metric": metric, "source": SOURCE}
        table = report.table_of(title, rows, _columns(rows, metric), self._caption(rows))
        lost = any(row["failed"] or row["diverged"] for row in rows)
        return Shown([table], about, int(lost))

    def _entries(self) -> Iterator[Figures]:
        for name in self.references:
            recipe = recipe_on(name, self.task, self.size, self.data_dir)
            yield _entry(find(name).label, name, recipe.settings, None, recipe.note)
        sizes = [p.numel() for p in self.task.build_model(self.seed).parameters()]
        lr = float(f"{float(PUBLISHED['lr'] or 0) * self.factor:.6g}")
        shared = {**PUBLISHED, "lr": lr, "window_size": self.window_size}
        for density in sorted(self.densities):
            own = {**shared, "density": density}
            yield _entry(f"{100 * density:g} %", "sparse_mfac", own, _kept_share(sizes, own))
        yield _entry("dense", "mfac", shared, 1.0)

    def _train(self, entry: Figures, seed: int, pause: Pause) -> Figures:
        schedule = partial(make_schedule, COSINE, self.length)
        trainer = trainer_of(find(entry["optimizer"]), self.task, entry["settings"], seed, make_scheduler=schedule)
        return train_and_evaluate(trainer, self.length, pause, self.evaluate)

    def _caption(self, rows: Sequence[Row]) -> str:
        return (
            f"Number of seeds: {self.seeds}. Values are means over the seeds, and a row has none if a run failed; the "
            f"spread is the largest minus the smallest value. Loss is the mean of the last {WINDOW} steps. "
            "Kept is the share of the entries of a gradient; a block keeps at least 8. Window MB counts rows, residual "
            "and Gram matrix. The schedule is a warm-up over 5 % of the steps, then a cosine to zero. "
            f"Settings of the windows: {SOURCE}."
        ) + evidence.notes_text(rows)


def _kept_share(sizes: Sequence[int], settings: Settings) -> float:
    rule = window_keywords(settings)["compression"]
    assert isinstance(rule, TopK)
    whole, rests = zip(*(divmod(size, rule.block_size) for size in sizes), strict=True)
    entries: int = sum(whole) * rule.kept(rule.block_size) + sum(rule.kept(rest) for rest in rests if rest)
    return entries / sum(sizes)


def _summary(runs: Sequence[Figures]) -> Figures:
    keys = ("loss", "metric", "processor_seconds")
    row = over_seeds(runs, keys, statistics.fmean)
    spreads = over_seeds(runs, keys, lambda values: max(values) - min(values))
    row |= {f"{key}_spread": spreads[key] for key in keys}
    memory: dict[str, int] = next((run["memory"] for run in runs if not run["failed"] and not run["diverged"]), {})
    row["window_bytes"] = sum(memory.get(kind, 0) for kind in _WINDOW) if memory else None
    row["state_bytes"] = memory.get("total")
    return row


def _columns(rows: Sequence[Row], metric: str) -> Mapping[str, report.Column]:
    dense = next((row["window_bytes"] for row in rows if row["share"] == 1.0 and row["window_bytes"]), None)

    def loss(row: Row) -> str:
        if row["loss"] is not None:
            return f"{row['loss']:.4g}"
        bad = len(row["failed"]) + row["diverged"]
        why = row["failed"][0] if row["failed"] else evidence.why_lost(row)
        return why + (f" ({bad} of {row['runs']} lost)" if 0 < bad < row["runs"] else "")

    return {
        "window": value("label"),
        "kept": lambda row: "-" if row["share"] is None else f"{100 * row['share']:.2f} %",
        "loss": loss,
        "spread": value("loss_spread", ".2g"),
        metric: value("metric", ".4g"),
        "its spread": value("metric_spread", ".2g"),
        "seconds": value("processor_seconds", ".1f"),
        "window MB": lambda row: f"{row['window_bytes'] / 1e6:.2f}" if row["window_bytes"] else "-",
        "state MB": value("state_bytes", ".2f", 1e-6),
        "dense / this": lambda row: f"{dense / row['window_bytes']:.1f}" if dense and row["window_bytes"] else "-",
    }


def draw_densities(rows: Sequence[Row], title: str, path: Path) -> None:
    windows = [row for row in rows if row["share"] is not None]
    others = [row for row in rows if row["share"] is None and row["loss"] is not None]

    def references(panels: Sequence[Axes]) -> None:
        known = [row for row in windows if row["loss"] is not None]
        x, y = [100 * row["share"] for row in known], [row["loss"] for row in known]
        half = [row["loss_spread"] / 2 for row in known]
        if any(half):  # a single seed has no spread
            panels[0].errorbar(x, y, half, linestyle="", color=OPTIMIZERS["sparse M-FAC"], capsize=3)
        for index, row in enumerate(others):
            panels[0].axhline(row["loss"], color=look(row["label"], index)["color"], linestyle=":", label=row["label"])

    panels = [
        Panel(f"training loss (mean of {WINDOW} steps)", {"": lambda row: row["loss"]}),
        Panel("window, MB", {"": lambda row: row["window_bytes"] / 1e6 if row["window_bytes"] else None}),
    ]
    words = title, "entries kept, %"
    plot_rows(
        windows, panels, lambda row: 100 * row["share"], lambda _: "sparse M-FAC", words, path, references, base=10
    )
