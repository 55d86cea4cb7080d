"""Taps of an observer on the layers of an optimizer: the rows of a step, captured beside the optimizer's own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from secondorder.curvature.block import Block
from secondorder.curvature.capture import Capture, Site
from secondorder.curvature.examples import ExampleRows
from secondorder.curvature.parts import watched_attention


class RowCapture(Capture):
    """Captures the rows of examples of all blocks; pauses together with the optimizer's own capture.

    Args:
        root: The module.
        approx: ``"reduce"`` or ``"expand"``.
        leader: The optimizer's own capture, None while it has none.
    """

    def __init__(self, root: nn.Module, approx: str, leader: Callable[[], Capture | None]) -> None:
        self.root, self._approx, self._leader = root, approx, leader
        super().__init__([root])

    def watch(self, blocks: list[Block]) -> None:
        """Tap these blocks and no others."""
        sites = [self._site(block) for block in blocks]
        self.set_sites(sites, watched_attention(self.root, {m for block in blocks for m, _ in block.taps}))

    def _site(self, block: Block) -> Site:
        double = block.owner.dtype == torch.float64
        approx, adapter, dtype = self._approx, block.adapter, torch.float64 if double else torch.float32
        return Site(block.name, block.taps, adapter, block.owner, lambda: ExampleRows(adapter, approx, dtype))

    def drop_orphans(self) -> None:
        """Discard what is pending if its gradients are gone, and be armed or not as the optimizer's own capture is."""
        waiting = self._pending or self._examples
        if waiting and self._backward_ran and all(_is_gone(site.owner.grad) for site in self.sites):
            self.discard()
        self.switch.armed = bool(self._due) and not self._is_held()

    def open_pass(self, shape: torch.Size, holds_indices: bool) -> int:
        """Begin a forward pass, with the mask that the optimizer was given."""
        leader = self._leader()
        self._keep = None if leader is None else leader._keep
        return super().open_pass(shape, holds_indices)

    def wants(self, index: int) -> bool:
        """As in the base class, but never while the optimizer's own capture is paused."""
        return not self._is_held() and super().wants(index)

    def _is_held(self) -> bool:
        leader = self._leader()
        return leader is None or leader.is_paused


def _is_gone(grad: Tensor | None) -> bool:
    """Whether a gradient was discarded: a step that was skipped may be followed by zeros in its place."""
    if grad is None:
        return True
    return not bool((grad.detach().coalesce().values() if grad.is_sparse else grad.detach()).any())
