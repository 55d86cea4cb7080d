r"""Blocks with a scale in the eigenbases of their factors, ``F = (Q_G ⊗ Q_A) diag(vec s) (Q_G ⊗ Q_A)ᵀ``.

The scale s is measured in the bases, so it is correct even if the bases are only approximate::

    estimator="intra"      squares of per-example gradients, which a statistic sums
    estimator="running"    squares of the mean gradient, which preconditioning rotates anyway

When a refresh computes other bases, the scale is transferred from the last ones or measured again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from secondorder import options
from secondorder.capture.sites import Statistic
from secondorder.capture.statistics import averages
from secondorder.capture.statistics.call import Call
from secondorder.capture.statistics.measurement import Estimate, Measured
from secondorder.capture.statistics.squares import EigenSums, ScaleSums
from secondorder.curvature.block import ESTIMATE_ALONE, Due
from secondorder.curvature.extremes import Extremes, of_values
from secondorder.curvature.inverse import adopt_tensor
from secondorder.curvature.kronecker import FactoredBlock
from secondorder.curvature.schema import COUNTER, Entry, Place, Schema, shaped, tensors
from secondorder.linalg import eigenbasis
from secondorder.linalg.dense import full_precision, precision_of

#: State of a block with a scale, in addition to its factors. Everything for the scale is on the ranks with the scale.
SCALES: Schema = {
    "off_diagonal": Entry(0, "buffers", Place.CURVATURE),
    "scale": Entry(0, "scale", Place.CURVATURE),
    "scale_weight": Entry(0, "buffers", Place.CURVATURE),
    "scale_unit": Entry(0, "buffers", Place.CURVATURE),
    "scale_updates": COUNTER,
    "scale_step": COUNTER,
    "gradient_momentum": Entry(0, "momentum", Place.OWN),
    "gradient_updates": Entry(0, "momentum", Place.OWN),
}


def preconditions_gradient(group: Mapping[str, Any]) -> bool:
    """Whether the gradient itself is preconditioned, and not a running mean of gradients."""
    return bool(not options.is_adam(group["graft"]) and group["momentum_mode"] == "post")


def like_adam(group: Mapping[str, Any]) -> bool:
    """Whether the scale is that of the mean gradient, so that steps have Adam's size for every batch size."""
    return bool(group["estimator"] == "running" and group["momentum_mode"] == "pre")


def is_adam(group: Mapping[str, Any]) -> bool:
    """Whether the direction is Adam's in the eigenbasis, with ε as its damping."""
    return like_adam(group) and group["power"] == 0.5


