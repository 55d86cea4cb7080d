"""``train``: trains one workload with one optimizer and any settings.

Under ``torchrun``, all ranks train together, each on its share of every batch, and rank 0 reports for all of them.
"""

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks import checkpoints, report
from benchmarks.commands.options import check_ranges
from benchmarks.commands.planning import Plan, Planned
from benchmarks.journal import Journal
from benchmarks.live import board
from benchmarks.ranks import RankFigures, Ranks, joined, own_device
from benchmarks.recipes.building import parse_settings
from benchmarks.recipes.types import Recipe, make_schedule
from benchmarks.report import Table
from benchmarks.runner import WINDOW, Trainer, memory_usage, race, trainer_of
from benchmarks.workloads.tiny import found_or_made_up
from secondorder import SecondOrderOptimizer
from secondorder.comm.counter import Counter

RANK_COLUMNS = 8  # maximum number of ranks with a column in the table


def rank_table(ranks: Sequence[RankFigures], steps: int) -> Table:
    stages = list(dict.fromkeys(stage for rank in ranks for stage in rank.sent))
    kinds = list(dict.fromkeys(kind for rank in ranks for kind, count in rank.memory.items() if count))
    lines = [(f"sent per step, {stage}", [rank.sent.get(stage, 0.0) for rank in ranks]) for stage in stages]
    lines += [(f"kept, {kind}", [float(rank.memory.get(kind, 0)) for rank in ranks]) for kind in kinds]
    heads = [f"rank {rank.rank}" if rank.role == "gradient" else f"rank {rank.rank} ({rank.role})" for rank in ranks]
    if len(ranks) > RANK_COLUMNS:
        heads = ["least", "mean", "most"]
        lines = [(what, [min(counts), fmean(counts), max(counts)]) for what, counts in lines]
    return Table(
        f"Bytes of each rank over {steps} steps",
        ("bytes", *heads),
        [(what, *(f"{count:,.0f}" for count in counts)) for what, counts in lines],
        "Sent: bytes that a rank passes to the collectives of its optimizer, without those of DistributedDataParallel.",
    )


CHECKPOINTS = (40, 75, 100, 140, 300)
"""Steps whose loss is reported. Published runs of the autoencoder report the same ones."""


