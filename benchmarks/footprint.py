"""Bytes that a window of gradients holds and moves, from shapes: what ``memory_usage()`` is compared with.

With m rows, d parameters, s bytes per number, and per block of TopK k kept entries of s_v + s_i bytes::

    dense       window m d s
    TopK        window m Σ k (s_v + s_i)     error 4 d, or packed: bits/8 d and a pair of bfloat16 per 128 entries
    LowRank     window m r Σ (n0 + n1) s     error 4 d, of the tensors that are factored
    all         Gram matrix 8 m (m + 1) / 2

A step reads the window twice, for the dots and for the combination; TopK's also passes about six times over vectors of
length d (accumulate, select, residual, row, direction, parameters). And it factorises the Gram matrix: m³/3 FLOPs.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from benchmarks.shapes import Shape, count
from secondorder import LowRank, TopK

_ERROR_TILE = 128  # entries that share a range in the packed residual
_RANGE_BYTES = 4  # two bfloat16
_SPARSE_PASSES = 24  # bytes per parameter: six passes in float32


@dataclass(frozen=True)
class Footprint:
    """Bytes of what a window method keeps, named as in ``memory_usage()``."""

    window: int
    error: int
    gram: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.window + self.error + self.gram


def footprint(
    shapes: Sequence[Shape], rows: int, compression: TopK | LowRank | None, dtype: torch.dtype | None = None
) -> Footprint:
    """Return the bytes of a window."""
    window, error = 0, 0
    for shape in shapes:
        if isinstance(compression, TopK):
            row, residual = _top_k_bytes(math.prod(shape), compression)
        else:
            row, residual = _dense_bytes(shape, compression, (dtype or torch.float32).itemsize)
        window += rows * row
        error += residual
    return Footprint(window, error, gram=8 * rows * (rows + 1) // 2)


def moved_bytes(shapes: Sequence[Shape], held: Footprint, compression: TopK | LowRank | None) -> int:
    """Return the bytes that a step cannot help but move."""
    return 2 * held.window + (_SPARSE_PASSES * count(shapes) if isinstance(compression, TopK) else 0)


def solve_flops(rows: int) -> float:
    """Return the FLOPs of the Cholesky factorisation of the Gram matrix."""
    return rows**3 / 3


def _dense_bytes(shape: Shape, compression: LowRank | None, element: int) -> tuple[int, int]:
    """Return the bytes of one row's part of a dense or factored tensor, and of its residual."""
    numel = math.prod(shape)
    if compression is None or len(shape) < 2:
        return element * numel, 0
    n0 = shape[0]
    n1 = numel // n0
    rank = min(compression.rank, n0, n1)
    if rank * (n0 + n1) >= numel:
        return element * numel, 0
    return element * rank * (n0 + n1), 4 * numel


def _top_k_bytes(numel: int, top_k: TopK) -> tuple[int, int]:
    """Return the bytes of one row's part of a sparse tensor, and of its residual."""
    value = top_k.value_dtype.itemsize
    if top_k.density >= 1:  # dense rows: only what their dtype rounds away is fed back
        return value * numel, 4 * numel if top_k.error_feedback and value < 4 else 0
    blocks = list(_blocks(numel, top_k.block_size))
    index = 2 if top_k.block_size <= 2**15 else 4
    row = sum(kept(length, top_k) for length in blocks)
    residual = 4 * numel
    if not top_k.error_feedback:
        residual = 0
    elif top_k.error_bits is not None:
        residual = sum(_packed(length, top_k.error_bits) for length in blocks)
    return row * (value + index), residual


def _blocks(numel: int, size: int) -> Iterator[int]:
    """Yield the lengths of a tensor's blocks: full ones, then what is left over."""
    yield from [size] * (numel // size)
    if numel % size:
        yield numel % size


def kept(length: int, top_k: TopK) -> int:
    """Return how many entries of a block a row keeps."""
    if length == top_k.block_size >= 64:
        return min(length, max(8, 8 * round(top_k.density * length / 8)))
    return max(1, math.ceil(top_k.density * length))


def _packed(length: int, bits: int) -> int:
    return math.ceil(length * bits / 8) + _RANGE_BYTES * math.ceil(length / _ERROR_TILE)
