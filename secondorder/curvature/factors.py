"""Kronecker factors A and G of a layer: dense matrices ``[(Γ,) n, n]``, or diagonals ``[(Γ,) n]``.

A factor is diagonal by nature when rows are one-hot (an embedding's A), and by decision beyond ``max_factor_dim``. A
dense one may be kept as its triangle, and either in fewer bits than products are taken in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from secondorder.capture.layers.adapter import Adapter
from secondorder.curvature.background import DEVICES
from secondorder.curvature.layer import Layer, LayerOptions
from secondorder.curvature.schema import COUNTER, COUNTERS, ESTIMATE, FOUND, WEIGHT, Schema, shaped
from secondorder.linalg import triangles

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

#: The widest side that is dense by default on a CPU, by what a refresh does with it: either takes about a second of two
#: cores there, and eight times as long for twice the side (``python -m benchmarks linalg``).
_CPU_BOUNDS = {"eigen": 2048, "cholesky": 4096}
#: The same on other devices, which factorise faster; and the widest that is worth a word where it is not dense.
WIDEST = 8192


def default_bound(device_type: str, way: str) -> int:
    """``max_factor_dim="auto"``: the same on every rank, since it depends on nothing that is measured in a run.

    Args:
        device_type: Where the factors are.
        way: ``"eigen"`` or ``"cholesky"``.

    Returns:
        The bound.
    """
    return _CPU_BOUNDS.get(way, WIDEST) if device_type == "cpu" else WIDEST


class Side(NamedTuple):
    """Form of one factor of a layer.

    Attributes:
        n: Size.
        lead: ``(Γ,)``, or ``()`` for a single block.
        diagonal: Whether only the diagonal is kept.
        by_nature: Whether the factor has nothing off its diagonal.
    """

    n: int
    lead: tuple[int, ...]
    diagonal: bool
    by_nature: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the factor."""
        return (*self.lead, self.n) if self.diagonal else (*self.lead, self.n, self.n)


def sides(adapter: Adapter, max_dim: int | None) -> tuple[Side, Side]:
    """Forms of A and G of a layer, neither being dense beyond ``max_dim``."""
    lead = (adapter.groups,) if adapter.groups > 1 else ()

    def side(n: int, by_nature: bool) -> Side:
        return Side(n, lead, by_nature or (max_dim is not None and n > max_dim), by_nature)

    return side(adapter.n_a, adapter.one_hot), side(adapter.n_g, False)


def is_diagonal(factor: Tensor, adapter: Adapter) -> bool:
    """Whether a factor of a layer is stored as its diagonal."""
    return factor.dim() == 1 + (adapter.groups > 1)


def mean_diagonal(factor: Tensor, diagonal: bool) -> Tensor:
    """Mean eigenvalue ``tr X / n`` of a factor, ``[...]``."""
    return factor.mean(-1) if diagonal else factor.diagonal(dim1=-2, dim2=-1).mean(-1)


def as_dense(factor: Tensor, diagonal: bool) -> Tensor:
    """The factor as a matrix ``[..., n, n]``."""
    return torch.diag_embed(factor) if diagonal else factor


def kron(a: Tensor, g: Tensor) -> Tensor:
    """``G ⊗ A`` of matrices ``[(Γ,) n, n]``; block-diagonal over Γ."""
    if a.dim() == 2:
        return torch.kron(g.contiguous(), a.contiguous())
    return torch.block_diag(*(torch.kron(g_i, a_i) for g_i, a_i in zip(g, a, strict=True)))  # type: ignore[no-any-return]


def times(x: Tensor, factor: Tensor, *, left: bool) -> Tensor:
    """``factor · x`` (left) or ``x · factor`` of matrices ``x [(Γ,) n_g, n_a]``, the factor dense or diagonal."""
    if factor.dim() < x.dim():
        return x * (factor[..., :, None] if left else factor[..., None, :])
    return factor @ x if left else x @ factor


