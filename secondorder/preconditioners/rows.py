"""The preconditioner of HyLo: the stages of a step over blocks with rows of examples, or with K-FAC's factors."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from secondorder.capture.sites import Captured
from secondorder.capture.statistics.examples import second_moments
from secondorder.capture.statistics.measurement import Reduced
from secondorder.comm.layout import local
from secondorder.curvature.block import Block
from secondorder.curvature.example_rows import Batch, Kept, filled
from secondorder.curvature.mode import SWITCH, ModeSwitch
from secondorder.curvature.row_block import RowBlock
from secondorder.curvature.row_forms import ROWS_OR_FACTORS
from secondorder.curvature.row_inverse import invert_factors, invert_kernels
from secondorder.curvature.schema import Schema
from secondorder.linalg import kernel
from secondorder.linalg.dense import full_precision, is_on_host
from secondorder.parallel.exchange import StatisticsExchange
from secondorder.parameters import Directions
from secondorder.preconditioners.base import Rule
from secondorder.preconditioners.block_plan import BlockPlan
from secondorder.preconditioners.layer_checkpoint import LayerCheckpoint
from secondorder.preconditioners.layer_report import LayerReport
from secondorder.preconditioners.layers import LayerPreconditioner
from secondorder.preconditioners.parts import Setting
from secondorder.preconditioners.row_checkpoint import RowCheckpoint
from secondorder.preconditioners.row_exchange import RowExchange
from secondorder.preconditioners.row_plan import RowPlan
from secondorder.preconditioners.row_report import RowReport
from secondorder.preconditioners.row_selection import RowSelection


class RowPreconditioner(LayerPreconditioner[RowBlock]):
    """Preconditions layers with rows of examples, or with K-FAC's factors where those are cheaper.

    Args:
        setting: The parts of the optimizer that it uses.
        batch_size: Number of examples of a step on each rank, if it is known.
        modes: The mode of groups with ``mode="auto"``.

    Attributes:
        selection: The selection of the rows of a step that are kept.
        rows: The rows of a step.
    """

    capture_interval = refresh_interval = "update_steps"
    capture_counter = "refreshes"
    damps_kernel = True
    rows_per_example = 1
    catalog: ClassVar[Schema] = {**ROWS_OR_FACTORS, **SWITCH}
    block_type: ClassVar[type[Block]] = RowBlock
    allocating = ("mode",)
    plan_type: ClassVar[type[BlockPlan[Any]]] = RowPlan
    report_type: ClassVar[type[LayerReport]] = RowReport
    checkpoint_type: ClassVar[type[LayerCheckpoint]] = RowCheckpoint
    plan: RowPlan

    def __init__(
        self, setting: Setting, exchange: StatisticsExchange | None = None, *, batch_size: int | None, modes: ModeSwitch
    ) -> None:
        super().__init__(setting, exchange, batch_size=batch_size, modes=modes)
        self.selection = RowSelection(self.plan)
        self.rows = RowExchange(self.plan, self.selection)

    # ------------------------------------------------------------------ stages 1 to 3: rows
    def reduce(self, statistics: Captured) -> Reduced:
        """Measure captured rows, and combine the numbers of examples over the ranks."""
        self.rows.begin(statistics)
        return super().reduce(statistics)

    def learn(self, statistics: Reduced, gradients: Directions, gate: Tensor | None) -> None:
        """Take the rows of the step, and the gradients for probes."""
        self.selection.gradients = gradients
        self.rows.take(statistics, gate)
        super().learn(statistics, gradients, gate)

    # ------------------------------------------------------------------ stage 4: refresh
    def is_due(self, block: RowBlock) -> bool:
        """Return whether this step refreshes a block, which it does if any rank captured rows of it."""
        return block in self.rows.census if self.comm.combines else block.fresh is not None

    def with_estimates(self, due: list[RowBlock]) -> tuple[list[RowBlock], bool]:
        """Return all blocks, and whether the host checks the results of their refresh."""
        on_host = all(is_on_host(b.owner) for b in due)
        first = any(b.state["refreshes"] == 0 for b in due)
        failing = any(b.name in self.refresher.failures for b in due)
        return due, on_host or first or failing or any(map(self.plan.changes_layout, due))

    def refresh_due(self) -> list[int]:
        """Refresh the blocks that are due, after the ranks have combined their rows."""
        if self.rows.seen:
            with full_precision(next(iter(self.rows.seen)).owner.device), self.runtime.stage("select"):
                self.rows.bring_together()
        return super().refresh_due()

    def refresh(self, blocks: Sequence[RowBlock], host_checks: bool, *, restores: bool = False) -> Tensor:
        """Invert kernels of rows and factors. A block that fails keeps its last good results."""
        if not self.comm.combines:
            return self._refresh_alone(blocks, host_checks)
        good = {b: self.rows.good(b) for b in blocks}
        ok = invert_factors({b: good[b] for b in blocks if b.is_factored}, host_checks)
        union = {b: b.union for b in blocks if b not in ok and b.union is not None}
        ok |= invert_kernels(union, good, self.runtime.stage)
        return torch.stack([ok[b] for b in blocks])

    def _refresh_alone(self, blocks: Sequence[RowBlock], host_checks: bool) -> Tensor:
        """Choose among the rows of this process, and invert their kernels and the factors computed from them."""
        for block in blocks:
            self._settle_form(block)
        good = {b: b.captured.ok for b in blocks}
        ok = invert_factors({b: good[b] for b in blocks if b.is_factored}, host_checks)
        others = [b for b in blocks if b not in ok]
        self.selection.decide(others)
        with self.runtime.stage("select"):
            # Not every example passes a layer.
            limits = {b: min(self.plan.limit(b), b.captured.rows.n) for b in others}
            ranks = limits | self.selection.by_energy(limits)
            kept = self._filled(self.selection.choose(others, ranks))
        ok |= invert_kernels(kept, good, self.runtime.stage)
        errors = self.selection.probe_errors(others, ranks)
        if errors:
            self.plan.modes.policy.probe(torch.stack([e.to(errors[0].device, torch.float64) for e in errors]).mean())
        return torch.stack([ok[b] for b in blocks])

    def _settle_form(self, block: RowBlock) -> None:
        """Decide between rows and factors, and update factors with the rows of this step."""
        found = block.captured
        if self.plan.choose_form(block, self.plan.limit(block), found.rows.g.shape[-2], found.rows.a is not None):
            found = block.fresh = found._replace(rows=kernel.whole(found.rows))
        whole = found.rows.a is None and not block.adapter.constant_input
        self.plan.last_batch[block.name] = Batch(found.examples, found.rows.n, found.rows.g.shape[-2], whole)
        if block.is_factored:
            damping = block.damping_of(kernel.norms(found.rows).sum(-1), found.examples)
            moments, factors = list(second_moments(found.rows, found.real)), block.with_factors
            factors.fold(block.state, block.group, moments, found.examples, found.ok)
            factors.keep_damping(block.state, damping, found.ok)

    def _filled(self, kept: Mapping[RowBlock, Kept]) -> Mapping[RowBlock, Kept]:
        """Pad rows with zeros to the number that follows from ``batch_size``."""
        if (n := self.plan.batch_size) is None:
            return kept
        return {b: filled(k, self.plan.rank_of(b.group, n)) for b, k in kept.items()}

    def share(self, refreshed: list[int]) -> None:
        """Send refreshed curvature to the ranks that precondition with it."""
        if self.comm.combines:  # the others keep their tensors, of whatever size
            refreshed = [i for i in refreshed if self.plan.blocks[i].name not in self.refresher.failures]
            for i in refreshed:
                self.rows.make_room(self.plan.blocks[i])
        super().share(refreshed)

    def forget_step(self) -> None:
        """Discard data that only the current step uses."""
        self.rows.forget()
        self.selection.gradients = {}

    def inspected(self, gradients: Directions) -> None:
        """Pass the learning rates and the norm of the gradient to the policy, as far as it needs them."""
        if self.plan.is_auto():
            policy, groups = self.plan.modes.policy, self.table.groups
            rates = [_number(g["lr"]) for g in groups] if policy.needs_rates else []
            policy.observe(self.runtime.step, rates, self._norm(gradients) if policy.needs_gradient_norm else None)

    def _norm(self, gradients: Directions) -> Tensor | None:
        """Return the norm of the gradient of all covered parameters."""
        covered = [g for p, g in gradients.items() if p in self.covered]
        if not covered:
            return None
        double = any(g.dtype in (torch.float64, torch.complex128) for g in covered)
        dtype = torch.float64 if double else torch.float32  # a norm in half precision may overflow
        norms = torch._foreach_norm([torch.view_as_real(g) if g.is_complex() else g for g in covered], 2, dtype)
        total: Tensor = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]))
        return total

    # ------------------------------------------------------------------ weight decay as part of the objective
    def change_sources(self, source: Directions, gradients: Directions, gate: Tensor | None) -> None:
        """With ``weight_decay_mode="reg"``, also precondition the gradient of the decay."""
        for p in source:
            group = self.table.group_of[p]
            if group["weight_decay_mode"] == "reg" and group["weight_decay"]:
                source[p] = source[p] + group["weight_decay"] * local(p)

    def rule(self, p: nn.Parameter, group: Mapping[str, Any], rule: Rule) -> Rule:
        """Return the first-order rule of a preconditioned parameter, without decay that its direction contains."""
        if rule.kind == "sgd" and group["weight_decay_mode"] == "reg":
            return rule._replace(weight_decay=0.0)
        return rule

    # ------------------------------------------------------------------ the policy, and copies
    def facts(self) -> dict[str, list[str]]:
        """Return the settings that must be equal on all ranks, as text."""
        own = {"batch size and switch": [str(self.plan.batch_size), type(self.plan.modes.policy).__name__]}
        if self.setting.fisher.is_observed:
            own["Fisher"] = [f"fisher={self.setting.fisher.kind!r}"]
        return {**super().facts(), **own}

    def own(self) -> dict[str, Any]:
        """Return the arguments of a copy that only this preconditioner has."""
        return {"batch_size": self.plan.batch_size, "modes": copy.copy(self.plan.modes)}


def _number(lr: Any) -> float:
    """Return a learning rate as a number, waiting for the device if it is on one."""
    return float(lr.cpu().numpy()) if isinstance(lr, Tensor) else float(lr)
