"""Decides when layers are captured and refreshed, with pure functions of numbers.

::

    step t         a refresh is due and is done; with overlap, it begins on copies of the factors
    step t + lag   with overlap, its result is adopted                   lag = max(1, interval // 10)

The first refresh of a block and the refreshes of a warm-up are done at once. All answers depend only on the step and
on counters in the state, so they are the same on every rank and after a resume.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Counters(NamedTuple):
    """Counters of a block.

    Attributes:
        updates: Number of updates of the block's estimate.
        refreshes: Number of refreshes that succeeded.
        failed_at: Number of updates at the time of the block's last failed refresh.
        adopt_at: Step that adopts the refresh in progress; 0 if there is none.
    """

    updates: int
    refreshes: int
    failed_at: int = 0
    adopt_at: int = 0


@dataclass(frozen=True)
class RefreshSchedule:
    """Decides which steps capture, refresh, begin and adopt, for intervals that may change from step to step.

    In all methods, ``t`` is the step, ``interval`` the number of steps between two refreshes (0 turns them off), and
    ``place`` the index of a block together with the number of blocks.

    Attributes:
        stagger: Whether the refreshes of the blocks are spread over the interval.
        warmup: Whether the steps 0, 1, 2, 4, 8, … of the first interval refresh, and all its steps capture. With
            ``"doubling"``, only the steps that refresh capture.
        overlap: Whether refreshes run in the background of training.
    """

    stagger: bool = False
    warmup: bool | str = False
    overlap: bool = False

    @staticmethod
    def lag(interval: int) -> int:
        """Return the number of steps from the beginning of an overlapped refresh to its adoption."""
        return max(1, interval // 10)

    def captures(self, t: int, every: int, interval: int, updates: int) -> bool:
        """Whether a step captures statistics: every ``every`` steps, and at each step until there are some."""
        starts = self._warms_up(t, interval) and (self.warmup is True or _is_power(t))
        return interval > 0 and (starts or t % every == 0 or updates == 0)

    def refreshes(self, t: int, interval: int, place: tuple[int, int], counters: Counters) -> bool:
        """Whether a step refreshes a block, from its current estimate or by adopting a refresh in progress."""
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
        """Whether a step adopts the refresh in progress. The first step from ``adopt_at`` on does."""
        return self.overlap and interval > 0 and 0 < counters.adopt_at <= t and counters.refreshes > 0

    def adoption(self, t: int, interval: int, place: tuple[int, int]) -> int:
        """Return the step if it adopts a refresh in a run that takes every step, and 0 otherwise."""
        begun = t - self.lag(interval)
        return t if begun > 0 and self.begins(begun, interval, place, 1) else 0

    def _warms_up(self, t: int, interval: int) -> bool:
        return bool(self.warmup) and t < interval

    def _is_done_at_once(self, t: int, interval: int) -> bool:
        return not self.overlap or self._warms_up(t, interval)

    def _is_scheduled(self, t: int, interval: int, place: tuple[int, int]) -> bool:
        """Whether a refresh of a block other than its first is scheduled for a step."""
        if self._warms_up(t, interval):
            return _is_power(t)
        index, count = place
        phase = index * interval // count if self.stagger else 0
        return (t - phase) % interval == 0


def _is_power(t: int) -> bool:
    """Whether a step is 0 or a power of 2."""
    return t & (t - 1) == 0
