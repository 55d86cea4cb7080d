"""Adapters of normalization layers, where the scale and shift of each unit form a separate exact block of size 2×2.

With x̂ the normalized input, a layer computes ``y = w x̂ + b`` unit by unit, so one example's gradient in a unit is the
pair ``u = (Σ_s g x̂, Σ_s g)`` over its positions. Units are the groups of the block, u its output row, and A = [1]. The
normalization is taken as constant: that other examples of a batch enter its statistics is left out of the curvature.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from secondorder.capture.layers.adapter import Adapter, positions_of, split_examples, widened
from secondorder.linalg.dense import Workspace

#: Number of bytes of temporaries that stay in a core's cache.
_CACHED = 1 << 19


class NormAdapter(Adapter):
    """The scale and shift of C units: matrices ``[C, k, 1]``, where k of the two are trained.

    Args:
        module: The layer.
        has_weight: Whether the scale is trained.
        has_bias: Whether the shift is trained.
        norm_curvature: ``"unit"`` for a k×k block per unit, ``"diagonal"`` for its diagonal.
    """

    is_exact = True
    units_in = "num_features"
    """Attribute of the layer with its number of units, or with the shape of its scale and shift."""

    def __init__(self, module: Any, has_weight: bool, has_bias: bool = False, norm_curvature: str = "unit") -> None:
        super().__init__(module, has_weight, has_bias)
        units = getattr(module, self.units_in)
        self.shape: tuple[int, ...] = (units,) if isinstance(units, int) else tuple(units)
        self.eps: float | None = module.eps
        self.units, self.trained = math.prod(self.shape), has_weight + has_bias
        diagonal = norm_curvature == "diagonal"
        self.groups, self.d_out = (self.units * self.trained, 1) if diagonal else (self.units, self.trained)
        self.d_in = 0

    @property
    def n_a(self) -> int:
        return 1

    @property
    def constant_input(self) -> bool:
        return True

    @abstractmethod
    def normalized(self, x: Tensor) -> Tensor:
        """Return x̂, the output of the layer with weight 1 and bias 0, in at least float32."""

    def scaled_sums(self, g: Tensor, x: Tensor, examples: int) -> Tensor:
        """Return ``Σ_s g x̂ [N, C]`` over the positions of each example, from g of at least float32."""
        return self.sum_positions(g * self.normalized(x), examples)

    @abstractmethod
    def sum_positions(self, x: Tensor, examples: int) -> Tensor:
        """Sum over the positions of each example to ``[N, C]``.

        Raises:
            ValueError: If the rows cannot be assigned to examples.
        """

    # ------------------------------------------------------------------ rows
    def input_rows(self, x: Tensor) -> Iterator[Tensor]:
        raise NotImplementedError("the input factor of a normalisation layer is [1]")

    def output_rows(self, g: Tensor, x: Tensor | None, examples: int) -> Tensor:
        return self.output_sums(g, x, examples)

    def output_sums(self, g: Tensor, x: Tensor | None, examples: int) -> Tensor:
        g = widened(g)
        parts = []
        if self.has_weight:
            assert x is not None
            parts.append(self.scaled_sums(g, x, examples))
        if self.has_bias:
            parts.append(self.sum_positions(g, examples))
        by_unit = torch.stack(parts, -1)  # [N, C, k]
        if self.groups == 1:
            return by_unit[:, 0]
        return by_unit.reshape(len(by_unit), self.groups, self.d_out).transpose(0, 1)

    def example_inputs(self, x: Tensor, examples: int) -> Tensor:
        raise NotImplementedError("the input factor of a normalisation layer is [1]")

    def example_outputs(self, g: Tensor, x: Tensor | None, examples: int) -> Tensor:
        return self.output_sums(g, x, examples)[..., None, :]

    # ------------------------------------------------------------------ parameters
    def to_matrix(self, weight: Tensor | None, bias: Tensor | None, workspace: Workspace | None = None) -> Tensor:
        parts = [part.reshape(-1) for part in (weight, bias) if part is not None]
        lead = (self.groups,) if self.groups > 1 else ()
        return torch.stack(parts, -1).reshape(*lead, self.d_out, 1)

    def from_matrix(self, matrix: Tensor, like: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        columns = matrix.reshape(self.units, self.trained).unbind(1)
        weight = columns[0].reshape(self.shape).contiguous() if self.has_weight else None
        bias = columns[-1].reshape(self.shape).contiguous() if self.has_bias else None
        return weight, bias


class LayerNormAdapter(NormAdapter):
    """Covers ``nn.LayerNorm`` over any number of trailing axes: every element of them is a unit."""

    units_in = "normalized_shape"

    @property
    def feature_axes(self) -> int:
        return len(self.shape)

    def is_unbatched(self, x: Tensor) -> bool:
        return x.dim() == len(self.shape)

    def normalized(self, x: Tensor) -> Tensor:
        assert self.eps is not None
        return F.layer_norm(widened(x), self.shape, eps=self.eps)

    def sum_positions(self, x: Tensor, examples: int) -> Tensor:
        return split_examples(x.flatten(x.dim() - len(self.shape)), examples).sum(1)


class RMSNormAdapter(LayerNormAdapter):
    """Covers ``nn.RMSNorm``, which is LayerNorm without a mean and without a shift."""

    def normalized(self, x: Tensor) -> Tensor:
        if self.eps is None:
            # The eps that stands for None depends on the dtype of the input and on the release of torch.
            return widened(F.rms_norm(x, self.shape))
        return F.rms_norm(widened(x), self.shape, eps=self.eps)


class ChannelNormAdapter(NormAdapter):
    """Covers layers with a scale and a shift per channel, with inputs ``[N, C, …]``."""

    channels_first = True

    eps: float

    def is_unbatched(self, x: Tensor) -> bool:
        return False

    def sum_positions(self, x: Tensor, examples: int) -> Tensor:
        folds = positions_of(x, examples)
        return x.reshape(examples, folds, self.units, -1).sum((1, 3))


class BatchNormAdapter(ChannelNormAdapter):
    """Covers ``nn.BatchNorm1d``, ``2d`` and ``3d``, normalizing by the statistics of the batch as in training."""

    @staticmethod
    def refusal(module: nn.Module) -> str:
        """Return why such a module follows the fallback rule; empty if it does not have to."""
        if isinstance(module, nn.SyncBatchNorm):
            return "SyncBatchNorm normalizes with statistics of all ranks, which the input on one rank does not contain"
        return ""

    def normalized(self, x: Tensor) -> Tensor:
        return F.batch_norm(widened(x), None, None, training=True, eps=self.eps)

    def scaled_sums(self, g: Tensor, x: Tensor, examples: int) -> Tensor:
        """Compute the sums without x̂: some examples at a time, so that no temporary is as large as x."""
        dims, folds = (0, *range(2, x.dim())), positions_of(x, examples)
        rows = folds * max(1, _CACHED // (4 * math.prod(x.shape[1:]) * folds)) if x.device.type == "cpu" else len(x)
        mean = x.mean(dims, keepdim=True, dtype=g.dtype)
        squares, found = torch.zeros(self.units, dtype=g.dtype, device=x.device), []
        for part, gradient in zip(x.split(rows), g.split(rows), strict=True):
            centred = part - mean
            found.append(self.sum_positions(gradient * centred, len(part) // folds))
            squares += centred.square_().sum(dims)
        deviation = (squares / (x.numel() // self.units) + self.eps).sqrt()
        return torch.cat(found) / deviation


class GroupNormAdapter(ChannelNormAdapter):
    """Covers ``nn.GroupNorm``."""

    units_in = "num_channels"

    def __init__(
        self, module: nn.GroupNorm, has_weight: bool, has_bias: bool = False, norm_curvature: str = "unit"
    ) -> None:
        super().__init__(module, has_weight, has_bias, norm_curvature)
        self.channel_groups = module.num_groups

    def normalized(self, x: Tensor) -> Tensor:
        return F.group_norm(widened(x), self.channel_groups, eps=self.eps)


class InstanceNormAdapter(ChannelNormAdapter):
    """Covers ``nn.InstanceNorm1d``, ``2d`` and ``3d``, including single examples ``[C, …]``."""

    def __init__(self, module: Any, has_weight: bool, has_bias: bool = False, norm_curvature: str = "unit") -> None:
        super().__init__(module, has_weight, has_bias, norm_curvature)
        self.unbatched_dim: int = module._get_no_batch_dim()

    def is_unbatched(self, x: Tensor) -> bool:
        return x.dim() == self.unbatched_dim

    def normalized(self, x: Tensor) -> Tensor:
        batched = x[None] if self.is_unbatched(x) else x
        return F.instance_norm(widened(batched), eps=self.eps).view(x.shape)

    def sum_positions(self, x: Tensor, examples: int) -> Tensor:
        return super().sum_positions(x[None] if self.is_unbatched(x) else x, examples)
