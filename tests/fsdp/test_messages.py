"""Messages of sharded ranks in a step, and the state on each of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from secondorder import MemOpt
from tests.support.grid import each, sample
from tests.support.oracles.ranks import descend, shard
from tests.support.pool import device_of, everywhere, on_every_rank
from tests.support.sharding import Case, Wrap, fully_sharded, started


@contextmanager
def exchanged() -> Iterator[list[tuple[int, int]]]:
    """The numbers of elements that this rank sent to and received from others in each exchange, in order."""
    found, original = [], dist.all_to_all_single

    def noted(output: Tensor, given: Tensor, taken: Any = None, sizes: Any = None, **rest: Any) -> Any:
        rank = dist.get_rank()
        own_taken, own_given = (0, 0) if taken is None else (taken[rank], sizes[rank])
        found.append((given.numel() - own_given, output.numel() - own_taken))
        return original(output, given, taken, sizes, **rest)

    with mock.patch.object(dist, "all_to_all_single", noted):
        yield found


def pieces(optimizer: Any, block: Any) -> int:
    """The number of entries of a block's parameters on this rank."""
    return sum(p.to_local().numel() for p in block.params)


def last_step(rank: int, world: int, case: Case, steps: int) -> tuple[Any, list[tuple[int, int]]]:
    """The optimizer after some steps, with a counter of the last step only, and the exchanges of that step."""
    model, optimizer = started(rank, world, case)
    for step in range(steps):
        optimizer.comm.collectives.counter.clear()
        with exchanged() as found:
            descend(model, optimizer, shard(case.batch(step), rank, world), case)
    assert len(found) <= 2
    optimizer.close()
    return optimizer, found


