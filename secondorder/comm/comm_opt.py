"""COMM_OPT: every rank preconditions everything, so that only statistics and the results of refreshes are sent."""

from __future__ import annotations

from secondorder.comm.rank_grid import RankGrid
from secondorder.options import complete_docstring


@complete_docstring(RankGrid.__doc__)
class CommOpt(RankGrid):
    """Makes all ranks gradient workers of all units. It is the default in a process group of more than one rank.

    Refreshes are spread over the ranks, and their results are broadcast. Every rank stores all curvature and, by
    default, all running factors too, so the ``state_dict()`` of every rank is complete. Windows are stored completely
    on every rank.

    Args:
        replicate_factors: Whether to store the running factors of all units on every rank. If None, it is True.

    Raises:
        TypeError: If a value has the wrong type.
        ValueError: If a value is out of range.
    """

    replicates_by_default = True

    def workers(self, world: int) -> int:
        """Return the number of all ranks."""
        return world
