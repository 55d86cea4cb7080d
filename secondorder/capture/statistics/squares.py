"""Pending statistics of EK-FAC: sums for the factors, and second moments of per-example gradients in an eigenbasis."""

from __future__ import annotations

import torch
from torch import Tensor

from secondorder.capture.layers.adapter import Adapter
from secondorder.capture.layers.embedding import EmbeddingAdapter
from secondorder.capture.statistics.call import Call
from secondorder.capture.statistics.examples import in_chunks
from secondorder.capture.statistics.kronecker import KroneckerSums
from secondorder.linalg import gradient_squares
from secondorder.linalg.dense import full_precision


class ScaleSums:
    """``Σ_n (Q_Gᵀ G°_n Q_A)²`` of a layer since the last step, an example's positions and calls summed first.

    Args:
        adapter: The layer's shapes and rows.
        like: Tensor of the shape, dtype and device of the scale.
        basis_a: ``Q_A [(Γ,) n_a, n_a]``, None for the identity.
        basis_g: ``Q_G [(Γ,) n_g, n_g]``, None for the identity.
        tokens: Whether to treat every position as a separate datum, in layers whose positions are tokens.
        kept: Number of examples to use of each micro-batch, or None for all.
        generator: CPU generator that draws them.

    Attributes:
        total: The sum ``[(Γ,) n_g, n_a]``.
    """

    #: All calls of a layer are summed into one gradient before it is squared.
    wants_whole_pass = True

    def __init__(
        self,
        adapter: Adapter,
        like: Tensor,
        basis_a: Tensor | None = None,
        basis_g: Tensor | None = None,
        tokens: bool = False,
        kept: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self._adapter, self._bases = adapter, (basis_a, basis_g)
        self._kept, self._generator = kept, generator
        self.total: Tensor = torch.zeros_like(like)
        self._tokens = None
        if tokens and adapter.positions_are_tokens:
            lead = (adapter.groups, 1, 1) if adapter.groups > 1 else (1, 1)
            self._tokens = torch.zeros(lead, dtype=like.dtype, device=like.device)

    @property
    def nbytes(self) -> int:
        """Bytes of the sum."""
        return self.total.nbytes

    def per_datum(self, reduction: str, examples: float) -> tuple[Tensor, float]:
        """The sum and the factor of the mean over data, which are examples or tokens."""
        if self._tokens is None:
            return self.total, examples if reduction == "mean" else 1.0 / examples
        tokens = self._tokens.clamp(min=1)  # may differ from block to block
        return self.total * tokens if reduction == "mean" else self.total / tokens, 1.0

    def data(self, examples: float) -> float | Tensor:
        """Number of data in the mean, which are examples or tokens ``[Γ or 1]``."""
        return examples if self._tokens is None else self._tokens.flatten()

    def add(self, calls: list[Call], examples: int) -> None:
        """Add all calls of the layer in one forward pass over ``examples`` examples.

        Raises:
            ValueError: If the rows cannot be assigned to examples.
        """
        for call in calls:
            call.require_examples()
        with full_precision(self.total.device):
            if all(call.part < 0 for call in calls):
                self._add_part(calls, examples, -1)
                return
            for part in range(self._adapter.groups):  # calls that apply all blocks count in each of them
                mine = [call for call in calls if call.part in (-1, part)]
                if mine:
                    self._add_part(mine, examples, part)

    def _add_part(self, calls: list[Call], examples: int, part: int) -> None:
        adapter, weight = self._adapter, 1.0
        bases = [b if b is None or part < 0 else b[part] for b in self._bases]
        out = self.total if part < 0 else self.total[part]
        if self._tokens is not None:
            self._count_tokens(calls, part)
        if len(calls) == 1:
            calls, examples, weight = self._choose(calls[0], examples)
        if isinstance(adapter, EmbeddingAdapter):
            out.add_(self._embedded(adapter, calls, examples, bases[1]), alpha=weight)
            return
        for some, count in in_chunks(calls, examples, self.total.element_size()):
            a, g = self._rows_of(some, count, part)
            if self._tokens is not None:
                g = g.flatten(-3, -2)[..., None, :]
                a = a if a is None else a.flatten(-3, -2)[..., None, :]
            total = gradient_squares.scale_intra(
                a, g, bases[0], bases[1], homogeneous=adapter.has_bias and a is not None
            )
            out.add_(total, alpha=weight)

    def _count_tokens(self, calls: list[Call], part: int) -> None:
        assert self._tokens is not None
        out = self._tokens if part < 0 else self._tokens[part]
        for call in calls:
            out += call.g.numel() // call.g.shape[-1] if call.keep is None else call.keep.sum()

    def _choose(self, call: Call, examples: int) -> tuple[list[Call], int, float]:
        """The call at some examples drawn at random, before any row is formed."""
        if self._kept is None or self._kept >= examples or call.x is None or call.keep is not None:
            return [call], examples, 1.0
        assert self._generator is not None
        x, g, examples, weight = call.own.pick_examples(call.x, call.g, self._kept, examples, self._generator)
        return [call._replace(x=x, g=g)], examples, weight

    def _rows_of(self, calls: list[Call], examples: int, part: int) -> tuple[Tensor | None, Tensor]:
        """Rows a and g of some calls by example, of all their positions."""
        found = [self._rows(call, examples, part) for call in calls]
        g = found[0][1] if len(found) == 1 else torch.cat([g for _, g in found], -2)
        inputs = [a for a, _ in found if a is not None]
        return (inputs[0] if len(inputs) == 1 else torch.cat(inputs, -2)) if inputs else None, g

    def _rows(self, call: Call, examples: int, part: int) -> tuple[Tensor | None, Tensor]:
        """Rows a and g of a call by example, only of one block if ``part`` is not -1."""
        adapter = call.own
        g = adapter.example_outputs(call.gradient(self.total.dtype), call.x, examples)
        a = None
        if not adapter.constant_input:
            assert call.x is not None
            a = adapter.example_inputs(call.x, examples)
        if call.part != part:
            a, g = a if a is None else a[part], g[part]
        return a, g

    def _embedded(self, adapter: EmbeddingAdapter, calls: list[Call], examples: int, basis_g: Tensor | None) -> Tensor:
        """Add a lookup table: rows of equal index are summed before the square, and no one-hot row is formed."""
        outputs = [c.own.example_outputs(c.gradient(self.total.dtype), c.x, examples) for c in calls]
        x = adapter.joined([call.x for call in calls if call.x is not None], examples)
        rows = torch.cat(outputs, 1).flatten(0, 1)
        if self._tokens is not None:
            x, examples = adapter.indices(x, examples).reshape(-1), len(rows)
        return adapter.example_squares(x, rows if basis_g is None else rows @ basis_g, examples)


class EigenSums:
    """The statistic of a step for a layer of EK-FAC. Without sums, only examples are counted.

    Args:
        factors: Sums for the factors, None if they are not due.
        scales: Sums for the scale, None if it is not due.
        by_example: Whether a scale is ever measured from per-example gradients.
        keep_calls: Whether to keep the calls, to measure the scale later in a basis that this rank does not have yet.

    Attributes:
        calls: Calls and number of examples of each forward pass, if they are kept.
    """

    def __init__(
        self, factors: KroneckerSums | None, scales: ScaleSums | None, by_example: bool, keep_calls: bool = False
    ) -> None:
        self.factors: KroneckerSums | None = factors
        self.scales: ScaleSums | None = scales
        self.calls: list[tuple[list[Call], int]] = []
        self.examples = 0
        self._by_example, self._keep_calls = by_example, keep_calls

    @property
    def wants_whole_pass(self) -> bool:
        """Whether all calls of a forward pass are in one :meth:`add`, since gradients are summed before squaring."""
        return (
            self.scales is not None or self._keep_calls or (self.factors is not None and self.factors.wants_whole_pass)
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the sums."""
        kept = [t for calls, _ in self.calls for call in calls for t in (call.x, call.g) if t is not None]
        return sum(part.nbytes for part in (self.factors, self.scales, *kept) if part is not None)

    def add(self, calls: list[Call], examples: int) -> None:
        """Add calls of one forward pass.

        Raises:
            ValueError: If rows must be assigned to examples and cannot be.
        """
        if self.scales is not None:
            self.scales.add(calls, examples)
        else:
            self._require_examples(calls, examples)
        if self._keep_calls:  # copy them, because a program may reuse its buffers before the step
            copies = [c._replace(x=None if c.x is None else c.x.clone(), g=c.g.clone()) for c in calls]
            self.calls.append((copies, examples))
        if self.factors is not None:
            self.factors.add(calls, examples)

    def _require_examples(self, calls: list[Call], examples: int) -> None:
        """Reject a layer whose rows cannot be assigned to examples now, and not when the first scale is due."""
        if self._by_example:
            for call in calls:
                call.require_examples()
                call.own.example_outputs(call.g, call.x, examples)
