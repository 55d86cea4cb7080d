"""The preconditioner of the layer methods: the stages of a step over the blocks of a module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Generic

import torch
from torch import Tensor, nn

from secondorder.capture.sites import Captured
from secondorder.capture.statistics.measurement import Reduced
from secondorder.comm.strategy import Unit
from secondorder.curvature.block import Block, BlockT
from secondorder.curvature.refresh import Refresher
from secondorder.curvature.schema import Schema
from secondorder.linalg.dense import full_precision
from secondorder.parallel.exchange import StatisticsExchange
from secondorder.parameters import Directions
from secondorder.preconditioners.base import Preconditioner, Proposal
from secondorder.preconditioners.block_plan import BlockPlan
from secondorder.preconditioners.block_stacks import NO_STACKS, StackRule
from secondorder.preconditioners.budget import Budget
from secondorder.preconditioners.capture_schedule import CaptureSchedule
from secondorder.preconditioners.directions import LayerDirections
from secondorder.preconditioners.layer_capture import LayerCapture
from secondorder.preconditioners.layer_checkpoint import LayerCheckpoint
from secondorder.preconditioners.layer_report import LayerReport
from secondorder.preconditioners.layer_statistics import LayerStatistics
from secondorder.preconditioners.parts import Setting


class LayerPreconditioner(Preconditioner, Generic[BlockT]):
    """The stages of a step over the blocks of a module. A method sets ``block_type`` and the related classes.

    Args:
        setting: The parts of the optimizer that it uses.
        exchange: The exchange of the blocks with other ranks. In a dry run, it reads nothing.
        **own: Arguments of the plan that only this method has.

    Attributes:
        plan: The blocks.
        hooks: The capture of their statistics.
        exchange: Their exchange with other ranks.
        refresher: The schedule of their refreshes.
        schedule: The schedule of the measurements of a step.
        statistics: The statistics of a step.
        budget: The choice of intervals for groups with a budget.
        directions: The directions of a step.
        report: The report of the blocks.
    """

    hooks: LayerCapture
    #: The class of the blocks.
    block_type: ClassVar[type[Block]]
    #: The class of the plan.
    plan_type: ClassVar[type[BlockPlan[Any]]] = BlockPlan
    #: The class of the schedule of measurements.
    schedule_type: ClassVar[type[CaptureSchedule[Any]]] = CaptureSchedule
    #: The class of the report.
    report_type: ClassVar[type[LayerReport]] = LayerReport
    #: The class of the adapter for checkpoints.
    checkpoint_type: ClassVar[type[LayerCheckpoint]] = LayerCheckpoint
    #: The class of the refresher.
    refresher_type: ClassVar[type[Refresher]] = Refresher
    #: The rule by which small blocks precondition together.
    stack_rule: ClassVar[StackRule] = NO_STACKS
    #: Entries of the states of blocks, by key, as far as they are the same in every state.
    catalog: ClassVar[Schema] = {}
    #: Options that determine the content of the state of a block.
    allocating: ClassVar[tuple[str, ...]] = ()
    needs_module = True
    #: Options with the number of steps between two updates of the estimates, and between two refreshes.
    capture_interval: ClassVar[str] = "factor_update_steps"
    refresh_interval: ClassVar[str] = "inv_update_steps"
    #: The counter of the updates of the estimates in the states.
    capture_counter: ClassVar[str] = "factor_updates"
    #: Whether relative damping refers to the kernel of the examples instead of the Fisher of the parameters.
    damps_kernel: ClassVar[bool] = False
    #: The largest number of rows of each example that a method can use, or None for no limit.
    rows_per_example: ClassVar[int | None] = None

    def __init__(self, setting: Setting, exchange: StatisticsExchange | None = None, **own: Any) -> None:
        self.setting, self.comm, self.table, self.runtime = setting, setting.comm, setting.table, setting.runtime
        self.options = setting.layers
        self.exchange = exchange or StatisticsExchange(setting.comm)
        self.plan: BlockPlan[BlockT] = self.plan_type(
            setting, self.block_type, self.refresh_interval, self.exchange, **own
        )
        most = self.options.refresh.max_failures
        self.refresher = self.refresher_type(self.options.schedule, self.refresh_interval, most, setting.comm)
        parts = self.plan, self.refresher, self.exchange
        self.schedule = self.schedule_type(*parts, self.capture_interval, self.capture_counter)
        self.hooks = LayerCapture(setting, self.plan, self.schedule, self.rows_per_example)
        self.statistics = LayerStatistics(self.plan, self.hooks, self.exchange)
        self.budget = Budget(self.plan, self.exchange, self.options.budget)
        self.directions: LayerDirections[BlockT] = LayerDirections(*parts, self.stack_rule)
        self.report = self.report_type(self.plan, self.hooks, self.exchange, self.refresher)

    # ------------------------------------------------------------------ blocks
    def follow(self, place: Callable[[Sequence[Unit]], None]) -> bool:
        """Find the blocks for the current parameters; see :meth:`BlockPlan.follow`."""
        changed = self.plan.follow(place)
        # Bases are sent only while gradients are measured in them.
        self.exchange.unsent |= {b.name for b in self.plan.blocks if b.group.get("estimator") != "intra"}
        return changed

    @property
    def covered(self) -> Mapping[nn.Parameter, BlockT]:
        """The block of each covered parameter."""
        return self.plan.block_of

    def rebuilt(self) -> None:
        """Act on a new plan, whose state has been allocated."""
        self.plan.allocate_common()
        self.refresher.forget_jobs()  # parameters may have moved or changed their dtype
        self.runtime.stacks.clear()

    def facts(self) -> dict[str, list[str]]:
        """Return the settings that must be equal on all ranks, as text."""
        return self.plan.facts()

    def go_to(self, step: int) -> None:
        """Continue as if a number of steps had been taken, to rehearse a step without numbers."""
        self.runtime.step = step

    # ------------------------------------------------------------------ stages 1 to 3: statistics
    def collect(self) -> Reduced:
        """Return the statistics captured since the last step, combined over the ranks."""
        return self.reduce(self.hooks.take())

    def reduce(self, statistics: Captured) -> Reduced:
        """Measure captured statistics, and combine them over the ranks."""
        return self.statistics.reduce(statistics)

    def learn(self, statistics: Reduced, gradients: Directions, gate: Tensor | None) -> None:
        """Update the running estimates with the measured statistics."""
        self.stack_rule.fold(self.exchange, self.plan.blocks, statistics.measured, gate)
        self.statistics.fold(statistics, gate)
        self.budget.follow(statistics.measured)
        if self.hooks.is_hooked:
            self.hooks.warn_uncaptured(statistics, gradients)

    # ------------------------------------------------------------------ stage 4: refresh and share
    def refresh_due(self) -> list[int]:
        """Refresh the blocks that are due, here or on their owners, and return the indices of the refreshed ones.

        With ``overlap``, it adopts refreshes that were begun and begins those that are due.

        Returns:
            The indices.
        """
        if not self.options.overlap:
            return self._refresh_due()
        blocks, count, comm = self.plan.blocks, len(self.plan.blocks), self.comm
        with self.refresher.adopting(blocks) as adopted:
            refreshed = set(self._refresh_due())
        at_once = {b for b in blocks if b.index in refreshed and b not in adopted}
        self.refresher.forget(at_once)
        begun = [b for b in blocks if comm.renews(b.index) and self.refresher.begins(b, count) and b not in at_once]
        self.refresher.begin(begun)
        return sorted(refreshed)

    def _refresh_due(self) -> list[int]:
        due = [b for b in self.plan.blocks if self.is_due(b) and self.comm.renews(b.index)]
        if not due:
            return []
        if self.comm.combines:
            due, fine = self.exchange.refresh_together(due, self.refresh)
            self.refresher.judge(due, fine)
            return self.refresher.count(due)
        self.refresher.settle()
        due, look = self.with_estimates(due)
        return self.refresher.run(due, self.refresh, look) if due else []

    def is_due(self, block: BlockT) -> bool:
        """Whether this step refreshes a block."""
        return self.refresher.is_due(block, len(self.plan.blocks))

    def with_estimates(self, due: list[BlockT]) -> tuple[list[BlockT], bool]:
        """Return the blocks that have an estimate, and whether the host checks the results of their refresh."""
        return self.refresher.with_estimates(due)

    def refresh(self, blocks: Sequence[BlockT], host_checks: bool, *, restores: bool = False) -> Tensor:
        """Refresh some blocks in portions, see :meth:`~secondorder.curvature.refresh.Refresher.refresh`."""
        return self.refresher.refresh(blocks, host_checks, restores)

    def share(self, refreshed: list[int]) -> None:
        """Send refreshed curvature to the ranks that precondition with it."""
        if self.comm.combines and refreshed:
            blocks = [self.plan.blocks[i] for i in refreshed]
            self.exchange.share({b: self.plan.live_schema(b) for b in blocks})

    def renew(self, blocks: list[BlockT], *, restores: bool = False) -> Tensor:
        """Refresh and share some blocks outside of their schedule.

        Args:
            blocks: The blocks.
            restores: Whether this only recomputes curvature that a checkpoint left out. Pending refreshes are newer.

        Returns:
            Whether each refresh succeeded.
        """
        refresh = partial(self.refresh, restores=True) if restores else self.refresh
        if self.comm.combines:
            kept, fine = self.exchange.refresh_together(blocks, refresh)
            good = dict(zip(kept, fine.tolist(), strict=True))
            ok = torch.tensor([good.get(b, False) for b in blocks])
        else:
            kept = blocks
            with full_precision(blocks[0].owner.device):
                ok = refresh(blocks, True)
        self.share([b.index for b in kept])
        if not restores:
            self.refresher.forget(blocks)
        return ok

    # ------------------------------------------------------------------ stages 5 and 6: directions
    def preconditioned(self, gradients: Directions) -> list[nn.Parameter]:
        """Return the parameters of the blocks that precondition in a step with these gradients."""
        return [p for b in self.directions.active(gradients) for p in b.params]

    def propose(self, gradients: Directions, source: Directions, gate: Tensor | None) -> Proposal:
        """Preconditioned directions of the parameters of active blocks."""
        return self.directions.propose(gradients, source)

    def forget_step(self) -> None:
        """Discard data that only the current step uses."""

    def end_step(self) -> None:
        """Prepare for the next step."""
        self.forget_step()
        self.hooks.end_step()

    # ------------------------------------------------------------------ copies and ends
    def recover(self) -> None:
        """Recompute curvature that a checkpoint left out, together with the other ranks."""
        if self.refresher.missing:
            blocks = [b for b in self.plan.blocks if b.name in self.refresher.missing]
            ok = self.renew(blocks, restores=True)
            for block, good in zip(blocks, ok.tolist(), strict=True):
                if not good:
                    block.state["refreshes"] = 0
            self.refresher.missing.clear()

    def kept(self) -> dict[str, Any]:
        """Return what copies and pickles keep in addition to the state."""
        return {
            "to_renew": set(self.refresher.missing),
            "bases_to_send": set(self.exchange.unsent),
            "refreshed_at": dict(self.refresher.refreshed_at),
            "learned_at": dict(self.exchange.learned_at),
        }

    def own(self) -> dict[str, Any]:
        """Return the arguments of a copy that only this preconditioner has."""
        return {}

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`kept` for the original."""
        self.refresher.missing = set(kept["to_renew"])
        self.refresher.refreshed_at.update(kept["refreshed_at"])
        self.exchange.learned_at = dict(kept["learned_at"])
        self.exchange.unsent = set(kept["bases_to_send"])

    def detach(self) -> None:
        """Remove all hooks, and end refreshes in the background. Idempotent."""
        try:
            self.hooks.detach()
        finally:
            self.refresher.close()
