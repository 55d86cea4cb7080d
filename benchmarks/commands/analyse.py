"""``analyse``: records and plots of the curvature during a training run.

A layer method trains a workload with its recipe, and an observer, which does not affect the training, records norms of
gradients and updates and stage times in every step. In every tenth step by default, it also records what needs the rows
of all examples: the rank of each layer's kernel, and the error of updates from few rows (KID, KIS).
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch

from benchmarks import analysis, report
from benchmarks.analysis import ALL, TRAIN, TRAIN_COLUMNS, Event, plot_analysis
from benchmarks.commands.options import OnWorkload, check_ranges
from benchmarks.live import board
from benchmarks.recipes import METHODS
from benchmarks.recipes.building import parse_settings
from benchmarks.recipes.types import Settings
from benchmarks.report import Table
from benchmarks.runner import Trainer, trainer_of
from benchmarks.workloads import Workload
from secondorder import SecondOrderOptimizer
from secondorder.diagnostics import Analysis
from secondorder.diagnostics.jsonl import EventFile

AnalysedMethod = Literal[
    "hylo", "kfac", "ekfac", "ekfac_natural", "ekfac_whiten", "kfac_adaptive", "ekfac_adaptive"
]  # fmt: skip
_COLUMNS = (
    "layer; m; d_i; d_o; rank90 / m = rank90_share .3g; eff. rank = eff_rank .3g; λ / σ₁ = damping_over_sigma1 .3g; "
    "KID error = kid_error .3g; KIS error = kis_error .3g; ‖∇‖ = grad_norm .3g; ‖u‖ = update_norm .3g"
)


@dataclass
class Analyse(OnWorkload):
    """Train with a layer method and record and plot ranks, gradient norms, errors of few rows and stage times."""

    method: AnalysedMethod = "hylo"
    """Optimizer, whose recipe is the starting point."""
    set: tuple[str, ...] = ()
    """Settings that replace those of the recipe, such as mode=kid damping=0.1 graft=none."""
    steps: int = 100
    """Number of optimizer steps."""
    batch_sizes: tuple[int, ...] = ()
    """Further batch sizes. A separate run for each measures the rank."""
    every: int = 10
    """Steps between measurements of rank and error."""
    rank_fraction: float = 0.1
    """Share of the examples whose rows are kept, for the measurement of the error."""
    out_dir: Path = Path("bench-output/analyse")
    """Folder to write events, tables and plots to. Files of an earlier run in it are replaced."""
    figures: Literal["png", "svg"] = "png"
    """Format of the plots."""

    def run(self) -> int:
        """Run the command. Return 1 if a run diverged, and 0 otherwise."""
        check_ranges(self, ("steps",))
        torch.set_num_threads(self.threads)
        changes = parse_settings(self.set)
        workload = self.make_workload()
        sizes = list(dict.fromkeys([workload.batch_size, *self.batch_sizes]))
        trainers = [self._trainer(self.make_workload(size), changes) for size in sizes]
        epochs = [max(1, workload.examples // size) for size in sizes]
        self.out_dir.mkdir(parents=True, exist_ok=True)
        for stem in analysis.FILES:
            for suffix in (".jsonl", ".png", ".svg"):
                (self.out_dir / f"{stem}{suffix}").unlink(missing_ok=True)
        for index, (trainer, epoch_steps) in enumerate(zip(trainers, epochs, strict=True)):
            title = f"{self.workload}, {self.method}, batch {trainer.workload.batch_size}"
            with board(title, [trainer], self.steps) as update:
                for _ in self._train(trainer, epoch_steps, rank_only=index > 0):
                    update(trainer)
        self._report(trainers[0])
        return int(any(trainer.diverged for trainer in trainers))

    def _trainer(self, workload: Workload, changes: Settings) -> Trainer:
        method = METHODS[self.method]
        settings = method.settings(self.workload, changes)
        return trainer_of(method, workload, settings, self.seed)

    def _train(self, trainer: Trainer, epoch_steps: int, rank_only: bool) -> Iterator[None]:
        optimizer = cast("SecondOrderOptimizer", trainer.optimizer)
        observe = partial(
            Analysis, optimizer, self.out_dir, rank_fraction=self.rank_fraction,
            epoch_steps=epoch_steps, seed=self.seed,
        )  # fmt: skip
        with ExitStack() as stack:
            rows = stack.enter_context(observe("rank" if rank_only else ("rank", "error"), every=self.every))
            log = None
            if not rank_only:
                stack.enter_context(observe(("trend", "profile"), every=1))
                log = stack.enter_context(closing(EventFile(self.out_dir / f"{TRAIN}.jsonl", TRAIN_COLUMNS)))
            start = time.perf_counter()
            for step in range(self.steps):
                if trainer.diverged:
                    break
                group = optimizer.param_groups[0]
                event = {"step": step, "epoch": step // epoch_steps, "lr": float(group["lr"])}
                event |= {"damping": group["damping"]}
                trainer.step()
                event |= {"loss": trainer.history.losses[-1], "elapsed_s": time.perf_counter() - start}
                event |= {"mode": optimizer.diagnostics().get("mode", type(optimizer).__name__.lower())}
                if log is not None:
                    log.write(event)
                yield
        for name, reason in {} if rank_only else rows.refused.items():
            print(f"no rank and no error of {name}: {reason}")

    def _report(self, trainer: Trainer) -> None:
        found = analysis.load(self.out_dir)
        changes = parse_settings(self.set)
        settings = METHODS[self.method].settings(self.workload, changes)
        times = analysis.stage_times(found["profile"])
        layers, modes = _layer_figures(found), _modes(found["trend"])
        data = {
            "workload": self.workload, "method": self.method, "settings": dict(settings),
            "workload_settings": parse_settings(self.workload_set), "seed": self.seed,
            "batch_size": trainer.workload.batch_size, "steps": len(found[TRAIN]), "losses": trainer.history.losses,
            "modes": modes, "layers": layers, "stages_ms": times,
        }  # fmt: skip
        keywords = " ".join(f"{key}={value}" for key, value in settings.items())
        title = f"{self.workload}, batch {trainer.workload.batch_size}: {trainer.history.label} {keywords}"
        report.save(self.out_dir, "analyse", [_layer_table(title, layers, modes), _stage_table(times)], data)
        for stem in analysis.FILES:
            report.print_path("events", self.out_dir / f"{stem}.jsonl")
        for path in plot_analysis(self.out_dir, f".{self.figures}"):
            report.print_path("plot", path)


def _layer_figures(found: Mapping[str, Sequence[Event]]) -> list[dict[str, Any]]:
    figures: list[dict[str, Any]] = []
    for name in [*analysis.layers(found["rank"]), ALL]:
        own = {file: analysis.where(found[file], layer=name) for file in ("rank", "trend", "error")}
        for m in dict.fromkeys(event["m"] for event in own["rank"]) or [None]:
            ranks = analysis.where(own["rank"], m=m)
            entry: dict[str, Any] = {"layer": name, "m": m}
            entry |= {column: ranks[0][column] if ranks else None for column in ("d_i", "d_o")}
            entry["rank90_share"] = analysis.median(ranks, analysis.rank_share)
            entry |= {column: analysis.median(ranks, column) for column in ("eff_rank", "damping_over_sigma1")}
            if not figures or figures[-1]["layer"] != name:
                for mode in ("kid", "kis"):
                    entry[f"{mode}_error"] = analysis.median(analysis.where(own["error"], mode=mode), "rel_error")
                entry |= {column: analysis.median(own["trend"], column) for column in ("grad_norm", "update_norm")}
            figures.append(entry)
    return figures


def _modes(trend: Sequence[Event]) -> dict[str, list[tuple[int, int]]]:
    return {mode: analysis.spans(trend, mode) for mode in dict.fromkeys(event["mode"] for event in trend)}


def _layer_table(title: str, layers: Sequence[dict[str, Any]], modes: Mapping[str, Sequence[tuple[int, int]]]) -> Table:
    periods = "; ".join(
        f"{mode}: steps " + ", ".join(f"{start}-{end - 1}" for start, end in spans) for mode, spans in modes.items()
    )
    caption = (
        "Medians over the run. rank90 / m: share of the eigenvalues of the kernel of m examples, largest first, that "
        "make up 90 % of their sum. Errors: of the update with few rows, relative to the update with all rows and the "
        f"same λ. ‖u‖: norm of the direction, after clipping and grafting. Modes: {periods}."
    )
    return report.table_of(title, layers, report.columns(_COLUMNS), caption)


def _stage_table(times: Mapping[str, Mapping[str, float]]) -> Table:
    shown = [stage for stage in analysis.STAGES if any(found[stage] for found in times.values())]
    rows = [(stage, *(f"{found[stage]:.2f}" for found in times.values())) for stage in shown]
    rows.append(("sum", *(f"{sum(found.values()):.2f}" for found in times.values())))
    caption = (
        "Milliseconds: medians over the steps of each kind, without the first step where there are others. "
        f"Threads: {torch.get_num_threads()}."
    )
    return Table("Stages of a step", ("stage", *(f"{kind} step" for kind in times)), rows, caption)
