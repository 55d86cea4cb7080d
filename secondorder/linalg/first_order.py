"""The first-order part of a step: pure functions on lists of tensors, with the arithmetic of ``torch.optim``.

Each operation is that of ``torch.optim.SGD``, ``Adam`` or ``AdamW``, so that a parameter without curvature has the same
bits.
``gate`` is None, or a 0-dim bool tensor on the device: where it is False, nothing changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor

from secondorder.linalg import stacks
from secondorder.linalg.gates import fused_sgd_, gated, lerp_gated_

Tensors = list[Tensor]
Scalar = float | Tensor

#: Entries that are read together: of small tensors, or of a piece of a large one, with temporaries in a CPU's cache.
_PIECE = 2**16


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
    if gate is not None and fused_sgd_(
        params, directions, buffers, lr, momentum, nesterov, weight_decay, decoupled, gate
    ):
        return
    if gate is not None:
        lr = gated(gate, lr, 0.0)
    if weight_decay != 0 and not decoupled:
        directions = _add(directions, params, weight_decay)
    if gate is not None:
        directions = [torch.where(gate, d, 0) for d in directions]
    if weight_decay != 0 and decoupled:
        torch._foreach_mul_(params, 1 - lr * weight_decay)
    if buffers is not None:
        kept = momentum if gate is None else gated(gate, momentum, 1.0)
        torch._foreach_mul_(buffers, kept)
        torch._foreach_add_(buffers, directions)
        directions = _add(directions, buffers, momentum) if nesterov else buffers
    _descend_(params, directions, lr)


def shrink_(params: Tensors, amount: float, gate: Tensor | None = None) -> None:
    """Multiply parameters by ``1 − amount``, in place."""
    torch._foreach_mul_(params, 1 - amount if gate is None else gated(gate, 1 - amount, 1.0))


def adam_moments_(
    gradients: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, betas: tuple[float, float], gate: Tensor | None = None
) -> None:
    """Update Adam's first and second moments with gradients, in place."""
    beta1, beta2 = betas
    if gate is None:
        torch._foreach_lerp_(exp_avgs, gradients, 1 - beta1)
        torch._foreach_mul_(exp_avg_sqs, beta2)
    else:
        lerp_gated_(exp_avgs, gradients, 1 - beta1, gate)
        if gradients[0].dtype != torch.float16:  # squares may be too large for it
            lerp_gated_(exp_avg_sqs, list(torch._foreach_mul(gradients, gradients)), 1 - beta2, gate)
            return
        gradients = [torch.where(gate, g, 0) for g in gradients]
        torch._foreach_mul_(exp_avg_sqs, gated(gate, beta2, 1.0))
    torch._foreach_addcmul_(exp_avg_sqs, gradients, gradients, 1 - beta2)


def mean_gradients_(
    means: Tensors, gradients: Tensors, counts: Sequence[int], beta: float, nesterov: bool, gate: Tensor | None
) -> Tensors:
    """Update running means of gradients in place, and return what they say about the next gradients.

    Args:
        means: The running means, which begin at 0.
        gradients: The gradients, which do not change.
        counts: Number of updates of each mean, this one included.
        beta: β, the weight of the old mean.
        nesterov: Whether to return ``β m̂ + (1 − β) ∇``.
        gate: Whether anything changes, see the module.

    Returns:
        The means without bias, ``m̂ = m / (1 − β^t)``, or Nesterov's combination with the gradients.
    """
    if gate is None:
        torch._foreach_lerp_(means, gradients, 1 - beta)
    else:
        lerp_gated_(means, gradients, 1 - beta, gate)
    found = corrected(means, counts, beta)
    return list(torch._foreach_lerp(gradients, found, beta)) if nesterov else found


def adam_denominators(exp_avg_sqs: Tensors, steps: Sequence[float], beta2: float, eps: float) -> Tensors:
    """Return ``√v̂ + ε`` as new tensors, with ``v̂ = v / (1 − β₂^t)``."""
    roots = list(torch._foreach_sqrt(exp_avg_sqs))
    torch._foreach_div_(roots, [(1 - beta2**t) ** 0.5 for t in steps])
    torch._foreach_add_(roots, eps)
    return roots


def adam_steps(moments: Sequence[tuple[Tensor, ...]], betas: tuple[float, float], eps: float) -> Tensors:
    """Return Adam's steps at rate 1, ``m̂ / (√v̂ + ε)``, for ``(m, v, number of updates)`` of tensors, as new tensors."""
    exp_avgs, exp_avg_sqs, counts = map(list, zip(*moments, strict=True))
    steps = torch.stack(counts).tolist()
    roots = adam_denominators(exp_avg_sqs, steps, betas[1], eps)
    found = corrected(exp_avgs, steps, betas[0])
    torch._foreach_div_(found, roots)
    return found


