"""Inverses of layers with factors A and G: the results of a refresh, and the preconditioning with them.

::

    Eigen        Q_G [(Q_Gᵀ ∇ Q_A) ⊘ (s_G s_Aᵀ + λ)^p] Q_Aᵀ     eigenvalues and bases of both factors
    Cholesky     (G + √λ/π I)⁻¹ ∇ (A + π√λ I)⁻¹                 inverses of both damped factors
    Entrywise    ∇ ⊘ (G ⊗ A + λ)                                nothing: both factors are diagonal

States and options are arguments, so that an inverse is never out of date.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from secondorder.capture.statistics import averages
from secondorder.curvature import factors
from secondorder.curvature.extremes import Extremes, of_product
from secondorder.curvature.factorization import CHOLESKY, EIGEN, Factorization, Task
from secondorder.curvature.factors import FACTORS, KroneckerFactors
from secondorder.curvature.schema import FOUND, Schema, shaped
from secondorder.linalg import eigenbasis
from secondorder.linalg.dense import Workspace

#: The factorization of a refresh if the factors are inverted separately.
INVERSES: Schema = {"inverse_a": FOUND, "inverse_g": FOUND}

State = Mapping[str, Any]
Group = Mapping[str, Any]


def adopt_tensor(state: State, key: str, found: Tensor, good: Tensor) -> None:
    """Copy a result into the state where ``good`` is True."""
    current: Tensor = state[key]
    current.copy_(torch.where(good, found.reshape(current.shape), current))


def adopt_eigenpairs(state: State, found: Mapping[str, Sequence[Tensor]], good: Tensor) -> None:
    """Copy eigenvalues and bases into the state where ``good`` is True."""
    for side, tensors in found.items():
        for key, tensor in zip(("eigenvalues", "basis"), tensors, strict=False):
            adopt_tensor(state, f"{key}_{side}", tensor, good)


def basis_of(factors: KroneckerFactors, state: State, side: str) -> Tensor | None:
    """Return the eigenvectors of a factor in the precision of products; None means the identity."""
    return factors.working(state, f"basis_{side}") if f"basis_{side}" in state else None


def splits_damping(factors: KroneckerFactors, group: Group) -> bool:
    """Whether λ is split over the two factors where eigenvalues are known."""
    split = group["damping_split"] or ("pi" if group.get("inverse_method") == "cholesky" else "exact")
    return split == "pi" and not factors.layer.adapter.is_exact


class Inverse(ABC):
    """An inverse of ``G ⊗ A + λI``, or of its factored form. A block chooses it in ``KroneckerBlock.inverse_for``.

    Args:
        factors: How the state stores A and G.
    """

    #: The results of a refresh for each factor.
    way: ClassVar[Factorization]
    #: Whether a refresh uses λ, so that a change of λ needs another refresh to take effect.
    holds_damping: ClassVar[bool] = False
    #: Whether :meth:`apply` uses the factors themselves.
    uses_factors: ClassVar[bool] = False
    #: Entries of a state and of a group that :meth:`apply` reads if it supports stacks ``[k, ...]``; otherwise empty.
    stacked: ClassVar[tuple[str, ...]] = ()
    options: ClassVar[tuple[str, ...]] = ()

    def __init__(self, factors: KroneckerFactors) -> None:
        self.factors = factors

    @abstractmethod
    def schema(self, group: Group) -> Schema:
        """Return the entries of the state for the results of a refresh."""

    def matrices(self, state: State, group: Group) -> tuple[Tensor, Tensor]:
        """Return the matrices (or diagonals) that a refresh would factorize now: A and G, damped if it uses λ."""
        return _damped(self.factors, state, group) if self.holds_damping else self.factors.pair(state, group)

    def tasks(self, state: State, group: Group, begun: bool = False) -> dict[str, Task]:
        """Return the matrices that a refresh factorizes for each side: the factors, or copies if it was ``begun``."""
        pair = (state["begun_a"], state["begun_g"]) if begun else self.matrices(state, group)
        return {
            side: Task(matrix, self.way, self.factors.is_diagonal(state, group, side))
            for side, matrix in zip("ag", pair, strict=True)
        }

    @abstractmethod
    def adopt(self, state: State, found: Mapping[str, Sequence[Tensor]], good: Tensor) -> None:
        """Adopt what a refresh has found for each side where ``good`` is True."""

    @abstractmethod
    def apply(self, state: State, group: Group, gradient: Tensor, workspace: Workspace) -> Tensor:
        """Return the preconditioned matrix ``[(Γ,) n_g, n_a]``."""

    @abstractmethod
    def extremes(self, state: State, group: Group) -> Extremes | None:
        """Return λ and the extreme eigenvalues of the inverted matrix; None if they are on other ranks."""

    def bounds(self, state: State, group: Group) -> Extremes | None:
        """Return λ and upper bounds of the largest eigenvalues, without waiting for the device."""
        return self.extremes(state, group)


class Eigen(Inverse):
    """Eigenvalues and eigenbases of the factors; λ is added to the products of the eigenvalues or split over both."""

    way = EIGEN
    stacked: ClassVar[tuple[str, ...]] = ("eigenvalues_a", "eigenvalues_g", "basis_a", "basis_g")
    options: ClassVar[tuple[str, ...]] = (
        "approx", "damping", "damping_mode", "damping_split", "inverse_method", "inverse_rank", "power",
        "weight_decay", "weight_decay_in_curvature",
    )  # fmt: skip

    def schema(self, group: Group) -> Schema:
        """Return the entries for eigenbases and eigenvalues; a diagonal factor has no basis."""
        layer, likes = self.factors.layer, dict[str, Tensor | int]()
        kept = self.factors.kept_in(self.factors.options.storage.inv_dtype)
        for name, side in self.factors.sides(group):
            if not side.diagonal:
                likes[f"basis_{name}"] = layer.empty(side.shape, kept)
            likes[f"eigenvalues_{name}"] = layer.empty((*side.lead, side.n))
        return shaped(FACTORS, likes)

    def basis(self, state: State, side: str) -> Tensor | None:
        """Return the eigenvectors of a factor in the precision of products; None means the identity."""
        return basis_of(self.factors, state, side)

    def adopt(self, state: State, found: Mapping[str, Sequence[Tensor]], good: Tensor) -> None:
        """Adopt eigenvalues and bases where ``good`` is True."""
        adopt_eigenpairs(state, found, good)

    def apply(self, state: State, group: Group, gradient: Tensor, workspace: Workspace) -> Tensor:
        """Return ``(G ⊗ A + λI)^(-p) vec(∇)``, or its factored form."""
        values_a, values_g = state["eigenvalues_a"], state["eigenvalues_g"]
        damping: Tensor | None = self.factors.damping_of(values_a.mean(-1) * values_g.mean(-1), group)
        if splits_damping(self.factors, group):
            values_a, values_g = averages.split_eigenvalues(values_a, values_g, cast(Tensor, damping))
            damping = None
        values = values_g[..., :, None] * values_a[..., None, :]
        bases = self.basis(state, "a"), self.basis(state, "g")
        return eigenbasis.precondition(gradient, *bases, values, damping, group["power"], workspace)

    def extremes(self, state: State, group: Group) -> Extremes | None:
        """Return λ and the extreme eigenvalues of the inverted matrix; None if they are on other ranks."""
        if "eigenvalues_a" not in state or "eigenvalues_g" not in state:
            return None
        values_a, values_g = state["eigenvalues_a"], state["eigenvalues_g"]
        damping = self.factors.damping_of(values_a.mean(-1) * values_g.mean(-1), group)
        found = of_product(values_a, values_g, damping)
        if not splits_damping(self.factors, group):
            return found
        values = averages.split_eigenvalues(values_a, values_g, found.damping)
        (small_a, large_a), (small_g, large_g) = (v.aminmax(dim=-1) for v in values)
        return Extremes(found.damping, small_a * small_g, large_a * large_g, found.undamped)


class Cholesky(Inverse):
    """Inverses of both factors, each with its part of λ."""

    way = CHOLESKY
    holds_damping = True
    stacked = "inverse_a", "inverse_g"

    def schema(self, group: Group) -> Schema:
        """Return the entries for the inverses."""
        layer, kept = self.factors.layer, self.factors.kept_in(self.factors.options.storage.inv_dtype)
        dense = self.factors.dense_keys("inverse", group)
        likes = {f"inverse_{name}": layer.empty(side.shape, kept) for name, side in self.factors.sides(group)}
        return shaped(INVERSES, likes, dense)

    def adopt(self, state: State, found: Mapping[str, Sequence[Tensor]], good: Tensor) -> None:
        """Adopt the inverses where ``good`` is True."""
        for side, tensors in found.items():
            adopt_tensor(state, f"inverse_{side}", tensors[0], good)

    def apply(self, state: State, group: Group, gradient: Tensor, workspace: Workspace) -> Tensor:
        """Return ``(G + √λ/π I)⁻¹ ∇ (A + π√λ I)⁻¹``."""
        inverses = self.factors.working(state, "inverse_a"), self.factors.working(state, "inverse_g")
        return averages.solve_factored(gradient, *inverses, workspace)

    def extremes(self, state: State, group: Group) -> Extremes | None:
        """Return λ alone, as the eigenvalues are not known; None if the factors are on other ranks."""
        if not self.factors.are_in(state, group):
            return None
        mean_a, mean_g = self.factors.means(state, group)
        return Extremes(self.factors.damping_of(mean_a * mean_g, group))

    def bounds(self, state: State, group: Group) -> Extremes | None:
        """Return λ and upper bounds of the largest eigenvalues, without waiting for the device."""
        found = self.extremes(state, group)
        if found is None:
            return None
        pair = self.factors.pair(state, group)
        flat = [self.factors.is_diagonal(state, group, side) for side in "ag"]
        mean_a, mean_g = (factors.mean_diagonal(*side) for side in zip(pair, flat, strict=True))
        add_a, add_g = averages.pi_damping(mean_a, mean_g, found.damping)
        # A Frobenius norm is at least the largest eigenvalue.
        a, g = (
            x.abs().amax(-1) if diagonal else torch.linalg.matrix_norm(x)
            for x, diagonal in zip(pair, flat, strict=True)
        )
        return Extremes(found.damping, largest=(a + add_a) * (g + add_g), undamped=a * g)


class Entrywise(Inverse):
    """The damped product of two diagonal factors, which is diagonal and is inverted entry by entry.

    A refresh checks that the damped factors can be inverted, as for :class:`Cholesky`, and keeps nothing.
    """

    way = CHOLESKY
    holds_damping = True
    uses_factors = True

    def schema(self, group: Group) -> Schema:
        """Return no entries."""
        return {}

    def adopt(self, state: State, found: Mapping[str, Sequence[Tensor]], good: Tensor) -> None:
        """Do nothing."""

    def apply(self, state: State, group: Group, gradient: Tensor, workspace: Workspace) -> Tensor:
        """Return ``∇ ⊘ (G ⊗ A + λ)``."""
        a, g = self.factors.pair(state, group)
        values = g[..., :, None] * a[..., None, :]
        return gradient / (values + self.factors.damping_of(values.mean((-2, -1)), group)[..., None, None])

    def extremes(self, state: State, group: Group) -> Extremes | None:
        """Return λ and the extreme entries of the damped product; None if the factors are on other ranks."""
        if not self.factors.are_in(state, group):
            return None
        a, g = self.factors.pair(state, group)
        return of_product(a, g, self.factors.damping_of(a.mean(-1) * g.mean(-1), group))


def _damped(kept: KroneckerFactors, state: State, group: Group) -> tuple[Tensor, Tensor]:
    """``A + π√λ I`` and ``G + √λ/π I``: both factors, each with its part of λ."""
    a, g = kept.pair(state, group)
    flat_a, flat_g = (kept.is_diagonal(state, group, side) for side in "ag")
    mean_a, mean_g = factors.mean_diagonal(a, flat_a), factors.mean_diagonal(g, flat_g)
    damping = kept.damping_of(mean_a * mean_g, group)
    is_exact = kept.layer.adapter.is_exact
    add_a, add_g = (0 * damping, damping) if is_exact else averages.pi_damping(mean_a, mean_g, damping)
    return averages.add_to_diagonal(a, add_a, flat_a), averages.add_to_diagonal(g, add_g, flat_g)
