"""The statistics of a step, which the backward passes since the last step have summed layer by layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from secondorder.capture.loss_scale import UNKNOWN, LossScale
from secondorder.capture.sites import Captured, Site, Statistic

if TYPE_CHECKING:
    from secondorder.capture.passes import Pass
    from secondorder.capture.roots import Roots
    from secondorder.capture.statistics.call import Call


class StepStatistics:
    """Statistics of the layers since the last step, and the layers that cannot have any.

    Args:
        loss_scale: Scale that gradients carry.

    Attributes:
        sites: The layers that are tapped.
        by_site: Statistics captured since the last step, by index of the site.
        due: Sites being captured.
        refused: Why sites have no statistics, as text.
        idle: Sites whose layer ran on no row at all since the last step.
        terms: Loss terms that were observed, 0-dim, or None.
        scale_is_unknown: Whether there were float16 gradients with an unknown scale.
        were_left_out: Whether statistics are missing for a reason that needs no warning.
    """

    def __init__(self, loss_scale: LossScale) -> None:
        self.loss_scale = loss_scale
        self.sites: list[Site] = []
        self.due: set[int] = set()
        self.refused: dict[int, str] = {}
        self.idle: set[int] = set()
        self.were_left_out = False
        self._void: set[int] = set()
        self.clear()
        loss_scale.register(self)

    def set_sites(self, sites: Iterable[Site]) -> None:
        """Begin again with these layers."""
        self.clear()
        self.due.clear()
        self.refused.clear()
        self.sites = list(sites)

    def clear(self) -> None:
        """Discard the statistics captured since the last step."""
        self.by_site: dict[int, Statistic] = {}
        self._own_examples: dict[int, int] = {}
        self._void.clear()
        self.terms: Tensor | None = None
        self.scale_is_unknown = False

    def take(self, roots: Roots) -> Captured:
        """Return the statistics, with the examples that the roots have counted."""
        examples = {i: roots.examples_of(i) + self._own_examples.get(i, 0) for i in self.by_site}
        taken = Captured(self.by_site, examples, frozenset(self.idle), self.terms, roots.examples)
        self.idle.clear()
        for index in self.by_site:
            self.refused.pop(index, None)
        return taken

    # ------------------------------------------------------------------ what is left out
    def refuse(self, index: int, reason: str) -> None:
        """Leave a layer out of this step's statistics, because they would be wrong."""
        self.refused[index] = reason
        self._void.add(index)
        self.by_site.pop(index, None)

    def leave_out(self, reason: str | None = None) -> None:
        """Leave out the statistics of this step, with a warning if there is a reason for one. Its examples count."""
        self.by_site.clear()
        self._void.update(range(len(self.sites)))
        self.refused = {i: why for i, why in self.refused.items() if why != UNKNOWN}
        if reason is None:
            self.were_left_out = True
        else:
            self.refused.update(dict.fromkeys(self.due, reason))

    def check_scale(self, g: Tensor) -> None:
        """Leave out the statistics if a gradient is float16 and its scale is unknown."""
        if g.dtype == torch.float16 and self.loss_scale.scaler is None and not self.scale_is_unknown:
            # Layers that run in float32 carry the same scale, but do not reveal it.
            self.scale_is_unknown = True
            self.leave_out(UNKNOWN)

    def follow_scale(self, changes: bool) -> None:
        """Leave out statistics that were captured with an unknown scale. ``changes``: whether the new one differs."""
        if self.scale_is_unknown or (changes and (self.by_site or self._void)):
            self.leave_out()  # no statistics are better than wrong ones

    # ------------------------------------------------------------------ what is added
    def record(self, index: int, call: Call, current: Pass | None) -> None:
        """Add a use of a layer, with its pass if it is known."""
        if current is None or current.evidence.examples is None:
            examples = 1 if call.adapter.is_unbatched(call.g if call.x is None else call.x) else call.g.shape[0]
            self._own_examples[index] = self._own_examples.get(index, 0) + examples
            self.add(index, [call], examples)
            return
        if call.g.numel() == 0:
            self.idle.add(index)  # an expert without tokens has no information about its factors
            return
        if index in self._void:
            return
        if not self._statistic(index).wants_whole_pass:
            self.add(index, [call], current.evidence.examples)
            return
        waiting, calls = current.fired.setdefault(index, []), current.calls.get(index, 0)
        if calls and current.done[index] >= calls:
            self.add(index, [*waiting, call], current.evidence.examples)
            del current.fired[index]
        else:
            # Copy them, because a compiled backward pass reuses the memory of its activations.
            waiting.append(call._replace(x=None if call.x is None else call.x.clone(), g=call.g.clone()))

    def flush(self, passes: Iterable[Pass]) -> None:
        """Add calls that waited for others of their pass (a branch without a backward pass, a recomputed layer)."""
        for current in passes:
            for index, calls in current.fired.items():
                self.add(index, calls, current.evidence.examples or 0)
            current.fired.clear()

    def add(self, index: int, calls: list[Call], examples: int) -> None:
        """Add calls of one pass to the statistic of a site."""
        if index in self._void:
            return
        try:
            self._statistic(index).add(calls, examples)
        except ValueError as error:
            self.refuse(index, str(error))

    def _statistic(self, index: int) -> Statistic:
        if index not in self.by_site:
            self.by_site[index] = self.sites[index].new_statistic()
        return self.by_site[index]
