"""Observation: vectors pulled back from the model outputs to the layer outputs, in passes that no loss takes part in.

Forwards leave the edges of their layer outputs behind (``Pass.edges``); the gradients there are asked for with
``autograd.grad``, so that no gradient of a weight is computed and ``.grad`` and the graph stay as they are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from secondorder.capture.passes import Pass
from secondorder.capture.sites import Site
from secondorder.capture.statistics.kronecker import Call
from secondorder.capture.taps import Seen

_NOTHING_TO_OBSERVE = (
    "observe: no covered layer of a forward that was captured leads to these outputs. Pass what the model itself "
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
    "observe: the graph behind the outputs is gone or was never built. Call observe between the forward and "
    "loss.backward(), outside torch.no_grad()."
)


class Observation(ABC):
    """What a capture does with forwards that wait to be observed."""

    sites: list[Site]
    _passes: dict[int, Pass]
    _due: set[int]
    _observing: bool
    _terms: Tensor | None

    @abstractmethod
    def refuse(self, index: int, reason: str) -> None:
        """Leave a layer out of this step's statistics: they would be wrong."""

    @abstractmethod
    def _add(self, index: int, calls: list[Call], examples: int) -> None:
        """Hand calls of one pass to the statistic of a site."""

    @abstractmethod
    def forward_of(self, current: Pass, seen: Seen) -> Pass:
        """The forward among those of a pass that a use of a layer belongs to."""

    @abstractmethod
    def _count(self, current: Pass) -> None:
        """Count the examples of a pass, once."""

    def observable(self) -> list[Pass]:
        """Forward passes whose layer outputs are waiting to be observed."""
        return [current for current in self._passes.values() if current.edges]

    def observe(self, outputs: list[Tensor], vectors: Iterable[list[Tensor]], terms: Tensor) -> None:
        """Push vectors back to the layer outputs and take in what arrives.

        Args:
            outputs: Model outputs.
            vectors: For each backward pass, one tensor per output; the second moments add up.
            terms: Loss terms in the outputs, 0-dim.

        Raises:
            RuntimeError: If the outputs do not depend on a layer that is waiting, or their graph is gone.
        """
        waiting = [(current, edge, seen) for current in self.observable() for edge, seen in current.edges]
        if not waiting:
            again = any(current.observed for current in self._passes.values())
            raise RuntimeError(_OBSERVED_ALREADY if again else _NOTHING_TO_OBSERVE)
        self._observing, reached = True, set[int]()
        try:
            for number, vector in enumerate(vectors):
                gradients = _pull_back(outputs, [edge for _, edge, _ in waiting], vector)
                if number == 0:
                    reached = {id(w[0]) for w, g in zip(waiting, gradients, strict=True) if g is not None}
                    used = [
                        self.forward_of(p, s) for (p, _, s), g in zip(waiting, gradients, strict=True) if g is not None
                    ]
                    self._count_observed(used, terms)
                self._take_in(waiting, gradients, number > 0)
        finally:
            self._observing = False
        for current in self.observable():
            if id(current) in reached:
                current.edges.clear()
                current.observed = True

    def _count_observed(self, passes: list[Pass], terms: Tensor) -> None:
        """Count the examples of some passes, and the loss terms in their outputs."""
        if not passes:
            raise RuntimeError(_NOTHING_TO_OBSERVE)
        self._terms = terms if self._terms is None else self._terms + terms
        for current in passes:
            self._count(current)

    def _take_in(
        self,
        waiting: list[tuple[Pass, GradientEdge, Seen]],
        gradients: Sequence[Tensor | None],
        again: bool,
    ) -> None:
        calls: dict[tuple[int, int], tuple[Pass, list[Call]]] = {}
        for (current, _, seen), g in zip(waiting, gradients, strict=True):
            if g is None or g.numel() == 0 or seen.site not in self._due:
                continue
            if seen.is_stale:
                self.refuse(seen.site, "its input is modified in place before it is observed")
                continue
            adapter, current = seen.adapter, self.forward_of(current, seen)
            x, g = current.lay_out(seen.x, g.reshape(seen.shape), adapter)
            keep, shared = current.mask_for(g, adapter), current.is_shared(x, g, adapter)
            call = Call(x, g, adapter, None, keep, seen.part, again, shared, current.is_unclear(x, g, adapter))
            calls.setdefault((id(current), seen.site), (current, []))[1].append(call)
        for (_, index), (current, found) in calls.items():
            self._add(index, found, current.examples or 0)


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
