r"""Selection of examples that represent all n by importance sampling or interpolative decomposition (pure functions).

The curvature is ``F = Σ u uᵀ`` over the rows u of n examples, with the kernel ``K_st = ⟨u_s, u_t⟩``; r rows are kept.

*Sampling* (:func:`draw`) keeps row s with the weight ``ω_s``, so that ``F̂ = Σ ω² u uᵀ`` over what was drawn. With the
scores ``q_s = K_ss``:

==============  ====================================================  ==============  =============================
sampling        draw                                                  ω_s             property
==============  ====================================================  ==============  =============================
systematic      once each, with probability ``π_s = min(1, c q_s)``   ``1/√π_s``      ``E[F̂] = F``; r = n is exact
replacement     r times with probabilities ``p_s = q_s/Σq``           ``1/√(r p_s)``  ``E[F̂] = F``; never exact
unweighted      one after the other, of those left, like ``q_s``      ``√(n/r)``      biased
uniform         once each, all alike                                  ``√(n₊/r)``     ``E[F̂] = F``; r = n is exact
==============  ====================================================  ==============  =============================

c is such that ``Σπ = r``, and n₊ is the number of positive scores: a row of zeros is never drawn.

*Interpolation* (:func:`interpolate`) writes all rows as combinations of the kept ones, the pivots I of a Cholesky
factorization with pivoting, which stops after r rows or where nothing is left:

.. math::
    K ≈ L Lᵀ, \quad P = L_I^{-ᵀ} Lᵀ \; [r, n], \quad P_{·I} = 1
    \quad ⟹ \quad K ≈ Pᵀ K_{II} P, \quad E = K − L Lᵀ ⪰ 0 .

With ``D = λI``, ``λI + diag(E)`` or ``λI + E`` for what is left out, ``S = P D⁻¹ Pᵀ`` (:func:`core`) is all that the
damped inverse needs to know of the rows that are not kept: ``P (D + Pᵀ K̂ P)⁻¹ Pᵀ = (S⁻¹ + K̂)⁻¹``, ``K̂ = K_II``.

Every function accepts leading batch dimensions ``...``, and the host never reads a value from a device. Numbers that
are not finite appear as nan in the weights, but never in the indices.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from secondorder.linalg.dense import anywhere

SAMPLINGS = ("systematic", "replacement", "unweighted", "uniform")
PIVOTINGS = ("cholesky", "qr", "score")
RESIDUALS = ("none", "diag", "full")

#: Length of a probability of 1 on the integer line of a systematic draw: sums of integers are exact, so that what must
#: be drawn is drawn and nothing is drawn twice. Probabilities below half a unit, 5e-13, count as 0.
_UNIT = 1 << 40
#: Largest kernel that is factorized in float64 whatever its own precision is.
_DOUBLE_UP_TO = 2048
#: Remaining diagonal, relative to the largest of the kernel, below which it is rounding.
_TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-13}


class Draw(NamedTuple):
    """A sample of rows.

    Attributes:
        index: Examples, int64 ``[..., r]``. They are distinct unless drawn with replacement, and ascending as far as
            there was something to draw.
        weight: ω, in the dtype of the scores ``[..., r]``; 0 where nothing was left to draw, nan for a nonfinite one.
    """

    index: Tensor  # type: ignore[assignment]  # not the method of tuples
    weight: Tensor


class Interpolation(NamedTuple):
    """All rows as combinations of a few: ``K ≈ Pᵀ K[I, I] P``.

    Attributes:
        index: Pivots I, int64 ``[..., r]``, in the order in which they were chosen; distinct unless the given order is
            not.
        valid: 1 for a pivot, 0 where the kernel had nothing left, in the dtype of the kernel ``[..., r]``; nan for a
            kernel that is not finite.
        p: P ``[..., r, n]``, the identity on the valid pivots and 0 in the rows of the others.
        residual: Diagonal of ``E = K − L Lᵀ`` ``[..., n]``, ≥ 0 and 0 on the valid pivots.
        energy: How much of the trace each pivot explains together with those before, ``Σ L²`` ``[..., r]``.
    """

    index: Tensor  # type: ignore[assignment]  # not the method of tuples
    valid: Tensor
    p: Tensor
    residual: Tensor
    energy: Tensor


def planned_rank(n: int, fraction: float, max_rank: int) -> int:
    """Return the number of rows to keep of n: ``⌈ρ n⌉``, at least 1 and at most ``min(n, max_rank)``."""
    # In floating point, 0.07·100 is 7.000000000000001, which stands for 7.
    return max(1, min(math.ceil(fraction * n - 1e-9), n, max_rank))


def inclusion(scores: Tensor, rank: int) -> Tensor:
    """Return the probabilities ``π = min(1, c q)`` of a draw without repeats, with c such that they sum to the rank.

    This is the limit of ``min(1, r q/Σq)`` when the excess above 1 is repeatedly distributed to the others; the number
    of ones is computed from the sorted scores instead.

    Args:
        scores: q ``[..., n]``; negative ones count as 0.
        rank: r, from 1 to n.

    Returns:
        π ``[..., n]`` in float64, with the sum ``min(r, number of positive scores)``.
    """
    _check_rank(rank, scores)
    q = scores.double().clamp(min=0)
    ordered = q.sort(-1, descending=True).values
    tail = ordered.flip(-1).cumsum(-1).flip(-1)
    left = rank - torch.arange(q.shape[-1], device=q.device)  # the number left to draw after that many ones
    ones = (left * ordered > tail).sum(-1, keepdim=True)
    pi = (q * ((rank - ones) / tail.gather(-1, ones))).clamp(max=1)
    positive = q > 0
    # If all of them are drawn, the probabilities are exactly 1.
    return torch.where(positive.sum(-1, keepdim=True) <= rank, positive.to(q), pi)


def draw(scores: Tensor, rank: int, sampling: str, generator: torch.Generator) -> Draw:
    """Draw rows by their scores.

    Args:
        scores: q ``[..., n]``, the squared lengths of the rows; negative ones count as 0.
        rank: r, from 1 to n.
        sampling: One of :data:`SAMPLINGS`, see the table of the module.
        generator: A CPU generator; random numbers are drawn from it once for the whole batch, the same number on any
            device.

    Returns:
        The examples and their weights.

    Raises:
        ValueError: For an unknown sampling, or a rank that is not in 1…n.
    """
    if sampling not in SAMPLINGS:
        raise ValueError(f"sampling must be one of {SAMPLINGS}, got {sampling!r}")
    _check_rank(rank, scores)
    q = scores.double().clamp(min=0)
    n = q.shape[-1]
    numbers = {"systematic": n + 1, "replacement": rank}.get(sampling, n)
    # The memory is not pinned: the host waits for its own copy at most, not for the device.
    uniform = torch.rand(*q.shape[:-1], numbers, generator=generator, dtype=torch.float64)
    uniform = uniform.to(q.device, non_blocking=True)
    if sampling == "replacement":
        index, weight = _with_replacement(q, uniform)
    elif sampling == "systematic":
        pi = inclusion(q, rank)
        index, drawn = _positions(_systematic(pi, uniform), rank)
        weight = torch.where(drawn, pi.gather(-1, index).rsqrt(), 0.0)
    else:
        positive = q > 0
        index, drawn = _positions(_race(q if sampling == "unweighted" else positive.to(q), uniform, rank), rank)
        count = positive.sum(-1, keepdim=True).double()
        square = torch.full_like(q[..., :1], n / rank) if sampling == "unweighted" else (count / rank).clamp(min=1)
        weight = torch.where(drawn, square.sqrt(), 0.0)
    finite = q.isfinite().all(-1, keepdim=True)
    return Draw(index, torch.where(finite, weight, torch.nan).to(scores.dtype))


def pivots(kernel: Tensor, rank: int, pivoting: str) -> Tensor | None:
    """Return an order of pivots for :func:`interpolate`.

    Args:
        kernel: K ``[..., n, n]``.
        rank: r, from 1 to n.
        pivoting: ``"cholesky"`` prescribes none; ``"qr"`` takes that of a column-pivoted QR factorization of the
            kernel, in which each pivot is the column with the longest rest; ``"score"`` takes the longest rows, however
            similar they are.

    Returns:
        Pivots, int64 ``[..., r]``, or None.

    Raises:
        ValueError: For an unknown pivoting, or a rank that is not in 1…n.
    """
    if pivoting not in PIVOTINGS:
        raise ValueError(f"pivoting must be one of {PIVOTINGS}, got {pivoting!r}")
    _check_rank(rank, kernel)
    if pivoting == "cholesky":
        return None
    if pivoting == "score":
        diagonal = kernel.diagonal(dim1=-2, dim2=-1)
        return diagonal.argsort(dim=-1, descending=True, stable=True)[..., :rank]
    columns = kernel.to(_working_dtype(kernel), copy=True)
    taken = torch.zeros(kernel.shape[:-1], dtype=torch.bool, device=kernel.device)
    order = torch.empty(*kernel.shape[:-2], rank, dtype=torch.int64, device=kernel.device)
    for j in range(rank):
        squares = columns.square().sum(-2)
        pivot = squares.masked_fill(taken, -1.0).argmax(-1, keepdim=True)
        order[..., j : j + 1] = pivot
        taken.scatter_(-1, pivot, True)
        rest = columns.gather(-1, pivot[..., None, :].expand(*columns.shape[:-1], 1))
        square = squares.gather(-1, pivot)[..., None]
        # The rest of each column is measured again in each round, so that no orthonormal basis has to be kept.
        columns -= rest @ torch.where(square > 0, (rest.mT @ columns) / square, 0.0)
    return order


def interpolate(
    kernel: Tensor, rank: int, tolerance: float | None = None, order: Tensor | None = None
) -> Interpolation:
    """Return the interpolative decomposition of a kernel by pivoted Cholesky factorization, at a cost of ``n r²``.

    Args:
        kernel: K ``[..., n, n]``, symmetric and positive semi-definite up to rounding.
        rank: r, from 1 to n.
        tolerance: A pivot must be larger than this times the largest diagonal entry; None for 1e-13 with a float64
            kernel, and 1e-6 otherwise.
        order: Pivots int64 ``[..., r]`` in order, from :func:`pivots`; None for the largest remaining diagonal each.

    Returns:
        The decomposition, in float64 up to n = 2048.
    """
    _check_rank(rank, kernel)
    if tolerance is None:
        tolerance = _TOLERANCE.get(kernel.dtype, _TOLERANCE[torch.float32])
    k = kernel.to(_working_dtype(kernel))
    n = k.shape[-1]
    residual = k.diagonal(dim1=-2, dim2=-1).clamp(min=0)
    finite = residual.isfinite().all(-1, keepdim=True)
    least = tolerance * residual.amax(-1, keepdim=True)
    factor = k.new_zeros(*k.shape[:-2], rank, n)  # Lᵀ
    index = torch.empty(*k.shape[:-2], rank, dtype=torch.int64, device=k.device)
    valid = torch.empty(index.shape, dtype=torch.bool, device=k.device)
    done, seen = torch.zeros_like(residual, dtype=torch.bool), torch.zeros_like(residual, dtype=torch.bool)
    for j in range(rank):
        if order is None:
            pivot = residual.masked_fill(seen, -1.0).argmax(-1, keepdim=True)
            seen.scatter_(-1, pivot, True)
        else:
            pivot = order[..., j : j + 1]
        square = residual.gather(-1, pivot)
        good = square > least
        row = _row(k, factor[..., :j, :], pivot).masked_fill(done, 0.0)
        row = torch.where(good, row / square.sqrt(), 0.0)
        row.scatter_(-1, pivot, torch.where(good, square.sqrt(), 0.0))
        factor[..., j, :], index[..., j : j + 1], valid[..., j : j + 1] = row, pivot, good
        done.scatter_(-1, pivot, good | done.gather(-1, pivot))
        residual = (residual - row * row).clamp(min=0).masked_fill(done, 0.0)
    p = _coefficients(factor, index, valid, done)
    energy = factor.square().sum(-1).cumsum(-1)
    return Interpolation(index, torch.where(finite, valid.to(kernel), torch.nan), p, residual, energy)


def core(kernel: Tensor, found: Interpolation, damping: Tensor | float, residual: str) -> Tensor:
    """Return ``S = P D⁻¹ Pᵀ``, by which the rows that are not kept enter the damped inverse.

    Args:
        kernel: K ``[..., n, n]``; only ``"full"`` reads it.
        found: Its decomposition.
        damping: λ > 0 ``[...]``.
        residual: Form of D: ``"none"`` for λI, ``"diag"`` for λI + diag(E), ``"full"`` for λI + E, or the form of
            ``"diag"`` if rounding makes it indefinite.

    Returns:
        S ``[..., r, r]``, symmetric bit for bit, with a 1 on the diagonal of each pivot that is not valid.

    Raises:
        ValueError: For an unknown residual.
    """
    if residual not in RESIDUALS:
        raise ValueError(f"residual must be one of {RESIDUALS}, got {residual!r}")
    p = found.p
    shift = damping.to(p)[..., None] if isinstance(damping, Tensor) else p.new_full((1,), damping)
    d = shift + found.residual if residual != "none" else shift.expand_as(found.residual)
    s = (p / d[..., None, :]) @ p.mT
    if residual == "full":
        rest = _left_out(kernel.to(p), found)
        rest.diagonal(dim1=-2, dim2=-1).add_(shift)
        lower, info = anywhere(torch.linalg.cholesky_ex, rest)
        half = anywhere(torch.linalg.solve_triangular, lower, p.mT, upper=False)
        s = torch.where((info == 0)[..., None, None], half.mT @ half, s)
    s = (s + s.mT) / 2
    s.diagonal(dim1=-2, dim2=-1).add_((found.valid == 0).to(s))
    return s


def energy_rank(found: Interpolation, trace: Tensor, share: float, rounding: float = 1e-12) -> Tensor:
    """Return the smallest number of pivots that explain a share of the trace of the kernel.

    Args:
        found: A decomposition of rank r.
        trace: Trace of the kernel ``[...]``.
        share: The share, from 0 to 1.
        rounding: Fraction of the trace that may be rounding.

    Returns:
        Number of pivots, int64 ``[...]``, at least 1; r if all of them do not suffice.
    """
    # The whole trace is reached only up to rounding.
    missing = found.energy < (1 - rounding) * share * trace.to(found.energy)[..., None]
    return (missing.sum(-1) + 1).clamp(max=found.energy.shape[-1])


def _check_rank(rank: int, x: Tensor) -> None:
    if not 1 <= rank <= x.shape[-1]:
        raise ValueError(f"rank must be in 1…{x.shape[-1]}, the number of examples, got {rank}")


def _working_dtype(kernel: Tensor) -> torch.dtype:
    return torch.float64 if kernel.shape[-1] <= _DOUBLE_UP_TO else torch.promote_types(kernel.dtype, torch.float32)


def _positions(selected: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return the places ``[..., r]`` of the ones of a mask ``[..., n]``, then of others, and which of them are ones."""
    order = selected.logical_not().byte().argsort(dim=-1, stable=True)[..., :rank]
    return order, selected.gather(-1, order)


