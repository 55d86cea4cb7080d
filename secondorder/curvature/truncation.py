"""Inverses from the leading eigenvectors of wide factors; see :mod:`secondorder.linalg.eigenpairs` for the mathematics.

An optimizer with ``rank=`` has one for each layer with a wide factor. A direction costs ``8 r n_g n_a`` FLOPs, and not
``4 (n_g + n_a) n_g n_a``, and a refresh multiplies by ``r`` columns instead of decomposing the matrix. A factor with at
most ``2 r`` rows keeps all its eigenvectors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from secondorder.capture.statistics import averages
from secondorder.curvature.extremes import Extremes, of_product
from secondorder.curvature.factorization import EIGEN, Factorization, Task
from secondorder.curvature.factors import FACTORS, is_truncated
from secondorder.curvature.inverse import Eigen, Group, Inverse, State, adopt_eigenpairs, basis_of, splits_damping
from secondorder.curvature.schema import Schema, shaped
from secondorder.linalg import eigenbasis, eigenpairs
from secondorder.linalg.dense import Workspace


@lru_cache
def _leading(rank: int) -> Factorization:
    """Return one factorization for each rank, so that matrices of one rank and size are factorized together."""
    return EIGEN._replace(dense=partial(_dense, rank))


def _dense(rank: int, stack: Tensor, host_checks: bool) -> tuple[Tensor, ...]:
    return eigenpairs.leading_eigh(stack, rank, host_checks)


class Truncated(Inverse):
    """The leading eigenvectors of each factor that is wide; the other eigenvalues are replaced by their mean."""

    way = EIGEN
    stacked = Eigen.stacked
    options = Eigen.options
    #: The weights of the last step, with what they depend on.
    _last: tuple[tuple[Any, ...], Tensor, tuple[Tensor, Tensor]] | None = None

    def schema(self, group: Group) -> Schema:
        """Return the entries of whole bases, or of leading eigenvectors ``[n, r]`` and eigenvalues ``[1 + r]``."""
        layer, likes = self.factors.layer, dict[str, Tensor | int]()
        kept = self.factors.kept_in(self.factors.options.storage.inv_dtype)
        for name, side in self.factors.sides(group):
            few = is_truncated(side, group["inverse_rank"])
            if not side.diagonal:
                columns = group["inverse_rank"] if few else side.n
                likes[f"basis_{name}"] = layer.empty((*side.lead, side.n, columns), kept)
            likes[f"eigenvalues_{name}"] = layer.empty((*side.lead, 1 + group["inverse_rank"] if few else side.n))
        return shaped(FACTORS, likes)

    def adopt(self, state: State, found: Mapping[str, Sequence[Tensor]], good: Tensor) -> None:
        """Adopt eigenvalues and eigenvectors where ``good`` is True."""
        adopt_eigenpairs(state, found, good)

    def tasks(self, state: State, group: Group, begun: bool = False) -> dict[str, Task]:
        """Return what a refresh factorizes for each side, and whether it finds only the leading eigenvectors."""
        found, rank = super().tasks(state, group, begun), group["inverse_rank"]
        for name, side in self.factors.sides(group):
            if is_truncated(side, rank):
                found[name] = found[name]._replace(way=_leading(rank))
        return found

    def apply(self, state: State, group: Group, gradient: Tensor, workspace: Workspace) -> Tensor:
        """Return ``(G̃ ⊗ Ã + λI)^(-p) vec(∇)`` or its factored form, G̃ and Ã being the truncated factors."""
        weights = self._weights(state, group)
        basis_a, basis_g = (basis_of(self.factors, state, side) for side in "ag")
        forms = dict(self.factors.sides(group))
        few_a, few_g = (is_truncated(forms[side], group["inverse_rank"]) for side in "ag")
        whole = None if few_a else basis_a, None if few_g else basis_g
        rotated = eigenbasis.rotate(gradient, *whole, workspace)
        if few_a and few_g:
            assert basis_a is not None
            assert basis_g is not None
            return eigenpairs.multiply_both(rotated, basis_g, basis_a, weights, workspace)
        if few_a:
            assert basis_a is not None
            found = eigenpairs.multiply_right(rotated, basis_a, weights, workspace)
        else:
            assert basis_g is not None
            found = eigenpairs.multiply_left(rotated, basis_g, weights, workspace)
        return eigenbasis.rotate_back(found, *whole, workspace)

    def extremes(self, state: State, group: Group) -> Extremes | None:
        """Return λ and the extreme eigenvalues of the inverted matrix; None if they are on other ranks."""
        if "eigenvalues_a" not in state or "eigenvalues_g" not in state:
            return None
        damping, values_a, values_g = self._damped(state, group)
        undamped = of_product(state["eigenvalues_a"], state["eigenvalues_g"], damping)
        if not splits_damping(self.factors, group):
            return undamped
        (small_a, large_a), (small_g, large_g) = (v.aminmax(dim=-1) for v in (values_a, values_g))
        return Extremes(damping, small_a * small_g, large_a * large_g, undamped.undamped)

    def _damped(self, state: State, group: Group) -> tuple[Tensor, Tensor, Tensor]:
        """Return λ, and the eigenvalues of both factors, which contain their parts of it if it is split."""
        forms = dict(self.factors.sides(group))
        values = {side: state[f"eigenvalues_{side}"] for side in "ag"}
        mean_a, mean_g = (
            eigenpairs.mean_value(values[side], forms[side].n)
            if is_truncated(forms[side], group["inverse_rank"])
            else values[side].mean(-1)
            for side in "ag"
        )
        damping = self.factors.damping_of(mean_a * mean_g, group)
        if not splits_damping(self.factors, group):
            return damping, values["a"], values["g"]
        adds = averages.pi_damping(mean_a, mean_g, damping)
        a, g = (averages.add_to_eigenvalues(values[side], add) for side, add in zip("ag", adds, strict=True))
        return damping, a, g

    def _weights(self, state: State, group: Group) -> Tensor:
        """Return :meth:`_new_weights`, which only a refresh or another option changes."""
        values = state["eigenvalues_a"], state["eigenvalues_g"]
        chosen = tuple(group[key] for key in self.options)
        if any(isinstance(value, Tensor) for value in chosen):
            return self._new_weights(state, group)
        key = (*map(id, values), *(x._version for x in values), state.get("refreshes"), *chosen)
        if self._last is None or self._last[0] != key:
            self._last = key, self._new_weights(state, group), values  # values that are held keep their ids
        return self._last[1]

    def _new_weights(self, state: State, group: Group) -> Tensor:
        """Return the inverse of the damped products of eigenvalues, to the power p."""
        damping, values_a, values_g = self._damped(state, group)
        products = values_g[..., :, None] * values_a[..., None, :]
        if not splits_damping(self.factors, group):
            # Below rounding of the largest entry there is no curvature to divide by, only noise.
            floor = torch.maximum(damping, torch.finfo(products.dtype).eps * products.amax((-2, -1)))
            products += floor[..., None, None]
        return products.pow_(-group["power"])
