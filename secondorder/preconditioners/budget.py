"""The budget of a group: intervals that are chosen once, when the sizes of its first batch are known."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from secondorder.config import BudgetOptions
from secondorder.curvature import budget
from secondorder.curvature.budget import Calibration, Intervals, LayerWork
from secondorder.curvature.kronecker import KroneckerBlock
from secondorder.parameters import Group

if TYPE_CHECKING:
    from secondorder.parallel.exchange import StatisticsExchange
    from secondorder.preconditioners.block_plan import BlockPlan


class BudgetChooser:
    """Writes the intervals of groups with a budget into their options, which checkpoints contain.

    Args:
        plan: The blocks.
        exchange: Knows the rows of the last batch of each block.
        chosen: The budget, with the rates of the machine if they were measured.
    """

    def __init__(self, plan: BlockPlan[KroneckerBlock], exchange: StatisticsExchange, chosen: BudgetOptions) -> None:
        self._plan, self._exchange, self._rates = plan, exchange, chosen.rates
        #: The mean cost of a step that was counted, by index of the group.
        self.costs: dict[int, float] = {}

    def follow(self, learned: Iterable[int]) -> None:
        """Choose for the groups of which a block has just been updated for the first time.

        Args:
            learned: Indices of the blocks that were updated in this step on any rank.
        """
        blocks = [self._plan.blocks[i] for i in learned]
        new = [b for b in blocks if b.group["budget"] is not None and b.state["factor_updates"] == 1]
        for index, group in enumerate(self._plan.table.groups if new else ()):
            own = [b for b in self._plan.blocks if b.group is group]
            if any(b in own for b in new) and max(b.state["factor_updates"] for b in own) == 1:
                self.costs[index] = self._write(group, self._chosen(group, own))

    def _chosen(self, group: Group, blocks: list[KroneckerBlock]) -> Intervals:
        layers = [work for b in blocks if (work := self._work_of(b)) is not None]
        covered = sum(p.numel() for b in blocks for p in b.params)
        others = sum(p.numel() for p in group["params"] if p.requires_grad) - covered
        speed = _speed_of(self._rates, blocks[0].owner.device.type)
        return budget.choose(group["budget"], layers, others, speed, alternates=group["graft"] is not None)

    def _work_of(self, block: KroneckerBlock) -> LayerWork | None:
        """Return the work of a block; None if no rank has seen its layer."""
        seen = self._exchange.rows_seen.get(block.name)
        if seen is None:
            return None
        rows = float(torch.as_tensor(seen[1]).flatten()[0])
        adapter, group = block.adapter, block.group
        sizes = adapter.n_a, adapter.n_g
        direction, refresh = block.inverse_for(group).work(group)
        return LayerWork(rows, sizes, adapter.groups, direction, refresh)

    def _write(self, group: Group, found: Intervals) -> float:
        """Write the intervals of the first rank into a group, and return the counted cost of a step."""
        own = [found.update, found.refresh, found.precondition, found.cost]
        is_first = self._plan.comm.rank == 0
        words = self._plan.comm.agree(torch.tensor(own, dtype=torch.float64) * is_first).tolist()
        for name, steps in zip(("factor_update_steps", "inv_update_steps", "precondition_steps"), words, strict=False):
            group[name] = int(steps)
        return float(words[3])


def _speed_of(rates: Any, device_type: str) -> Calibration:
    """Return the speed that was measured, or a nominal one."""
    if rates is not None:
        return Calibration(*rates.relative())
    return budget.NOMINAL.get(device_type, budget.NOMINAL["cpu"])
