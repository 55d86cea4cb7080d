"""Bases that follow their factors: by eigendecomposition, or by orthogonal iteration from the last basis.

Where some ranks have examples of a layer and do not precondition it, every rank keeps the bases of that layer::

    owner ── Q_A, Q_G ─► all ranks, at every refresh        sums [n_g, n_a] of each rank ─► owner
"""

# bridge: verbs that take blocks with factors
# mypy: disable-error-code="override"

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from secondorder.comm import Unit
from secondorder.curvature.factorization import Found, batched, joint_ok
from secondorder.curvature.kronecker import FactoredBlock
from secondorder.curvature.kronecker_factors import FactoredPreconditioner
from secondorder.curvature.schema import COUNTER, Entry, Place, Schema, keys, shaped, tensors
from secondorder.linalg import eigenbasis
from secondorder.preconditioners.blocks import Setting

#: State of a block with a scale, beside that of its factors. What belongs to the scale is where the scale is.
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
#: Part of a factor off the diagonal of its basis above which the next QR refresh takes another sweep.
_FAR_FROM_DIAGONAL = 0.1


class BasisPreconditioner(FactoredPreconditioner):
    """Base of the methods that stay right in an approximate eigenbasis, as they measure curvature in it."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        #: What QR refreshes left off the diagonal, on its way to the host.
        self._off_diagonal: dict[FactoredBlock, Tensor] = {}
        #: Whether bases are recomputed for a checkpoint without them.
        self._loading = False
        #: Names of blocks whose bases only the ranks that precondition have, until the next step sends them: after a
        #: checkpoint was loaded, or after an estimator that had no use for them elsewhere. The same on all ranks.
        self._bases_to_send: set[str] = set()

    def basis_schema(self, block: FactoredBlock, group: Mapping[str, Any]) -> Schema:
        """Eigenbases and eigenvalues, and for QR refreshes what they left off the diagonals of A and G."""
        found = block.basis_schema(group)
        if group["estimator"] == "intra":
            bases = {k: entry for k, entry in found.items() if k.startswith("basis_")}
            found |= {k: entry._replace(place=Place.MEASURED) for k, entry in bases.items()}
        if group["basis_update"] == "qr":
            found |= shaped(SCALES, {"off_diagonal": self.zeros(block, (2,))})
        return found

    # ------------------------------------------------------------------ with other ranks
    def _is_apart(self, block: FactoredBlock) -> bool:
        """Whether some ranks have examples of a block, to be measured in its bases, without preconditioning it."""
        return block.group["estimator"] == "intra" and self.comm.captures_elsewhere(block.index)

    def _lacks_bases(self, block: FactoredBlock) -> bool:
        """Whether some ranks that need the bases of a block have yet to receive them."""
        return self._is_apart(block) and block.name in self._bases_to_send

    def _sends_measured(self, block: FactoredBlock) -> bool:
        return super()._sends_measured(block) and not self._lacks_bases(block)

    def follow(self, place: Callable[[Sequence[Unit]], None]) -> bool:
        """Find the blocks for the current parameters; see the base class."""
        changed = super().follow(place)
        names = {b.name for b in self._blocks if self._loading or b.group["estimator"] != "intra"}
        self._bases_to_send |= names
        return changed

    def _send_bases(self) -> None:
        """Send bases that were found before all ranks could have them."""
        blocks = [block for block in self._blocks if self._lacks_bases(block)]
        self._bases_to_send -= {block.name for block in blocks}  # from now on they are where they are measured in
        for block in blocks:
            state, schema = self.state[block.owner], self.basis_schema(block, block.group)
            for key in keys(schema, Place.MEASURED):
                if key not in state:
                    state[key] = torch.zeros_like(tensors(schema)[key], device=block.owner.device)
        known = [self.parcel_of(b, Place.MEASURED) for b in blocks if self.state[b.owner]["refreshes"] > 0]
        if parcels := [parcel for parcel in known if parcel.tensors]:
            self.comm.spread(parcels)

    # ------------------------------------------------------------------ refresh
    def new_bases(self, blocks: Sequence[FactoredBlock], host_checks: bool) -> dict[tuple[FactoredBlock, str], Found]:
        """Eigenvalues and bases by block and side; a third tensor is the order of columns that a QR refresh made."""
        warm = [b for b in blocks if self._is_warm(b)]
        found = self.factorised([b for b in blocks if b not in warm], host_checks)
        if warm:
            iterated = self._iterate(warm)
            if host_checks:  # a basis that lost its orthogonality starts anew
                lost = [b for b, ok in zip(warm, joint_ok(iterated, warm).cpu().numpy(), strict=True) if not ok]
                iterated.update(self.factorised(lost, host_checks))
            found.update(iterated)
        return found

    def eigenvalues_found(
        self, block: FactoredBlock, side: str, found: Mapping[tuple[FactoredBlock, str], Found]
    ) -> Tensor:
        """Eigenvalues that a refresh found, in the shape of the state; of a dense factor without their rounding."""
        values = found[block, side][0][0].reshape(self.state[block.owner][f"eigenvalues_{side}"].shape)
        if block.is_diagonal(side):
            return values
        return eigenbasis.without_rounding(values, block.factors.kept_in(self._layer_options.factor_dtype))

    def singular_values(self, block: FactoredBlock, dimensions: int = 1) -> tuple[Tensor | None, Tensor | None]:
        """Eigenvalues ``[..., n]`` of A and of G, where they have a null space.

        Args:
            block: The block.
            dimensions: The least number of dimensions of a null space that matters.

        Returns:
            None for a factor whose null space is known to be smaller without waiting for a device, and for a diagonal
            factor, whose basis is the identity.
        """
        keys = [None if block.is_diagonal(side) else f"eigenvalues_{side}" for side in "ag"]
        found = [None if key is None else self.state[block.owner][key] for key in keys]
        a, g = (None if x is None or _has_fewer_zeros(x, dimensions) else x for x in found)
        return a, g

    def pooled(self, block: FactoredBlock, scales: Tensor) -> Tensor:
        """A scale ``[..., n_g, n_a]``, averaged over the null spaces of the factors of now."""
        a, g = (None if values is None else values == 0 for values in self.singular_values(block, 2))
        return eigenbasis.pool(scales, a, g)

    def _is_warm(self, block: FactoredBlock) -> bool:
        group, refreshes = block.group, self.state[block.owner]["refreshes"]
        if group["basis_update"] != "qr" or self._loading:
            return False
        return bool(refreshes > 0 and refreshes % group["full_every"] != 0)

    def _iterate(self, blocks: Sequence[FactoredBlock]) -> dict[tuple[FactoredBlock, str], Found]:
        """Orthogonal iteration from the bases of now; a second sweep where the last one did not get close enough."""
        found: dict[tuple[FactoredBlock, str], Found] = {}
        jobs: dict[int, list[tuple[FactoredBlock, str]]] = {}
        for block in blocks:
            for side, off in zip("ag", self._left_off_diagonal(block), strict=True):
                is_far = off > _FAR_FROM_DIAGONAL
                factor = block.factor(side)
                if block.is_diagonal(side):
                    found[block, side] = (factor.clamp(min=0),), torch.isfinite(factor).all()
                else:
                    jobs.setdefault(2 if is_far else 1, []).append((block, side))
        for sweeps, members in jobs.items():
            pairs = [torch.cat([b.factor(side), b.working(f"basis_{side}")], -2) for b, side in members]
            results = batched(pairs, lambda stack, sweeps=sweeps: _sweep(stack, sweeps))  # type: ignore[misc]
            for (block, side), ((values, basis, order, off), ok) in zip(members, results, strict=True):
                found[block, side] = (values, basis, order), ok
                self.state[block.owner]["off_diagonal"]["ag".index(side)] = off.max()
        for block in blocks:
            self._off_diagonal[block] = self.state[block.owner]["off_diagonal"].to("cpu", non_blocking=True)
        return found

    def _left_off_diagonal(self, block: FactoredBlock) -> Any:
        """What the last QR refresh left off the diagonals of A and G; arrived long ago, or loaded just now."""
        arrived = self._off_diagonal.get(block)
        return (self.state[block.owner]["off_diagonal"].cpu() if arrived is None else arrived).numpy()

    # ------------------------------------------------------------------ checkpoints
    @contextmanager
    def while_loading(self) -> Iterator[None]:
        """Compare a checkpoint with schemas in which bases that the owners will send may be missing."""
        before, self._bases_to_send = self._bases_to_send, {block.name for block in self._blocks}
        try:
            yield
        finally:
            self._bases_to_send = before

    def _renew_loaded(self, blocks: list[FactoredBlock]) -> Tensor:
        self._loading = True
        try:
            return super()._renew_loaded(blocks)
        finally:
            self._loading = False

    def loaded(self, rebuild: Callable[[], bool]) -> None:
        """Complete what a checkpoint may leave out; see the base class."""
        self._off_diagonal.clear()
        self._loading = True
        try:
            super().loaded(rebuild)
        finally:
            self._loading = False


def _has_fewer_zeros(values: Tensor, count: int) -> bool:
    """Whether fewer than ``count`` numbers are 0, as far as the host knows without waiting for a device."""
    return values.device.type == "cpu" and bool((values.numpy() == 0).sum() < count)


def _sweep(pairs: Tensor, sweeps: int) -> Found:
    """Factor over basis ``[k, 2n, n]`` to eigenvalues, basis, order of columns, what is off the diagonal, and ok."""
    factor, basis = pairs.chunk(2, -2)
    try:
        *results, ok = eigenbasis.qr_refresh(factor, basis, sweeps)
    except LinAlgError:  # the caller starts anew
        nothing = torch.zeros_like(factor[..., 0])
        results, ok = [nothing, basis, nothing.long(), nothing[:, 0]], nothing[:, 0].bool()
    return tuple(results), ok
