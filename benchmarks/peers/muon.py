"""Muon: momentum that is approximately orthogonalized for hidden matrices, and AdamW for all other parameters.

It follows Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024). The step is that of
``torch.optim.Muon``, whose Newton-Schulz iteration uses bfloat16. On processors without hardware support, this takes a
hundred times as long as float32. There, :func:`orthogonalise` replaces the iteration.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.machine import seconds
from benchmarks.peers.layers import Matrix, adamw_for_others, hidden_matrices
from benchmarks.peers.peer import Peer, evaluated
from benchmarks.workloads.base import PackageMissingError

ADAMW_BETAS = (0.9, 0.95)
_SIZE, _REPEATS = 128, 5  # of the timed product
_SLOWER = 2.0
_ITERATION = "torch.optim._muon._zeropower_via_newtonschulz"


def orthogonalise(matrix: Tensor, coefficients: Sequence[float], steps: int, eps: float) -> Tensor:
    """Bring the singular values of a matrix close to 1 with Muon's quintic iteration, in the dtype of the matrix."""
    a, b, c = coefficients
    wide: Tensor = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT
    x: Tensor = wide / wide.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if matrix.shape[0] <= matrix.shape[1] else x.mT


class MatrixMuon(Optimizer):
    """Muon for weights of any shape, each viewed as one or several matrices ``[d_out, rest]``."""

    def __init__(self, matrices: Sequence[Matrix], bfloat16: bool, **options: Any) -> None:
        self._matrices = list(matrices)
        self._views = [[nn.Parameter(view) for view in matrix.views(matrix.parameter.detach())] for matrix in matrices]
        self.muon = torch.optim.Muon([view for views in self._views for view in views], **options)
        self._iteration = nullcontext() if bfloat16 else mock.patch(_ITERATION, orthogonalise)
        super().__init__([matrix.parameter for matrix in matrices], {"lr": self.muon.defaults["lr"]})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = evaluated(closure)
        for matrix, views in zip(self._matrices, self._views, strict=True):
            self._show(matrix, views)
        self.muon.param_groups[0]["lr"] = self.param_groups[0]["lr"]
        with self._iteration:
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
    if not hasattr(torch.optim, "Muon"):
        raise PackageMissingError(f"torch {torch.__version__} has no Muon: it needs torch 2.9 or later")
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
    if device_type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device_type != "cpu":
        return False
    matrices = [torch.ones(_SIZE, _SIZE, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)]
    half, full = (min(seconds(partial(torch.mm, x, x)) for _ in range(_REPEATS)) for x in matrices)
    return half < _SLOWER * full
