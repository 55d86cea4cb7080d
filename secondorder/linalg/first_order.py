"""The first-order side of a step: pure functions on lists of tensors, with the arithmetic of ``torch.optim``.

Each operation is that of ``torch.optim.SGD``, ``Adam`` or ``AdamW``, so that a parameter without curvature has the same
bits.
``gate`` is None, or a 0-dim bool tensor on the device: where it is False, nothing changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

Tensors = list[Tensor]
Scalar = float | Tensor


def sgd_(
    params: Tensors,
    directions: Tensors,
    buffers: Tensors | None,
    *,
    lr: Scalar,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
    decoupled: bool,
    gate: Tensor | None = None,
) -> None:
    """Apply heavy-ball or Nesterov momentum to ``directions``, then update the parameters, in place.

    Args:
        params: Parameters.
        directions: Gradients or preconditioned gradients, which do not change.
        buffers: Momentum buffers, None for ``momentum`` 0.
        lr: Learning rate, a number or a 0-dim tensor.
        momentum: μ.
        nesterov: Whether to use Nesterov momentum.
        weight_decay: Decay, added to the direction or, if ``decoupled``, applied to the parameter.
        decoupled: Whether decay is decoupled.
        gate: Whether anything changes, see the module.
    """
    if gate is not None:
        lr = _gated(gate, lr, 0.0)
    if weight_decay != 0 and not decoupled:
        directions = _add(directions, params, weight_decay)
    if gate is not None:
        directions = [torch.where(gate, d, 0) for d in directions]
    if weight_decay != 0 and decoupled:
        torch._foreach_mul_(params, 1 - lr * weight_decay)
    if buffers is not None:
        kept = momentum if gate is None else _gated(gate, momentum, 1.0)
        torch._foreach_mul_(buffers, kept)
        torch._foreach_add_(buffers, directions)
        directions = _add(directions, buffers, momentum) if nesterov else buffers
    _descend_(params, directions, lr)


def shrink_(params: Tensors, amount: float, gate: Tensor | None = None) -> None:
    """Multiply parameters by ``1 − amount``, in place."""
    factor = 1 - amount if gate is None else _gated(gate, 1 - amount, 1.0)
    for p in params:
        p.mul_(factor)


def adam_moments_(
    gradients: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    betas: tuple[float, float],
    gate: Tensor | None = None,
) -> None:
    """Fold gradients into Adam's first and second moments, in place."""
    beta1, beta2 = betas
    if gate is None:
        torch._foreach_lerp_(exp_avgs, gradients, 1 - beta1)
        torch._foreach_mul_(exp_avg_sqs, beta2)
    else:
        gradients = [torch.where(gate, g, 0) for g in gradients]
        torch._foreach_mul_(exp_avgs, _gated(gate, beta1, 1.0))
        torch._foreach_add_(exp_avgs, gradients, alpha=1 - beta1)
        torch._foreach_mul_(exp_avg_sqs, _gated(gate, beta2, 1.0))
    torch._foreach_addcmul_(exp_avg_sqs, gradients, gradients, 1 - beta2)


def adam_denominators(exp_avg_sqs: Tensors, steps: Sequence[float], beta2: float, eps: float) -> Tensors:
    """Return ``√v̂ + ε`` as new tensors, with ``v̂ = v / (1 − β₂^t)``."""
    roots = list(torch._foreach_sqrt(exp_avg_sqs))
    torch._foreach_div_(roots, [(1 - beta2**t) ** 0.5 for t in steps])
    torch._foreach_add_(roots, eps)
    return roots


