"""Tensors that are cut over ranks (FSDP2's, other DTensors), and their way from one cut to another.

::

    parameter, flat    0 ──── rank 0 ──── rank 1 ──── rank 2 ──── n      spans ((0, a), (a, b), (b, n))
    its owner alone    0 ──────────────── rank 1 ──────────────── n      spans ((0, 0), (0, n), (0, 0))

Which entries travel from where to where is arithmetic on spans: every rank finds the same moves without a message.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

if dist.is_available():
    from torch.distributed.tensor import DTensor
else:  # a build of torch without distributed has none

    class DTensor:  # type: ignore[no-redef]
        """Nothing is an instance of this."""


#: First entry of a flat tensor, and the first behind; (0, 0) for nothing.
Span = tuple[int, int]
Spans = tuple[Span, ...]

NOTHING: Span = (0, 0)


class Layout(NamedTuple):
    """How one tensor is cut.

    Attributes:
        shape: Of the whole.
        dim: The dimension that is cut; entries are counted with this dimension first.
        spans: By rank.
        mates: By rank the ranks that together with it hold one copy, itself among them.
        counts: By rank whether sums over all ranks count its piece: each piece once.
    """

    shape: torch.Size
    dim: int
    spans: Spans
    mates: tuple[tuple[int, ...], ...]
    counts: tuple[bool, ...]

    @property
    def numel(self) -> int:
        """Entries of the whole."""
        return self.shape.numel()

    def flat(self, x: Tensor) -> Tensor:
        """A whole tensor, or a piece, in the order in which entries are counted."""
        return (x if self.dim == 0 else x.movedim(self.dim, 0)).reshape(-1)

    def piece(self, flat: Tensor, rank: int) -> Tensor:
        """The entries of a rank as its piece is shaped."""
        rest = [n for d, n in enumerate(self.shape) if d != self.dim]
        start, stop = self.spans[rank]
        rows = (stop - start) // max(1, torch.Size(rest).numel())
        return self._shaped(flat, [rows, *rest])

    def whole(self, flat: Tensor) -> Tensor:
        """All entries as the tensor is shaped."""
        rest = [n for d, n in enumerate(self.shape) if d != self.dim]
        return self._shaped(flat, [self.shape[self.dim] if self.shape else 1, *rest])

    def _shaped(self, flat: Tensor, shape: Sequence[int]) -> Tensor:
        if not self.shape:
            return flat.reshape(())
        return flat.view(shape) if self.dim == 0 else flat.view(shape).movedim(0, self.dim).contiguous()

    @property
    def everywhere(self) -> Spans:
        """Spans of ranks that all hold all."""
        return ((0, self.numel),) * len(self.spans)


class Move(NamedTuple):
    """Entries that go from a rank to a rank, or stay where they are."""

    source: int
    target: int
    start: int
    stop: int


class Route(NamedTuple):
    """One tensor's way from one cut to another.

    Attributes:
        have: By rank what it has.
        want: By rank what it shall have.
        moves: In one order on all ranks.
    """

    have: Spans
    want: Spans
    moves: tuple[Move, ...]


def is_cut(x: Any) -> bool:
    """Whether a tensor is cut over ranks (a DTensor)."""
    return isinstance(x, DTensor)


def local(x: Tensor) -> Tensor:
    """This rank's piece of a tensor that is cut; any other tensor itself."""
    return x.to_local() if isinstance(x, DTensor) else x


def whole(x: Tensor) -> Tensor:
    """All of a tensor that is cut, on every rank of its mesh, which all call this."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def cut_like(x: Tensor, like: Tensor) -> Tensor:
    """A whole tensor cut as another one is, without a message."""
    if not isinstance(like, DTensor):
        return x
    layout = layout_of(like, "a parameter", dist.get_world_size())
    start, stop = layout.spans[dist.get_rank()]
    piece = layout.piece(layout.flat(x)[start:stop].clone(), dist.get_rank())
    return DTensor.from_local(
        piece, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def cut_equally(x: Any, y: Any) -> bool:
    """Whether two tensors are cut in the same way, or neither is."""
    if not isinstance(x, DTensor) or not isinstance(y, DTensor):
        return not (isinstance(x, DTensor) or isinstance(y, DTensor))
    return x.device_mesh == y.device_mesh and tuple(x.placements) == tuple(y.placements)


def layout_of(p: Tensor, name: str, world: int) -> Layout:
    """How a parameter is cut; a plain one is whole on every rank.

    Args:
        p: The parameter.
        name: For messages.
        world: Number of ranks.

    Returns:
        The layout.

    Raises:
        NotImplementedError: If it is cut in more than one way, or over some of the ranks.
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
            f"parameter '{name}' is placed as {tuple(p.placements)} on {p.device_mesh}: supported are parameters that "
            f"are cut along one dimension by one dimension of a mesh of all {world} ranks (fully_shard, also with a "
            "mesh of two dimensions for hybrid sharding)"
        )
    if not dims:
        return layout_of(p.to_local(), name, world)
    return _cut_layout(p.shape, p.placements[dims[0]].dim % p.dim(), dims[0], mesh)  # type: ignore[attr-defined]


def _cut_layout(shape: torch.Size, dim: int, axis: int, mesh: Tensor) -> Layout:
    """Of a tensor that an axis of a mesh cuts as ``torch.chunk`` does."""
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


@lru_cache(maxsize=4096)
def route(have: Spans, want: Spans, mates: tuple[tuple[int, ...], ...]) -> Route:
    """Moves that bring a tensor from one cut to another, each wanted entry once.

    A rank takes what it has itself, then what its mates have, then what others have, the next in rank order first.

    Args:
        have: By rank what it has.
        want: By rank what it shall have.
        mates: By rank those that are near.

    Returns:
        The route.

    Raises:
        ValueError: If nobody has an entry that is wanted.
    """
    world, moves = len(have), []
    for target, span in enumerate(want):
        missing = [span] if span[0] < span[1] else []
        near = set(mates[target])
        order = sorted(range(world), key=lambda r: (r != target, r not in near, (r - target) % world))
        for source in order if missing else ():
            taken, missing = _split(missing, have[source])
            moves += [Move(source, target, *found) for found in taken]
            if not missing:
                break
        if missing:
            raise ValueError(f"no rank has the entries {missing} that rank {target} wants")
    return Route(have, want, tuple(moves))


def _split(missing: Iterable[Span], span: Span) -> tuple[list[Span], list[Span]]:
    """What a span covers of others, and what it leaves."""
    covered, left = [], []
    for start, stop in missing:
        first, last = max(start, span[0]), min(stop, span[1])
        if first >= last:
            left.append((start, stop))
            continue
        covered.append((first, last))
        left += [found for found in ((start, first), (last, stop)) if found[0] < found[1]]
    return covered, left
