"""The understudy of methods with rows of examples, whose sizes only a batch tells.

It plays a refresh of which every rank has captured as much: as many examples as it was told to suppose, or as the last
refresh has seen on the rank with the most of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from secondorder.capture.sites import Captured
from secondorder.curvature.example_rows import Batch, Kept, Sizes
from secondorder.curvature.row_block import RowBlock
from secondorder.curvature.schema import Schema
from secondorder.parallel.rows import Census
from secondorder.plan.dry_run import RehearsedLayers
from secondorder.plan.rehearsal import Rehearsal
from secondorder.preconditioners.row_exchange import GatheringOptimizer


class RehearsedRows(RehearsedLayers, GatheringOptimizer):  # type: ignore[misc]  # a narrower kind of strategy
    """A layer method whose rows come from all ranks."""

    def suppose(self, batch_size: int | None) -> None:
        """Suppose that steps have so many examples per rank."""
        #: Ranks that the rows which are kept now came from.
        self._ranks_now = {block.index: self.comm.sources(block.index) for block in self.plan.blocks}
        self.plan.batch_size = self.plan.batch_size if batch_size is None else batch_size

    def begin(self, comm: Rehearsal) -> None:
        """Every rank captured as much."""
        self.forget_step()
        self.comm = self.plan.comm = comm
        self.plan.imagined = {}
        known = {block: self._supposed(block) for block in self.plan.blocks}
        self._census = {block: self._census_of(block, batch) for block, batch in known.items() if batch is not None}
        if not comm.is_real:
            self._decide_forms()
        self._ranks_sent = {block: self._rows_sent(block) for block in self._census}
        self._every_census = dict(self._census)
        super().begin(comm)

    def notes(self) -> Iterator[str]:
        """Rows that nothing is known of."""
        yield from super().notes()
        if len(self._every_census) < len(self.plan.blocks):
            yield "how many rows a layer has, a batch tells: pass batch_size=, or take a step before"

    # ------------------------------------------------------------------ what is supposed
    def _decide_forms(self) -> None:
        """Rows or factors, where that depends on the number of ranks."""
        for block, census in self._census.items():
            if not block.group["kfac_when_cheaper"]:
                continue
            state, adapter = block.state, block.adapter
            for key in [k for k in state if k in self.catalog]:
                del state[key]
            state["refreshes"] = 0
            rows = self.plan.planned_rows(block, block.group, self.plan.batch_size or max(census.examples))
            whole = self.plan.choose_form(block, rows, census.positions, not adapter.constant_input)
            self._census[block] = census._replace(whole=whole)

    def _supposed(self, block: RowBlock) -> Batch | None:
        """What a rank captures of a block; None if nothing is known."""
        held = self._held_sizes(block)
        last = self._last_batch.get(block.name)
        if last is None:  # rows that were loaded, or none yet
            whole = not held.d_a and not held.by_index and not block.adapter.constant_input
            last = Batch(0, self._kept_by_rank(block), held.positions, whole)
        if self.plan.batch_size is not None:
            last = last._replace(examples=self.plan.batch_size, rows=self.plan.batch_size)
        return last if last.rows else None

    def _kept_by_rank(self, block: RowBlock) -> int:
        return self._held_sizes(block).rows // self._ranks_now[block.index]

    def _census_of(self, block: RowBlock, batch: Batch) -> Census:
        world, owner = self.comm.data_world, self.comm.owner(block.index)
        there = [self.comm.sources(block.index) > 1 or rank == owner for rank in range(world)]
        return Census(
            [batch.examples * here for here in there],
            [batch.rows * here for here in there],
            batch.positions,
            batch.whole,
            torch.zeros(block.with_rows.lead, dtype=torch.float64),
            torch.ones(block.count_size, dtype=torch.float64),
        )

    def _rows_sent(self, block: RowBlock) -> int:
        """r; as it was where an energy decides, and where nothing but rows was loaded."""
        kept, is_told = self._kept_by_rank(block), max(self._census[block].examples) > 0
        return kept if kept and (block.group["rank_energy"] is not None or not is_told) else self._most_rows(block)

    # ------------------------------------------------------------------ sizes
    def _held_sizes(self, block: RowBlock) -> Sizes:
        """Sizes of the rows that are kept now, or are planned."""
        planned = self.plan.planned_rows(block, block.group, self.plan.batch_size or 0)
        return block.with_rows.sizes_in(block.state, block.group, planned)

    def imagined_schema(self, block: Any) -> Schema:
        """Return what the state of a block would hold."""
        own: RowBlock = block
        planned = self.plan.planned_rows(own, own.group, self.plan.batch_size or 0)
        if own not in self._census or own.factor_schema(own.group, own.state, planned):
            return super().imagined_schema(own)
        sizes = self._census[own].sizes(own, self._total_rows(own))
        return own.with_rows.schema(sizes, known=self.comm.replicates)

    def device_of(self, block: RowBlock) -> torch.device:
        """Nowhere."""
        return torch.device("meta")

    # ------------------------------------------------------------------ stages of a step
    def fold(self, captured: Captured, gate: Tensor | None) -> None:
        """What is due was captured."""
        self._seen = {self.plan.blocks[i]: None for i in sorted(self.hooks.due)}

    def is_due(self, block: RowBlock) -> bool:
        return block in self._every_census and self.captures(block)

    def _take_census(self, blocks: Sequence[RowBlock]) -> dict[RowBlock, Census]:
        super()._take_census(blocks)
        return {block: self._every_census[block] for block in blocks if block in self._every_census}

    def begin_rows(self, blocks: Sequence[RowBlock]) -> None:
        """No policy is asked."""

    def most_rows(self, blocks: Sequence[RowBlock]) -> dict[RowBlock, int]:
        """As many as there are."""
        super().most_rows(blocks)
        return {block: self._rows_sent(block) for block in blocks}

    def _gather(self, chosen: Mapping[RowBlock, Kept | None]) -> None:
        if chosen:
            self.comm.gather_statistics([self._parcel(block, None) for block in chosen])
