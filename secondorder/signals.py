"""The memory of a policy during a training run: numbers, some of which may still be in transfer from a device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

#: Number of rates that are distinguished. A state has the same keys for every number of groups; if there are more
#: groups, some of them share a sum.
_RATES = 8
#: The relative change that counts as a decrease of a rate in one step, and the one that may be a rounding error.
_FALL, _ROUNDING = 0.1, 1e-9


class Memory:
    """Numbers that a policy remembers, some of which may still be on a device.

    Attributes:
        numbers: Numbers by key. Numbers that are on a device are outdated here until :meth:`settle`.
    """

    def __init__(self, **numbers: float) -> None:
        self.numbers = numbers

    def settle(self) -> None:
        """Copy every number to the host."""

    def load(self, numbers: dict[str, float]) -> None:
        """Replace all numbers."""
        self.settle()
        self.numbers = numbers

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles, which cannot hold events."""
        self.settle()
        return self.__dict__


class Rates(Memory):
    """The learning rates of the previous step, and the last step at which they changed."""

    def __init__(self) -> None:
        rates = {f"lr_{i}": math.nan for i in range(_RATES)}
        super().__init__(**rates, rising=0.0, changed_at=math.nan, unheeded=0.0)

    def note(self, step: int, lrs: Sequence[float]) -> None:
        """Compare the rates with those of the previous step. A nan counts as no change."""
        known = self.numbers
        rates = {f"lr_{i}": math.fsum(lrs[i::_RATES]) for i in range(min(len(lrs), _RATES))}
        falls = any(rate < known[key] * (1 - _FALL - _ROUNDING) for key, rate in rates.items())
        rises = any(rate > known[key] * (1 + _ROUNDING) for key, rate in rates.items())
        if falls or (known["rising"] and not rises):
            known.update(changed_at=float(step), unheeded=1.0)
        known.update(rates, rising=float(rises))

    def hold(self, step: int, window: int) -> bool:
        """Whether a refresh still follows a change, which is never the case without a window."""
        unheeded, self.numbers["unheeded"] = self.numbers["unheeded"], 0.0
        return window > 0 and (bool(unheeded) or step - self.numbers["changed_at"] < window)

    def last_change(self) -> str:
        """Describe the last change of a learning rate."""
        at = self.numbers["changed_at"]
        return "no learning rate has changed" if math.isnan(at) else f"a learning rate changed at step {int(at)}"


class Latest(Memory):
    """The last value of a signal. It arrives from a device without waiting, unless it is read too early."""

    def __init__(self, key: str) -> None:
        super().__init__(**{key: math.nan})
        self._key = key
        self._arriving: tuple[Tensor, torch.Event] | None = None

    def put(self, value: Tensor | float) -> None:
        """Replace the value."""
        self._arriving = None
        if not isinstance(value, Tensor) or value.device.type == "cpu":
            self.numbers[self._key] = float(value.numpy().reshape(()) if isinstance(value, Tensor) else value)
            return
        arrived = torch.Event(value.device)
        copy = value.detach().to("cpu", non_blocking=True)
        arrived.record()
        self._arriving = copy, arrived

    def get(self) -> float:
        """Return the value."""
        self.settle()
        return self.numbers[self._key]

    def settle(self) -> None:
        if self._arriving is not None:
            copy, arrived = self._arriving
            arrived.synchronize()
            self.numbers[self._key], self._arriving = float(copy), None


class PeriodMeans(Memory):
    """The mean norm of the gradient in the last two periods that have one, and the sum of the running period.

    Attributes:
        ended: Mean of a period that ended but has not been stored yet.
    """

    def __init__(self) -> None:
        super().__init__(start=0.0, norm_sum=0.0, norm_count=0.0, last_norm=math.nan, norm_before=math.nan)
        self.ended: Latest = Latest("ended_norm")
        self._running: Tensor | None = None  # norm_sum and norm_count while norms are added

    def enter(self, step: int, period: int) -> None:
        """End the running period if ``step`` is after it. Periods start at multiples of their length."""
        start = step - step % period
        if start > self.numbers["start"]:
            self._take_over()  # this is the period before, which has already arrived
            self.ended.put(self._mean())
            self.numbers.update(start=float(start), norm_sum=0.0, norm_count=0.0)
            self._running = None

    def add(self, norm: Tensor) -> None:
        """Count a norm, unless it is not finite."""
        norm = norm.detach().to(torch.float64).reshape(())
        if self._running is not None and self._running.device != norm.device:
            self.settle()
        if self._running is None:
            known = [self.numbers["norm_sum"], self.numbers["norm_count"]]
            self._running = torch.stack([norm.new_full((), x) for x in known])
        finite = torch.isfinite(norm)
        self._running += torch.stack([torch.where(finite, norm, 0.0), finite.to(norm.dtype)])

    def two_means(self, step: int) -> tuple[float, float]:
        """Return the means of the last two periods that ended before ``step``, older first; nan if missing."""
        if step >= self.numbers["start"]:
            self._take_over()
        return self.numbers["norm_before"], self.numbers["last_norm"]

    def settle(self) -> None:
        if self._running is not None:
            self.numbers["norm_sum"], self.numbers["norm_count"] = self._running.to("cpu").tolist()
            self._running = None

    def _mean(self) -> Tensor | float:
        """Return the mean of the running period; nan if nothing was counted."""
        if self._running is not None:
            return self._running[0] / self._running[1]
        count = self.numbers["norm_count"]
        return self.numbers["norm_sum"] / count if count else math.nan

    def _take_over(self) -> None:
        mean = self.ended.get()
        if not math.isnan(mean):
            self.numbers.update(norm_before=self.numbers["last_norm"], last_norm=mean)
        self.ended.put(math.nan)
