"""Pending Kronecker statistics of one layer: sums over rows, collected in the backward pass and used by ``step``."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from secondorder.capture.layers.adapter import Adapter, draw
from secondorder.capture.statistics.call import Call
from secondorder.linalg.dense import add_gram_, add_outer_rows_, full_precision, mirror_upper_


class KroneckerSums:
    """``Σ a aᵀ`` and ``Σ g° g°ᵀ`` of a layer since the last step.

    Args:
        adapter: The layer's shapes and rows.
        approx: ``"expand"`` or ``"reduce"``.
        like_a: Tensor of the shape, dtype and device of A (or of its diagonal, if only this is kept).
        like_g: The same for G.
        sampler: Sampler of rows, if not all are used.
        constant_g: Whether G stays the identity.

    Attributes:
        a: Valid on and above the diagonal until :meth:`finish`.
        g: Likewise.
    """

    def __init__(
        self,
        adapter: Adapter,
        approx: str,
        like_a: Tensor,
        like_g: Tensor,
        sampler: Sampler | None = None,
        constant_g: bool = False,
    ) -> None:
        self._adapter = adapter
        # An exact block uses complete examples, whether or not positions are sampled.
        self.reduce = approx == "reduce" or adapter.is_exact
        self._sampler = sampler
        self._constant_g = constant_g
        self.a: Tensor = torch.zeros_like(like_a)
        self.g: Tensor = torch.zeros_like(like_g)
        lead = int(adapter.groups > 1)
        self._diagonal_a, self._diagonal_g = self.a.dim() == 1 + lead, self.g.dim() == 1 + lead
        self._rows: float | Tensor = 0.0
        self._part_rows: dict[int, float | Tensor] = {}

    @property
    def wants_whole_pass(self) -> bool:
        """Whether all calls of a forward pass must be in one :meth:`add`, since reduce averages over them."""
        return self.reduce

    @property
    def nbytes(self) -> int:
        """Bytes of the sums."""
        return self.a.nbytes + self.g.nbytes

    def add(self, calls: list[Call], examples: int) -> None:
        """Add the rows of some calls of the layer in one forward pass over ``examples`` examples.

        Raises:
            ValueError: If reduce cannot assign the rows of an input to examples.
        """
        if self.reduce:
            with full_precision(self.a.device):
                self._add_reduced(calls, examples)
            return
        for call in calls:
            # Sampled rows are multiplied by the root of their weight, and scaled gradients are divided by the scale.
            is_scaled = self._sampler is not None or call.unscale is not None
            is_half = call.g.dtype in (torch.bfloat16, torch.float16) and not is_scaled
            with full_precision(self.a.device, is_half=is_half):
                self._add_expanded(call.as_computed() if is_half and call.g.is_cuda else call, examples)

    def finish(self) -> tuple[Tensor, Tensor]:
        """The mean of ``a aᵀ`` over rows and the sum of ``g° g°ᵀ``, completed below the diagonal."""
        if not self._diagonal_a:
            mirror_upper_(self.a)
        if not self._diagonal_g:
            mirror_upper_(self.g)
        self.a /= self._row_count()
        return self.a, self.g

    @property
    def rows(self) -> float | Tensor:
        """Number of rows in ``a``, ``[Γ]`` if each of Γ blocks is filled by separate calls."""
        if not self._part_rows:
            return self._rows
        rows = [self._rows + self._part_rows.get(part, 0.0) for part in range(self._adapter.groups)]
        return torch.stack([self._on_device(r) for r in rows])

    def _row_count(self) -> Tensor:
        """Rows in ``a``, at least 1, shaped to divide it."""
        rows = self.rows
        if not isinstance(rows, Tensor) or rows.dim() == 0:
            return self._on_device(rows).clamp(min=1)
        return rows.clamp(min=1).view(-1, *[1] * (self.a.dim() - 1))

    def _on_device(self, rows: float | Tensor) -> Tensor:
        if isinstance(rows, Tensor):
            return rows.to(self.a.dtype)
        return torch.full((), rows, dtype=self.a.dtype, device=self.a.device)  # a copy would wait for the device

    def _add_expanded(self, call: Call, examples: int) -> None:
        adapter, weight = call.own, 1.0
        if call.unclear and call.keep is not None:
            call.require_examples()
        x, g, chosen = call.x, call.gradient(self.a.dtype), None
        if self._sampler is not None and call.keep is None and x is not None and not adapter.constant_input:
            x, g, examples, weight, chosen = self._sampler.draw(adapter, x, g, examples)
        rows = adapter.output_rows(g, x, examples) if chosen is None else chosen[1]
        self._add_outputs(rows if weight == 1.0 else rows * weight**0.5, call.part)
        if call.again:
            return
        out, count = _part(self.a, call.part), rows.shape[-2]
        if adapter.constant_input:
            out += count
            self._count(count, call.part)
        elif chosen is not None:
            self._add_rows(out, chosen[0], weight)
            self._count(count * weight, call.part)
        else:
            assert x is not None
            self._count(self._add_inputs(out, x, call.keep, adapter, weight), call.part)

    def _add_inputs(
        self, out: Tensor, x: Tensor, keep: Tensor | None, adapter: Adapter, weight: float
    ) -> Tensor | float:
        """Add ``Σ a aᵀ`` of a layer input; returns the number of real rows."""
        if keep is not None:
            x = adapter.masked(x, keep)
        if adapter.one_hot:
            squares, count = adapter.input_squares(x)
            out.add_(squares.to(out.dtype), alpha=weight)
            return count * weight
        found = None if self._diagonal_a else adapter.add_gram_(out, x, weight)
        rows = self._add_input_rows(out, x, adapter, weight) if found is None else found
        if keep is None:
            return rows * weight
        count = keep.sum(dtype=out.dtype) * (rows / keep.numel())
        if adapter.has_bias:  # padded rows are 0, their appended 1 is not
            (out[..., -1] if self._diagonal_a else out[..., -1, -1]).add_(count - rows)
        return count

    def _add_input_rows(self, out: Tensor, x: Tensor, adapter: Adapter, weight: float) -> int:
        count = 0
        for rows in adapter.input_rows(x):
            self._add_rows(out, rows, weight)
            count += rows.shape[-2]
        return count

    def _add_rows(self, out: Tensor, rows: Tensor, weight: float = 1.0) -> None:
        rows = rows.to(out.dtype)
        if weight != 1.0:
            rows = F.pad(rows, (0, 1), value=1.0) if self._adapter.has_bias else rows
            rows = rows * weight**0.5
        homogeneous = self._adapter.has_bias and weight == 1.0
        if not self._diagonal_a:
            add_outer_rows_(out, rows, homogeneous)
            return
        out[..., : rows.shape[-1]] += rows.square().sum(-2)
        out[..., rows.shape[-1] :] += rows.shape[-2]

    def _add_outputs(self, rows: Tensor, part: int) -> None:
        if self._constant_g:
            return
        out = _part(self.g, part)
        if self._diagonal_g:
            out += rows.square().sum(-2)
        else:
            add_gram_(out, rows)

    def _count(self, rows: float | Tensor, part: int) -> None:
        if part < 0:
            self._rows = self._rows + rows
        else:
            self._part_rows[part] = self._part_rows.get(part, 0.0) + rows

    def _add_reduced(self, calls: list[Call], examples: int) -> None:
        """Add the means of inputs and the sums of gradients of each example, over all calls and positions."""
        adapter, dtype = self._adapter, self.a.dtype
        for call in calls:
            call.require_examples()
        if any(call.keep is not None for call in calls) and not adapter.constant_input:
            raise ValueError("approx='reduce' cannot leave out padded rows; use approx='expand' with mask()")
        outputs = [call.output_sums(dtype, examples) for call in calls]
        total, weight, chosen = torch.stack(outputs).sum(0), 1.0, None
        if self._sampler is not None and not (adapter.constant_input or adapter.one_hot):
            chosen, weight = self._sampler.pick(examples, self.a.device)
        self._add_outputs(total if chosen is None else total.index_select(-2, chosen) * weight**0.5, -1)
        if calls[0].again:
            return
        if adapter.constant_input:
            self.a += examples
        elif adapter.one_hot:
            self.a += adapter.squared_means([call.x for call in calls if call.x is not None], examples).to(dtype)
        else:
            means = self._mean_inputs(calls, examples)
            self._add_rows(self.a, means if chosen is None else means.index_select(-2, chosen), weight)
        self._count(examples, -1)

    def _mean_inputs(self, calls: list[Call], examples: int) -> Tensor:
        """Mean of the inputs of each example ``[(Γ,) N, d_in]``, over all calls and positions."""
        sums, positions = [], []
        for call in calls:
            assert call.x is not None
            total, count = call.own.input_sums(call.x.to(self.a.dtype), examples)
            sums.append(call.whole(total))
            positions.append(call.whole(torch.full_like(total[..., :1], count)))
        return torch.stack(sums).sum(0) / torch.stack(positions).sum(0).clamp(min=1)


class Sampler:
    """Draws the examples and positions whose rows enter the statistics, if not all do.

    Args:
        examples: Examples to keep of each micro-batch, or None.
        positions: Positions to keep of each example, or None.
        generator: CPU generator of the draws.
    """

    def __init__(self, examples: int | None, positions: int | None, generator: torch.Generator) -> None:
        self._examples, self._positions, self._generator = examples, positions, generator

    def pick(self, examples: int, device: torch.device) -> tuple[Tensor | None, float]:
        """Indices of the examples to use, None for all, and the ratio of all to them."""
        if self._examples is None or examples <= self._examples:
            return None, 1.0
        return draw(examples, self._examples, self._generator, device), examples / self._examples

    def draw(
        self, adapter: Adapter, x: Tensor, g: Tensor, examples: int
    ) -> tuple[Tensor, Tensor, int, float, tuple[Tensor, Tensor] | None]:
        """Return input, output gradient and number of the examples of a call to use.

        The factor that makes ``Σ g gᵀ`` unbiased follows, and rows a and g if positions were drawn.
        """
        weight, chosen = 1.0, None
        if self._examples is not None and examples > self._examples:
            x, g, examples, weight = adapter.pick_examples(x, g, self._examples, examples, self._generator)
        if self._positions is not None:
            sampled = adapter.sample_rows(x, g, self._positions, examples, self._generator)
            if sampled is not None:
                chosen, weight = sampled[:2], weight * sampled[2]
        return x, g, examples, weight, chosen


def _part(total: Tensor, part: int) -> Tensor:
    return total if part < 0 else total[part]
