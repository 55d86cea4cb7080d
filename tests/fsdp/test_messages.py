"""What travels between sharded ranks in a step, and what each of them keeps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from secondorder import MemOpt
from tests.support.grid import each, sample
from tests.support.oracles.ranks import shard
from tests.support.pool import Pool, device_of
from tests.support.sharding import Case, Wrap, descend, fully_sharded, started

STAGES = ("gradients", "directions")


@contextmanager
def exchanged(optimizer: Any) -> Iterator[list[tuple[int, int]]]:
    """Elements that this rank gave to and took from others in each exchange of the optimizer, in their order."""
    found: list[tuple[int, int]] = []
    original = dist.all_to_all_single

    def noted(output: Tensor, given: Tensor, taken: Any = None, sizes: Any = None, **rest: Any) -> Any:
        rank = dist.get_rank()
        own_taken, own_given = (0, 0) if taken is None else (taken[rank], sizes[rank])
        found.append((given.numel() - own_given, output.numel() - own_taken))
        return original(output, given, taken, sizes, **rest)

    dist.all_to_all_single = noted
    try:
        yield found
    finally:
        dist.all_to_all_single = original


def pieces(optimizer: Any, block: Any) -> int:
    """Entries of the parameters of a block on this rank."""
    return sum(p.to_local().numel() for p in block.params)


def of_layers(rank: int, world: int, case: Case) -> dict[str, Any]:
    """Exchanges of a step that preconditions, beside what they should be."""
    model, optimizer = started(rank, world, case)
    for step in range(4):
        descend(model, optimizer, shard(case.batch(step), rank, world), case)
    counter = optimizer.comm.collectives.counter
    counter.clear()
    with exchanged(optimizer) as found:
        descend(model, optimizer, shard(case.batch(4), rank, world), case)
    blocks = [b for b in optimizer.preconditioner.plan.blocks if optimizer.preconditioner.directions.is_ready(b)]
    ours = [b for b in blocks if optimizer.comm.preconditions(b.index)]
    sizes = {b.name: sum(p.numel() for p in b.params) for b in blocks}
    answer = {
        "found": found,
        "taken": sum(sizes[b.name] - pieces(optimizer, b) for b in ours),
        "back": sum(pieces(optimizer, b) for b in blocks if b not in ours),
        "owned": [b.name for b in ours],
        "stages": [(r.stage, r.kind) for r in counter.records],
    }
    optimizer.close()
    return answer


def both(answer: dict[str, Any]) -> list[tuple[int, int]]:
    """Exchanges of gradients and directions, which are left out where nobody needs them."""
    assert len(answer["found"]) <= 2
    return [*answer["found"], (0, 0), (0, 0)][:2]


@sample(strategy=["mem", "hybrid_half", "comm"], world=[4, 2])
def test_a_gradient_is_gathered_once_and_only_where_it_is_preconditioned(pool: Pool, strategy: str, world: int) -> None:
    answers = pool.run(of_layers, Case(strategy=strategy), world=world)
    for answer in answers:
        gradients, directions = both(answer)
        assert gradients[1] == answer["taken"]
        assert directions[1] == answer["back"]
    for i, what in enumerate(("taken", "back")):
        assert sum(both(answer)[i][0] for answer in answers) == sum(answer[what] for answer in answers)
    if strategy == "mem":
        names = [name for answer in answers for name in answer["owned"]]
        assert len(names) == len(set(names))


def of_windows(rank: int, world: int, case: Case) -> dict[str, Any]:
    model, optimizer = started(rank, world, case)
    for step in range(2):
        descend(model, optimizer, shard(case.batch(step), rank, world), case)
    counter = optimizer.comm.collectives.counter
    counter.clear()
    with exchanged(optimizer) as found:
        descend(model, optimizer, shard(case.batch(2), rank, world), case)
    mine, stays = 0, 0
    for unit in optimizer.preconditioner.plan.units:
        for i, p in enumerate(unit.params):
            start, stop = (0, p.numel() * unit.held) if unit.part is None else unit.part.span(i)
            first = optimizer._table.shards.layouts[p].spans[rank]
            mine += stop - start
            stays += max(0, min(stop, first[1]) - max(start, first[0]))
    pieces = sum(p.to_local().numel() for p in model.parameters())
    answer = {
        "found": found,
        "taken": mine - stays,
        "back": pieces - stays,
        "stages": [r.stage for r in counter.records],
    }
    optimizer.close()
    return answer


RECUT = {
    "sparse": Case("mfac_sparse"),
    "layer": Case("mfac", keywords={"partition": "layer"}),
    "copies": Case("ggt", strategy="comm"),
    "replicas": Case("mfac", wrap=Wrap(replicas=2)),
}


@sample(lambda case, world: world == 4 or case.wrap.replicas == 1, case=RECUT, world=[4, 2])
def test_windows_move_what_their_cut_and_that_of_the_parameters_differ_in(pool: Pool, case: Case, world: int) -> None:
    """Gradients to the part of the window, directions back; what is in both cuts stays where it is."""
    for answer in pool.run(of_windows, case, world=world):
        gradients, directions = both(answer)
        assert gradients[1] == answer["taken"]
        assert directions[1] == answer["back"]


def rounded(rank: int, world: int, method: str) -> list[tuple[str, str, torch.dtype]]:
    """Exchanges of float32 training whose messages may be rounded, and whose ranks compare them."""
    case = Case(method, "cnn")
    model = fully_sharded(case.model(device_of(rank)).float(), rank, world, Wrap())
    optimizer = case.optimizer(model, MemOpt(wire_dtype=torch.bfloat16, verify_every=1))
    for step in range(3):
        inputs, targets = shard(case.batch(step), rank, world)
        descend(model, optimizer, (inputs.float(), targets), case)
    found = [(r.stage, r.kind, r.dtype) for r in optimizer.comm.collectives.counter.records if r.kind == "all_to_all"]
    optimizer.close()
    return found


@pytest.mark.parametrize("method", ["kfac_eigen", "mfac_sparse"])
def test_directions_are_rounded_where_that_was_asked_for_and_gradients_never(pool: Pool, method: str) -> None:
    """And all ranks count the same messages, whatever each of them gives."""
    answers = pool.run(rounded, method, world=2)
    assert answers[0] == answers[1]
    wire = {stage: {dtype for s, kind, dtype in answers[0] if s == stage and kind == "all_to_all"} for stage in STAGES}
    assert wire == {"gradients": {torch.float32}, "directions": {torch.bfloat16}}


@pytest.mark.parametrize(
    ("case", "world"),
    [
        (Case("mfac"), 2),
        (Case("ggt"), 4),
        (Case("mfac", wrap=Wrap(replicas=2), strategy="hybrid_half"), 4),
    ],
)
def test_dense_rows_are_cut_as_parameters_are_and_nothing_travels(pool: Pool, case: Case, world: int) -> None:
    """But dots and norms."""
    for answer in pool.run(of_windows, case, world=world):
        assert answer["found"] == []
        assert set(answer["stages"]) <= {"dots", "norms"}


# ---------------------------------------------------------------------------------------------------------------- Bytes
DEPTH, SIDE = 8, 12


def tower(device: torch.device | None = None) -> nn.Module:
    """Equal layers, as many as ranks or a multiple."""
    return nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(DEPTH))).to(device, torch.float64)


def stored(rank: int, world: int, method: str, keywords: dict[str, Any]) -> tuple[dict[str, int], int]:
    """Bytes by kind after a few steps, and entries of this rank's pieces."""
    case = Case(method, keywords=keywords)
    model = fully_sharded(tower(device_of(rank)), rank, world, Wrap())
    optimizer = case.optimizer(model)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(4, SIDE, dtype=torch.float64, device=device_of(rank))).square().mean().backward()
        optimizer.step()
    usage = optimizer.memory_usage()
    pieces = sum(p.to_local().numel() for p in model.parameters())
    optimizer.close()
    return usage, pieces


