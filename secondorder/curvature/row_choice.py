"""Choice of the rows of examples that a layer keeps: drawn at random, or as pivots that interpolate the others.

Kernels of equal size are processed together. All functions are pure and take the layers as a mapping by any key.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from secondorder.curvature.example_rows import DOUBLE_ROWS, Kept
from secondorder.linalg import kernel, selection, stacks
from secondorder.linalg.kernel import Rows

KeyT = TypeVar("KeyT", bound=Hashable)

#: Ranks from an energy are rounded up to a multiple of this number, so that few sizes occur.
_RANK_STEP = 8
#: Part of the trace of a kernel that is attributed to rounding.
_ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-12}


class Energy(NamedTuple):
    """Rows of which to keep the number that reaches a share of the trace of their kernel, up to a limit."""

    rows: Rows
    limit: int
    share: float


class Pivots(NamedTuple):
    """Rows of which to keep a number given by the rank. ``damping`` returns λ ``[(Γ)]`` for the trace of the kernel."""

    rows: Rows
    rank: int
    pivoting: str
    residual: str
    damping: Callable[[Tensor], Tensor]


def batch(rows: Rows) -> int:
    """Γ, or 1."""
    return rows.g.shape[:-3].numel()


def widened(x: Tensor) -> Tensor:
    """A kernel in the precision of its factorization."""
    return x.double() if x.shape[-1] <= DOUBLE_ROWS else x


def sampled(rows: Rows, scores: Tensor, rank: int, sampling: str, seed: int) -> Rows:
    """Draw ``rank`` weighted rows of all examples by their squared norms ``scores [(Γ,) n]``."""
    drawn = selection.draw(scores, rank, sampling, torch.Generator().manual_seed(seed))
    return kernel.pick(rows, drawn.index, drawn.weight.to(rows.g.dtype))


def by_energy(asked: Mapping[KeyT, Energy]) -> dict[KeyT, int]:
    """Return the number of rows for the energy of each kernel. Waits for the device once."""
    kinds: dict[object, list[KeyT]] = {}
    for key, (rows, limit, share) in asked.items():
        kinds.setdefault((rows.n, limit, share, rows.g.dtype, rows.g.device), []).append(key)
    needed: dict[KeyT, Tensor] = {}
    for some in _bounded(kinds, {key: wish.rows for key, wish in asked.items()}):
        _, limit, share = asked[some[0]]
        local, leads = _kernels([asked[key].rows for key in some])
        found = selection.interpolate(local, limit)
        traces = local.diagonal(dim1=-2, dim2=-1).sum(-1)
        counts = selection.energy_rank(found, traces, share, _ROUNDING[local.dtype])
        needed.update(zip(some, (part.max() for part in stacks.parted(counts, leads)), strict=True))
    if not needed:
        return {}
    device = next(iter(needed.values())).device
    numbers = torch.stack([count.to(device) for count in needed.values()]).tolist()
    rounded = (-(-int(number) // _RANK_STEP) * _RANK_STEP for number in numbers)
    return {key: min(number, asked[key].limit) for key, number in zip(needed, rounded, strict=True)}


def interpolated(asked: Mapping[KeyT, Pivots]) -> dict[KeyT, Kept]:
    """Return rows that interpolate the others, with the cores of the interpolations."""
    kept: dict[KeyT, Kept] = {}
    kinds: dict[object, list[KeyT]] = {}
    for key, (rows, rank, pivoting, residual, _) in asked.items():
        kinds.setdefault((rows.n, rows.g.dtype, rows.g.device, rank, pivoting, residual), []).append(key)
    for some in _bounded(kinds, {key: wish.rows for key, wish in asked.items()}):
        _, rank, pivoting, residual, _ = asked[some[0]]
        local, leads = _kernels([asked[key].rows for key in some])
        traces = stacks.parted(local.diagonal(dim1=-2, dim2=-1).sum(-1), leads)
        dampings = [asked[key].damping(trace) for key, trace in zip(some, traces, strict=True)]
        found = selection.interpolate(local, rank, order=selection.pivots(local, rank, pivoting))
        core = selection.core(widened(local), found, stacks.joined(dampings, 0), residual)
        parts = [stacks.parted(t, leads) for t in (found.index, found.valid, core)]
        for key, damping, index, valid, own in zip(some, dampings, *parts, strict=True):
            rows = asked[key].rows
            kept[key] = Kept(kernel.pick(rows, index, valid.to(rows.g.dtype)), damping, own)
    return kept


def _bounded(kinds: Mapping[object, Sequence[KeyT]], rows: Mapping[KeyT, Rows]) -> Iterator[list[KeyT]]:
    """Keys whose kernels are processed together."""
    for members in kinds.values():
        yield from stacks.bounded(members, lambda key: batch(rows[key]) * rows[key].n ** 2)


def _kernels(rows: Sequence[Rows]) -> tuple[Tensor, list[torch.Size]]:
    """Kernels of all examples of some layers, stacked ``[k, n, n]``, and their leading shapes."""
    grams = [kernel.gram(x) for x in rows]
    return stacks.joined(grams, 2), [x.shape[:-2] for x in grams]
