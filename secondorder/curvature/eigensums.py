"""Pending statistics of EK-FAC: sums for the factors, and second moments of per-example gradients in an eigenbasis."""

from __future__ import annotations

import torch
from torch import Tensor

from secondorder.curvature import scale
from secondorder.curvature.adapters.embedding import EmbeddingAdapter
from secondorder.curvature.kronecker import Call, KroneckerSums
from secondorder.curvature.layers import Adapter, draw
from secondorder.linalg import full_precision


class ScaleSums:
    """``Σ_n (Q_Gᵀ G°_n Q_A)²`` of a layer since the last step, an example's positions and calls summed first.

    Args:
        adapter: The layer's shapes and rows.
        like: Tensor of the shape, dtype and device of the scale.
        basis_a: ``Q_A [(Γ,) n_a, n_a]``, None for the identity.
        basis_g: ``Q_G [(Γ,) n_g, n_g]``, None for the identity.
        tokens: Take every position as a datum of its own, in layers whose positions are tokens.
        kept: Examples to use of each micro-batch, or None for all.
        generator: CPU generator of their choice.

    Attributes:
        total: The sum ``[(Γ,) n_g, n_a]``.
        tokens_per_example: Data that each example stands for.
    """

    def __init__(
        self,
        adapter: Adapter,
        like: Tensor,
        basis_a: Tensor | None,
        basis_g: Tensor | None,
        tokens: bool = False,
        kept: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self._adapter, self._bases = adapter, (basis_a, basis_g)
        self._tokens = tokens and adapter.positions_are_tokens
        self._kept, self._generator = kept, generator
        self.total = torch.zeros_like(like)
        self.tokens_per_example = 1.0

    @property
    def nbytes(self) -> int:
        """Bytes of the sum."""
        return self.total.nbytes

    def add(self, calls: list[Call], examples: int) -> None:
        """Add all calls of the layer in one forward pass over ``examples`` examples.

        Raises:
            ValueError: If the rows cannot be told apart by example.
        """
        with full_precision(self.total.device):
            if all(call.part < 0 for call in calls):
                self._add_part(calls, examples, -1)
                return
            for part in range(self._adapter.groups):  # calls that apply all blocks count in each of them
                mine = [call for call in calls if call.part in (-1, part)]
                if mine:
                    self._add_part(mine, examples, part)

    def _rows(self, call: Call, examples: int, part: int) -> tuple[Tensor | None, Tensor]:
        """Rows a and g of a call by example, of the wanted block alone if ``part`` is not -1."""
        adapter, dtype = self._adapter.of_part(call.part), self.total.dtype
        g = adapter.example_outputs(call.gradient(dtype), call.x, examples)
        a = None
        if not adapter.constant_input and not adapter.one_hot:
            assert call.x is not None
            a = adapter.example_inputs(call.x, examples)
        if call.part != part:
            a, g = a if a is None else a[part], g[part]
        return a, g

    def _add_part(self, calls: list[Call], examples: int, part: int) -> None:
        adapter = self._adapter
        bases = [b if b is None or part < 0 else b[part] for b in self._bases]
        found = [self._rows(call, examples, part) for call in calls]
        g = found[0][1] if len(found) == 1 else torch.cat([g for _, g in found], -2)
        out = self.total if part < 0 else self.total[part]
        if isinstance(adapter, EmbeddingAdapter):
            out += self._embedded(adapter, calls, g, examples, bases[1])
            return
        inputs = [a for a, _ in found if a is not None]
        a = (inputs[0] if len(inputs) == 1 else torch.cat(inputs, -2)) if inputs else None
        if self._tokens:
            self.tokens_per_example = float(g.shape[-2])
            g = g.flatten(-3, -2)[..., None, :]
            a = a if a is None else a.flatten(-3, -2)[..., None, :]
        g, a, weight = self._choose(g, a)
        total = scale.scale_intra(a, g, bases[0], bases[1], homogeneous=adapter.has_bias and a is not None)
        out.add_(total, alpha=weight)

    def _choose(self, g: Tensor, a: Tensor | None) -> tuple[Tensor, Tensor | None, float]:
        """Some examples drawn at random, and what makes their sum that of all."""
        examples = g.shape[-3]
        if self._kept is None or self._kept >= examples:
            return g, a, 1.0
        assert self._generator is not None
        chosen = draw(examples, self._kept, self._generator, g.device)
        return g.index_select(-3, chosen), a if a is None else a.index_select(-3, chosen), examples / self._kept

    def _embedded(
        self, adapter: EmbeddingAdapter, calls: list[Call], g: Tensor, examples: int, basis_g: Tensor | None
    ) -> Tensor:
        """A looked-up table: rows of one index are added before the square, and no one-hot row is formed."""
        inputs = [call.x for call in calls if call.x is not None]
        if len(inputs) == 1:
            x = inputs[0]
        else:
            x = torch.cat([adapter.indices(x, examples) for x in inputs], 1)
        rows = g.flatten(0, 1)
        if self._tokens:
            self.tokens_per_example = float(g.shape[-2])
            x, examples = adapter.indices(x, examples).reshape(-1), len(rows)
        return adapter.example_squares(x, rows if basis_g is None else rows @ basis_g, examples)


class EigenSums:
    """What one step captures for a layer of EK-FAC; without any sums, only its examples are counted.

    Args:
        adapter: The layer's shapes and rows.
        factors: Sums for the factors, None when they are not due.
        scales: Sums for the scale, None when it is not due.
        by_example: Whether a scale will ever be measured from per-example gradients.
        keep_calls: Keep the calls, to measure the scale in a basis that the step is about to find.

    Attributes:
        calls: Calls and number of examples of each forward pass, if they are kept.
    """

    def __init__(
        self,
        adapter: Adapter,
        factors: KroneckerSums | None,
        scales: ScaleSums | None,
        by_example: bool,
        keep_calls: bool = False,
    ) -> None:
        self.factors, self.scales = factors, scales
        self._adapter, self._by_example = adapter, by_example
        self.calls: list[tuple[list[Call], int]] = []
        self._keep_calls = keep_calls

    @property
    def wants_whole_pass(self) -> bool:
        """Whether all calls of a forward pass must come in one :meth:`add`: gradients add up before the square."""
        return (
            self.scales is not None or self._keep_calls or (self.factors is not None and self.factors.wants_whole_pass)
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the sums."""
        kept = [t for calls, _ in self.calls for call in calls for t in (call.x, call.g) if t is not None]
        return sum(part.nbytes for part in (self.factors, self.scales, *kept) if part is not None)

    def add(self, calls: list[Call], examples: int) -> None:
        """Take in calls of one forward pass.

        Raises:
            ValueError: If rows must be told apart by example and cannot.
        """
        if self.scales is not None:
            self.scales.add(calls, examples)
        else:
            self._require_examples(calls, examples)
        if self._keep_calls:
            self.calls.append((calls, examples))
        if self.factors is not None:
            self.factors.add(calls, examples)

    def _require_examples(self, calls: list[Call], examples: int) -> None:
        """Refuse at once, not when the first scale is due, a layer whose examples cannot be told apart."""
        if self._by_example:
            for call in calls:
                self._adapter.of_part(call.part).example_outputs(call.g, call.x, examples)
