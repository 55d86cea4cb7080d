"""Observation, which pulls vectors back from the model outputs to the layer outputs in passes without a loss.

Forward passes keep the edges of their layer outputs (``Pass.edges``); the gradients there are computed by
``autograd.grad``, so that no gradient of a weight is computed, and ``.grad`` and the graph do not change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

if TYPE_CHECKING:
    from secondorder.capture.forwards import Forwards
    from secondorder.capture.passes import Pass
    from secondorder.capture.statistics.call import Call
    from secondorder.capture.step_statistics import StepStatistics
    from secondorder.capture.taps import Seen


_NOTHING_TO_OBSERVE = (
    "observe: no covered layer of a captured forward leads to these outputs. Pass the outputs that the model itself "
    "returned in train mode, once per forward (several heads in one call) and before its backward; a compiled model "
    "cannot be observed."
)
_OBSERVED_ALREADY = (
    "observe: this forward was observed already. Pass all heads in one call: observe([first, second], [...])."
)
_REENTRANT = (
    "observe: a part of the model is checkpointed with use_reentrant=True, which hides its layers from any backward "
    "but the loss's. Use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
)
_NO_GRAPH = (
    "observe: the graph behind the outputs was freed or never built. Call observe between the forward and "
    "loss.backward(), outside torch.no_grad()."
)


class NothingObservedError(RuntimeError):
    """No layer whose statistics are due leads to the outputs."""


class Observation:
    """Observes the forward passes that wait to be observed.

    Args:
        forwards: The passes.
        statistics: Statistics to which the gradients are added.

    Attributes:
        is_running: Whether the current pass through the model belongs to an observation.
    """

    def __init__(self, forwards: Forwards, statistics: StepStatistics) -> None:
        self._forwards, self._statistics = forwards, statistics
        self.is_running = False

    def observe(self, outputs: list[Tensor], vectors: Iterable[list[Tensor]], terms: Tensor) -> None:
        """Pull vectors back to the layer outputs, and add the resulting gradients to the statistics.

        Args:
            outputs: Model outputs.
            vectors: For each backward pass, one tensor per output; the second moments add up.
            terms: Number of loss terms in the outputs, 0-dim.

        Raises:
            NothingObservedError: If the outputs do not depend on a layer that is waiting.
            RuntimeError: If the forward pass was observed already, or its graph was freed.
        """
        forwards = self._forwards
        waiting = [(current, edge, seen) for current in forwards.waiting() for edge, seen in current.edges]
        if not waiting:
            if any(current.observed for current in forwards):
                raise RuntimeError(_OBSERVED_ALREADY)
            raise NothingObservedError(_NOTHING_TO_OBSERVE)
        self.is_running, reached = True, set[int]()
        try:
            for number, vector in enumerate(vectors):
                gradients = _pull_back(outputs, [edge for _, edge, _ in waiting], vector)
                if number == 0:
                    found = [(p, s) for (p, _, s), g in zip(waiting, gradients, strict=True) if g is not None]
                    reached = {id(current) for current, _ in found}
                    self._count([forwards.forward_of(*used) for used in found], terms)
                self._take_in(waiting, gradients, number > 0)
        finally:
            self.is_running = False
        for current in forwards.waiting():
            if id(current) in reached:
                current.edges.clear()
                current.observed = True

    def _count(self, passes: list[Pass], terms: Tensor) -> None:
        """Count the examples of some passes, and the loss terms in their outputs."""
        if not passes:
            raise NothingObservedError(_NOTHING_TO_OBSERVE)
        before = self._statistics.terms
        self._statistics.terms = terms if before is None else before + terms
        for current in passes:
            self._forwards.count(current)

    def _take_in(
        self, waiting: list[tuple[Pass, GradientEdge, Seen]], gradients: Sequence[Tensor | None], again: bool
    ) -> None:
        statistics = self._statistics
        calls: dict[tuple[int, int], tuple[Pass, list[Call]]] = {}
        for (current, _, seen), g in zip(waiting, gradients, strict=True):
            if g is None or g.numel() == 0 or seen.site not in statistics.due:
                continue
            if seen.is_stale:
                statistics.refuse(seen.site, "its input is modified in place before it is observed")
                continue
            current = self._forwards.forward_of(current, seen)
            call = current.evidence.call_of(seen, g.reshape(seen.shape), again=again)
            calls.setdefault((id(current), seen.site), (current, []))[1].append(call)
        for (_, index), (current, found) in calls.items():
            statistics.add(index, found, current.evidence.examples or 0)


def _pull_back(outputs: list[Tensor], edges: list[GradientEdge], vectors: list[Tensor]) -> tuple[Tensor | None, ...]:
    try:
        with torch.enable_grad():
            return torch.autograd.grad(outputs, edges, vectors, retain_graph=True, allow_unused=True)
    except RuntimeError as error:
        if "second time" in str(error) or "does not require grad" in str(error):
            raise RuntimeError(_NO_GRAPH) from error
        if ".grad()" in str(error) or "use_reentrant" in str(error):
            raise RuntimeError(_REENTRANT) from error
        raise
