"""Detects damping that hides all curvature, so that preconditioning only rescales the gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from secondorder.curvature.extremes import Extremes
from secondorder.linalg.dense import is_on_host

#: Damped curvature whose largest eigenvalue is at most this multiple of λ counts as a multiple of the identity.
_NEAR_IDENTITY = 1.1


class Damped(NamedTuple):
    """A block or a window, and the damping of its curvature.

    Attributes:
        name: Name of the layer or the window.
        group: The options of the layer or the window.
        option: The option that holds the damping.
        extremes: λ, and the largest eigenvalue with and without it, or an upper bound of both.
    """

    name: str
    group: Mapping[str, Any]
    option: str
    extremes: Extremes


class DampingWatch:
    """Compares λ with the curvature once, and warns if λ is ten times larger everywhere.

    The numbers are computed on the device. The host reads its copy of them once it has arrived, and never waits.
    """

    def __init__(self) -> None:
        self.done = False
        self._damped: Sequence[Damped] = ()
        self._numbers: Tensor | None = None
        self._arrived: torch.Event | None = None

    @property
    def has_measured(self) -> bool:
        """Whether there is nothing left to measure."""
        return self.done or self._numbers is not None

    def measure(self, damped: Sequence[Damped]) -> None:
        """Compare λ with the curvature of blocks without waiting for their device."""
        self._damped = [d for d in damped if d.extremes.largest is not None and d.extremes.undamped is not None]
        if not self._damped:
            self.done = True
            return
        rows = [_numbers(d.extremes) for d in self._damped]
        found = torch.stack([row.to(rows[0].device, non_blocking=True) for row in rows])
        if not is_on_host(found):
            self._arrived = torch.Event(found.device)
        self._numbers = found.to("cpu", non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()

    def verdict(self, method: str) -> str | None:
        """Return a warning, once, if λ hides the curvature of all blocks and the numbers have arrived."""
        if self.done or self._numbers is None or (self._arrived is not None and not self._arrived.query()):
            return None
        numbers, self.done = self._numbers.numpy().tolist(), True  # already on the host, so nothing waits
        text = _verdict(method, self._damped, numbers)
        self._damped, self._numbers, self._arrived = (), None, None
        return text


def _numbers(found: Extremes) -> Tensor:
    """λ, the largest eigenvalue, and the ratio of the damped one to λ, of the Γ block where that is largest ``[3]``."""
    assert found.largest is not None
    assert found.undamped is not None
    damping, undamped = found.damping.float(), found.undamped.float()
    ratio = (found.largest / found.damping).float()
    rows = torch.stack([x.reshape(-1) for x in torch.broadcast_tensors(damping, undamped, ratio)])
    return rows.gather(1, rows[2].argmax().expand(3, 1))[:, 0]  # indexing by a tensor would wait for the device


def _verdict(method: str, damped: Sequence[Damped], numbers: Sequence[Sequence[float]]) -> str | None:
    """Return the warning; None if any curvature is large compared with its damping, or is not finite."""
    if not all(ratio <= _NEAR_IDENTITY for _, _, ratio in numbers):
        return None
    (worst, (damping, largest, _)) = max(zip(damped, numbers, strict=True), key=lambda pair: pair[1][2])
    value = float(worst.group[worst.option])
    better = 0.1 * value * largest / damping
    advice = f"{worst.option}={better:.1g}" if better > 0 else f"a much smaller {worst.option}"
    if worst.group.get("damping_mode") == "absolute":
        advice += ", or damping=0.1 with damping_mode='relative', which follows the curvature"
    where = f"'{worst.name}'" if worst.name else "the model itself"
    return (
        f"{method}: {worst.option}={value:g} hides the curvature. The largest eigenvalue on this process is "
        f"{largest:.2g} (in {where}), less than a tenth of the damping of {damping:.2g} that is added to it, so "
        f"every condition number is below {_NEAR_IDENTITY:g} and preconditioning only rescales the gradient. "
        f"Try {advice}."
    )
