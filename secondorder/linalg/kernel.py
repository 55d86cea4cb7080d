r"""Natural gradients through the kernel of per-example gradients: the mathematics of SNGD and HyLo.

Let the columns of U be the per-example gradients ``u_n = Σ_s vec(g_ns (a_ns, 1)ᵀ)``, with all scalar factors in g::

    F = U Uᵀ         K = Uᵀ U,  K_nm = Σ_st ⟨a_ns, a_mt⟩ ⟨g_ns, g_mt⟩             (U itself is never formed)
    (F + λI)⁻¹ V = (V − U M Uᵀ V) / λ        M = (K + λI)⁻¹                      (Woodbury)

With all rows this is SNGD, which is exact (Ren & Goldfarb 2019, arXiv 1906.02353). HyLo (Mu et al., SC22) keeps few
rows Û of them: sampled ones that are weighted (KIS, the same M from ``K̂ = ÛᵀÛ``), or the pivots of an interpolative
decomposition U ≈ Û P (KID, ``M = (S⁻¹ + K̂)⁻¹`` with ``S = P D⁻¹ Pᵀ`` and the damped residual D).

Every tensor may lead with group dimensions ``[..., ]``. Products belong in
:func:`secondorder.linalg.dense.full_precision`, and all tensors of a call except M and λ have one dtype. Nothing here
waits for a device, except :func:`curvature`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from secondorder.linalg.dense import mirror_upper_

#: Bytes of one temporary if examples have several positions; two of them exist at a time.
_TILE_BYTES = 16 * 2**20
#: Rows of a tile of a symmetric kernel, which stops at the diagonal; also the least width that a product is given.
_STRIP = 256
_ALL = slice(None)


class Rows(NamedTuple):
    """Per-example gradients as sums of outer products, ``u_n = Σ_s g_ns (a_ns, 1)ᵀ``.

    Attributes:
        a: Inputs ``[..., n, S, d_i]``; int64 ``[..., n, S]`` are the indices of one-hot rows; None is the constant 1.
        g: Gradients ``[..., n, S, d_o]``.
        homogeneous: Whether a 1 is appended to each row of a; never with indices or None.
        columns: Number of columns that indices select from.
    """

    a: Tensor | None
    g: Tensor
    homogeneous: bool = False
    columns: int = 0

    @property
    def n(self) -> int:
        """Number of rows, in every group."""
        return self.g.shape[-3]

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors."""
        return self.g.nbytes + (0 if self.a is None else self.a.nbytes)


