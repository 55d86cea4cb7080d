"""A window in parts: the entries of its tensors in each part, and the cutting and joining of the state of tensors.

::

    tensor, flat     0 ──────── b₁ ──── b₂ ─────────── n        bounds (0, b₁, b₂, n): part k holds b_k to b_{k+1}

A part is an ordinary window over slices, possibly over none. Cuts are only made where they do not change what is
stored: between the blocks of top-k, and between whole tensors for low-rank rows. Values that are linear in the rows,
above all dot products, are sums over the parts.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

Bounds = tuple[int, ...]

#: Dense rows are cut at multiples of this many entries.
_GRAIN = 16
_BLOCKED = ("window_idx", "window_val", "error", "error_range")


class Slice(NamedTuple):
    """The part of a window that one rank holds.

    Attributes:
        rank: Index of the part.
        size: Number of parts.
        bounds: Bounds of each tensor of the window.
        cutting: Where tensors may be cut.
    """

    rank: int
    size: int
    bounds: tuple[Bounds, ...]
    cutting: Cutting

    @property
    def suffix(self) -> str:
        """Suffix of the names in a state, so that those of different parts differ."""
        return f"@{self.rank}of{self.size}"

    def span(self, i: int, rank: int | None = None) -> tuple[int, int]:
        """Return the first entry of tensor i in a part (this one by default), and the first one after it."""
        k = self.rank if rank is None else rank
        return self.bounds[i][k], self.bounds[i][k + 1]

    def sizes(self, i: int) -> list[int]:
        """Return the number of entries of tensor i in each part."""
        return [stop - start for start, stop in zip(self.bounds[i], self.bounds[i][1:], strict=False)]

    def shape(self, i: int, whole: torch.Size) -> torch.Size:
        """Return the shape of tensor i in this part."""
        start, stop = self.span(i)
        return whole if self.cutting.grain == 0 and start < stop else torch.Size((stop - start,))

    def slice(self, i: int, x: Tensor) -> Tensor:
        """Return this part of tensor i."""
        start, stop = self.span(i)
        return x if self.cutting.grain == 0 and start < stop else x.reshape(-1)[start:stop]


@dataclass(frozen=True)
class Cutting:
    """Where the tensors of a window may be cut.

    Attributes:
        grain: Tensors are cut at multiples of this many entries; with 0 they stay whole.
        blocked: Whether their state is kept in blocks of this many entries.
    """

    grain: int = _GRAIN
    blocked: bool = False

    def bounds(
        self, sizes: Sequence[int], costs: Sequence[int], parts: int, kept: Sequence[Bounds | None] = ()
    ) -> tuple[Bounds, ...]:
        """Return the bounds that cut tensors into parts of nearly equal cost.

        The cost is proportional to the entries of a tensor where it may be cut. ``kept`` are the bounds of tensors that
        have been cut before, which do not change.
        """
        kept = kept or [None] * len(sizes)
        loads = [0] * parts
        for size, cost, bounds in zip(sizes, costs, kept, strict=True):
            if bounds is not None and size:
                for k in range(parts):
                    loads[k] += cost * (bounds[k + 1] - bounds[k]) // size
        fresh = [i for i, bounds in enumerate(kept) if bounds is None]
        if self.grain:
            new = _cut([sizes[i] for i in fresh], self.grain, loads)
        else:
            new = _hand_out([sizes[i] for i in fresh], [costs[i] for i in fresh], loads)
        found = dict(zip(fresh, new, strict=True))
        return tuple(found[i] if bounds is None else bounds for i, bounds in enumerate(kept))

    def cut_state(self, state: Mapping[str, Tensor], size: int, span: tuple[int, int]) -> dict[str, Tensor]:
        """Return the part of a tensor's state that belongs to a range of its entries.

        Args:
            state: State of the whole tensor by key, slots and blocks as they are stored.
            size: Number of its entries.
            span: The range of entries.

        Returns:
            Views by key; keys without anything in the range may be left out.
        """
        start, stop = span
        if not self.grain:
            return dict(state) if start < stop else {}
        found = {}
        for key, value in state.items():
            if self.blocked and key.startswith("tail_"):
                found[key] = value if start < stop == size else value[:0]
            elif self.blocked and key in _BLOCKED:
                found[key] = value[start // self.grain : min(stop, size - size % self.grain) // self.grain]
            elif key == "window":
                found[key] = value.reshape(len(value), size)[:, start:stop]
            else:
                found[key] = value.reshape(size)[start:stop]
        return found


def join(key: str, parts: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """Join the flat parts of a tensor's state key, in their order.

    Args:
        key: Key of the state.
        parts: Results of :meth:`Cutting.cut_state` of each part, flat.
        shape: Shape of the whole tensor.

    Returns:
        The whole tensor.
    """
    if key == "window":  # slots are the first axis, and entries were cut
        parts = [part.reshape(shape[0], -1) if part.numel() else part.new_empty(shape[0], 0) for part in parts]
        return torch.cat(parts, 1).reshape(tuple(shape))
    return torch.cat([part.reshape(-1) for part in parts]).reshape(tuple(shape))


def base_key(key: str) -> str:
    """Return a state key without the suffix of a part."""
    return key.partition("@")[0]


def _cut(sizes: Sequence[int], grain: int, loads: Sequence[int]) -> list[Bounds]:
    """Cut the concatenation of tensors so that parts that already have loads become as even as possible."""
    total, starts = sum(sizes), [0, *accumulate(sizes)]
    ends = list(accumulate(_even(total, loads)))[:-1]
    cuts = [0, *(_nearest(end, starts, grain) for end in ends), total]
    return [tuple(min(max(cut - start, 0), size) for cut in cuts) for start, size in zip(starts, sizes, strict=False)]


def _even(total: int, loads: Sequence[int]) -> list[Fraction]:
    """Split a total so that the least loaded parts become level; this is exact, and so equal on all machines."""
    low = sorted(loads)
    level = next(
        Fraction(total + sum(low[:n]), n) for n in range(len(low), 0, -1) if total + sum(low[:n]) >= n * low[n - 1]
    )
    return [max(Fraction(0), level - load) for load in loads]


def _nearest(where: Fraction, starts: Sequence[int], grain: int) -> int:
    """Return the place nearest to ``where`` at which tensors that begin at ``starts`` may be cut, or their end."""
    i = min(bisect_right(starts, where), len(starts) - 1) - 1
    low = starts[i] + math.floor((where - starts[i]) / grain) * grain
    high = min(low + grain, starts[i + 1])
    return low if where - low <= high - where else high


def _hand_out(sizes: Sequence[int], costs: Sequence[int], loads: Sequence[int]) -> list[Bounds]:
    """Assign whole tensors to parts, the costliest first and each to the least loaded part."""
    loads, found = list(loads), list[Bounds]([()] * len(sizes))
    for i in sorted(range(len(sizes)), key=lambda i: (-costs[i], i)):
        part = min(range(len(loads)), key=lambda k: (loads[k], k))
        loads[part] += costs[i]
        found[i] = tuple(0 if k <= part else sizes[i] for k in range(len(loads) + 1))
    return found
