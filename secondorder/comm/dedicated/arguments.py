"""The arguments of :class:`~secondorder.comm.dedicated.workers.DedicatedWorkers`, and the checks on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from secondorder import options
from secondorder.comm.dedicated import roles
from secondorder.comm.dedicated.lockstep import DELAY

#: An entry of a log: ``["turn", step, k]`` or ``["take", step, inverse rank, version]``.
Entry = list[Any]


@dataclass(frozen=True)
class Arguments:
    """The arguments, with roles as tuples and logs as lists; the strategy describes them.

    Raises:
        TypeError: If a value has the wrong type.
        ValueError: If a value is out of range.
    """

    gradient: Sequence[int] | None = None
    factor: Sequence[int] | None = None
    inverse: Sequence[int] | None = None
    mode: str = "lockstep"
    period: int | None = None
    seed: int = 0
    allow_colocated: bool = False
    warmup: str = "sync"
    max_staleness: int | None = None
    on_loss: str = "abort"
    timeout: float | None = None
    replay: Sequence[Sequence[Any]] | None = None

    def __post_init__(self) -> None:
        """Check every value."""
        options.flag("allow_colocated", self.allow_colocated)
        given = {name: getattr(self, name) for name in roles.NAMES}
        for name, ranks in roles.check(given, self.allow_colocated).items():
            object.__setattr__(self, name, ranks)
        options.choice("lockstep", "opportunistic")("mode", self.mode)
        options.choice("sync", "identity")("warmup", self.warmup)
        options.choice("abort", "degrade")("on_loss", self.on_loss)
        options.whole(0)("seed", self.seed)
        for name in ("period", "max_staleness"):
            options.optional_whole(1)(name, getattr(self, name))
        if self.timeout is not None and not (isinstance(self.timeout, (int, float)) and self.timeout > 0):
            raise ValueError(f"timeout must be a positive number of seconds or None, got {self.timeout!r}")
        if self.replay is not None:
            if self.mode != "opportunistic":
                raise ValueError(f"replay repeats a run in opportunistic mode, but mode is {self.mode!r}")
            object.__setattr__(self, "replay", _entries(self.replay))

    @property
    def roles(self) -> dict[str, tuple[int, ...] | None]:
        """Ranks by role; None for roles that the strategy chooses."""
        return {name: getattr(self, name) for name in roles.NAMES}

    @property
    def changed(self) -> Mapping[str, Any]:
        """Return the arguments that differ from their defaults."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        changed = {f.name: found[f.name] for f in fields(self) if found[f.name] != f.default}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in changed.items()}

    def period_of(self, intervals: Sequence[int]) -> int:
        """Return the period T, which is the argument or the refresh interval that all units share.

        Raises:
            ValueError: If units have different intervals, or versions would be too old when they arrive.
        """
        if self.period is None and len(set(intervals)) > 1:
            raise ValueError(f"layers refresh every {sorted(set(intervals))} steps: pass DedicatedWorkers one period=")
        period = self.period or next(iter(intervals), 1)
        least = (DELAY + 1) * period - 1
        if self.max_staleness is not None and self.max_staleness < least:
            raise ValueError(
                f"max_staleness={self.max_staleness} is less than the age that versions reach with period={period}, "
                f"which is {least}: they would be dropped before the next one arrives"
            )
        return period


def _entries(log: Sequence[Sequence[Any]]) -> tuple[Entry, ...]:
    """Check the log of a run, and return its entries as lists."""
    sizes = {"turn": 3, "take": 4}
    entries = tuple(list(entry) for entry in log)
    for entry in entries:
        if not entry or sizes.get(entry[0]) != len(entry):
            raise ValueError(f"replay must be the log of an opportunistic run, got the entry {entry!r}")
    return entries
