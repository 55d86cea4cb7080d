"""When layers are captured and refreshed: numbers in, answers out.

::

    step t         a refresh is due: it is done, or with overlap begun on copies of the factors
    step t + lag   what was begun is adopted                             lag = max(1, interval // 10)

The first refresh of a block and those of a warm-up are done at once. All answers follow from the step counter and from
counters of the state, so they are the same on every rank and after a resume.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Counters(NamedTuple):
    """What has happened to a block.

    Attributes:
        updates: Updates of its estimate.
        refreshes: Refreshes that succeeded.
        failed_at: Updates there were when its last refresh failed.
        adopt_at: Step that adopts what was begun; 0 if nothing was.
    """

    updates: int
    refreshes: int
    failed_at: int = 0
    adopt_at: int = 0


@dataclass(frozen=True)
class RefreshSchedule:
    """Which steps capture, refresh, begin and adopt, for intervals that may change from step to step.

    Everywhere ``t`` is the step, ``interval`` the steps between two refreshes, 0 for none at all, and ``place`` the
    index of a block and the number of blocks.

    Attributes:
        stagger: Whether refreshes of the blocks are spread over the interval.
        warmup: Whether the steps 0, 1, 2, 4, 8, … of the first interval refresh, and all of them capture.
        overlap: Whether refreshes run beside training.
    """

    stagger: bool = False
    warmup: bool = False
    overlap: bool = False

    @staticmethod
    def lag(interval: int) -> int:
        """Steps between the beginning of an overlapped refresh and its adoption."""
        return max(1, interval // 10)

    def captures(self, t: int, every: int, interval: int, updates: int) -> bool:
        """Whether a step captures statistics: every so many steps, and until there are some."""
        return interval > 0 and (self._warms_up(t, interval) or t % every == 0 or updates == 0)

    def refreshes(self, t: int, interval: int, place: tuple[int, int], counters: Counters) -> bool:
        """Whether a step refreshes a block: from the estimate of now, or by adopting what was begun."""
        if self.adopts(t, interval, counters):
            return True
        if interval == 0 or counters.updates == 0:
            return False
        if counters.refreshes == 0:
            return counters.updates > counters.failed_at  # the same factors would only fail again
        return self._is_done_at_once(t, interval) and self._is_scheduled(t, interval, place)

    def begins(self, t: int, interval: int, place: tuple[int, int], refreshes: int) -> bool:
        """Whether a step begins a refresh of a block that a later step adopts."""
        later = interval > 0 and refreshes > 0 and not self._is_done_at_once(t, interval)
        return later and self._is_scheduled(t, interval, place)

    def adopts(self, t: int, interval: int, counters: Counters) -> bool:
        """Whether a step adopts what was begun: the step that was to adopt it, or the next one that is taken."""
        return self.overlap and interval > 0 and 0 < counters.adopt_at <= t and counters.refreshes > 0

    def adoption(self, t: int, interval: int, place: tuple[int, int]) -> int:
        """The step itself if it adopts a refresh in a run that takes every step, and else 0."""
        begun = t - self.lag(interval)
        return t if begun > 0 and self.begins(begun, interval, place, 1) else 0

    def _warms_up(self, t: int, interval: int) -> bool:
        return self.warmup and t < interval

    def _is_done_at_once(self, t: int, interval: int) -> bool:
        return not self.overlap or self._warms_up(t, interval)

    def _is_scheduled(self, t: int, interval: int, place: tuple[int, int]) -> bool:
        """Whether the interval has a refresh of a block, not its first, in a step."""
        if self._warms_up(t, interval):
            return t & (t - 1) == 0
        index, count = place
        phase = index * interval // count if self.stagger else 0
        return (t - phase) % interval == 0
