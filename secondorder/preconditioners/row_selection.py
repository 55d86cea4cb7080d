"""Selects the rows of a step that each block keeps, and measures the error of keeping fewer."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from secondorder.capture.statistics.examples import as_rows_matrix
from secondorder.curvature import row_choice
from secondorder.curvature.example_rows import Kept
from secondorder.curvature.row_block import RowBlock
from secondorder.curvature.row_choice import Energy, Pivots
from secondorder.linalg import kernel, selection, woodbury
from secondorder.linalg.dense import precision_of
from secondorder.linalg.kernel import Rows
from secondorder.parameters import Directions

if TYPE_CHECKING:
    from secondorder.preconditioners.row_plan import RowPlan


class RowSelection:
    """Chooses rows among those that this rank captured, in the mode of each group.

    Args:
        plan: The blocks.

    Attributes:
        gradients: Gradients of this step by parameter, for the probes of a policy.
    """

    def __init__(self, plan: RowPlan) -> None:
        self._plan, self._comm, self._runtime = plan, plan.comm, plan.runtime
        self.gradients: Directions = {}

    def decide(self, blocks: Sequence[RowBlock]) -> None:
        """Ask the policy for the mode of this refresh if any of the blocks depends on it."""
        if any(block.group["mode"] == "auto" for block in blocks):
            self._plan.modes.decide(self._runtime.step)

    def by_energy(self, limits: Mapping[RowBlock, int]) -> dict[RowBlock, int]:
        """Return the numbers of rows of the blocks for which the energy of the kernel determines it."""
        asking = [b for b in limits if self._plan.asks_energy(b)]
        return row_choice.by_energy({b: Energy(b.captured.rows, limits[b], b.group["rank_energy"]) for b in asking})

    def choose(self, blocks: Sequence[RowBlock], ranks: Mapping[RowBlock, int]) -> dict[RowBlock, Kept]:
        """Choose ``ranks`` rows of each block."""
        kept: dict[RowBlock, Kept] = {}
        pivots: dict[RowBlock, Pivots] = {}
        for block in blocks:
            mode, rows, group = self._plan.modes.mode_in(block.group), block.captured.rows, block.group
            if mode == "kid":
                pivots[block] = Pivots(rows, ranks[block], group["kid_pivoting"], group["kid_residual"], block.damping)
                continue
            norms = kernel.norms(rows)
            found = rows if mode == "sngd" else self._sampled(block, rows, norms, ranks[block])
            kept[block] = Kept(found, block.damping(norms.sum(-1)))
        return kept | row_choice.interpolated(pivots)

    def _sampled(self, block: RowBlock, rows: Rows, scores: Tensor, rank: int, purpose: str = "") -> Rows:
        """Draw rows by their scores ``[(Γ,) n]``. A draw depends only on the layer, the refresh and the rank."""
        place = f" on rank {self._comm.rank}" if self._comm.combines else ""
        refresh: int = block.state["refreshes"]
        seed = self._runtime.seed(zlib.crc32(f"{purpose}{block.name}{place}".encode()), refresh)
        return row_choice.sampled(rows, scores, rank, block.group["kis_sampling"], seed)

    # ------------------------------------------------------------------ the error of few rows
    def probe_errors(self, blocks: Sequence[RowBlock], ranks: Mapping[RowBlock, int]) -> list[Tensor]:
        """Return the relative errors of KIS on a few layers, measured only with this rank's examples."""
        asking = [b for b in blocks if b.group["mode"] == "auto"]
        usable = [b for b in asking if all(p in self.gradients for p in b.params)]
        count = min(self._plan.modes.policy.probes, len(usable))
        chosen = [usable[round(i * (len(usable) - 1) / max(count - 1, 1))] for i in range(count)]
        return [self._probe_error(block, ranks[block]) for block in chosen]

    def _probe_error(self, block: RowBlock, rank: int) -> Tensor:
        """Return the relative error of the direction that KIS computes for a layer."""
        fresh = block.captured
        rows = fresh.rows if fresh.share == 1 else kernel.scaled(fresh.rows, fresh.share**-0.5)
        gradient = block.layer.matrix([self.gradients[p].to(precision_of(p)) for p in block.params])
        matrix, norms = as_rows_matrix(rows, gradient), kernel.norms(rows)
        damping = block.damping_of(norms.sum(-1), fresh.examples)
        group = block.group
        if group["rank_energy"] is None:  # the rank of KIS, even if the mode keeps more rows
            most = max(1, group["max_rank"] // self._comm.sources(block.index))
            rank = min(selection.planned_rank(fresh.examples, group["rank_fraction"], most), rows.n)
        kept = self._sampled(block, rows, norms, rank, "probe of ")
        inverse, _ = woodbury.damped_inverse(row_choice.widened(kernel.gram(kept)), damping)
        exact = woodbury.exact_update(rows, damping, matrix)
        off = woodbury.apply(kept, inverse, damping, matrix) - exact
        error: Tensor = torch.linalg.vector_norm(off) / torch.linalg.vector_norm(exact).clamp(min=1e-30)
        return error