@dataclass
class Train(Planned):
    """Train one workload with one optimizer, and print the loss during training."""

    checkpoint_every: int | None = None
    """Steps between checkpoints. Each replaces the previous one, and there is one at the end. Default: none."""
    resume: str | None = None
    """Checkpoint to resume from, with bitwise equal results. auto uses the one in --out-dir, if it exists."""
    trust_checkpoint: bool = False
    """Allow checkpoints with objects of other packages, which some optimizers need. Loading them can run any code."""
    evaluate: bool = False
    """Evaluate on all held-out data, even if the workload uses a part of it to save time, and at the end also with
    further metrics of the workload."""
    evaluate_every: int | None = None
    """Steps between evaluations during training. Default: none."""

    def run(self) -> int:
        """Run the command. Return 1 if the run diverged, and 0 otherwise."""
        check_ranges(self, ("steps", "world", "checkpoint_every", "evaluate_every"))
        torch.set_num_threads(self.threads)
        if self.print_recipe:
            return self.show_recipe()
        device = own_device(self.device)
        changes = parse_settings(self.workload_set)
        with (
            joined(device) as ranks,
            found_or_made_up(self.workload, self.data_dir, self.size, changes, ranks.first) as (data_dir, made_up),
        ):
            return self._run(ranks, device, data_dir, made_up)

    def _run(self, ranks: Ranks, device: torch.device, data_dir: Path, made_up: bool) -> int:
        plan = replace(self, data_dir=data_dir).plan(ranks.size)
        assert plan.steps is not None  # it is None only for a printed recipe
        schedule = partial(make_schedule, plan.recipe.schedule, plan.steps)
        options: dict[str, Any] = {"make_scheduler": schedule, "ranks": ranks, "device": device, "amp": self.amp}
        trainer = trainer_of(plan.method, plan.workload, plan.recipe.settings, self.seed, **options)
        identity = {**self._identity(plan), **({"made_up_data": True} if made_up else {})}
        saved = self.out_dir / f"{self._stem}.pt" if self.resume == "auto" else Path(self.resume or "")
        if self.resume and (self.resume != "auto" or saved.is_file()):
            checkpoints.load(saved, trainer, identity, self.trust_checkpoint)
        if ranks.first:
            self.say_what_is_not_scaled(plan)
        mine, measured = self._train(trainer, ranks, plan.steps, identity)
        figures: list[RankFigures] = ranks.collect(mine)
        shares = [rank.losses for rank in figures if rank.role == "gradient"]
        trainer.history.losses = [fmean(losses) for losses in zip(*shares, strict=True)]
        if ranks.first:
            self._report(trainer, plan.recipe, figures, {**identity, "made_up_data": made_up, "evaluations": measured})
        return int(trainer.history.diverged)

    @property
    def _stem(self) -> str:
        return f"train-{self.workload}-{self.optimizer}"

    def _identity(self, plan: Plan) -> dict[str, Any]:
        """Return the settings that must match those of a checkpoint. The number of steps may differ."""
        fields = {**plan.recipe.workload, **parse_settings(self.workload_set)}
        return {
            "workload": self.workload, "size": self.size, "fields": fields, "batch_size": plan.workload.batch_size,
            "optimizer": self.optimizer, "settings": dict(plan.recipe.settings),
            "schedule": asdict(plan.recipe.schedule), "seed": self.seed, "amp": self.amp,
        }  # fmt: skip

    def _train(
        self, trainer: Trainer, ranks: Ranks, steps: int, identity: dict[str, Any]
    ) -> tuple[RankFigures, list[dict[str, float]]]:
        optimizer = trainer.optimizer
        measured: list[dict[str, float]] = []
        comm: Any = getattr(optimizer, "comm", None)  # optimizers of torch have none
        role = getattr(comm, "role", "gradient")
        if self.checkpoint_every and getattr(comm, "data_world", ranks.size) < ranks.size:
            raise ValueError(f"--checkpoint-every: under {self.comm} ranks save their own, which this command cannot")
        counter = getattr(getattr(comm, "collectives", None), "counter", Counter())  # a single process has none
        counter.clear()  # discard the messages of the constructor
        taken = max(1, steps - len(trainer.history.losses))
        if role == "inverse":
            comm.serve(optimizer)
        else:
            measured = self._take_steps(trainer, ranks, steps, identity)
        sent = {stage: count / taken for stage, count in counter.bytes_by_stage().items()}
        figures = RankFigures(ranks.rank, role, trainer.history.losses, memory_usage(optimizer), sent)
        if isinstance(optimizer, SecondOrderOptimizer):
            optimizer.close()
        return figures, measured

    def _take_steps(
        self, trainer: Trainer, ranks: Ranks, steps: int, identity: dict[str, Any]
    ) -> list[dict[str, float]]:
        with ExitStack() as stack:
            title = f"{self.workload}, {trainer.history.label}"
            show = stack.enter_context(board(title, [trainer], steps, ranks.first))
            path = self.out_dir / f"{self._stem}.jsonl"
            journal = stack.enter_context(closing(Journal(path, trainer))) if ranks.first else None

            def after_step(trainer: Trainer) -> None:
                show(trainer)
                step = len(trainer.history.losses)
                if journal is not None and journal.behind:
                    due = _due(step, self.evaluate_every)
                    journal.write(trainer.evaluate(self.evaluate) if due else {})
                last = self.checkpoint_every is not None and step == steps
                if (last or _due(step, self.checkpoint_every)) and not trainer.diverged:  # keep the last useful one
                    checkpoints.save(self.out_dir / f"{self._stem}.pt", trainer, ranks, identity)

            race([trainer], steps - len(trainer.history.losses), after_step)
            return [] if journal is None else journal.measured

    def _report(self, trainer: Trainer, recipe: Recipe, ranks: Sequence[RankFigures], about: dict[str, Any]) -> None:
        history, memory = trainer.history, ranks[0].memory
        found = trainer.evaluate(self.evaluate, quality=self.evaluate)
        data = {
            **about, "source": recipe.source, "device": self.device, "losses": history.losses,
            "step_seconds": history.step_seconds, "optimizer_bytes": memory["total"], "memory": memory,
            "ranks": [{key: value for key, value in asdict(rank).items() if key != "losses"} for rank in ranks],
            "evaluated_on": "all held-out data" if self.evaluate else "the workload's own choice of held-out data",
            **found,
        }  # fmt: skip
        last = len(history.losses)
        cells = {"loss at step": f"mean of {WINDOW}"}
        cells |= {str(step): f"{history.loss_at(step):.4g}" for step in (*CHECKPOINTS, last) if step <= last}
        cells |= {name: f"{value:.4g}" for name, value in found.items()}
        cells |= {"seconds": f"{sum(history.step_seconds):.1f}", "optimizer bytes": f"{memory['total']:,}"}
        keywords = " ".join(f"{key}={value}" for key, value in recipe.settings.items())
        title = f"{self.workload}{' (made-up data)' * about['made_up_data']}: {history.label} {keywords}"
        table = Table(title, list(cells), [list(cells.values())])
        tables = [table, *([rank_table(ranks, len(history.losses))] if len(ranks) > 1 else [])]
        report.save(self.out_dir, self._stem, tables, data)


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
