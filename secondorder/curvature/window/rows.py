"""The storage of a window's rows, over the tensors of one device and precision: the interface, and dense rows.

The verbs of a storage::

    write(x, slot)        store a gradient, in the storage's own form, at a slot
    newest_dots(slot)     G ĝ, with the row as it is stored
    dots(x)               G x for any x
    combine(a)            Gᵀ a
    add_row(out, slot, c) out += c · row

Products are accumulated in the working precision inside a chunk of columns, and in float64 across chunks. The slot is a
tensor and ``gate`` may forbid a write, so that the host never waits for a device.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

#: Number of columns of one chunk of a dot product: rounding inside it stays below 2e-7 in float32.
CHUNK = 4096
#: Number of columns of one chunk of a combination, which sums over rows: wider chunks are faster.
_WIDE = 16384
#: Number of rows of one product on a CPU.
_ROWS = 256
#: Number of entries of a temporary.
TILE = 1 << 22

#: A dense window of at most this many entries is multiplied in float64, which costs nothing at this size.
EXACT = 1 << 19

Parts = Sequence[Tensor | None]


class Rows(ABC):
    """Stores m rows over some tensors; a row does not outlive its slot.

    Args:
        shapes: Shapes of the tensors.
        m: Number of slots.
        working: Precision of products, float32 or float64.
        device: Device of the rows.
    """

    def __init__(self, shapes: Sequence[torch.Size], m: int, working: torch.dtype, device: torch.device) -> None:
        self.shapes: list[torch.Size] = list(shapes)
        self.m: int = m
        self.working: torch.dtype = working
        self.device: torch.device = device

    @property
    def noise(self) -> float:
        """Relative error of a dot product; smaller eigenvalues of the Gram matrix of unit rows are rounding."""
        return 1e-13 if self.working == torch.float64 else 2e-7

    @abstractmethod
    def state(self, i: int) -> dict[str, Tensor]:
        """Return views of the storage for tensor i, by state key."""

    def dtype_of(self, i: int) -> torch.dtype:
        """Return the precision of :meth:`combine` for the whole tensor i, whichever part of it is here."""
        return self.working

    @property
    @abstractmethod
    def flops(self) -> float:
        """FLOPs of a step over full rows: one pass for the dot products, and one for the combination."""

    @abstractmethod
    def write(self, x: Parts, slot: Tensor, gate: Tensor | None) -> None:
        """Store a gradient (None: zeros) at a slot ``[1]``."""

    @abstractmethod
    def newest_dots(self, slot: Tensor, t: int) -> Tensor:
        """Return the dot products of the stored row at ``slot`` with the first t rows ``[t]``, in float64."""

    @abstractmethod
    def dots(self, x: Parts, t: int) -> Tensor:
        """Return the dot products of x with the first t rows ``[t]``, in float64."""

    @abstractmethod
    def combine(self, a: Tensor) -> list[Tensor]:
        """Return ``Σ a_i row_i`` over the first ``len(a)`` rows, as tensors of the given shapes."""

    @abstractmethod
    def add_row(self, out: Sequence[Tensor], slot: Tensor, scale: Tensor) -> None:
        """Add ``scale`` (0-dim) times a stored row to contiguous tensors, in place."""

    def restart(self) -> None:  # noqa: B027 - most storages start from zeros
        """Set the entries that do not start from zero to their initial values."""

    @abstractmethod
    def residual_square(self) -> Tensor | None:
        """Return the squared norm of the residual of error feedback, or None without error feedback."""


def store(target: Tensor, dim: int, slot: Tensor, value: Tensor, gate: Tensor | None) -> None:
    """Write ``value`` (of size 1 along ``dim``) at a slot, unless the gate is closed."""
    value = value.to(target.dtype)
    if gate is not None:
        value = torch.where(gate, value, target.index_select(dim, slot))
    target.index_copy_(dim, slot, value)


def gated(gate: Tensor | None, value: float, otherwise: float) -> Tensor | float:
    """Return ``value``, or ``otherwise`` where the gate is closed, in float64."""
    if gate is None:
        return value
    blocked = torch.full_like(gate, otherwise, dtype=torch.float64)
    return torch.where(gate, torch.full_like(blocked, value), blocked)


def flatten(x: Parts, shapes: Sequence[torch.Size], like: Tensor) -> Tensor:
    """Concatenate tensors to one vector of the dtype and device of ``like``; None means zeros."""
    parts = [
        like.new_zeros(math.prod(shape)) if part is None else part.reshape(-1).to(like.device, like.dtype)
        for part, shape in zip(x, shapes, strict=True)
    ]
    return torch.cat(parts) if parts else like.new_zeros(0)


def split(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Return views of a vector as tensors of the given shapes."""
    sizes = [math.prod(shape) for shape in shapes]
    return [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]


def row_dots(rows: Tensor, x: Tensor) -> Tensor:
    """Return ``rows @ x`` of ``[t, d]`` and ``[d]`` of one dtype, summed in float64 across chunks: ``[t]`` float64."""
    t, d = rows.shape
    if t > _ROWS and rows.device.type == "cpu":  # the pages of more rows at a time do not fit into the TLB
        return torch.cat([row_dots(part, x) for part in rows.split(_ROWS)])
    total = torch.zeros(t, dtype=torch.float64, device=rows.device)
    whole, per_tile = d // CHUNK, max(1, TILE // max(t, 1))
    for first in range(0, whole, per_tile):
        last = min(first + per_tile, whole)
        columns = slice(first * CHUNK, last * CHUNK)
        chunks = rows[:, columns].unflatten(1, (last - first, CHUNK)).permute(1, 2, 0)
        part = torch.bmm(x[columns].view(last - first, 1, CHUNK), chunks)
        total += part.sum((0, 1), dtype=torch.float64)
    if d > whole * CHUNK:
        total += torch.mv(rows[:, whole * CHUNK :], x[whole * CHUNK :])
    return total


