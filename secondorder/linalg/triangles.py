"""Symmetric matrices stored and sent as triangles of n(n+1)/2 elements each.

The lower triangle is folded into a rectangle, so packing takes a few strided copies for every n. With ``h`` the larger
half of n, the first h columns of the triangle do not move, and the small triangle of the last ``n - h`` columns is
transposed and stored above their diagonal::

    n = 5, h = 3          a . . | . .          a D E
                          b c . | . .          b c F        [5, 3]; for even n the small triangle is as large as the
                          d e f | . .    →     d e f        first, and the columns begin one row lower: [n + 1, h]
                          g h i | D .          g h i
                          j k l | E F          j k l
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor


def triangle(n: int) -> int:
    """Return the number of elements of a triangle of an ``[n, n]`` matrix, including the diagonal."""
    return n * (n + 1) // 2


@functools.lru_cache(maxsize=128)
def _upper(n: int, device: torch.device) -> Tensor:
    """Return a mask ``[n, n]`` of the upper triangle, including the diagonal."""
    return torch.ones(n, n, dtype=torch.bool, device=device).triu()


def _rectangle(packed: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the folded triangles of symmetric matrices ``[..., n, n]`` as a view of a flat buffer."""
    n = shape[-1]
    half = (n + 1) // 2
    return packed.view(*shape[:-2], triangle(n) // half if half else 0, half)


def pack(matrix: Tensor, packed: Tensor) -> None:
    """Write the lower triangles of symmetric matrices to a flat buffer, which may be of another dtype.

    Args:
        matrix: ``[..., n, n]``.
        packed: ``[... * n(n+1)/2]``, contiguous.
    """
    n, half = matrix.shape[-1], (matrix.shape[-1] + 1) // 2
    small, even = n - half, 1 - n % 2
    folded = _rectangle(packed, matrix.shape)
    folded[..., even:, :].copy_(matrix[..., :half])
    if small:
        above = folded[..., :small, 1 - even :]
        above.copy_(torch.where(_upper(small, matrix.device), matrix[..., half:, half:].mT, above))


def unpack(packed: Tensor, matrix: Tensor) -> None:
    """Write symmetric matrices from the result of :func:`pack`.

    Args:
        packed: ``[... * n(n+1)/2]``, contiguous.
        matrix: ``[..., n, n]``, overwritten.
    """
    n, half = matrix.shape[-1], (matrix.shape[-1] + 1) // 2
    small, even = n - half, 1 - n % 2
    folded = _rectangle(packed, matrix.shape)
    left, above = folded[..., even:, :], folded[..., :small, 1 - even :]
    first = left[..., :half, :]
    matrix[..., :half, :half].copy_(torch.where(_upper(half, matrix.device), first.mT, first))
    if small:
        matrix[..., half:, :half].copy_(left[..., half:, :])
        matrix[..., :half, half:].copy_(left[..., half:, :].mT)
        matrix[..., half:, half:].copy_(torch.where(_upper(small, matrix.device), above, above.mT))