def _systematic(pi: Tensor, uniform: Tensor) -> Tensor:
    """Return a mask ``[..., n]`` of the rows that equidistant points hit if all lie, in random order, on a line.

    Args:
        pi: Lengths π ``[..., n]``.
        uniform: Random numbers ``[..., n + 1]``.

    Returns:
        The mask, with as many ones as the sum of π, which is a whole number up to rounding.
    """
    order = uniform[..., :-1].argsort(dim=-1)
    length = (pi.gather(-1, order) * _UNIT).round().long()
    stop = length.cumsum(-1)
    surplus = (stop[..., -1:] + _UNIT // 2) % _UNIT - _UNIT // 2
    # The first point is chosen so that the points hit as many rows as they should, although lengths were rounded.
    low, high = surplus.clamp(min=0), _UNIT + surplus.clamp(max=0)
    first = low + (uniform[..., -1:] * (high - low)).long()
    before = torch.div(first - (stop - length), _UNIT, rounding_mode="floor")
    hit = before != torch.div(first - stop, _UNIT, rounding_mode="floor")
    return torch.zeros_like(hit).scatter_(-1, order, hit)


def _race(rates: Tensor, uniform: Tensor, rank: int) -> Tensor:
    """Return a mask ``[..., n]`` of the first r of independent exponential times, a draw without replacement."""
    time = torch.where(rates > 0, -torch.log1p(-uniform) / rates, torch.inf)
    first = time.argsort(dim=-1, stable=True)[..., :rank]
    return torch.zeros_like(rates, dtype=torch.bool).scatter_(-1, first, True) & (rates > 0)


def _with_replacement(q: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Return index and weight ``[..., r]`` of independent draws."""
    stop = q.cumsum(-1)
    total = stop[..., -1:].contiguous()
    # The bound is the last number below the total: rounding must not lead past the last positive score.
    at = torch.minimum(uniform * total, total.nextafter(torch.zeros_like(total)))
    index = torch.searchsorted(stop, at, right=True).clamp(max=q.shape[-1] - 1)
    p = q.gather(-1, index) / total
    return index, torch.where(p > 0, (uniform.shape[-1] * p).rsqrt(), 0.0)


def _row(kernel: Tensor, factor: Tensor, pivot: Tensor) -> Tensor:
    """Return row ``pivot [..., 1]`` of the kernel without what earlier pivots explain, ``factor [..., j, n]``."""
    at = pivot[..., None]
    row = kernel.gather(-2, at.expand(*kernel.shape[:-2], 1, kernel.shape[-1]))
    known = factor.gather(-1, at.expand(*factor.shape[:-1], 1))
    rest: Tensor = row - known.mT @ factor
    return rest[..., 0, :]


def _coefficients(factor: Tensor, index: Tensor, valid: Tensor, done: Tensor) -> Tensor:
    """Return ``P = L_I⁻ᵀ Lᵀ`` from ``Lᵀ [..., r, n]``, which is exactly the identity where ``done [..., n]``."""
    columns = index[..., None, :].expand(*factor.shape[:-1], factor.shape[-2])
    triangle = factor.gather(-1, columns)
    # A pivot that is not valid has a row of zeros; with this 1, the solution there is 0.
    triangle.diagonal(dim1=-2, dim2=-1).add_(valid.logical_not().to(factor))
    p: Tensor = anywhere(torch.linalg.solve_triangular, triangle, factor, upper=True)
    return p.masked_fill(done[..., None, :], 0.0).scatter_add_(-1, columns, torch.diag_embed(valid.to(p)))


def _left_out(kernel: Tensor, found: Interpolation) -> Tensor:
    """Return ``E = K − Pᵀ K[I, I] P`` ``[..., n, n]``, symmetric, with zeros on the valid pivots."""
    r, n = found.p.shape[-2:]
    kept = kernel.gather(-2, found.index[..., None].expand(*kernel.shape[:-2], r, n))
    kept = kept.gather(-1, found.index[..., None, :].expand(*kernel.shape[:-2], r, r))
    rest = kernel - found.p.mT @ (kept @ found.p)
    pivot = torch.zeros_like(found.residual).scatter_add_(-1, found.index, found.valid.to(rest)) != 0
    rest = rest.masked_fill(pivot[..., None], 0.0).masked_fill(pivot[..., None, :], 0.0)
    symmetric: Tensor = (rest + rest.mT) / 2
    return symmetric