def padded(found: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The exchanges of gradients and of directions, which are left out if no rank needs them."""
    return [*found, (0, 0), (0, 0)][:2]


@sample(strategy=["mem", "hybrid_half", "comm"], world=[4, 2])
@on_every_rank()
def test_a_gradient_is_gathered_once_and_only_on_ranks_that_precondition(rank: int, world: int, strategy: str) -> None:
    optimizer, found = last_step(rank, world, Case(strategy=strategy), 5)
    blocks = [b for b in optimizer.preconditioner.plan.blocks if optimizer.preconditioner.directions.is_ready(b)]
    ours = [b for b in blocks if optimizer.comm.preconditions(b.index)]
    taken = sum(sum(p.numel() for p in b.params) - pieces(optimizer, b) for b in ours)
    back = sum(pieces(optimizer, b) for b in blocks if b not in ours)
    gradients, directions = padded(found)
    assert (gradients[1], directions[1]) == (taken, back)
    assert sum(everywhere(gradients[0])) == sum(everywhere(taken))
    assert sum(everywhere(directions[0])) == sum(everywhere(back))
    if strategy == "mem":
        names = [name for of_rank in everywhere([b.name for b in ours]) for name in of_rank]
        assert len(names) == len(set(names))


RESHARDED = {
    "sparse": Case("mfac_sparse"),
    "layer": Case("mfac", keywords={"partition": "layer"}),
    "copies": Case("ggt", strategy="comm"),
    "replicas": Case("mfac", wrap=Wrap(replicas=2)),
}


@sample(lambda case, world: world == 4 or case.wrap.replicas == 1, case=RESHARDED, world=[4, 2])
@on_every_rank()
def test_windows_only_exchange_entries_that_are_sharded_differently(rank: int, world: int, case: Case) -> None:
    """Gradients are sent to the shard of the window, and directions back; common entries are not sent."""
    optimizer, found = last_step(rank, world, case, 3)
    mine, stays, held = 0, 0, 0
    for unit in optimizer.preconditioner.plan.units:
        for i, p in enumerate(unit.params):
            start, stop = (0, p.numel() * unit.is_local) if unit.part is None else unit.part.span(i)
            first = optimizer._table.shards.layouts[p].spans[rank]
            mine += stop - start
            stays += max(0, min(stop, first[1]) - max(start, first[0]))
            held += p.to_local().numel()
    gradients, directions = padded(found)
    assert gradients[1] == mine - stays
    assert directions[1] == held - stays


@pytest.mark.parametrize("method", ["kfac_eigen", "mfac_sparse"])
@on_every_rank(2)
def test_wire_dtype_rounds_directions_but_not_gradients(rank: int, world: int, method: str) -> None:
    """All ranks verify their parameters and count the same messages."""
    case = Case(method, "cnn")
    model = fully_sharded(case.model(device_of(rank)).float(), rank, world, Wrap())
    optimizer = case.optimizer(model, MemOpt(wire_dtype=torch.bfloat16, verify_every=1))
    for step in range(3):
        inputs, targets = shard(case.batch(step), rank, world)
        descend(model, optimizer, (inputs.float(), targets), case)
    found = [(r.stage, r.dtype) for r in optimizer.comm.collectives.counter.records if r.kind == "all_to_all"]
    optimizer.close()
    assert everywhere(found) == [found] * world
    wire = {stage: {dtype for s, dtype in found if s == stage} for stage in ("gradients", "directions")}
    assert wire == {"gradients": {torch.float32}, "directions": {torch.bfloat16}}


@pytest.mark.parametrize(
    ("case", "world"),
    [(Case("mfac"), 2), (Case("ggt"), 4), (Case("mfac", wrap=Wrap(replicas=2), strategy="hybrid_half"), 4)],
)
@on_every_rank()
def test_dense_rows_are_sharded_like_parameters_and_only_dots_and_norms_are_sent(
    rank: int, world: int, case: Case
) -> None:
    optimizer, found = last_step(rank, world, case, 3)
    assert found == []
    assert {r.stage for r in optimizer.comm.collectives.counter.records} <= {"dots", "norms"}


# ---------------------------------------------------------------------------------------------------------------- Bytes
DEPTH, SIDE = 8, 12


def tower(device: torch.device | None = None) -> nn.Module:
    """Equal layers, whose number is a multiple of the number of ranks."""
    return nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(DEPTH))).to(device, torch.float64)


def stored(rank: int, world: int, method: str, keywords: dict[str, Any]) -> dict[str, int]:
    """The bytes by kind after a few steps."""
    model = fully_sharded(tower(device_of(rank)), rank, world, Wrap())
    optimizer = Case(method, keywords=keywords).optimizer(model)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(4, SIDE, dtype=torch.float64, device=device_of(rank))).square().mean().backward()
        optimizer.step()
    usage = optimizer.memory_usage()
    assert usage["momentum"] == sum(p.to_local().numel() for p in model.parameters()) * 8
    optimizer.close()
    return usage


@each(method=["kfac_eigen", "ekfac_running"], world=[2, 4])
@on_every_rank()
def test_curvature_of_a_layer_is_only_on_its_owner(rank: int, world: int, method: str) -> None:
    """Each of W ranks has 1/W of two factors, two bases and two spectra per layer."""
    numbers, usage = 8 * DEPTH // world, stored(rank, world, method, {})
    assert usage["factors"] == numbers * 2 * SIDE**2
    assert usage["second_order"] == numbers * (2 * SIDE**2 + 2 * SIDE)


@sample(method=["mfac_sparse", "ggt", "mfac"], world=[4, 2])
@on_every_rank()
def test_windows_are_divided_evenly(rank: int, world: int, method: str) -> None:
    """Sparse ones are split between blocks. Of two ranks, layers have enough blocks to be sharded like parameters."""
    found, whole = stored(rank, world, method, {"window_size": 6}), Case(method).optimizer(tower()).memory_usage()
    for kind in ("window", "error") if method == "mfac_sparse" else ("window",):
        assert sum(everywhere(found[kind])) == whole[kind]
        excess = found[kind] - whole[kind] / world
        assert excess <= 0.05 / world * whole[kind] if method == "mfac_sparse" else abs(excess) <= 6 * 16 * 8
