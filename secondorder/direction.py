"""Stages 5 and 6 of a step: precondition, then bound the direction (kl-clip, graft, clip)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from secondorder import update
from secondorder.curvature.block import Block
from secondorder.lifecycle import Lifecycle
from secondorder.linalg import all_true_on_cpu, full_precision

Directions = dict[nn.Parameter, Tensor]


class Directing(Lifecycle):
    """From gradients to the directions of the parameters that blocks cover."""

    @abstractmethod
    def precondition(self, block: Block, gradient: Tensor) -> Tensor:
        """Apply the inverse curvature of a block to a gradient matrix ``[(Γ,) n_g, n_a]``."""

    def _active(self, block: Block, gradients: Directions) -> bool:
        """Whether a block preconditions in this step."""
        ready = block.group["inv_update_steps"] > 0 and self.state[block.owner]["refreshes"] > 0
        return bool(ready) and all(p in gradients for p in block.params)

    def _directions(self, gradients: Directions, gate: Tensor | None) -> Directions:
        """Preconditioned, bounded directions of the parameters of active blocks."""
        active = [b for b in self._blocks if self._active(b, gradients)]
        if not active:
            return {}
        source = self._adam_sources(active, gradients, gate)
        directions: Directions = {}
        with full_precision(active[0].owner.device):
            for block in active:
                self._workspace.reset()
                tensors = [source[p].to(self._precision(p)) for p in block.params]
                matrix = block.matrix(tensors, self._workspace)
                parts = block.split(self.precondition(block, matrix))
                directions.update(zip(block.params, parts, strict=True))
        parameters = list(directions)
        shared = self.comm.share_directions(list(directions.values()))
        directions = dict(zip(parameters, shared, strict=True))
        self._kl_clip(directions, self._guard(active, directions, source))
        self._graft(active, directions, gradients)
        self._clip(directions)
        return {p: d.to(p.dtype) for p, d in directions.items()}

    def _adam_sources(self, blocks: Sequence[Block], gradients: Directions, gate: Tensor | None) -> Directions:
        """What to precondition: the gradient, or Adam's bias-corrected first moment where Adam gives the size."""
        source = {p: gradients[p] for b in blocks for p in b.params}
        for group in self.param_groups:
            members = [p for p in group["params"] if p in source and self._grafts_adam(p)]
            if not members:
                continue
            means, squares = self._moments(members)
            update.adam_moments_([gradients[p] for p in members], means, squares, group["fallback_betas"], gate)
            for p, mean in zip(members, means, strict=True):
                source[p] = mean / (1 - group["fallback_betas"][0] ** self._steps_of(p))
        return source

    def _grafts_adam(self, p: nn.Parameter) -> bool:
        return bool(self._block_of[p].group["graft"] == "adam")

    def _guard(self, blocks: Sequence[Block], directions: Directions, source: Directions) -> Directions:
        """A block whose direction is not finite takes its gradient for this step.

        Returns:
            ``⟨direction, source⟩`` by parameter: they are not finite where a direction is not, and kl-clip needs them.
        """
        products = {p: update.inner_product(d, source[p].to(d.dtype)) for p, d in directions.items()}
        finite = torch.isfinite(torch.stack([x.to(torch.float32) for x in products.values()]))
        if finite.device.type == "cpu" and all_true_on_cpu(finite):
            return products
        for block in blocks:
            good = torch.isfinite(torch.stack([products[p] for p in block.params])).all()
            for p in block.params:
                plain = source[p].to(directions[p].dtype)
                directions[p] = torch.where(good, directions[p], plain)
                products[p] = torch.where(good, products[p], update.inner_product(plain, plain))
        return products

    def _kl_clip(self, directions: Directions, products: Directions) -> None:
        clipped = [p for p in directions if self._group[p].get("kl_clip") and not self._grafted(p)]
        if not clipped:
            return
        terms, lrs = [products[p] for p in clipped], [rate(self._group[p]["lr"]) for p in clipped]
        for limit in {self._group[p]["kl_clip"] for p in clipped}:
            self._kl_factor = factor = update.kl_clip_factor(terms, lrs, limit)
            torch._foreach_mul_([directions[p] for p in clipped if self._group[p]["kl_clip"] == limit], factor)

    def _grafted(self, p: nn.Parameter) -> bool:
        return self._block_of[p].group["graft"] is not None

    def _graft(self, blocks: Sequence[Block], directions: Directions, gradients: Directions) -> None:
        """Give each block the step size of the rule named by ``graft``."""
        for block in blocks:
            rule = block.group["graft"]
            if rule is None:
                continue
            own = [directions[p] for p in block.params]
            wanted = [gradients[p] for p in block.params]
            if rule == "adam":
                wanted = [self._adam_step(p) for p in block.params]
            size, length = (torch.linalg.vector_norm(update.norms(x)) for x in (wanted, own))
            torch._foreach_mul_(own, torch.where(length > 0, size / length, torch.ones_like(length)).to(own[0].dtype))

    def _adam_step(self, p: nn.Parameter) -> Tensor:
        (beta1, beta2), eps = self._group[p]["fallback_betas"], self._group[p]["fallback_eps"]
        state, step = self.state[p], self._steps_of(p)
        (root,) = update.adam_denominators([state["exp_avg_sq"]], [step], beta2, eps)
        return cast("Tensor", state["exp_avg"] / (1 - beta1**step) / root)

    def _clip(self, directions: Directions) -> None:
        limited = [p for p in directions if self._group[p]["clip_norm"] is not None]
        if limited:
            total = torch.linalg.vector_norm(update.norms([directions[p] for p in limited]))
            for p in limited:
                directions[p].mul_((self._group[p]["clip_norm"] / (total + 1e-12)).clamp(max=1).to(directions[p].dtype))
        for p, direction in directions.items():
            if (bound := self._group[p]["clip_value"]) is not None:
                direction.clamp_(-bound, bound)


def rate(lr: Any) -> Any:
    """A learning rate as a number or a 0-dim tensor."""
    return lr.reshape(()) if isinstance(lr, Tensor) else lr
