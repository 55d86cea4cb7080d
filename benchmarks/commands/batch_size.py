"""``batch-size``: steps to a training loss against the examples of a step, method by method.

At each batch size every method gets the same number of trials: learning rates at the same multiples of its recipe's,
which is scaled to the batch by the recipe's own rule. The first trial that reaches the target sets the limit of the
later ones: with more steps they could not be better. Where the best rate is the first or the last of the row, a better
one may lie beyond, and the table says so.

Perfect scaling halves the steps when the batch doubles, and costs no more examples; where a method leaves that line,
larger batches are worth less to it.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator
from rich.table import Table

from benchmarks import report
from benchmarks.commands.demo import TARGETS
from benchmarks.compare.roster import find, recipe_on
from benchmarks.evidence import Cells, Evidence, Figures, Identity, notes_text, progress, train_until
from benchmarks.plot import COLOURS, STYLES, styled
from benchmarks.recipes import Recipe
from benchmarks.runner import WINDOW, Trainer, optimizer_bytes
from benchmarks.workloads import Workload, WorkloadName, make_workload

COLUMNS = (
    "optimizer", "batch", "rate ×", "learning rate", "steps", "examples", "seconds", "of SGD's steps", "seeds", "others"
)  # fmt: skip


@dataclass
class BatchSize(Evidence):
    """Find the steps to a training loss at several batch sizes, with learning rates searched alike for every method."""

    workload: WorkloadName = "autoencoder"
    """What to train."""
    optimizers: tuple[str, ...] = ("sgd", "adamw", "kfac", "hylo")
    """Which ones; the table compares with the first one."""
    batch_sizes: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096, 8192)
    """Examples of a step."""
    factors: tuple[float, ...] = (1 / 3, 1.0, 3.0)
    """Learning rates, as multiples of the recipe's at that batch size."""
    target: float | None = None
    """Training loss to reach, as the mean of ten steps; unset: the workload's own of demo."""
    steps: int = 2000
    """Most steps of a run."""
    seconds: float = 300.0
    """Processor seconds after which a run ends without having reached it."""
    seeds: int = 1
    """Seeds for which the best rate is run; the median counts, of which one that does not get there is infinite."""

    def run(self) -> int:
        self._check()
        cells = self.open_cells(f"batch-size-{self.workload}")
        rows: list[Figures] = []
        total = len(self.optimizers) * len(self.batch_sizes)
        with progress(f"batch size, {self.workload}", total) as advance:
            for batch_size in sorted(self.batch_sizes):  # the cheap ones first
                workload = make_workload(self.workload, self.data_dir, self.size, batch_size)
                for name in self.optimizers:
                    advance(f"{name}, batch {batch_size}")
                    rows.append(self._search(cells, name, workload))
        rows.sort(key=lambda row: self.optimizers.index(row["optimizer"]))
        target = self._target()
        path = self.publish(cells, [_table(self.workload, target, self.optimizers[0], rows)], {
            "workload": self.workload, "target": target, "factors": list(self.factors), "rows": rows,
        })  # fmt: skip
        if any(row["steps"] for row in rows):
            plot_scaling(rows, f"{self.workload}: to a training loss of {target:g}", path)
            report.print_path("plot", path)
        return 0

    def _check(self) -> None:
        if min(self.batch_sizes, default=0) < 1:
            raise ValueError(f"batch_sizes must be numbers of examples, got {self.batch_sizes}")
        if min(self.factors, default=0.0) <= 0 or len(set(self.factors)) < len(self.factors):
            raise ValueError(f"factors must be different positive numbers, got {self.factors}")
        if self.steps < WINDOW:
            raise ValueError(f"steps must be at least {WINDOW}, got {self.steps}")
        if self.seconds <= 0:
            raise ValueError(f"seconds must be positive, got {self.seconds}")
        if self.seeds < 1:
            raise ValueError(f"seeds must be at least 1, got {self.seeds}")
        for name in self.optimizers:
            find(name).recipe(self.workload, self.size)

    def _target(self) -> float:
        if self.target is None and self.workload not in TARGETS:
            raise ValueError(f"{self.workload} has no target of its own, give one with --target")
        return TARGETS[self.workload] if self.target is None else self.target

    def _search(self, cells: Cells, name: str, workload: Workload) -> Figures:
        """Try all rates, and the best one with the other seeds."""
        trials: dict[float, Figures] = {}
        limit = self.steps
        for factor in sorted(self.factors, key=lambda factor: (abs(math.log(factor)), factor)):
            found = self._trial(cells, name, workload, factor, self.seed, limit)
            if found is not None:
                trials[factor] = found
                limit = min(limit, found["taken"]) if found["end"] == "target" else limit
        reached = {factor: trial["taken"] for factor, trial in trials.items() if trial["end"] == "target"}
        best = min(reached, key=lambda factor: reached[factor]) if reached else None
        runs = [trials[best]] if best is not None else []
        if best is not None:
            seeds = range(self.seed + 1, self.seed + self.seeds)
            runs += [
                run for seed in seeds if (run := self._trial(cells, name, workload, best, seed, self.steps)) is not None
            ]
        return self._row(name, workload.batch_size, best, trials, runs)

    def _trial(
        self, cells: Cells, name: str, workload: Workload, factor: float, seed: int, limit: int
    ) -> Figures | None:
        """Do one run, or take it from the cells, where the limit is no part of its name: it only ends what has lost.

        What lost against a lower limit than this one may yet win, and runs again.
        """
        recipe = self._recipe(name, workload, factor)
        identity: Identity = {
            "optimizer": name,
            "workload": self.workload,
            "size": self.size,
            "batch_size": workload.batch_size,
            "settings": dict(recipe.settings),
            "factor": round(factor, 6),
            "target": self._target(),
            "steps": self.steps,
            "seconds": self.seconds,
            "seed": seed,
        }

        def counts(found: Figures) -> bool:
            # Files of an earlier time have no limit: what was slower took as many steps as it was given.
            return bool(found["end"] != "slower" or limit <= found["limit" if "limit" in found else "taken"])

        return cells.run(identity, partial(self._train, name, workload, recipe, seed, limit), counts)

    def _recipe(self, name: str, workload: Workload, factor: float) -> Recipe:
        return recipe_on(name, workload, self.size, self.data_dir).times(factor)

    def _train(self, name: str, workload: Workload, recipe: Recipe, seed: int, limit: int) -> Figures:
        method = find(name)
        make = partial(method.construct, **recipe.settings)
        trainer = Trainer(method.label, workload, make, seed, closure=method.needs_closure(None, recipe.settings))
        end = train_until(trainer, limit, self._target(), self.seconds)
        end = "slower" if end == "steps" and limit < self.steps else end
        history = trainer.history
        return {
            "label": method.label,
            "lr": recipe.settings.get("lr"),
            "end": end,
            "limit": limit,
            "note": recipe.note,
            "taken": len(history.losses),
            "loss": history.loss_at(len(history.losses)),
            "processor_seconds": sum(history.processor_seconds),
            "optimizer_bytes": optimizer_bytes(trainer.optimizer),
        }

    def _row(
        self, name: str, batch_size: int, best: float | None, trials: Mapping[float, Figures], runs: Sequence[Figures]
    ) -> Figures:
        ended = sum(run["end"] == "target" for run in runs)
        steps, seconds = _median(runs, "taken"), _median(runs, "processor_seconds")
        row: Figures = {
            "optimizer": name,
            "label": find(name).label,
            "batch_size": batch_size,
            "factor": best,
            "lr": None if best is None else trials[best]["lr"],
            "at_edge": best is not None and len(trials) > 1 and best in {min(self.factors), max(self.factors)},
            "steps": steps,
            "examples": None if steps is None else steps * batch_size,
            "processor_seconds": seconds,
            "reached": [ended, len(runs)],
            "tried": len(trials),
            "ends": {f"{factor:.3g}": trial["end"] for factor, trial in sorted(trials.items())},
            "most_steps": max((run["taken"] for run in (*trials.values(), *runs)), default=0),
            "note": next((trial["note"] for trial in trials.values() if trial.get("note")), ""),
        }
        return row


