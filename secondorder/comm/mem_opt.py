"""MEM_OPT: every unit on one rank, whose directions go to all others."""

from __future__ import annotations

from secondorder.comm.rank_grid import RankGrid


class MemOpt(RankGrid):
    """Each unit has one gradient worker, its owner: curvature bytes per rank fall as 1 / W.

    Statistics are summed on the owner alone, and directions broadcast at every step. Windows are cut into W parts.

    Args:
        replicate_factors: Keep the running factors of all units on every rank (None: False).
        average_gradients: Bring ``.grad`` to its mean over the ranks in ``step``, for models without DDP.
        wire_dtype: ``torch.bfloat16`` sends statistics and directions rounded; sums stay in float32.
        timeout: Seconds after which a missing rank is an error; None: as the default process group.
        verify_every: For debugging: every so many steps, compare parameters and messages over the ranks, and raise
            ``RuntimeError`` with the first that differs.

    Raises:
        TypeError: For a value of a wrong kind.
        ValueError: For a value out of range.
    """

    def workers(self, world: int) -> int:
        """One."""
        return 1