class EigenbasisBlock(FactoredBlock):
    """``F = (Q_G ⊗ Q_A) diag(vec s) (Q_G ⊗ Q_A)ᵀ``, with a running scale s."""

    #: The gradient of this step in the eigenbases, between the measurement of the scale and the direction.
    rotated: Tensor | None = None
    #: Whether the last refresh succeeded, as a 0-dim bool tensor.
    adopted: Tensor

    # ------------------------------------------------------------------ what the state holds
    def schema(self, group: Mapping[str, Any], state: Mapping[str, Any]) -> Schema:
        """Entries for the factors, the bases, the scale and the counters."""
        bases = self.eigen.schema(group)
        if group["estimator"] == "intra":  # gradients are measured in the bases wherever they are captured
            measured = {key: entry for key, entry in bases.items() if key.startswith("basis_")}
            bases |= {key: entry._replace(place=Place.MEASURED) for key, entry in measured.items()}
        if group["basis_update"] == "qr":
            bases |= shaped(SCALES, {"off_diagonal": self.layer.empty((2,))})
        weight = self.layer.empty((), torch.float64)
        found = self.scale_sums() | shaped(SCALES, {"scale_weight": weight, "scale_updates": 0})
        if group["decay_per_step"]:
            found |= shaped(SCALES, {"scale_step": max(self.runtime.step - 1, 0)})
        if group["transport"] == "kfac":
            found |= shaped(SCALES, {"scale_unit": weight})
        return self.factor_schema(group) | bases | found

    def momentum_schema(self, p: nn.Parameter, group: Mapping[str, Any]) -> Schema:
        """Entries for the running mean of the gradients of one of the parameters, if that is preconditioned."""
        if group["momentum_mode"] != "pre":
            return {}
        return shaped(SCALES, {"gradient_momentum": self.layer.empty(p.shape, precision_of(p)), "gradient_updates": 0})

    def scale_sums(self) -> Schema:
        """The entry for the scale, in the form in which ranks sum their measurements."""
        return shaped(SCALES, {"scale": self.layer.empty(self.layer.matrix_shape)})

    # ------------------------------------------------------------------ statistics
    def statistic(self, due: Due = ESTIMATE_ALONE) -> EigenSums:
        """Empty sums for the measurements that are due."""
        factors = self.new_sums() if due.factors else None
        scales = self.new_scales() if due.scale and not due.keeps_calls else None
        return EigenSums(factors, scales, self.group["estimator"] == "intra", due.keeps_calls)

    def new_scales(self, calls: Sequence[tuple[list[Call], int]] = ()) -> ScaleSums:
        """Return sums for the scale in the current bases, which begin with stored calls of some forward passes.

        Raises:
            ValueError: If the rows of a call cannot be assigned to examples.
        """
        group, generator = self.group, None
        like = torch.empty_like(tensors(self.scale_sums())["scale"], device=self.owner.device)
        if group["scale_batch_size"] is not None:
            generator = torch.Generator().manual_seed(self.runtime.seed(self.runtime.blocks + self.index))
        bases = self.basis("a"), self.basis("g")
        sums = ScaleSums(self.adapter, like, *bases, group["token_is_example"], group["scale_batch_size"], generator)
        for some, count in calls:
            sums.add(some, count)
        return sums

    def sums(self, due: Due = ESTIMATE_ALONE) -> Schema:
        """Entries for the factors and for the scale, as far as they are due."""
        found = self.factors.sums(self.group) if due.factors else {}
        return found | self.scale_sums() if due.scale else found

    def measure(self, statistic: Statistic, examples: int) -> Measured:
        """The factors and the scale of this rank's batch, scaled per datum."""
        sums, parts = cast(EigenSums, statistic), dict[str, Estimate]()
        sums.examples = examples
        if sums.factors is not None:
            parts |= self.measured_factors(sums.factors, examples)
        if sums.scales is not None:
            parts["scale"] = self._measured_scale(sums.scales, examples)
        return Measured(parts, examples, sums)

    def measure_calls(self, sums: EigenSums) -> Measured:
        """The scale of stored calls in the current bases, with the errors of :meth:`new_scales`."""
        scales, examples = self.new_scales(sums.calls), sums.examples
        return Measured({"scale": self._measured_scale(scales, examples)}, examples, sums)

    def _measured_scale(self, sums: ScaleSums, examples: int) -> Estimate:
        reduction = self.group["loss_reduction"]
        if self.fisher.is_observed:
            return Estimate(sums.total, self.gradient_scale(examples), self.data(examples))
        total, factor = sums.per_datum(reduction, examples)
        terms = self.group["loss_terms"] if reduction == "mean" else 1.0
        return Estimate(total, factor * terms, sums.data(examples))

    # ------------------------------------------------------------------ into the estimate
    def fold(self, measured: Measured, gate: Tensor | None) -> Tensor:
        """Update the running factors and the scale with those of a batch, and return whether they were finite."""
        finite = torch.tensor(True)
        if "factor_a" in measured.parts:
            finite = self.fold_factors(measured, gate)
        if "scale" in measured.parts and "scale" in self.state:
            part = measured.parts["scale"]
            fine = averages.all_finite([part.total])
            weight = self.batch_weight(measured.examples)
            self.fold_scale(self.state, part, weight, fine if gate is None else fine & gate)
            finite = finite & fine
        return finite

    def replace_scale(self, measured: Measured, ok: Tensor) -> None:
        """Start the running scale again from one batch where ``ok`` is True."""
        self.state["scale_weight"].mul_(~ok)
        self.fold_scale(self.state, measured.parts["scale"], self.batch_weight(measured.examples), ok)

    def fold_gradient(self, matrix: Tensor, examples: float, ranks: int, gate: Tensor | None) -> Tensor:
        """Update the scale with the square of the mean gradient, without any work per example.

        Args:
            matrix: The gradient as a matrix ``[(Γ,) n_g, n_a]``.
            examples: Number of examples that the gradient averages.
            ranks: Number of ranks over which a summed loss was averaged.
            gate: None, or a 0-dim bool tensor. If it is False, nothing changes.

        Returns:
            The gradient in the eigenbases.
        """
        with full_precision(self.owner.device):
            rotated = eigenbasis.rotate(matrix, self.basis("a"), self.basis("g"), self.runtime.workspace).clone()
        ok = averages.all_finite([rotated])
        factor, weight = square_weights(self, examples, ranks)
        self.fold_scale(self.state, Estimate(rotated.square(), factor), weight, ok if gate is None else ok & gate)
        return rotated

    def fold_scale(self, state: Mapping[str, Any], part: Estimate, weight: float, ok: Tensor) -> None:
        """Update the running scale where ``ok`` is True.

        Args:
            state: The state of the block, or stacks ``[k, ...]`` of the states of blocks that agree in their options.
            part: Measured squares of the shape of the scale.
            weight: Weight of the batch.
            ok: 0-dim bool tensor, or ``[k]``.
        """
        total, factor = _pooled(self, state, part.total), cast(float, part.scale)
        averages.ratio_ema_([state["scale"]], state["scale_weight"], [total], [factor], weight, scale_decay(self), ok)
        if "scale_unit" in state:
            state["scale_unit"].copy_(torch.where(ok, weight, state["scale_unit"]))

    def count_update(self, measured: Measured, due: Due) -> None:
        """Count the updates of the factors and of the scale, on whichever rank they took place."""
        if due.factors:
            self.count_factors()
        # After loading, ranks may compute the bases only after the forward pass that would have measured.
        if due.scale and (measured.seen is None or "scale" in measured.seen):
            self.count_scale()

    def count_scale(self) -> None:
        """Count an update of the scale, on whichever rank it took place."""
        self.state["scale_updates"] += 1
        self.note_step("scale_step")

    # ------------------------------------------------------------------ refresh
    @property
    def may_iterate(self) -> bool:
        """Whether the next refresh may start from the last bases."""
        group, refreshes = self.group, self.state["refreshes"]
        return bool(group["basis_update"] == "qr" and refreshes > 0 and refreshes % group["full_every"] != 0)

    def restore(self, found: Mapping[str, Sequence[Tensor]], good: Tensor) -> None:
        """Adopt bases that a checkpoint left out. The scale in the checkpoint refers to these bases."""
        self.adopt(found, good, carry=False)

    def adopt(self, found: Mapping[str, Sequence[Tensor]], good: Tensor, *, carry: bool = True) -> None:
        """Adopt the results of a refresh for each side if they are good.

        Args:
            found: By side, eigenvalues, the basis of a dense factor and, after an iteration, the order of its columns.
            good: Whether both sides succeeded, as a 0-dim bool tensor.
            carry: Whether the scale is transferred to the new bases.
        """
        self.adopted = good
        state, mode = self.state, self.group["transport"]
        values = {side: found[side][0].reshape(state[f"eigenvalues_{side}"].shape) for side in "ag"}
        kept = self.factors.kept_in(self.options.storage.factor_dtype)
        for side in (side for side in "ag" if not self.is_diagonal(side)):
            values[side] = eigenbasis.without_rounding(values[side], kept)
        product = values["g"][..., :, None] * values["a"][..., None, :]
        if state["scale_updates"] == 0:
            # This is a placeholder with weight 0, which the first measurement replaces completely.
            adopt_tensor(self.state, "scale", product, good)
        elif carry and mode == "kfac":
            adopt_tensor(self.state, "scale", product, good)
            adopt_tensor(self.state, "scale_weight", state["scale_unit"], good)  # as one update
        elif carry:
            scale = state["scale"]
            moved = _in_new_order(scale, found) if mode == "none" else _in_new_bases(scale, self.basis, found)
            adopt_tensor(self.state, "scale", moved, good)
        for side in "ag":
            adopt_tensor(self.state, f"eigenvalues_{side}", values[side], good)
            for basis in found[side][1:2]:
                adopt_tensor(self.state, f"basis_{side}", basis, good)
        if carry:
            state["scale"].copy_(_pooled(self, state, state["scale"]))

    # ------------------------------------------------------------------ use
    def precondition(self, gradient: Tensor) -> Tensor:
        """``Q_G [(Q_Gᵀ ∇ Q_A) ⊘ (s + λ)^p] Q_Aᵀ``, where :attr:`rotated` replaces Q_Gᵀ ∇ Q_A if it is set."""
        return self.apply(self.state, gradient, self.rotated)

    def apply(self, state: Mapping[str, Any], gradient: Tensor, rotated: Tensor | None) -> Tensor:
        """Return the direction of a block, or of several that agree in their options.

        Args:
            state: The state of the block, or stacks ``[k, ...]`` of their states.
            gradient: Gradient matrices ``[(k,) (Γ,) n_g, n_a]``.
            rotated: The same in the eigenbases, if they are known.
        """
        group, s, adam = self.group, state["scale"], is_adam(self.group)
        mean = s.mean((-2, -1))
        damping = torch.full_like(mean, group["eps"]) if adam else self.damping_of(mean)
        storage = self.options.storage
        kept = self.factors.kept_in(storage.factor_dtype), self.factors.kept_in(storage.inv_dtype)
        return eigenbasis.precondition(
            gradient if rotated is None else rotated,
            self.eigen.basis(state, "a"),
            self.eigen.basis(state, "g"),
            s,
            damping,
            group["power"],
            self.runtime.workspace,
            damp_root=adam,
            is_rotated=rotated is not None,
            silent=eigenbasis.is_rounding(s, *_singular_values(self, state), kept) if adam else None,
        )

    def product(self, matrix: Tensor) -> Tensor:
        """``Q_G ((Q_Gᵀ X Q_A) ∘ s) Q_Aᵀ`` of a matrix ``X [(Γ,) n_g, n_a]``, undamped."""
        bases = self.basis("a"), self.basis("g")
        return eigenbasis.rotate_back(eigenbasis.rotate(matrix, *bases) * self.state["scale"], *bases)

    def dense(self) -> Tensor:
        """``(Q_G ⊗ Q_A) diag(vec s) (Q_G ⊗ Q_A)ᵀ``; block-diagonal over the groups of a grouped convolution."""
        found = eigenbasis.dense(self.state["scale"], self.basis("a"), self.basis("g"))
        if self.adapter.groups > 1:
            found = cast(Tensor, torch.block_diag(*found))
        return self.adapter.natural_order(found)

    def extremes(self) -> Extremes | None:
        """λ and the extreme entries of the damped scale; None if the scale is on other ranks."""
        s: Tensor | None = self.state.get("scale")
        if s is None:
            return None
        if is_adam(self.group):  # ε is added to the root
            return Extremes(torch.full_like(s.mean((-2, -1)), self.group["eps"]))
        return of_values(s.amin((-2, -1)), s.amax((-2, -1)), self.damping_of(s.mean((-2, -1))))

    def damping(self) -> Tensor:
        """λ of the block in its quadratic model."""
        return self.factors.tikhonov(self.state["scale"].mean((-2, -1)), self.group)