def _median(runs: Sequence[Figures], key: str) -> float | None:
    """Return the median over the seeds, None where it is one that did not get to the target: those are infinite."""
    values = [run[key] if run["end"] == "target" else math.inf for run in runs]
    middle = statistics.median(values) if values else math.inf
    return middle if math.isfinite(middle) else None


def _table(workload: str, target: float, first: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    reference = {row["batch_size"]: row["steps"] for row in rows if row["optimizer"] == first}
    cells = []
    for row in rows:
        head = (row["label"], f"{row['batch_size']:,}")
        others = ", ".join(f"{factor}: {end}" for factor, end in row["ends"].items() if end != "target")
        seeds = "{} of {}".format(*row["reached"]) if row["reached"][1] else "-"
        if row["steps"] is None:
            most = f"> {row['most_steps']:,}" if row["tried"] else "not run"
            cells.append((*head, "-", "-", most, "-", "-", "-", seeds, others or "-"))
            continue
        edge = "*" if row["at_edge"] else ""
        own = reference.get(row["batch_size"])
        share = f"{row['steps'] / own:.2f}" if own else "-"
        cells.append(
            (
                *head,
                f"{row['factor']:.3g}{edge}",
                f"{row['lr']:.3g}",
                f"{row['steps']:,.0f}",
                f"{row['examples']:,.0f}",
                f"{row['processor_seconds']:.1f}",
                share,
                seeds,
                others or "-",
            )
        )
    columns = tuple(f"of {rows[0]['label']}'s steps" if rows and c == "of SGD's steps" else c for c in COLUMNS)
    caption = (
        f"Best of the learning rates tried, the same multiples of the recipe's for all. Steps: until the mean of "
        f"{WINDOW} is at most {target:g}. * the last of the row: a better one may lie beyond. Others: why trials ended "
        "that did not get there; slower: not within the steps of the best before. Seeds: those that got there, of all; "
        "the others count as infinite in the medians. Seconds: of the processor, in all threads."
    ) + notes_text(rows)
    return report.make_table(f"{workload}: steps to a training loss of {target:g}", columns, cells, caption)


# ---------------------------------------------------------------------- the picture
def plot_scaling(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Draw steps and processor seconds to the target against the batch size, with lines of perfect scaling."""
    labels = list(dict.fromkeys(row["label"] for row in rows))
    sizes = sorted({row["batch_size"] for row in rows})
    with styled():
        figure = Figure(figsize=(10, 4.4), layout="constrained")
        by_steps, by_seconds = figure.subplots(1, 2)
        for index, label in enumerate(labels):
            own = sorted((r for r in rows if r["label"] == label and r["steps"]), key=lambda r: int(r["batch_size"]))
            if not own:
                continue
            style = {"color": COLOURS[index % len(COLOURS)], "linestyle": STYLES[index % len(STYLES)], "marker": "o"}
            x = [row["batch_size"] for row in own]
            by_steps.plot(x, [row["steps"] for row in own], label=label, markersize=4, **style)
            by_seconds.plot(x, [row["processor_seconds"] for row in own], markersize=4, **style)
            start = x[0] * own[0]["steps"]
            by_steps.plot(sizes, [start / size for size in sizes], color=style["color"], linewidth=0.6, alpha=0.6)
        by_steps.plot([], [], color="0.5", linewidth=0.6, label="perfect scaling")
        _dress(by_steps, "steps to the target", sizes)
        _dress(by_seconds, "processor seconds to the target", sizes)
        figure.legend(loc="outside upper right", ncols=len(labels) + 1, frameon=False)
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        figure.savefig(path, dpi=150)


def _dress(axes: Axes, label: str, sizes: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("examples of a step")
    axes.set_ylabel(label)
    axes.xaxis.set_major_locator(FixedLocator([float(size) for size in sizes]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:,.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    low, high = axes.get_ylim()
    few = high / low < 20  # hardly a power of ten to be named
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}") if few else NullFormatter())
    axes.grid(axis="y", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
