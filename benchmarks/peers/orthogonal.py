"""Orthogonalized momentum, which is orthogonal EKFAC with the identity as curvature: a control for that method.

It uses the parameter groups of the recipe of ``ekfac_orthogonal``. Hidden layers move along the polar factor of their
momentum, with the bias as one more column, and AdamW updates all other parameters, as in Muon.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.optim import Optimizer

from benchmarks.peers.layers import adamw_for_others
from benchmarks.peers.peer import Peer, evaluated
from benchmarks.recipes.building import orthogonal_groups
from secondorder.linalg import polar

_BETAS = (0.9, 0.95)


@dataclass(frozen=True)
class _Layer:
    """A weight with its bias, or one of three parts of packed queries, keys and values.

    In a transposed convolution, the first dimension of the weight is that of the inputs.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    part: tuple[int, int] = (0, 1)
    transposed: bool = False

    def matrix(self, gradients: Callable[[nn.Parameter], Tensor]) -> Tensor:
        """Return the gradient as a matrix ``[d_out, rest]`` with the bias as its last column."""
        columns = [self._of_outputs(gradients(self.weight)).flatten(1)]
        if self.bias is not None:
            columns.append(self._rows(gradients(self.bias))[:, None])
        return torch.cat(columns, 1)

    def move(self, step: Tensor, rate: float) -> None:
        if self.bias is not None:
            self._rows(self.bias).add_(step[:, -1], alpha=-rate)
            step = step[:, :-1]
        rows = self._of_outputs(self.weight)
        rows.add_(step.reshape(rows.shape), alpha=-rate)

    def _of_outputs(self, weight: Tensor) -> Tensor:
        return weight.transpose(0, 1) if self.transposed else self._rows(weight)

    def _rows(self, tensor: Tensor) -> Tensor:
        index, count = self.part
        return tensor.chunk(count)[index]


class OrthogonalMomentum(Optimizer):
    """Steps along the polar factor of Nesterov momentum, scaled to a root mean square of 0.2."""

    def __init__(self, layers: Sequence[_Layer], dtype: torch.dtype | None, **defaults: float) -> None:
        self._layers, self._dtype = list(layers), dtype
        params = {p: None for layer in layers for p in (layer.weight, layer.bias) if p is not None}
        super().__init__(list(params), defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = evaluated(closure)
        group = self.param_groups[0]
        for p in group["params"]:
            if p.grad is not None:
                state = self.state[p] = self.state[p] or {"mean": torch.zeros_like(p), "steps": 0}
                state["mean"].lerp_(p.grad, 1 - group["momentum"])
                state["steps"] += 1
                p.mul_(1 - group["lr"] * group["weight_decay"])
        for layer in self._layers:
            if layer.weight.grad is not None:
                wanted = layer.matrix(self._nesterov)
                layer.move(polar.step_of(wanted, self._dtype), group["lr"])
        return loss

    def _nesterov(self, p: nn.Parameter) -> Tensor:
        assert p.grad is not None
        state, momentum = self.state[p], self.param_groups[0]["momentum"]
        return p.grad.lerp(state["mean"] / (1 - momentum ** state["steps"]), momentum)


def orthogonal_momentum(
    model: nn.Module,
    lr: float,
    plain_lr: float,
    plain_layers: str,
    momentum: float = 0.8,
    weight_decay: float = 0.0,
    orthogonal_dtype: str | None = None,
) -> Optimizer:
    """Return the control.

    Args:
        model: The model.
        lr: Learning rate of hidden layers.
        plain_lr: Learning rate of AdamW.
        plain_layers: Types or names of the layers that AdamW updates, separated by commas.
        momentum: Momentum of hidden layers.
        weight_decay: Decoupled weight decay of all parameters.
        orthogonal_dtype: Dtype of the products of large polar factors.
    """
    keywords = {"plain_layers": plain_layers, "plain_lr": plain_lr, "momentum": momentum}
    hidden = {p for p in orthogonal_groups(model, keywords)[0]["params"] if p.requires_grad}
    layers = [layer for layer in _layers_of(model) if layer.weight in hidden]
    moved = [p for layer in layers for p in (layer.weight, layer.bias) if p is not None]
    dtype = None if orthogonal_dtype is None else getattr(torch, orthogonal_dtype)
    first = OrthogonalMomentum(layers, dtype, lr=lr, momentum=momentum, weight_decay=weight_decay)
    return Peer(first, *adamw_for_others(model, moved, lr=plain_lr, betas=_BETAS, weight_decay=weight_decay))


def _layers_of(model: nn.Module) -> Iterator[_Layer]:
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is not None:
            yield from (_Layer(module.in_proj_weight, module.in_proj_bias, (part, 3)) for part in range(3))
        elif isinstance(module, nn.Linear | _ConvNd) and min(module.weight.flatten(1).shape) > 1:
            weight, bias = module._parameters["weight"], module._parameters.get("bias")
            assert weight is not None
            own = bias if bias is not None and bias.requires_grad else None
            transposed = isinstance(module, _ConvTransposeNd)
            if not transposed or module.groups == 1:
                yield _Layer(weight, own, transposed=transposed)
