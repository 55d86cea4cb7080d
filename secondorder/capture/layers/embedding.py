"""Adapters of lookup tables: their input rows are one-hot, so that the factor A is diagonal.

A table ``[V, D]`` is multiplied by one-hot rows from the left, so its matrix is the gradient transposed, ``[D, V]``. No
row of V numbers is ever formed: an *entry* (index, row, weight) says that a row ``a`` holds ``weight`` at ``index``,
and everything is a sum over entries.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from secondorder.capture.layers.adapter import Adapter, draw, positions_of, split_examples, widened
from secondorder.linalg.dense import Workspace

#: Marks a position without an index, which is padding or was masked.
_NOTHING = -1


class EmbeddingAdapter(Adapter):
    """Covers ``nn.Embedding``: A is the diagonal of the relative frequencies of the indices.

    Positions that contain ``padding_idx`` are in neither factor, and do not count in the mean that defines A.
    """

    one_hot = True
    positions_are_tokens = True

    def __init__(self, module: nn.Embedding | nn.EmbeddingBag, has_weight: bool, has_bias: bool = False) -> None:
        super().__init__(module, has_weight, has_bias)
        self.d_in, self.d_out = module.num_embeddings, module.embedding_dim
        self.padding_idx: int | None = module.padding_idx

    @staticmethod
    def refusal(module: nn.Module) -> str:
        """Return why such a module follows the fallback rule; empty if it does not have to."""
        name = type(module).__name__
        if module.sparse:
            return f"{name}(sparse=True) has sparse gradients"
        if module.max_norm is not None:
            return f"{name}(max_norm=…) changes its weight in the forward pass"
        if module.scale_grad_by_freq:
            return f"{name}(scale_grad_by_freq=True) rescales its gradient row by row"
        return ""

    # ------------------------------------------------------------------ rows
    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Return the indices with padding marked: layers that share a table may have different ``padding_idx``."""
        x = super().prepare(args, kwargs)
        return x if self.padding_idx is None else torch.where(x == self.padding_idx, _NOTHING, x)

    def is_unbatched(self, x: Tensor) -> bool:
        return x.dim() == 0

    def input_rows(self, x: Tensor) -> Iterator[Tensor]:
        raise NotImplementedError("rows of a lookup table are never formed: input_squares has their diagonal factor")

    def output_rows(self, g: Tensor, x: Tensor | None, examples: int) -> Tensor:
        rows = g.reshape(-1, self.d_out)
        if self.padding_idx is None or x is None:
            return rows
        return rows.masked_fill((x == _NOTHING).reshape(-1, 1), 0)

    def input_squares(self, x: Tensor) -> tuple[Tensor, int | Tensor]:
        index, _, weight = self.entries(x)
        return weight.new_zeros(self.d_in).index_add_(0, index, weight), weight.sum()

    def squared_means(self, inputs: list[Tensor], examples: int) -> Tensor:
        x = self.joined(inputs, examples)
        real = self.keep(x, examples).double()
        return self.example_squares(x, (real / real.sum(1, keepdim=True).clamp(min=1)).reshape(-1, 1), examples)[0]

    def joined(self, inputs: list[Tensor], examples: int) -> Tensor:
        """Combine several calls into one, in which the rows of each example follow one another."""
        return inputs[0] if len(inputs) == 1 else torch.cat([self.indices(x, examples) for x in inputs], 1)

    def masked(self, x: Tensor, keep: Tensor) -> Tensor:
        return torch.where(keep.reshape(x.shape), x, _NOTHING)

    # ------------------------------------------------------------------ rows by example
    def indices(self, x: Tensor, examples: int) -> Tensor:
        """Return indices by example, ``[N, S]``, which with :meth:`keep` stand for :meth:`example_inputs`.

        Returns:
            An int64 tensor.

        Raises:
            ValueError: If the positions cannot be assigned to examples.
        """
        return split_examples(x[..., None], examples)[..., 0].long()

    def keep(self, x: Tensor, examples: int) -> Tensor:
        """Return which of :meth:`indices` are not padding, as bool ``[N, S]``."""
        return self.indices(x, examples) != _NOTHING

    def real_rows(self, x: Tensor, examples: int) -> Tensor:
        """Return how many rows of each example are not padding, ``[N]``."""
        return self.keep(x, examples).sum(1)

    def input_sums(self, x: Tensor, examples: int) -> tuple[Tensor, int]:
        place, positions = self._places(x, examples)
        index, row, weight = self.entries(x)
        owner = place[row] // max(positions, 1)
        sums = weight.new_zeros(examples * self.d_in).index_add_(0, owner * self.d_in + index, weight)
        return sums.view(examples, self.d_in), positions

    def output_sums(self, g: Tensor, x: Tensor | None, examples: int) -> Tensor:
        return widened(self.example_outputs(g, x, examples)).sum(1)

    def example_inputs(self, x: Tensor, examples: int) -> Tensor:
        raise NotImplementedError("rows of a lookup table are never formed: use indices or example_squares")

    def example_outputs(self, g: Tensor, x: Tensor | None, examples: int) -> Tensor:
        rows = self.output_rows(g, x, examples)
        return split_examples(rows.view(*g.shape[:-1], self.d_out), examples)

    def example_squares(self, x: Tensor, rows: Tensor, examples: int) -> Tensor:
        """Return ``Σ_n (Σ_s g aᵀ)²``, squared elementwise, without a per-example gradient or a wait for the device.

        Args:
            x: Result of :meth:`prepare`.
            rows: ``[N·S, d]``, those of :meth:`example_outputs` in sequence, rotated or not; ones give ``Σ_n (Σ_s
                a)²``.
            examples: N, the number of examples of the pass.

        Returns:
            ``[d, V]``.

        Raises:
            ValueError: If the positions cannot be assigned to examples.
        """
        place, positions = self._places(x, examples)
        index, row, weight = self.entries(x)
        place = place[row]
        values = rows[place] * weight[:, None].to(rows.dtype)
        column, sums = _sum_duplicates(place // max(positions, 1) * self.d_in + index, values)
        return rows.new_zeros(self.d_in, rows.shape[1]).index_add_(0, column % self.d_in, sums.square()).mT

    def entries(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return index, row and weight ``[M]`` of each entry; entries at the same place add up.

        Returns:
            Two int64 tensors and the weights, which are 0 for entries without a gradient, such as padding.
        """
        index = x.reshape(-1).long()
        return index.clamp(min=0), torch.arange(index.numel(), device=x.device), (index != _NOTHING).float()

    def _places(self, x: Tensor, examples: int) -> tuple[Tensor, int]:
        """Return the place of each row in the order of examples, ``[rows]``, and the number of rows of an example."""
        shape = self._row_shape(x)
        rows = torch.arange(shape.numel(), device=x.device)
        by_example = split_examples(rows.view(*shape, 1), examples)[..., 0]
        return torch.empty_like(rows).scatter_(0, by_example.reshape(-1), rows), by_example.shape[1]

    def _row_shape(self, x: Tensor) -> torch.Size:
        return x.shape

    # ------------------------------------------------------------------ parameters
    def to_matrix(self, weight: Tensor | None, bias: Tensor | None, workspace: Workspace | None = None) -> Tensor:
        assert weight is not None
        return weight.mT

    def from_matrix(self, matrix: Tensor, like: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        return matrix.mT.contiguous(), None

    def natural_order(self, dense: Tensor) -> Tensor:
        sizes = (self.d_out, self.d_in)
        return dense.reshape(*sizes, *sizes).permute(1, 0, 3, 2).reshape(dense.shape)


class EmbeddingBagAdapter(EmbeddingAdapter):
    """Covers ``nn.EmbeddingBag`` of sums or means: a row is a bag, with the weight of each index in it.

    A is the diagonal of ``E[a ∘ a]``; correlations of an index with others of its bag are left out.
    """

    positions_are_tokens = False

    def __init__(self, module: nn.EmbeddingBag, has_weight: bool, has_bias: bool = False) -> None:
        super().__init__(module, has_weight, has_bias)
        self.mean: bool = module.mode == "mean"
        self.include_last_offset: bool = bool(module.include_last_offset)

    @staticmethod
    def refusal(module: nn.Module) -> str:
        """Return why such a module follows the fallback rule; empty if it does not have to."""
        if module.mode == "max":
            return f'{type(module).__name__}(mode="max") is not linear in its weight'
        return EmbeddingAdapter.refusal(module)

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Pack indices, bags and weights of the entries.

        Returns:
            A tensor ``[bags, 3, K]``. An entry may be anywhere along the first and last axis: their sizes only
            determine the number of bags and the available room. Unused room has weight 0.
        """
        given = dict(zip(("input", "offsets", "per_sample_weights"), args, strict=False)) | kwargs
        index, offsets, weights = given["input"].detach(), given.get("offsets"), given.get("per_sample_weights")
        if offsets is None:
            bags = index.shape[0]
            bag = torch.arange(bags, device=index.device)[:, None].expand_as(index).reshape(-1)
            index = index.reshape(-1)
            used = torch.ones_like(index, dtype=torch.bool)
        else:
            bags, bag, used = self._split_bags(index, offsets)
        weight = self._weights(index, bag, bags, used, None if weights is None else weights.detach().reshape(-1))
        return _packed(index, bag, weight, bags)

    def _split_bags(self, index: Tensor, offsets: Tensor) -> tuple[int, Tensor, Tensor]:
        """Return the number of bags, the bag of each entry, and whether it is in a bag at all."""
        position = torch.arange(index.numel(), dtype=offsets.dtype, device=index.device)
        starts = offsets[:-1] if self.include_last_offset else offsets
        used = position < offsets[-1:] if self.include_last_offset else torch.ones_like(position, dtype=torch.bool)
        # Empty bags start where the next one does; of equal starts, the last one has the entries.
        return starts.numel(), torch.searchsorted(starts.contiguous(), position, right=True) - 1, used

    def _weights(self, index: Tensor, bag: Tensor, bags: int, used: Tensor, given: Tensor | None) -> Tensor:
        if self.padding_idx is not None:
            used = used & (index != self.padding_idx)
        weight = used.double()
        if self.mean:
            sizes = weight.new_zeros(bags).index_add_(0, bag, weight)
            weight = weight / sizes.clamp(min=1)[bag]
        return weight if given is None else weight * given.double()

    def is_unbatched(self, x: Tensor) -> bool:
        return False

    def output_rows(self, g: Tensor, x: Tensor | None, examples: int) -> Tensor:
        rows = g.reshape(-1, self.d_out)
        if x is None:
            return rows
        # The gradient of an empty bag, or of padding alone, reaches no weight.
        return rows.masked_fill(~self.filled(x)[:, None], 0)

    def input_squares(self, x: Tensor) -> tuple[Tensor, int | Tensor]:
        index, bag, weight = self.entries(x)
        column, sums = _sum_duplicates(bag * self.d_in + index, weight[:, None])
        squares = weight.new_zeros(self.d_in).index_add_(0, column % self.d_in, sums[:, 0].square())
        return squares, self.filled(x).sum()

    def squared_means(self, inputs: list[Tensor], examples: int) -> Tensor:
        x = self.joined(inputs, examples)
        real = self.filled(x).double().view(examples, -1)
        weight = real / real.sum(1, keepdim=True).clamp(min=1)
        return self.example_squares(x, weight.reshape(-1, 1), examples)[0]

    def joined(self, inputs: list[Tensor], examples: int) -> Tensor:
        if len(inputs) == 1:
            return inputs[0]
        sizes = [positions_of(x, examples) for x in inputs]
        found, before = [], 0
        for x, size in zip(inputs, sizes, strict=True):
            index, bag, weight = self.entries(x)
            found.append((index, bag // size * sum(sizes) + before + bag % size, weight))
            before += size
        index, bag, weight = (torch.cat(parts) for parts in zip(*found, strict=True))
        return _packed(index, bag, weight, examples * sum(sizes))

    def filled(self, x: Tensor) -> Tensor:
        """Return which bags have any entry, as bool ``[bags]``."""
        _, bag, weight = self.entries(x)
        return weight.new_zeros(x.shape[0]).index_add_(0, bag, weight.abs()) > 0

    def real_rows(self, x: Tensor, examples: int) -> Tensor:
        return self.filled(x).view(examples, -1).sum(1)

    def masked(self, x: Tensor, keep: Tensor) -> Tensor:
        index, bag, weight = self.entries(x)
        return _packed(index, bag, weight * keep.reshape(-1)[bag], x.shape[0])

    def pick_examples(
        self, x: Tensor, g: Tensor, kept: int, examples: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor, int, float]:
        if g.shape[0] % examples:
            return x, g, examples, 1.0
        chosen = draw(examples, kept, generator, g.device)
        bags = torch.arange(len(g), device=g.device).view(examples, -1)[chosen].flatten()
        place = torch.full((len(g),), -1, device=g.device).scatter_(0, bags, torch.arange(len(bags), device=g.device))
        index, bag, weight = self.entries(x)
        bag = place[bag]
        weight = weight * (bag >= 0)
        return _packed(index, bag.clamp(min=0), weight, len(bags)), g[bags], kept, examples / kept

    def indices(self, x: Tensor, examples: int) -> Tensor:
        raise ValueError("bags hold different numbers of indices: use example_squares")

    def entries(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        index, bag, weight = x.transpose(0, 1).reshape(3, -1)
        return index.long(), bag.long(), weight

    def _row_shape(self, x: Tensor) -> torch.Size:
        return x.shape[:1]


def _packed(index: Tensor, bag: Tensor, weight: Tensor, bags: int) -> Tensor:
    """Pack entries ``[M]`` as ``[bags, 3, K]``, see :meth:`EmbeddingBagAdapter.prepare`."""
    packed = torch.stack([index.double(), bag.double(), weight])
    room = -(-packed.shape[1] // bags) if bags else 0
    return F.pad(packed, (0, bags * room - packed.shape[1])).reshape(3, bags, room).transpose(0, 1)


def _sum_duplicates(key: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct keys ``[M]`` and the sums of their values ``[M, d]``, both followed by zeros.

    Shapes stay those of the input, so that the host need not know how many keys are distinct.
    """
    ordered, order = key.sort(stable=True)
    new = torch.ones_like(ordered)
    new[1:] = ordered[1:] != ordered[:-1]
    place = new.cumsum(0) - 1
    sums = torch.zeros_like(values).index_add_(0, place, values[order])
    return torch.zeros_like(key).scatter_(0, place, ordered), sums