class KroneckerFactors:
    """How the state of a layer keeps A and G. States and options are arguments: nothing here can be out of date.

    Args:
        layer: The layer.
        options: What is chosen for all layers.
    """

    def __init__(self, layer: Layer, options: LayerOptions) -> None:
        self.layer, self.options = layer, options

    @property
    def packs(self) -> bool:
        """Whether dense factors are kept as triangles."""
        return self.options.factor_storage == "packed"

    def sides(self, group: Mapping[str, Any]) -> Iterator[tuple[str, Side]]:
        """``"a"`` and ``"g"``, and the forms of the two factors."""
        return zip("ag", sides(self.layer.adapter, group["max_factor_dim"]), strict=True)

    def dense_keys(self, name: str, group: Mapping[str, Any]) -> list[str]:
        """Keys of the dense ones of two matrices that go with the factors."""
        return [f"{name}_{side}" for side, form in self.sides(group) if not form.diagonal]

    def kept_in(self, dtype: torch.dtype) -> torch.dtype:
        """The precision that is meant by a choice for all layers."""
        return self.layer.precision if dtype == torch.float32 else dtype

    # ------------------------------------------------------------------ what a state holds
    def schema(self, group: Mapping[str, Any], step: int) -> Schema:
        """Factors, their counters, and copies of what is being factorised; ``step`` is that of the last update."""
        kept, likes = self.kept_in(self.options.factor_dtype), dict[str, Tensor | int]()
        for name, side in self.sides(group):
            if self.packs and not side.diagonal:
                likes[f"packed_{name}"] = self.layer.empty((*side.lead, triangles.triangle(side.n)), kept)
            else:
                likes[f"factor_{name}"] = self.layer.empty(side.shape, kept)
        found = shaped(FACTORS, likes, self.dense_keys("factor", group)) | COUNTERS
        if group["decay_per_step"]:
            found |= shaped(FACTORS, {"factor_step": step})
        return found | self.begun(group) if self.options.overlap else found

    def begun(self, group: Mapping[str, Any]) -> Schema:
        """Copies of what is being factorised, and the step in which the result is adopted."""
        if (device := self.layer.owner.device.type) not in (*DEVICES, "meta"):
            raise ValueError(f"overlap=True needs a device that does two things at a time, and {device} does not")
        copies = {f"begun_{name}": self.layer.empty(side.shape) for name, side in self.sides(group)}
        return shaped(FACTORS, {**copies, "adopt_at": 0})

    def sums(self, group: Mapping[str, Any]) -> Schema:
        """Factors of a batch, in the precision of their products."""
        likes = {f"factor_{name}": self.layer.empty(side.shape) for name, side in self.sides(group)}
        return shaped(FACTORS, likes, self.dense_keys("factor", group))

    # ------------------------------------------------------------------ the factors of a state
    def whole(self, state: Mapping[str, Any], group: Mapping[str, Any], side: str) -> Tensor:
        """A running factor as a matrix, or its diagonal, in the precision of products."""
        kept: Tensor | None = state.get(f"packed_{side}")
        if kept is None:
            factor: Tensor = state[f"factor_{side}"]
            return factor.to(self.layer.precision)
        shape = dict(self.sides(group))[side].shape
        matrix = torch.empty(shape, dtype=self.layer.precision, device=kept.device)
        triangles.unpack(kept, matrix)
        return matrix

    def are_in(self, state: Mapping[str, Any]) -> bool:
        """Whether the running factors are on this rank."""
        return all(f"factor_{side}" in state or f"packed_{side}" in state for side in "ag")

    def is_diagonal(self, state: Mapping[str, Any], group: Mapping[str, Any], side: str) -> bool:
        """Whether a factor is kept as its diagonal."""
        factor: Tensor | None = state.get(f"factor_{side}")
        if factor is None:  # on another rank
            return dict(self.sides(group))[side].diagonal
        return is_diagonal(factor, self.layer.adapter)

    def as_kept(self, state: Mapping[str, Any], side: str, total: Tensor) -> tuple[Tensor, Tensor]:
        """A running factor as it is kept, and that of a batch in the same form."""
        kept: Tensor | None = state.get(f"packed_{side}")
        if kept is None:
            return state[f"factor_{side}"], total
        packed = torch.empty_like(kept, dtype=total.dtype)
        triangles.pack(total, packed)
        return kept, packed

    def in_own_form(self, theirs: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
        """A loaded state with its factors in the form in which they are kept here."""
        found, packs = dict(theirs), self.packs
        for name, side in self.sides(group):
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


def form_of(key: str, value: Any) -> str:
    """How a tensor of the state keeps a factor: ``"packed"``, ``"dense"``, or ``""`` for anything else."""
    if key.startswith("packed_"):
        return "packed"
    square = isinstance(value, Tensor) and value.dim() > 1 and value.shape[-1] == value.shape[-2]
    return "dense" if square and key in ("factor_a", "factor_g") else ""
