"""The refresh stage of a step: by one process, or by the owners of the blocks."""

from __future__ import annotations

from secondorder.curvature.block import Block
from secondorder.parallel.exchange import Reducing


class Refreshing(Reducing):
    """Layer methods that refresh blocks when they are due."""

    def refresh_due(self) -> list[int]:
        """Refresh the blocks that are due, here or on their owners; returns the indices of the refreshed ones."""
        due = [b for b in self._blocks if self._refresh_is_due(b) and self.comm.renews(b.index)]
        if not due:
            return []
        if self.comm.combines:
            due, fine = self._refresh_together(due)
            self.refresher.judge(due, fine)
            return self.refresher.count(due)
        self.refresher.settle()
        due, look = self._with_estimates(due)
        return self.refresher.run(due, self.refresh, look) if due else []

    # ------------------------------------------------------------------ what a method may decide in another way
    def _refresh_is_due(self, block: Block) -> bool:
        return self.refresher.is_due(block, len(self._blocks))

    def _with_estimates(self, due: list[Block]) -> tuple[list[Block], bool]:
        return self.refresher.with_estimates(due)
