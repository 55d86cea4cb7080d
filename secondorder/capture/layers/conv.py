"""Adapters of convolutions: rows are patches, or their second moment is computed without them.

A transposed convolution is a plain one of stride 1, with a flipped kernel, over its input with ``stride − 1`` zeros
inserted between neighbors. Its rows are the patches of that larger input, here for stride 2::

    x  1 2 3  ──►  1 0 2 0 3  ──►  pad left by d(k−1) − padding, right by as much + output_padding  ──►  patches

The larger input is flipped instead of each of its patches, and so is the output gradient: rows then come in reverse
order of the positions, in both cases.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from secondorder.capture.layers.adapter import CHUNK_BYTES, Adapter, draw, positions_of
from secondorder.capture.layers.conv_lags import Window, add_patch_gram_, gains
from secondorder.linalg.dense import Workspace


class ConvAdapter(Adapter):
    """Covers ``nn.Conv1d``, ``Conv2d`` and ``Conv3d`` with any stride, padding, padding mode, dilation and groups.

    A row is a patch, ordered (channel, kernel…) as ``weight.flatten(1)`` is; positions are output pixels.
    """

    channels_first = True

    def __init__(self, module: nn.Conv1d | nn.Conv2d | nn.Conv3d, has_weight: bool, has_bias: bool) -> None:
        super().__init__(module, has_weight, has_bias)
        self.groups = module.groups
        self.kernel: tuple[int, ...] = tuple(module.kernel_size)
        self.stride: tuple[int, ...] = tuple(module.stride)
        self.dilation: tuple[int, ...] = tuple(module.dilation)
        self.padding: list[tuple[int, int]] = [_padding(module, axis) for axis in range(len(self.kernel))]
        self.padding_mode = module.padding_mode
        self.d_in = module.in_channels // self.groups * math.prod(self.kernel)
        self.d_out = module.out_channels // self.groups

    def is_unbatched(self, x: Tensor) -> bool:
        return x.dim() == len(self.kernel) + 1

    def row_count(self, x: Tensor) -> int:
        """Return N·S, the number of rows that ``x`` yields."""
        x = self._batched(x)
        return x.shape[0] * math.prod(self.output_size(x))

    def output_size(self, x: Tensor) -> list[int]:
        """Return the size of the output image."""
        sizes = zip(x.shape[2:], self.padding, self.kernel, self.dilation, self.stride, strict=True)
        return [(n + lo + hi - d * (k - 1) - 1) // s + 1 for n, (lo, hi), k, d, s in sizes]

    def input_rows(self, x: Tensor) -> Iterator[Tensor]:
        x = self._batched(x)
        bytes_per_example = self.row_count(x[:1]) * self.groups * self.d_in * x.element_size()
        for part in x.split(max(1, CHUNK_BYTES // max(bytes_per_example, 1))):
            patches = self.patches(part)
            # Rows are feature-major: the copy then runs along image rows, and the Gram product takes either layout.
            order = (1, 2, *range(3 + self._axes, 3 + 2 * self._axes), 0, *range(3, 3 + self._axes))
            rows = patches.permute(order).reshape(self.groups, self.d_in, -1).mT
            yield rows if self.groups > 1 else rows[0]

    def add_gram_(self, out: Tensor, x: Tensor, weight: float) -> int | None:
        x, d = self._batched(x), self.d_in
        if max(self.stride) > 1 or not self._has_fast_lags(out):
            return None
        window, sizes = self._window(x)
        if not gains(window, x.shape[0], x.shape[1] // self.groups, sizes):
            return None
        part_bytes = x.shape[1] * math.prod(sizes) * out.element_size()
        for part in x.split(max(1, CHUNK_BYTES // part_bytes)):
            image = part if self._pads_zeros else self._padded(part)
            add_patch_gram_(out[..., :d, :d], image, window, weight)
        rows = self.row_count(x)
        if self.has_bias:
            total = x.sum(0, keepdim=True, dtype=out.dtype)  # the sum over examples comes first and leaves one image
            out[..., :d, d].add_(self.input_sums(total, 1)[0][..., 0, :], alpha=weight)
            out[..., d, d] += rows * weight
        return rows

    def _has_fast_lags(self, out: Tensor) -> bool:
        """Whether lags save work: weight gradients are not computed from patches, and rows are those of this class."""
        own = type(self).input_rows is ConvAdapter.input_rows and type(self).patches is ConvAdapter.patches
        onednn = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
        fast = out.device.type == "cuda" or (out.device.type in ("cpu", "meta") and onednn)
        return bool(own and fast and out.dtype == torch.float32)

    def output_rows(self, g: Tensor, x: Tensor | None, examples: int) -> Tensor:
        g = self._batched(g)
        rows = g.transpose(0, 1).reshape(self.groups, self.d_out, -1).mT
        return rows if self.groups > 1 else rows[0]

    def sample_rows(
        self, x: Tensor, g: Tensor, positions: int, examples: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, float] | None:
        g = self._batched(g)
        total = math.prod(g.shape[2:])
        if total <= positions:
            return None
        at = draw(total, positions, generator, g.device)
        patches = self.patches(self._batched(x))[(slice(None),) * 3 + _coordinates(at, g.shape[2:])]
        order = (1, 2, *range(4, 4 + self._axes), 0, 3)
        a = patches.permute(order).reshape(self.groups, self.d_in, -1).mT
        b = g.flatten(2)[:, :, at].transpose(0, 1).reshape(self.groups, self.d_out, -1).mT
        return (a, b, total / positions) if self.groups > 1 else (a[0], b[0], total / positions)

    def example_inputs(self, x: Tensor, examples: int) -> Tensor:
        x = self._batched(x)
        folds = positions_of(x, examples)
        patches = self.patches(x)
        order = (0, 1, *range(3, 3 + self._axes), 2, *range(3 + self._axes, 3 + 2 * self._axes))
        rows = patches.permute(order).reshape(examples, folds, self.groups, -1, self.d_in)
        return self._group_major(rows.transpose(1, 2).flatten(2, 3))

    def example_outputs(self, g: Tensor, x: Tensor | None, examples: int) -> Tensor:
        g = self._batched(g)
        shape = (examples, positions_of(g, examples), self.groups, self.d_out, math.prod(g.shape[2:]))
        return self._group_major(g.reshape(shape).permute(0, 2, 1, 4, 3).flatten(2, 3))

    def input_sums(self, x: Tensor, examples: int) -> tuple[Tensor, int]:
        x = self._batched(x)
        folds, sizes = positions_of(x, examples), self.output_size(x)
        # A sum over all windows is a sum of k shifted slices along each axis in turn: no patch is formed.
        sums = x if self._pads_zeros else self._padded(x)
        for axis, size in enumerate(sizes):
            before = self.padding[axis][0] if self._pads_zeros else 0
            firsts = [i * self.dilation[axis] - before for i in range(self.kernel[axis])]
            sums = _shifted_sums(sums, 2 + axis, firsts, size, self.stride[axis])
        sums = sums.reshape(examples, folds, self.groups, self.d_in).sum(1)
        return self._group_major(sums), self.row_count(x) // examples

    @property
    def _axes(self) -> int:
        return len(self.kernel)

    @property
    def _pads_zeros(self) -> bool:
        """Whether patches are those of the input itself, with zeros around it."""
        return self.padding_mode == "zeros"

    def _window(self, x: Tensor) -> tuple[Window, list[int]]:
        """Return the kernel's window over the image, and the image's size, which includes padding other than zeros."""
        if self._pads_zeros:
            return Window(self.kernel, self.dilation, tuple(self.padding), self.groups), list(x.shape[2:])
        reach = [d * (k - 1) for k, d in zip(self.kernel, self.dilation, strict=True)]
        sizes = [n + r for n, r in zip(self.output_size(x), reach, strict=True)]
        return Window(self.kernel, self.dilation, ((0, 0),) * self._axes, self.groups), sizes

    def _batched(self, x: Tensor) -> Tensor:
        return x[None] if self.is_unbatched(x) else x

    def _group_major(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1) if self.groups > 1 else x[:, 0]

    def _padded(self, x: Tensor) -> Tensor:
        flat = [side for pair in reversed(self.padding) for side in pair]
        if any(flat):
            x = F.pad(x, flat, mode="constant" if self.padding_mode == "zeros" else self.padding_mode)
        return x

    def patches(self, x: Tensor) -> Tensor:
        """Return a view ``[N, Γ, C/Γ, *out, *kernel]`` of the padded input."""
        x = self._padded(x)
        for axis, (k, s, d) in enumerate(zip(self.kernel, self.stride, self.dilation, strict=True)):
            x = x.unfold(2 + axis, d * (k - 1) + 1, s)[..., ::d]
        return x.reshape(x.shape[0], self.groups, x.shape[1] // self.groups, *x.shape[2:])


class ConvTransposeAdapter(ConvAdapter):
    """Covers ``nn.ConvTranspose1d``, ``2d`` and ``3d`` with any stride, padding, output size, dilation and groups.

    The weight ``[d_i, d_o/Γ, k…]`` is treated as that of a plain convolution, ``[d_o, d_i/Γ, k…]``.
    """

    def __init__(
        self, module: nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d, has_weight: bool, has_bias: bool
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
        """Return the input, with the output padding that an ``output_size`` requests.

        Returns:
            The input as it is or, with an ``output_size``, expanded by appended axes whose sizes are the output
            paddings plus 1. There is one more of them than spatial axes, which tells such an input from a plain one.
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
        """Return the input itself and the output padding."""
        axes = len(self.kernel)
        if x.dim() < 2 * axes + 2:
            return x, self.output_padding
        return x.flatten(-axes - 1)[..., 0], tuple(n - 1 for n in x.shape[-axes:])

    @property
    def _pads_zeros(self) -> bool:
        return False  # there are zeros between its pixels, too

    def _padded(self, x: Tensor) -> Tensor:
        """Return the larger input, flipped: positions come in reverse order."""
        x, output_padding = self._split(x)
        sizes = [(n - 1) * s + 1 for n, s in zip(x.shape[2:], self.spread, strict=True)]
        larger = x.new_zeros(*x.shape[:2], *sizes)
        inserted = larger
        for axis, s in enumerate(self.spread):
            inserted = inserted.unfold(2 + axis, 1, s)[..., 0]
        inserted.copy_(x)
        sides = [(lo, hi + extra) for (lo, hi), extra in zip(self.padding, output_padding, strict=True)]
        larger = F.pad(larger, [max(side, 0) for pair in reversed(sides) for side in pair])
        for axis, (lo, hi) in enumerate(sides):  # a padding beyond the kernel's reach is cut off
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


