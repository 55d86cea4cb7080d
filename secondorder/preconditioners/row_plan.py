"""The plan of blocks with rows of examples: the number of rows of each block, and the blocks with factors instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from secondorder.comm.strategy import Unit
from secondorder.curvature.example_rows import Batch
from secondorder.curvature.mode import ModeSwitch
from secondorder.curvature.row_block import RowBlock
from secondorder.curvature.row_forms import ROWS, factors_are_cheaper, products_are_smaller
from secondorder.curvature.schema import Schema, likes, stored_at
from secondorder.linalg import selection
from secondorder.preconditioners.block_plan import BlockPlan

#: Number of examples for which costs of layers are compared if ``batch_size`` is not set.
_EXAMPLES = 32


class RowPlan(BlockPlan[RowBlock]):
    """Plans blocks with rows of examples.

    Attributes:
        modes: The mode of each group.
        batch_size: Number of examples of a step, if it was set at construction.
        last_batch: The batch of the last refresh of each block, by name.
    """

    def __init__(self, *given: Any, modes: ModeSwitch, batch_size: int | None = None) -> None:
        super().__init__(*given)
        self.modes, self.batch_size = modes, batch_size
        self.last_batch: dict[str, Batch] = {}

    def interpolates(self, block: RowBlock) -> bool:
        """Return whether the mode of a block is KID."""
        return self.modes.mode_in(block.group) == "kid"

    def asks_energy(self, block: RowBlock) -> bool:
        """Return whether the energy of the kernel determines the number of rows that a block keeps."""
        return block.group["rank_energy"] is not None and self.modes.mode_in(block.group) != "sngd"

    def rank_of(self, group: Mapping[str, Any], examples: int, ranks: int = 1) -> int:
        """Return r, the number of rows that each rank keeps of these examples, or its limit with an energy."""
        if self.modes.mode_in(group) == "sngd":
            return examples
        fraction = 1.0 if group["rank_energy"] is not None else group["rank_fraction"]
        return selection.planned_rank(examples, fraction, max(1, group["max_rank"] // ranks))

    def planned_rows(self, block: RowBlock, group: Mapping[str, Any], examples: int) -> int:
        """Return R, the number of rows of a block if every rank has this number of examples."""
        if not examples:
            return 0
        ranks = self.comm.sources(block.index)
        return ranks * self.rank_of(group, examples, ranks)

    def limit(self, block: RowBlock) -> int:
        """Return the largest number of rows to keep of this step."""
        return self.rank_of(block.group, self.batch_size or block.captured.examples)

    def changes_layout(self, block: RowBlock) -> bool:
        """Return whether the rows to keep of this step have other sizes than those in the state of a block."""
        rows = block.state.get("rows_g")
        if block.is_factored or rows is None or block.fresh is None:
            return False
        return (self.limit(block), *block.fresh.rows.g.shape[-2:]) != tuple(rows.shape[-3:])

    def schema(self, block: RowBlock, group: Mapping[str, Any], state: Mapping[str, Any]) -> Schema:
        """Return the entries for rows and their kernel, or for factors."""
        planned = self.planned_rows(block, group, self.batch_size or 0)
        found = block.schema(group, state, planned, known=self.comm.replicates)
        return self.without_unused(found, group, state)

    def unit(self, block: RowBlock) -> Unit:
        """Return the unit of a block for a strategy. Ranks do not compare the sizes of rows, which may change."""
        adapter, group = block.adapter, block.group
        blocks, wide = adapter.row_groups, adapter.row_width
        r, batch = self.rank_of(group, self.batch_size or _EXAMPLES), self.batch_size or "of any size"
        return (
            super()
            .unit(block)
            ._replace(
                signature=f"{blocks}×{wide}×{adapter.n_a} {block.layer.kind} {block.layer.precision}, batch {batch}",
                refresh_flops=float(blocks * (r**3 + r * r * (adapter.n_a + wide))),
                step_flops=4.0 * blocks * r * adapter.n_a * wide,
                nbytes=blocks * r * (block.layer.precision.itemsize * (adapter.n_a + wide) + 8 * r),
            )
        )

    def is_auto(self) -> bool:
        """Return whether a policy chooses the mode of some group."""
        return any(group["mode"] == "auto" for group in self.table.groups)

    def allocate_common(self) -> None:
        """Allocate the state of the policy, which the state of the first parameter holds."""
        if (first := self.table.first) is not None:
            self.table.state[first].pop("switch_state", None)
            if self.is_auto() or self.modes.mode is not None:
                self.table.state[first]["switch_state"] = self.modes.vector()

    # ------------------------------------------------------------------ rows or factors
    def choose_form(self, block: RowBlock, rows: int, positions: int, are_pairs: bool) -> bool:
        """Return whether rows of inputs and of gradients, if these were captured, should be multiplied out.

        At its first refresh, a block takes factors instead of R rows if they are cheaper.
        """
        if not block.is_undecided:
            return False
        if factors_are_cheaper(block.adapter, block.group, rows, positions):
            self._take_factors(block, rows, positions)
            return False
        return are_pairs and products_are_smaller(block.adapter, positions)

    def _take_factors(self, block: RowBlock, rows: int, positions: int) -> None:
        """Replace the rows of a block by the factors that this rank stores."""
        p, schema, state = block.owner, block.with_factors.schema(rows, positions), block.state
        for key in [k for k in state if k in ROWS and k not in ("factor_updates", "refreshes")]:
            del state[key]
        for key, like in likes(stored_at(schema, self.places_here(p))).items():
            state.setdefault(key, torch.zeros_like(like, device=p.device) if isinstance(like, Tensor) else like)
        self.shapes[p] = {key: entry.shape for key, entry in schema.items()}