def combine_rows(rows: Tensor, a: Tensor, out: Tensor) -> None:
    """Compute ``out = rowsᵀ a`` for ``[t, d]`` and ``[t]`` of one dtype."""
    t, d = rows.shape
    whole = d // _WIDE
    columns = slice(0, whole * _WIDE)
    if whole:
        chunks = rows[:, columns].unflatten(1, (whole, _WIDE)).transpose(0, 1)
        torch.bmm(a.expand(whole, 1, t), chunks, out=out[columns].view(whole, 1, _WIDE))
    if d > whole * _WIDE:
        torch.mv(rows[:, whole * _WIDE :].T, a, out=out[whole * _WIDE :])


class DenseRows(Rows):
    """Rows as one matrix ``[m, d]``; with ``feedback``, what a narrower dtype rounds away is kept for the next row.

    Args:
        shapes: Shapes of the tensors.
        m: Number of slots.
        working: Precision of products.
        device: Device of the rows.
        dtype: Dtype of the stored rows.
        feedback: Whether rounding is fed back.
        columns: Number of entries of a row of the whole window, if this is a part of it. It determines the precision.
    """

    def __init__(
        self,
        shapes: Sequence[torch.Size],
        m: int,
        working: torch.dtype,
        device: torch.device,
        dtype: torch.dtype,
        feedback: bool = False,
        columns: int | None = None,
    ) -> None:
        d = sum(math.prod(shape) for shape in shapes)
        exact = m * (d if columns is None else columns) <= EXACT
        super().__init__(shapes, m, torch.float64 if exact else working, device)
        self.flat: Tensor = torch.zeros(m, d, dtype=dtype, device=device)
        self.error: Tensor | None = (
            torch.zeros(d, dtype=working, device=device) if feedback and dtype != working else None
        )
        self._written: Tensor | None = None

    def state(self, i: int) -> dict[str, Tensor]:
        start = sum(math.prod(shape) for shape in self.shapes[:i])
        stop = start + math.prod(self.shapes[i])
        found = {"window": self.flat[:, start:stop].view(self.m, *self.shapes[i])}
        if self.error is not None:
            found["error"] = self.error[start:stop].view(self.shapes[i])
        return found

    @property
    def flops(self) -> float:
        return 4.0 * self.flat.numel()

    def write(self, x: Parts, slot: Tensor, gate: Tensor | None) -> None:
        row = flatten(x, self.shapes, self.flat.new_empty(0, dtype=self.working))
        if self.error is None:
            store(self.flat, 0, slot, row[None], gate)
            self._written = row.to(self.flat.dtype).to(self.working)
            return
        waiting = split(self.error, self.shapes)  # the residual of a tensor without a gradient continues to wait
        row += flatten([e if g is not None else None for e, g in zip(waiting, x, strict=True)], self.shapes, row)
        stored = row.to(self.flat.dtype)
        store(self.flat, 0, slot, stored[None], gate)
        for error, rest, g in zip(waiting, split(row - stored, self.shapes), x, strict=True):
            if g is not None:
                error.copy_(rest if gate is None else torch.where(gate, rest, error))

    def _row(self, slot: Tensor) -> Tensor:
        return self.flat.index_select(0, slot)[0].to(self.working)

    def _tiles(self, t: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield the first t rows in the working precision: at once if they are stored in it, otherwise tile by tile."""
        d = self.flat.shape[1]
        width = d if self.flat.dtype == self.working else max(CHUNK, TILE // max(t, 1) // CHUNK * CHUNK)
        for start in range(0, d, max(width, 1)):
            columns = slice(start, min(start + width, d))
            yield columns, self.flat[:t, columns].to(self.working)

    def newest_dots(self, slot: Tensor, t: int) -> Tensor:
        row, self._written = self._written, None  # the row that was just written need not be read again
        return self._dots(self._row(slot) if row is None else row, t)

    def dots(self, x: Parts, t: int) -> Tensor:
        return self._dots(flatten(x, self.shapes, self.flat.new_empty(0, dtype=self.working)), t)

    def _dots(self, x: Tensor, t: int) -> Tensor:
        total = torch.zeros(t, dtype=torch.float64, device=self.device)
        for columns, rows in self._tiles(t):
            total += row_dots(rows, x[columns])
        return total

    def combine(self, a: Tensor) -> list[Tensor]:
        out = torch.empty(self.flat.shape[1], dtype=self.working, device=self.device)
        a = a.to(self.working)
        for columns, rows in self._tiles(len(a)):
            combine_rows(rows, a, out[columns])
        return split(out, self.shapes)

    def add_row(self, out: Sequence[Tensor], slot: Tensor, scale: Tensor) -> None:
        for target, part in zip(out, split(self._row(slot), self.shapes), strict=True):
            target.add_(part * scale.to(self.working))

    def residual_square(self) -> Tensor | None:
        return None if self.error is None else self.error.square().sum(dtype=torch.float64)
