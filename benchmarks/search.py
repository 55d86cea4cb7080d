"""A search for the settings of one optimizer, one axis after the other.

Rates are bracketed: the search continues in steps of ``10^¼`` until the best value has a worse neighbor on both sides.
The other axes are lists of choices. The first axis is searched again at the end, because the choices move its optimum.
The search depends only on the losses, so an interrupted search can be repeated with the known losses.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.recipes.types import Setting, Settings

STEP = 10**0.25
"""Ratio of two neighboring rates."""
_MOST = 12
"""Maximum number of rates on each side. A search that leaves this range has no optimum."""

LossOf = Callable[[Settings], float]
"""Trains with some settings, and returns the final loss, which is infinite for a failed run."""


@dataclass(frozen=True)
class Axis:
    """Keywords that are multiplied by the same power of :data:`STEP`, or one keyword with its choices."""

    keywords: tuple[str, ...]
    choices: tuple[Setting, ...] = ()

    def best(self, start: Settings, loss_of: LossOf) -> Settings:
        """Return the best settings on the axis through ``start``; ``start`` if it and both of its neighbors fail."""
        if self.choices:
            found = [{**start, **dict.fromkeys(self.keywords, choice)} for choice in self.choices]
            return min([start, *found], key=loss_of)
        losses = {0: loss_of(start)}
        while True:
            best = min(losses, key=lambda power: (losses[power], -power))
            beyond = [power for power in (best - 1, best + 1) if power not in losses and abs(power) <= _MOST]
            fails = len(losses) > 1 and math.isinf(losses[best])
            if fails or not beyond:
                return self._moved(start, 0 if fails else best)
            losses.update({power: loss_of(self._moved(start, power)) for power in beyond})

    def _moved(self, start: Settings, power: int) -> Settings:
        if power == 0:
            return start
        rates = {key: float(start[key] or 0) for key in self.keywords if key in start}
        return {**start, **{key: float(f"{rate * STEP**power:.4g}") for key, rate in rates.items()}}


def search(start: Settings, axes: Sequence[Axis], loss_of: LossOf) -> Settings:
    """Return the best settings that were found.

    Args:
        start: The settings to begin with.
        axes: The axes to search, in this order.
        loss_of: Returns the loss of a run. It may be called several times for the same settings.
    """
    best = start
    for axis in (*axes, axes[0]):
        best = axis.best(best, loss_of)
    return best
