"""Linear maps that a module computes without calling a layer: where to capture them, and which parameters they use.

A :class:`Projection` is ``F.linear`` as a module without parameters: a tap sees on it what it sees on a ``Linear``.
``secondorder.nn`` has modules built of them, and :mod:`secondorder.capture.layers.attention` reroutes the attention of
torch through them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn


class Projection(nn.Module):
    """Applies ``F.linear`` as a module without parameters, which exists for its hooks."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, output: Tensor | None = None) -> Tensor:
        """Apply the map.

        Args:
            x: ``[…, d_in]``.
            weight: ``[d_out, d_in]``.
            bias: ``[d_out]`` or None.
            output: The product ``[…, d_out]`` if the caller has it already, as a part or a view of another one.

        Returns:
            ``x weightᵀ + bias [..., d_out]``.
        """
        return F.linear(x, weight, bias) if output is None else output

    @property
    def watched(self) -> bool:
        """Whether a hook wants the next call; a tap that is not due indicates that by its attribute ``armed``."""
        hooks = [*self._forward_hooks.values(), *self._forward_pre_hooks.values()]
        return any(getattr(hook, "armed", True) for hook in hooks)


class LinearMap(NamedTuple):
    """The parameters of a module that make one linear map, or ``groups`` of them stacked along the outputs.

    Attributes:
        suffix: Name of the part, which follows the module's.
        weight_name: Weight ``[groups·d_out, d_in]``, a dotted name below the module; None for a part of biases only.
        bias_name: Bias ``[groups·d_out]``, or None.
        taps: Projections that apply it, each with the group that its calls fill, or -1 for all groups at once.
        groups: Number of maps.
    """

    suffix: str
    weight_name: str | None
    bias_name: str | None
    taps: tuple[tuple[Projection, int], ...]
    groups: int = 1


class AttentionProjections(nn.Module):
    """The projections of one multi-head attention.

    Inputs and outputs are ``[L, N, E]`` (with keys and values ``[S, N, E]``), whatever layout the module takes; N is 1
    for an input without batch dimension. Self-attention calls ``packed`` with the whole weight and ``out``, any other
    attention ``query``, ``key``, ``value`` and ``out``.
    """

    packed: Projection
    query: Projection
    key: Projection
    value: Projection
    out: Projection

    def __init__(self) -> None:
        super().__init__()
        for name in ("packed", "query", "key", "value", "out"):
            self.add_module(name, Projection())
