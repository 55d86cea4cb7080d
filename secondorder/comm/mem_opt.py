"""MEM_OPT: every unit is on one rank, which sends its directions to all others."""

from __future__ import annotations

from secondorder.comm.rank_grid import RankGrid
from secondorder.options import complete_docstring


@complete_docstring(RankGrid.__doc__)
class MemOpt(RankGrid):
    """Gives each unit one gradient worker, its owner, so that curvature bytes per rank fall as 1 / W.

    Statistics are summed only on the owner, and directions are broadcast at every step. Windows are cut into W parts.

    Args:
        replicate_factors: Whether to store the running factors of all units on every rank. If None, it is False.

    Raises:
        TypeError: If a value has the wrong type.
        ValueError: If a value is out of range.
    """

    def workers(self, world: int) -> int:
        """Return 1."""
        return 1