def square_weights(block: EigenbasisBlock, examples: float, ranks: int) -> tuple[float, float]:
    """Return the factor of the squares of a mean gradient, and the weight of its batch in the running scale."""
    group = block.group
    if like_adam(group):
        return 1.0, 1.0
    # The expectation is the variance of a per-example gradient plus N times its squared mean, which s has once; for a
    # summed loss, it is N (∇/N)².
    factor = examples * group["loss_terms"] if group["loss_reduction"] == "mean" else ranks**2 / examples
    return factor, block.batch_weight(int(examples))


def scale_decay(block: EigenbasisBlock) -> float:
    """Return β of the next update of the scale."""
    own = block.group["factor_decay"] if block.group["scale_decay"] is None else block.group["scale_decay"]
    return block.decay(own, block.state["scale_updates"], "scale_step")


def _singular_values(
    block: EigenbasisBlock, state: Mapping[str, Any], dimensions: int = 1
) -> tuple[Tensor | None, Tensor | None]:
    """Return eigenvalues ``[..., n]`` of A and of G if a null space of this dimension is possible.

    It is None for a factor whose null space is known to be smaller without waiting for a device, and for a diagonal
    factor, whose basis is the identity.
    """
    keys = [None if block.is_diagonal(side) else f"eigenvalues_{side}" for side in "ag"]
    found = [None if key is None else state[key] for key in keys]
    a, g = (None if x is None or _has_fewer_zeros(x, dimensions) else x for x in found)
    return a, g