def adam_(
    params: Tensors,
    gradients: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    steps: Sequence[float],
    *,
    lr: Scalar,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    gate: Tensor | None = None,
) -> None:
    """Apply Adam or AdamW: weight decay, moments and update, in place.

    Args:
        params: Parameters.
        gradients: The vectors that Adam uses as gradients.
        exp_avgs: First moments.
        exp_avg_sqs: Second moments.
        steps: Number of updates of each parameter, this one included (1 for the first).
        lr: Learning rate, a number or a 0-dim tensor.
        betas: β₁ and β₂.
        eps: ε.
        weight_decay: Decay, added to the gradient or, if ``decoupled``, applied to the parameter.
        decoupled: Whether decay is decoupled, as in AdamW.
        gate: Whether anything changes, see the module.
    """
    if gate is not None:
        lr = _gated(gate, lr, 0.0)
    if weight_decay != 0 and not decoupled:
        gradients = _add(gradients, params, weight_decay)
    if weight_decay != 0 and decoupled:
        torch._foreach_mul_(params, 1 - lr * weight_decay)
    adam_moments_(gradients, exp_avgs, exp_avg_sqs, betas, gate)
    denominators = adam_denominators(exp_avg_sqs, steps, betas[1], eps)
    sizes = [1 / (1 - betas[0] ** t) for t in steps]
    if isinstance(lr, Tensor):
        torch._foreach_div_(denominators, sizes)
        quotients = list(torch._foreach_div(exp_avgs, denominators))
        _descend_(params, quotients, lr)
    else:
        scaled: list[Any] = [-(lr / (1 - betas[0] ** t)) for t in steps]
        torch._foreach_addcdiv_(params, exp_avgs, denominators, scaled)


def rate(lr: Any) -> Any:
    """Return a learning rate as a number or a 0-dim tensor."""
    return lr.reshape(()) if isinstance(lr, Tensor) else lr


def kl_clip_factor(products: Tensors, lrs: Sequence[Scalar], limit: float) -> Tensor:
    """Return ``ν = min(1, √(κ / |Σ η² ⟨V, ∇⟩|))``, a 0-dim tensor that bounds the step's length in the Fisher metric.

    Args:
        products: ``⟨V, ∇⟩`` per parameter, 0-dim.
        lrs: Current learning rate η of each.
        limit: κ, about twice the KL divergence that a step may cause.

    Returns:
        ν.
    """
    total = torch.stack([p * (lr * lr) for p, lr in zip(products, lrs, strict=True)]).sum()
    return (total.abs() / limit).clamp(min=1).rsqrt()


def norms(tensors: Iterable[Tensor]) -> Tensor:
    """Return the Euclidean norm of each tensor, stacked ``[k]``, in float32 or better; tensors are read one by one."""
    real = (torch.view_as_real(t) if t.is_complex() else t for t in tensors)
    found = [torch.linalg.vector_norm(t, dtype=_accurate(t.dtype)) for t in real]
    return torch.stack([n.to(found[0].device, torch.promote_types(n.dtype, found[0].dtype)) for n in found])


def match_length_(tensors: Tensors, wanted: Tensor, found: Tensor) -> Tensor:
    """Scale tensors by one number, in place, so that together they have another length; zeros stay zeros.

    Args:
        tensors: The tensors to scale.
        wanted: Norms ``[k]`` of tensors that together have the new length.
        found: Norms of the tensors ``[k]``.

    Returns:
        The factor that they were multiplied by, 0-dim.
    """
    size, length = torch.linalg.vector_norm(wanted), torch.linalg.vector_norm(found)
    factor = torch.where(length > 0, size / length, torch.ones_like(length))
    for t in tensors:
        t.mul_(factor.to(t.device, t.dtype))
    return factor


def inner_product(x: Tensor, y: Tensor) -> Tensor:
    """Return ``Σ x·y``, 0-dim."""
    if x.is_contiguous() and y.is_contiguous():
        return torch.dot(x.view(-1), y.view(-1))
    return (x * y).sum()


def _gated(gate: Tensor, value: Scalar, otherwise: float) -> Tensor:
    """Return ``value`` where the gate is open, as a 0-dim float64 tensor, which takes the dtype of its operand."""
    blocked = torch.full_like(gate, otherwise, dtype=torch.float64)
    return torch.where(gate, blocked * 0 + value, blocked)


def _accurate(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _as_real(tensors: Tensors) -> Tensors:
    return [torch.view_as_real(t) if t.is_complex() else t for t in tensors]


def _add(tensors: Tensors, others: Tensors, alpha: float) -> Tensors:
    return list(torch._foreach_add(tensors, others, alpha=alpha))


def _descend_(params: Tensors, directions: Tensors, lr: Scalar) -> None:
    if isinstance(lr, Tensor):
        for p, d in zip(params, directions, strict=True):
            p.add_(d * -lr)  # a 0-dim CPU tensor is an argument of the kernel: nothing is copied
    else:
        torch._foreach_add_(params, directions, alpha=-lr)
