"""Policies that decide when to spend more time on the rows of HyLo. They choose ``"kid"``, ``"kis"`` or ``"sngd"``.

A policy receives every optimizer step in :meth:`SwitchPolicy.observe` and decides at every refresh in
:meth:`SwitchPolicy.decide`. Its decision depends only on the step, on learning rates and on *earlier* measurements,
which have arrived on the host long before::

    step        0 … P-1                  P … 2P-1                 2P
    observe     Σ ‖∇‖ on the device      Σ ‖∇‖ on the device
    end         copy starts ─────────►   read by the first decide of a later period

Signals, and therefore decisions, are equal on all ranks. An infinite or NaN norm, as of a dropped batch, is ignored.

Mean gradient norms by period are from HyLo (SC22). The other rules are new.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from secondorder import options
from secondorder.signals import Latest, Memory, PeriodMeans, Rates

#: The possible decisions of a policy.
MODES = ("kid", "kis", "sngd")


class SwitchPolicy(ABC):
    """Base class of policies, which decide the mode of the next rows. Every optimizer has a separate policy object.

    A custom policy implements :meth:`decide` and, if it has state, ``state_dict`` and ``load_state_dict``.

    Attributes:
        needs_gradient_norm: Whether ``observe`` needs a norm.
        needs_rates: Whether ``observe`` needs learning rates. Reading a rate from a device waits for the device.
        reason: The reason of the last decision as text.
    """

    needs_gradient_norm: bool = False
    needs_rates: bool = True
    reason: str = "nothing decided yet"
    _parts: tuple[Memory, ...] = ()

    @property
    def probes(self) -> int:
        """Number of layers whose error is measured at each refresh."""
        return 0

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that the policy stores."""
        return sum(x.nbytes for part in self._parts for x in vars(part).values() if isinstance(x, Tensor))

    def observe(self, step: int, lrs: Sequence[float], norm: Tensor | None = None) -> None:  # noqa: B027 - not all do
        """Receive a step, before ``decide`` is called in it.

        Args:
            step: Number of the step, from 0.
            lrs: Learning rate of each group, as numbers.
            norm: Norm of the gradient of all covered parameters, a 0-dim tensor on any device; None if not needed.
        """

    def probe(self, error: Tensor) -> None:  # noqa: B027 - most do not
        """Receive the error of a refresh, after ``decide`` was called in it.

        Args:
            error: Relative error of a KIS update compared with SNGD, averaged over the probed layers, 0-dim.
        """

    @abstractmethod
    def decide(self, step: int) -> str:
        """Choose the mode of a refresh. It is called once in each refresh.

        Args:
            step: Number of the step, from 0.

        Returns:
            ``"kid"``, ``"kis"`` or ``"sngd"``.
        """

    def state_dict(self) -> dict[str, float]:
        """Return the state as numbers, with nan for missing ones. The keys never change. May wait for the device."""
        for part in self._parts:
            part.settle()
        return {key: value for part in self._parts for key, value in part.numbers.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state of a policy. It is checked completely before anything is changed.

        Raises:
            ValueError: If the keys do not match those of this policy.
            TypeError: If a value is not a number.
        """
        known = {key for part in self._parts for key in part.numbers}
        if set(state_dict) != known:
            missing, unknown = sorted(known - set(state_dict)), sorted(set(state_dict) - known)
            raise ValueError(f"not the state of a {type(self).__name__}: missing {missing}, unknown {unknown}")
        for key, value in state_dict.items():
            if not (value.numel() == 1 if isinstance(value, Tensor) else options.is_number(value)):
                raise TypeError(f"{key} must be a number, got {value!r}")
        for part in self._parts:
            part.load({key: float(state_dict[key]) for key in part.numbers})


@dataclass
class GradNormChange(SwitchPolicy):
    """Chooses KID while the norm of the gradient changes between periods, and after a change of the learning rate.

    Let N be the mean norm of the gradient over the steps of a period. KID is chosen if ``|N − N₋| / N₋ >= eta`` for the
    last two periods that ended before the step, or if there are no two such periods yet. Otherwise, KIS is chosen.
    Steps without a finite norm are left out of the mean, and a period with only such steps is skipped.

    A change of the learning rate is defined, and has the same effect, as in :class:`LRChange`.

    Args:
        eta: η, the smallest relative change for which KID is chosen.
        period_steps: Number of optimizer steps of a period.
        hold: Number of periods of KID after a change of the learning rate. With 0, changes are ignored.

    Raises:
        ValueError: If a value is out of range.
        TypeError: If a value has the wrong type.
    """

    eta: float = 0.1
    period_steps: int = 100
    hold: int = 1

    needs_gradient_norm = True

    def __post_init__(self) -> None:
        """Check the values."""
        options.number(0.0)("eta", self.eta)
        options.whole(1)("period_steps", self.period_steps)
        options.whole(0)("hold", self.hold)
        self.eta = options.to_python(self.eta)
        self._rates, self._norms = Rates(), PeriodMeans()
        self._parts = (self._rates, self._norms, self._norms.ended)

    def observe(self, step: int, lrs: Sequence[float], norm: Tensor | None = None) -> None:
        self._rates.note(step, lrs)
        self._norms.enter(step, self.period_steps)
        if norm is not None:
            self._norms.add(norm)
        # The period that ended is copied while the next step is computed.
        self._norms.enter(step + 1, self.period_steps)

    def decide(self, step: int) -> str:
        self._norms.enter(step, self.period_steps)
        before, last = self._norms.two_means(step)
        holds = self._rates.hold(step, self.hold * self.period_steps)
        if math.isnan(before):
            self.reason = "no two periods to compare yet"
            return "kid"
        if holds:
            self.reason = self._rates.last_change()
            return "kid"
        change = abs(last - before) / before if before else (math.inf if last else 0.0)
        self.reason = f"mean gradient norm {before:.4g} → {last:.4g}, a change of {change:.3g} (eta={self.eta})"
        return "kid" if change >= self.eta else "kis"


@dataclass
class LRChange(SwitchPolicy):
    """Chooses KID for a while after a change of the learning rate, and KIS otherwise.

    A change is a step whose rate in any group is more than 10 % below that of the previous step, or the first step that
    raises no rate after a step that raised one. The latter is the end of a warm-up, or of each rise of a warm-up by
    epochs. KID then holds for ``hold · period_steps`` steps, including the step of the change, and for the first
    refresh after the change even if it comes later. With nine groups or more, the first and the ninth are judged by
    the sum of their rates, and so on.

    Args:
        hold: Number of periods of KID after a change.
        period_steps: Number of optimizer steps of a period.

    Raises:
        ValueError: If a value is out of range.
        TypeError: If a value has the wrong type.
    """

    hold: int = 1
    period_steps: int = 100

    def __post_init__(self) -> None:
        """Check the values."""
        options.whole(1)("hold", self.hold)
        options.whole(1)("period_steps", self.period_steps)
        self._rates = Rates()
        self._parts = (self._rates,)

    def observe(self, step: int, lrs: Sequence[float], norm: Tensor | None = None) -> None:
        self._rates.note(step, lrs)

    def decide(self, step: int) -> str:
        holds = self._rates.hold(step, self.hold * self.period_steps)
        self.reason = self._rates.last_change()
        return "kid" if holds else "kis"


@dataclass
class EpochList(SwitchPolicy):
    """Chooses KID in some epochs and KIS in the others.

    Epochs count from 0, and an interval ends before its second number: ``(0, 10)`` is the first ten epochs. The
    published scripts have three numbers e₀ e₁ e₂, with KID for epoch < e₀ and for e₁ < epoch <= e₂. They correspond to
    ``[(0, e₀), (e₁ + 1, e₂ + 1)]``.

    Args:
        intervals: Pairs of epochs.
        steps_per_epoch: Number of optimizer steps of an epoch.

    Raises:
        ValueError: If a value is out of range, or there are no intervals.
        TypeError: If a value has the wrong type.
    """

    intervals: Sequence[tuple[int, int]]
    steps_per_epoch: int

    needs_rates = False

    def __post_init__(self) -> None:
        """Check the values."""
        given = self.intervals
        if not isinstance(given, (list, tuple)) or not all(isinstance(x, (list, tuple)) and len(x) == 2 for x in given):
            raise TypeError(f"intervals must be a list of pairs of epochs, got {given!r}")
        for start, stop in given:
            options.whole(0)("start of an interval", start)
            options.whole(0)("end of an interval", stop)
            if start >= stop:
                raise ValueError(f"an interval must end after it starts, got {(start, stop)}")
        if not given:
            raise ValueError(f"intervals must not be empty, got {given!r}; use Always('kis') to never choose KID")
        options.whole(1)("steps_per_epoch", self.steps_per_epoch)
        self.intervals = tuple((start, stop) for start, stop in given)

    def decide(self, step: int) -> str:
        epoch = step // self.steps_per_epoch
        inside = any(start <= epoch < stop for start, stop in self.intervals)
        self.reason = f"epoch {epoch} is {'in' if inside else 'outside'} the intervals of KID"
        return "kid" if inside else "kis"


@dataclass
class ProbeError(SwitchPolicy):
    """Chooses KIS while its error compared with SNGD is small on some layers, and KID otherwise.

    The policy uses the error that was measured at the previous refresh. If this error is not finite or was not
    measured, it chooses KID.

    Args:
        layers: Number of layers to measure.
        threshold: Largest relative error at which KIS is chosen.

    Raises:
        ValueError: If a value is out of range.
        TypeError: If a value has the wrong type.
    """

    layers: int = 2
    threshold: float = 0.1

    needs_rates = False

    def __post_init__(self) -> None:
        """Check the values."""
        options.whole(1)("layers", self.layers)
        options.number(0.0)("threshold", self.threshold)
        self.threshold = options.to_python(self.threshold)
        self._errors = Latest("error")
        self._parts = (self._errors,)

    @property
    def probes(self) -> int:
        return self.layers

    def probe(self, error: Tensor) -> None:
        self._errors.put(error)

    def decide(self, step: int) -> str:
        error = self._errors.get()
        if math.isnan(error):
            self.reason = "no error measured yet, or not a number"
        else:
            self.reason = f"error of KIS {error:.4g} (threshold={self.threshold})"
        return "kis" if error <= self.threshold else "kid"


@dataclass
class Always(SwitchPolicy):
    """Always chooses the same mode.

    Args:
        mode: ``"kid"``, ``"kis"`` or ``"sngd"``.

    Raises:
        ValueError: If ``mode`` has another value.
        TypeError: If ``mode`` is not a string.
    """

    mode: str

    needs_rates = False

    def __post_init__(self) -> None:
        """Check the value."""
        options.choice(*MODES)("mode", self.mode)

    def decide(self, step: int) -> str:
        self.reason = f"always {self.mode}"
        return self.mode
