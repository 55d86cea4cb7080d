"""Pending rows of one layer, from which each example's gradient can be computed, collected during the backward pass.

An example's gradient is ``u_n = Σ_s g_ns (a_ns, 1)ᵀ`` over its positions and over all calls of the layer. The following
is kept:

=================  ===================================================================================================
``"expand"``       the rows of all positions, or u itself where that is the smaller and faster one; of a lookup table
                   the indices and the gradients at them
``"reduce"``       one row: the mean of the inputs, the sum of the gradients; long lookup tables as in ``"expand"``
normalization      u of all units of the layer together
=================  ===================================================================================================

Mu et al., HyLo, SC22; positions: Eschenhagen et al. 2023 (arXiv 2311.00636), section 3.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from secondorder.capture.layers.adapter import CHUNK_BYTES, Adapter
from secondorder.capture.layers.conv import ConvAdapter
from secondorder.capture.layers.embedding import EmbeddingAdapter, EmbeddingBagAdapter
from secondorder.capture.statistics.call import Call
from secondorder.linalg import kernel
from secondorder.linalg.dense import full_precision
from secondorder.linalg.kernel import Rows

#: Largest number of columns of a lookup table for which ``"reduce"`` forms the mean of its one-hot rows.
_DENSE_COLUMNS = 8192


class ExampleRows:
    """Captured rows of a layer since the last step, without any scaling.

    Args:
        adapter: The layer's shapes and rows.
        approx: ``"reduce"`` or ``"expand"``.
        dtype: Precision of the rows.
        conv_scale: ``"hylo"`` divides the summed gradients of a convolution by the number of its positions, which
            makes its Fisher too small by the square of it, as in the code published with the paper.

    Attributes:
        as_pairs: Whether to keep pairs of rows even if per-example gradients are smaller, to compute factors.
        real: Rows that are not padding, over all examples; ``[Γ]`` where each of Γ blocks is filled by its own calls.
    """

    wants_whole_pass = True

    def __init__(self, adapter: Adapter, approx: str, dtype: torch.dtype, *, conv_scale: str = "exact") -> None:
        self._adapter, self._dtype = adapter, dtype
        self.reduce = approx == "reduce"
        self._divide = conv_scale == "hylo" and isinstance(adapter, ConvAdapter)
        self.as_pairs = False
        self._parts: list[Rows] = []
        self.real: float | Tensor = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of the rows."""
        return sum(part.nbytes for part in self._parts)

    def add(self, calls: list[Call], examples: int) -> None:
        """Add all calls of the layer in one forward pass over ``examples`` examples.

        Raises:
            ValueError: If the rows cannot be assigned to examples.
        """
        for call in calls:
            call.require_examples()
        if examples:
            with full_precision(calls[0].g.device):
                self._parts.append(self._rows(calls, examples))

    def finish(self) -> Rows:
        """The rows of all examples, ``[(Γ,) n, S, …]``."""
        parts = self._parts
        if len({part.a is None for part in parts}) > 1:  # sequences of very different lengths
            parts = [multiplied_out(part) for part in parts]
        return parts[0] if len(parts) == 1 else kernel.concatenate(parts)

    # ------------------------------------------------------------------ rows of one pass
    def _rows(self, calls: list[Call], examples: int) -> Rows:
        adapter = self._adapter
        if adapter.is_exact:
            return self._joined(calls, examples)
        if isinstance(adapter, EmbeddingAdapter):
            if isinstance(adapter, EmbeddingBagAdapter) and not self.reduce:
                raise ValueError("its bags hold different numbers of indices; approx='reduce' covers them")
            if keeps_indices(adapter, "reduce" if self.reduce else "expand"):
                return self._looked_up(adapter, calls, examples)
        return self._reduced(calls, examples) if self.reduce else self._expanded(calls, examples)

    def _joined(self, calls: list[Call], examples: int) -> Rows:
        """All units of a normalization layer as one vector ``[n, 1, Γ·k]``."""
        sums = self._output_sums(calls, examples)
        joined = sums.transpose(0, 1).flatten(1) if self._adapter.groups > 1 else sums
        self.real = self.real + examples
        return Rows(None, joined[:, None])

    def _looked_up(self, adapter: EmbeddingAdapter, calls: list[Call], examples: int) -> Rows:
        """Indices and the gradients at them, or per-example gradients if the table is smaller."""
        inputs = [call.x for call in calls if call.x is not None]
        # A masked position has no index; its gradient is 0.
        index = torch.cat([adapter.indices(x, examples) for x in inputs], 1).clamp(min=0)
        g = torch.cat([c.own.example_outputs(c.gradient(self._dtype), c.x, examples) for c in calls], 1)
        rows = Rows(index, g.clone(), columns=adapter.d_in)
        return rows if adapter.d_in > index.shape[1] else _table(rows)

    def _reduced(self, calls: list[Call], examples: int) -> Rows:
        adapter = self._adapter
        g = self._output_sums(calls, examples)
        if self._divide:
            outputs = examples * adapter.d_out * adapter.groups
            g = g / (sum(call.g.numel() for call in calls) / outputs)
        self.real = self.real + examples
        if adapter.constant_input:
            return Rows(None, g[..., None, :])
        sums, counts = zip(*(self._input_sums(call, examples) for call in calls), strict=True)
        means = torch.stack(sums).sum(0) / torch.stack(counts).sum(0).clamp(min=1)
        return Rows(means[..., None, :], g[..., None, :], adapter.has_bias)

    def _output_sums(self, calls: list[Call], examples: int) -> Tensor:
        """``Σ_s g [(Γ,) n, d_o]`` over the positions and calls of each example."""
        found = [call.output_sums(self._dtype, examples) for call in calls]
        return found[0] if len(found) == 1 else torch.stack(found).sum(0)

    def _input_sums(self, call: Call, examples: int) -> tuple[Tensor, Tensor]:
        """``Σ_s a [(Γ,) n, d_i]`` of each example, and the number of positions ``[(Γ,) n, 1]``."""
        adapter, x = call.own, call.x
        assert x is not None
        if isinstance(adapter, EmbeddingAdapter):
            x = x if call.keep is None else adapter.masked(x, call.keep)
            total, _ = adapter.input_sums(x, examples)
            return total.to(self._dtype), adapter.real_rows(x, examples)[:, None].to(self._dtype)
        if call.keep is None:
            total, count = adapter.input_sums(x.to(self._dtype), examples)
            return call.whole(total), call.whole(torch.full_like(total[..., :1], count))
        total, _ = adapter.input_sums(adapter.masked(x, call.keep).to(self._dtype), examples)
        real = self._by_example(call, call.keep, examples).sum(-2)
        return call.whole(total), call.whole(real)

    def _by_example(self, call: Call, keep: Tensor, examples: int) -> Tensor:
        """A mask as rows ``[(Γ,) n, S, 1]``, laid out as the gradients are."""
        spread = keep.reshape(*keep.shape, *[1] * (call.g.dim() - keep.dim())).expand(call.g.shape)
        return call.own.example_outputs(spread.to(self._dtype), call.x, examples)[..., :1]

    def _expanded(self, calls: list[Call], examples: int) -> Rows:
        """Rows of all positions, or per-example gradients."""
        adapter = self._adapter
        positions = sum(call.g.numel() for call in calls) // max(examples * adapter.d_out * adapter.groups, 1)
        gradients = not self.as_pairs and kernel.prefers_whole(positions, adapter.n_a, adapter.d_out)
        if not gradients:
            return self._pairs(calls, examples)
        chunks = in_chunks(calls, examples, self._dtype.itemsize)
        parts = [kernel.whole(self._pairs(some, count)) for some, count in chunks]
        return parts[0] if len(parts) == 1 else kernel.concatenate(parts)

    def _pairs(self, calls: list[Call], examples: int) -> Rows:
        adapter, inputs, outputs = self._adapter, [], []
        for call in calls:
            own = call.own
            outputs.append(call.whole(own.example_outputs(call.gradient(self._dtype), call.x, examples)))
            self.real = self.real + self._real_rows(call, outputs[-1])
            if not adapter.constant_input:
                assert call.x is not None
                x = call.x if call.keep is None else own.masked(call.x, call.keep)
                inputs.append(call.whole(own.example_inputs(x, examples).to(self._dtype)))
        # Copies: a program may reuse its buffers before the step.
        g = _copied(outputs)
        if adapter.constant_input:  # the sum is exact
            return Rows(None, g.sum(-2, keepdim=True))
        return Rows(_copied(inputs), g, adapter.has_bias)

    def _real_rows(self, call: Call, outputs: Tensor) -> float | Tensor:
        """Number of rows, ``[Γ]`` for a call that fills one of the Γ blocks."""
        rows = outputs.shape[-3] * outputs.shape[-2]
        found = rows if call.keep is None else call.keep.sum() * (rows / call.keep.numel())
        return found if call.part < 0 else call.whole(outputs.new_ones(()) * found)


