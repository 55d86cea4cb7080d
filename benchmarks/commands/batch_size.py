"""``batch-size``: the steps to a training loss as a function of the batch size, for each method.

At each batch size, every method gets the same number of trials. Their learning rates are the same multiples of the
recipe's rate, which the recipe's own rule scales to the batch size. A trial that reaches the target limits the steps of
the later ones, because they would not be better with more steps. If the best rate is the lowest or the highest one, a
better rate may be outside the range, and the table marks it.

With perfect scaling, doubling the batch size halves the steps. A method that deviates from this line benefits less.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from matplotlib.axes import Axes

from benchmarks import report
from benchmarks.checkpoints import Pause
from benchmarks.commands.options import TARGETS
from benchmarks.compare.runs import find, recipe_on
from benchmarks.evidence import Cells, Figures, Repeated, Shown, figures_of, notes_text, train_until
from benchmarks.plot import INK, Panel, Row, look, plot_rows
from benchmarks.report import value
from benchmarks.runner import WINDOW, trainer_of
from benchmarks.workloads import Workload, WorkloadName, make_workload


@dataclass
class BatchSize(Repeated):
    """Measure the steps to a training loss at several batch sizes, with the same search of rates for every method."""

    workload: WorkloadName = "autoencoder"
    """Workload to train."""
    optimizers: tuple[str, ...] = ("sgd", "adamw", "kfac", "hylo")
    """Optimizers to compare. The table shows steps relative to the first one."""
    batch_sizes: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096, 8192)
    """Batch sizes."""
    factors: tuple[float, ...] = (1 / 3, 1.0, 3.0)
    """Learning rates to try, as multiples of that of the recipe at each batch size."""
    target: float | None = None
    """Training loss to reach, as a mean of ten steps. Default: that of the workload in demo."""
    steps: int = 2000
    """Maximum number of steps of a run."""
    seconds: float = 300.0
    """Maximum processor seconds of a run."""
    seeds: int = 1
    """Number of seeds of the best rate. The median counts, and a seed that misses the loss counts as infinite."""

    @property
    def stem(self) -> str:
        return f"batch-size-{self.workload}"

    @property
    def loss(self) -> float:
        if self.target is None and self.workload not in TARGETS:
            raise ValueError(f"{self.workload} has no default target, pass one with --target")
        return TARGETS[self.workload] if self.target is None else self.target

    def check_options(self) -> None:
        self.check(positive=("batch_sizes", "factors", "seconds", "seeds"))
        if len(set(self.factors)) < len(self.factors):
            raise ValueError(f"factors must be different, got {self.factors}")
        if self.steps < WINDOW:
            raise ValueError(f"steps must be at least {WINDOW}, got {self.steps}")
        for name in self.optimizers:
            find(name).recipe(self.workload, self.size)

    def rows(self, cells: Cells) -> list[Figures]:
        rows: list[Figures] = []
        for batch_size in sorted(self.batch_sizes):  # the fastest first
            workload = make_workload(self.workload, self.data_dir, self.size, batch_size)
            for name in self.optimizers:
                trial = partial(self.trial, cells, name, workload)
                rows.append(self.search(name, workload, trial))
        return sorted(rows, key=lambda row: self.optimizers.index(row["optimizer"]))

    def search(self, name: str, workload: Workload, trial: Callable[[float, int, int], Figures]) -> Figures:
        trials: dict[float, Figures] = {}
        limit = self.steps
        for factor in sorted(self.factors, key=lambda factor: (abs(math.log(factor)), factor)):
            found = trials[factor] = trial(factor, self.seed, limit)
            limit = min(limit, found["taken"]) if found["end"] == "target" else limit
        reached = {factor: found["taken"] for factor, found in trials.items() if found["end"] == "target"}
        best = min(reached, key=lambda factor: reached[factor]) if reached else None
        runs = []
        if best is not None:
            runs = [trials[best], *(trial(best, seed, self.steps) for seed in self.seeds_to_run[1:])]
        steps = _median(runs, "taken")
        return {
            "optimizer": name,
            "label": find(name).label,
            "batch_size": workload.batch_size,
            "factor": best,
            "lr": None if best is None else trials[best]["lr"],
            "at_edge": best is not None and len(trials) > 1 and best in {min(self.factors), max(self.factors)},
            "steps": steps,
            "examples": None if steps is None else steps * workload.batch_size,
            "processor_seconds": _median(runs, "processor_seconds"),
            "reached": [sum(run["end"] == "target" for run in runs), len(runs)],
            "ends": {f"{factor:.3g}": found["end"] for factor, found in sorted(trials.items())},
            "most_steps": max((run["taken"] for run in (*trials.values(), *runs)), default=0),
            "note": next(iter(trials.values())).get("note", ""),
        }

    def trial(self, cells: Cells, name: str, workload: Workload, factor: float, seed: int, limit: int) -> Figures:
        """Return the results of one run, which may be stored. Its key does not contain ``limit``.

        A stored run that stopped at a lower limit than this one is repeated, because it may reach the target now.
        """
        recipe = recipe_on(name, workload, self.size, self.data_dir).times(factor)
        identity = self.about(
            workload, name, recipe.settings, factor=round(factor, 6), target=self.loss, steps=self.steps,
            seconds=self.seconds, seed=seed,
        )  # fmt: skip

        def counts(found: Figures) -> bool:
            # Older files have no limit, but a slower run took as many steps as its limit.
            return bool(found["end"] != "slower" or limit <= found["limit" if "limit" in found else "taken"])

        def train(pause: Pause) -> Figures:
            trainer = trainer_of(find(name), workload, recipe.settings, seed)
            end = train_until(trainer, limit, self.loss, self.seconds, pause)
            end = "slower" if end == "steps" and limit < self.steps else end
            own = {"lr": recipe.settings.get("lr"), "limit": limit, "note": recipe.note}
            return {**figures_of(trainer, end), **own}

        return cells.run(identity, train, counts)

    def show(self, rows: list[Figures]) -> Shown:
        title = f"{self.workload}: steps to a training loss of {self.loss:g}"
        table = report.table_of(title, rows, _columns(rows, self.optimizers[0]), _caption(self.loss, rows))
        about = {"workload": self.workload, "target": self.loss, "factors": list(self.factors)}
        return Shown([table], about)


def _median(runs: Sequence[Figures], key: str) -> float | None:
    """Return the median over the seeds. It is None if that seed did not reach the target, which counts as infinite."""
    values = [run[key] if run["end"] == "target" else math.inf for run in runs]
    middle = statistics.median(values) if values else math.inf
    return middle if math.isfinite(middle) else None


def _columns(rows: Sequence[Row], first: str) -> Mapping[str, report.Column]:
    reference = {row["batch_size"]: row["steps"] for row in rows if row["optimizer"] == first}

    def steps(row: Row) -> str:
        if row["steps"] is None:
            return f"> {row['most_steps']:,}"
        return f"{row['steps']:,.0f}"

    def share(row: Row) -> str:
        own = reference.get(row["batch_size"])
        return f"{row['steps'] / own:.2f}" if own and row["steps"] else "-"

    return {
        "optimizer": value("label"),
        "batch": value("batch_size", ","),
        "rate ×": lambda row: value("factor", ".3g")(row) + "*" * row["at_edge"],
        "learning rate": value("lr", ".3g"),
        "steps": steps,
        "examples": value("examples", ",.0f"),
        "seconds": value("processor_seconds", ".1f"),
        f"of {find(first).label}'s steps": share,
        "seeds": lambda row: "{} of {}".format(*row["reached"]) if row["reached"][1] else "-",
        "other trials": lambda row: (
            ", ".join(f"{f}: {end}" for f, end in row["ends"].items() if end != "target") or "-"
        ),
    }


def _caption(target: float, rows: Sequence[Row]) -> str:
    return (
        "Each row is the best of the learning rates tried, which are the same multiples of the recipe's rate for all. "
        f"Steps count until the mean loss of {WINDOW} steps is at most {target:g}. An asterisk marks the last rate "
        "tried, so a better one may lie beyond it. Seeds counts those that reached the loss, of all; the others count "
        "as infinite in the medians. Seconds are processor seconds in all threads. Other trials: why the rest did not "
        "reach the loss; slower means not within the steps of the best one before."
    ) + notes_text(rows)


def draw_batch_sizes(rows: Sequence[Row], title: str, path: Path) -> None:
    sizes = sorted({row["batch_size"] for row in rows})

    def perfect(panels: Sequence[Axes]) -> None:
        for index, label in enumerate(dict.fromkeys(row["label"] for row in rows)):
            first = min((row for row in rows if row["label"] == label), key=lambda row: int(row["batch_size"]))
            ideal = [first["batch_size"] * first["steps"] / size for size in sizes]
            panels[0].plot(sizes, ideal, color=look(label, index)["color"], linewidth=0.9, linestyle=":")
        panels[0].plot([], [], color=INK, linewidth=0.9, linestyle=":", label="perfect scaling")

    panels = [
        Panel("steps to the target", {"": lambda row: row["steps"]}),
        Panel("processor seconds to the target", {"": lambda row: row["processor_seconds"]}),
    ]
    words = title, "batch size"
    plot_rows(rows, panels, lambda row: row["batch_size"], lambda row: row["label"], words, path, perfect)
