"""Taps of an observer on the layers of an optimizer, which capture the rows of a step separately from the optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import nn

from secondorder.capture.capture import Capture
from secondorder.capture.layers.parts import watched_attention
from secondorder.capture.sites import Site
from secondorder.capture.statistics.examples import ExampleRows
from secondorder.curvature.block import Block
from secondorder.curvature.wrappers import forwarded


class RowCapture:
    """Captures the rows of examples of all blocks, in the forward passes in which another capture is active.

    Args:
        root: The module.
        approx: ``"reduce"`` or ``"expand"``.
        leader: The optimizer's own capture, which determines how examples are counted.
        before_forward: Returns the function that is called before each forward pass, or None.

    Attributes:
        root: The module.
        blocks: The tapped blocks, one site each.
        capture: The capture of their rows.
    """

    def __init__(
        self, root: nn.Module, approx: str, leader: Capture, before_forward: Callable[[], Callable[[], None] | None]
    ) -> None:
        self.root, self._approx = root, approx
        self.blocks: list[Block] = []
        self.capture = Capture(
            forwarded(root),
            leader.batch_dim,
            leader.batch_input,
            leader.statistics.loss_scale,
            owner=weakref.ref(self),
            before_forward=before_forward,
            are_gone=_are_gone,
        )

    def follow(self, leader: Capture) -> None:
        """Pause together with another capture and leave out the same positions. Once it is closed, capture nothing."""
        self.capture.gate.follow(leader.gate)

    def watch(self, blocks: list[Block]) -> None:
        """Tap these blocks and no others."""
        self.blocks = blocks
        tapped = {tap.module for block in blocks for tap in block.layer.taps}
        self.capture.set_sites([self._site(block) for block in blocks], watched_attention(self.root, tapped))

    def _site(self, block: Block) -> Site:
        approx, double = self._approx, block.owner.dtype == torch.float64

        def new_statistic() -> ExampleRows:
            scale = block.group.get("conv_scale", "exact")  # only HyLo has another value
            return ExampleRows(block.adapter, approx, torch.float64 if double else torch.float32, conv_scale=scale)

        return Site(block.label, block.layer.taps, block.owner, new_statistic)


def _are_gone(owners: Sequence[nn.Parameter], reduced: bool) -> bool:
    """Whether gradients were discarded. After a skipped step, zeros may have replaced them."""
    gradients = [p.grad.detach() for p in owners if p.grad is not None]
    return not any((grad.coalesce().values() if grad.is_sparse else grad).any() for grad in gradients)