def _shifted_sums(x: Tensor, dim: int, firsts: list[int], size: int, stride: int) -> Tensor:
    """Return the input with the sums over the places that each entry of a kernel visits in place of a dimension.

    Args:
        x: The input, without the zeros around it.
        dim: The dimension.
        firsts: First place of each entry; it is negative in the zeros before the input.
        size: Number of places of each entry.
        stride: Distance of two places.
    """
    lasts = [first + (size - 1) * stride + 1 for first in firsts]
    begin, end = max(0, *firsts), min(x.shape[dim], *lasts)
    if stride > 1 or len(firsts) == 1 or end <= begin:
        starts = [first if first >= 0 else first % stride for first in firsts]
        every = [slice(start, max(last, start), stride) for start, last in zip(starts, lasts, strict=True)]
        return torch.stack([x[(slice(None),) * dim + (places,)].sum(dim) for places in every], dim)
    # The places that all entries visit take one pass over the input; the few other places of each entry are added.
    common, found = x.narrow(dim, begin, end - begin).sum(dim), []
    for first, last in zip(firsts, lasts, strict=True):
        head, tail = slice(max(first, 0), begin), slice(end, max(last, end))
        others = [x[(slice(None),) * dim + (places,)].sum(dim) for places in (head, tail)]
        found.append(common + others[0] + others[1])
    return torch.stack(found, dim)


def _padding(module: nn.Conv1d | nn.Conv2d | nn.Conv3d, axis: int) -> tuple[int, int]:
    """Return the padding before and after along one axis, as the module's own forward pads."""
    if module.padding == "valid":
        return 0, 0
    if module.padding == "same":
        total = module.dilation[axis] * (module.kernel_size[axis] - 1)
        return total // 2, total - total // 2
    size = int(module.padding[axis])
    return size, size


def _coordinates(at: Tensor, shape: torch.Size) -> tuple[Tensor, ...]:
    """Return the index along each axis of flat positions ``[n]``; `torch.unravel_index` would wait for the device."""
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return tuple(at // stride % size for stride, size in zip(strides, shape, strict=True))
