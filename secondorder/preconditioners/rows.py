"""Curvature by rows of examples: which rows each layer keeps, in which mode, and what is done with them."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from secondorder.capture.statistics.examples import as_rows_matrix
from secondorder.curvature import row_choice
from secondorder.curvature.example_rows import Kept, filled
from secondorder.curvature.mode import SWITCH
from secondorder.curvature.row_block import RowBlock
from secondorder.curvature.row_choice import Pivots
from secondorder.curvature.schema import Schema
from secondorder.linalg import kernel, selection, stacks, woodbury
from secondorder.linalg.dense import precision_of
from secondorder.linalg.kernel import Rows
from secondorder.parameters import Directions
from secondorder.preconditioners.base import Rule
from secondorder.preconditioners.layer_checkpoint import LayerCheckpoint
from secondorder.preconditioners.layer_report import LayerReport
from secondorder.preconditioners.row_checkpoint import RowCheckpoint
from secondorder.preconditioners.row_exchange import GatheringOptimizer
from secondorder.preconditioners.row_report import RowReport


class RowPreconditioner(GatheringOptimizer):
    """Layers with rows of examples, chosen in the mode of their group."""

    catalog: ClassVar[Schema] = {**GatheringOptimizer.catalog, **SWITCH}
    allocating = ("mode",)
    report_type: ClassVar[type[LayerReport]] = RowReport
    checkpoint_type: ClassVar[type[LayerCheckpoint]] = RowCheckpoint

    # ------------------------------------------------------------------ which mode
    def is_auto(self) -> bool:
        """Whether a policy chooses the mode of some group."""
        return any(group["mode"] == "auto" for group in self.table.groups)

    def inspected(self, gradients: Directions) -> None:
        """Have the policy observe the learning rates and the norm of the gradient, as far as it needs them."""
        if self.is_auto():
            policy, groups = self.modes.policy, self.table.groups
            rates = [_number(g["lr"]) for g in groups] if policy.needs_rates else []
            policy.observe(self.runtime.step, rates, self._norm(gradients) if policy.needs_gradient_norm else None)

    def _norm(self, gradients: Directions) -> Tensor | None:
        """Return the norm of the gradient of all covered parameters."""
        covered = [g for p, g in gradients.items() if self.covers(p)]
        if not covered:
            return None
        double = any(g.dtype in (torch.float64, torch.complex128) for g in covered)
        dtype = torch.float64 if double else torch.float32  # a norm in half precision may overflow
        norms = torch._foreach_norm([torch.view_as_real(g) if g.is_complex() else g for g in covered], 2, dtype)
        total: Tensor = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]))
        return total

    # ------------------------------------------------------------------ weight decay as part of the objective
    def change_sources(self, source: Directions, gradients: Directions, gate: Tensor | None) -> None:
        """With ``weight_decay_mode="reg"``, precondition the gradient of the decay, too."""
        for p in source:
            group = self.table.group_of[p]
            if group["weight_decay_mode"] == "reg" and group["weight_decay"]:
                source[p] = source[p] + group["weight_decay"] * p

    def rule(self, p: nn.Parameter, group: Mapping[str, Any], rule: Rule) -> Rule:
        """Return the first-order rule of a preconditioned parameter, without decay that its direction contains."""
        if rule.kind == "sgd" and group["weight_decay_mode"] == "reg":
            return rule._replace(weight_decay=0.0)
        return rule

    # ------------------------------------------------------------------ the error of few rows
    def probe_errors(self, blocks: Sequence[RowBlock], ranks: Mapping[RowBlock, int]) -> list[Tensor]:
        """The relative errors of KIS on a few layers; both directions are of this rank's examples alone."""
        asking = [b for b in blocks if b.group["mode"] == "auto"]
        usable = [b for b in asking if all(p in self._gradients_now for p in b.params)]
        count = min(self.plan.modes.policy.probes, len(usable))
        chosen = [usable[round(i * (len(usable) - 1) / max(count - 1, 1))] for i in range(count)]
        return [self._probe_error(block, ranks[block]) for block in chosen]

    def _probe_error(self, block: RowBlock, rank: int) -> Tensor:
        """The relative error of the direction that KIS finds for a layer."""
        fresh = block.captured
        rows = fresh.rows if fresh.share == 1 else kernel.scaled(fresh.rows, fresh.share**-0.5)
        gradient = block.layer.matrix([self._gradients_now[p].to(precision_of(p)) for p in block.params])
        matrix, norms = as_rows_matrix(rows, gradient), kernel.norms(rows)
        damping = block.damping_of(norms.sum(-1), fresh.examples)
        group = block.group
        if group["rank_energy"] is None:  # that of KIS, whatever the mode keeps
            most = max(1, group["max_rank"] // self.comm.sources(block.index))
            rank = min(selection.planned_rank(fresh.examples, group["rank_fraction"], most), rows.n)
        kept = self._sampled(block, rows, norms, rank, "probe of ")
        inverse, _ = woodbury.damped_inverse(row_choice.widened(kernel.gram(kept)), damping)
        exact = woodbury.exact_update(rows, damping, matrix)
        off = woodbury.apply(kept, inverse, damping, matrix) - exact
        error: Tensor = torch.linalg.vector_norm(off) / torch.linalg.vector_norm(exact).clamp(min=1e-30)
        return error

    # ------------------------------------------------------------------ stage 4: refresh
    def refresh_rows(self, blocks: Sequence[RowBlock]) -> dict[RowBlock, Tensor]:
        """Choose rows of this step and invert their kernel; returns by block whether that succeeded."""
        self.begin_rows(blocks)
        with self.runtime.stage("select"):
            # Not every example need pass a layer.
            limits = {b: min(self.plan.limit(b), b.captured.rows.n) for b in blocks}
            ranks = limits | self._by_energy(limits)
            kept = self.choose_rows(blocks, ranks)
            if self.plan.batch_size is not None:
                kept = {b: filled(k, self.plan.rank_of(b.group, self.plan.batch_size)) for b, k in kept.items()}
        ok = self.invert_rows(kept, {b: b.captured.ok for b in kept})
        errors = self.probe_errors(blocks, ranks)
        if errors:
            self.plan.modes.policy.probe(torch.stack([e.to(errors[0].device, torch.float64) for e in errors]).mean())
        return ok

    def invert_rows(self, kept: Mapping[RowBlock, Kept], good: Mapping[RowBlock, Tensor]) -> dict[RowBlock, Tensor]:
        """Invert the kernels of rows, and adopt those that may be used.

        Args:
            kept: The rows.
            good: Whether they may be used.

        Returns:
            Whether that succeeded, by block.
        """
        ok: dict[RowBlock, Tensor] = {}
        kinds: dict[tuple[Any, ...], list[RowBlock]] = {}
        for block, k in kept.items():
            kinds.setdefault((k.rows.n, k.rows.g.dtype, k.rows.g.device, k.core is None), []).append(block)
        for members in kinds.values():
            for some in stacks.bounded(members, lambda b: row_choice.batch(kept[b].rows) * kept[b].rows.n ** 2):
                ok |= self._invert({b: kept[b] for b in some}, good)
        return ok

    def _invert(self, kept: Mapping[RowBlock, Kept], usable: Mapping[RowBlock, Tensor]) -> dict[RowBlock, Tensor]:
        """Invert the kernels of equally many rows together, and adopt them."""
        with self.runtime.stage("kernel"):
            kernels = [row_choice.widened(kernel.gram(k.rows)) for k in kept.values()]
            stack, leads = stacks.joined(kernels, 2), [x.shape[:-2] for x in kernels]
            del kernels
        with self.runtime.stage("invert"):
            cores = [k.core.to(stack.dtype) for k in kept.values() if k.core is not None]
            if cores:
                found = woodbury.interpolated_inverse(stacks.joined(cores, 2), stack)
            else:
                found = woodbury.damped_inverse(stack, stacks.joined([k.damping for k in kept.values()], 0))
            ok = {}
            for (block, k), inverse, good in zip(kept.items(), *(stacks.parted(t, leads) for t in found), strict=True):
                ok[block] = good.all() & usable[block]
                block.adopt_rows(k, inverse, ok[block])
        return ok

    # ------------------------------------------------------------------ the choice
    def choose_rows(self, blocks: Sequence[RowBlock], ranks: Mapping[RowBlock, int]) -> dict[RowBlock, Kept]:
        """The rows to keep, as the mode of each block says."""
        kept: dict[RowBlock, Kept] = {}
        pivots: dict[RowBlock, Pivots] = {}
        for block in blocks:
            mode, rows, group = self.plan.modes.mode_in(block.group), block.captured.rows, block.group
            if mode == "kid":
                pivots[block] = Pivots(rows, ranks[block], group["kid_pivoting"], group["kid_residual"], block.damping)
                continue
            norms = kernel.norms(rows)
            found = rows if mode == "sngd" else self._sampled(block, rows, norms, ranks[block])
            kept[block] = Kept(found, block.damping(norms.sum(-1)))
        return kept | row_choice.interpolated(pivots)

    def _sampled(self, block: RowBlock, rows: Rows, scores: Tensor, rank: int, purpose: str = "") -> Rows:
        """Rows drawn by their scores ``[(Γ,) n]``; a draw depends on layer, refresh and rank alone."""
        place = f" on rank {self.comm.rank}" if self.comm.combines else ""
        refresh: int = block.state["refreshes"]
        seed = self.runtime.seed(zlib.crc32(f"{purpose}{block.name}{place}".encode()), refresh)
        return row_choice.sampled(rows, scores, rank, block.group["kis_sampling"], seed)

    # ------------------------------------------------------------------ state of the policy
    def rebuilt(self) -> None:
        """Act on a new plan, whose state has been allocated."""
        super().rebuilt()
        if (first := self.table.first) is not None:
            self.table.state[first].pop("switch_state", None)
            if self.is_auto() or self.plan.modes.mode is not None:
                self.table.state[first]["switch_state"] = self.plan.modes.vector()

    # ------------------------------------------------------------------ copies and facts
    def facts(self) -> dict[str, list[str]]:
        own = {"batch size and switch": [str(self.plan.batch_size), type(self.plan.modes.policy).__name__]}
        if self.setting.fisher.is_observed:
            own["Fisher"] = [f"fisher={self.setting.fisher.fisher!r}"]
        return {**super().facts(), **own}

    def own(self) -> dict[str, Any]:
        """Return the arguments of a copy that only this preconditioner has."""
        return {"batch_size": self.plan.batch_size, "modes": copy.copy(self.plan.modes)}


def _number(lr: Any) -> float:
    """Return a learning rate as a number; one on a device is waited for."""
    return float(lr.cpu().numpy()) if isinstance(lr, Tensor) else float(lr)
