"""Rows of examples where they pay, K-FAC's factors where those are cheaper, layer by layer.

A layer of d_i inputs and d_o outputs keeps R rows of S positions each if ``R S (d_i + d_o) < d_i² + d_o²`` and
``R³ < d_i³ + d_o³``; otherwise it gets factors, made of the same rows.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from secondorder.capture.sites import Statistic
from secondorder.capture.statistics import averages
from secondorder.capture.statistics.examples import ExampleRows, as_rows_matrix, second_moments
from secondorder.curvature import factors
from secondorder.curvature.block import Block
from secondorder.curvature.example_rows import Batch, Fresh, RowOptimizer
from secondorder.curvature.extremes import Extremes, bound_of_rows, bounds_where, of_product, of_rows
from secondorder.curvature.factorization import batched, pack
from secondorder.curvature.schema import COUNTER, ESTIMATE, FOUND, WEIGHT, Schema, held, likes, shaped
from secondorder.linalg import dense, eigenbasis, kernel, woodbury
from secondorder.linalg.dense import precision_of
from secondorder.preconditioners.base import Group

#: Rows of which diagnostics find eigenvalues.
_MOST_ROWS = 2048


class SubstitutingOptimizer(RowOptimizer):
    """Base of the methods that may take factors instead of rows."""

    catalog: ClassVar[Schema] = {
        **RowOptimizer.catalog,
        **dict.fromkeys(("factor_a", "factor_g"), ESTIMATE),
        "factor_weight": WEIGHT,
        **dict.fromkeys(("rows_instead", "positions_instead"), COUNTER),
        **dict.fromkeys(("basis_a", "basis_g", "eigenvalues_a", "eigenvalues_g"), FOUND),
    }

    # ------------------------------------------------------------------ what a method supplies
    @abstractmethod
    def refresh_rows(self, blocks: Sequence[Block], fresh: Mapping[Block, Fresh]) -> dict[Block, Tensor]:
        """Choose rows of this step and invert their kernel; returns by block whether that went well."""

    # ------------------------------------------------------------------ the choice
    def is_factored(self, block: Block) -> bool:
        """Whether a block has factors instead of rows."""
        return "rows_instead" in self.state[block.owner]

    def _prefers_factors(self, block: Block, group: Mapping[str, Any], rows: int, positions: int) -> bool:
        """Whether factors would take less memory or time than so many rows of so many positions."""
        adapter = block.adapter
        if not group["kfac_when_cheaper"] or adapter.is_exact or adapter.one_hot:
            return False
        memory, time = _costs(block, rows, positions)
        return memory[0] >= memory[1] or time[0] >= time[1]

    def choose_form(self, block: Block, rows: int, positions: int, are_pairs: bool) -> bool:
        """Give a block factors instead of rows, at its first refresh, if they are cheaper.

        Args:
            block: The block.
            rows: R.
            positions: S.
            are_pairs: Whether rows of inputs and of gradients were captured, and not their products.

        Returns:
            Whether such pairs are to be multiplied out.
        """
        adapter, state = block.adapter, self.state[block.owner]
        if not block.group["kfac_when_cheaper"] or state["refreshes"] > 0 or self.is_factored(block):
            return False
        if self._prefers_factors(block, block.group, rows, positions):
            self._take_factors(block, rows, positions)
            return False
        return are_pairs and not adapter.one_hot and kernel.prefers_whole(positions, adapter.n_a, adapter.n_g)

    def _take_factors(self, block: Block, rows: int, positions: int) -> None:
        """Replace the rows of a block by factors, on every rank by what it holds of them."""
        p, schema = block.owner, self._factor_schema(block, rows, positions)
        state = self.state[p]
        for key in [k for k in state if k in RowOptimizer.catalog and k not in ("factor_updates", "refreshes")]:
            del state[key]
        for key, like in likes(held(schema, self.places_here(p))).items():
            state.setdefault(key, torch.zeros_like(like, device=p.device) if isinstance(like, Tensor) else like)
        self._shapes[p] = {key: entry.shape for key, entry in schema.items()}

    # ------------------------------------------------------------------ state
    def schema(self, block: Block, group: Mapping[str, Any], held: Mapping[str, Any]) -> Schema:
        """Rows and their kernel, or factors: what is held says itself which."""
        if not held.keys().isdisjoint(("factor_a", "factor_g", "rows_instead")):
            sizes = (held.get(key) for key in ("rows_instead", "positions_instead"))
            return self._factor_schema(block, *(n if isinstance(n, int) else 0 for n in sizes))
        if self._batch_size is not None and group["approx"] == "reduce" and "refreshes" not in held:
            rows = self.planned_rows(block, group, self._batch_size)
            if self._prefers_factors(block, group, rows, 1):
                return self._factor_schema(block, rows, 1)
        return super().schema(block, group, held)

    def _factor_schema(self, block: Block, rows: int, positions: int) -> Schema:
        """Factors in place of so many rows of so many positions."""
        single = precision_of(block.owner)

        def empty(*shape: int, dtype: torch.dtype = single) -> Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        sides = factors.sides(block.adapter, None)
        found: dict[str, Tensor | int] = {
            "factor_weight": empty(dtype=torch.float64),
            "kernel_damping": empty(*sides[0].lead, dtype=torch.float64),
            "rows_instead": rows,
            "positions_instead": positions,
        }
        for name, side in zip("ag", sides, strict=True):
            found[f"factor_{name}"] = found[f"basis_{name}"] = empty(*side.shape)
            found[f"eigenvalues_{name}"] = empty(*side.lead, side.n)
        return shaped(self.catalog, found | {"factor_updates": 0, "refreshes": 0}, ["factor_a", "factor_g"])

    def is_empty(self, block: Block) -> bool:
        """Factors of a block are made in the refresh itself."""
        return False

    # ------------------------------------------------------------------ statistics and refresh
    def new_statistic(self, block: Block, group: Group) -> Statistic:
        """Nothing but what the backward pass will bring; pairs of rows where factors may be made of them."""
        undecided = group["kfac_when_cheaper"] and self.state[block.owner]["refreshes"] == 0
        statistic = super().new_statistic(block, group)
        cast(ExampleRows, statistic).as_pairs = undecided or self.is_factored(block)
        return statistic

    def _changes_layout(self, block: Block) -> bool:
        return not self.is_factored(block) and super()._changes_layout(block)

    def refresh(self, blocks: Sequence[Block], host_checks: bool) -> Tensor:
        """Renew rows and factors; a block that fails keeps its last good ones."""
        for block in blocks:
            found = self._fresh[block]
            rows = self.rank_of(block.group, self._batch_size or found.examples)
            if self.choose_form(block, rows, found.rows.g.shape[-2], found.rows.a is not None):
                self._fresh[block] = found._replace(rows=kernel.whole(found.rows))
        fresh = {block: self._fresh[block] for block in blocks}
        for block, found in fresh.items():
            whole = found.rows.a is None and not block.adapter.constant_input
            self._last_batch[block.name] = Batch(found.examples, found.rows.n, found.rows.g.shape[-2], whole)
        factored = [b for b in blocks if self.is_factored(b)]
        for block in factored:
            found = fresh[block]
            damping = self.damping_of(block, kernel.norms(found.rows).sum(-1), found.examples)
            self.fold_moments(block, list(second_moments(found.rows, found.real)), found.examples, found.ok)
            self.keep_damping(block, damping, found.ok)
        ok = self.factorise(factored, {b: fresh[b].ok for b in factored}, host_checks)
        ok |= self.refresh_rows([b for b in blocks if b not in ok], fresh)
        return torch.stack([ok[b] for b in blocks])

    def fold_moments(self, block: Block, moments: list[Tensor], examples: int, good: Tensor) -> None:
        """Fold second moments of the rows of a step into the factors of a block."""
        state, decay = self.state[block.owner], block.group["factor_decay"]
        running = [state["factor_a"], state["factor_g"]]
        averages.ratio_ema_(running, state["factor_weight"], moments, [1.0, 1.0], float(examples), decay, good)

    def keep_damping(self, block: Block, damping: Tensor, good: Tensor) -> None:
        """Take λ over that the factors are damped by."""
        kept: Tensor = self.state[block.owner]["kernel_damping"]
        kept.copy_(torch.where(good, damping, kept))

    def factorise(
        self, blocks: Sequence[Block], good: Mapping[Block, Tensor], host_checks: bool
    ) -> dict[Block, Tensor]:
        """Bring factors into their eigenbases; one that fails, or is not to be used, keeps the last ones."""
        wanted = [(b, side) for b in blocks for side in "ag"]
        stacks = batched(
            [self.state[b.owner][f"factor_{side}"] for b, side in wanted],
            lambda stack: pack(dense.eigh_psd(stack, host_checks)),
        )
        ok = dict(good)
        for (block, _), (_, fine) in zip(wanted, stacks, strict=True):
            ok[block] = ok[block] & fine
        for (block, side), ((values, basis), _) in zip(wanted, stacks, strict=True):
            for key, tensor in ((f"eigenvalues_{side}", values), (f"basis_{side}", basis)):
                current: Tensor = self.state[block.owner][key]
                current.copy_(torch.where(ok[block], tensor.reshape(current.shape), current))
        return ok

    # ------------------------------------------------------------------ directions, and what it tells
    def extremes(self, block: Block) -> Extremes | None:
        """λ of a block and the extreme eigenvalues of what is inverted; None if it is on other ranks."""
        state = self.state[block.owner]
        if self.is_factored(block):
            held = "eigenvalues_a" in state and "eigenvalues_g" in state
            damping = state.get("kernel_damping")
            return of_product(state["eigenvalues_a"], state["eigenvalues_g"], cast(Tensor, damping)) if held else None
        if "rows_g" not in state or "kernel" not in state:
            return None
        rows, inverse, damping = self.kept_rows(block), state["kernel"], state["kernel_damping"]
        if inverse.shape[-1] > _MOST_ROWS:
            return Extremes(damping.double())
        own = kernel.gram(rows) if bool(state["interpolated"]) else None
        return of_rows(inverse, own, damping, block.adapter.n_a * block.adapter.n_g)

    def bounds(self, block: Block) -> Extremes | None:
        """λ of a block, and upper bounds of the largest eigenvalues; never waits for the device."""
        state = self.state[block.owner]
        if self.is_factored(block):
            return self.extremes(block)
        if "rows_g" not in state or "kernel" not in state:
            return None
        inverse, damping = state["kernel"], state["kernel_damping"]
        sampled = bound_of_rows(inverse, None, damping)
        interpolated = bound_of_rows(inverse, kernel.gram(self.kept_rows(block)), damping)
        return bounds_where(state["interpolated"] > 0, interpolated, sampled)

    def precondition(self, block: Block, gradient: Tensor) -> Tensor:
        """``(F̂ + λI)⁻¹ vec(∇)`` by rows, or by factors."""
        if not self.is_factored(block):
            return self.precondition_rows(block, gradient)
        state = self.state[block.owner]
        values = state["eigenvalues_g"][..., :, None] * state["eigenvalues_a"][..., None, :]
        damping = state["kernel_damping"].to(values.dtype)
        found = eigenbasis.precondition(
            gradient, state["basis_a"], state["basis_g"], values, damping, 1.0, self._runtime.workspace
        )
        return found * damping[..., None, None] if block.group["normalize_damping"] else found

    def precondition_rows(self, block: Block, gradient: Tensor) -> Tensor:
        """``[V − Ĝᵀ diag(M ĵ) Â] / λ``, or without the division."""
        state, rows = self.state[block.owner], self.kept_rows(block)
        matrix = as_rows_matrix(rows, gradient)
        found = woodbury.apply(rows, state["kernel"], state["kernel_damping"], matrix).reshape(gradient.shape)
        if block.group["normalize_damping"]:
            lead = state["kernel_damping"][..., None, None] if gradient.dim() > 2 else state["kernel_damping"]
            found = found * lead.to(found.dtype)
        return found

    def curvature_of_rows(self, block: Block) -> Tensor:
        """F̂ of the rows that are kept, ``[(Γ,) n, n]``."""
        state, rows = self.state[block.owner], self.kept_rows(block)
        if bool(state["interpolated"]):
            return woodbury.curvature(rows, state["kernel"], state["kernel_damping"])
        return woodbury.second_moment(rows)

    def block_curvature(self, block: Block) -> Tensor:
        """The undamped curvature of a block as a dense matrix; block-diagonal over groups."""
        state = self.state[block.owner]
        if self.is_factored(block):
            return block.adapter.natural_order(factors.kron(state["factor_a"], state["factor_g"]))
        found = self.curvature_of_rows(block).to(precision_of(block.owner))
        return block.adapter.natural_order(torch.block_diag(*found) if found.dim() > 2 else found)

    def coverage(self, p: Any) -> tuple[str, str, str]:
        treatment, sizes, owner = super().coverage(p)
        block = self._block_of.get(p)
        if block is None:
            return treatment, sizes, owner
        state = self.state[block.owner]
        if self.is_factored(block):
            (numbers, squares), (cubes, both) = _costs(block, state["rows_instead"], state["positions_instead"])
            why = f"K-FAC, cheaper than rows: numbers {numbers:,} against {squares:,}, R³ = {cubes:,} against {both:,}"
            return f"{treatment}, {why}", f"{block.adapter.n_a}² + {block.adapter.n_g}²", owner
        if "rows_g" not in state:
            return treatment, "elsewhere", owner
        rows = self.kept_rows(block)
        positions = f"×{rows.g.shape[-2]}" if rows.g.shape[-2] > 1 else ""
        wide = f"{rows.g.shape[-1]}" if rows.a is None else f"({block.adapter.n_a} + {block.adapter.n_g})"
        lead = f"{block.adapter.groups}×" if rows.g.dim() > 3 else ""
        return treatment, f"{lead}{rows.g.shape[-3]}{positions} × {wide}", owner


def _costs(block: Block, rows: int, positions: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Numbers kept, and cubes of sizes factorised: those of rows, and those of factors."""
    d_a, d_g = block.adapter.n_a, block.adapter.n_g
    whole = kernel.prefers_whole(positions, d_a, d_g)
    numbers = rows * (d_a * d_g if whole else positions * (d_a + d_g))
    return (numbers, d_a**2 + d_g**2), (rows**3, d_a**3 + d_g**3)
