"""How factors A and G of a layer, and their bases, are kept: dense, diagonal or as triangles, in how many bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from secondorder.capture.fisher.fisher import ObservingOptimizer
from secondorder.curvature import factors
from secondorder.curvature.block import Block
from secondorder.curvature.schema import COUNTER, COUNTERS, ESTIMATE, FOUND, WEIGHT, Schema, shaped
from secondorder.lifecycle import Group
from secondorder.linalg import triangles

_Likes = dict[str, "Tensor | int"]

#: State of a block with factors and bases: of each factor one of its two forms, copies of what a refresh under way
#: factorises, and the step in which that is adopted.
FACTORS: Schema = {
    **dict.fromkeys(("factor_a", "factor_g", "packed_a", "packed_g"), ESTIMATE),
    "factor_weight": WEIGHT,
    **dict.fromkeys(("factor_updates", "factor_step", "refreshes"), COUNTER),
    **dict.fromkeys(("basis_a", "basis_g", "eigenvalues_a", "eigenvalues_g"), FOUND),
    **dict.fromkeys(("begun_a", "begun_g"), ESTIMATE),
    "adopt_at": COUNTER,
}


class KeepingFactors(ObservingOptimizer):
    """State of the methods with factors: what is kept, and the same as matrices in the precision of products."""

    catalog: ClassVar[Schema] = FACTORS

    # ------------------------------------------------------------------ state
    def factor_schema(self, block: Block, group: Mapping[str, Any]) -> Schema:
        """Factors and their counters."""
        kept, packs = self._kept_in(block, self._layer_options.factor_dtype), self._packs
        likes, sides = _Likes(), factors.named_sides(block.adapter, group["max_factor_dim"])
        for name, side in sides.items():
            if packs and not side.diagonal:
                likes[f"packed_{name}"] = self.zeros(block, (*side.lead, triangles.triangle(side.n)), kept)
            else:
                likes[f"factor_{name}"] = self.zeros(block, side.shape, kept)
        found = shaped(FACTORS, likes, factors.dense_keys("factor", sides)) | COUNTERS
        if group["decay_per_step"]:
            found |= shaped(FACTORS, {"factor_step": max(self._t - 1, 0)})
        return found

    def factor_sums(self, block: Block, group: Mapping[str, Any]) -> Schema:
        """Factors of a batch, in the precision of their products."""
        sides = factors.named_sides(block.adapter, group["max_factor_dim"])
        likes = {f"factor_{name}": self.zeros(block, side.shape) for name, side in sides.items()}
        return shaped(FACTORS, likes, factors.dense_keys("factor", sides))

    def basis_schema(self, block: Block, group: Mapping[str, Any]) -> Schema:
        """Eigenbases and eigenvalues; a diagonal factor has no basis."""
        likes, kept = _Likes(), self._kept_in(block, self._layer_options.inv_dtype)
        for name, side in factors.named_sides(block.adapter, group["max_factor_dim"]).items():
            if not side.diagonal:
                likes[f"basis_{name}"] = self.zeros(block, side.shape, kept)
            likes[f"eigenvalues_{name}"] = self.zeros(block, (*side.lead, side.n))
        return shaped(FACTORS, likes)

    def _kept_in(self, block: Block, dtype: torch.dtype) -> torch.dtype:
        """The precision that is meant by a choice for all layers."""
        return self._precision(block.owner) if dtype == torch.float32 else dtype

    def factor(self, block: Block, side: str) -> Tensor:
        """A running factor as a matrix, or its diagonal, in the precision of products."""
        kept: Tensor | None = self.state[block.owner].get(f"packed_{side}")
        if kept is None:
            return self.working(block, f"factor_{side}")
        shape = factors.sides(block.adapter, block.group["max_factor_dim"])["ag".index(side)].shape
        matrix = torch.empty(shape, dtype=self._precision(block.owner), device=kept.device)
        triangles.unpack(kept, matrix)
        return matrix

    def has_factors(self, block: Block) -> bool:
        """Whether the running factors are on this rank."""
        state = self.state[block.owner]
        return all(f"factor_{side}" in state or f"packed_{side}" in state for side in "ag")

    def working(self, block: Block, key: str) -> Tensor:
        """A tensor of the state in the precision of products: itself where it is kept in it."""
        kept: Tensor = self.state[block.owner][key]
        return kept.to(self._precision(block.owner))

    def is_diagonal(self, block: Block, side: str) -> bool:
        """Whether a factor is kept as its diagonal."""
        factor: Tensor | None = self.state[block.owner].get(f"factor_{side}")
        if factor is None:  # on another rank
            return factors.sides(block.adapter, block.group["max_factor_dim"])["ag".index(side)].diagonal
        return factors.is_diagonal(factor, block.adapter)

    def basis(self, block: Block, side: str) -> Tensor | None:
        """Eigenvectors of a factor in the precision of products, None for the identity."""
        return self.working(block, f"basis_{side}") if f"basis_{side}" in self.state[block.owner] else None

    @property
    def _packs(self) -> bool:
        """Whether dense factors are kept as triangles."""
        return self._layer_options.factor_storage == "packed"

    def as_kept(self, block: Block, side: str, total: Tensor) -> tuple[Tensor, Tensor]:
        """A running factor as it is kept, and that of a batch in the same form."""
        state = self.state[block.owner]
        kept: Tensor | None = state.get(f"packed_{side}")
        if kept is None:
            return state[f"factor_{side}"], total
        packed = torch.empty_like(kept, dtype=total.dtype)
        triangles.pack(total, packed)
        return kept, packed

    # ------------------------------------------------------------------ checkpoints
    def _checked_state(self, found: Mapping[Any, Any], groups: list[Group]) -> dict[Any, dict[str, Any]]:
        numbered = self._numbered({"param_groups": groups})
        ours = {i: self._kept_alike(p, group, found[i]) for p, i, group in numbered if i in found}
        return super()._checked_state({**found, **ours}, groups)

    def _kept_alike(self, p: Any, group: Group, theirs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Loaded factors in the form in which this optimizer keeps them."""
        block = self._block_of.get(p)
        if block is None:  # frozen: what is kept in the other form begins anew when it is unfrozen
            kept = {_form_of(k, v) for k, v in theirs.items()}
            in_other_form = ("dense" if self._packs else "packed") in kept
            return {k: v for k, v in theirs.items() if k not in self.entries} if in_other_form else theirs
        if block.owner is not p:
            return theirs
        found, packs = dict(theirs), self._packs
        for name, side in factors.named_sides(block.adapter, group["max_factor_dim"]).items():
            forms = {f"factor_{name}": side.shape, f"packed_{name}": (*side.lead, triangles.triangle(side.n))}
            other, ours = forms if packs else reversed(forms)
            given = found.get(other)
            if side.diagonal or not isinstance(given, Tensor) or tuple(given.shape) != forms[other]:
                continue
            found[ours] = given.new_empty(forms[ours])
            if packs:
                triangles.pack(given, found[ours])
            else:
                triangles.unpack(given.contiguous(), found[ours])
            del found[other]
        return found


def _form_of(key: str, value: Any) -> str:
    """How a tensor of the state keeps a factor: ``"packed"``, ``"dense"``, or ``""`` for anything else."""
    if key.startswith("packed_"):
        return "packed"
    square = isinstance(value, Tensor) and value.dim() > 1 and value.shape[-1] == value.shape[-2]
    return "dense" if square and key in ("factor_a", "factor_g") else ""
