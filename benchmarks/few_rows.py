"""How far updates from few rows, and K-FAC's, are from the exact one of the same batch, gradient and damping.

With rows ``u_n = g_n a_nᵀ`` of n examples, scaled such that ``F = Σ u uᵀ``, and the gradient V of a layer:

=========  ==================================================================================
exact      ``(F + λI)⁻¹ V`` with all rows, what SNGD computes
KID, KIS   the same with R of them, as HyLo chooses them
K-FAC      ``(A ⊗ G + λI)⁻¹ V`` with ``A = Σ a aᵀ / n`` and ``G = Σ g gᵀ``, of the same rows
none       ``V / λ'`` with the λ' that brings it nearest: gradient descent, with the best rate
=========  ==================================================================================

All in float64. Of every layer λ is a multiple of the mean of the diagonal of its kernel, ``⟨u_n, u_n⟩``.
"""

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.runner import Trainer
from benchmarks.workloads import Workload
from secondorder import HyLo
from secondorder.diagnostics import approximation
from secondorder.diagnostics.approximation import Sums, System
from secondorder.linalg import kernel
from secondorder.linalg.kernel import Rows

Errors = dict[str, dict[str, float]]
"""``error``, the relative distance, and ``cos`` by the name of the way, of all layers taken together."""


class Layer(NamedTuple):
    """Rows of all examples, and the gradient, of one layer."""

    a: Tensor
    """Inputs ``[n, d_i]``."""
    g: Tensor
    """Gradients of the outputs ``[n, d_o]``, scaled."""
    gradient: Tensor
    """V ``[d_o, d_i]``."""


def kept_rows(examples: int, fraction: float, most: int) -> int:
    return max(1, min(math.ceil(round(fraction * examples, 9)), examples, most))


def captured(trainer: Trainer, workload: Workload, seed: int) -> list[Layer]:
    """Take the rows of one batch of a model, as HyLo with all rows keeps them."""
    if close := getattr(trainer.optimizer, "close", None):
        close()
    batch = next(workload.batches(seed))
    model = trainer.model
    optimizer = HyLo(model, lr=0.0, mode="sngd", max_rank=len(batch[0]), update_steps=1)
    optimizer.zero_grad()
    workload.loss(model, batch).backward()
    optimizer.step()
    layers = list(_layers(optimizer))
    optimizer.close()
    if not layers:
        raise ValueError(f"{workload.name} has no layer with one row of inputs and one of gradients per example")
    return layers


def _layers(optimizer: HyLo) -> Iterator[Layer]:
    for block in optimizer.blocks.values():
        state = optimizer.state[block.owner]
        a, g = state["rows_a"], state["rows_g"]
        if a.dim() != 3 or a.shape[1] != 1 or not a.shape[2] or not a.is_floating_point():
            continue
        gradients = [p.grad for p in block.params]
        if all(gradient is not None for gradient in gradients):
            matrix = block.layer.matrix([gradient.double() for gradient in gradients if gradient is not None])
            if matrix.shape == (g.shape[-1], a.shape[-1]):
                yield Layer(a[:, 0].double(), g[:, 0].double(), matrix)


def errors(layers: list[Layer], damping: float, ranks: Mapping[str, int], seed: int) -> Errors:
    sums: dict[str, Sums] = {}
    draws = torch.Generator().manual_seed(seed)
    for layer in layers:
        system = _system(layer, damping)
        exact = approximation.exact(system)
        updates = {
            "none": _descent(layer.gradient, exact),
            "kfac": _kfac(layer, float(system.damping)),
        }
        for name, rank in ranks.items():
            updates[f"kid {name}"] = approximation.interpolated(system, rank).update
            updates[f"kis {name}"] = approximation.sampled(system, rank, "systematic", draws).update
        for way, update in updates.items():
            sums[way] = sums.get(way, Sums()).plus(approximation.compare(update, exact))
    measures = {way: found.measures() for way, found in sums.items()}
    return {way: {"error": found["rel_error"], "cos": found["cos"]} for way, found in measures.items()}


def _system(layer: Layer, damping: float) -> System:
    rows = Rows(layer.a[:, None], layer.g[:, None])
    found = kernel.gram(rows)
    return System(rows, found, damping * found.diagonal().mean(), layer.gradient)


def _descent(gradient: Tensor, exact: Tensor) -> Tensor:
    return gradient * ((gradient * exact).sum() / gradient.square().sum())


def _kfac(layer: Layer, damping: float) -> Tensor:
    """Return K-FAC's update with exact damping, which adds λ to the eigenvalues of the product."""
    values_a, basis_a = torch.linalg.eigh(layer.a.mT @ layer.a / len(layer.a))
    values_g, basis_g = torch.linalg.eigh(layer.g.mT @ layer.g)
    rotated = basis_g.mT @ layer.gradient @ basis_a
    update: Tensor = basis_g @ (rotated / (torch.outer(values_g, values_a).clamp(min=0) + damping)) @ basis_a.mT
    return update
