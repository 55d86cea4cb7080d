"""Pending Kronecker statistics of one layer: raw sums over rows, filled during backward, folded by ``step``."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from secondorder.curvature.layers import Adapter
from secondorder.linalg import add_gram_, add_outer_rows_, full_precision, mirror_upper_


class Call(NamedTuple):
    """One use of a layer in a forward pass, as its backward sees it.

    Attributes:
        x: Layer input; None when only the bias is trained.
        g: Gradient of the accumulated objective at the layer output.
        unscale: Reciprocal of the loss scale at capture, a 0-dim tensor, or None.
    """

    x: Tensor | None
    g: Tensor
    unscale: Tensor | None


class KroneckerSums:
    """``Σ a aᵀ`` and ``Σ g° g°ᵀ`` of a layer since the last step.

    Attributes:
        a: ``[(Γ,) n_a, n_a]``, valid on and above the diagonal until :meth:`finish`.
        g: ``[(Γ,) n_g, n_g]``, likewise.
        rows: Rows in ``a``: N·S for expand, N for reduce.
    """

    def __init__(self, adapter: Adapter, approx: str, dtype: torch.dtype, device: torch.device) -> None:
        self._adapter = adapter
        self._reduce = approx == "reduce"
        self._dtype = dtype
        shape_a, shape_g = adapter.factor_shapes()
        self.a = torch.zeros(shape_a, dtype=dtype, device=device)
        self.g = torch.zeros(shape_g, dtype=dtype, device=device)
        self.rows = 0

    @property
    def wants_whole_pass(self) -> bool:
        """Whether all calls of a forward pass must come in one :meth:`add` (reduce averages over them)."""
        return self._reduce

    @property
    def nbytes(self) -> int:
        """Bytes of the sums."""
        return self.a.nbytes + self.g.nbytes

    def add(self, calls: list[Call], examples: int) -> None:
        """Add the rows of some calls of the layer in one forward pass over ``examples`` examples.

        Raises:
            ValueError: If reduce cannot tell the examples apart in an input.
        """
        with full_precision(self.a.device):
            if self._reduce:
                self._add_reduced(calls, examples)
            else:
                for call in calls:
                    self._add_expanded(call)

    def finish(self) -> tuple[Tensor, Tensor]:
        """The two sums, completed below the diagonal."""
        return mirror_upper_(self.a), mirror_upper_(self.g)

    def _add_expanded(self, call: Call) -> None:
        adapter = self._adapter
        g = self._unscaled(adapter.output_rows(call.g), call)
        add_gram_(self.g, g)
        if call.x is None:
            self.a += g.shape[-2]
        else:
            for rows in adapter.input_rows(call.x):
                add_outer_rows_(self.a, rows.to(self._dtype), adapter.has_bias)
        self.rows += g.shape[-2]

    def _add_reduced(self, calls: list[Call], examples: int) -> None:
        adapter = self._adapter
        g = sum(self._unscaled(adapter.output_sums(call.g, examples), call) for call in calls)
        assert isinstance(g, Tensor)  # `sum` starts from 0
        if calls[0].x is None:
            means = None
        else:
            sums = [adapter.input_sums(call.x.to(self._dtype), examples) for call in calls if call.x is not None]
            means = torch.stack([total for total, _ in sums]).sum(0) / sum(positions for _, positions in sums)
        if means is None:
            self.a += examples
        else:
            add_outer_rows_(self.a, means, adapter.has_bias)
        add_gram_(self.g, g)
        self.rows += examples

    def _unscaled(self, g: Tensor, call: Call) -> Tensor:
        # In the precision of the factor before the outer product: its square would overflow a half.
        g = g.to(self._dtype)
        return g if call.unscale is None else g * call.unscale.to(g.device, g.dtype)
