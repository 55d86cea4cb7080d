"""What ``train`` shows of a run: losses at some steps, bytes of each rank."""

from collections.abc import Sequence
from statistics import fmean

from rich.table import Table

from benchmarks import report
from benchmarks.ranks import RankFigures
from benchmarks.runner import History

RANK_COLUMNS = 8
"""Ranks that a table has a column for."""


def mean_losses(ranks: Sequence[RankFigures]) -> list[float]:
    return [fmean(losses) for losses in zip(*(r.losses for r in ranks if r.role == "gradient"), strict=True)]


def rank_table(ranks: Sequence[RankFigures], steps: int) -> Table:
    """Return what each rank sent and kept; of many ranks the least, the mean and the most."""
    stages = list(dict.fromkeys(stage for rank in ranks for stage in rank.sent))
    kinds = list(dict.fromkeys(kind for rank in ranks for kind, count in rank.memory.items() if count))
    lines = [(f"sent per step, {stage}", [rank.sent.get(stage, 0.0) for rank in ranks]) for stage in stages]
    lines += [(f"kept, {kind}", [float(rank.memory.get(kind, 0)) for rank in ranks]) for kind in kinds]
    heads = [f"rank {rank.rank}" if rank.role == "gradient" else f"rank {rank.rank} ({rank.role})" for rank in ranks]
    if len(ranks) > RANK_COLUMNS:
        heads = ["least", "mean", "most"]
        lines = [(what, [min(counts), fmean(counts), max(counts)]) for what, counts in lines]
    return report.make_table(
        f"Bytes of each rank over {steps} steps",
        ("bytes", *heads),
        [(what, *(f"{count:,.0f}" for count in counts)) for what, counts in lines],
        "Sent: what a rank hands to the collectives of its optimizer, without what DistributedDataParallel sends.",
    )


def losses_at(history: History, checkpoints: tuple[int, ...]) -> tuple[list[str], list[str]]:
    """Return table heads and cells for the loss at some steps and at the last one."""
    last = len(history.losses)
    steps = [*(step for step in checkpoints if step < last), last]
    return [str(step) for step in steps], [f"{history.loss_at(step):.4g}" for step in steps]
