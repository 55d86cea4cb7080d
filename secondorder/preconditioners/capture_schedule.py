"""Decides which statistics a step measures, and of which blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic

from secondorder.curvature.block import ESTIMATE_ALONE, BlockT, Due

if TYPE_CHECKING:
    from secondorder.curvature.refresh import Refresher
    from secondorder.parallel.exchange import StatisticsExchange
    from secondorder.preconditioners.block_plan import BlockPlan


class CaptureSchedule(Generic[BlockT]):
    """Decides what a step measures, based only on the step counter, the options and the counters in the states.

    Args:
        plan: The blocks.
        refresher: The schedule of their refreshes.
        exchange: Their exchange with other ranks.
        interval: Name of the option with the number of steps between two updates of the estimates.
        counter: Name of the counter of these updates in the states.
    """

    def __init__(
        self, plan: BlockPlan[BlockT], refresher: Refresher, exchange: StatisticsExchange, interval: str, counter: str
    ) -> None:
        self._plan, self._refresher, self._exchange = plan, refresher, exchange
        self._interval, self._counter = interval, counter

    def find_due(self) -> dict[int, Due]:
        """Return the measurements of the next step, by index of the blocks whose statistics it uses on any rank."""
        learns = self._plan.comm.learns
        found = ((b.index, self.due_of(b)) for b in self._plan.blocks)
        return {i: due for i, due in found if due is not None and learns(i)}

    def due_of(self, block: BlockT) -> Due | None:
        """Return the measurements of the next step for a block; None if there are none."""
        return ESTIMATE_ALONE if self.captures(block) else None

    def captures(self, block: BlockT) -> bool:
        """Return whether the next step updates the running estimate of a block."""
        every, interval = block.group[self._interval], block.group[self._plan.interval]
        updates, step = block.state.get(self._counter, 0), self._plan.runtime.step
        return self._refresher.schedule.captures(step, every, interval, updates)

    def chosen_intervals(self) -> list[tuple[Any, ...]]:
        """Return the options by group that determine which statistics a step uses."""
        names = (self._plan.interval, self._interval, "precondition_steps", "scale_update_steps", "estimator")
        return [tuple(g.get(name) for name in names) for g in self._plan.table.groups]

    def intervals(self) -> list[int]:
        """Return the numbers of steps after which the parts of a step repeat."""
        return [n for found in self.chosen_intervals() for n in found if isinstance(n, int) and n > 0]
