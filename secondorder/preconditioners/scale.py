"""EK-FAC's scale: when it is measured, of which examples, in which basis, and on which rank.

::

    "intra"      squares of per-example gradients     during backward, or, with transport="recompute", after a refresh
    "running"    squares of the mean gradient         in stage 5, where the gradient is rotated anyway

The second way needs no capture, only the number of examples. With ``transport="recompute"`` several ranks measure after
the new bases were shared, and share the scale then.
"""

# bridge: verbs that take blocks with factors
# mypy: disable-error-code="override"

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from secondorder import options
from secondorder.capture.sites import Captured, Statistic
from secondorder.capture.statistics import averages
from secondorder.capture.statistics.measurement import Estimate, Measured
from secondorder.capture.statistics.squares import EigenSums, ScaleSums
from secondorder.curvature.block import Block
from secondorder.curvature.eigenbasis import SCALES, BasisPreconditioner
from secondorder.curvature.extremes import Extremes, of_values
from secondorder.curvature.factorization import Found, joint_ok
from secondorder.curvature.kronecker import FactoredBlock
from secondorder.curvature.schema import Schema, shaped, tensors
from secondorder.linalg import dense, eigenbasis
from secondorder.linalg.dense import precision_of
from secondorder.preconditioners.base import Directions, Group, Proposal
from secondorder.preconditioners.blocks import Setting


