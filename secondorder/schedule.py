"""Schedules for the options of parameter groups, such as the damping, the intervals or the weight decay.

A scheduled value depends only on the step, never on the previous value. After n calls of ``step()``, an option is f(n)
no matter what changed it in between, so schedules do not compound or drift, and a resumed run continues exactly. The
exception is a damping that is adapted to the loss: the adaptation starts again from each milestone.
"""

from __future__ import annotations

import math
import warnings
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from secondorder import options
from secondorder.optimizer import SecondOrderOptimizer

#: A function of the step, or milestones ``{step: value}``.
Schedule: TypeAlias = Callable[[int], Any] | Mapping[int, Any]

#: Entries of a group that are not options: the parameters, and what schedulers and optimizers store there.
_RESERVED = frozenset({"params", "param_names", "initial_lr", "fallback_base_lr"})
#: Options of our methods that determine the layout of a layer's state, which is fixed when a group is added.
_ALLOCATING = frozenset(
    {"inverse_method", "inverse_rank", "budget", "max_factor_dim", "basis_update", "momentum_mode", "transport"}
)
#: Marks an option that has no scheduled value yet, before its first milestone.
_UNSET = object()


class ParamScheduler:
    """Schedule options of an optimizer's parameter groups, each by a function of the step or by milestones.

    The scheduler sets f(0) when it is built and f(n) in the n-th call of :meth:`step`. Call :meth:`step` once after
    each optimizer step. The scheduler works with every ``torch.optim.Optimizer`` and together with the schedulers of
    ``torch.optim.lr_scheduler``. It rejects the values that the constructors of this package reject, before it changes
    any group. All milestones are checked when the scheduler is built.

    Args:
        optimizer: The optimizer whose groups are scheduled.
        **schedules: The schedule of each option: a function of the step, milestones ``{step: value}``, or a list with
            one of these per group. A value holds until the next milestone, and the initial value holds until the first
            one. A list covers the existing groups; a group that is added later keeps its value. A tensor (``lr``) is
            filled in place and never replaced. A damping that the optimizer adapts to the loss accepts only milestones,
            and the adaptation starts again from each of them.

    Raises:
        TypeError: If an argument is not an optimizer or a schedule, or if a value has the wrong type.
        ValueError: If the groups do not have an option, an option cannot be scheduled, a milestone is negative, a list
            does not have one schedule per group, or a value is out of range.

    Example:
        >>> import torch, secondorder
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = secondorder.KFAC(model, lr=0.1, damping=1e-2)
        >>> schedule = secondorder.ParamScheduler(
        ...     optimizer, damping=lambda t: max(1e-3, 1e-2 * 0.99**t), inv_update_steps={0: 10, 500: 100}
        ... )
        >>> model(torch.randn(8, 4)).square().mean().backward()
        >>> optimizer.step()
        >>> schedule.step()
    """

    def __init__(self, optimizer: Optimizer, **schedules: Schedule | list[Schedule] | tuple[Schedule, ...]) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {optimizer!r}")
        self.optimizer = optimizer
        self._last_step = 0
        if isinstance(optimizer, SecondOrderOptimizer):
            schedules = options.renamed(schedules, optimizer.checks)
        self._tracks = {key: self._parse(key, schedule) for key, schedule in schedules.items()}
        for step in self._milestones():
            self._check(self._changes_at(step, milestones_only=True))
        self._set(0)
        self._warn_relative_damping()

    @property
    def _adapts_damping(self) -> bool:
        """Whether the optimizer adapts λ to the loss."""
        if not isinstance(self.optimizer, SecondOrderOptimizer):
            return False
        adaptation = self.optimizer.group_options.chosen.get("adaptation")
        return adaptation is not None and bool(adaptation.adaptive_damping)

    @property
    def last_step(self) -> int:
        """The step whose values the groups have now, which is the number of calls of :meth:`step`."""
        return self._last_step

    def step(self) -> None:
        """Set the values of the next step. Call it once after each step of the optimizer.

        Raises:
            TypeError: If a function returns a value of the wrong type. Nothing is changed then, and the call does not
                count.
            ValueError: If a function returns a value out of range. Nothing is changed then either.
        """
        self._set(self._last_step + 1)

    def state_dict(self) -> dict[str, int]:
        """Return the number of steps. It does not contain the schedules; build the scheduler again when you resume."""
        return {"last_step": self._last_step}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a checkpoint and set the values of its step in the groups.

        Load the optimizer's state too, because it has the values of options that have not reached a milestone yet.

        Raises:
            TypeError: If the number of steps is not an integer, or a function returns a value of the wrong type.
            ValueError: If this is not the state of a ``ParamScheduler``, or a function returns a value out of range.
        """
        if not isinstance(state_dict, Mapping) or "last_step" not in state_dict:
            raise ValueError(f"not the state_dict of a ParamScheduler: it needs 'last_step', got {state_dict!r}")
        options.whole(0)("last_step", state_dict["last_step"])
        self._set(state_dict["last_step"])

    # ------------------------------------------------------------------ reading the schedules
    def _parse(self, key: str, schedule: Any) -> _Track | tuple[_Track, ...]:
        """Return one track for all groups, or one track per group."""
        groups = self.optimizer.param_groups
        if key in _RESERVED or (key in _ALLOCATING and isinstance(self.optimizer, SecondOrderOptimizer)):
            raise ValueError(f"{key!r} cannot be scheduled: it is set once, when a group is added")
        if not all(key in group for group in groups):
            known = sorted({name for group in groups for name in group} - _RESERVED)
            raise ValueError(f"{key!r} is not an option of every parameter group; there are: {', '.join(known)}")
        if not isinstance(schedule, (list, tuple)):
            return _track(key, schedule)
        if len(schedule) != len(groups):
            raise ValueError(f"{key}: a list needs one schedule per group, got {len(schedule)} for {len(groups)}")
        return tuple(_track(key, one) for one in schedule)

    def _is_left_to_adaptation(self, key: str, track: _Track, step: int) -> bool:
        """Return whether a value has been adapted since the last milestone, so that the schedule leaves it alone.

        Raises:
            ValueError: If a function would overwrite the adapted value at every step.
        """
        if key != "damping" or not self._adapts_damping:
            return False
        if not isinstance(track, _Milestones):
            raise ValueError(
                "damping is adapted to the loss, and a function of the step would overwrite it at every step: give "
                "milestones, {step: value}, and the adaptation starts again from each of them"
            )
        return step not in track.values

    def _milestones(self) -> list[int]:
        """Return all steps at which at least one option has a milestone."""
        tracks = [x for t in self._tracks.values() for x in (t if isinstance(t, tuple) else (t,))]
        return sorted({step for track in tracks if isinstance(track, _Milestones) for step in track.steps})

    def _changes_at(self, step: int, milestones_only: bool = False) -> list[dict[str, Any]]:
        """Return the changes of each group at a step."""
        groups = self.optimizer.param_groups
        changes: list[dict[str, Any]] = [{} for _ in groups]
        for key, tracks in self._tracks.items():
            chosen = tracks if isinstance(tracks, tuple) else (tracks,)
            values = [
                _UNSET
                if milestones_only and not isinstance(t, _Milestones) or self._is_left_to_adaptation(key, t, step)
                else t(step)
                for t in chosen
            ]
            values = values if isinstance(tracks, tuple) else values * len(groups)
            # If a group was added after a list was given, there are fewer values than groups. It keeps its own value.
            for group, change, value in zip(groups, changes, values, strict=False):
                if value is not _UNSET:
                    change[key] = _adapted(key, value, group.get(key))
        return changes

    # ------------------------------------------------------------------ writing the groups
    def _set(self, step: int) -> None:
        """Set the values of a step in all groups, or in none if one of them is rejected."""
        changes = self._changes_at(step)
        self._check(changes)
        for group, change in zip(self.optimizer.param_groups, changes, strict=True):
            for key, value in change.items():
                self._write(group, key, value)
        self._last_step = step

    def _check(self, changes: list[dict[str, Any]]) -> None:
        """Reject values that an optimizer of this package would reject in a new group."""
        optimizer = self.optimizer
        if not isinstance(optimizer, SecondOrderOptimizer):
            return  # torch's own optimizers only check values in their constructors
        checks = {**options.COMMON, **optimizer.checks}
        live, planned = optimizer.param_groups, list[dict[str, Any]]()
        for group, change in zip(live, changes, strict=True):
            planned.append({**group, **change})
            options.validate(planned[-1], {key: check for key, check in checks.items() if key in change})
        optimizer.check_groups(planned)

    @torch.no_grad()
    def _write(self, group: dict[str, Any], key: str, value: Any) -> None:
        current = group.get(key)
        if not isinstance(current, Tensor):
            group[key] = value
            return
        if isinstance(self._tracks[key], tuple):
            # Constructors give the same tensor to all groups, but different values need different tensors.
            others = (g for g in self.optimizer.param_groups if g is not group)
            if any(g.get(key) is current for g in others):
                current = group[key] = current.clone()
        current.copy_(value.reshape(current.shape)) if isinstance(value, Tensor) else current.fill_(value)

    def _warn_relative_damping(self) -> None:
        """Warn about a relative damping that was not requested, because neither damping nor its mode was given."""
        if "damping" not in self._tracks or "damping_mode" in self._tracks:
            return
        optimizer = self.optimizer
        unasked = isinstance(optimizer, SecondOrderOptimizer) and optimizer.group_options.rules.mode_by_default
        if unasked and any(group["damping_mode"] == "relative" for group in self.optimizer.param_groups):
            warnings.warn(
                "damping is scheduled, but the optimizer was built without damping=, so its damping_mode is 'relative' "
                "and the scheduled numbers are multiples of the mean eigenvalue. Build the optimizer with damping= if "
                "the numbers are λ itself, or with damping_mode='relative' if they are multiples.",
                stacklevel=3,
            )


@dataclass(frozen=True)
class DampingDecay:
    """Damping that decays from one value to another: λ(t) = λ_T + (λ₀ − λ_T) (1 − α)^max(0, t − t₀).

    α is 2 log₁₀(λ₀/λ_T) / N, but at most 1. The time t counts optimizer steps, so λ does not depend on how often a
    method refreshes. The damping approaches λ_T but does not reach it: after the N steps of the decay, a fraction of
    about (λ_T/λ₀)^0.87 of the difference is left.

    Args:
        initial: λ₀, the damping during the warm-up.
        final: λ_T, the damping that the decay approaches; at most ``initial``.
        decay_steps: N, the number of optimizer steps of the decay.
        warmup_steps: t₀, the number of optimizer steps before the decay.

    Raises:
        ValueError: If a value is out of range.
        TypeError: If a value has the wrong type.
    """

    initial: float
    final: float
    decay_steps: int
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        """Check the values."""
        for name in ("initial", "final"):
            options.number(0.0, low_open=True)(name, getattr(self, name))
            object.__setattr__(self, name, float(getattr(self, name)))
        options.whole(1)("decay_steps", self.decay_steps)
        options.whole(0)("warmup_steps", self.warmup_steps)
        if self.final > self.initial:
            raise ValueError(
                f"final={self.final} must not be above initial={self.initial}: damping_decay only decreases the "
                "damping. To increase it, give ParamScheduler a function of the step or milestones"
            )

    def __call__(self, step: int) -> float:
        """Return λ at a step, a value between ``final`` and ``initial``."""
        if step <= self.warmup_steps:
            return self.initial  # this is exact to the bit
        rate = min(1.0, 2 * math.log10(self.initial / self.final) / self.decay_steps)
        left = (1 - rate) ** (step - self.warmup_steps)
        return min(self.initial, self.final + (self.initial - self.final) * left)


def damping_decay(initial: float, final: float, decay_steps: int, warmup_steps: int = 0) -> DampingDecay:
    """Return a schedule for :class:`ParamScheduler` that decays the damping from one value to another.

    Args:
        initial: The damping at the start and during the warm-up.
        final: The damping that the schedule approaches; at most ``initial``.
        decay_steps: The number of optimizer steps of the decay.
        warmup_steps: The number of optimizer steps before the decay.

    Returns:
        A function of the step that can be pickled and compared; see :class:`DampingDecay`.

    Example:
        >>> import torch, secondorder
        >>> from secondorder.schedule import damping_decay
        >>> optimizer = secondorder.KFAC(torch.nn.Linear(4, 2), lr=0.1, damping=1.0)
        >>> schedule = secondorder.ParamScheduler(optimizer, damping=damping_decay(1.0, 0.01, decay_steps=1000))
        >>> schedule.step()
    """
    return DampingDecay(initial, final, decay_steps, warmup_steps)


class _Milestones:
    """Values that hold from their milestone to the next one."""

    def __init__(self, key: str, values: Mapping[int, Any]) -> None:
        if not values:
            raise ValueError(f"{key}: milestones must not be empty")
        for step, value in values.items():
            options.whole(0)(f"milestone of {key}", step)
            if callable(value):
                raise TypeError(f"{key}: the value at milestone {step} must not be a function, got {value!r}")
        self.steps = sorted(values)
        self.values = dict(values)

    def __call__(self, step: int) -> Any:
        passed = bisect_right(self.steps, step)
        return self.values[self.steps[passed - 1]] if passed else _UNSET


_Track: TypeAlias = Callable[[int], Any] | _Milestones


def _track(key: str, schedule: Any) -> _Track:
    if isinstance(schedule, Mapping):
        return _Milestones(key, schedule)
    if not callable(schedule):
        raise TypeError(
            f"{key}: a schedule is a function of the step, milestones {{step: value}}, or a list of these with one per "
            f"group; got {schedule!r}"
        )
    return schedule  # type: ignore[no-any-return]


def _adapted(key: str, value: Any, current: Any) -> Any:
    """Convert a scheduled value to the type that the group holds: a number, or a tensor with one element."""
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"{key} must be one number, got a tensor of shape {tuple(value.shape)}")
    if isinstance(current, Tensor) and isinstance(value, Tensor):
        return value  # it stays on its device, and the host does not wait for it
    if isinstance(value, Tensor) or getattr(value, "shape", None) == ():
        value = value.item()  # torch and NumPy scalars become Python numbers, which fit into every checkpoint
    if isinstance(current, Tensor) and not options.is_number(value):
        raise TypeError(f"{key} must be a number, got {value!r}")
    return options.to_python(value)
