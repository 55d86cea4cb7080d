"""Updates under a gate, a 0-dim bool tensor on the device: where it is False, nothing changes.

The fused kernels of ``torch.optim`` change nothing if they get the flag of a loss scaler, so that one kernel updates
all tensors and the host does not wait.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Types of devices on which torch has fused kernels.
FUSED: tuple[str, ...] = ("cpu", "cuda", "mps", "xpu")

Tensors = list[Tensor]
Scalar = float | Tensor


def gated(gate: Tensor, value: Scalar, otherwise: float) -> Tensor:
    """Return ``value`` where the gate is open, as a 0-dim float64 tensor, which takes the dtype of its operand."""
    blocked = torch.full_like(gate, otherwise, dtype=torch.float64)
    return torch.where(gate, blocked * 0 + value, blocked)


def fused_sgd_(
    params: Tensors, directions: Tensors, buffers: Tensors | None, lr: Scalar, momentum: float, nesterov: bool,
    weight_decay: float, decoupled: bool, gate: Tensor,
) -> bool:  # fmt: skip
    """Do the same as :func:`secondorder.linalg.first_order.sgd_`, and return whether a kernel takes these tensors."""
    if isinstance(momentum, Tensor) or (isinstance(lr, Tensor) and params[0].dtype != torch.float32):
        return False  # kernels take momentum as a number, and read a tensor as a float32 rate
    alike = [
        d if d.stride() == p.stride() else torch.empty_like(p).copy_(d) for p, d in zip(params, directions, strict=True)
    ]
    if not _are_alike(params, alike, *([buffers] if buffers else [])):
        return False
    if decoupled and weight_decay != 0:
        torch._foreach_mul_(params, gated(gate, 1 - lr * weight_decay, 1.0))
    size = lr.to(gate.device, torch.float32, non_blocking=True) if isinstance(lr, Tensor) else lr
    torch._fused_sgd_(
        params, alike, buffers or [], weight_decay=0.0 if decoupled else weight_decay, momentum=momentum, lr=size,
        dampening=0.0, nesterov=nesterov, maximize=False, is_first_step=False, found_inf=(~gate).to(torch.float32),
    )  # fmt: skip
    return True


def lerp_gated_(tensors: Tensors, others: Tensors, weight: float, gate: Tensor) -> None:
    """Move tensors by a share ``weight`` of the way to others, in place."""
    if _are_alike(tensors, others):  # x − w (−y + x), a step of SGD with weight decay that maximizes
        torch._fused_sgd_(
            tensors, others, [], weight_decay=1.0, momentum=0.0, lr=weight, dampening=0.0, nesterov=False,
            maximize=True, is_first_step=False, found_inf=(~gate).to(torch.float32),
        )  # fmt: skip
    else:
        torch._foreach_lerp_(tensors, [torch.where(gate, y, x) for x, y in zip(tensors, others, strict=True)], weight)


def _are_alike(*lists: Tensors) -> bool:
    """Return whether fused kernels accept corresponding tensors, which they read as they lie in memory.

    They have to have the same strides, without gaps and overlaps.
    """
    first = lists[0][0]
    is_half = first.dtype.itemsize == 2  # on the CPU, torch 2.13 computes wrong results
    if not first.is_floating_point() or first.device.type not in FUSED or (is_half and first.device.type != "cuda"):
        return False
    kind = first.device, first.dtype
    return all(
        all((t.device, t.dtype) == kind and t.stride() == own[0].stride() for t in own) and _is_dense(own[0])
        for own in zip(*lists, strict=True)
    )


def _is_dense(x: Tensor) -> bool:
    return x.is_contiguous() or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last))
