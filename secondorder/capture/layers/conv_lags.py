"""The second moment of the patches of a convolution of stride 1, computed without the patches.

With patches taken at every shift p that touches the image, and zeros outside, the sum depends on two kernel positions
only through their lag::

    Σ_p x[p + k] x[p + k']ᵀ  =  T[k' − k],        T[δ] = Σ_q x[q] x[q + δ]ᵀ

T is the gradient of a convolution's weight, with the image as both input and gradient; since T[−δ] = T[δ]ᵀ, only lags
δ₀ ≥ 0 along the first axis are computed: 15 products of channels for a 3 × 3 kernel instead of the 81 / 2 of its
patches. A layer does not take every shift: those that its padding leaves out see the image with a part of the kernel
only, and their few patches are subtracted again. The result differs by the rounding of T, which is small compared with
the patches of an image whose border is not far brighter than the rest of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.grad import conv1d_weight, conv2d_weight, conv3d_weight

from secondorder.linalg.dense import add_gram_, mirror_upper_

_WEIGHT_GRADIENT = (conv1d_weight, conv2d_weight, conv3d_weight)
#: The cost of other operations, measured on a CPU, as the number of multiplications that a large product does in the
#: same time: gathering one number of a patch, adding one number of T to the matrix, and calling one function.
_GATHER, _PLACE, _CALL = 90, 300, 400_000
#: Products of few channels are slow, as if there were this many more.
_FEW = 8
#: Lags must be clearly cheaper, since all of this is a rough estimate.
_GAIN = 0.8
#: From this many channels on, T is added by pairs of taps, in rows of channels.
_WIDE = 64
#: Number of positions of one weight gradient: oneDNN adds them almost one after the other, and rounds every time.
_POSITIONS = 8192


class Window(NamedTuple):
    """The way in which a kernel passes over an image, with stride 1 and zeros around the image.

    Attributes:
        kernel: Size along each axis.
        dilation: Distance of two taps.
        padding: Zeros before and after.
        groups: Γ, number of groups of channels.
    """

    kernel: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    groups: int

    def reach(self, axis: int) -> int:
        """Return the distance of the first tap from the last one."""
        return self.dilation[axis] * (self.kernel[axis] - 1)

    def positions(self, axis: int, size: int) -> int:
        """Return the number of shifts that the layer takes, for an image of that size."""
        return size + sum(self.padding[axis]) - self.reach(axis)

    def missing(self, axis: int, size: int) -> Iterator[tuple[int, int, int]]:
        """Yield the shifts that touch the image and are not taken: the first tap inside, and the taps inside.

        Args:
            axis: Axis along which the shift is not taken.
            size: Size of the image along it.

        Yields:
            Pixel of the first tap inside, number of that tap, number of the first one that is outside again.
        """
        before, step, last = self.padding[axis][0], self.dilation[axis], self.kernel[axis] - 1
        early = range(-self.reach(axis), min(-before, size))
        late = range(max(self.positions(axis, size) - before, -self.reach(axis)), size)
        for first in (*early, *late):  # the pixel under the first tap, which may be outside
            start, stop = max(0, -(first // step)), min(last, (size - 1 - first) // step)
            if start <= stop:
                yield first + step * start, start, stop + 1

    def sees_all(self, axis: int, size: int) -> bool:
        """Whether every tap sees a pixel and every pixel is under a tap: unseen values must not even cancel."""
        before, positions = self.padding[axis][0], self.positions(axis, size)
        meets = before < positions and self.reach(axis) - before < size
        return meets and (self.kernel[axis] == 1 or self.dilation[axis] <= positions)


def gains(window: Window, images: int, channels: int, sizes: Sequence[int]) -> bool:
    """Whether lags are less work than patches.

    Args:
        window: The kernel.
        images: N.
        channels: Number of channels of a group.
        sizes: Size of an image along each axis.

    Returns:
        Whether lags are less work; they never are for depthwise convolutions, whose weight gradients are slow, nor if a
        tap or a pixel has no part in any patch.
    """
    taps = math.prod(window.kernel)
    positions = [window.positions(axis, size) for axis, size in enumerate(sizes)]
    if taps == 1 or min(positions) < 1 or images == 0 or (channels == 1 and window.groups > 1):
        return False
    if not all(window.sees_all(axis, size) for axis, size in enumerate(sizes)):
        return False
    lags = window.kernel[0] * math.prod(2 * k - 1 for k in window.kernel[1:])
    work: float = math.prod(sizes) * lags * channels * (channels + _FEW) * window.groups
    once = _PLACE * window.groups * (channels * taps) ** 2 + _CALL * taps
    for axis, size in enumerate(sizes):
        others = math.prod(_shifts(window, axis, other, n) for other, n in enumerate(sizes) if other != axis)
        for _, start, stop in window.missing(axis, size):
            work += _patch_work(others, channels * taps // window.kernel[axis] * (stop - start)) * window.groups
            once += 8 * _CALL
    by_patches = images * window.groups * _patch_work(math.prod(positions), channels * taps)
    return images * work + once < _GAIN * by_patches


def _patch_work(positions: int, features: int) -> float:
    return positions * features * (features / 2 + _GATHER)


def add_patch_gram_(out: Tensor, x: Tensor, window: Window, weight: float = 1.0) -> None:
    """Add ``Σ a aᵀ`` over all patches a, features in the order (channel, kernel…), to a matrix.

    Args:
        out: Matrix ``[(Γ,) d, d]`` with ``d = C/Γ · taps``, changed in place.
        x: Images ``[N, C, *sizes]``, without padding; the border strip of all images is copied.
        window: The kernel.
        weight: Factor of the sum.
    """
    channels = x.shape[1] // window.groups
    features = (channels, *window.kernel)
    blocks = out.unflatten(-1, features).unflatten(-1 - len(features), features)
    blocks = blocks if window.groups > 1 else blocks[None]
    _add_lags_(blocks, _lags(x, window, out.dtype), window, weight)
    for axis, size in enumerate(x.shape[2:]):
        for pixel, start, stop in window.missing(axis, size):
            taken = _strip_gram(x, window, axis, (pixel, start, stop), out.dtype)
            block = blocks.narrow(2 + axis, start, stop - start)
            block = block.narrow(3 + len(window.kernel) + axis, start, stop - start)
            block.sub_(taken.view(block.shape), alpha=weight)


def _lags(x: Tensor, window: Window, dtype: torch.dtype) -> Tensor:
    """Return T ``[Γ, C/Γ, C/Γ, K₀, 2K₁ − 1, …]`` of the lags that are not negative along the first axis."""
    axes, reach = len(window.kernel), window.reach(0)
    shape = (x.shape[1], x.shape[1] // window.groups, window.kernel[0], *(2 * k - 1 for k in window.kernel[1:]))
    margins = (0, *(window.reach(axis) for axis in range(1, axes)))
    weight_gradient: Callable[..., Tensor] = _WEIGHT_GRADIENT[axes - 1]
    row = math.prod(x.shape[3:])
    images, rows = max(1, _POSITIONS // max(1, row * x.shape[2])), max(1, _POSITIONS // max(1, row))
    total = x.new_zeros(shape, dtype=dtype)
    for part in x.split(images):
        part = part.to(dtype)
        for start in range(0, x.shape[2], rows):  # this cuts an image that is too large
            here = part.narrow(2, start, min(rows, x.shape[2] - start))
            later = part.narrow(2, start, min(rows + reach, x.shape[2] - start))
            later = F.pad(later, (*[0] * (2 * axes - 1), here.shape[2] + reach - later.shape[2]))
            total += weight_gradient(later, shape, here, 1, margins, window.dilation, window.groups)
    return total.view(window.groups, -1, *shape[1:])


def _add_lags_(blocks: Tensor, half: Tensor, window: Window, weight: float) -> None:
    """Add T[k' − k] to each pair of taps.

    Args:
        blocks: Matrix ``[Γ, C/Γ, *kernel, C/Γ, *kernel]``.
        half: T, for lags that are not negative along the first axis.
        window: The kernel.
        weight: Factor of the sum.
    """
    axes, channels = len(window.kernel), half.shape[1]
    others = half[:, :, :, 1:].transpose(1, 2).flip(tuple(range(3, 3 + axes)))
    lags = torch.cat((others, half), 3)
    taps = [_unravel(index, window.kernel) for index in range(math.prod(window.kernel))]
    if channels < _WIDE:
        for tap in taps:
            seen = lags
            for axis, (n, k) in enumerate(zip(window.kernel, tap, strict=True)):
                seen = seen.narrow(3 + axis, n - 1 - k, n)
            _taken(blocks, tap, None).add_(seen, alpha=weight)
        return
    lags = lags.permute(*range(3, 3 + axes), 0, 1, 2).contiguous()
    for tap in taps:
        for other in taps:
            lag = tuple(n - 1 + o - k for n, k, o in zip(window.kernel, tap, other, strict=True))
            _taken(blocks, tap, other).add_(lags[lag], alpha=weight)


def _taken(blocks: Tensor, tap: Sequence[int], other: Sequence[int] | None) -> Tensor:
    """Return a view ``[Γ, C/Γ, C/Γ]`` of a pair of taps, or ``[Γ, C/Γ, C/Γ, *kernel]`` of one tap with all taps."""
    for k in tap:
        blocks = blocks.select(2, k)
    for k in other or ():
        blocks = blocks.select(3, k)
    return blocks


def _unravel(index: int, sizes: Sequence[int]) -> tuple[int, ...]:
    found = []
    for size in reversed(sizes):
        index, rest = divmod(index, size)
        found.append(rest)
    return tuple(reversed(found))


def _strip_gram(x: Tensor, window: Window, axis: int, inside: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
    """Return ``Σ a aᵀ`` of the patches at one shift that is not taken along an axis, for the taps that are inside.

    Along the axes before it, only shifts that are taken count, so that none counts twice.

    Args:
        x: Images ``[N, C, *sizes]``.
        window: The kernel.
        axis: Axis along which the shift is not taken.
        inside: Pixel of the first tap inside, that tap, and the first one that is outside again.
        dtype: Dtype of the result.

    Returns:
        Matrix ``[Γ, m, m]``, m being the channels of a group times the taps inside.
    """
    pixel, start, stop = inside
    step = window.dilation[axis]
    strip = x.narrow(2 + axis, pixel, step * (stop - start - 1) + 1)
    strip = strip[(slice(None),) * (2 + axis) + (slice(None, None, step),)]
    sides: list[int] = []
    for other in reversed(range(len(window.kernel))):
        reach = window.reach(other)
        sides += (0, 0) if other == axis else window.padding[other] if other < axis else (reach, reach)
    strip = F.pad(strip.to(dtype), sides)
    taps: list[int] = []
    for other, (size, distance) in enumerate(zip(window.kernel, window.dilation, strict=True)):
        if other != axis:
            strip = strip.unfold(2 + other, distance * (size - 1) + 1, 1)[..., ::distance]
            taps.append(strip.dim() - 1)
    at = [2 + other for other in range(len(window.kernel)) if other != axis]
    taps.insert(axis, 2 + axis)
    rows = strip.permute(1, *taps, 0, *at)
    rows = rows.reshape(window.groups, -1, math.prod(rows.shape[1 + len(taps) :]))
    gram = rows.new_zeros(window.groups, rows.shape[1], rows.shape[1])
    add_gram_(*((gram, rows.mT) if window.groups > 1 else (gram[0], rows[0].mT)))
    return mirror_upper_(gram)


def _shifts(window: Window, axis: int, other: int, size: int) -> int:
    return window.positions(other, size) if other < axis else size + window.reach(other)
