"""Reports of blocks: coverage, bytes, dense matrices, damping and diagnostics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from secondorder.curvature.damping_watch import Damped
from secondorder.curvature.extremes import numbers
from secondorder.curvature.wrappers import find_name
from secondorder.parameters import Group
from secondorder.preconditioners.base import CurvatureReport
from secondorder.runtime import some_of

if TYPE_CHECKING:
    from secondorder.curvature.refresh import Refresher
    from secondorder.parallel.exchange import StatisticsExchange
    from secondorder.preconditioners.block_plan import BlockPlan
    from secondorder.preconditioners.layer_capture import LayerCapture

#: Number of refreshes of every block before λ is compared with the curvature.
_REFRESHES_BEFORE_WATCH = 3


class LayerReport(CurvatureReport):
    """Reports on blocks without changing them.

    Args:
        plan: The blocks.
        hooks: The capture of their statistics.
        exchange: Their exchange with other ranks.
        refresher: The schedule of their refreshes.
    """

    sizes_are = "factors A, G"

    def __init__(
        self, plan: BlockPlan[Any], hooks: LayerCapture, exchange: StatisticsExchange, refresher: Refresher
    ) -> None:
        self._plan, self._hooks, self._exchange, self._refresher = plan, hooks, exchange, refresher

    def summary(self) -> str:
        """Return the number of blocks, and what a budget has chosen, in words."""
        chosen = (self._choice(i, group) for i, group in enumerate(self._plan.table.groups))
        return ", ".join([f"{len(self._plan.blocks)} blocks", *filter(None, chosen)])

    def _choice(self, index: int, group: Group) -> str:
        limit = group.get("budget")
        if limit is None:
            return ""
        name = f"budget {limit:g}" + (f" of group {index}" if len(self._plan.table.groups) > 1 else "")
        if not any(b.state.get("factor_updates") for b in self._plan.blocks if b.group is group):
            return f"{name} (chosen in the first step)"
        turn = group["precondition_steps"]
        return (
            f"{name}: factors every {group['factor_update_steps']} steps, inverses every {group['inv_update_steps']}, "
            f"directions every {'step' if turn == 1 else f'{turn} steps'}"
        )

    @property
    def pending_bytes(self) -> int:
        """Bytes of statistics, and of refreshes in progress, that wait for a later step."""
        return self._hooks.nbytes + self._refresher.nbytes

    def coverage(self, p: nn.Parameter) -> tuple[str, str, str]:
        """Return what covers a parameter, its size, and its owner; all are empty strings if nothing covers it."""
        plan = self._plan
        block = plan.block_of.get(p)
        if block is None:
            return "", "", ""
        refused = self._hooks.refused(block)
        treatment = f"block '{block.name}' ({block.layer.kind})" if block.name else f"block {block.layer.kind}"
        if block.layer.other_uses:
            treatment += f", tied; its use in {some_of(block.layer.other_uses)} has no statistics"
        if refused and not block.state.get("refreshes"):
            treatment = f"{plan.table.group_of[p]['fallback']} fallback: {refused}"
        if not plan.is_on(block.group):
            rule = "orthogonalized" if block.sets_length else f"{block.group['graft'] or block.group['inner']}"
            treatment += f", {rule} without curvature: {plan.interval}=0"
        reason, sizes = block.described()
        return f"{treatment}{reason}", sizes, f"rank {plan.comm.owner(block.index)}"

    def dense(self, name: str) -> Tensor:
        """Return the undamped curvature of a block as a dense matrix ``[n, n]``; see ``dense_curvature``."""
        comm, by_name = self._plan.comm, self._plan.by_name
        found = find_name(name, by_name)
        if found is None:
            known = ", ".join(b.name or f"'' (the {b.layer.kind} itself)" for b in self._plan.blocks)
            raise ValueError(f"no block is named '{name}'; there are: {known or 'none'}")
        block = by_name[found]
        if not (comm.estimates(block.index) and comm.preconditions(block.index)):
            raise RuntimeError(
                f"the curvature of layer '{name}' is on rank {comm.owner(block.index)}: ask there, or use "
                "comm=CommOpt(), which stores it on every rank"
            )
        if not block.has_estimate:
            raise RuntimeError(f"nothing was captured for layer '{name}' yet: take a step first")
        dense: Tensor = block.dense()
        return dense

    def damped(self, step: int) -> list[Damped] | None:
        """Return the damping of all blocks on this rank, in the step after the third refresh of each of them."""
        counts = [(b, b.state["refreshes"]) for b in self._plan.blocks if self._refresher.is_refreshed(b)]
        if min((count for _, count in counts), default=0) != _REFRESHES_BEFORE_WATCH:
            return None
        found = ((b, b.bounds()) for b, _ in counts)
        return [Damped(b.name, b.group, "damping", e) for b, e in found if e is not None]

    def diagnostics(self) -> dict[str, Any]:
        """Return diagnostics as plain numbers; reading them may wait for the device."""
        refreshed = {b.name: b for b in self._plan.blocks if self._refresher.is_refreshed(b)}
        found = {name: e for name, b in refreshed.items() if (e := b.extremes()) is not None}
        dampings, conditions = numbers(found)
        # A rank may precondition with an inverse but lack the factors that determine λ.
        here = {name for name, b in refreshed.items() if name in found or self._plan.comm.preconditions(b.index)}
        last, skipped = self._plan.runtime.step - 1, self._exchange.skipped
        return {
            "damping_by_layer": dampings,
            "condition_number": conditions,
            "staleness": {n: last - at for n, at in self._refresher.refreshed_at.items() if n in here},
            "statistics_age": {n: last - at for n, at in self._exchange.learned_at.items() if n in here},
            "skipped_statistics": sum(skipped.values()),
            "skipped_statistics_by_layer": skipped,
            "refresh_failures": self._refresher.failed,
        }