@each(method=["kfac_eigen", "ekfac_running"], world=[2, 4])
def test_curvature_of_layers_is_on_its_owner_alone(pool: Pool, method: str, world: int) -> None:
    """1/W of two factors, two bases and two spectra a layer, float64, on each of W ranks."""
    layers = DEPTH // world
    for usage, pieces in pool.run(stored, method, {}, world=world):
        assert usage["factors"] == layers * 2 * SIDE**2 * 8
        assert usage["second_order"] == layers * (2 * SIDE**2 + 2 * SIDE) * 8
        assert usage["momentum"] == pieces * 8


@each(method=["mfac", "ggt"], world=[2, 4])
def test_windows_are_cut_over_the_ranks(pool: Pool, method: str, world: int) -> None:
    entries = DEPTH * SIDE**2
    found = pool.run(stored, method, {"window_size": 6}, world=world)
    assert sum(usage["window"] for usage, _ in found) == 6 * entries * 8
    for usage, pieces in found:
        assert abs(usage["window"] - 6 * entries * 8 / world) <= 6 * 16 * 8
        assert usage["momentum"] == pieces * 8


@pytest.mark.parametrize("world", [2, 4])
def test_sparse_windows_are_cut_evenly_too(pool: Pool, world: int) -> None:
    """Between blocks: with two ranks layers have enough of them to be cut as parameters are, with four not."""
    whole = Case("mfac_sparse").optimizer(tower()).memory_usage()
    found = pool.run(stored, "mfac_sparse", {}, world=world)
    for kind in ("window", "error"):
        assert sum(usage[kind] for usage, _ in found) == whole[kind]
        assert all(usage[kind] <= 1.05 / world * whole[kind] for usage, _ in found)