def gram(x: Rows, y: Rows | None = None) -> Tensor:
    """Return the kernel ``K_nm = ⟨u_n, u_m⟩`` by the Khatri–Rao identity, which forms no gradient (SNGD).

    Costs ``n n' S S' (d_i + d_o)`` multiplications, half of it without ``y``; temporaries stay below a tile.

    Args:
        x: n rows.
        y: n' rows of the same kind; None for ``x`` itself.

    Returns:
        K ``[..., n, n']``; symmetric bit for bit without ``y``.
    """
    first, second = _summed(x), _summed(x if y is None else y)
    small = first.n <= _STRIP and first.g[..., 0, 0, 0].numel() * first.n**2 * first.g.element_size() <= _TILE_BYTES
    if y is None and first.g.shape[-2] == 1 and small:  # halving the work would save nothing here
        tile = _tile(first, first)
        return tile.add(tile.mT).mul_(0.5)
    out = first.g.new_empty(*first.g.shape[:-3], first.n, second.n)
    positions, others = first.g.shape[-2], second.g.shape[-2]
    room = max(1, _TILE_BYTES // (out.element_size() * max(1, math.prod(out.shape[:-2]))))
    width = max(1, min(second.n, room // (others * _STRIP)))
    piece = max(1, room // (others * width))  # positions of x at a time
    height = max(1, (piece if y is not None else min(piece, _STRIP)) // positions)
    for rows in _slices(0, first.n, height):
        for columns in _slices(rows.start if y is None else 0, second.n, width):
            right = _part(second, columns)
            tiles = (_tile(_part(first, rows, part), right) for part in _slices(0, positions, piece))
            total = next(tiles)
            for tile in tiles:
                total += tile
            out[..., rows, columns] = total
    return mirror_upper_(out) if y is None else out


def norms(rows: Rows) -> Tensor:
    """Return ``‖u_n‖² [..., n]``, the diagonal of :func:`gram`.

    Costs ``n S²(d_i + d_o)`` multiplications, or ``n S d_i d_o`` through the gradients themselves if that is less.

    Args:
        rows: n rows.

    Returns:
        Squared norms, at least 0.
    """
    rows = _summed(rows)
    n, positions, d_o = rows.g.shape[-3:]
    if positions == 1:
        squares = _squares(rows.g)
        if rows.a is not None and rows.a.is_floating_point():
            squares *= _squares(rows.a) + rows.homogeneous
        return squares[..., 0]
    d_i = rows.columns if _indexed(rows) else _width(rows)
    as_gradients = not _indexed(rows) and positions * (d_i + d_o) >= d_i * d_o
    room = max(1, _TILE_BYTES // (rows.g.element_size() * max(1, math.prod(rows.g.shape[:-3]))))
    piece = positions if as_gradients else max(1, min(positions, room // positions))
    chunk = max(1, room // (d_o * (d_i + 1) if as_gradients else piece * positions))
    found = rows.g.new_zeros(rows.g.shape[:-2])
    for examples in _slices(0, n, chunk):
        if as_gradients:
            found[..., examples] = _squares(whole(_part(rows, examples)).g)[..., 0]
            continue
        for part in _slices(0, positions, piece):
            found[..., examples] += _products(_part(rows, examples, part), _part(rows, examples)).sum((-2, -1))
    return found.clamp_(min=0)  # sums over pairs of positions may be rounded below it


def project(rows: Rows, matrix: Tensor) -> Tensor:
    """Return ``⟨u_n, V⟩ = Σ_s g_nsᵀ V (a_ns, 1) [..., n]``, V ``[..., d_o, n_a]``: ``2 n S d_i d_o`` flops (SNGD)."""
    rows = _summed(rows)
    g = rows.g.flatten(-3, -2)
    if rows.a is None:
        return (g @ matrix).squeeze(-1)
    if _indexed(rows):
        found = matrix.mT[_places(rows.a)].mul_(g).sum(-1)
    else:
        a, weight = rows.a.flatten(-3, -2), matrix[..., : rows.a.shape[-1]]
        # The narrower side has the smaller temporary.
        product = (g @ weight).mul_(a) if a.shape[-1] < g.shape[-1] else (a @ weight.mT).mul_(g)
        found = product.sum(-1)
        if rows.homogeneous:
            found += (g @ matrix[..., -1:]).squeeze(-1)
    dots: Tensor = found.unflatten(-1, rows.g.shape[-3:-1])
    return dots.sum(-1)


def pick(rows: Rows, index: Tensor, weight: Tensor) -> Rows:
    """Return rows ``weight_k u_index_k`` (HyLo) of int64 ``index [..., r]`` and ``weight [..., r]``, in new memory."""
    g = _taken(rows.g, index, -3) * weight.to(rows.g.dtype)[..., None, None]
    if rows.a is None:
        return rows._replace(g=g)
    return rows._replace(a=_taken(rows.a, index, -2 if _indexed(rows) else -3), g=g)


def scaled(rows: Rows, factor: float | Tensor) -> Rows:
    """Return ``factor · u_n``; a tensor has one factor for each group ``[...]``, or one for all of them."""
    if isinstance(factor, Tensor):
        factor = factor.to(rows.g.dtype)[..., None, None, None]
    return rows._replace(g=rows.g * factor)


def concatenate(parts: Sequence[Rows]) -> Rows:
    """Concatenate the rows of several parts of one kind; parts with fewer positions are padded with zeros."""
    if len(parts) == 1:
        return parts[0]
    positions = max(part.g.shape[-2] for part in parts)
    parts = [_filled(part, part.n, positions) for part in parts]
    inputs = [part.a for part in parts if part.a is not None]
    a = torch.cat(inputs, -2 if _indexed(parts[0]) else -3) if inputs else None
    return parts[0]._replace(a=a, g=torch.cat([part.g for part in parts], -3))


def padded(rows: Rows, n: int) -> Rows:
    """Append zero rows, up to ``n`` rows."""
    return _filled(rows, n, rows.g.shape[-2])


def whole(rows: Rows) -> Rows:
    """Return rows that hold the per-example gradients themselves, which is cheaper if there are many positions.

    Args:
        rows: n rows whose inputs are not indices.

    Returns:
        Rows without inputs and with the gradients ``[..., n, 1, d_o·n_a]``, row-major.

    Raises:
        ValueError: If the inputs are indices.
    """
    if _indexed(rows):
        raise ValueError("rows with indices cannot be expanded: a gradient would be as large as the table")
    rows = _summed(rows)
    if rows.a is None:
        return rows
    gradients = rows.g.new_empty(*rows.g.shape[:-2], rows.g.shape[-1], _width(rows))
    d = rows.a.shape[-1]
    gradients[..., :d] = rows.g.mT @ rows.a
    if rows.homogeneous:
        gradients[..., d] = rows.g.sum(-2)
    return Rows(None, gradients.flatten(-2)[..., None, :])


def prefers_whole(positions: int, d_i: int, d_o: int) -> bool:
    """Whether gradients of d_o × d_i are cheaper to keep and multiply than all pairs of positions."""
    return positions > 1 and positions**2 * (d_i + d_o) >= d_i * d_o


def effective_rank(eigenvalues: Tensor) -> Tensor:
    """Return ``exp(−Σ p ln p) [...]`` of shares p of eigenvalues ``[..., n]``, negative ones as 0; 0 if all are 0."""
    values = eigenvalues.double().clamp(min=0)
    total = values.sum(-1, keepdim=True)
    entropy: Tensor = torch.special.entr(values / torch.where(total > 0, total, torch.ones_like(total))).sum(-1)
    return entropy.exp() * (total > 0)[..., 0]


def rank_of_energy(eigenvalues: Tensor, share: float = 0.9) -> Tensor:
    """Return ``min{k: Σ_{i≤k} σ_i ≥ share·Σσ} [...]`` of eigenvalues ``[..., n]`` in any order, negative ones as 0."""
    values = eigenvalues.double().clamp(min=0).sort(-1, descending=True).values
    sums: Tensor = F.pad(values.cumsum(-1), (1, 0))  # k = 0 is possible too
    return (sums < share * sums[..., -1:]).sum(-1)


def _indexed(rows: Rows) -> bool:
    return rows.a is not None and not rows.a.is_floating_point()


def _width(rows: Rows) -> int:
    """Return n_a of rows without indices."""
    return 1 if rows.a is None else rows.a.shape[-1] + rows.homogeneous


def _squares(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1)
    return norm.square_()


def _summed(rows: Rows) -> Rows:
    """Sum rows without inputs over their positions."""
    if rows.a is None and rows.g.shape[-2] != 1:
        return rows._replace(g=rows.g.sum(-2, keepdim=True))
    return rows


def _slices(start: int, stop: int, size: int) -> Iterator[slice]:
    return (slice(first, min(first + size, stop)) for first in range(start, stop, size))


def _part(rows: Rows, examples: slice, positions: slice = _ALL) -> Rows:
    """Return views of some examples and positions."""
    a = rows.a
    if a is not None:
        a = a[..., examples, positions] if _indexed(rows) else a[..., examples, positions, :]
    return rows._replace(a=a, g=rows.g[..., examples, positions, :])


def _products(x: Rows, y: Rows) -> Tensor:
    """Return ``⟨a, a'⟩⟨g, g'⟩`` of every pair from the last but one dimension of g, ``[..., S, S']``."""
    found = x.g @ y.g.mT
    if x.a is None or y.a is None:
        return found
    if _indexed(x):
        return found.mul_(x.a[..., :, None] == y.a[..., None, :])
    inner = x.a @ y.a.mT
    return found.addcmul_(inner, found) if x.homogeneous else found.mul_(inner)


def _tile(x: Rows, y: Rows) -> Tensor:
    """Compute the kernel of two parts from all pairs at once."""
    (n, positions), (m, others) = x.g.shape[-3:-1], y.g.shape[-3:-1]
    found = _products(_flat(x), _flat(y))
    if positions > 1:  # first over complete rows, which is one stream and leaves little
        found = found.unflatten(-2, (n, positions)).sum(-2)
    return found.unflatten(-1, (m, others)).sum(-1) if others > 1 else found


def _flat(rows: Rows) -> Rows:
    """Flatten examples and positions into one dimension."""
    a = rows.a
    if a is not None:
        a = a.flatten(-2) if _indexed(rows) else a.flatten(-3, -2)
    return rows._replace(a=a, g=rows.g.flatten(-3, -2))


def _taken(x: Tensor, index: Tensor, dim: int) -> Tensor:
    """Return the entries ``index [..., r]`` along the dimension that follows the leading ones."""
    if index.dim() == 1:
        return x.index_select(dim, index)
    return x.gather(dim, index[(..., *[None] * (-dim - 1))].expand(*index.shape, *x.shape[dim:][1:]))


def _filled(rows: Rows, n: int, positions: int) -> Rows:
    """Append zeros (and indices 0) after the positions and after the examples."""
    after, more = positions - rows.g.shape[-2], n - rows.n
    if not after and not more:
        return rows
    a = rows.a
    if a is not None:
        a = F.pad(a, (0, after, 0, more) if _indexed(rows) else (0, 0, 0, after, 0, more))
    return rows._replace(a=a, g=F.pad(rows.g, (0, 0, 0, after, 0, more)))


def _places(index: Tensor) -> tuple[Tensor, ...]:
    """Return ``index [..., k]`` as advanced indices into ``[..., columns, d]``."""
    lead = [
        torch.arange(size, device=index.device).view(size, *[1] * (index.dim() - 2 - i))
        for i, size in enumerate(index.flatten(-2).shape[:-1])
    ]
    return (*lead, index.flatten(-2))


def add_combination_(out: Tensor, rows: Rows, z: Tensor) -> None:
    """Add ``Σ_n z_n u_n`` to a matrix ``[..., d_o, n_a]``."""
    rows = _summed(rows)
    z = z.to(rows.g.dtype)[..., None, None]
    g = rows.g.flatten(-3, -2)
    if rows.a is None:
        _add_product_(out, g.mT, z[..., 0])
    elif _indexed(rows):  # unlike index_add_, this has the same bits in every run on every device
        out.mT.index_put_(_places(rows.a), (rows.g * z).flatten(-3, -2), accumulate=True)
    else:
        a, d = rows.a, rows.a.shape[-1]
        if rows.homogeneous:
            _add_product_(out[..., d:], g.mT, z.expand(*rows.g.shape[:-1], 1).flatten(-3, -2))
        if d < g.shape[-1]:  # the smaller copy
            a = a * z
        else:
            g = (rows.g * z).flatten(-3, -2)
        _add_product_(out[..., :d], g.mT, a.flatten(-3, -2))


def _add_product_(out: Tensor, x: Tensor, y: Tensor) -> None:
    """Compute ``out += x y``, without a temporary unless there is more than one leading dimension."""
    if out.dim() == 2:
        out.addmm_(x, y)
    elif out.dim() == 3:
        out.baddbmm_(x, y)
    else:
        out += x @ y
