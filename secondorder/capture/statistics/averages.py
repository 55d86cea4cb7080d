"""Statistics of Kronecker factors and their running estimates, as pure functions of tensors.

The scale is exact per datum. For N examples of S positions each, let g be the per-example gradients (without the mean
of the loss) and a the inputs (with 1 appended last for a bias)::

    expand   A = 1/(N S) Σ_n Σ_s a aᵀ                 B = 1/N Σ_n Σ_s g gᵀ
    reduce   A = 1/N Σ_n ā āᵀ,  ā = mean_s a          B = 1/N Σ_n ĝ ĝᵀ,  ĝ = Σ_s g

Then ``B ⊗ A`` is the block of the Fisher of the mean per-example loss over row-major ``vec([W | b])``, for every batch
size, number of micro-batches and image size (Eschenhagen et al. 2023, arXiv 2311.00636, section 3).
"""

from __future__ import annotations

import torch
from torch import Tensor

from secondorder.linalg.dense import Workspace, aligned, is_on_host, product

#: Range of π of the factored damping, which prevents a vanishing factor from getting all of the damping.
_PI_RANGE = (1e-6, 1e6)


def gradient_scale(examples: int, reduction: str, loss_terms: float) -> float:
    """Factor from ``Σ g° g°ᵀ`` of captured gradients to B.

    Args:
        examples: N, examples of all micro-batches of the step.
        reduction: ``"mean"`` if the objective divides by the number of examples (then ``g = N g°``), ``"sum"`` if not.
        loss_terms: T, the number of scalar loss terms per example in the mean. It has no meaning for a sum.

    Returns:
        ``N·T`` for a mean, ``1/N`` for a sum.
    """
    return examples * loss_terms if reduction == "mean" else 1.0 / examples


def ratio_ema_(
    running: list[Tensor],
    weight: Tensor,
    sums: list[Tensor],
    scales: list[float],
    batch_weight: float,
    decay: float,
    ok: Tensor,
) -> None:
    """Update running means with one batch, without bias from the first batch on.

    ``W ← βW + w``, ``X ← X + (w/W)(X_batch − X)``, ``W₀ = 0``: the first value is the first batch, and for β = 1 the
    estimate is the pooled mean. If ``ok`` is False, nothing changes.

    Args:
        running: Estimates, changed in place.
        weight: W, a 0-dim float64 tensor, or ``[k]`` for estimates ``[k, ...]``, changed in place.
        sums: Batch sums, of the shapes of ``running``; ``X_batch`` is a sum times its scale.
        scales: Their scales.
        batch_weight: w, usually the number of examples.
        decay: β, the weight of the old value, in [0, 1].
        ok: 0-dim bool tensor, or ``[k]``.
    """
    grown = weight * decay + batch_weight
    share = batch_weight / grown * ok
    torch.where(ok, grown, weight, out=weight)
    if ok.device.type == "cpu":  # plain numbers are free to read here and save three passes
        part = float(share.numpy())
        for estimate, total, scale in zip(running, sums, scales, strict=True):
            if part > 0:
                wide = estimate.to(total.dtype)  # itself, unless it is kept in fewer bits
                wide.mul_(1 - part).add_(total, alpha=part * scale)
                _round(estimate, wide)
        return
    for estimate, total, scale in zip(running, sums, scales, strict=True):
        lead = [*share.shape, *[1] * (estimate.dim() - share.dim())] if share.dim() else []
        wide = estimate.to(total.dtype)
        found = torch.where(ok.view(lead), total * scale, wide)
        _round(estimate, wide.lerp_(found, share.to(wide.dtype).view(lead)))


def _round(kept: Tensor, wide: Tensor) -> None:
    """Copy the result that was computed in more bits, if it is another tensor."""
    if wide is not kept:
        kept.copy_(wide)


