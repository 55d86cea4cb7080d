"""HYBRID_OPT: a chosen share of the ranks preconditions a unit, each for the ranks of its row."""

from __future__ import annotations

from typing import Any

import torch

from secondorder.comm.placement import workers_of
from secondorder.comm.rank_grid import RankGrid


class HybridOpt(RankGrid):
    """Between :class:`CommOpt` (fraction 1) and :class:`MemOpt` (fraction 1 / W).

    Rows of the grid are runs of consecutive ranks, so with ``W · fraction`` nodes the directions of every step stay
    inside a node. Windows are cut into ``1 / fraction`` parts.

    Args:
        grad_worker_fraction: Gradient workers of a unit divided by the number of ranks; their number must divide it.
        replicate_factors: Keep the running factors of all units on every rank (None: False).
        average_gradients: Bring ``.grad`` to its mean over the ranks in ``step``, for models without DDP.
        wire_dtype: ``torch.bfloat16`` sends statistics and directions rounded; sums stay in float32.
        timeout: Seconds after which a missing rank is an error; None: as the default process group.

    Raises:
        TypeError: For a value of a wrong kind.
        ValueError: For a value out of range; at construction of the optimizer, for a fraction that the number of ranks
            does not allow, with those that it does.
    """

    def __init__(
        self,
        grad_worker_fraction: float = 0.5,
        *,
        replicate_factors: bool | None = None,
        average_gradients: bool = False,
        wire_dtype: torch.dtype | None = None,
        timeout: float | None = None,
    ) -> None:
        if isinstance(grad_worker_fraction, bool) or not isinstance(grad_worker_fraction, (int, float)):
            raise TypeError(f"grad_worker_fraction must be a number, got {grad_worker_fraction!r}")
        if not 0 < grad_worker_fraction <= 1:
            raise ValueError(f"grad_worker_fraction must be in (0, 1], got {grad_worker_fraction}")
        self._fraction = float(grad_worker_fraction)
        super().__init__(
            replicate_factors=replicate_factors,
            average_gradients=average_gradients,
            wire_dtype=wire_dtype,
            timeout=timeout,
        )

    def workers(self, world: int) -> int:
        """``W · fraction``; in a world of one process, that one."""
        return 1 if world == 1 else workers_of(world, self._fraction)

    def _told(self) -> dict[str, Any]:
        return {"grad_worker_fraction": self._fraction, **super()._told()}
