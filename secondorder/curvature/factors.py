"""Kronecker factors A and G of a layer: dense matrices ``[(Γ,) n, n]``, or diagonals ``[(Γ,) n]``.

A factor is diagonal by nature if its rows are one-hot (A of an embedding), and by choice beyond ``max_factor_dim``. A
dense factor may be stored as a triangle. Both forms may be stored in a lower precision than that of products.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from secondorder.capture.layers.adapter import Adapter
from secondorder.capture.statistics import averages
from secondorder.curvature.background import DEVICES
from secondorder.curvature.layer import Layer, LayerOptions
from secondorder.curvature.schema import COUNTER, COUNTERS, ESTIMATE, FOUND, WEIGHT, Schema, shaped
from secondorder.linalg import triangles

#: State of a block with factors and bases. It has one of the two forms of each factor, copies of what a refresh in the
#: background factorizes, and the step in which the result is adopted.
FACTORS: Schema = {
    **dict.fromkeys(("factor_a", "factor_g", "packed_a", "packed_g"), ESTIMATE),
    "factor_weight": WEIGHT,
    **dict.fromkeys(("factor_updates", "factor_step", "refreshes"), COUNTER),
    **dict.fromkeys(("basis_a", "basis_g", "eigenvalues_a", "eigenvalues_g"), FOUND),
    **dict.fromkeys(("begun_a", "begun_g"), ESTIMATE),
    "adopt_at": COUNTER,
}

#: The part of it that a refresh in the background adds.
_BEGUN = ("begun_a", "begun_g", "adopt_at")

#: Largest size of a factor that is dense by default on a CPU, by the way it is factorized. Either takes about a second
#: on two cores, and eight times as long for twice the size (``python -m benchmarks linalg``).
_CPU_BOUNDS = {"eigen": 2048, "cholesky": 4096}
#: The same for other devices, which factorize faster. It is also the largest size whose diagonal form is reported.
WIDEST = 8192


def default_bound(device_type: str, way: str) -> int:
    """The bound for ``max_factor_dim="auto"``, which no measurement decides, so that it is equal on all ranks."""
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
    """Forms of A and G of a layer; neither is dense beyond ``max_dim``."""
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
    """How the state of a layer stores A and G. States and options are arguments, so that they are never out of date.

    Args:
        layer: The layer.
        options: The options that are the same for all layers.
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
        """Keys ``{name}_a`` and ``{name}_g``, without those whose factor is diagonal."""
        return [f"{name}_{side}" for side, form in self.sides(group) if not form.diagonal]

    def kept_in(self, dtype: torch.dtype) -> torch.dtype:
        """The precision in which this layer stores tensors if the option is ``dtype``."""
        return self.layer.precision if dtype == torch.float32 else dtype

    # ------------------------------------------------------------------ what a state holds
    def schema(self, group: Mapping[str, Any], step: int) -> Schema:
        """Entries for factors, counters and copies under factorization; ``step`` is the step of the last update."""
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
        """Entries for copies under factorization, and for the step in which the result is adopted."""
        if (device := self.layer.owner.device.type) not in (*DEVICES, "meta"):
            raise ValueError(f"overlap=True needs a device that does two things at a time, and {device} does not")
        copies = {f"begun_{name}": self.layer.empty(side.shape) for name, side in self.sides(group)}
        return shaped(FACTORS, {**copies, "adopt_at": 0})

    def sums(self, group: Mapping[str, Any]) -> Schema:
        """Entries for the factors of a batch, in the precision of their products."""
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

    def pair(self, state: Mapping[str, Any], group: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Both running factors, as :meth:`whole` returns them."""
        return self.whole(state, group, "a"), self.whole(state, group, "g")

    def means(self, state: Mapping[str, Any], group: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Mean eigenvalues of both running factors."""
        a, g = (mean_diagonal(self.whole(state, group, s), self.is_diagonal(state, group, s)) for s in "ag")
        return a, g

    def working(self, state: Mapping[str, Any], key: str) -> Tensor:
        """A tensor of the state in the precision of products; not copied if it is stored in that precision."""
        kept: Tensor = state[key]
        return kept.to(self.layer.precision)

    def are_in(self, state: Mapping[str, Any]) -> bool:
        """Whether the running factors are on this rank."""
        return all(f"factor_{side}" in state or f"packed_{side}" in state for side in "ag")

    def is_diagonal(self, state: Mapping[str, Any], group: Mapping[str, Any], side: str) -> bool:
        """Whether a factor is kept as its diagonal."""
        factor: Tensor | None = state.get(f"factor_{side}")
        if factor is None:  # on another rank
            return dict(self.sides(group))[side].diagonal
        return is_diagonal(factor, self.layer.adapter)

    # ------------------------------------------------------------------ damping
    def damping_of(self, mean_value: Tensor, group: Mapping[str, Any]) -> Tensor:
        """λ for the mean eigenvalue ``mean_value [...]`` of ``G ⊗ A``, including weight decay if it is curvature."""
        damping = self.tikhonov(mean_value, group)
        return damping + group["weight_decay"] if group["weight_decay_in_curvature"] else damping

    def tikhonov(self, mean_value: Tensor, group: Mapping[str, Any]) -> Tensor:
        """λ according to the options, without weight decay."""
        if self.layer.adapter.is_exact:
            # Relative to the steepest unit, so that a unit that hardly matters does not take the longest step.
            mean_value = mean_value.amax().expand_as(mean_value)
        return averages.effective_damping(group["damping"], group["damping_mode"], mean_value)

    # ------------------------------------------------------------------ forms
    def as_kept(self, state: Mapping[str, Any], side: str, total: Tensor) -> tuple[Tensor, Tensor]:
        """A running factor as it is stored, and the factor of a batch in the same form."""
        kept: Tensor | None = state.get(f"packed_{side}")
        if kept is None:
            return state[f"factor_{side}"], total
        packed = torch.empty_like(kept, dtype=total.dtype)
        triangles.pack(total, packed)
        return kept, packed

    def in_own_form(self, theirs: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
        """Return a loaded state with its factors in the form in which this optimizer stores them.

        It has copies under factorization where refreshes overlap, and nowhere else.
        """
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
        if not self.options.overlap:
            return {k: v for k, v in found.items() if k not in _BEGUN}
        if "factor_updates" in found and found.keys().isdisjoint(_BEGUN):
            device, entries = self.layer.owner.device, self.begun(group).items()
            likes = {key: entry.like for key, entry in entries}
            found |= {k: torch.zeros_like(v, device=device) if isinstance(v, Tensor) else v for k, v in likes.items()}
        return found


def without_block(theirs: Mapping[str, Any], options: LayerOptions, known: Container[str]) -> dict[str, Any]:
    """Return the loaded state of a parameter that owns no block, converted; ``known`` are the keys of factors.

    Factors in the form in which this optimizer does not store them are left out with all that belongs to them. They are
    estimated anew when the parameter is trained.
    """
    other = "dense" if options.factor_storage == "packed" else "packed"
    in_other_form = other in {form_of(k, v) for k, v in theirs.items()}
    dropped = [k for k in theirs if (in_other_form and k in known) or (k in _BEGUN and not options.overlap)]
    return {k: v for k, v in theirs.items() if k not in dropped}


def form_of(key: str, value: Any) -> str:
    """The form of a factor in the state, ``"packed"`` or ``"dense"``; ``""`` for any other tensor."""
    if key.startswith("packed_"):
        return "packed"
    square = isinstance(value, Tensor) and value.dim() > 1 and value.shape[-1] == value.shape[-2]
    return "dense" if square and key in ("factor_a", "factor_g") else ""
