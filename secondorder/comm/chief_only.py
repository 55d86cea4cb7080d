"""The first distributed strategy of tensorflow/kfac, in which one rank, the chief, holds all curvature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from secondorder import options
from secondorder.comm.rank_grid import RankGrid
from secondorder.options import complete_docstring


@complete_docstring(RankGrid.__doc__)
class ChiefOnly(RankGrid):
    """Stores and refreshes all factors on one rank, the chief. The others receive its directions or its inverses.

    Args:
        root: Rank of the chief.
        deliver: With ``"gradients"``, the chief preconditions and sends directions at every step. With ``"inverses"``,
            it sends the results of refreshes, and every rank preconditions.
        statistics: ``"all"`` sums the statistics of all ranks on the chief; ``"chief"`` uses the statistics of the
            chief's own examples only, which need no communication.

    Raises:
        TypeError: If a value has the wrong type.
        ValueError: If a value is out of range, or, when the optimizer is constructed, if there is no such rank.
    """

    def __init__(
        self,
        root: int = 0,
        deliver: str = "gradients",
        statistics: str = "all",
        *,
        average_gradients: bool = False,
        wire_dtype: torch.dtype | None = None,
        timeout: float | None = None,
        verify_every: int | None = None,
    ) -> None:
        options.whole(0)("root", root)
        options.choice("gradients", "inverses")("deliver", deliver)
        options.choice("all", "chief")("statistics", statistics)
        self._root, self._deliver, self._statistics = root, deliver, statistics
        self.only_owners_capture = statistics == "chief"
        super().__init__(
            average_gradients=average_gradients, wire_dtype=wire_dtype, timeout=timeout, verify_every=verify_every
        )

    def workers(self, world: int) -> int:
        """Return 1 for the chief, or the number of all ranks if all of them precondition."""
        return 1 if self._deliver == "gradients" else world

    def owners_among(self, world: int) -> Sequence[int]:
        """Return the chief, after checking that this rank exists."""
        if world > 1 and self._root >= world:
            raise ValueError(f"root={self._root}, but there are {world} ranks")
        return [self._root if world > 1 else 0]

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the chief, and those of all grids."""
        own = {"root": self._root, "deliver": self._deliver, "statistics": self._statistics}
        return {**own, **super().arguments()}
