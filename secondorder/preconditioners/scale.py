"""EK-FAC's scale: in which step it is measured, of which examples, in which bases, and on which rank.

::

    "intra"      squares of per-example gradients     during backward, or, with transport="recompute", after a refresh
    "running"    squares of the mean gradient         in stage 5, where the gradient is rotated anyway

The second way needs no capture, only the number of examples. With ``transport="recompute"`` several ranks measure after
the new bases were shared, and share the scale then. Where some ranks have examples of a layer and do not precondition
it, every rank keeps the bases of that layer::

    owner ── Q_A, Q_G ─► all ranks, at every refresh        sums [n_g, n_a] of each rank ─► owner
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from secondorder.capture.sites import Captured
from secondorder.capture.statistics import averages
from secondorder.capture.statistics.measurement import Measured
from secondorder.capture.statistics.squares import EigenSums
from secondorder.comm import Unit
from secondorder.comm.layout import local
from secondorder.curvature.block import Block
from secondorder.curvature.eigenbasis import SCALES, Due, EigenbasisBlock, like_adam, preconditions_gradient
from secondorder.curvature.factorization import Found, joint_ok
from secondorder.curvature.kronecker import FactoredBlock
from secondorder.curvature.orthogonal_iteration import BasisIteration
from secondorder.curvature.schema import Place, Schema, keys, tensors
from secondorder.linalg.dense import precision_of
from secondorder.parallel.exchange import parcel_with
from secondorder.parameters import Directions, Group
from secondorder.preconditioners.base import Proposal, Rule, SavedStates
from secondorder.preconditioners.blocks import Setting
from secondorder.preconditioners.kronecker import FactoredPreconditioner


class ScalePreconditioner(FactoredPreconditioner):
    """Blocks with a scale that is measured in their eigenbases."""

    block_type: ClassVar[type[FactoredBlock]] = EigenbasisBlock
    _blocks: list[EigenbasisBlock]  # type: ignore[assignment]
    _block_of: dict[nn.Parameter, EigenbasisBlock]  # type: ignore[assignment]

    catalog: ClassVar[Schema] = {**FactoredPreconditioner.catalog, **SCALES}
    allocating: ClassVar[tuple[str, ...]] = (
        "max_factor_dim", "decay_per_step", "basis_update", "momentum_mode", "transport", "estimator",
    )  # fmt: skip

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._iteration = BasisIteration()
        #: Whether bases are recomputed for a checkpoint without them.
        self._loading = False
        #: Examples of this step.
        self._step_examples = 0
        #: What was captured in this step, where the scale is to be measured in the basis that it finds.
        self._late: dict[EigenbasisBlock, EigenSums] = {}
        self._late_due: set[int] = set()
        self._rotated: dict[Block, Tensor] = {}
        #: Whole gradients that the scale was measured with, and the blocks of which they were sent.
        self._wholes_now: Directions = {}
        self._sent: set[int] = set()

    def schema_of(self, p: nn.Parameter, group: Mapping[str, Any], held: Mapping[str, Any]) -> Schema:
        """Return what the state of a parameter holds of curvature."""
        found, block = super().schema_of(p, group, held), self._block_of.get(p)
        return found if block is None else found | block.momentum_schema(p, group)

    # ------------------------------------------------------------------ when
    def due_of(self, block: Block) -> Due:
        """Return what the current step measures of a block."""
        by_example = block.group["estimator"] == "intra"
        recomputes = by_example and block.group["transport"] == "recompute"
        late = recomputes and (block.state["refreshes"] == 0 or self._refresh_is_due(block))
        scale = by_example and not late and self._is_refreshed(block) and self._scale_is_due(block)
        return Due(super()._capture_is_due(block), scale, late, late or (scale and self.exchange.lacks_measured(block)))

    def _scale_is_due(self, block: Block) -> bool:
        steps: int = block.group["scale_update_steps"]
        return self._t % steps == 0

    def _capture_is_due(self, block: Block) -> bool:
        if block.group[self.refresh_interval] == 0:
            return False
        # A running scale needs the number of examples, which any layer of the step tells.
        if self._scale_is_due(block) and not like_adam(block.group):
            return True
        due = self.due_of(block)
        return due.factors or due.late

    # ------------------------------------------------------------------ into the estimates
    def new_statistic(self, block: Block, group: Group) -> EigenSums:
        """Return empty sums of what is due."""
        return self._blocks[block.index].statistic(self.due_of(block))

    def sums(self, block: Block) -> Schema:
        """Return entries for the factors and for the scale, as far as they are due."""
        return self._blocks[block.index].sums(self.due_of(block))

    def learn(self, statistics: Captured, gradients: Directions, gate: Tensor | None) -> None:
        self._step_examples = statistics.total or max(statistics.examples.values(), default=0)
        due = (self._blocks[i] for i in sorted(self._due))
        measured = [block for block in due if self.due_of(block).scale]
        super().learn(statistics, gradients, gate)
        if measured:
            self._share_scales(measured)

    def fold(self, block: Block, measured: Measured, gate: Tensor | None) -> Tensor:
        """Fold what was measured into the running factors and the scale."""
        own = self._blocks[block.index]
        if measured.rest is not None and measured.rest.calls and not self.comm.combines:
            self._late[own] = measured.rest
        return own.fold(measured, gate)

    def count_update(self, block: Block, measured: Measured) -> None:
        """Count a statistic that was folded in, on whatever rank."""
        own, due = self._blocks[block.index], self.due_of(block)
        if due.factors:
            super().count_update(own, measured)
        # After loading, ranks may find the bases only when the forward that would have measured is over.
        if due.scale and (measured.seen is None or "scale" in measured.seen):
            own.count_scale()

    # ------------------------------------------------------------------ refresh
    def new_bases(self, blocks: Sequence[EigenbasisBlock], host_checks: bool) -> dict[tuple[FactoredBlock, str], Found]:
        """Eigenvalues and bases by block and side; of an iteration the order of columns and what it left, too."""
        warm = [b for b in blocks if b.may_iterate and not self._loading]
        found = self.factorised([b for b in blocks if b not in warm], host_checks)
        if warm:
            iterated = self._iteration.run(warm)
            if host_checks:  # a basis that lost its orthogonality starts anew
                lost = [b for b, ok in zip(warm, joint_ok(iterated, warm).cpu().numpy(), strict=True) if not ok]
                iterated.update(self.factorised(lost, host_checks))
            found.update(iterated)
        return found

    def refresh_some(self, blocks: Sequence[FactoredBlock], host_checks: bool) -> Tensor:
        """Bring the bases of some blocks up to date, and their scales into the new bases."""
        own = [self._blocks[block.index] for block in blocks]
        found = self.new_bases(own, host_checks)
        ok = joint_ok(found, own)
        for block, good in zip(own, ok.unbind(), strict=True):
            block.adopt({side: found[block, side][0] for side in "ag"}, good, carry=not self._loading)
        for block, sums in self._late.items():
            if block in own and not self.comm.combines:
                # The scale of this step's batch alone, in the bases just found.
                measured = block.measure_calls(sums)
                fine = averages.all_finite([measured.parts["scale"].total])
                block.replace_scale(measured, ok[own.index(block)] & fine)
                block.count_scale()
        return ok

    # ------------------------------------------------------------------ directions
    def propose(self, gradients: Directions, source: Directions, gate: Tensor | None) -> Proposal:
        """Preconditioned directions, by scales that have seen this step's mean gradient where they are of that."""
        active = cast("list[EigenbasisBlock]", self.active(gradients))
        due = [b for b in active if b.group["estimator"] == "running" and self._scale_is_due(b)]
        if due and self._is_cut:
            self._wholes_now, self._sent = super()._whole_gradients(due, gradients), {b.index for b in due}
        for block in due:
            self._measure_running(block, self._wholes_now if self._is_cut else gradients, gate)
        proposal = super().propose(gradients, source, gate)
        self._rotated.clear()
        self._wholes_now, self._sent = {}, set()
        return proposal

    def change_sources(self, source: Directions, gradients: Directions, gate: Tensor | None) -> None:
        """With ``momentum_mode="pre"``, precondition the bias-corrected running mean of gradients."""
        for p in source:
            if self._block_of[p].group["momentum_mode"] != "pre":
                continue
            group, state = self.table.group_of[p], self.state[p]
            beta, mean = group["momentum"], local(state["gradient_momentum"])
            gradient = gradients[p].to(mean.dtype)
            mean.lerp_(gradient if gate is None else torch.where(gate, gradient, mean), 1 - beta)
            state["gradient_updates"] += 1
            source[p] = mean / (1 - beta ** state["gradient_updates"])
            if group["nesterov"]:
                source[p] = gradient.lerp(source[p], beta)

    def rule(self, p: nn.Parameter, group: Mapping[str, Any], rule: Rule) -> Rule:
        """Return the first-order rule of a preconditioned parameter, without momentum that was applied before."""
        if self._block_of[p].group["momentum_mode"] == "pre":
            return rule._replace(kind="plain", momentum=0.0)
        return rule

    def _whole_gradients(self, blocks: Sequence[Block], source: Directions) -> Directions:
        """As in the base class; gradients that the scale was measured with are not sent again."""
        here = [b for b in blocks if b.index in self._sent and preconditions_gradient(b.group)]
        rest = [b for b in blocks if b not in here]
        found = {p: self._wholes_now[p] for b in here for p in b.params if p in self._wholes_now}
        return found | (super()._whole_gradients(rest, source) if rest else {})

    def _measure_running(self, block: EigenbasisBlock, gradients: Directions, gate: Tensor | None) -> None:
        """Fold the squared gradient into the scale: no per-example work at all."""
        if self._step_examples == 0 and not like_adam(block.group):
            return
        if self.comm.preconditions(block.index):
            self._runtime.workspace.reset()
            tensors = [gradients[p].to(precision_of(p)) for p in block.params]
            matrix = block.layer.matrix(tensors, self._runtime.workspace)
            ranks = self.comm.data_world if self.comm.combines else 1
            rotated = block.fold_gradient(matrix, float(self._step_examples), ranks, gate)
            if preconditions_gradient(block.group):
                self._rotated[block] = rotated
        block.count_scale()

    def precondition(self, block: Block, gradient: Tensor) -> Tensor:
        """Apply the inverse of the damped curvature of a block to a gradient matrix ``[(Γ,) n_g, n_a]``."""
        own, rotated = self._blocks[block.index], self._rotated.get(block)
        return own.precondition(gradient) if rotated is None else own.precondition(rotated, is_rotated=True)

    # ------------------------------------------------------------------ with other ranks
    def follow(self, place: Callable[[Sequence[Unit]], None]) -> bool:
        """Find the blocks for the current parameters; see the base class."""
        changed = super().follow(place)
        self._runtime.blocks = len(self._blocks)
        names = {b.name for b in self._blocks if self._loading or b.group["estimator"] != "intra"}
        # After a checkpoint was loaded, or an estimator that had no use for them, bases are sent by the next step.
        self.exchange.unsent |= names
        return changed

    def _send_bases(self) -> None:
        """Send bases that were found before all ranks could have them."""
        lacking = self.exchange.lacks_measured
        blocks = [b for b in self._blocks if b.group["estimator"] == "intra" and lacking(b)]
        self.exchange.unsent -= {block.name for block in blocks}  # from now on they are where they are measured in
        for block in blocks:
            schema = self.live_schema(block)
            for key in keys(schema, Place.MEASURED):
                if key not in block.state:
                    block.state[key] = torch.zeros_like(tensors(schema)[key], device=block.owner.device)
        known = [self.parcel_of(b, Place.MEASURED) for b in blocks if b.state["refreshes"] > 0]
        if parcels := [parcel for parcel in known if parcel.tensors]:
            self.comm.spread(parcels)

    def reduce(self, statistics: Captured) -> Captured:
        self._late_due = {i for i in self._due if self.due_of(self._blocks[i]).late}
        if self.comm.combines:
            self._send_bases()
            statistics = self._measure_kept(statistics)
        reduced = super().reduce(statistics)
        if self.comm.combines:
            found = ((self._blocks[i], cast(Measured, m)) for i, m in reduced.statistics.items())
            self._late = {b: m.rest for b, m in found if b.index in self._late_due and m.rest is not None}
        return reduced

    def _measure_kept(self, statistics: Captured) -> Captured:
        """Measure calls that were kept until the bases had been sent; a layer that refuses is left out."""
        kept = dict(statistics.statistics)
        for i, found in statistics.statistics.items():
            block, sums = self._blocks[i], cast(EigenSums, found)
            if sums.calls and statistics.examples[i] and self.due_of(block).scale:
                try:
                    sums.scales = block.new_scales(sums.calls)
                except ValueError as error:
                    self.capture.refused[block.index] = str(error)
                    del kept[i]
                sums.calls.clear()
        return statistics._replace(statistics=kept)

    def share(self, refreshed: list[int]) -> None:
        super().share(refreshed)
        late = [self._blocks[i] for i in refreshed if i in self._late_due]
        if not self.comm.combines or not late:
            return
        mine: dict[int, Measured] = {}
        for block in (b for b in late if b in self._late):
            try:
                mine[block.index] = block.measure_calls(self._late[block])
            except ValueError as error:  # the other ranks go on
                self.capture.refused[block.index] = str(error)
        found, _ = self.exchange.combine({b: b.scale_sums() for b in late}, mine, [])
        for block in late:
            measured = found.get(block.index)
            if measured is None:
                continue
            if measured.parts and "scale" in block.state:
                block.replace_scale(measured, torch.tensor(True))
            block.count_scale()
        self._share_scales(late)

    def _share_scales(self, blocks: Sequence[EigenbasisBlock]) -> None:
        """Bring scales that only the owners have measured to the others that precondition with them."""
        if self.comm.replicates:
            return
        keys = ("scale", "scale_weight", "scale_unit")
        mine = [b for b in blocks if self.comm.preconditions(b.index)]
        self.comm.share_curvature([parcel_with(b, self.live_schema(b), keys) for b in mine])

    # ------------------------------------------------------------------ checkpoints and copies
    @contextmanager
    def while_loading(self, states: SavedStates, rebuild: Callable[[], bool]) -> Iterator[None]:
        """Compare a checkpoint with schemas in which bases that the owners will send may be missing."""
        before, self.exchange.unsent = self.exchange.unsent, {block.name for block in self._blocks}
        try:
            yield
        finally:
            self.exchange.unsent = before

    def _renew_loaded(self, blocks: list[Any]) -> Tensor:
        self._loading = True
        try:
            return super()._renew_loaded(blocks)
        finally:
            self._loading = False

    def loaded(self, rebuild: Callable[[], bool]) -> None:
        """Complete what a checkpoint may leave out; see the base class."""
        self._late.clear()
        self._late_due.clear()
        self._iteration.forget()
        self._loading = True
        try:
            super().loaded(rebuild)
        finally:
            self._loading = False

    def kept(self) -> dict[str, Any]:
        return {**super().kept(), "bases_to_send": set(self.exchange.unsent)}

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Take what :meth:`kept` returned for the original."""
        super().restore(kept)
        self.exchange.unsent = set(kept["bases_to_send"])

    # ------------------------------------------------------------------ ends
    def end_step(self) -> None:
        """Prepare for the coming step."""
        self._late.clear()
        super().end_step()
