"""Warnings about statistics that are missing or uncertain, each issued once."""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING, Any

from torch import Tensor

from secondorder.capture.capture import Capture
from secondorder.capture.coverage import NO_HOOKS, REPEATED, advice, kind_of, verdict
from secondorder.capture.layers.projections import Projection
from secondorder.capture.loss_scale import UNKNOWN
from secondorder.capture.statistics.measurement import Reduced
from secondorder.curvature.block import Block
from secondorder.frames import depth_of_caller
from secondorder.parameters import Directions

if TYPE_CHECKING:
    from secondorder.preconditioners.block_plan import BlockPlan


class CaptureWarnings:
    """Warns once about each layer that lacks statistics, and about each reason for doubts about them.

    Args:
        method: Name of the optimizer's class.
        plan: The blocks.
    """

    def __init__(self, method: str, plan: BlockPlan[Any]) -> None:
        self._method, self._plan = method, plan
        self._issued: set[str] = set()
        #: The gradient of the first layer in the last step, and its version. They change with every backward pass.
        self._last_gradient: tuple[weakref.ref[Tensor] | None, int] = (None, 0)

    def warn(self, text: str, key: str = "") -> None:
        """Issue a warning unless one with this key, by default the text itself, has been issued."""
        if (key or text) not in self._issued:
            self._issued.add(key or text)
            warnings.warn(f"{self._method}: {text}", stacklevel=depth_of_caller())

    def remember_gradient(self) -> None:
        """Store the gradient of a step that ends."""
        gradient = next((b.owner.grad for b in self._plan.blocks if b.owner.grad is not None), None)
        self._last_gradient = (None, 0) if gradient is None else (weakref.ref(gradient), gradient._version)

    def warn_of_doubts(self, capture: Capture) -> None:
        """Warn if the number of examples of a forward pass is uncertain."""
        doubts = sorted(capture.forwards.doubts)
        capture.forwards.doubts.clear()
        if doubts:
            self.warn(
                f"it is not certain how many examples a forward pass of {doubts[0]}. The scale of the curvature "
                "depends on this number. Name the argument of forward that counts the examples with "
                "batch=BatchOptions(input=...), or pass a function of the arguments of forward there. If your script "
                "calls parts of the model instead of its forward, call them from one forward.",
                key="number of examples",
            )

    def warn_of_missing(self, capture: Capture, reduced: Reduced, gradients: Directions) -> None:
        """Warn about the layers that have a gradient but no statistics although they were due."""
        gate, statistics, blocks = capture.gate, capture.statistics, self._plan.blocks
        if gate.was_paused or statistics.were_left_out:
            gate.was_paused = statistics.were_left_out = False
            return
        due = frozenset(statistics.due) | set(statistics.refused)
        wanted = [blocks[i] for i in due if blocks[i].owner in gradients]
        lacking = [b for b in wanted if b.index not in reduced.measured and b.index not in reduced.idle]
        if not lacking:
            return
        if self._is_repeated(reduced):
            self.warn(REPEATED)
            return
        missed, names = dict[str, str](), set[str]()
        for block in lacking:
            reason = statistics.refused.setdefault(block.index, _reason(capture, block))  # describe() reports it too
            own = {block.name, reason, f"{kind_of(block.name)}: {kind_of(reason)}"}
            if not own & self._issued:
                missed[block.label] = reason
                names.add(block.name)
        if not missed:
            return
        self._issued |= names | ({UNKNOWN} & set(missed.values()))  # this applies to every layer, even if due later
        # The experts of a mixture have other shapes in every batch, so warn once for all of them.
        self._issued |= {f"{kind_of(name)}: {kind_of(why)}" for name, why in missed.items() if kind_of(why) != why}
        todo = advice(missed, bool(reduced.measured or reduced.idle), self._plan.options.batch.dim)
        self.warn(f"{verdict(missed, len(wanted))}{todo}")

    def _is_repeated(self, reduced: Reduced) -> bool:
        """Whether this step has the gradients of the last step."""
        before, version = self._last_gradient
        gradient = None if before is None else before()
        if reduced.measured or gradient is None or gradient._version != version:
            return False
        return any(block.owner.grad is gradient for block in self._plan.blocks)


def _reason(capture: Capture, block: Block) -> str:
    """Return why a block has no statistics if its capture has recorded no reason."""
    if capture.observes:
        return "observe() was not called for it"
    if isinstance(block.layer.taps[0].module, Projection):
        return f"{NO_HOOKS}; in a compiled model call secondorder.nn.expose(model) first"
    return NO_HOOKS
