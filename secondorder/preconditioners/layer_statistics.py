"""The statistics of a step, which are measured here, combined over all ranks, and added to the running estimates."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from secondorder.capture.sites import Captured
from secondorder.capture.statistics.measurement import Measured, Reduced
from secondorder.curvature.block import ESTIMATE_ALONE, Block
from secondorder.linalg.dense import all_true_on_cpu
from secondorder.parallel.exchange import StatisticsExchange
from secondorder.parallel.session import words_of_options

if TYPE_CHECKING:
    from secondorder.preconditioners.block_plan import BlockPlan
    from secondorder.preconditioners.layer_capture import LayerCapture


class LayerStatistics:
    """Measures captured statistics and updates the estimates of blocks with them.

    Args:
        plan: The blocks.
        hooks: The capture of their statistics.
        exchange: Their exchange with other ranks.
    """

    def __init__(self, plan: BlockPlan[Any], hooks: LayerCapture, exchange: StatisticsExchange) -> None:
        self._plan, self._hooks, self._exchange = plan, hooks, exchange

    def reduce(self, captured: Captured) -> Reduced:
        """Measure captured statistics, and combine them over the ranks."""
        plan = self._plan
        if captured.terms is not None:
            plan.runtime.observed_terms = captured.terms
        seen = {i: statistic for i, statistic in captured.statistics.items() if captured.examples[i]}
        measured: dict[int, Measured] = {i: plan.blocks[i].measure(s, captured.examples[i]) for i, s in seen.items()}
        if plan.comm.combines:
            return self._combine(captured, measured)
        for i, m in measured.items():
            if "factor_a" in m.parts:
                self._exchange.rows_seen[plan.blocks[i].name] = m.examples, m.parts["factor_a"].number
        return Reduced(measured, captured.examples, captured.idle, captured.total)

    def _combine(self, captured: Captured, measured: dict[int, Measured]) -> Reduced:
        """Send counts to all ranks, and sums to the ranks that hold the estimates."""
        blocks, comm, groups = self._plan.blocks, self._plan.comm, self._plan.table.groups
        schemas = {blocks[i]: blocks[i].sums(due) for i, due in sorted(self._hooks.due.items())}
        if not schemas:
            return Reduced({}, captured.examples, captured.idle, captured.total)
        # A number of 20 bits represents the options of the groups. Its square and sums of such numbers are exact.
        word = float(zlib.crc32("\n".join(words_of_options(groups)).encode()) & 0xFFFFF)
        tail = [float(captured.total), float(captured.total > 0), 1.0, word, word * word]
        found, agreed = self._exchange.combine(schemas, measured, tail)
        examples = {i: m.examples for i, m in found.items()}
        total, ranks, everyone, words, squares = agreed.tolist()
        if everyone * squares != words * words:  # the words differ
            rates = [float(group["lr"]) for group in groups]
            raise RuntimeError(
                f"step {self._plan.runtime.step}: the options of the parameter groups differ between ranks (lr here: "
                f"{rates}), so their parameters would diverge. Schedules must see the same numbers on every rank: "
                "average a validation loss over the ranks before you pass it to a scheduler."
            )
        # A rank that captures no layer has as many examples as the others.
        total = round(total * comm.data_world / ranks) if ranks else 0
        return Reduced(found, examples, captured.idle, total)

    def fold(self, reduced: Reduced, gate: Tensor | None) -> None:
        """Update the running estimates with the measured statistics, and count the updates."""
        combines, step = self._plan.comm.combines, self._plan.runtime.step
        late: dict[Block, Tensor] = {}
        for index, measured in reduced.measured.items():
            block = self._plan.blocks[index]
            if measured.parts or not combines:
                finite = block.fold(measured, gate)
                if finite.device.type != "cpu":
                    late[block] = finite
                elif not all_true_on_cpu(finite):
                    self._exchange.skip([block], 1)
                    if not combines:
                        continue
            due = self._hooks.due.get(index, ESTIMATE_ALONE)
            block.count_update(measured, due)
            if due.factors:
                self._exchange.learned_at[block.name] = step
        if late:
            flags = torch.stack([flag.to(next(iter(late.values())).device) for flag in late.values()])
            self._exchange.skip(list(late), (~flags).to(torch.int64))
