"""Layers with rows of examples: when rows are captured and renewed, and which layers get factors instead."""

# bridge: verbs that take blocks with rows
# mypy: disable-error-code="override"

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from secondorder.capture.fisher.fisher import Observing
from secondorder.capture.sites import Captured, Statistic
from secondorder.capture.statistics.examples import second_moments
from secondorder.capture.statistics.measurement import Measured
from secondorder.comm import Unit
from secondorder.curvature.example_rows import Batch, all_finite
from secondorder.curvature.extremes import Extremes
from secondorder.curvature.factorization import factorise, joint_ok
from secondorder.curvature.layer import Layer
from secondorder.curvature.row_block import RowBlock
from secondorder.curvature.row_forms import ROWS, ROWS_OR_FACTORS, factors_are_cheaper, products_are_smaller
from secondorder.curvature.schema import Schema, held, likes
from secondorder.linalg import kernel
from secondorder.parameters import Directions, Group
from secondorder.preconditioners.blocks import Setting

#: Examples that costs of layers are compared for, where nobody said how many there are.
_EXAMPLES = 32


class RowLayers(Observing):
    """Layers that keep rows of examples, or K-FAC's factors where those are cheaper."""

    capture_interval = refresh_interval = "update_steps"
    damps_kernel = True
    catalog: ClassVar[Schema] = ROWS_OR_FACTORS
    _blocks: list[RowBlock]  # type: ignore[assignment]
    _block_of: dict[nn.Parameter, RowBlock]  # type: ignore[assignment]
    #: Examples of a step, if they were given at construction.
    _batch_size: int | None = None

    def __init__(self, setting: Setting, batch_size: int | None) -> None:
        super().__init__(setting)
        self._batch_size = batch_size
        self._gradients_now: Directions = {}
        #: What the last refresh has seen, by block: a plan supposes as much.
        self._last_batch: dict[str, Batch] = {}

    # ------------------------------------------------------------------ what a method supplies
    @abstractmethod
    def rank_of(self, group: Mapping[str, Any], examples: int, ranks: int = 1) -> int:
        """r, the rows to keep of so many examples on each of some ranks."""

    @abstractmethod
    def refresh_rows(self, blocks: Sequence[RowBlock]) -> dict[RowBlock, Tensor]:
        """Choose rows of this step and invert their kernel; returns by block whether that succeeded."""

    # ------------------------------------------------------------------ blocks
    def new_block(self, layer: Layer, index: int, group: Group) -> RowBlock:
        """The block of a layer."""
        return RowBlock(layer, index, group, self._runtime, self._fisher)

    def schema(self, block: RowBlock, group: Mapping[str, Any], held: Mapping[str, Any]) -> Schema:
        """Rows and their kernel, or factors."""
        planned = self.planned_rows(block, group, self._batch_size or 0)
        return block.schema(group, held, planned, known=self.comm.replicates)

    def sums(self, block: RowBlock) -> Schema:
        """No entries, since rows are not added up."""
        return block.sums()

    def planned_rows(self, block: RowBlock, group: Mapping[str, Any], examples: int) -> int:
        """R, the rows of a block if every rank has so many examples; 0 if it has none."""
        ranks = self.comm.sources(block.index)
        return ranks * self.rank_of(group, examples, ranks) if examples else 0

    def _unit(self, block: RowBlock) -> Unit:
        """What a strategy needs to know of a block; the sizes of rows, which change, are not compared."""
        adapter, group = block.adapter, block.group
        blocks, wide = (1, adapter.groups * adapter.n_g) if adapter.is_exact else (adapter.groups, adapter.n_g)
        r, batch = self.rank_of(group, self._batch_size or _EXAMPLES), self._batch_size or "of any size"
        return (
            super()
            ._unit(block)
            ._replace(
                signature=f"{blocks}×{wide}×{adapter.n_a} {block.layer.kind} {block.layer.precision}, batch {batch}",
                refresh_flops=float(blocks * (r**3 + r * r * (adapter.n_a + wide))),
                step_flops=4.0 * blocks * r * adapter.n_a * wide,
                nbytes=blocks * r * (block.layer.precision.itemsize * (adapter.n_a + wide) + 8 * r),
            )
        )

    # ------------------------------------------------------------------ stages 1 to 3: rows
    def _take(self) -> Captured:
        self._forget_step()
        return super()._take()

    def _forget_step(self) -> None:
        """Drop what was captured for a step."""
        for block in self._blocks:
            block.fresh = None

    def new_statistic(self, block: RowBlock, group: Group) -> Statistic:
        """Nothing but what the backward pass will bring."""
        return block.statistic()

    def learn(self, statistics: Any, gradients: Directions, gate: Tensor | None) -> None:
        self._gradients_now = gradients
        super().learn(statistics, gradients, gate)

    def measure(self, block: RowBlock, statistic: Statistic, examples: int) -> Measured:
        """The rows of this rank's batch; where ranks agree on them, with whether they are finite."""
        measured = block.measure(statistic, examples)
        if (raw := measured.rest) is None or not self.comm.combines:
            return measured
        return measured._replace(rest=raw._replace(finite=all_finite(raw.rows)))

    def fold(self, block: RowBlock, measured: Measured, gate: Tensor | None) -> Tensor:
        """Scale rows per datum, and keep them for the refresh of this step."""
        return block.fold(measured, gate)

    def _has_estimate(self, block: RowBlock) -> bool:
        return bool(block.state["refreshes"] > 0)

    # ------------------------------------------------------------------ stage 4: refresh
    def _refresh_is_due(self, block: RowBlock) -> bool:
        return block.fresh is not None

    def _capture_is_due(self, block: RowBlock) -> bool:
        steps: int = block.group["update_steps"]
        return self._layer_options.schedule.captures(self._t, steps, steps, self.state[block.owner].get("refreshes", 0))

    def _with_estimates(self, due: list[RowBlock]) -> tuple[list[RowBlock], bool]:
        on_host = all(b.owner.device.type == "cpu" for b in due)
        first = any(b.state["refreshes"] == 0 for b in due)
        failing = any(b.name in self.refresher.failures for b in due)
        return due, on_host or first or failing or any(b.changes_layout(self._limit(b)) for b in due)

    def _limit(self, block: RowBlock) -> int:
        """The largest number of rows to keep of this step."""
        return self.rank_of(block.group, self._batch_size or block.captured.examples)

    def choose_form(self, block: RowBlock, rows: int, positions: int, are_pairs: bool) -> bool:
        """Give a block factors instead of rows, at its first refresh, if they are cheaper.

        Args:
            block: The block.
            rows: R.
            positions: S.
            are_pairs: Whether rows of inputs and of gradients were captured, and not their products.

        Returns:
            Whether such pairs are to be multiplied out.
        """
        if not block.is_undecided:
            return False
        if factors_are_cheaper(block.adapter, block.group, rows, positions):
            self._take_factors(block, rows, positions)
            return False
        return are_pairs and products_are_smaller(block.adapter, positions)

    def _take_factors(self, block: RowBlock, rows: int, positions: int) -> None:
        """Replace the rows of a block by factors, on every rank by what it stores of them."""
        p, schema, state = block.owner, block.with_factors.schema(rows, positions), block.state
        for key in [k for k in state if k in ROWS and k not in ("factor_updates", "refreshes")]:
            del state[key]
        for key, like in likes(held(schema, self.places_here(p))).items():
            state.setdefault(key, torch.zeros_like(like, device=p.device) if isinstance(like, Tensor) else like)
        self._shapes[p] = {key: entry.shape for key, entry in schema.items()}

    def refresh(self, blocks: Sequence[RowBlock], host_checks: bool) -> Tensor:
        """Renew rows and factors; a block that fails keeps its last good ones."""
        for block in blocks:
            found = block.captured
            if self.choose_form(block, self._limit(block), found.rows.g.shape[-2], found.rows.a is not None):
                found = block.fresh = found._replace(rows=kernel.whole(found.rows))
            whole = found.rows.a is None and not block.adapter.constant_input
            self._last_batch[block.name] = Batch(found.examples, found.rows.n, found.rows.g.shape[-2], whole)
        factored = {b: b.captured for b in blocks if b.is_factored}
        for block, found in factored.items():
            damping = block.damping_of(kernel.norms(found.rows).sum(-1), found.examples)
            block.fold_moments(list(second_moments(found.rows, found.real)), found.examples, found.ok)
            block.with_factors.keep_damping(block.state, damping, found.ok)
        ok = self.factorise({b: found.ok for b, found in factored.items()}, host_checks)
        ok |= self.refresh_rows([b for b in blocks if b not in ok])
        return torch.stack([ok[b] for b in blocks])

    def factorise(self, good: Mapping[RowBlock, Tensor], host_checks: bool) -> dict[RowBlock, Tensor]:
        """Bring factors into their eigenbases; one that fails, or is not to be used, keeps the last ones."""
        if not good:
            return {}
        found = factorise({(b, side): task for b in good for side, task in b.tasks().items()}, host_checks)
        ok = dict(zip(good, joint_ok(found, list(good)).unbind(), strict=True))
        for block in good:
            ok[block] = good[block] & ok[block]
            block.adopt({side: found[block, side][0] for side in "ag"}, ok[block])
        return ok

    def end_step(self) -> None:
        """Prepare for the coming step."""
        self._forget_step()
        self._gradients_now = {}
        super().end_step()

    # ------------------------------------------------------------------ directions, and what is reported
    def precondition(self, block: RowBlock, gradient: Tensor) -> Tensor:
        """``(F̂ + λI)⁻¹ vec(∇)``."""
        return block.precondition(gradient)

    def block_curvature(self, block: RowBlock) -> Tensor:
        """The undamped curvature of a block as a dense matrix."""
        return block.dense()

    def bounds(self, block: RowBlock) -> Extremes | None:
        """λ of a block, and upper bounds of the largest eigenvalues; never waits for the device."""
        return block.bounds()

    def pending_bytes(self) -> int:
        return super().pending_bytes() + sum(b.fresh.rows.nbytes for b in self._blocks if b.fresh is not None)

    def coverage(self, p: nn.Parameter) -> tuple[str, str, str]:
        treatment, sizes, owner = super().coverage(p)
        if (block := self._block_of.get(p)) is None:
            return treatment, sizes, owner
        reason, sizes = block.described()
        return f"{treatment}{reason}", sizes, owner
