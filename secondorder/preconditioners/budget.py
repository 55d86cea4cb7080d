"""The budget of a group: intervals that are chosen once, when the sizes of its first batch are known."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from secondorder.config import BudgetOptions
from secondorder.curvature import budget
from secondorder.curvature.block import Block
from secondorder.curvature.budget import Calibration, Intervals, LayerWork, Others
from secondorder.curvature.work import flops_of_direction, flops_of_refresh
from secondorder.parameters import Group

if TYPE_CHECKING:
    from secondorder.parallel.exchange import StatisticsExchange
    from secondorder.preconditioners.block_plan import BlockPlan


class Budget:
    """Writes the intervals of groups with a budget into their options, which checkpoints contain.

    Args:
        plan: The blocks.
        exchange: Knows the rows of the last batch of each block.
        chosen: The budget, with the rates of the machine if they were measured.
    """

    def __init__(self, plan: BlockPlan[Any], exchange: StatisticsExchange, chosen: BudgetOptions) -> None:
        self._plan, self._exchange, self._rates = plan, exchange, chosen.rates

    def follow(self, learned: Iterable[int]) -> None:
        """Choose for the groups of which a block has just been updated for the first time.

        Args:
            learned: Indices of the blocks that were updated in this step on any rank.
        """
        blocks = [self._plan.blocks[i] for i in learned]
        new = [b for b in blocks if b.group.get("budget") is not None and b.state["factor_updates"] == 1]
        for group in self._plan.table.groups if new else ():
            own = [b for b in self._plan.blocks if b.group is group]
            if any(b in own for b in new) and max(b.state["factor_updates"] for b in own) == 1:
                self._write(group, self._chosen(group, own))

    def _chosen(self, group: Group, blocks: list[Block]) -> Intervals:
        layers = [work for b in blocks if (work := self._work_of(b)) is not None]
        covered = sum(p.numel() for b in blocks for p in b.params)
        trained = sum(p.numel() for p in group["params"] if p.requires_grad)
        others = Others(trained - covered, sum(p.numel() for p in group["params"]) - trained)
        speed = _speed_of(self._rates, blocks[0].owner.device.type)
        return budget.choose(group["budget"], layers, others, speed, alternates=group["graft"] is not None)

    def _work_of(self, block: Block) -> LayerWork | None:
        """Return the work of a block; None if no rank has seen its layer."""
        seen = self._exchange.rows_seen.get(block.name)
        if seen is None:
            return None
        rows = float(torch.as_tensor(seen[1]).flatten()[0])
        adapter, schema = block.adapter, block.schema(block.group, {})
        flops = flops_of_direction(block, schema), flops_of_refresh(block, schema)
        return LayerWork(rows, (adapter.n_a, adapter.n_g), adapter.groups, *flops, adapter.one_hot)

    def _write(self, group: Group, found: Intervals) -> None:
        """Write the intervals that the first rank has found into a group."""
        own = torch.tensor([found.update, found.refresh, found.precondition], dtype=torch.float64)
        steps = self._plan.comm.agree(own * (self._plan.comm.rank == 0)).tolist()
        for name, step in zip(("factor_update_steps", "inv_update_steps", "precondition_steps"), steps, strict=True):
            group[name] = int(step)


def _speed_of(rates: Any, device_type: str) -> Calibration:
    """Return the speed that was measured, or a nominal one."""
    nominal = budget.NOMINAL.get(device_type, budget.NOMINAL["cpu"])
    return nominal if rates is None else Calibration(*rates.relative())
