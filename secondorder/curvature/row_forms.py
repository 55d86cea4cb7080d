"""The content of the state of a layer of a row method: rows of examples and their kernel, or factors A and G.

Both forms have the same methods and no state: the state and the options are arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from secondorder.capture.layers.adapter import Adapter
from secondorder.capture.layers.embedding import EmbeddingAdapter
from secondorder.capture.statistics import averages
from secondorder.capture.statistics.examples import as_rows_matrix, keeps_indices
from secondorder.curvature import factors
from secondorder.curvature.example_rows import DOUBLE_ROWS, Kept, Sizes, inputs_of, owned
from secondorder.curvature.extremes import Extremes, bound_of_rows, bounds_where, of_product, of_rows
from secondorder.curvature.factorization import Task
from secondorder.curvature.factors import STORAGES, KroneckerFactors
from secondorder.curvature.inverse import Eigen, adopt_tensor
from secondorder.curvature.layer import Layer, LayerOptions
from secondorder.curvature.schema import COUNTER, ESTIMATE, FOUND, WEIGHT, Entry, Place, Schema, shaped
from secondorder.linalg import eigenbasis, kernel, woodbury
from secondorder.linalg.dense import Workspace, all_true_on_cpu
from secondorder.linalg.kernel import Rows

#: Every rank that has the rows knows λ and whether they were interpolated.
ROWS: Schema = {
    "rows_a": Entry(0, "rows", Place.CURVATURE),
    "rows_g": Entry(0, "rows", Place.CURVATURE),
    "kernel": Entry(0, "kernel", Place.CURVATURE),
    "kernel_damping": Entry(0, "kernel", Place.CURVATURE, known=True),
    "interpolated": Entry(0, "buffers", Place.CURVATURE, known=True),
    "factor_updates": COUNTER,
    "refreshes": COUNTER,
}
ROWS_OR_FACTORS: Schema = {
    **ROWS,
    **dict.fromkeys(("factor_a", "factor_g"), ESTIMATE),
    "factor_weight": WEIGHT,
    **dict.fromkeys(("rows_instead", "positions_instead"), COUNTER),
    **dict.fromkeys(("basis_a", "basis_g", "eigenvalues_a", "eigenvalues_g"), FOUND),
}
#: Largest number of rows for which diagnostics compute eigenvalues.
_MOST_ROWS = 2048
#: Options of K-FAC that determine how factors are stored, with their values here.
_STORAGE = {"max_factor_dim": None, "decay_per_step": False}
#: The keys of a state with factors, in order.
_WITH_FACTORS = (
    "factor_weight", "kernel_damping", "rows_instead", "positions_instead", "factor_a", "basis_a", "eigenvalues_a",
    "factor_g", "basis_g", "eigenvalues_g", "factor_updates", "refreshes",
)  # fmt: skip


class RowForm:
    """Rows of a layer, and the inverse of their damped kernel.

    Args:
        layer: The layer.
    """

    def __init__(self, layer: Layer) -> None:
        self.layer = layer

    @property
    def lead(self) -> tuple[int, ...]:
        """Leading shape of the tensors: Γ if the layer has groups."""
        groups = self.layer.adapter.row_groups
        return () if groups == 1 else (groups,)

    def schema(self, sizes: Sizes, *, known: bool = False) -> Schema:
        """Entries for rows, their kernel and the counters. ``known`` means that every rank combines the rows itself."""
        empty, r, a_shape = self._empty, sizes.rows, (sizes.rows, sizes.positions)
        likes: dict[str, Tensor | int] = {
            "rows_a": empty(a_shape, torch.int64) if sizes.by_index else empty((*a_shape, sizes.d_a)),
            "rows_g": empty((r, sizes.positions, sizes.d_g)),
            "kernel": empty((r, r), torch.float64 if r <= DOUBLE_ROWS else None),
            "kernel_damping": empty((), torch.float64),
            "interpolated": torch.empty((), dtype=torch.int64, device="meta"),
            "factor_updates": 0,
            "refreshes": 0,
        }
        found = shaped(ROWS, likes, ["kernel"])
        return found | {key: found[key]._replace(known=known) for key in ("rows_a", "rows_g")}

    def _empty(self, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        return self.layer.empty((*self.lead, *shape), dtype)

    def sizes_in(self, state: Mapping[str, Any], group: Mapping[str, Any], planned: int) -> Sizes:
        """The sizes of the rows of a state, which may be a loaded one; for a state without rows, the planned ones."""
        adapter, a, g = self.layer.adapter, state.get("rows_a"), state.get("rows_g")
        d_a, d_g = 0 if adapter.constant_input else adapter.n_a, adapter.row_width
        if not (isinstance(a, Tensor) and isinstance(g, Tensor) and g.dim() >= 3):
            return Sizes(planned, 1, d_a, d_g, keeps_indices(adapter, group["approx"]))
        # Use the sizes of the state if this block can have them; a checkpoint may belong to another model.
        by_index = isinstance(adapter, EmbeddingAdapter) and not a.is_floating_point()
        whole = not by_index and a.shape[-1] == 0
        d_g = adapter.n_g * adapter.n_a if whole and not adapter.is_exact else d_g
        return Sizes(g.shape[-3], g.shape[-2], 0 if whole else d_a, d_g, by_index)

    def rows_in(self, state: Mapping[str, Any]) -> Rows:
        """The rows of a state."""
        a, g = state["rows_a"], state["rows_g"]
        if not a.is_floating_point():
            return Rows(a, g, columns=self.layer.adapter.d_in)
        return Rows(a if a.shape[-1] else None, g)

    def adopt(self, state: dict[str, Any], kept: Kept, inverse: Tensor, good: Tensor) -> None:
        """Store rows and the inverse of their kernel if they are good."""
        rows = kept.rows
        found = {
            "rows_a": inputs_of(rows),
            "rows_g": rows.g,
            "kernel": inverse.to(torch.float64 if rows.n <= DOUBLE_ROWS else rows.g.dtype),
            "kernel_damping": kept.damping,
            "interpolated": torch.full((), int(kept.core is not None), device=rows.g.device),
        }
        same = all(state[key].shape == new.shape and state[key].dtype == new.dtype for key, new in found.items())
        if good.device.type == "cpu" or not same:  # the host has checked, since the layout changes
            if all_true_on_cpu(good.cpu()):
                state.update({key: owned(new) for key, new in found.items()})
            return
        for key, new in found.items():
            state[key].copy_(torch.where(good, new, state[key]))

    # ------------------------------------------------------------------ use
    def precondition(
        self, state: Mapping[str, Any], group: Mapping[str, Any], gradient: Tensor, workspace: Workspace
    ) -> Tensor:
        """``[V − Ĝᵀ diag(M ĵ) Â] / λ``, or the same without the division."""
        rows, damping = self.rows_in(state), state["kernel_damping"]
        matrix = as_rows_matrix(rows, gradient)
        found = woodbury.apply(rows, state["kernel"], damping, matrix).reshape(gradient.shape)
        if group["normalize_damping"]:
            lead = damping[..., None, None] if gradient.dim() > 2 else damping
            found = found * lead.to(found.dtype)
        return found

    def _curvature(self, state: Mapping[str, Any]) -> Tensor:
        """F̂ of the rows, ``[(Γ,) n, n]``."""
        rows = self.rows_in(state)
        if bool(state["interpolated"]):
            return woodbury.curvature(rows, state["kernel"], state["kernel_damping"])
        return woodbury.second_moment(rows)

    def dense(self, state: Mapping[str, Any]) -> Tensor:
        """F̂ of the rows as a dense matrix; block-diagonal over groups."""
        found = self._curvature(state).to(self.layer.precision)
        return self.layer.adapter.natural_order(torch.block_diag(*found) if found.dim() > 2 else found)

    def product(self, state: Mapping[str, Any], matrix: Tensor) -> Tensor:
        """F̂ times a matrix ``[(Γ,) n_g, n_a]``; forms F̂."""
        found = self._curvature(state).to(matrix.dtype)
        vectors = as_rows_matrix(self.rows_in(state), matrix).reshape(*found.shape[:-1], 1)
        return (found @ vectors).reshape(matrix.shape)

    def extremes(self, state: Mapping[str, Any]) -> Extremes | None:
        """λ and the extreme eigenvalues of the damped curvature; None if they are on other ranks."""
        if "rows_g" not in state or "kernel" not in state:
            return None
        rows, inverse, damping = self.rows_in(state), state["kernel"], state["kernel_damping"]
        if inverse.shape[-1] > _MOST_ROWS:
            return Extremes(damping.double())
        own = kernel.gram(rows) if bool(state["interpolated"]) else None
        return of_rows(inverse, own, damping, self.layer.adapter.n_a * self.layer.adapter.n_g)

    def bounds(self, state: Mapping[str, Any]) -> Extremes | None:
        """λ, and upper bounds of the largest eigenvalues; never waits for the device."""
        if "rows_g" not in state or "kernel" not in state:
            return None
        inverse, damping = state["kernel"], state["kernel_damping"]
        sampled = bound_of_rows(inverse, None, damping)
        interpolated = bound_of_rows(inverse, kernel.gram(self.rows_in(state)), damping)
        return bounds_where(state["interpolated"] > 0, interpolated, sampled)

    def described(self, state: Mapping[str, Any]) -> tuple[str, str]:
        """Nothing to add to the treatment of the layer, and the sizes of the rows."""
        if "rows_g" not in state:
            return "", "elsewhere"
        rows, adapter = self.rows_in(state), self.layer.adapter
        positions = f"×{rows.g.shape[-2]}" if rows.g.shape[-2] > 1 else ""
        wide = f"{rows.g.shape[-1]}" if rows.a is None else f"({adapter.n_a} + {adapter.n_g})"
        lead = f"{adapter.groups}×" if rows.g.dim() > 3 else ""
        return "", f"{lead}{rows.g.shape[-3]}{positions} × {wide}"


class FactorForm:
    """K-FAC's factors of a layer, which are computed from its rows and damped like the rows.

    Args:
        layer: The layer.
    """

    def __init__(self, layer: Layer) -> None:
        self.layer, self.factors = layer, KroneckerFactors(layer, LayerOptions(), STORAGES["dense"])
        self.eigen = Eigen(self.factors)

    def schema(self, rows: int, positions: int) -> Schema:
        """Entries for factors that replace rows of this number and size, and for their bases."""
        side = dict(self.factors.sides(_STORAGE))["a"]
        likes: dict[str, Tensor | int] = {
            "kernel_damping": self.layer.empty(side.lead, torch.float64),
            "rows_instead": rows,
            "positions_instead": positions,
        }
        found = self.factors.schema(_STORAGE, 0) | self.eigen.schema(_STORAGE) | shaped(ROWS_OR_FACTORS, likes)
        return {key: found[key] for key in _WITH_FACTORS}

    def fold(
        self, state: Mapping[str, Any], group: Mapping[str, Any], moments: list[Tensor], examples: int, good: Tensor
    ) -> None:
        """Update the factors with the second moments of the rows of a batch."""
        running, decay = [state["factor_a"], state["factor_g"]], group["factor_decay"]
        averages.ratio_ema_(running, state["factor_weight"], moments, [1.0, 1.0], float(examples), decay, good)

    def keep_damping(self, state: Mapping[str, Any], damping: Tensor, good: Tensor) -> None:
        """Store λ if it is good."""
        adopt_tensor(state, "kernel_damping", damping, good)

    def tasks(self, state: Mapping[str, Any]) -> dict[str, Task]:
        """The factors to bring into their eigenbases, by side."""
        return self.eigen.tasks(state, _STORAGE)

    # ------------------------------------------------------------------ use
    def precondition(
        self, state: Mapping[str, Any], group: Mapping[str, Any], gradient: Tensor, workspace: Workspace
    ) -> Tensor:
        """``(G ⊗ A + λI)⁻¹ vec(∇)``, times λ if the options require it."""
        values = state["eigenvalues_g"][..., :, None] * state["eigenvalues_a"][..., None, :]
        damping = state["kernel_damping"].to(values.dtype)
        found = eigenbasis.precondition(gradient, state["basis_a"], state["basis_g"], values, damping, 1.0, workspace)
        return found * damping[..., None, None] if group["normalize_damping"] else found

    def dense(self, state: Mapping[str, Any]) -> Tensor:
        """``G ⊗ A`` as a dense matrix; block-diagonal over groups."""
        a, g = self.factors.pair(state, _STORAGE)
        return self.layer.adapter.natural_order(factors.kron(a, g))

    def product(self, state: Mapping[str, Any], matrix: Tensor) -> Tensor:
        """``G X A`` of a matrix ``X [(Γ,) n_g, n_a]``."""
        a, g = self.factors.pair(state, _STORAGE)
        return factors.times(factors.times(matrix, g, left=True), a, left=False)

    def extremes(self, state: Mapping[str, Any]) -> Extremes | None:
        """λ and the extreme eigenvalues of the damped curvature; None if they are on other ranks."""
        if "eigenvalues_a" not in state or "eigenvalues_g" not in state:
            return None
        return of_product(state["eigenvalues_a"], state["eigenvalues_g"], state["kernel_damping"])

    def bounds(self, state: Mapping[str, Any]) -> Extremes | None:
        """λ and the extreme eigenvalues from the last refresh. Never waits for the device."""
        return self.extremes(state)

    def described(self, state: Mapping[str, Any]) -> tuple[str, str]:
        """The reason why the layer has factors, and their sizes."""
        adapter = self.layer.adapter
        (numbers, squares), (cubes, both) = costs(adapter, state["rows_instead"], state["positions_instead"])
        why = f", K-FAC, cheaper than rows: numbers {numbers:,} against {squares:,}, R³ = {cubes:,} against {both:,}"
        return why, f"{adapter.n_a}² + {adapter.n_g}²"


def costs(adapter: Adapter, rows: int, positions: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Numbers to store, and cubes of the sizes to factorize, for rows and for factors."""
    d_a, d_g = adapter.n_a, adapter.n_g
    whole = kernel.prefers_whole(positions, d_a, d_g)
    numbers = rows * (d_a * d_g if whole else positions * (d_a + d_g))
    return (numbers, d_a**2 + d_g**2), (rows**3, d_a**3 + d_g**3)


def factors_are_cheaper(adapter: Adapter, group: Mapping[str, Any], rows: int, positions: int) -> bool:
    """Whether a layer gets factors, since they take less memory or time than rows of this number and size."""
    if not group["kfac_when_cheaper"] or adapter.is_exact or adapter.one_hot:
        return False
    memory, time = costs(adapter, rows, positions)
    return memory[0] >= memory[1] or time[0] >= time[1]


def products_are_smaller(adapter: Adapter, positions: int) -> bool:
    """Whether per-example gradients are smaller and faster than pairs of rows with this number of positions."""
    return not adapter.one_hot and kernel.prefers_whole(positions, adapter.n_a, adapter.n_g)
