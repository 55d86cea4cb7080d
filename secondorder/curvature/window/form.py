"""The form in which the rows of a window are stored: dense, sparse or low-rank, and its consequences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from secondorder.curvature.window.lowrank import LowRank, LowRankRows
from secondorder.curvature.window.rows import DenseRows, Rows
from secondorder.curvature.window.shards import Cutting
from secondorder.curvature.window.topk import TopK, TopKRows

Compression = TopK | LowRank | None


@dataclass
class Place:
    """A tensor of the window: its shape as real numbers, working precision and device.

    ``whole`` is the shape of the tensor of which this is a slice.
    """

    shape: torch.Size
    working: torch.dtype
    device: torch.device
    whole: torch.Size | None = None


@dataclass(frozen=True)
class Form:
    """The form in which rows are stored.

    Attributes:
        m: Number of slots.
        compression: Compression of the rows.
        dtype: Dtype of dense rows and factors; None for the working precision.
        seed: Seed of the first warm starts of low-rank rows.
    """

    m: int
    compression: Compression = None
    dtype: torch.dtype | None = None
    seed: int = 0

    def rows(self, places: Sequence[Place]) -> Rows:
        """Create empty rows over places of one device and precision."""
        working, device, shapes = places[0].working, places[0].device, [place.shape for place in places]
        wholes = [place.shape if place.whole is None else place.whole for place in places]
        columns = sum(math.prod(whole) for whole in wholes)
        kind, dtype = self.compression, self.dtype or working
        if isinstance(kind, TopK) and kind.density < 1:
            return _sparse_rows(kind, device)(shapes, self.m, working, device, kind)
        if isinstance(kind, TopK):
            value = working if kind.value_dtype == torch.float32 else kind.value_dtype
            return DenseRows(shapes, self.m, working, device, value, kind.error_feedback, columns)
        if isinstance(kind, LowRank):
            return LowRankRows(shapes, self.m, working, device, kind, dtype, self.seed, wholes)
        return DenseRows(shapes, self.m, working, device, dtype, columns=columns)

    @property
    def cutting(self) -> Cutting:
        """Return where tensors may be cut without changing what is stored."""
        kind = self.compression
        if isinstance(kind, TopK) and kind.density < 1:
            return Cutting(kind.block_size, blocked=True)
        return Cutting(0) if isinstance(kind, LowRank) else Cutting()

    def cost(self, shape: torch.Size) -> int:
        """Return the cost of a tensor when a window is cut into even parts."""
        kind = self.compression
        return kind.kept(shape) if isinstance(kind, LowRank) else math.prod(shape)

    def describe(self, working: torch.dtype) -> str:
        """Describe the form as text."""
        kind = self.compression
        if isinstance(kind, TopK) and kind.density == 1:
            value = working if kind.value_dtype == torch.float32 else kind.value_dtype
            return f"dense {str(value).removeprefix('torch.')}"
        if isinstance(kind, TopK):
            return f"top {kind.density:.3g} of {kind.block_size}"
        if isinstance(kind, LowRank):
            return f"rank {kind.rank}"
        return f"dense {str(self.dtype or working).removeprefix('torch.')}"


def _sparse_rows(rule: TopK, device: torch.device) -> type[TopKRows]:
    if rule.kernels == "torch":
        return TopKRows
    from secondorder.curvature.window import topk_triton  # imports triton

    topk_triton.require_device(device)
    return topk_triton.TritonTopKRows