def _pooled(block: EigenbasisBlock, state: Mapping[str, Any], scales: Tensor) -> Tensor:
    """Return a scale ``[..., n_g, n_a]``, averaged over the null spaces of the current factors."""
    a, g = (None if values is None else values == 0 for values in _singular_values(block, state, 2))
    return eigenbasis.pool(scales, a, g)


def _has_fewer_zeros(values: Tensor, count: int) -> bool:
    """Whether fewer than ``count`` numbers are 0, as far as the host knows without waiting for a device."""
    return values.device.type == "cpu" and bool((values.numpy() == 0).sum() < count)


def _in_new_order(scale: Tensor, found: Mapping[str, Sequence[Tensor]]) -> Tensor:
    """A scale ``[..., n_g, n_a]`` by index, permuted like the columns that an iteration has sorted."""
    for side, axis in (("a", -1), ("g", -2)):
        for order in found[side][2:3]:
            index = order.reshape(*scale.shape[:-2], -1)
            index = index[..., None, :] if axis == -1 else index[..., :, None]
            scale = scale.gather(axis, index.expand_as(scale))
    return scale


def _in_new_bases(
    scale: Tensor, basis_of: Callable[[str], Tensor | None], found: Mapping[str, Sequence[Tensor]]
) -> Tensor:
    """The diagonal, in the new bases, of the operator with a scale ``[..., n_g, n_a]`` in other bases."""
    overlaps = []
    for side in "ag":
        old, new = basis_of(side), found[side][1:2]
        overlaps.append(eigenbasis.overlap(old, new[0].reshape(old.shape)) if old is not None and new else None)
    return eigenbasis.transport(scale, *overlaps)
