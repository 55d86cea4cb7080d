"""DP-KFAC: the owner of a layer estimates its factors from its own shard of the batch, and factors are never sent."""

from __future__ import annotations

import torch

from secondorder.comm.mem_opt import MemOpt
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

    only_owners_capture = True

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
