"""Kronecker factors A and G of a layer: dense matrices ``[(Γ,) n, n]``, or diagonals ``[(Γ,) n]``.

A factor is naturally diagonal if its rows are one-hot (A of an embedding), and by choice above ``max_factor_dim``. A
dense factor may be stored as a triangle. Both forms may be stored in a lower precision than that of products.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from secondorder.capture.layers.adapter import Adapter
from secondorder.capture.statistics import averages
from secondorder.capture.statistics.measurement import Estimate
from secondorder.curvature.background import DEVICES
from secondorder.curvature.layer import Layer, LayerOptions
from secondorder.curvature.schema import COUNTER, COUNTERS, ESTIMATE, FOUND, WEIGHT, Schema, shape_of, shaped, tensors
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

#: Largest size of a factor that is dense by default on a CPU, by its factorization. Each takes about a second
#: on two cores, and eight times as long for twice the size (``python -m benchmarks measure linalg``).
_CPU_BOUNDS = {"eigen": 2048, "cholesky": 4096, "leading": 4096}
#: The same for other devices, which factorize faster. It is also the largest size whose diagonal form is reported.
WIDEST = 8192


def default_bound(device_type: str, way: str) -> int:
    """The limit for ``max_factor_dim="auto"``, which does not depend on measurements, so it is equal on all ranks."""
    return _CPU_BOUNDS.get(way, WIDEST) if device_type == "cpu" else WIDEST


class Side(NamedTuple):
    """Form of one factor of a layer.

    Attributes:
        n: Size.
        lead: ``(Γ,)``, or ``()`` for a single block.
        diagonal: Whether only the diagonal is kept.
        by_nature: Whether all entries off the diagonal of the factor are zero.
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
    """Forms of A and G of a layer. Neither is dense above ``max_dim``."""
    lead = (adapter.groups,) if adapter.groups > 1 else ()

    def side(n: int, by_nature: bool) -> Side:
        return Side(n, lead, by_nature or (max_dim is not None and n > max_dim), by_nature)

    return side(adapter.n_a, adapter.one_hot), side(adapter.n_g, False)


def is_diagonal(factor: Tensor, adapter: Adapter) -> bool:
    """Whether a factor of a layer is stored as its diagonal."""
    return factor.dim() == 1 + (adapter.groups > 1)


def is_truncated(side: Side, rank: int | None) -> bool:
    """Whether only ``rank`` leading eigenvectors of a factor are found."""
    return rank is not None and not side.diagonal and side.n > 2 * rank


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


class Storage(ABC):
    """Storage of a dense factor, ``"a"`` or ``"g"``, in a state. A block selects it with the attribute ``storage``."""

    @abstractmethod
    def entries(self, name: str, like: Tensor) -> Schema:
        """Return the entries for a factor like a ``meta`` tensor ``[(Γ,) n, n]``, whose dtype is ``factor_dtype``."""

    @abstractmethod
    def read(self, state: Mapping[str, Any], name: str, like: Tensor) -> Tensor:
        """Return the stored factor in the shape and precision of ``like``, which may be the tensor of the state."""

    @abstractmethod
    def write(self, state: Mapping[str, Any], name: str, factor: Tensor) -> None:
        """Store a factor ``[(Γ,) n, n]``, or the result of :meth:`alike` after changing it in place."""

    def alike(self, state: Mapping[str, Any], name: str, total: Tensor) -> tuple[Tensor, Tensor]:
        """Return the stored factor and one of a batch ``[(Γ,) n, n]``, both in the form in which they are averaged."""
        return self.read(state, name, total), total


