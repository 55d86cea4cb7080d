"""DP-KFAC: the owner of a layer estimates its factors from its own shard of the batch, and factors are never sent."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from secondorder.comm.mem_opt import MemOpt
from secondorder.comm.strategy import Parcel, Pending
from secondorder.options import complete_docstring


@complete_docstring(MemOpt.__doc__)
class LocalFactors(MemOpt):
    """Works like :class:`MemOpt`, but uses only the owner's examples for the statistics of a unit.

    No other rank captures the layer. The estimate is based on N / W examples instead of the complete batch of N
    examples: it is equal in expectation if all shards are drawn in the same way, but noisier. Only one number per layer
    is sent for the statistics.

    Zhang et al., DP-KFAC (arXiv 2206.15143).

    Args:
        wire_dtype: ``torch.bfloat16`` rounds directions before they are sent. If None, nothing is rounded.

    Raises:
        TypeError: If a value has the wrong type.
        ValueError: If a value is out of range.
    """

    def __init__(
        self,
        *,
        average_gradients: bool = False,
        wire_dtype: torch.dtype | None = None,
        timeout: float | None = None,
        verify_every: int | None = None,
    ) -> None:
        super().__init__(
            average_gradients=average_gradients, wire_dtype=wire_dtype, timeout=timeout, verify_every=verify_every
        )

    def captures(self, index: int) -> bool:
        """Whether this rank captures a unit. The owner does, and all ranks do for units that every rank estimates."""
        return self._owners[index] == self._rank or self._units[index].everywhere

    def sources(self, index: int) -> int:
        """Return 1, because only the owner captures."""
        return 1

    def reduce_statistics(self, parcels: Sequence[Parcel]) -> Pending:
        """Sum only the statistics of units that every rank needs at every step."""
        return super().reduce_statistics([p for p in parcels if self._units[p.index].everywhere])

    def gather_statistics(self, parcels: Sequence[Parcel]) -> list[Parcel]:
        """Stack the owner's own statistics."""
        own = [Parcel(p.index, [t[None] for t in p.tensors]) for p in parcels]
        return [p if self._owners[p.index] == self._rank else Parcel(p.index, []) for p in own]
