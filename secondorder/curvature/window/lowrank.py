"""Low-rank rows: each matrix gradient is stored as ``P Qᵀ`` by one warm power step, and the rest is fed back.

PowerSGD: Vogels et al. 2019 (arXiv 1905.13727); as rows of an M-FAC window: Modoranu et al. 2023 (EFCP, 2306.06098).
Products use the factors: ``⟨P Qᵀ, P' Q'ᵀ⟩ = ⟨PᵀP', QᵀQ'⟩``; no row is ever built as a matrix.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from secondorder import options
from secondorder.curvature.window.rows import TILE, DenseRows, Parts, Rows, store
from secondorder.linalg.dense import anywhere


@dataclass(frozen=True)
class LowRank:
    """Compression that keeps each matrix gradient as a product of two thin factors and feeds the rest back.

    A tensor is treated as a matrix of its first dimension by all others. Vectors, and matrices for which factors would
    not be smaller, are not compressed.

    Args:
        rank: Number of columns of the factors.

    Raises:
        ValueError: If ``rank`` is not positive.
        TypeError: If ``rank`` is not an integer.
    """

    rank: int = 4

    def __post_init__(self) -> None:
        """Check the rank."""
        options.whole(1)("rank", self.rank)

    def of(self, shape: torch.Size) -> int:
        """Return the rank kept of a tensor, 0 if it is kept whole."""
        if len(shape) < 2 or not math.prod(shape):
            return 0
        n0, n1 = matrix_shape(shape)
        r = min(self.rank, n0, n1)
        return r if r * (n0 + n1) < n0 * n1 else 0

    def kept(self, shape: torch.Size) -> int:
        """Return the number of entries kept of a tensor in each row."""
        return self.of(shape) * sum(matrix_shape(shape)) if self.of(shape) else math.prod(shape)


def matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """Return the first dimension and the product of all others."""
    return shape[0], math.prod(shape[1:])


@dataclass
class Factors:
    """One matrix: factors ``p [m, r, n0]`` and ``q [m, r, n1]``, warm start ``[n1, r]`` and residual ``[n0, n1]``."""

    tensor: int
    p: Tensor
    q: Tensor
    warm: Tensor
    error: Tensor


class LowRankRows(Rows):
    """Rows in factored form; tensors that are kept whole are in separate dense rows.

    Args:
        shapes: Shapes of the tensors.
        m: Number of slots.
        working: Precision of products.
        device: Device of the rows.
        rule: The rank.
        dtype: Dtype of the stored rows.
        seed: Seed of the first warm starts, drawn on the CPU so that they are the same everywhere.
        wholes: Shapes of the tensors in the whole window, if this is a part of it.
    """

    def __init__(
        self,
        shapes: Sequence[torch.Size],
        m: int,
        working: torch.dtype,
        device: torch.device,
        rule: LowRank,
        dtype: torch.dtype,
        seed: int,
        wholes: Sequence[torch.Size] | None = None,
    ) -> None:
        super().__init__(shapes, m, working, device)
        wholes = shapes if wholes is None else wholes
        self.factors: list[Factors] = []
        for i, shape in enumerate(shapes):
            if r := rule.of(shape):
                n0, n1 = matrix_shape(shape)
                warm = torch.empty(n1, r, dtype=working, device=device)
                p, q = (torch.zeros(m, r, n, dtype=dtype, device=device) for n in (n0, n1))
                self.factors.append(Factors(i, p, q, warm, torch.zeros(n0, n1, dtype=working, device=device)))
        self._seed = seed
        #: Columns and rank of the matrices of the whole window, by tensor; warm starts are drawn for all, in one order.
        self._starts = {i: (matrix_shape(shape)[1], r) for i, shape in enumerate(wholes) if (r := rule.of(shape))}
        self.restart()
        self._whole = [i for i, shape in enumerate(shapes) if not rule.of(shape)]
        columns = sum(math.prod(shape) for shape in wholes if not rule.of(shape))
        self.dense: DenseRows = DenseRows([shapes[i] for i in self._whole], m, working, device, dtype, columns=columns)

    def restart(self) -> None:
        generator, mine = torch.Generator().manual_seed(self._seed), {f.tensor: f for f in self.factors}
        for i, shape in self._starts.items():
            start = torch.randn(shape, generator=generator, dtype=torch.float64)
            if i in mine:
                mine[i].warm.copy_(start)

    def state(self, i: int) -> dict[str, Tensor]:
        for f in self.factors:
            if f.tensor == i:
                error = f.error.view(self.shapes[i])
                return {"window_p": f.p, "window_q": f.q, "q_prev": f.warm, "error": error}
        return self.dense.state(self._whole.index(i))

    def dtype_of(self, i: int) -> torch.dtype:
        return self.working if i in self._starts else self.dense.working

    @property
    def flops(self) -> float:
        inner = sum(
            f.p.shape[1] * (f.p[0].numel() + f.q[0].numel()) + f.p.shape[1] * f.error.numel() for f in self.factors
        )
        return 2.0 * self.m * inner + self.dense.flops

    def write(self, x: Parts, slot: Tensor, gate: Tensor | None) -> None:
        self.dense.write([x[i] for i in self._whole], slot, gate)
        for f in self.factors:
            gradient = x[f.tensor]
            if gradient is None:  # the slice counts as zeros, and its residual waits
                for rows in (f.p, f.q):
                    store(rows, 0, slot, torch.zeros_like(rows[:1]), gate)
                continue
            rest = f.error + gradient.reshape(f.error.shape)
            if gate is not None:
                rest = torch.where(gate, rest, f.error)
            p = orthonormal(rest @ f.warm).to(f.p.dtype)
            q = (rest.mT @ p.to(self.working)).to(f.q.dtype)
            there = rest.abs().amax() > 0 if gate is None else (rest.abs().amax() > 0) & gate
            store(f.p, 0, slot, p.mT[None], gate)
            store(f.q, 0, slot, q.mT[None], gate)
            f.warm.copy_(torch.where(there, q.to(self.working), f.warm))
            rest = torch.addmm(rest, p.to(self.working), q.to(self.working).mT, alpha=-1)
            f.error.copy_(rest if gate is None else torch.where(gate, rest, f.error))

    def newest_dots(self, slot: Tensor, t: int) -> Tensor:
        total = self.dense.newest_dots(slot, t)
        for f in self.factors:
            p, q = (rows.index_select(0, slot)[0].to(self.working) for rows in (f.p, f.q))  # [r, n0], [r, n1]
            for rows, tall, wide in self._tiles(f, t):
                inner = (tall @ p.mT).double() * (wide @ q.mT)
                total[rows] += inner.sum((1, 2))
        return total

    def dots(self, x: Parts, t: int) -> Tensor:
        total = self.dense.dots([x[i] for i in self._whole], t)
        for f in self.factors:
            part = x[f.tensor]
            if part is not None:
                matrix = part.reshape(f.error.shape).to(self.working)
                for rows, tall, wide in self._tiles(f, t):
                    total[rows] += ((tall @ matrix) * wide).sum((1, 2), dtype=torch.float64)
        return total

    def combine(self, a: Tensor) -> list[Tensor]:
        t = len(a)
        found = dict(zip(self._whole, self.dense.combine(a), strict=True))
        a = a.to(self.working)
        for f in self.factors:
            out = torch.zeros_like(f.error)
            for rows, tall, wide in self._tiles(f, t):
                out.addmm_((tall * a[rows, None, None]).flatten(0, 1).mT, wide.flatten(0, 1))
            found[f.tensor] = out.view(self.shapes[f.tensor])
        return [found[i] for i in range(len(self.shapes))]

    def _tiles(self, f: Factors, t: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield the first t rows of both factors in the working precision, some rows at a time."""
        per_tile = max(1, TILE // max(f.p[0].numel(), f.q[0].numel()))
        for start in range(0, t, per_tile):
            rows = slice(start, min(start + per_tile, t))
            yield rows, f.p[rows].to(self.working), f.q[rows].to(self.working)

    def add_row(self, out: Sequence[Tensor], slot: Tensor, scale: Tensor) -> None:
        self.dense.add_row([out[i] for i in self._whole], slot, scale)
        for f in self.factors:
            p, q = (rows.index_select(0, slot)[0].to(self.working) for rows in (f.p, f.q))
            out[f.tensor].view(f.error.shape).addmm_((p * scale.to(self.working)).mT, q)

    def residual_square(self) -> Tensor | None:
        squares = [f.error.square().sum(dtype=torch.float64) for f in self.factors]
        return torch.stack(squares).sum() if squares else None


def orthonormal(x: Tensor) -> Tensor:
    """Return an orthonormal basis ``[n, r]`` of the columns of ``x``; a positive diagonal of R fixes its signs."""
    q, r = anywhere(torch.linalg.qr, x)
    sign = r.diagonal(dim1=-2, dim2=-1).sign()
    fixed: Tensor = q * torch.where(sign == 0, 1.0, sign)[..., None, :]
    return fixed