class Plain(Storage):
    """One tensor of the shape of the factor.

    Args:
        symmetric: Whether it consists of matrices ``[(Γ,) n, n]``; otherwise, it is a diagonal ``[(Γ,) n]``.
    """

    def __init__(self, symmetric: bool) -> None:
        self.symmetric = symmetric

    def entries(self, name: str, like: Tensor) -> Schema:
        """Return the entry for the factor."""
        return {f"factor_{name}": ESTIMATE._replace(like=like, symmetric=self.symmetric)}

    def read(self, state: Mapping[str, Any], name: str, like: Tensor) -> Tensor:
        """Return the factor."""
        factor: Tensor = state[f"factor_{name}"]
        return factor.to(like.dtype)

    def alike(self, state: Mapping[str, Any], name: str, total: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tensor of the state and the factor of the batch."""
        return state[f"factor_{name}"], total

    def write(self, state: Mapping[str, Any], name: str, factor: Tensor) -> None:
        """Copy the factor unless it is the tensor of the state."""
        if factor is not state[f"factor_{name}"]:
            state[f"factor_{name}"].copy_(factor)


class Packed(Storage):
    """Triangles of the matrices, ``[(Γ,) n(n+1)/2]``."""

    def entries(self, name: str, like: Tensor) -> Schema:
        """Return the entry for the triangles."""
        shape = (*like.shape[:-2], triangles.triangle(like.shape[-1]))
        return {f"packed_{name}": ESTIMATE._replace(like=like.new_empty(shape))}

    def read(self, state: Mapping[str, Any], name: str, like: Tensor) -> Tensor:
        """Return the matrices."""
        packed: Tensor = state[f"packed_{name}"]
        matrix = torch.empty(like.shape, dtype=like.dtype, device=packed.device)
        triangles.unpack(packed.contiguous(), matrix)
        return matrix

    def alike(self, state: Mapping[str, Any], name: str, total: Tensor) -> tuple[Tensor, Tensor]:
        """Return the triangles of both, so that no matrix is unpacked."""
        packed: Tensor = state[f"packed_{name}"]
        batch = torch.empty_like(packed, dtype=total.dtype)
        triangles.pack(total, batch)
        return packed, batch

    def write(self, state: Mapping[str, Any], name: str, factor: Tensor) -> None:
        """Copy the triangles unless they are those of the state."""
        if factor is not state[f"packed_{name}"]:
            triangles.pack(factor, state[f"packed_{name}"])


#: By name: full matrices, or triangles if they are packed.
STORAGES: dict[str, Storage] = {"dense": Plain(symmetric=True), "packed": Packed()}
#: A diagonal factor is stored without conversion.
_DIAGONAL = Plain(symmetric=False)


class KroneckerFactors:
    """Storage of A and G in the state of a layer. States and options are arguments, so they are never out of date.

    Args:
        layer: The layer.
        options: The options that are the same for all layers.
        storage: How dense factors are stored.
    """

    def __init__(self, layer: Layer, options: LayerOptions, storage: Storage) -> None:
        self.layer, self.options, self.storage = layer, options, storage
        self._likes: dict[tuple[tuple[int, ...], torch.dtype], Tensor] = {}

    def storage_of(self, side: Side) -> Storage:
        """The storage of one factor."""
        return _DIAGONAL if side.diagonal else self.storage

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
        found = self.entries(group) | COUNTERS
        if group["decay_per_step"]:
            found |= shaped(FACTORS, {"factor_step": step})
        return found | self.begun(group) if self.options.overlap else found

    def entries(self, group: Mapping[str, Any]) -> Schema:
        """Entries for the stored factors."""
        found, kept = Schema(), self.kept_in(self.options.storage.factor_dtype)
        for name, side in self.sides(group):
            found |= self.storage_of(side).entries(name, self.layer.empty(side.shape, kept))
        return found

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
        form = dict(self.sides(group))[side]
        key = form.shape, self.layer.precision
        if key not in self._likes:
            self._likes[key] = self.layer.empty(form.shape)
        return self.storage_of(form).read(state, side, self._likes[key])

    def pair(self, state: Mapping[str, Any], group: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Both running factors, as :meth:`whole` returns them."""
        return self.whole(state, group, "a"), self.whole(state, group, "g")

    def means(self, state: Mapping[str, Any], group: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Mean eigenvalues of both running factors."""
        a, g = (mean_diagonal(self.whole(state, group, s), self.is_diagonal(state, group, s)) for s in "ag")
        return a, g

    def working(self, state: Mapping[str, Any], key: str) -> Tensor:
        """A tensor of the state in the precision of products. It is not copied if it is stored in this precision."""
        kept: Tensor = state[key]
        return kept.to(self.layer.precision)

    def are_in(self, state: Mapping[str, Any], group: Mapping[str, Any]) -> bool:
        """Whether the running factors are on this rank."""
        return self.entries(group).keys() <= state.keys()

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
        mean_value = self.layer.adapter.damping_reference(mean_value, group["approx"])
        return averages.effective_damping(group["damping"], group["damping_mode"], mean_value)

    # ------------------------------------------------------------------ what changes a state
    def fold(
        self,
        state: Mapping[str, Any],
        group: Mapping[str, Any],
        batch: Mapping[str, Estimate],
        weight: float,
        decay: float,
        good: Tensor,
    ) -> None:
        """Update the running factors with those of a batch of some weight where ``good`` is True."""
        storages = {name: self.storage_of(side) for name, side in self.sides(group)}
        pairs = [storage.alike(state, name, batch[name].total) for name, storage in storages.items()]
        running, totals = [kept for kept, _ in pairs], [total for _, total in pairs]
        scales = [cast(float, batch[name].scale) for name in storages]
        averages.ratio_ema_(running, state["factor_weight"], totals, scales, weight, decay, good)
        for (name, storage), factor in zip(storages.items(), running, strict=True):
            storage.write(state, name, factor)

    def in_own_form(self, theirs: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
        """Return a loaded state with its factors in the form in which this optimizer stores them.

        It has copies under factorization only if refreshes overlap.
        """
        found = dict(theirs)
        for name, side in self.sides(group):
            if not side.diagonal:
                self._convert(found, name, self.layer.empty(side.shape))
        if not self.options.overlap:
            return {k: v for k, v in found.items() if k not in _BEGUN}
        if "factor_updates" in found and found.keys().isdisjoint(_BEGUN):
            device, entries = self.layer.owner.device, self.begun(group).items()
            likes = {key: entry.like for key, entry in entries}
            found |= {k: torch.zeros_like(v, device=device) if isinstance(v, Tensor) else v for k, v in likes.items()}
        return found

    def _convert(self, found: dict[str, Any], name: str, like: Tensor) -> None:
        """Replace a dense factor of a loaded state that another storage has written."""
        ours = self.storage.entries(name, like)
        for other in STORAGES.values():
            ((key, entry),) = other.entries(name, like).items()
            given = found.get(key)
            if key in ours or not isinstance(given, Tensor) or shape_of(given) != entry.shape:
                continue
            matrix = other.read(found, name, like.to(given.dtype))
            empty = self.storage.entries(name, like.to(given.dtype))
            found |= {k: torch.zeros_like(like, device=given.device) for k, like in tensors(empty).items()}
            self.storage.write(found, name, matrix)
            del found[key]


def without_block(theirs: Mapping[str, Any], options: LayerOptions, known: Container[str]) -> dict[str, Any]:
    """Return the loaded state of a parameter that owns no block, converted; ``known`` are the keys of factors.

    Factors that this optimizer stores in another form are left out, together with everything derived from them. They
    are estimated again when the parameter is trained.
    """
    other = "dense" if options.storage.packed else "packed"
    in_other_form = other in {form_of(k, v) for k, v in theirs.items()}
    dropped = [k for k in theirs if (in_other_form and k in known) or (k in _BEGUN and not options.overlap)]
    return {k: v for k, v in theirs.items() if k not in dropped}


def form_of(key: str, value: Any) -> str:
    """The form of a factor in the state, ``"packed"`` or ``"dense"``; ``""`` for any other tensor."""
    if key.startswith("packed_"):
        return "packed"
    square = isinstance(value, Tensor) and value.dim() > 1 and value.shape[-1] == value.shape[-2]
    return "dense" if square and key in ("factor_a", "factor_g") else ""
