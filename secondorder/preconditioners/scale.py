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
from secondorder.curvature.eigenbasis import SCALES, EigenbasisBlock, is_adam, like_adam, preconditions_gradient
from secondorder.curvature.factors import FACTORS
from secondorder.curvature.orthogonal_iteration import BasisRefresher
from secondorder.curvature.refresh import Refresher
from secondorder.curvature.schema import Place, Schema, keys, tensors
from secondorder.linalg import eigenbasis
from secondorder.linalg.dense import stacked
from secondorder.parallel.exchange import StatisticsExchange, parcel_of, parcel_with
from secondorder.parameters import Directions
from secondorder.preconditioners.base import Proposal, Rule
from secondorder.preconditioners.capture_schedule import CaptureSchedule
from secondorder.preconditioners.layers import LayerPreconditioner
from secondorder.preconditioners.parts import Setting
from secondorder.preconditioners.small_blocks import StackRule, stacked_state


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


#: Options that the preconditioning of small blocks reads.
_READ = "damping", "damping_mode", "power", "weight_decay", "weight_decay_in_curvature"


def _read(block: EigenbasisBlock) -> tuple[Sequence[str], Sequence[str]]:
    """Return what a block reads; nothing if its gradient is already in the basis, or if it is Adam there."""
    is_apart = type(block) is not EigenbasisBlock or block.rotated is not None or is_adam(block.group)
    return ((), ()) if is_apart else (("scale", "basis_a", "basis_g"), _READ)


def _precondition(blocks: Sequence[EigenbasisBlock], gradients: Tensor) -> Tensor:
    """Return the preconditioned matrices ``[k, (Γ,) n_g, n_a]``."""
    first, workspace = blocks[0], blocks[0].runtime.workspace
    scales = stacked([block.state["scale"] for block in blocks], workspace)
    state = stacked_state(blocks, ("basis_a", "basis_g"))
    a, g = (first.eigen.basis(state, side) for side in "ag")
    damping = first.damping_of(scales.mean((-2, -1)))
    return eigenbasis.precondition(gradients, a, g, scales, damping, first.group["power"], workspace)


class ScalePreconditioner(LayerPreconditioner[EigenbasisBlock]):
    """Blocks with a scale that is measured in their eigenbases."""

    block_type: ClassVar[type[Block]] = EigenbasisBlock
    refresher_type: ClassVar[type[Refresher]] = BasisRefresher
    stack_rule: ClassVar[StackRule] = StackRule(_read, _precondition)
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
                block.replace_scale(measured, torch.tensor(True))
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
        for block in due:
            self._measure_running(block, whole, gate)
        proposal = super().propose(gradients, source, gate)
        for block in due:
            block.rotated = None
        wholes.forget()
        return proposal

    def change_sources(self, source: Directions, gradients: Directions, gate: Tensor | None) -> None:
        """With ``momentum_mode="pre"``, precondition the bias-corrected running mean of gradients."""
        for p in source:
            if self.plan.block_of[p].group["momentum_mode"] != "pre":
                continue
            group, state = self.table.group_of[p], self.table.state[p]
            beta, mean = group["momentum"], local(state["gradient_momentum"])
            gradient = gradients[p].to(mean.dtype)
            mean.lerp_(gradient if gate is None else torch.where(gate, gradient, mean), 1 - beta)
            state["gradient_updates"] += 1
            source[p] = mean / (1 - beta ** state["gradient_updates"])
            if group["nesterov"]:
                source[p] = gradient.lerp(source[p], beta)

    def rule(self, p: nn.Parameter, group: Mapping[str, Any], rule: Rule) -> Rule:
        """Return the first-order rule of a preconditioned parameter, without momentum that was applied before."""
        if self.plan.block_of[p].group["momentum_mode"] == "pre":
            return rule._replace(kind="plain", momentum=0.0)
        return rule

    def _measure_running(self, block: EigenbasisBlock, gradients: Directions, gate: Tensor | None) -> None:
        """Update the scale with the squared gradient, which needs no per-example work."""
        if self._step_examples == 0 and not like_adam(block.group):
            return
        if self.comm.preconditions(block.index):
            matrix = self.directions.matrix_of(block, gradients)
            ranks = self.comm.data_world if self.comm.combines else 1
            rotated = block.fold_gradient(matrix, float(self._step_examples), ranks, gate)
            if preconditions_gradient(block.group):
                block.rotated = rotated
        block.count_scale()

    def forget_step(self) -> None:
        """Discard data that only the current step uses."""
        self._late.clear()
        self._late_due.clear()
