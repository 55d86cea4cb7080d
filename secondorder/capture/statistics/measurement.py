"""The measurements of a step for a layer: batch means with their counts, so that ranks can be combined."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Estimate(NamedTuple):
    """One estimate of a batch.

    Attributes:
        total: A sum ``[(Γ,) …]``.
        scale: Factor that makes it the mean of this batch.
        number: Number of rows, examples or terms in the mean, as a number, or ``[Γ]`` if blocks differ.
    """

    total: Tensor
    scale: float | Tensor = 1.0
    number: float | Tensor = 1.0


class Measured(NamedTuple):
    """The measurements of a step for a layer.

    Attributes:
        parts: The parts by state key of the running estimate.
        examples: N, which covers all ranks after they are combined.
        rest: The statistic, for parts that are not combined by summing; None if only other ranks saw the layer.
        seen: State keys of the parts that any rank measured, the same on all ranks; None for those of ``parts``.
    """

    parts: Mapping[str, Estimate]
    examples: int
    rest: Any = None
    seen: frozenset[str] | None = None


class Reduced(NamedTuple):
    """The measurements of the ranks in a step.

    Attributes:
        measured: The measurements by index of the block, for blocks that any rank has seen.
        examples: N by index of the block.
        idle: Blocks whose layer ran on no row at all on this rank.
        total: Number of examples of all counted forward passes.
    """

    measured: dict[int, Measured]
    examples: dict[int, int]
    idle: frozenset[int] = frozenset()
    total: int = 0


def counts_of(part: Estimate, size: int) -> Tensor:
    """The count of a part as a vector ``[size]``, float64."""
    if not isinstance(part.number, Tensor):
        return torch.full((size,), float(part.number), dtype=torch.float64, device=part.total.device)
    return part.number.detach().to(torch.float64).flatten().expand(size)


def weighted(part: Estimate, counts: Tensor, finite: Tensor) -> Tensor:
    """The part as a sum over its counts ``[Γ or 1]``, which ranks sum; zeros if it is not used."""
    lead = counts if counts.numel() == 1 else counts.view(-1, *[1] * (part.total.dim() - 1))
    weight = lead.to(part.total.device, part.total.dtype) * part.scale
    return torch.where(finite.to(part.total.device), part.total * weight, torch.zeros_like(part.total))


def mean_of(total: Tensor, counts: Tensor) -> Estimate:
    """A sum over ranks as a part: the mean over all counts ``[Γ or 1]``."""
    shape = (-1, *[1] * (total.dim() - 1)) if counts.numel() > 1 else ()
    divisors = counts.to(total.device, total.dtype).clamp(min=torch.finfo(total.dtype).tiny)
    return Estimate(total / divisors.reshape(shape), 1.0, counts)
