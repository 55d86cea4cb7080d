"""SINGD: K-FAC without inverses, with structured factors.

Lin et al., "Structured inverse-free natural gradient" (2024), by the authors' package.
"""

import warnings
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from benchmarks.peers.layers import heard_layers, others
from benchmarks.peers.libraries import library
from benchmarks.peers.peer import Peer


def singd(
    model: nn.Module,
    lr: float = 1e-3,
    adamw_lr: float = 1e-3,
    weight_decay: float = 0.0,
    structure: str = "dense",
    largest: int = 4096,
    **options: Any,
) -> Optimizer:
    """Return SINGD for linear layers and 2-D convolutions, beside AdamW for all else."""
    layers = heard_layers(model)
    small = [layer for layer in layers.values() if max(_sides(layer)) <= largest]
    taken = list({id(p): p for layer in small for p in layer.parameters()}.values())
    kind = library("singd.optim.optimizer").SINGD
    parts: list[Optimizer] = []
    if taken:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of structures whose products are naive
            parts.append(
                kind(model, taken, lr=lr, weight_decay=weight_decay, structures=(structure, structure), **options)
            )
    if rest := others(model, taken):
        parts.append(torch.optim.AdamW(rest, lr=adamw_lr, weight_decay=weight_decay))
    return Peer(*parts)


def _sides(layer: nn.Linear | nn.Conv2d) -> tuple[int, int]:
    d_out = layer.weight.shape[0]
    return layer.weight[0].numel() + (layer.bias is not None), d_out
