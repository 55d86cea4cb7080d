"""Muon: momentum that is approximately orthogonalized for hidden matrices, and AdamW for all other parameters.

It follows Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024). The step is that of
``torch.optim.Muon``, whose Newton-Schulz iteration uses bfloat16. On processors without hardware support, this takes a
hundred times as long as float32. There, :class:`Float32Muon` performs the same step in float32.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.machine import seconds
from benchmarks.peers.layers import Matrix, adamw_for_others, hidden_matrices
from benchmarks.peers.peer import Peer, evaluated

ADAMW_BETAS = (0.9, 0.95)
_SIZE, _REPEATS = 128, 5  # of the timed product
_SLOWER = 2.0
_DEFAULTS: dict[str, Any] = {
    "lr": 1e-3,
    "weight_decay": 0.1,
    "momentum": 0.95,
    "nesterov": True,
    "ns_coefficients": (3.4445, -4.7750, 2.0315),
    "eps": 1e-7,
    "ns_steps": 5,
    "adjust_lr_fn": None,
}
"""Options of ``torch.optim.Muon``, with its defaults."""


class Float32Muon(Optimizer):
    """The step of ``torch.optim.Muon``, which requires torch 2.9, with the iteration in the dtype of the weights."""

    def __init__(self, params: Iterable[nn.Parameter], **options: Any) -> None:
        if unknown := options.keys() - _DEFAULTS:
            raise TypeError(f"Muon has no option {', '.join(sorted(unknown))}, only {', '.join(_DEFAULTS)}")
        if (rule := options.get("adjust_lr_fn")) not in {None, "original", "match_rms_adamw"}:
            raise ValueError(f"adjust_lr_fn must be original or match_rms_adamw, got {rule!r}")
        super().__init__(params, _DEFAULTS | options)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = evaluated(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, group)
        return loss

    def _move(self, matrix: Tensor, group: dict[str, Any]) -> None:
        grad, state = matrix.grad, self.state[matrix]
        assert grad is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        mean = state["momentum_buffer"].lerp_(grad, 1 - group["momentum"])
        wanted = grad.lerp(mean, group["momentum"]) if group["nesterov"] else mean
        update = orthogonalise(wanted, group["ns_coefficients"], group["ns_steps"], group["eps"])
        matrix.mul_(1 - group["lr"] * group["weight_decay"])
        matrix.add_(update, alpha=-group["lr"] * _growth(group["adjust_lr_fn"], *matrix.shape))


def orthogonalise(matrix: Tensor, coefficients: Sequence[float], steps: int, eps: float) -> Tensor:
    """Bring the singular values of a matrix close to 1 with Muon's quintic Newton-Schulz iteration."""
    a, b, c = coefficients
    wide: Tensor = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT
    x: Tensor = wide / wide.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if matrix.shape[0] <= matrix.shape[1] else x.mT


def _growth(rule: str | None, d_out: int, d_in: int) -> float:
    if rule == "match_rms_adamw":
        return 0.2 * math.sqrt(max(d_out, d_in))
    return math.sqrt(max(1.0, d_out / d_in))


class MatrixMuon(Optimizer):
    """Muon for weights of any shape, each viewed as one or several matrices ``[d_out, rest]``."""

    def __init__(self, matrices: Sequence[Matrix], bfloat16: bool, **options: Any) -> None:
        self._matrices = list(matrices)
        self._views = [[nn.Parameter(view) for view in matrix.views(matrix.parameter.detach())] for matrix in matrices]
        kind = torch.optim.Muon if bfloat16 else Float32Muon
        self.muon: Optimizer = kind([view for views in self._views for view in views], **options)
        super().__init__([matrix.parameter for matrix in matrices], {"lr": self.muon.defaults["lr"]})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = evaluated(closure)
        for matrix, views in zip(self._matrices, self._views, strict=True):
            self._show(matrix, views)
        self.muon.param_groups[0]["lr"] = self.param_groups[0]["lr"]
        self.muon.step()
        for views in self._views:
            for view in views:
                view.grad = None
        return loss

    @staticmethod
    def _show(matrix: Matrix, views: list[nn.Parameter]) -> None:
        parameter, grad = matrix.parameter, matrix.parameter.grad
        if not parameter.is_contiguous():
            raise ValueError(f"Muon needs contiguous weights, got one with strides {parameter.stride()}")
        grads = [None] * len(views) if grad is None else matrix.views(grad)
        for view, data, part in zip(views, matrix.views(parameter.detach()), grads, strict=True):
            view.data, view.grad = data, part

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "muon": self.muon.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        known = dict(state_dict)
        self.muon.load_state_dict(known.pop("muon"))
        super().load_state_dict(known)


def muon(
    model: nn.Module,
    lr: float = 0.02,
    adamw_lr: float = 3e-4,
    weight_decay: float = 0.01,
    momentum: float = 0.95,
    precision: str = "auto",
    **options: Any,
) -> Optimizer:
    if precision not in {"auto", "bfloat16", "float32"}:
        raise ValueError(f"precision must be auto, bfloat16 or float32, got {precision!r}")
    matrices = hidden_matrices(model)
    if not matrices:
        raise ValueError("the model has no hidden matrix for Muon")
    taken = [matrix.parameter for matrix in matrices]
    half = precision == "bfloat16" or (precision == "auto" and does_bfloat16(taken[0].device.type))
    first = MatrixMuon(matrices, half, lr=lr, weight_decay=weight_decay, momentum=momentum, **options)
    return Peer(first, *adamw_for_others(model, taken, lr=adamw_lr, betas=ADAMW_BETAS, weight_decay=weight_decay))


def label() -> str:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return "Muon" if does_bfloat16(device) else "Muon (float32)"


@cache
def does_bfloat16(device_type: str) -> bool:
    """Return whether a device multiplies bfloat16 matrices about as fast as float32 matrices, by timing them."""
    if not hasattr(torch.optim, "Muon"):
        return False
    if device_type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device_type != "cpu":
        return False
    matrices = [torch.ones(_SIZE, _SIZE, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)]
    half, full = (min(seconds(partial(torch.mm, x, x)) for _ in range(_REPEATS)) for x in matrices)
    return half < _SLOWER * full