def adam_lengths_(
    gradients: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    counts: Tensors,
    betas: tuple[float, float],
    eps: float,
    gate: Tensor | None = None,
) -> Tensor:
    """Update Adam's moments in place, and compute the lengths of its steps at rate 1.

    On a CPU this is one pass over memory. Elsewhere the steps exist a few at a time, as all are as large as the model.

    Returns:
        The lengths ``[k]``.
    """
    if gate is None and fits_fused((*gradients, *exp_avgs)):
        pieces = _pieces(gradients, exp_avgs, exp_avg_sqs, counts)
        parts = stacks.bounded(pieces, lambda own: own[0].numel(), _PIECE)
        found = norms(step for part in parts for step in _fused_steps(part, betas, eps))
        return _together(found, [max(1, -(-t.numel() // _PIECE)) for t in gradients])
    adam_moments_(gradients, exp_avgs, exp_avg_sqs, betas, gate)
    piece = _PIECE if gate is None else stacks.LIMIT
    parts = stacks.bounded(zip(exp_avgs, exp_avg_sqs, counts, strict=True), lambda own: own[0].numel(), piece)
    return norms(step for part in parts for step in adam_steps(part, betas, eps))


def _fused_steps(pieces: Sequence[tuple[Tensor, ...]], betas: tuple[float, float], eps: float) -> Tensors:
    """Update Adam's moments in place, and return its steps at rate 1, for ``(gradient, moments, count)`` of tensors."""
    gradients, *moments, counts = map(list, zip(*pieces, strict=True))
    found = list(map(torch.zeros_like, gradients))
    _fused_adam_((found, gradients, *moments), counts, 1.0, betas, eps, 0.0, False)
    return found


def _fused_adam_(
    lists: Iterable[Tensors], counts: Tensors, lr: Scalar, betas: tuple[float, float], eps: float, decay: float,
    decoupled: bool,
) -> None:  # fmt: skip
    kernel: Any = torch._fused_adamw_ if decoupled else torch._fused_adam_
    own = {"beta1": betas[0], "beta2": betas[1], "eps": eps, "weight_decay": decay}
    kernel(*lists, [], counts, lr=lr, **own, amsgrad=False, maximize=False)


def _pieces(*lists: Tensors) -> Iterator[tuple[Tensor, ...]]:
    """Yield corresponding tensors, those that are large in pieces, with the last one, which is a 0-dim tensor."""
    for *own, step in zip(*lists, strict=True):
        if own[0].numel() <= _PIECE:
            yield (*own, step)
        else:
            yield from zip(*(t.view(-1).split(_PIECE) for t in own), repeat(step))


def fits_fused(tensors: Sequence[Tensor]) -> bool:
    """Return whether the fused kernels of the CPU accept these tensors, which they read in the order of memory."""
    are_plain = all(t.device.type == "cpu" and type(t) is Tensor and t.is_contiguous() for t in tensors)
    return are_plain and len({t.dtype for t in tensors}) == 1


def corrected(exp_avgs: Tensors, steps: Sequence[float], beta1: float) -> Tensors:
    """Return ``m̂ = m / (1 − β₁^t)`` as new tensors."""
    return list(torch._foreach_div(exp_avgs, [1 - beta1**t for t in steps]))


def adam_(
    params: Tensors,
    gradients: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    counts: Tensors,
    *,
    lr: Scalar,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    gate: Tensor | None = None,
    fused: bool = False,
) -> None:
    """Apply Adam or AdamW: weight decay, moments and update, in place.

    Args:
        params: Parameters.
        gradients: The vectors that Adam uses as gradients.
        exp_avgs: First moments.
        exp_avg_sqs: Second moments.
        counts: Number of updates of each parameter, this one included (1 for the first), as 0-dim tensors.
        lr: Learning rate, a number or a 0-dim tensor.
        betas: β₁ and β₂.
        eps: ε.
        weight_decay: Decay, added to the gradient or, if ``decoupled``, applied to the parameter.
        decoupled: Whether decay is decoupled, as in AdamW.
        gate: Whether anything changes, see the module.
        fused: Whether to use one pass over memory, which rounds differently and has no gate; see :func:`fits_fused`.
    """
    if fused:
        _fused_adam_((params, gradients, exp_avgs, exp_avg_sqs), counts, lr, betas, eps, weight_decay, decoupled)
        return
    if gate is not None:
        lr = gated(gate, lr, 0.0)
    if weight_decay != 0 and not decoupled:
        gradients = _add(gradients, params, weight_decay)
    if weight_decay != 0 and decoupled:
        torch._foreach_mul_(params, 1 - lr * weight_decay)
    adam_moments_(gradients, exp_avgs, exp_avg_sqs, betas, gate)
    steps = torch.stack(counts).tolist()
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
    by_rate: dict[int | float, tuple[Scalar, Tensors]] = {}
    for product, lr in zip(products, lrs, strict=True):
        by_rate.setdefault(id(lr) if isinstance(lr, Tensor) else lr, (lr, []))[1].append(product)
    total = torch.stack([torch.stack(some).sum() * (lr * lr) for lr, some in by_rate.values()]).sum()
    return (total.abs() / limit).clamp(min=1).rsqrt()


def norms(tensors: Iterable[Tensor]) -> Tensor:
    """Return the Euclidean norm of each tensor, stacked ``[k]``, in float32 or better.

    Tensors are read a few at a time, so that those of a generator do not exist together.
    """
    found: Tensors = []
    tensors = iter(tensors)
    first = next(tensors)
    piece = _PIECE if first.device.type == "cpu" else stacks.LIMIT
    for some in stacks.bounded(chain((first,), tensors), Tensor.numel, piece):
        real = as_real(some)
        accurate = {_accurate(t.dtype) for t in real}
        if len(accurate) == 1:
            found += torch._foreach_norm(real, 2, dtype=accurate.pop())
        else:
            found += [torch.linalg.vector_norm(t, dtype=_accurate(t.dtype)) for t in real]
    kinds = {(n.device, n.dtype) for n in found}
    if len(kinds) > 1:
        found = [n.to(found[0].device, torch.promote_types(n.dtype, found[0].dtype)) for n in found]
    return torch.stack(found)


def match_lengths_(sets: Sequence[Tensors], wanted: Tensor, found: Tensor) -> Tensor:
    """Scale each set of tensors by one number, in place, so that it has a given length. Zeros stay zeros.

    Args:
        sets: The sets of tensors to scale. The tensors of a set have a common length.
        wanted: Norms ``[k]`` of tensors with the new common lengths, for the k tensors of all sets.
        found: Norms of the tensors ``[k]``.

    Returns:
        The factor of each set ``[len(sets)]``.
    """
    counts = [len(tensors) for tensors in sets]
    sizes, lengths = (_together(x, counts) for x in (wanted, found))
    factors = torch.where(lengths > 0, sizes / lengths, torch.ones_like(lengths))
    tensors = [t for some in sets for t in some]
    each = [factor for factor, count in zip(factors.unbind(), counts, strict=True) for _ in range(count)]
    if {(t.device, t.dtype) for t in tensors} != {(factors.device, factors.dtype)}:
        each = [factor.to(t.device, t.dtype) for t, factor in zip(tensors, each, strict=True)]
    torch._foreach_mul_(tensors, each)
    return factors


def _together(norms: Tensor, counts: Sequence[int]) -> Tensor:
    """Return the norms ``[len(counts)]`` of sets of tensors, given those of the tensors."""
    if len(set(counts)) == 1:
        found: Tensor = torch.linalg.vector_norm(norms.view(len(counts), -1), dim=1)
        return found
    parts: Sequence[Tensor] = norms.split(list(counts))
    return torch.stack([torch.linalg.vector_norm(part) for part in parts])


def inner_product(x: Tensor, y: Tensor) -> Tensor:
    """Return ``Σ x·y``, 0-dim."""
    if x.is_contiguous() and y.is_contiguous():
        return torch.dot(x.view(-1), y.view(-1))
    return (x * y).sum()


def _accurate(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def as_real(tensors: Sequence[Tensor]) -> Tensors:
    """Return views of complex tensors as real ones, and the others themselves."""
    return [torch.view_as_real(t) if t.is_complex() else t for t in tensors]


def _add(tensors: Tensors, others: Tensors, alpha: float) -> Tensors:
    return list(torch._foreach_add(tensors, others, alpha=alpha))


def _descend_(params: Tensors, directions: Tensors, lr: Scalar) -> None:
    if isinstance(lr, Tensor) and lr.device == params[0].device:
        torch._foreach_sub_(params, list(torch._foreach_mul(directions, lr)))
    elif isinstance(lr, Tensor):
        for p, d in zip(params, directions, strict=True):
            p.add_(d * -lr)  # a 0-dim CPU tensor is an argument of the kernel: nothing is copied
    else:
        torch._foreach_add_(params, directions, alpha=-lr)
