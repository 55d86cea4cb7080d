"""When layer methods refresh, and what becomes of refreshes that fail."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from secondorder.curvature.block import Block
from secondorder.curvature.refresh_schedule import Counters
from secondorder.linalg.dense import full_precision
from secondorder.parallel.exchange import Reducing

log: logging.Logger = logging.getLogger("secondorder")


class Refreshing(Reducing):
    """The refresh stage of a step: by one process, or by the owners of the blocks."""

    # ------------------------------------------------------------------ stage 4: refresh
    def refresh_due(self) -> list[int]:
        """Factorise the blocks that are due, here or on their owners; returns the indices of the refreshed ones."""
        due = [b for b in self._blocks if self._refresh_is_due(b) and self.comm.renews(b.index)]
        if not due:
            return []
        if self.comm.combines:
            due, fine = self._refresh_together(due)
            self.judge(due, fine)
            return self._count_refreshes(due)
        for blocks, outcome, arrived in self._unjudged:
            arrived.synchronize()
            self.judge(blocks, outcome)
        self._unjudged.clear()
        due, look = self._with_estimates(due)
        if not due:
            return []
        with full_precision(due[0].owner.device):
            ok = self.refresh(due, look)
        if look:
            self.judge(due, ok.cpu())
        else:
            # Judged at the next refresh, when the answer has long arrived and nobody waits for it.
            arrived = torch.Event(ok.device)
            outcome = ok.to("cpu", non_blocking=True)
            arrived.record()
            self._unjudged.append((due, outcome, arrived))
        return self._count_refreshes(due)

    def _count_refreshes(self, due: list[Block]) -> list[int]:
        for block in due:
            state = self.state[block.owner]
            if block.name in self._failures:
                self._failed_at[block.name] = state["factor_updates"]
            else:
                state["refreshes"] += 1
                self._refreshed_at[block.name] = self._t
        return [b.index for b in due]

    def _with_estimates(self, due: list[Block]) -> tuple[list[Block], bool]:
        """Blocks that have an estimate, and whether the host looks at how their refresh ends.

        It does on the CPU, where that is free, and on a device at the first refresh of a block and after a failure.

        Returns:
            The blocks, and whether to look.
        """
        if all(b.owner.device.type == "cpu" for b in due):
            return due, True
        new = [b for b in due if self.state[b.owner]["refreshes"] == 0]
        if new:
            weights = torch.stack([self.state[b.owner]["factor_weight"] for b in new]).cpu().numpy()
            for block, weight in zip(new, weights, strict=True):
                if weight == 0:  # its only batch was not finite
                    self.state[block.owner]["factor_updates"] = 0
                    due = [b for b in due if b is not block]
        return due, bool(new) or any(b.name in self._failures for b in due)

    def _refresh_is_due(self, block: Block) -> bool:
        interval, place = block.group[self.refresh_interval], (block.index, len(self._blocks))
        return self._layer_options.schedule.refreshes(self._t, interval, place, self._counters(block))

    def _counters(self, block: Block) -> Counters:
        state = self.state[block.owner]
        updates, refreshes, adopt_at = (state.get(key, 0) for key in ("factor_updates", "refreshes", "adopt_at"))
        return Counters(updates, refreshes, self._failed_at.get(block.name, 0), adopt_at)

    def judge(self, blocks: Sequence[Block], ok: Tensor) -> None:
        """Count refreshes that failed in a row, and give up at ``max_failures``."""
        for block, good in zip(blocks, ok.numpy(), strict=True):
            if good:
                self._failures.pop(block.name, None)
                continue
            count = self._failures[block.name] = self._failures.get(block.name, 0) + 1
            self._failed_refreshes += 1
            log.warning(
                "refresh of layer %r failed (%d in a row); its last good one stays. If that goes on, raise damping, "
                "lower lr, or leave the layer out with skip_layers",
                block.label,
                count,
            )
            if count >= self._layer_options.max_failures:
                raise RuntimeError(
                    f"the factors of layer '{block.label}' could not be factorised {count} times in a row, even with "
                    "jitter and in float64. Raise damping, lower lr, or leave the layer out with skip_layers."
                )
