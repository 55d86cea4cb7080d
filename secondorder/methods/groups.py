"""Parameter groups for optimizers that orthogonalize the steps of hidden matrices, as Muon does."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from secondorder.capture.layers.registry import find_adapter

#: The ways in which implementations of Muon scale a step of unit spectral norm, with the names of ``torch.optim.Muon``.
SCALES = ("match_rms_adamw", "original")
#: The default head, which is the last layer with a matrix.
LAST = "last"


def matrix_groups(
    model: nn.Module,
    *,
    lr: float | Tensor,
    others_lr: float | Tensor | None = None,
    others_momentum: float = 0.9,
    others: Mapping[str, Any] | None = None,
    head: str | None = LAST,
    adjust_lr_fn: str = SCALES[0],
) -> list[dict[str, Any]]:
    """Split the parameters of a model into hidden matrices, whose steps are orthogonalized, and all other parameters.

    The hidden layers are all layers with a matrix of several rows and columns, except embeddings and the head. A weight
    that an embedding shares with the head is not hidden. The bias of a hidden layer stays with its weight, since one
    block covers both.

    Args:
        model: The model.
        lr: Learning rate of the hidden layers.
        others_lr: Learning rate of the other parameters. If None, it is half of ``lr``.
        others_momentum: Momentum of the other parameters.
        others: Further options of the group of the other parameters, such as ``{"weight_decay": 0.0}``.
        head: Name of the output layer as in ``named_modules()``. ``"last"`` is the last layer with a matrix, in the
            order of registration. If None, there is no head, and every matrix outside embeddings is orthogonalized.
        adjust_lr_fn: The convention for ``lr`` in your script for Muon, as in ``torch.optim.Muon``. With
            ``"match_rms_adamw"``, ``lr`` is used unchanged. With ``"original"``, it is multiplied by ``√max(1, n/m) /
            (0.2 √max(n, m))`` for matrices ``[n, m]``, and there is one group per shape.

    Returns:
        Parameter groups for :class:`~secondorder.EKFAC` or :class:`~secondorder.KFAC`, without empty ones.

    Raises:
        ValueError: If no layer has the name ``head``, or ``adjust_lr_fn`` is unknown.

    Example:
        >>> import torch, secondorder
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        >>> [len(group["params"]) for group in secondorder.matrix_groups(model, lr=0.02)]
        [2, 2]
    """
    if adjust_lr_fn not in SCALES:
        raise ValueError(f"adjust_lr_fn must be one of {SCALES}, got {adjust_lr_fn!r}")
    hidden = _hidden_layers(model, head)
    taken = {id(p) for module in model.modules() if module not in hidden for p in module.parameters(recurse=False)}
    groups: dict[float, list[nn.Parameter]] = {}
    for module in hidden:
        found = [p for p in module.parameters(recurse=False) if id(p) not in taken]
        taken |= {id(p) for p in found}  # if two hidden layers share a weight, it belongs to the first one
        factor = _adjustment(module) if adjust_lr_fn == "original" else 1.0
        groups.setdefault(factor, []).extend(found)
    hidden_ids = {id(p) for params in groups.values() for p in params}
    rest = [p for p in model.parameters() if id(p) not in hidden_ids]
    rate = 0.5 * lr if others_lr is None else others_lr
    split: list[dict[str, Any]] = [
        {"params": params, "lr": lr * factor, "orthogonalize": True} for factor, params in groups.items()
    ]
    split.append({"lr": rate, "momentum": others_momentum, **(others or {}), "params": rest})
    return [group for group in split if group["params"]]


def _hidden_layers(model: nn.Module, head: str | None) -> list[nn.Module]:
    """Return the modules that own a matrix, without embeddings and the head."""
    layers = dict(_matrix_layers(model))
    if head == LAST:
        head = next(reversed(layers), None)
    elif head is not None and head not in layers:
        raise ValueError(f"head={head!r} names no layer with a matrix: choose from {', '.join(layers)}, or None")
    embeddings = (nn.Embedding, nn.EmbeddingBag)
    return [m for name, m in layers.items() if name != head and not isinstance(m, embeddings) and _is_matrix(m)]


def _is_matrix(module: nn.Module) -> bool:
    """Whether a layer can be orthogonalized. Layers without an adapter, such as attention, are taken to be matrices."""
    adapter, _ = find_adapter(module)
    if adapter is None:
        return True
    bias = getattr(module, adapter.bias_name or "", None)
    return adapter(module, True, bias is not None and bias.requires_grad).is_matrix


def _matrix_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that have a parameter with two or more dimensions, by name."""
    for name, module in model.named_modules():
        # A part of an attention layer counts as a layer, but tensors that a container itself holds do not.
        if _weight(module) is not None and (name or not list(model.children())):
            yield name, module


def _weight(module: nn.Module) -> nn.Parameter | None:
    """Return the first matrix of a module's own parameters."""
    return next((p for p in module.parameters(recurse=False) if p.dim() >= 2), None)


def _adjustment(module: nn.Module) -> float:
    """Return the learning rate of a step with entries of size 0.2, divided by that of a step of unit spectral norm."""
    weight = _weight(module)
    assert weight is not None
    n, m = weight.shape[0], weight[0].numel()
    return math.sqrt(max(1.0, n / m)) / (0.2 * math.sqrt(max(n, m)))
