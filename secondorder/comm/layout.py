"""Tensors that are sharded over ranks (by FSDP2, or as other DTensors), and conversions between shardings.

::

    parameter, flat    0 ──── rank 0 ──── rank 1 ──── rank 2 ──── n      spans ((0, a), (a, b), (b, n))
    only its owner     0 ──────────────── rank 1 ──────────────── n      spans ((0, 0), (0, n), (0, 0))

Arithmetic on spans determines which entries each rank sends to which rank, so ranks agree without a message.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

if dist.is_available():
    from torch.distributed.tensor import DTensor
else:  # a build of torch without torch.distributed does not have it

    class DTensor:  # type: ignore[no-redef]
        """A placeholder without instances."""


#: The first entry of a flat tensor in a span, and the first one after it; (0, 0) for an empty span.
Span = tuple[int, int]
Spans = tuple[Span, ...]

NOTHING: Span = (0, 0)


class Layout(NamedTuple):
    """The sharding of one tensor.

    Attributes:
        shape: Shape of the complete tensor.
        dim: The dimension that is sharded; entries are counted with this dimension first.
        spans: Span of each rank.
        mates: For each rank, the ranks that hold one copy together, including itself.
        counts: For each rank, whether sums over all ranks include its shard. Each shard is counted once.
    """

    shape: torch.Size
    dim: int
    spans: Spans
    mates: tuple[tuple[int, ...], ...]
    counts: tuple[bool, ...]

    @property
    def numel(self) -> int:
        """Number of entries of the complete tensor."""
        return self.shape.numel()

    def flat(self, x: Tensor) -> Tensor:
        """Flatten a complete tensor, or a shard, in the order in which entries are counted."""
        return (x if self.dim == 0 else x.movedim(self.dim, 0)).reshape(-1)

    def piece(self, flat: Tensor, rank: int) -> Tensor:
        """Reshape the entries of a rank to the shape of its shard."""
        rest = [n for d, n in enumerate(self.shape) if d != self.dim]
        start, stop = self.spans[rank]
        rows = (stop - start) // max(1, torch.Size(rest).numel())
        return self._shaped(flat, [rows, *rest])

    def whole(self, flat: Tensor) -> Tensor:
        """Reshape all entries to the shape of the tensor."""
        rest = [n for d, n in enumerate(self.shape) if d != self.dim]
        return self._shaped(flat, [self.shape[self.dim] if self.shape else 1, *rest])

    def _shaped(self, flat: Tensor, shape: Sequence[int]) -> Tensor:
        if not self.shape:
            return flat.reshape(())
        return flat.view(shape) if self.dim == 0 else flat.view(shape).movedim(0, self.dim).contiguous()

    @property
    def everywhere(self) -> Spans:
        """Spans with which every rank holds all entries."""
        return ((0, self.numel),) * len(self.spans)


@dataclass(frozen=True, eq=False)
class Route:
    """The conversion of one tensor from one sharding to another, as one rank sees it.

    Attributes:
        have: Span that the rank has.
        want: Span that the rank needs.
        keeps: Part of the needed span that the rank already has.
        gives: Other ranks, and the span that is sent to each.
        takes: Other ranks, and the span that is received from each.
        travels: Total number of entries that are sent between ranks; it is the same on all ranks.
        numel: Number of entries of the complete tensor.
    """

    have: Span
    want: Span
    keeps: Span
    gives: tuple[tuple[int, Span], ...]
    takes: tuple[tuple[int, Span], ...]
    travels: int
    numel: int


def is_cut(x: Any) -> bool:
    """Whether a tensor is sharded over ranks (a DTensor)."""
    return isinstance(x, DTensor)


def local(x: Tensor) -> Tensor:
    """Return this rank's shard of a sharded tensor, and any other tensor unchanged."""
    return x.to_local() if isinstance(x, DTensor) else x


