"""Taps of an observer on the layers of an optimizer: the rows of a step, captured beside the optimizer's own."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from secondorder.capture.capture import Capture
from secondorder.capture.layers.parts import watched_attention
from secondorder.capture.passes import Pass
from secondorder.capture.sites import Site
from secondorder.capture.statistics.examples import ExampleRows
from secondorder.curvature.block import Block
from secondorder.curvature.wrappers import forwarded


class RowCapture(Capture):
    """Captures the rows of examples of all blocks, in the forwards that another capture takes part in.

    Args:
        root: The module.
        approx: ``"reduce"`` or ``"expand"``.
        leader: The optimizer's own capture; examples are counted as it counts them.

    Attributes:
        root: The module.
        blocks: What is tapped, a site each.
    """

    def __init__(self, root: nn.Module, approx: str, leader: Capture) -> None:
        self.root, self._approx = root, approx
        self.blocks: list[Block] = []
        self.follow(leader)
        super().__init__(forwarded(root), leader.batch_dim, leader.batch_input, leader.loss_scale)

    def follow(self, leader: Capture) -> None:
        """Pause together with another capture, and leave the same positions out; once it is closed, capture nothing."""
        self._leader = weakref.ref(leader)

    def watch(self, blocks: list[Block]) -> None:
        """Tap these blocks and no others."""
        self.blocks = blocks
        sites = [self._site(block) for block in blocks]
        self.set_sites(
            sites, watched_attention(self.root, {tap.module for block in blocks for tap in block.layer.taps})
        )

    def _site(self, block: Block) -> Site:
        approx, double = self._approx, block.owner.dtype == torch.float64

        def new_statistic() -> ExampleRows:
            scale = block.group.get("conv_scale", "exact")  # only HyLo has another
            return ExampleRows(block.adapter, approx, torch.float64 if double else torch.float32, conv_scale=scale)

        return Site(block.label, block.layer.taps, block.owner, new_statistic)

    def drop_orphans(self) -> None:
        """Discard what is pending if its gradients are gone, and be armed or not as the optimizer's own capture is."""
        super().drop_orphans()
        self.switch.armed = bool(self._due) and not self._is_held()

    def _gradients_are_gone(self) -> bool:
        return all(_is_gone(site.owner.grad) for site in self.sites)

    def arm(self, due: Iterable[int]) -> None:
        """As in the base class, but not while the optimizer's own capture is paused."""
        super().arm(due)
        self.switch.armed = self.switch.armed and not self._is_held()

    def _begin(self, current: Pass) -> int:
        leader = self._leader()
        current.keep = None if leader is None else leader.keep
        return super()._begin(current)

    def wants(self, index: int) -> bool:
        """As in the base class, but never while the optimizer's own capture is paused."""
        return not self._is_held() and super().wants(index)

    def _is_held(self) -> bool:
        leader = self._leader()
        return leader is None or leader.is_closed or leader.is_paused


def _is_gone(grad: Tensor | None) -> bool:
    """Whether a gradient was discarded: a step that was skipped may be followed by zeros in its place."""
    if grad is None:
        return True
    return not bool((grad.detach().coalesce().values() if grad.is_sparse else grad.detach()).any())
