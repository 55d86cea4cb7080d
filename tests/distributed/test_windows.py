"""Windows of gradients cut over the ranks of a row, or owned one by one: paths and messages."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from secondorder import GGT, MFAC, LowRank, SparseMFAC, TopK
from tests.support.building import built
from tests.support.grid import only
from tests.support.oracles.ranks import STRATEGIES, TASKS, Run, assert_replicas, descend, distance, flat, shard
from tests.support.pool import Pool, device_of

M, STEPS = 4, 9
_TOPK = TopK(density=0.3, block_size=8)
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "dense": (MFAC, {"momentum": 0.9}),
    "sparse": (SparseMFAC, {"compression": TopK(density=0.3, block_size=8, value_dtype=torch.bfloat16, error_bits=8)}),
    "low rank": (MFAC, {"compression": LowRank(1), "momentum": 0.9, "momentum_mode": "pre"}),
    "decay": (MFAC, {"weight_decay": 0.1, "weight_decay_mode": "both", "momentum": 0.9, "momentum_mode": "pre"}),
    "graft": (MFAC, {"graft": "adam", "compression": _TOPK, "clip_norm": 1.0}),
    "ggt": (GGT, {"betas": (0.9, 0.9), "bias_correction": True, "weight_decay": 0.1}),
}
CASES = [
    *[(kind, "global") for kind in KINDS if kind != "graft"],
    ("sparse", "group"), ("graft", "group"), ("low rank", "layer"), ("decay", "layer"), ("graft", "layer"),
]  # fmt: skip
#: Strategy, ranks, and ranks of a row.
GRID = {f"{row[0]}-{row[1]}": row for row in (
    ("mem", 2, 2), ("mem", 3, 3), ("hybrid_half", 4, 2), ("comm", 2, 1), ("mem", 4, 4)
)}  # fmt: skip


def optimizer_of(model: nn.Module, kind: str, partition: str, comm: Any = None, **more: Any) -> Any:
    cls, keywords = KINDS[kind]
    regular = {"eps": 0.1} if cls is GGT else {"damping": 0.1}
    settings = {"lr": 0.05, "window_size": M, "partition": partition, **regular, **keywords, **more}
    named = list(model.named_parameters())
    half = len(named) // 2
    return built(cls, [{"params": named[:half]}, {"params": named[half:]}], module=model, comm=comm, **settings)


def train(model: nn.Module, optimizer: Any, first: int, last: int, rank: int = 0, world: int = 1) -> Tensor:
    """Parameters after each of the steps ``[steps, P]``."""
    path = []
    for step in range(first, last):
        descend(model, optimizer, shard(TASKS["cnn"].batch(step), rank, world), Run())
        path.append(flat(model))
    return torch.stack(path)


@cache
def alone(kind: str, partition: str) -> Tensor:
    """Path of one process."""
    model = TASKS["cnn"].model()
    return train(model, optimizer_of(model, kind, partition), 0, STEPS)


# --------------------------------------------------------------------------------------------------- Paths and messages
def paths(rank: int, world: int, strategy: str) -> dict[tuple[str, str], tuple[Tensor, list[Any], list[list[int]]]]:
    """Of every case: the path, the messages of the last step, and the entries of every window in each part."""
    found = {}
    for case in CASES:
        model = TASKS["cnn"].model(device_of(rank))
        optimizer = optimizer_of(model, *case, STRATEGIES[strategy](average_gradients=True))
        path = train(model, optimizer, 0, STEPS - 1, rank, world)
        counter = optimizer.comm.collectives.counter
        counter.clear()
        path = torch.cat([path, train(model, optimizer, STEPS - 1, STEPS, rank, world)])
        sent = [record for record in counter.records if record.stage not in ("gradients", "words")]
        parts = [_sizes(unit) for unit in optimizer.preconditioner.plan.units if unit.part is not None]
        found[case] = path, sent, parts
        optimizer.close()
    return found


def _sizes(unit: Any) -> list[int]:
    return [sum(column) for column in zip(*(unit.part.sizes(i) for i in range(len(unit.params))), strict=True)]


@only("mem-3", layout=GRID)
def test_ranks_do_what_one_process_does(pool: Pool, layout: tuple[str, int, int]) -> None:
    """And send dots and directions for it, nothing else."""
    strategy, world, width = layout
    found = pool.run(paths, strategy, world=world)
    for case in CASES:
        own = [of_rank[case][0] for of_rank in found]
        assert_replicas(own)
        assert distance(own[0], alone(*case)) <= 1e-9, case
        for of_rank in found:
            _, sent, parts = of_rank[case]
            assert_few_messages(case, width, sent, parts)


def expected_words(kind: str, units: int) -> int:
    """Dots of the new row; with the momentum's rest; of weight decay with the rows."""
    extra = {"low rank": 1, "ggt": 1, "decay": 1 + M}
    return units * (M + extra.get(kind, 0))


def assert_few_messages(case: tuple[str, str], width: int, sent: list[Any], parts: list[list[int]]) -> None:
    """8 bytes per row and window, and every entry of the directions once."""
    d = sum(p.numel() for p in TASKS["cnn"].model().parameters())
    kind, partition = case
    if width == 1:
        assert sent == []
    elif partition == "layer":
        assert {(record.stage, record.kind) for record in sent} == {("directions", "broadcast")}
        assert sum(record.numel for record in sent) == d
    else:
        dots, directions = sent
        words = expected_words(kind, {"global": 1, "group": 2}[partition])
        assert dots == ("dots", "all_reduce", width, words, torch.float64, 8 * words)
        entries = width * max(map(sum, zip(*parts, strict=True)))  # padded to the largest part
        assert directions == ("directions", "all_gather", width, entries, torch.float64, 8 * entries)
        assert sum(map(sum, parts)) == d
