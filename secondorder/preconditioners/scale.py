"""EK-FAC's scale: the steps, examples, bases and ranks with which it is measured.

::

    "intra"      squares of per-example gradients     during backward, or, with transport="recompute", after a refresh
    "running"    squares of the mean gradient         in stage 5, where the gradient is rotated anyway

The second way needs no capture, only the number of examples. With ``transport="recompute"``, several ranks measure
after the new bases are shared, and then share the scale. If some ranks have examples of a layer but do not precondition
it, every rank stores the bases of this layer::

    owner ── Q_A, Q_G ─► all ranks, at every refresh        sums [n_g, n_a] of each rank ─► owner
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from secondorder.capture.sites import Captured
from secondorder.capture.statistics import averages
from secondorder.capture.statistics.measurement import Measured, Reduced
from secondorder.capture.statistics.squares import EigenSums
from secondorder.comm.layout import local
from secondorder.curvature.block import Block, Due
from secondorder.curvature.eigenbasis import SCALES, EigenbasisBlock, like_adam, preconditions_gradient
from secondorder.curvature.factors import FACTORS
from secondorder.curvature.orthogonal_iteration import BasisRefresher
from secondorder.curvature.refresh import Refresher
from secondorder.curvature.schema import Place, Schema, keys, tensors
from secondorder.linalg.first_order import mean_gradients_
from secondorder.linalg.stacks import foreach_parts
from secondorder.parallel.exchange import StatisticsExchange, parcel_of, parcel_with
from secondorder.parameters import Directions
from secondorder.preconditioners.base import Proposal, Rule
from secondorder.preconditioners.block_stacks import StackRule
from secondorder.preconditioners.capture_schedule import CaptureSchedule
from secondorder.preconditioners.estimate_stacks import STACK_RULE, measure_scales
from secondorder.preconditioners.layers import LayerPreconditioner
from secondorder.preconditioners.parts import Setting


class ScaleSchedule(CaptureSchedule[EigenbasisBlock]):
    """Decides what a step measures for factors and for scales."""

    def due_of(self, block: EigenbasisBlock) -> Due | None:
        """Return the measurements of the next step for a block; None if there are none."""
        if not self._plan.is_on(block.group):
            return None
        due = self.measured_of(block)
        # A running scale needs the number of examples, which any layer of the step provides.
        counts = self.scale_is_due(block) and not like_adam(block.group)
        return due if counts or due.factors or due.late else None

    def measured_of(self, block: EigenbasisBlock) -> Due:
        """Return the measurements of the next step for a block whose statistics it uses."""
        captures, refresher = self.captures(block), self._refresher
        if block.group["estimator"] != "intra":
            return Due(captures)
        recomputes = block.group["transport"] == "recompute"
        late = recomputes and (block.state["refreshes"] == 0 or refresher.is_due(block, len(self._plan.blocks)))
        scale = not late and refresher.is_refreshed(block) and self.scale_is_due(block)
        return Due(captures, scale, late, late or (scale and self._exchange.lacks_measured(block)))

    def scale_is_due(self, block: EigenbasisBlock) -> bool:
        """Return whether the next step measures the scale of a block without a refresh."""
        steps: int = block.group["scale_update_steps"]
        return self._plan.runtime.step % steps == 0


class ScalePreconditioner(LayerPreconditioner[EigenbasisBlock]):
    """Blocks with a scale that is measured in their eigenbases."""

    block_type: ClassVar[type[Block]] = EigenbasisBlock
    refresher_type: ClassVar[type[Refresher]] = BasisRefresher
    stack_rule: ClassVar[StackRule] = STACK_RULE
    schedule_type: ClassVar[type[CaptureSchedule[Any]]] = ScaleSchedule
    catalog: ClassVar[Schema] = {**FACTORS, **SCALES}
    allocating: ClassVar[tuple[str, ...]] = (
        "max_factor_dim", "decay_per_step", "basis_update", "momentum_mode", "transport", "estimator",
    )  # fmt: skip
    schedule: ScaleSchedule

    def __init__(self, setting: Setting, exchange: StatisticsExchange | None = None) -> None:
        super().__init__(setting, exchange)
        #: Examples of this step.
        self._step_examples = 0
        #: Captured calls of this step whose scale is measured in the basis that the step computes.
        self._late: dict[EigenbasisBlock, EigenSums] = {}
        self._late_due: set[int] = set()

    # ------------------------------------------------------------------ statistics
    def reduce(self, statistics: Captured) -> Reduced:
        """Measure captured statistics, and combine them over the ranks, after sending bases that ranks lack."""
        blocks, due = self.plan.blocks, self.hooks.due
        if self.comm.combines:
            self._send_bases()
        # Ranks may have computed bases together since the forward pass began.
        due.update({i: self.schedule.measured_of(blocks[i]) for i in due})
        self._late_due = {i for i, own in due.items() if own.late}
        if not self.comm.combines:
            return super().reduce(statistics)
        reduced = super().reduce(self._measure_kept(statistics))
        late = {i: m.rest for i, m in reduced.measured.items() if i in self._late_due}
        self._late = {blocks[i]: rest for i, rest in late.items() if rest is not None}
        return reduced

    def _send_bases(self) -> None:
        """Send bases that were computed before all ranks could store them."""
        lacking, unsent = self.exchange.lacks_measured, self.exchange.unsent
        blocks = [b for b in self.plan.blocks if b.group["estimator"] == "intra" and lacking(b)]
        unsent -= {block.name for block in blocks}  # from now on, all ranks that measure in them have them
        for block in blocks:
            schema = self.plan.live_schema(block)
            for key in keys(schema, Place.MEASURED):
                if key not in block.state:
                    block.state[key] = torch.zeros_like(tensors(schema)[key], device=block.owner.device)
        known = [parcel_of(b, self.plan.live_schema(b), Place.MEASURED) for b in blocks if b.state["refreshes"] > 0]
        if parcels := [parcel for parcel in known if parcel.tensors]:
            self.comm.spread(parcels)

    def _measure_kept(self, statistics: Captured) -> Captured:
        """Measure calls that were kept until the bases had been sent. A layer that cannot be measured is left out."""
        kept = dict(statistics.statistics)
        for i, found in statistics.statistics.items():
            block, sums = self.plan.blocks[i], cast(EigenSums, found)
            if sums.calls and statistics.examples[i] and self.hooks.due[i].scale:
                try:
                    sums.scales = block.new_scales(sums.calls)
                except ValueError as error:
                    self.hooks.refuse(block, str(error))
                    del kept[i]
                sums.calls.clear()
        return statistics._replace(statistics=kept)

    def learn(self, statistics: Reduced, gradients: Directions, gate: Tensor | None) -> None:
        """Update the running factors and the scale with the measured statistics."""
        self._step_examples = statistics.total or max(statistics.examples.values(), default=0)
        if not self.comm.combines:
            found = ((self.plan.blocks[i], m.rest) for i, m in statistics.measured.items())
            self._late.update({block: rest for block, rest in found if rest is not None and rest.calls})
        super().learn(statistics, gradients, gate)
        measured = [self.plan.blocks[i] for i, due in sorted(self.hooks.due.items()) if due.scale]
        if measured:
            self._share_scales(measured)

    # ------------------------------------------------------------------ refresh
    def share(self, refreshed: list[int]) -> None:
        """Send refreshed curvature to the ranks that precondition with it, and measure scales in the new bases."""
        super().share(refreshed)
        late = [self.plan.blocks[i] for i in refreshed if i in self._late_due]
        if self.comm.combines and late:
            self._measure_late(late)
        elif late:
            for block in (b for b in late if b in self._late):
                measured = block.measure_calls(self._late[block])
                fine = averages.all_finite([measured.parts["scale"].total])
                block.replace_scale(measured, block.adopted & fine)
                block.count_scale()

    def _measure_late(self, blocks: Sequence[EigenbasisBlock]) -> None:
        """Measure the scale from only this step's batch on every rank, in bases that all ranks have."""
        mine: dict[int, Measured] = {}
        for block in (b for b in blocks if b in self._late):
            try:
                mine[block.index] = block.measure_calls(self._late[block])
            except ValueError as error:  # the other ranks continue
                self.hooks.refuse(block, str(error))
        found, _ = self.exchange.combine({b: b.scale_sums() for b in blocks}, mine, [])
        for block in blocks:
            measured = found.get(block.index)
            if measured is None:
                continue
            if measured.parts and "scale" in block.state:
                block.replace_scale(measured, torch.ones((), dtype=torch.bool, device=block.owner.device))
            block.count_scale()
        self._share_scales(blocks)

    def _share_scales(self, blocks: Sequence[EigenbasisBlock]) -> None:
        """Send scales that only the owners have measured to the other ranks that precondition with them."""
        if self.comm.replicates:
            return
        keys = ("scale", "scale_weight", "scale_unit")
        mine = [b for b in blocks if self.comm.preconditions(b.index)]
        self.comm.share_curvature([parcel_with(b, self.plan.live_schema(b), keys) for b in mine])

    # ------------------------------------------------------------------ directions
    def propose(self, gradients: Directions, source: Directions, gate: Tensor | None) -> Proposal:
        """Preconditioned directions. Running scales are first updated with this step's mean gradient."""
        active = self.directions.active(gradients)
        running = [b for b in active if b.group["estimator"] == "running" and self.directions.has_curvature(b)]
        due = [b for b in running if self.schedule.scale_is_due(b)]
        wholes, is_sharded = self.directions.wholes, self.table.shards.is_sharded
        whole = wholes.keep(due, gradients) if due and is_sharded else gradients
        examples, ranks = float(self._step_examples), self.comm.data_world if self.comm.combines else 1
        mine = [b for b in due if self.comm.preconditions(b.index) and (examples or like_adam(b.group))]
        together = measure_scales(mine, whole, examples, ranks, gate)
        for block in (b for b in mine if b not in together):
            block.rotated = block.fold_gradient(self.directions.matrix_of(block, whole), examples, ranks, gate)
            if not preconditions_gradient(block.group):
                block.rotated = None
        for block in due:
            if examples or like_adam(block.group):
                block.count_scale()
        proposal = super().propose(gradients, source, gate)
        for block in due:
            block.rotated = None
        wholes.forget()
        return proposal

    def change_sources(self, source: Directions, gradients: Directions, gate: Tensor | None) -> None:
        """With ``momentum_mode="pre"``, precondition the bias-corrected running mean of gradients."""
        by_group: dict[int, list[nn.Parameter]] = {}
        for p in source:
            if self.plan.block_of[p].group["momentum_mode"] == "pre":
                by_group.setdefault(id(self.table.group_of[p]), []).append(p)
        for members in by_group.values():
            group = self.table.group_of[members[0]]
            for params in foreach_parts(members, group["foreach"]):
                states = [self.table.state[p] for p in params]
                for state in states:
                    state["gradient_updates"] += 1
                means, counts = zip(
                    *((local(s["gradient_momentum"]), s["gradient_updates"]) for s in states), strict=True
                )
                own = [gradients[p].to(mean.dtype) for p, mean in zip(params, means, strict=True)]
                found = mean_gradients_(list(means), own, counts, group["momentum"], group["nesterov"], gate)
                source.update(zip(params, found, strict=True))

    def rule(self, p: nn.Parameter, group: Mapping[str, Any], rule: Rule) -> Rule:
        """Return the first-order rule of a preconditioned parameter, without momentum that was applied before."""
        if self.plan.block_of[p].group["momentum_mode"] == "pre":
            return rule._replace(kind="plain", momentum=0.0)
        return rule

    def forget_step(self) -> None:
        """Discard data that only the current step uses."""
        self._late.clear()
        self._late_due.clear()