def in_chunks(calls: list[Call], examples: int, itemsize: int) -> Iterator[tuple[list[Call], int]]:
    """Yield parts of the batch whose patches are small; other layers have no rows beyond their input."""
    call = calls[0]
    adapter, x, g = call.adapter, call.x, call.g
    is_large = len(calls) == 1 and isinstance(adapter, ConvAdapter)
    if not is_large or x is None or len(x) != examples or len(g) != examples:
        yield calls, examples
        return
    assert isinstance(adapter, ConvAdapter)
    room = adapter.row_count(x[:1]) * adapter.groups * adapter.d_in * itemsize
    size = max(1, CHUNK_BYTES // max(room, 1))
    for some_x, some_g in zip(x.split(size), g.split(size), strict=True):
        yield [call._replace(x=some_x, g=some_g)], len(some_x)


def _copied(parts: list[Tensor]) -> Tensor:
    return parts[0].clone() if len(parts) == 1 else torch.cat(parts, -2)


def _table(rows: Rows) -> Rows:
    """Gradients at indices as those of the whole table, ``[n, 1, d_o·V]``."""
    assert rows.a is not None
    n, d_o = rows.n, rows.g.shape[-1]
    table = rows.g.new_zeros(n, rows.columns, d_o).scatter_add_(1, rows.a[..., None].expand_as(rows.g), rows.g)
    return Rows(None, table.mT.reshape(n, 1, -1))


def multiplied_out(rows: Rows) -> Rows:
    """Rows that hold per-example gradients, of indices too."""
    if rows.a is None:
        return rows
    return _table(rows) if rows.columns else kernel.whole(rows)


def keeps_indices(adapter: Adapter, approx: str) -> bool:
    """Whether the rows of a layer are those of a lookup table, which has indices."""
    if not isinstance(adapter, EmbeddingAdapter) or isinstance(adapter, EmbeddingBagAdapter):
        return False
    return approx == "expand" or adapter.d_in > _DENSE_COLUMNS


def as_rows_matrix(rows: Rows, matrix: Tensor) -> Tensor:
    """A matrix ``[(Γ,) d_o, n_a]`` in the shape that the functions of :mod:`.kernel` take for these rows."""
    return matrix.reshape(*rows.g.shape[:-3], rows.g.shape[-1], 1) if rows.a is None else matrix


def second_moments(rows: Rows, real: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return ``A = Σ ã ãᵀ / rows [(Γ,) n_a, n_a]`` and ``G = Σ g gᵀ [(Γ,) n_g, n_g]`` of pairs of rows.

    Padded rows have a at 0; ``real [(Γ)]`` counts the others.
    """
    g = rows.g.flatten(-3, -2)
    if rows.a is None:
        return torch.ones_like(g[..., :1, :1]), g.mT @ g
    a = rows.a.flatten(-3, -2)
    d = a.shape[-1]
    moment = a.new_zeros(*a.shape[:-2], d + rows.homogeneous, d + rows.homogeneous)
    moment[..., :d, :d] = a.mT @ a
    if rows.homogeneous:
        moment[..., :d, d] = moment[..., d, :d] = a.sum(-2)
        corner = moment[..., d, d]
        corner.copy_(real) if isinstance(real, Tensor) else corner.fill_(real)  # assigning a number waits for a GPU
    count = real.to(moment.dtype)[..., None, None].clamp(min=1) if isinstance(real, Tensor) else max(real, 1)
    return moment / count, g.mT @ g