def whole(x: Tensor) -> Tensor:
    """Return the whole of a sharded tensor; all ranks of its mesh must call this."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def cut_like(x: Tensor, like: Tensor) -> Tensor:
    """Shard a whole tensor as another one is, without a message."""
    if not isinstance(like, DTensor):
        return x
    layout = layout_of(like, "a parameter", dist.get_world_size())
    start, stop = layout.spans[dist.get_rank()]
    piece = layout.piece(layout.flat(x)[start:stop].clone(), dist.get_rank())
    return DTensor.from_local(
        piece, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def cut_equally(x: Any, y: Any) -> bool:
    """Whether two tensors are sharded in the same way, or neither is sharded."""
    if not isinstance(x, DTensor) or not isinstance(y, DTensor):
        return not (isinstance(x, DTensor) or isinstance(y, DTensor))
    return x.device_mesh == y.device_mesh and tuple(x.placements) == tuple(y.placements)


def layout_of(p: Tensor, name: str, world: int) -> Layout:
    """Return how a parameter is sharded. A plain parameter is complete on every rank.

    Raises:
        NotImplementedError: If the parameter is sharded in more than one way, or only over some of the ranks.
    """
    ranks = tuple(range(world))
    if not isinstance(p, DTensor):
        alone = tuple((r,) for r in ranks)
        return Layout(p.shape, 0, ((0, p.numel()),) * world, alone, tuple(r == 0 for r in ranks))
    mesh = p.device_mesh.mesh
    dims = [i for i, placement in enumerate(p.placements) if not placement.is_replicate() and mesh.shape[i] > 1]
    plain = len(dims) <= 1 and all(type(p.placements[i]).__name__ == "Shard" for i in dims)
    if not plain or sorted(mesh.flatten().tolist()) != list(ranks):
        raise NotImplementedError(
            f"parameter '{name}' is placed as {tuple(p.placements)} on {p.device_mesh}. Supported are parameters that "
            f"are sharded along one dimension by one dimension of a mesh of all {world} ranks (fully_shard, also with "
            "a two-dimensional mesh for hybrid sharding)"
        )
    if not dims:
        return layout_of(p.to_local(), name, world)
    return _cut_layout(p.shape, p.placements[dims[0]].dim % p.dim(), dims[0], mesh)  # type: ignore[attr-defined]


def _cut_layout(shape: torch.Size, dim: int, axis: int, mesh: Tensor) -> Layout:
    """Return the layout of a tensor that an axis of a mesh shards as ``torch.chunk`` does."""
    parts, size = mesh.shape[axis], shape[dim]
    step, width = -(-size // parts), shape.numel() // size if size else 0
    spans, counts = [NOTHING] * mesh.numel(), [False] * mesh.numel()
    mates: list[tuple[int, ...]] = [()] * mesh.numel()
    for copy_number, ranks in enumerate(mesh.movedim(axis, -1).reshape(-1, parts).tolist()):
        for k, rank in enumerate(ranks):
            start, stop = min(size, k * step) * width, min(size, (k + 1) * step) * width
            spans[rank] = (start, stop) if start < stop else NOTHING
            mates[rank] = tuple(ranks)
            counts[rank] = copy_number == 0
    return Layout(shape, dim, tuple(spans), tuple(mates), tuple(counts))


def route(have: Spans, want: Spans, mates: Sequence[Sequence[int]], rank: int) -> Route:
    """Find the conversion of a tensor from one sharding to another, in which each needed entry has one source.

    A rank uses its own entries first. An entry that several other ranks have comes from one of its mates if possible,
    and otherwise from the next rank in order.

    Args:
        have: Span that each rank has. The spans of two ranks must be equal or disjoint.
        want: Span that each rank needs.
        mates: For each rank, the ranks that are near.
        rank: The rank whose route is computed.

    Returns:
        The route.

    Raises:
        ValueError: If no rank has a needed entry, or if spans overlap.
    """
    holders: dict[Span, list[int]] = {}
    for r, span in enumerate(have):
        if span[0] < span[1]:
            holders.setdefault(span, []).append(r)
    spans = sorted(holders)
    numel = max((stop for _, stop in spans), default=0)
    if any(one[1] > other[0] for one, other in zip(spans, spans[1:], strict=False)):
        raise ValueError(f"ranks have {spans}, which overlap")
    if any(_length(w) > sum(_length(_common(w, h)) for h in _near(spans, w)) for w in set(want)):
        raise ValueError(f"ranks want {sorted(set(want))}, and have {spans}")

    def chosen(target: int, span: Span) -> int:
        return min(holders[span], key=lambda r: (r != target, mates[r] != mates[target], (r - target) % len(have)))

    wanted = [(r, _common(w, have[rank])) for r, w in enumerate(want) if r != rank]
    gives = [(r, x) for r, x in wanted if x != NOTHING and have[r] != have[rank] and chosen(r, have[rank]) == rank]
    others = [span for span in _near(spans, want[rank]) if span != have[rank]]
    takes = [(chosen(rank, span), _common(want[rank], span)) for span in others]
    travels = sum(_length(w) - _length(_common(w, h)) for w, h in zip(want, have, strict=True))
    return Route(have[rank], want[rank], _common(want[rank], have[rank]), tuple(gives), tuple(takes), travels, numel)


def _length(span: Span) -> int:
    return span[1] - span[0]


def _common(one: Span, other: Span) -> Span:
    start, stop = max(one[0], other[0]), min(one[1], other[1])
    return (start, stop) if start < stop else NOTHING


def _near(spans: Sequence[Span], span: Span) -> Sequence[Span]:
    """Return the sorted spans that overlap with a span."""
    if span[0] >= span[1]:
        return ()
    return spans[bisect_right(spans, span[0], key=lambda s: s[1]) : bisect_left(spans, span[1], key=lambda s: s[0])]
