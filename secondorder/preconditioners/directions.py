"""Directions of blocks on the ranks that apply them: whole on every rank, or this rank's pieces of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from secondorder.comm.strategy import CommStrategy, Parcel
from secondorder.curvature.block import Block
from secondorder.linalg.dense import precision_of
from secondorder.parallel.shards import Shards, zeros_like_shard
from secondorder.parameters import Directions

#: Bytes of directions that are sent together: what the ranks of a row compute between two messages.
_PORTION = 32 * 2**20

#: Finds the directions of the parameters of a block.
DirectionsOf = Callable[[Block, Directions], list[Tensor]]
#: Finds what to precondition of some blocks, whole on the ranks that precondition them.
WholesOf = Callable[[Sequence[Block], Directions], Directions]


def replicated(
    comm: CommStrategy, blocks: Sequence[Block], source: Directions, directions_of: DirectionsOf
) -> Directions:
    """Directions of all blocks on every rank."""
    found: Directions = {}
    posted = []
    for some in _portions(blocks):  # those that are done travel while the next ones are computed
        parcels = [Parcel(b.index, directions_of(b, source)) for b in some]
        posted.append(comm.post_directions(parcels))
        for block, parcel in zip(some, parcels, strict=True):
            found.update(zip(block.params, parcel.tensors, strict=True))
    for pending in posted:
        pending.wait()
    return found


def resharded(
    comm: CommStrategy,
    shards: Shards,
    blocks: Sequence[Block],
    source: Directions,
    wholes_of: WholesOf,
    directions_of: DirectionsOf,
) -> Directions:
    """This rank's pieces of the directions of all blocks."""
    found: Directions = {}
    for some in _portions(blocks):
        params = [p for b in some for p in b.params]
        wholes = wholes_of(some, source)
        ours = [b for b in some if comm.preconditions(b.index)]
        done = {p: d for b in ours for p, d in zip(b.params, directions_of(b, wholes), strict=True)}
        found |= shards.scatter(params, done, _ranks_of(comm, some))
    return found


def whole_gradients(comm: CommStrategy, shards: Shards, blocks: Sequence[Block], source: Directions) -> Directions:
    """What to precondition of some blocks, whole on the ranks that precondition them."""
    params = [p for b in blocks for p in b.params]
    pieces = {p: source[p] if p in source else zeros_like_shard(p) for p in params}
    return shards.gather(params, pieces, _ranks_of(comm, blocks))


def _ranks_of(comm: CommStrategy, blocks: Sequence[Block]) -> list[Sequence[int]]:
    """Where the parameters of some blocks are preconditioned."""
    return [comm.preconditioners(b.index) for b in blocks for _ in b.params]


def _portions(blocks: Sequence[Block]) -> Iterator[Sequence[Block]]:
    """Blocks whose directions make messages worth sending before the others are known."""
    start = size = 0
    for i, block in enumerate(blocks):
        size += sum(p.numel() * precision_of(p).itemsize for p in block.params)
        if size >= _PORTION:
            yield blocks[start : i + 1]
            start, size = i + 1, 0
    if start < len(blocks):
        yield blocks[start:]
