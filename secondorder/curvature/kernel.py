r"""Natural gradients through the kernel of per-example gradients: the pure mathematics of SNGD and HyLo.

With per-example gradients ``u_n = Σ_s vec(g_ns (a_ns, 1)ᵀ)`` as the columns of U, every scalar factor folded into g::

    F = U Uᵀ         K = Uᵀ U,  K_nm = Σ_st ⟨a_ns, a_mt⟩ ⟨g_ns, g_mt⟩             (U itself is never formed)
    (F + λI)⁻¹ V = (V − U M Uᵀ V) / λ        M = (K + λI)⁻¹                      (Woodbury)

With all rows this is SNGD, which is exact (Ren & Goldfarb 2019, arXiv 1906.02353). HyLo (Mu et al., SC22) keeps few
rows Û of them: sampled ones that are weighted (KIS, the same M from ``K̂ = ÛᵀÛ``), or the pivots of an interpolative
decomposition U ≈ Û P (KID, ``M = (S⁻¹ + K̂)⁻¹`` with ``S = P D⁻¹ Pᵀ`` and the damped residual D).

Every tensor may lead with group dimensions ``[..., ]``. Products belong in :func:`secondorder.linalg.full_precision`,
and all tensors of a call except M and λ have one dtype. Nothing here waits for a device, except :func:`curvature`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from secondorder.linalg import all_true_on_cpu, mirror_upper_

#: Bytes of one temporary where examples have several positions; two of them live at a time.
_TILE_BYTES = 16 * 2**20
#: Rows of a tile of a symmetric kernel, which stops at the diagonal; also the least width that a product is given.
_STRIP = 256
#: Rungs of the ladder of failed Cholesky factorisations, in multiples of the mean diagonal.
_JITTERS = (1e-6, 1e-4, 1e-2)

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
    """The kernel ``K_nm = ⟨u_n, u_m⟩`` by the Khatri–Rao identity, which forms no gradient (SNGD).

    Costs ``n n' S S' (d_i + d_o)`` multiplications, half of it without ``y``; temporaries stay below a tile.

    Args:
        x: n rows.
        y: n' rows of the same kind; None for ``x`` itself.

    Returns:
        K ``[..., n, n']``; symmetric to the bit without ``y``.
    """
    first, second = _summed(x), _summed(x if y is None else y)
    small = first.n <= _STRIP and first.g[..., 0, 0, 0].numel() * first.n**2 * first.g.element_size() <= _TILE_BYTES
    if y is None and first.g.shape[-2] == 1 and small:  # half the work would save nothing here
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
    """``‖u_n‖² [..., n]``, the diagonal of :func:`gram`.

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
    return found.clamp_(min=0)  # pairs of positions may round below it


def project(rows: Rows, matrix: Tensor) -> Tensor:
    """``⟨u_n, V⟩ = Σ_s g_nsᵀ V (a_ns, 1) [..., n]`` with V ``[..., d_o, n_a]``, in ``2 n S d_i d_o`` flops (SNGD)."""
    rows = _summed(rows)
    g = rows.g.flatten(-3, -2)
    if rows.a is None:
        return (g @ matrix).squeeze(-1)
    if _indexed(rows):
        found = matrix.mT[_places(rows.a)].mul_(g).sum(-1)
    else:
        a, weight = rows.a.flatten(-3, -2), matrix[..., : rows.a.shape[-1]]
        # The narrower side is the smaller temporary.
        product = (g @ weight).mul_(a) if a.shape[-1] < g.shape[-1] else (a @ weight.mT).mul_(g)
        found = product.sum(-1)
        if rows.homogeneous:
            found += (g @ matrix[..., -1:]).squeeze(-1)
    dots: Tensor = found.unflatten(-1, rows.g.shape[-3:-1])
    return dots.sum(-1)


def combine(rows: Rows, z: Tensor) -> Tensor:
    """``Σ_n z_n u_n [..., d_o, n_a]`` with coefficients z ``[..., n]``, in ``2 n S d_i d_o`` flops (SNGD)."""
    n_a = rows.columns if _indexed(rows) else _width(rows)
    out = rows.g.new_zeros(*rows.g.shape[:-3], rows.g.shape[-1], n_a)
    _add_combination_(out, rows, z)
    return out


def pick(rows: Rows, index: Tensor, weight: Tensor) -> Rows:
    """Rows ``weight_k u_index_k`` (HyLo) of int64 ``index [..., r]`` and ``weight [..., r]``, in their own memory."""
    g = _taken(rows.g, index, -3) * weight.to(rows.g.dtype)[..., None, None]
    if rows.a is None:
        return rows._replace(g=g)
    return rows._replace(a=_taken(rows.a, index, -2 if _indexed(rows) else -3), g=g)


def scaled(rows: Rows, factor: float | Tensor) -> Rows:
    """``factor · u_n``; a tensor holds one factor for each group ``[...]``, or for all of them."""
    if isinstance(factor, Tensor):
        factor = factor.to(rows.g.dtype)[..., None, None, None]
    return rows._replace(g=rows.g * factor)


def concatenate(parts: Sequence[Rows]) -> Rows:
    """The rows of several parts of one kind, one part after the other; fewer positions are filled up with zeros."""
    if len(parts) == 1:
        return parts[0]
    positions = max(part.g.shape[-2] for part in parts)
    parts = [_filled(part, part.n, positions) for part in parts]
    inputs = [part.a for part in parts if part.a is not None]
    a = torch.cat(inputs, -2 if _indexed(parts[0]) else -3) if inputs else None
    return parts[0]._replace(a=a, g=torch.cat([part.g for part in parts], -3))


def padded(rows: Rows, n: int) -> Rows:
    """The rows, with zero rows after them up to ``n``."""
    return _filled(rows, n, rows.g.shape[-2])


def whole(rows: Rows) -> Rows:
    """Rows that hold the per-example gradients themselves, which is cheaper where positions are many.

    Args:
        rows: n rows whose inputs are no indices.

    Returns:
        Rows without inputs and with the gradients ``[..., n, 1, d_o·n_a]``, row-major.

    Raises:
        ValueError: If the inputs are indices.
    """
    if _indexed(rows):
        raise ValueError("rows with indices are not written out: a gradient would be as large as the table")
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


def damped_inverse(kernel: Tensor, damping: Tensor) -> tuple[Tensor, Tensor]:
    """``M = (K + λI)⁻¹`` by Cholesky (SNGD, KIS).

    To a matrix that fails, 1e-6, then 1e-4, then 1e-2 of its mean diagonal is added.

    Args:
        kernel: K, symmetric ``[..., R, R]``, best in float64.
        damping: λ > 0, ``[...]``.

    Returns:
        M ``[..., R, R]``, symmetric to the bit, zeros where nothing helped (the direction is V/λ then); whether there
        is an inverse ``[...]``.
    """
    damped = kernel.clone()
    damped.diagonal(dim1=-2, dim2=-1).add_(damping.to(kernel.dtype)[..., None])
    lower, ok = _cholesky(damped)
    return _checked(torch.cholesky_inverse(lower), ok)


def interpolated_inverse(core: Tensor, kernel: Tensor) -> tuple[Tensor, Tensor]:
    """``M = (S⁻¹ + K̂)⁻¹ = C (I + Cᵀ K̂ C)⁻¹ Cᵀ`` with ``S = C Cᵀ``: nothing undamped is inverted (HyLo, KID).

    Args:
        core: S, symmetric positive definite ``[..., R, R]``.
        kernel: K̂ of the kept rows, symmetric ``[..., R, R]``, of the dtype of ``core``.

    Returns:
        M and whether there is one, as :func:`damped_inverse` returns them, with the same ladder.
    """
    root, ok_core = _cholesky(core)
    inner = mirror_upper_(root.mT @ kernel @ root)
    inner.diagonal(dim1=-2, dim2=-1).add_(1)
    lower, ok = _cholesky(inner)
    half = torch.linalg.solve_triangular(lower, root.mT, upper=False)
    return _checked(half.mT @ half, ok & ok_core)


def block_diagonal(blocks: Sequence[Tensor]) -> Tensor:
    """The block diagonal matrix ``[..., Σr_p, Σr_p]`` of square blocks ``[..., r_p, r_p]``."""
    if len(blocks) == 1:
        return blocks[0]
    sizes = [block.shape[-1] for block in blocks]
    out = blocks[0].new_zeros(*blocks[0].shape[:-2], sum(sizes), sum(sizes))
    start = 0
    for block, size in zip(blocks, sizes, strict=True):
        out[..., start : start + size, start : start + size] = block
        start += size
    return out


def apply(rows: Rows, inverse: Tensor, damping: Tensor, matrix: Tensor) -> Tensor:
    """``(V − Σ_n z_n u_n)/λ`` with ``z = M ⟨u, V⟩``, by Woodbury: the direction of SNGD, KIS and KID.

    Costs ``4 R S d_i d_o`` flops; nothing is as large as V but the result. For a V that the rows span, the difference
    cancels: the relative error is then that of the working precision times the largest eigenvalue of F over λ.

    Args:
        rows: The R kept rows, finite even where M is 0.
        inverse: M ``[..., R, R]``, used in its own precision.
        damping: λ ``[...]``, the one that is in M.
        matrix: V ``[..., d_o, n_a]``.

    Returns:
        The direction, of the shape of V, in memory of its own.
    """
    dots = project(rows, matrix).to(inverse.dtype)
    z = (inverse @ dots[..., None]).squeeze(-1) / damping.to(inverse.dtype)[..., None]
    out = matrix / damping.to(matrix.dtype)[..., None, None]
    _add_combination_(out, rows, z.neg_())
    return out


def exact_update(rows: Rows, damping: Tensor, matrix: Tensor) -> Tensor:
    """``(F + λI)⁻¹ V [..., d_o, n_a]`` from all rows, ``λ > 0 [...]``: SNGD, its kernel inverted in float64."""
    return apply(rows, damped_inverse(gram(rows).double(), damping)[0], damping, matrix)


def curvature(rows: Rows, inverse: Tensor, damping: Tensor) -> Tensor:
    """The matrix that :func:`apply` inverts: ``(F̂ + λI)⁻¹ = (I − Û M Ûᵀ)/λ``, hence ``F̂ = λ Û M (I − K̂M)⁻¹ Ûᵀ``.

    Costs the square of the number of parameters in memory and makes a device wait: for analysis of small layers.

    Args:
        rows: The R kept rows.
        inverse: M ``[..., R, R]``, singular or not.
        damping: λ ``[...]``.

    Returns:
        F̂ ``[..., d_o·n_a, d_o·n_a]`` over row-major parameters, float64, symmetric.
    """
    u, inverse = _vectors(rows), inverse.double()
    rest = torch.eye(rows.n, dtype=u.dtype, device=u.device) - u @ u.mT @ inverse
    found: Tensor = u.mT @ torch.linalg.solve(rest, inverse, left=False) @ u
    return found.add(found.mT) * (damping.double() / 2)[..., None, None]


def second_moment(rows: Rows) -> Tensor:
    """``Σ_n u_n u_nᵀ [..., d_o·n_a, d_o·n_a]`` over row-major parameters, float64; for small layers."""
    u = _vectors(rows)
    return u.mT @ u


def effective_rank(eigenvalues: Tensor) -> Tensor:
    """``exp(−Σ p ln p) [...]`` of the shares p of eigenvalues ``[..., n]``, negative ones as 0; 0 if all are 0."""
    values = eigenvalues.double().clamp(min=0)
    total = values.sum(-1, keepdim=True)
    entropy: Tensor = torch.special.entr(values / torch.where(total > 0, total, torch.ones_like(total))).sum(-1)
    return entropy.exp() * (total > 0)[..., 0]


def rank_of_energy(eigenvalues: Tensor, share: float = 0.9) -> Tensor:
    """``min{k: Σ_{i≤k} σ_i ≥ share·Σσ} [...]`` of eigenvalues ``[..., n]`` in any order, negative ones as 0."""
    values = eigenvalues.double().clamp(min=0).sort(-1, descending=True).values
    sums: Tensor = F.pad(values.cumsum(-1), (1, 0))  # no eigenvalue is a choice too
    return (sums < share * sums[..., -1:]).sum(-1)


def _vectors(rows: Rows) -> Tensor:
    """Per-example gradients ``[..., n, d_o·n_a]`` in float64, row-major."""
    a = rows.a
    if a is not None:
        a = F.one_hot(a, rows.columns).double() if _indexed(rows) else a.double()
    return whole(Rows(a, rows.g.double(), rows.homogeneous)).g.squeeze(-2)


def _indexed(rows: Rows) -> bool:
    return rows.a is not None and not rows.a.is_floating_point()


def _width(rows: Rows) -> int:
    """n_a of rows without indices."""
    return 1 if rows.a is None else rows.a.shape[-1] + rows.homogeneous


def _squares(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1)
    return norm.square_()


def _summed(rows: Rows) -> Rows:
    """Rows without inputs have one position."""
    if rows.a is None and rows.g.shape[-2] != 1:
        return rows._replace(g=rows.g.sum(-2, keepdim=True))
    return rows


def _slices(start: int, stop: int, size: int) -> Iterator[slice]:
    return (slice(first, min(first + size, stop)) for first in range(start, stop, size))


def _part(rows: Rows, examples: slice, positions: slice = _ALL) -> Rows:
    """Views of some examples and positions."""
    a = rows.a
    if a is not None:
        a = a[..., examples, positions] if _indexed(rows) else a[..., examples, positions, :]
    return rows._replace(a=a, g=rows.g[..., examples, positions, :])


def _products(x: Rows, y: Rows) -> Tensor:
    """``⟨a, a'⟩⟨g, g'⟩`` of every pair from the last but one dimension of g, ``[..., S, S']``."""
    found = x.g @ y.g.mT
    if x.a is None or y.a is None:
        return found
    if _indexed(x):
        return found.mul_(x.a[..., :, None] == y.a[..., None, :])
    inner = x.a @ y.a.mT
    return found.addcmul_(inner, found) if x.homogeneous else found.mul_(inner)


def _tile(x: Rows, y: Rows) -> Tensor:
    """Kernel of two parts, all pairs at once."""
    (n, positions), (m, others) = x.g.shape[-3:-1], y.g.shape[-3:-1]
    found = _products(_flat(x), _flat(y))
    if positions > 1:  # over whole rows first: that is one stream, and what is left is little
        found = found.unflatten(-2, (n, positions)).sum(-2)
    return found.unflatten(-1, (m, others)).sum(-1) if others > 1 else found


def _flat(rows: Rows) -> Rows:
    """Examples and positions as one dimension."""
    a = rows.a
    if a is not None:
        a = a.flatten(-2) if _indexed(rows) else a.flatten(-3, -2)
    return rows._replace(a=a, g=rows.g.flatten(-3, -2))


def _taken(x: Tensor, index: Tensor, dim: int) -> Tensor:
    """Entries ``index [..., r]`` along the dimension that follows the leading ones."""
    if index.dim() == 1:
        return x.index_select(dim, index)
    return x.gather(dim, index[(..., *[None] * (-dim - 1))].expand(*index.shape, *x.shape[dim:][1:]))


def _filled(rows: Rows, n: int, positions: int) -> Rows:
    """Zeros (and indices 0) after the positions and after the examples."""
    after, more = positions - rows.g.shape[-2], n - rows.n
    if not after and not more:
        return rows
    a = rows.a
    if a is not None:
        a = F.pad(a, (0, after, 0, more) if _indexed(rows) else (0, 0, 0, after, 0, more))
    return rows._replace(a=a, g=F.pad(rows.g, (0, 0, 0, after, 0, more)))


def _places(index: Tensor) -> tuple[Tensor, ...]:
    """``index [..., k]`` as advanced indices into ``[..., columns, d]``."""
    lead = [
        torch.arange(size, device=index.device).view(size, *[1] * (index.dim() - 2 - i))
        for i, size in enumerate(index.flatten(-2).shape[:-1])
    ]
    return (*lead, index.flatten(-2))


def _add_combination_(out: Tensor, rows: Rows, z: Tensor) -> None:
    """Add ``Σ_n z_n u_n`` to a matrix ``[..., d_o, n_a]``."""
    rows = _summed(rows)
    z = z.to(rows.g.dtype)[..., None, None]
    g = rows.g.flatten(-3, -2)
    if rows.a is None:
        _add_product_(out, g.mT, z[..., 0])
    elif _indexed(rows):  # unlike index_add_, this one has the same bits every time, on every device
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
    """``out += x y``, without a temporary unless there is more than one leading dimension."""
    if out.dim() == 2:
        out.addmm_(x, y)
    elif out.dim() == 3:
        out.baddbmm_(x, y)
    else:
        out += x @ y


def _cholesky(x: Tensor) -> tuple[Tensor, Tensor]:
    """Lower factors of ``[..., n, n]`` with the ladder of jitters; the identity, and False ``[...]``, if all fail."""
    lower, ok = _attempt(x)
    mean = x.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)
    for jitter in _JITTERS:
        if x.device.type == "cpu" and all_true_on_cpu(ok):
            break  # a device is not asked: it climbs the whole ladder
        jittered = x.clone()
        jittered.diagonal(dim1=-2, dim2=-1).add_(jitter * mean)
        again, found = _attempt(jittered)
        lower = torch.where((found & ~ok)[..., None, None], again, lower)
        ok = ok | found
    identity = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    return torch.where(ok[..., None, None], lower, identity), ok


def _attempt(x: Tensor) -> tuple[Tensor, Tensor]:
    lower, info = torch.linalg.cholesky_ex(x)
    return lower, (info == 0) & torch.isfinite(lower.diagonal(dim1=-2, dim2=-1).sum(-1))


def _checked(inverse: Tensor, ok: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric to the bit, and zeros where it is not usable."""
    inverse = mirror_upper_(inverse.mT if inverse.mT.is_contiguous() else inverse)
    ok = ok & torch.isfinite(inverse.diagonal(dim1=-2, dim2=-1).sum(-1))
    return torch.where(ok[..., None, None], inverse, torch.zeros_like(inverse)), ok
