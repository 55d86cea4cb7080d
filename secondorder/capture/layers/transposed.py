"""Adapter of transposed convolutions.

A transposed convolution is a plain one of stride 1, with a flipped kernel, over its input with ``stride − 1`` zeros put
between neighbours. Its rows are the patches of that larger input, here for stride 2::

    x  1 2 3  ──►  1 0 2 0 3  ──►  pad left by d(k−1) − padding, right by as much + output_padding  ──►  patches

The larger input is flipped instead of each of its patches, and the output gradient with it: rows then come in reverse
order of the positions, in both alike.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from secondorder.capture.layers.conv import ConvAdapter
from secondorder.linalg.dense import Workspace


class ConvTransposeAdapter(ConvAdapter):
    """``nn.ConvTranspose1d``, ``2d`` and ``3d`` with any stride, padding, output size, dilation and groups.

    The weight ``[d_i, d_o/Γ, k…]`` is seen as that of a plain convolution, ``[d_o, d_i/Γ, k…]``.
    """

    def __init__(
        self,
        module: nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d,
        has_weight: bool,
        has_bias: bool,
    ) -> None:
        super().__init__(module, has_weight, has_bias)  # type: ignore[arg-type]
        self.spread: tuple[int, ...] = self.stride
        self.stride = (1,) * len(self.kernel)
        self.output_padding: tuple[int, ...] = tuple(module.output_padding)
        margins = [
            d * (k - 1) - before for d, k, (before, _) in zip(self.dilation, self.kernel, self.padding, strict=True)
        ]
        self.padding: list[tuple[int, int]] = [(margin, margin) for margin in margins]

    # ------------------------------------------------------------------ rows
    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The input, and what an ``output_size`` asks for.

        Returns:
            The input as it is or, with an ``output_size``, expanded by appended axes whose sizes are the output
            paddings plus 1; one more of them than there are spatial axes tells such an input from a plain one.
        """
        x: Tensor = args[0] if args else kwargs["input"]
        output_size = args[1] if len(args) > 1 else kwargs.get("output_size")
        if output_size is None:
            return x
        smallest = [n - extra for n, extra in zip(self.output_size(x), self.output_padding, strict=True)]
        extra = [int(n) - m for n, m in zip(output_size[-len(smallest) :], smallest, strict=True)]
        return x.reshape(*x.shape, 1, *[1] * len(extra)).expand(*x.shape, 1, *[n + 1 for n in extra])

    def is_unbatched(self, x: Tensor) -> bool:
        return super().is_unbatched(self._split(x)[0])

    def output_size(self, x: Tensor) -> list[int]:
        x, output_padding = self._split(x)
        found = zip(x.shape[-len(self.kernel) :], self.spread, self.padding, self.dilation, self.kernel, strict=True)
        sizes = [(n - 1) * s + 1 + 2 * margin - d * (k - 1) for n, s, (margin, _), d, k in found]
        return [n + extra for n, extra in zip(sizes, output_padding, strict=True)]

    def output_rows(self, g: Tensor, x: Tensor | None, examples: int) -> Tensor:
        return super().output_rows(self._flipped(g), x, examples)

    def example_outputs(self, g: Tensor, x: Tensor | None, examples: int) -> Tensor:
        return super().example_outputs(self._flipped(g), x, examples)

    def sample_rows(
        self, x: Tensor, g: Tensor, positions: int, examples: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, float] | None:
        return super().sample_rows(x, self._flipped(g), positions, examples, generator)

    def _split(self, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """The input itself and the output padding."""
        axes = len(self.kernel)
        if x.dim() < 2 * axes + 2:
            return x, self.output_padding
        return x.flatten(-axes - 1)[..., 0], tuple(n - 1 for n in x.shape[-axes:])

    @property
    def _pads_zeros(self) -> bool:
        return False  # but between its pixels, too

    def _padded(self, x: Tensor) -> Tensor:
        """The larger input, flipped: positions come in reverse order."""
        x, output_padding = self._split(x)
        sizes = [(n - 1) * s + 1 for n, s in zip(x.shape[2:], self.spread, strict=True)]
        larger = x.new_zeros(*x.shape[:2], *sizes)
        inserted = larger
        for axis, s in enumerate(self.spread):
            inserted = inserted.unfold(2 + axis, 1, s)[..., 0]
        inserted.copy_(x)
        sides = [(lo, hi + extra) for (lo, hi), extra in zip(self.padding, output_padding, strict=True)]
        larger = F.pad(larger, [max(side, 0) for pair in reversed(sides) for side in pair])
        for axis, (lo, hi) in enumerate(sides):  # what a padding beyond the kernel's reach cuts off
            larger = larger.narrow(2 + axis, max(-lo, 0), larger.shape[2 + axis] + min(lo, 0) + min(hi, 0))
        return self._flipped(larger)

    def _flipped(self, x: Tensor) -> Tensor:
        return x.flip(tuple(range(-len(self.kernel), 0)))

    # ------------------------------------------------------------------ parameters
    def to_matrix(self, weight: Tensor | None, bias: Tensor | None, workspace: Workspace | None = None) -> Tensor:
        if weight is not None:
            weight = weight.reshape(self.groups, -1, self.d_out, *self.kernel).transpose(1, 2)
        return super().to_matrix(weight, bias, workspace)

    def from_matrix(self, matrix: Tensor, like: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        if like is None:
            return super().from_matrix(matrix, None)
        channels = self.d_in // math.prod(self.kernel)
        plain = torch.empty(self.groups, self.d_out, channels, *self.kernel, device="meta")
        weight, bias = super().from_matrix(matrix, plain)
        assert weight is not None
        return weight.transpose(1, 2).reshape(like.shape).contiguous(), bias
