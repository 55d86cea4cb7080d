"""Dry runs of HyLo, whose rows have sizes that depend on the batch.

A dry run assumes that all ranks capture the same number of examples: ``batch_size``, or the most in the last refresh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from secondorder.capture.statistics.measurement import Measured, Reduced
from secondorder.comm.strategy import Parcel
from secondorder.curvature.example_rows import Batch, Sizes
from secondorder.curvature.row_block import RowBlock
from secondorder.curvature.row_forms import factors_are_cheaper, products_are_smaller
from secondorder.curvature.schema import Schema, likes
from secondorder.parallel.rows import Census
from secondorder.plan.dry_run import DryExchange, LayerDryRun
from secondorder.plan.rehearsal import Rehearsal
from secondorder.preconditioners.parts import Setting
from secondorder.preconditioners.row_exchange import RowExchange
from secondorder.preconditioners.row_plan import RowPlan
from secondorder.preconditioners.row_selection import RowSelection

if TYPE_CHECKING:
    from secondorder.preconditioners.layers import LayerPreconditioner
    from secondorder.preconditioners.rows import RowPreconditioner


class DryRowExchange(RowExchange):
    """Posts shapes and assumes the answers instead of reading them.

    Args:
        plan: The blocks.
        selection: The row selection, which selects nothing because there are no rows.
        census: The sizes that the ranks capture in every step, by block.
        kept: Returns the number of rows of each rank that the state of a block holds.
    """

    def __init__(
        self, plan: RowPlan, selection: RowSelection, census: Mapping[RowBlock, Census], kept: Callable[[RowBlock], int]
    ) -> None:
        super().__init__(plan, selection, torch.device("meta"))
        self._assumed, self._kept = census, kept
        self.census = dict(census)
        self.ranks = {block: self._rows_sent(block) for block in census}

    def _rows_sent(self, block: RowBlock) -> int:
        """Return r. It is unchanged if ``energy`` is set, or if the only known rows are those of a checkpoint."""
        kept, is_known = self._kept(block), max(self.census[block].examples) > 0
        return kept if kept and (block.group["rank_energy"] is not None or not is_known) else self.most_rows(block)

    def read_census(self, words: Mapping[RowBlock, Tensor]) -> dict[RowBlock, Census]:
        """Return the assumed census of some blocks."""
        return {block: self._assumed[block] for block in words if block in self._assumed}

    def read_ranks(self, limits: Mapping[RowBlock, int], needed: Mapping[RowBlock, Tensor]) -> dict[RowBlock, int]:
        """Return the assumed numbers of rows of some blocks."""
        return {block: self._rows_sent(block) for block in limits}

    def read_rows(self, gathered: Sequence[Parcel]) -> None:
        """Do nothing, since there are no rows."""


class RowDryRun(LayerDryRun):
    """Dry run of HyLo; see the base class."""

    layers: RowPreconditioner

    def __init__(self, curvature: RowPreconditioner, comm: Rehearsal, batch_size: int | None) -> None:
        self._last_batch = curvature.plan.last_batch
        #: Number of ranks that contributed the rows in the state of each block.
        self._sources = {block.index: curvature.comm.sources(block.index) for block in curvature.plan.blocks}
        super().__init__(curvature, comm, batch_size or curvature.plan.batch_size)

    def _without_blocks(
        self, curvature: LayerPreconditioner[Any], setting: Setting, exchange: DryExchange
    ) -> LayerPreconditioner[Any]:
        rows = cast("RowPreconditioner", curvature)
        return type(rows)(setting, exchange, batch_size=self._batch_size, modes=rows.plan.modes.fixed())

    def _schemas(self) -> dict[int, Schema]:
        layers, blocks = self.layers, self.layers.plan.blocks
        batches = {block: batch for block in blocks if (batch := self._assumed_batch(block)) is not None}
        census = {block: self._census_of(block, batch) for block, batch in batches.items()}
        if not self._comm.is_real:
            census = {block: self._with_form(block, found) for block, found in census.items()}
        layers.rows = DryRowExchange(layers.plan, layers.selection, census, self._rows_by_rank)
        self._unknown = len(blocks) - len(census)
        return {block.index: self._schema(block) for block in blocks}

    def _schema(self, block: RowBlock) -> Schema:
        """Return the schema of the state of a block, which holds rows of all ranks or factors."""
        plan, rows = self.layers.plan, self.layers.rows
        planned = plan.planned_rows(block, block.group, plan.batch_size or 0)
        is_known = block in rows.census and plan.is_on(block.group)
        if not is_known or block.factor_schema(block.group, block.state, planned):
            return plan.live_schema(block)
        sizes = rows.census[block].sizes(block, rows.total_rows(block))
        return block.with_rows.schema(sizes, known=self._comm.replicates)

    def _reduced(self) -> Reduced:
        """Return an entry without rows for each block that is due."""
        return Reduced({i: Measured({}, 0, None) for i in self.layers.hooks.due}, {})

    def notes(self) -> Iterator[str]:
        """Yield a note if the sizes of rows are not known."""
        yield from super().notes()
        if self._unknown:
            yield "the number of rows of a layer depends on the batch: pass batch_size=, or take a step first"

    # ------------------------------------------------------------------ what is assumed
    def _assumed_batch(self, block: RowBlock) -> Batch | None:
        """Return the batch that a rank captures for a block; None if it is not known."""
        last, planned = self._last_batch.get(block.name), self.layers.plan.batch_size
        if last is None:  # rows were loaded, or there are none yet
            sizes = self._sizes_of(block)
            whole = not sizes.d_a and not sizes.by_index and not block.adapter.constant_input
            last = Batch(0, self._rows_by_rank(block), sizes.positions, whole)
        if planned is not None:
            last = last._replace(examples=planned, rows=planned)
        return last if last.rows else None

    def _sizes_of(self, block: RowBlock) -> Sizes:
        """Return the sizes of the rows in the state, or else of the planned rows."""
        plan = self.layers.plan
        planned = plan.planned_rows(block, block.group, plan.batch_size or 0)
        return block.with_rows.sizes_in(block.state, block.group, planned)

    def _rows_by_rank(self, block: RowBlock) -> int:
        return self._sizes_of(block).rows // self._sources[block.index]

    def _census_of(self, block: RowBlock, batch: Batch) -> Census:
        """Return the census of a block, assuming that all ranks that capture it have the same batch."""
        world, owner = self._comm.data_world, self._comm.owner(block.index)
        there = [self._comm.sources(block.index) > 1 or rank == owner for rank in range(world)]
        return Census(
            [batch.examples * here for here in there],
            [batch.rows * here for here in there],
            batch.positions,
            batch.whole,
            torch.zeros(block.with_rows.lead, dtype=torch.float64),
            torch.ones(block.adapter.row_groups, dtype=torch.float64),
        )

    def _with_form(self, block: RowBlock, census: Census) -> Census:
        """Decide again between rows and factors, since the decision may depend on the number of ranks."""
        group, plan = block.group, self.layers.plan
        if not group["kfac_when_cheaper"]:
            return census
        state, adapter = block.state, block.adapter
        for key in [k for k in state if k in self.layers.catalog]:
            del state[key]
        state["refreshes"] = 0
        rows = plan.planned_rows(block, group, plan.batch_size or max(census.examples))
        if factors_are_cheaper(adapter, group, rows, census.positions):
            state.update(likes(block.with_factors.schema(rows, census.positions)))
            return census._replace(whole=False)
        return census._replace(whole=not adapter.constant_input and products_are_smaller(adapter, census.positions))