class ScalePreconditioner(BasisPreconditioner):
    """Base of the methods that divide by a scale which is measured in the eigenbases."""

    catalog: ClassVar[Schema] = {**BasisPreconditioner.catalog, **SCALES}
    allocating: ClassVar[tuple[str, ...]] = (
        "max_factor_dim", "decay_per_step", "basis_update", "momentum_mode", "transport", "estimator",
    )  # fmt: skip

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        #: Examples of this step.
        self._step_examples = 0
        #: What was captured in this step, where the scale is to be measured in the basis that it finds.
        self._late: dict[FactoredBlock, tuple[EigenSums, int]] = {}
        self._late_due: set[int] = set()
        self._rotated: dict[FactoredBlock, Tensor] = {}
        #: Whole gradients that the scale was measured with, and the blocks of which they were sent.
        self._wholes_now: Directions = {}
        self._sent: set[int] = set()

    # ------------------------------------------------------------------ state
    def schema(self, block: FactoredBlock, group: Mapping[str, Any], held: Mapping[str, Any]) -> Schema:
        """Factors, bases, scale and counters."""
        adapter = block.adapter
        lead = (adapter.groups,) if adapter.groups > 1 else ()
        likes: dict[str, Tensor | int] = {
            "scale": self.zeros(block, (*lead, adapter.n_g, adapter.n_a)),
            "scale_weight": self.zeros(block, (), torch.float64),
            "scale_updates": 0,
        }
        if group["decay_per_step"]:
            likes["scale_step"] = max(self._t - 1, 0)
        if group["transport"] == "kfac":
            likes["scale_unit"] = self.zeros(block, (), torch.float64)
        return block.factor_schema(group) | self.basis_schema(block, group) | shaped(SCALES, likes)

    def schema_of(self, p: nn.Parameter, group: Mapping[str, Any], held: Mapping[str, Any]) -> Schema:
        """Return what the state of a parameter holds of curvature."""
        found = super().schema_of(p, group, held)
        block = self._block_of.get(p)
        if block is not None and group["momentum_mode"] == "pre":
            mean = torch.empty(p.shape, dtype=precision_of(p), device="meta")
            found = found | shaped(SCALES, {"gradient_momentum": mean, "gradient_updates": 0})
        return found

    # ------------------------------------------------------------------ when
    def _capture_is_due(self, block: FactoredBlock) -> bool:
        group = block.group
        if group["inv_update_steps"] == 0:
            return False
        # A running scale needs the number of examples, which any layer of the step tells.
        scale = self._scale_is_due(block) and not like_adam(group)
        return self._factors_are_due(block) or scale or self._measures_late(block)

    def _factors_are_due(self, block: FactoredBlock) -> bool:
        return super()._capture_is_due(block)

    def _scale_is_due(self, block: FactoredBlock) -> bool:
        steps: int = block.group["scale_update_steps"]
        return self._t % steps == 0

    def _measures_scale(self, block: FactoredBlock) -> bool:
        """Whether this step measures the scale of a block example by example, in the basis of now."""
        ready = block.group["estimator"] == "intra" and self._is_refreshed(block)
        return ready and self._scale_is_due(block) and not self._measures_late(block)

    def _measures_late(self, block: FactoredBlock) -> bool:
        """Whether it is measured in the basis that this step will find."""
        group = block.group
        return group["estimator"] == "intra" and group["transport"] == "recompute" and self._refresh_comes(block)

    def _refresh_comes(self, block: FactoredBlock) -> bool:
        """Whether this step will refresh the basis of a block, its factors being captured."""
        return self.state[block.owner]["refreshes"] == 0 or self._refresh_is_due(block)

    def _keeps_calls(self, block: FactoredBlock) -> bool:
        """Whether what is captured now is measured later: in bases that are not here, or not yet."""
        return self._measures_late(block) or (self._measures_scale(block) and self._lacks_bases(block))

    # ------------------------------------------------------------------ what
    def new_statistic(self, block: FactoredBlock, group: Group) -> EigenSums:
        """Empty sums of what is due."""
        factors, keep_calls = None, self._keeps_calls(block)
        if self._factors_are_due(block):
            factors = block.new_sums()
        scales = self._new_scales(block) if self._measures_scale(block) and not keep_calls else None
        by_example = group["estimator"] == "intra"
        return EigenSums(factors, scales, by_example, keep_calls)

    def _new_scales(self, block: FactoredBlock) -> ScaleSums:
        group, generator = block.group, None
        bases = block.basis("a"), block.basis("g")
        like = torch.empty_like(tensors(self._scale_sums(block))["scale"], device=block.owner.device)
        if group["scale_batch_size"] is not None:
            generator = torch.Generator().manual_seed(self._runtime.seed(len(self._blocks) + block.index))
        return ScaleSums(block.adapter, like, *bases, group["token_is_example"], group["scale_batch_size"], generator)

    def learn(self, statistics: Captured, gradients: Directions, gate: Tensor | None) -> None:
        self._step_examples = statistics.total or max(statistics.examples.values(), default=0)
        measured = [self._blocks[i] for i in sorted(self._due) if self._measures_scale(self._blocks[i])]
        super().learn(statistics, gradients, gate)
        if measured:
            self._share_scales(measured)

    def sums(self, block: FactoredBlock) -> Schema:
        """Factors and scale, as far as they are due."""
        found = block.factors.sums(block.group) if self._factors_are_due(block) else {}
        return found | self._scale_sums(block) if self._measures_scale(block) else found

    def _scale_sums(self, block: Block) -> Schema:
        return {"scale": self.live_schema(block)["scale"]}

    def measure(self, block: FactoredBlock, statistic: Statistic, examples: int) -> Measured:
        """What this rank's batch says of the factors and, in the basis of now, of the scale."""
        sums, parts = cast(EigenSums, statistic), dict[str, Estimate]()
        if sums.factors is not None:
            parts |= block.measured_factors(sums.factors, examples)
        if sums.scales is not None:
            parts["scale"] = self._measured_scale(block, sums.scales, examples)
        return Measured(parts, examples, sums)

    def _measured_scale(self, block: FactoredBlock, sums: ScaleSums, examples: int) -> Estimate:
        """The scale of a batch, per datum."""
        group = block.group
        if self._fisher.is_observed:
            count = self._runtime.observed_terms.clamp(min=1) if group["loss_reduction"] == "mean" else float(examples)
            return Estimate(sums.total, block.gradient_scale(examples), count)
        reduction = group["loss_reduction"]
        total, factor = sums.per_datum(reduction, examples)
        terms = group["loss_terms"] if reduction == "mean" else 1.0
        return Estimate(total, factor * terms, sums.data(examples))

    # ------------------------------------------------------------------ into the estimate
    def fold(self, block: FactoredBlock, measured: Measured, gate: Tensor | None) -> Tensor:
        """Fold what was measured into the running factors and the scale."""
        finite = torch.ones((), dtype=torch.bool, device=block.owner.device)
        if "factor_a" in measured.parts:
            finite = block.fold_factors(measured, gate)
        if measured.rest is not None and measured.rest.calls and not self.comm.combines:
            self._late[block] = measured.rest, measured.examples
        if "scale" in measured.parts and "scale" in self.state[block.owner]:
            part = measured.parts["scale"]
            fine = averages.all_finite([part.total])
            weight = block.batch_weight(measured.examples)
            self._fold(block, part.total, cast(float, part.scale), weight, fine if gate is None else fine & gate)
            finite = finite & fine
        return finite

    def count_update(self, block: FactoredBlock, measured: Measured) -> None:
        """Count a statistic that was folded in, on whatever rank."""
        if self._factors_are_due(block):
            super().count_update(block, measured)
        # After loading, ranks may find the bases only when the forward that would have measured is over.
        seen = measured.seen is None or "scale" in measured.seen
        if self._measures_scale(block) and seen:
            self._count_scale(block)

    def _count_scale(self, block: FactoredBlock) -> None:
        self.state[block.owner]["scale_updates"] += 1
        block.note_step("scale_step")

    def _fold(self, block: FactoredBlock, total: Tensor, factor: float, weight: float, ok: Tensor) -> None:
        state, decay = self.state[block.owner], self._scale_decay(block)
        total = self.pooled(block, total)
        averages.ratio_ema_([state["scale"]], state["scale_weight"], [total], [factor], weight, decay, ok)
        if "scale_unit" in state:
            state["scale_unit"].copy_(torch.where(ok, weight, state["scale_unit"]))

    def _scale_decay(self, block: FactoredBlock) -> float:
        """β of the coming update of the scale."""
        group, state = block.group, self.state[block.owner]
        own = group["scale_decay"]
        decay = group["factor_decay"] if own is None else own
        return block.decay(decay, state["scale_updates"], "scale_step")

    # ------------------------------------------------------------------ in the basis just found
    def _measure_late(self, block: FactoredBlock, sums: EigenSums, good: Tensor) -> None:
        """Measure the scale of this step's batch alone, in the basis just found (``transport="recompute"``)."""
        measured = self._in_new_basis(block, sums)
        part = measured.parts["scale"]
        ok = good & averages.all_finite([part.total])
        weight = block.batch_weight(measured.examples)
        self.state[block.owner]["scale_weight"].mul_(~ok)
        self._fold(block, part.total, cast(float, part.scale), weight, ok)
        self._count_scale(block)

    def _in_new_basis(self, block: FactoredBlock, sums: EigenSums) -> Measured:
        """The scale of the calls that were kept, in the basis of now."""
        scales, examples = self._scales_of_calls(block, sums), sum(count for _, count in sums.calls)
        return Measured({"scale": self._measured_scale(block, scales, examples)}, examples, sums)

    def _scales_of_calls(self, block: FactoredBlock, sums: EigenSums) -> ScaleSums:
        scales = self._new_scales(block)
        for calls, count in sums.calls:
            scales.add(calls, count)
        return scales

    def _measure_kept(self, statistics: Captured) -> Captured:
        """Measure calls that were kept until the bases had been sent; a layer that refuses is left out."""
        kept = dict(statistics.statistics)
        for i, found in statistics.statistics.items():
            block, sums = self._blocks[i], cast(EigenSums, found)
            if sums.calls and statistics.examples[i] and self._measures_scale(block):
                try:
                    sums.scales = self._scales_of_calls(block, sums)
                except ValueError as error:
                    self._refuse_calls(block, error)
                    del kept[i]
                sums.calls.clear()
        return statistics._replace(statistics=kept)

    def _refuse_calls(self, block: FactoredBlock, error: ValueError) -> None:
        """Say why nothing of a layer was captured."""
        self.capture.refused[block.index] = str(error)

    # ------------------------------------------------------------------ refresh
    def refresh_some(self, blocks: Sequence[FactoredBlock], host_checks: bool) -> Tensor:
        """Bring the bases of some blocks up to date, and their scales into the new bases."""
        found = self.new_bases(blocks, host_checks)
        ok = joint_ok(found, blocks)
        for block, good in zip(blocks, ok.unbind(), strict=True):
            state = self.state[block.owner]
            values = {side: self.eigenvalues_found(block, side, found) for side in "ag"}
            product = values["g"][..., :, None] * values["a"][..., None, :]
            if state["scale_updates"] == 0:
                # A placeholder of weight 0: nothing of it survives the first measurement.
                block.adopt_tensor("scale", product, good)
            elif not self._loading:
                self._carry_over(block, found, product, good)
            for side in "ag":
                block.adopt_tensor(f"eigenvalues_{side}", values[side], good)
                for basis in found[block, side][0][1:2]:
                    block.adopt_tensor(f"basis_{side}", basis, good)
            if not self._loading:
                state["scale"].copy_(self.pooled(block, state["scale"]))
        for block, (sums, _) in self._late.items():
            if block in blocks and not self.comm.combines:
                self._measure_late(block, sums, ok[blocks.index(block)])
        return ok

    def _carry_over(
        self, block: FactoredBlock, found: Mapping[tuple[FactoredBlock, str], Found], product: Tensor, good: Tensor
    ) -> None:
        """Bring the scale from the old bases into those that were found."""
        state, mode = self.state[block.owner], block.group["transport"]
        if mode == "kfac":
            block.adopt_tensor("scale", product, good)
            block.adopt_tensor("scale_weight", state["scale_unit"], good)  # as one update
            return
        if mode == "none":
            moved = state["scale"]
            for side, axis in (("a", -1), ("g", -2)):
                for order in found[block, side][0][2:3]:  # the columns that a QR refresh sorted
                    index = order.reshape(state[f"eigenvalues_{side}"].shape)
                    index = index[..., None, :] if axis == -1 else index[..., :, None]
                    moved = moved.gather(axis, index.expand_as(moved))
        else:
            overlaps = []
            for side in "ag":
                old, new = block.basis(side), found[block, side][0][1:2]
                overlaps.append(eigenbasis.overlap(old, new[0].reshape(old.shape)) if old is not None and new else None)
            moved = eigenbasis.transport(state["scale"], *overlaps)
        block.adopt_tensor("scale", moved, good)

    # ------------------------------------------------------------------ of the mean gradient
    def propose(self, gradients: Directions, source: Directions, gate: Tensor | None) -> Proposal:
        """Preconditioned directions, by scales that have seen this step's mean gradient where they are of that."""
        active = cast("list[FactoredBlock]", self.active(gradients))
        due = [b for b in active if b.group["estimator"] == "running" and self._scale_is_due(b)]
        if due and self._is_cut:
            self._wholes_now, self._sent = super()._whole_gradients(due, gradients), {b.index for b in due}
        for block in due:
            self._measure_running(block, self._wholes_now if self._is_cut else gradients, gate)
        proposal = super().propose(gradients, source, gate)
        self._rotated.clear()
        self._wholes_now, self._sent = {}, set()
        return proposal

    def precondition(self, block: FactoredBlock, gradient: Tensor) -> Tensor:
        """``Q_G [(Q_Gᵀ ∇ Q_A) ⊘ (s + λ)^p] Q_Aᵀ``."""
        group, s = block.group, self.state[block.owner]["scale"]
        rotated = self._rotated.get(block)
        like_adam = is_adam(group)
        mean = s.mean((-2, -1))
        damping = torch.full_like(mean, group["eps"]) if like_adam else block.damping_of(mean)
        chosen = self._layer_options
        kept = block.factors.kept_in(chosen.factor_dtype), block.factors.kept_in(chosen.inv_dtype)
        return eigenbasis.precondition(
            gradient if rotated is None else rotated,
            block.basis("a"),
            block.basis("g"),
            s,
            damping,
            group["power"],
            self._runtime.workspace,
            damp_root=like_adam,
            is_rotated=rotated is not None,
            silent=eigenbasis.is_rounding(s, *self.singular_values(block), kept) if like_adam else None,
        )

    def _whole_gradients(self, blocks: Sequence[FactoredBlock], source: Directions) -> Directions:
        """As in the base class; gradients that the scale was measured with are not sent again."""
        here = [b for b in blocks if b.index in self._sent and preconditions_gradient(b.group)]
        rest = [b for b in blocks if b not in here]
        found = {p: self._wholes_now[p] for b in here for p in b.params if p in self._wholes_now}
        return found | (super()._whole_gradients(rest, source) if rest else {})

    def _measure_running(self, block: FactoredBlock, gradients: Directions, gate: Tensor | None) -> None:
        """Fold the squared gradient into the scale: no per-example work at all."""
        group = block.group
        examples = 1.0 if like_adam(group) else float(self._step_examples)
        if examples == 0:
            return
        if not self.comm.preconditions(block.index):
            self._count_scale(block)
            return
        with dense.full_precision(block.owner.device):
            workspace = self._runtime.workspace
            workspace.reset()
            matrix = block.layer.matrix([gradients[p].to(precision_of(p)) for p in block.params], workspace)
            rotated = eigenbasis.rotate(matrix, block.basis("a"), block.basis("g"), workspace).clone()
        ok = averages.all_finite([rotated])
        weight = 1.0 if like_adam(group) else block.batch_weight(int(examples))
        if group["loss_reduction"] == "mean":
            factor = examples * group["loss_terms"]
        else:  # N (∇/N)² of the whole sum, of which several ranks have their mean
            factor = (self.comm.data_world if self.comm.combines else 1) ** 2 / examples
        squares = eigenbasis.scale_running(rotated, 1.0 if like_adam(group) else factor)
        self._fold(block, squares, 1.0, weight, ok if gate is None else ok & gate)
        self._count_scale(block)
        if preconditions_gradient(group):
            self._rotated[block] = rotated

    # ------------------------------------------------------------------ with other ranks
    def reduce(self, statistics: Captured) -> Captured:
        self._late_due = {i for i in self._due if self._measures_late(self._blocks[i])}
        if self.comm.combines:
            self._send_bases()
            statistics = self._measure_kept(statistics)
        reduced = super().reduce(statistics)
        if self.comm.combines:
            found = ((self._blocks[i], cast(Measured, m)) for i, m in reduced.statistics.items())
            self._late = {b: (m.rest, m.examples) for b, m in found if b.index in self._late_due and m.rest is not None}
        return reduced

    def share(self, refreshed: list[int]) -> None:
        super().share(refreshed)
        late = [self._blocks[i] for i in refreshed if i in self._late_due]
        if not self.comm.combines or not late:
            return
        mine: dict[int, Measured] = {}
        for block in (b for b in late if b in self._late):
            try:
                mine[block.index] = self._in_new_basis(block, self._late[block][0])
            except ValueError as error:  # the other ranks go on
                self._refuse_calls(block, error)
        found, _ = self._exchange(late, mine, self._scale_sums, [])
        for block in late:
            measured = found.get(block.index)
            if measured is None:
                continue
            if measured.parts and "scale" in self.state[block.owner]:
                self.state[block.owner]["scale_weight"].zero_()
                weight = block.batch_weight(measured.examples)
                self._fold(block, measured.parts["scale"].total, 1.0, weight, torch.tensor(True))
            self._count_scale(block)
        self._share_scales(late)

    def _share_scales(self, blocks: Sequence[FactoredBlock]) -> None:
        """Bring scales that only the owners have measured to the others that precondition with them."""
        if self.comm.replicates:
            return
        keys = ("scale", "scale_weight", "scale_unit")
        mine = [b for b in blocks if self.comm.preconditions(b.index)]
        self.comm.share_curvature([self._shared(b, self.live_schema(b), keys) for b in mine])

    # ------------------------------------------------------------------ what it tells
    def block_curvature(self, block: FactoredBlock) -> Tensor:
        """``(Q_G ⊗ Q_A) diag(vec s) (Q_G ⊗ Q_A)ᵀ``; block-diagonal over the groups of a grouped convolution."""
        found = eigenbasis.dense(self.state[block.owner]["scale"], block.basis("a"), block.basis("g"))
        if block.adapter.groups > 1:
            found = cast(Tensor, torch.block_diag(*found))
        return block.adapter.natural_order(found)

    def extremes(self, block: FactoredBlock) -> Extremes | None:
        """λ of a block and the extreme entries of its damped scale; None if the scale is on other ranks."""
        s: Tensor | None = self.state[block.owner].get("scale")
        if s is None:
            return None
        if is_adam(block.group):  # ε is added to the root
            return Extremes(torch.full_like(s.mean((-2, -1)), block.group["eps"]))
        return of_values(s.amin((-2, -1)), s.amax((-2, -1)), block.damping_of(s.mean((-2, -1))))

    def block_damping(self, block: FactoredBlock) -> Tensor:
        """λ of a block as the damping of its quadratic model."""
        return block.tikhonov(self.state[block.owner]["scale"].mean((-2, -1)))

    def curvature_product(self, block: FactoredBlock, matrix: Tensor) -> Tensor:
        """``Q_G ((Q_Gᵀ X Q_A) ∘ s) Q_Aᵀ`` of a matrix ``X [(Γ,) n_g, n_a]``, undamped."""
        bases = block.basis("a"), block.basis("g")
        return eigenbasis.rotate_back(eigenbasis.rotate(matrix, *bases) * self.state[block.owner]["scale"], *bases)

    # ------------------------------------------------------------------ ends
    def restore(self, kept: Mapping[str, Any]) -> None:
        """Take what :meth:`kept` returned for the original."""
        super().restore(kept)
        self._bases_to_send = set(kept["bases_to_send"])

    def kept(self) -> dict[str, Any]:
        return {**super().kept(), "bases_to_send": set(self._bases_to_send)}

    def end_step(self) -> None:
        """Prepare for the coming step."""
        self._late.clear()
        super().end_step()

    def loaded(self, rebuild: Callable[[], bool]) -> None:
        """Complete what a checkpoint may leave out; see the base class."""
        self._late.clear()
        self._late_due.clear()
        super().loaded(rebuild)


def preconditions_gradient(group: Mapping[str, Any]) -> bool:
    """Whether what is preconditioned is the gradient itself, and not a running mean."""
    return bool(not options.is_adam(group["graft"]) and group["momentum_mode"] == "post")


def like_adam(group: Mapping[str, Any]) -> bool:
    """Whether the scale is that of the mean gradient, whose steps have Adam's size whatever the batch."""
    return bool(group["estimator"] == "running" and group["momentum_mode"] == "pre")


def is_adam(group: Mapping[str, Any]) -> bool:
    """Whether the direction is Adam's in the eigenbasis, with ε for damping."""
    return like_adam(group) and group["power"] == 0.5
