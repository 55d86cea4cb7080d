"""Layers with rows of examples: when rows are captured and renewed, and which layers get factors instead."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from secondorder.capture.sites import Captured, Statistic
from secondorder.capture.statistics.examples import second_moments
from secondorder.capture.statistics.measurement import Measured
from secondorder.curvature.block import Block
from secondorder.curvature.example_rows import Batch, all_finite
from secondorder.curvature.factorization import factorise, joint_ok
from secondorder.curvature.mode import ModeSwitch
from secondorder.curvature.row_block import RowBlock
from secondorder.curvature.row_forms import ROWS_OR_FACTORS
from secondorder.curvature.schema import Schema
from secondorder.linalg import kernel
from secondorder.parameters import Directions
from secondorder.preconditioners.layer_capture import Setting
from secondorder.preconditioners.layers import LayerPreconditioner
from secondorder.preconditioners.row_plan import RowPlan

#: Examples that costs of layers are compared for, where nobody said how many there are.
_EXAMPLES = 32


class RowLayers(LayerPreconditioner):
    """Layers that keep rows of examples, or K-FAC's factors where those are cheaper."""

    capture_interval = refresh_interval = "update_steps"
    damps_kernel = True
    rows_per_example = 1
    catalog: ClassVar[Schema] = ROWS_OR_FACTORS
    block_type: ClassVar[type[Block]] = RowBlock
    plan: RowPlan

    def __init__(self, setting: Setting, batch_size: int | None, modes: ModeSwitch) -> None:
        self._own = batch_size, modes
        super().__init__(setting)
        self._gradients_now: Directions = {}
        #: What the last refresh has seen, by block: a plan supposes as much.
        self._last_batch: dict[str, Batch] = {}

    def new_plan(self) -> RowPlan:
        """Return a plan without blocks."""
        chosen = self.setting
        make = partial(self.block_type, runtime=chosen.runtime, options=chosen.layers, fisher=chosen.fisher)
        places, interval = self.exchange.places_here, self.refresh_interval
        found = RowPlan(make, chosen.layers, chosen.comm, chosen.table, chosen.runtime, interval, places)
        found.batch_size, found.modes = self._own
        return found

    @property
    def modes(self) -> ModeSwitch:
        """What ``mode="auto"`` means."""
        return self.plan.modes

    # ------------------------------------------------------------------ what a method supplies
    @abstractmethod
    def refresh_rows(self, blocks: Sequence[RowBlock]) -> dict[RowBlock, Tensor]:
        """Choose rows of this step and invert their kernel; returns by block whether that succeeded."""

    # ------------------------------------------------------------------ stages 1 to 3: rows
    def collect(self) -> Captured:
        """Take what was captured since the last step, combined over the ranks."""
        self.forget_step()
        return super().collect()

    def learn(self, statistics: Any, gradients: Directions, gate: Tensor | None) -> None:
        self._gradients_now = gradients
        super().learn(statistics, gradients, gate)

    def measure(self, block: RowBlock, statistic: Statistic, examples: int) -> Measured:
        """The rows of this rank's batch; where ranks agree on them, with whether they are finite."""
        measured = block.measure(statistic, examples)
        if (raw := measured.rest) is None or not self.comm.combines:
            return measured
        return measured._replace(rest=raw._replace(finite=all_finite(raw.rows)))

    # ------------------------------------------------------------------ stage 4: refresh
    def is_due(self, block: RowBlock) -> bool:
        return block.fresh is not None

    def captures(self, block: RowBlock) -> bool:
        steps: int = block.group["update_steps"]
        return self.options.schedule.captures(self.runtime.step, steps, steps, block.state.get("refreshes", 0))

    def with_estimates(self, due: list[RowBlock]) -> tuple[list[RowBlock], bool]:
        on_host = all(b.owner.device.type == "cpu" for b in due)
        first = any(b.state["refreshes"] == 0 for b in due)
        failing = any(b.name in self.refresher.failures for b in due)
        return due, on_host or first or failing or any(b.changes_layout(self.plan.limit(b)) for b in due)

    def refresh(self, blocks: Sequence[RowBlock], host_checks: bool, *, restores: bool = False) -> Tensor:
        """Renew rows and factors; a block that fails keeps its last good ones."""
        for block in blocks:
            found = block.captured
            if self.plan.choose_form(block, self.plan.limit(block), found.rows.g.shape[-2], found.rows.a is not None):
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
