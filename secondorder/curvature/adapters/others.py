"""Adapters of layers that are a Linear in another dress."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from secondorder.curvature.layers import CHUNK_BYTES, Adapter, LinearAdapter, split_examples, widened
from secondorder.linalg import Workspace


class BilinearAdapter(Adapter):
    """``nn.Bilinear``: a Linear whose input is the outer product of two, flattened as ``weight.flatten(1)`` is."""

    def __init__(self, module: nn.Bilinear, has_weight: bool, has_bias: bool) -> None:
        super().__init__(module, has_weight, has_bias)
        self.sizes = module.in1_features, module.in2_features
        self.d_in, self.d_out = module.in1_features * module.in2_features, module.out_features

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Both inputs, one behind the other on the last axis."""
        given = dict(zip(("input1", "input2"), args, strict=False)) | kwargs
        return torch.cat([given["input1"].detach(), given["input2"].detach()], -1)

    def is_unbatched(self, x: Tensor) -> bool:
        return x.dim() == 1

    def row_count(self, x: Tensor) -> int:
        return x.numel() // sum(self.sizes)

    def input_rows(self, x: Tensor) -> Iterator[Tensor]:
        x = x.reshape(-1, sum(self.sizes))
        for part in x.split(max(1, CHUNK_BYTES // (self.d_in * x.element_size()))):
            yield self._products(part)

    def output_rows(self, g: Tensor, x: Tensor | None, examples: int) -> Tensor:
        return g.reshape(-1, self.d_out)

    def input_sums(self, x: Tensor, examples: int) -> tuple[Tensor, int]:
        first, second = widened(split_examples(x, examples)).split(self.sizes, -1)
        products: Tensor = first.mT @ second
        return products.flatten(1), first.shape[1]

    def output_sums(self, g: Tensor, x: Tensor | None, examples: int) -> Tensor:
        return widened(split_examples(g, examples)).sum(1)

    def example_inputs(self, x: Tensor, examples: int) -> Tensor:
        return self._products(split_examples(x, examples))

    def example_outputs(self, g: Tensor, x: Tensor | None, examples: int) -> Tensor:
        return split_examples(g, examples)

    def _products(self, x: Tensor) -> Tensor:
        first, second = widened(x).split(self.sizes, -1)
        rows: Tensor = first[..., :, None] * second[..., None, :]
        return rows.flatten(-2)


class TransposedLinearAdapter(LinearAdapter):
    """A Linear that keeps its weight as ``[d_i, d_o]``, such as the ``Conv1D`` of Hugging Face's GPT-2."""

    def __init__(self, module: nn.Module, has_weight: bool, has_bias: bool) -> None:
        Adapter.__init__(self, module, has_weight, has_bias)
        weight = module.weight
        assert isinstance(weight, Tensor)
        self.d_in, self.d_out = weight.shape

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The input, by whatever name it was passed."""
        x: Tensor = args[0] if args else next(iter(kwargs.values()))
        return x

    def to_matrix(self, weight: Tensor | None, bias: Tensor | None, workspace: Workspace | None = None) -> Tensor:
        return super().to_matrix(None if weight is None else weight.mT, bias, workspace)

    def from_matrix(self, matrix: Tensor, like: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        weight, bias = super().from_matrix(matrix, None if like is None else like.mT)
        return None if weight is None else weight.mT.contiguous(), bias


def hugging_face_conv1d() -> type[nn.Module] | None:
    """The ``Conv1D`` of the transformers library if the program has imported it; it is never imported from here."""
    found = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    return found if isinstance(found, type) and issubclass(found, nn.Module) else None


class StackedAdapter(Adapter):
    """Γ Linears of equal shape that share their input and are stacked in one weight ``[Γ·d_o, d_i]``.

    Such are the query, key and value projections of attention in one product. Each has a block of its own.

    Args:
        d_in: Features of the input.
        d_out_per_group: Output features of each Linear.
        groups: Γ.
        has_weight: Whether the weight is trained.
        has_bias: Whether the bias is trained.
    """

    positions_are_tokens = True

    def __init__(self, d_in: int, d_out_per_group: int, groups: int, has_weight: bool, has_bias: bool) -> None:
        super().__init__(nn.Identity(), has_weight, has_bias)
        self.d_in, self.d_out, self.groups = d_in, d_out_per_group, groups

    def is_unbatched(self, x: Tensor) -> bool:
        return x.dim() == 1

    def row_count(self, x: Tensor) -> int:
        return x.numel() // max(self.d_in, 1)

    def input_rows(self, x: Tensor) -> Iterator[Tensor]:
        yield self._shared(x.reshape(-1, self.d_in))

    def output_rows(self, g: Tensor, x: Tensor | None, examples: int) -> Tensor:
        return self._parted(g.reshape(-1, self.groups * self.d_out))

    def input_sums(self, x: Tensor, examples: int) -> tuple[Tensor, int]:
        by_example = split_examples(x, examples)
        return self._shared(widened(by_example).sum(1)), by_example.shape[1]

    def output_sums(self, g: Tensor, x: Tensor | None, examples: int) -> Tensor:
        return self._parted(widened(split_examples(g, examples)).sum(1))

    def example_inputs(self, x: Tensor, examples: int) -> Tensor:
        return self._shared(split_examples(x, examples))

    def example_outputs(self, g: Tensor, x: Tensor | None, examples: int) -> Tensor:
        return self._parted(split_examples(g, examples))

    def _shared(self, x: Tensor) -> Tensor:
        return x.expand(self.groups, *x.shape) if self.groups > 1 else x

    def _parted(self, g: Tensor) -> Tensor:
        """``[…, Γ·d_o]`` as ``[(Γ,) …, d_o]``."""
        return g.unflatten(-1, (self.groups, self.d_out)).movedim(-2, 0) if self.groups > 1 else g