def all_finite(tensors: list[Tensor]) -> Tensor:
    """Return whether all entries of all tensors are finite, as a 0-dim bool tensor, in one pass over them."""
    first = tensors[0]
    if not is_on_host(first) and all(_reads_as(t, first) for t in tensors):
        found = list(torch._foreach_norm(tensors, torch.inf))  # one kernel for all tensors
    else:
        found = [t.sum(dtype=torch.float64 if t.dtype == torch.float64 else torch.float32) for t in tensors]
    return torch.isfinite(torch.stack([x.to(found[0].device) for x in found])).all()


def _reads_as(x: Tensor, like: Tensor) -> bool:
    return x.is_floating_point() and x.dtype == like.dtype and x.device == like.device and x.numel() > 0


def effective_damping(damping: float, mode: str, mean_value: Tensor) -> Tensor:
    """Return λ of a block, which is ``damping`` or, in ``"relative"`` mode, a multiple of the mean eigenvalue.

    A block whose factors are all zero uses the absolute value.

    Returns:
        λ ``[...]``, of the shape of ``mean_value``.
    """
    if mode == "absolute":
        return torch.full_like(mean_value, damping)
    return torch.where(mean_value > 0, mean_value * damping, damping)


def pi_damping(mean_a: Tensor, mean_g: Tensor, damping: Tensor) -> tuple[Tensor, Tensor]:
    """Split λ over the factors: ``π√λ`` for A and ``√λ/π`` for G (Martens & Grosse 2015, section 6.3).

    Args:
        mean_a: Mean eigenvalue of A, ``tr A / n_a``, shape ``[...]``.
        mean_g: Mean eigenvalue of G, ``tr G / n_g``, shape ``[...]``.
        damping: λ, shape ``[...]``.

    Returns:
        The two dampings. π is 1 where a trace is 0 or not finite.
    """
    ratio = mean_a / mean_g
    usable = torch.isfinite(ratio) & (ratio > 0)
    pi = torch.where(usable, ratio, torch.ones_like(ratio)).sqrt().clamp(*_PI_RANGE)
    root = damping.sqrt()
    return pi * root, root / pi


def split_eigenvalues(values_a: Tensor, values_g: Tensor, damping: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues of ``A + π√λ I`` and ``G + √λ/π I``.

    Args:
        values_a: Eigenvalues of A ``[..., n_a]``.
        values_g: Eigenvalues of G ``[..., n_g]``.
        damping: λ, shape ``[...]``.

    Returns:
        The damped eigenvalues, in the same shapes. Each factor is damped by no less than the rounding error of its own
        largest eigenvalue, so the products need no floor beyond the damping that they contain.
    """
    add_a, add_g = pi_damping(values_a.mean(-1), values_g.mean(-1), damping)
    return add_to_eigenvalues(values_a, add_a), add_to_eigenvalues(values_g, add_g)


def add_to_eigenvalues(values: Tensor, add: Tensor) -> Tensor:
    """``values [..., n]`` plus a damping ``[...]`` that is no less than the rounding error of the largest one."""
    return values + torch.maximum(add, torch.finfo(values.dtype).eps * values.amax(-1))[..., None]


def add_to_diagonal(x: Tensor, value: Tensor, diagonal: bool = False) -> Tensor:
    """``x + value·I`` as a new tensor; ``x [..., n, n]`` (or its diagonal ``[..., n]``), ``value [...]``."""
    if diagonal:
        return x + value[..., None]
    damped = x.clone()
    damped.diagonal(dim1=-2, dim2=-1).add_(value[..., None])
    return damped


def solve_factored(grad: Tensor, inverse_a: Tensor, inverse_g: Tensor, workspace: Workspace) -> Tensor:
    """``G⁻¹ grad A⁻¹`` from the inverses of the damped factors ``[..., n, n]``, or of diagonal ones ``[..., n]``.

    Returns:
        The solution, which is not in the memory of the workspace, since the next block overwrites that.
    """
    if inverse_g.dim() < grad.dim():
        grad = grad * inverse_g[..., :, None]
    else:
        grad = product(aligned(inverse_g, workspace), grad, workspace)
    if inverse_a.dim() < grad.dim():
        return grad * inverse_a[..., None, :]
    return product(grad, aligned(inverse_a, workspace))
