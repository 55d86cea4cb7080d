"""COMM_OPT: every rank preconditions everything, so that nothing travels but statistics and what refreshes find."""

from __future__ import annotations

from secondorder.comm.rank_grid import RankGrid


class CommOpt(RankGrid):
    """All ranks are gradient workers of all units; the default in a process group of more than one rank.

    Refreshes are spread over the ranks and their results broadcast. Every rank keeps all curvature, and by default all
    running factors too, so that the ``state_dict()`` of any one rank is complete. Windows are kept whole on every rank.

    Args:
        replicate_factors: Keep the running factors of all units on every rank (None: True).
        average_gradients: Bring ``.grad`` to its mean over the ranks in ``step``, for models without DDP.
        wire_dtype: ``torch.bfloat16`` sends statistics and directions rounded; sums stay in float32.
        timeout: Seconds after which a missing rank is an error; None: as the default process group.
        verify_every: For debugging: every so many steps, compare parameters and messages over the ranks, and raise
            ``RuntimeError`` with the first that differs.

    Raises:
        TypeError: For a value of a wrong kind.
        ValueError: For a value out of range.
    """

    replicates_by_default = True

    def workers(self, world: int) -> int:
        """All of them."""
        return world
