"""Adapters of layers that are equivalent to a Linear."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from secondorder.capture.layers.adapter import CHUNK_BYTES, Adapter, LinearAdapter, draw, split_examples, widened
from secondorder.linalg.dense import Workspace


class BilinearAdapter(Adapter):
    """Covers ``nn.Bilinear``, a Linear on the outer product of two inputs, flattened as ``weight.flatten(1)`` is."""

    def __init__(self, module: nn.Bilinear, has_weight: bool, has_bias: bool) -> None:
        super().__init__(module, has_weight, has_bias)
        self.sizes: tuple[int, int] = module.in1_features, module.in2_features
        self.d_in, self.d_out = module.in1_features * module.in2_features, module.out_features

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Concatenate both inputs on the last axis."""
        given = dict(zip(("input1", "input2"), args, strict=False)) | kwargs
        return torch.cat([given["input1"].detach(), given["input2"].detach()], -1)

    def is_unbatched(self, x: Tensor) -> bool:
        return x.dim() == 1

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
    """Covers a Linear that keeps its weight as ``[d_i, d_o]``, such as the ``Conv1D`` of Hugging Face's GPT-2."""

    def __init__(self, module: nn.Module, has_weight: bool, has_bias: bool) -> None:
        Adapter.__init__(self, module, has_weight, has_bias)
        weight = module.weight
        assert isinstance(weight, Tensor)
        self.d_in, self.d_out = weight.shape

    def to_matrix(self, weight: Tensor | None, bias: Tensor | None, workspace: Workspace | None = None) -> Tensor:
        return super().to_matrix(None if weight is None else weight.mT, bias, workspace)

    def from_matrix(self, matrix: Tensor, like: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        weight, bias = super().from_matrix(matrix, None if like is None else like.mT)
        return None if weight is None else weight.mT.contiguous(), bias


def hugging_face_conv1d() -> type[nn.Module] | None:
    """Return the ``Conv1D`` of the transformers library if the program has imported it; this never imports it."""
    found = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    return found if isinstance(found, type) and issubclass(found, nn.Module) else None


class StackedAdapter(Adapter):
    """Covers Γ Linears of equal shape that are stacked in one weight ``[Γ·d_o, d_i]``, each with a separate block.

    The query, key and value projections of attention are such Linears. Three axes of an input are (position, example,
    feature), as everywhere inside attention and recurrent layers.

    Args:
        d_in: Features of the input.
        d_out_per_group: Output features of each Linear.
        groups: Γ.
        has_weight: Whether the weight is trained.
        has_bias: Whether the bias is trained.
    """

    positions_are_tokens = True
    sums_may_vanish = True  # those of keys, as a softmax ignores what all of its inputs have in common

    def __init__(self, d_in: int, d_out_per_group: int, groups: int, has_weight: bool, has_bias: bool) -> None:
        super().__init__(nn.Identity(), has_weight, has_bias)
        self.d_in, self.d_out, self.groups = d_in, d_out_per_group, groups

    def of_part(self, part: int) -> Adapter:
        if part < 0:
            return self
        return StackedAdapter(self.d_in, self.d_out, 1, self.has_weight, self.has_bias)

    def sequence_axes(self, x: Tensor) -> tuple[int, int] | None:
        return (1, 0) if x.dim() == 3 else None

    def is_unbatched(self, x: Tensor) -> bool:
        return x.dim() == 1

    def input_rows(self, x: Tensor) -> Iterator[Tensor]:
        yield self._shared(x.reshape(-1, self.d_in))

    def output_rows(self, g: Tensor, x: Tensor | None, examples: int) -> Tensor:
        return self._parted(g.reshape(-1, self.groups * self.d_out))

    def sample_rows(
        self, x: Tensor, g: Tensor, positions: int, examples: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, float] | None:
        rows, kept = g.numel() // g.shape[-1], positions * examples
        if rows <= kept:
            return None
        at = draw(rows, kept, generator, g.device)
        a = self._shared(x.reshape(-1, self.d_in)[at])
        return a, self._parted(g.reshape(-1, g.shape[-1])[at]), rows / kept

    def pick_examples(
        self, x: Tensor, g: Tensor, kept: int, examples: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, int, float]:
        if g.dim() != 3:
            return super().pick_examples(x, g, kept, examples, generator)
        if g.shape[1] != examples:
            return x, g, examples, 1.0
        chosen = draw(examples, kept, generator, g.device)
        return x[:, chosen], g[:, chosen], kept, examples / kept

    def example_inputs(self, x: Tensor, examples: int) -> Tensor:
        return self._shared(self._by_example(x, examples))

    def example_outputs(self, g: Tensor, x: Tensor | None, examples: int) -> Tensor:
        return self._parted(self._by_example(g, examples))

    def input_sums(self, x: Tensor, examples: int) -> tuple[Tensor, int]:
        by_example = widened(self._by_example(x, examples))
        return self._shared(by_example.sum(1)), by_example.shape[1]

    def output_sums(self, g: Tensor, x: Tensor | None, examples: int) -> Tensor:
        return widened(self.example_outputs(g, x, examples)).sum(-2)

    def _by_example(self, x: Tensor, examples: int) -> Tensor:
        if x.dim() != 3:
            return split_examples(x, examples)
        if x.shape[1] != examples:
            raise ValueError(f"its sequences of {x.shape[1]} examples do not match a batch of {examples}")
        return x.transpose(0, 1)

    def _shared(self, x: Tensor) -> Tensor:
        return x.expand(self.groups, *x.shape) if self.groups > 1 else x

    def _parted(self, g: Tensor) -> Tensor:
        """Return ``[…, Γ·d_o]`` as ``[(Γ,) …, d_o]``."""
        if self.groups == 1:
            return g
        parts: Tensor = g.unflatten(-1, (self.groups, self.d_out))
        return parts.movedim(-2, 0)
