"""Times, traffic and memory of a step, as events of the profile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from secondorder.diagnostics.timing import StageClock

if TYPE_CHECKING:
    from secondorder.optimizer import SecondOrderOptimizer

#: The stages in each column. ``exchange`` sends statistics to the ranks that need them.
STAGES = {
    "capture_ms": ("capture",),
    "select_ms": ("select",),
    "exchange_ms": ("reduce", "exchange"),
    "kernel_ms": ("kernel",),
    "invert_ms": ("invert",),
    "statistics_ms": ("statistics",),
    "refresh_ms": ("refresh",),
    "share_ms": ("share",),
    "precondition_ms": ("precondition",),
    "update_ms": ("update",),
}


class Profile:
    """Measures the steps of an optimizer.

    Args:
        optimizer: The optimizer.
        device: Device on which the stages run.
        rank: Index of the process.
        world: Number of processes.

    Raises:
        RuntimeError: If the stages are already timed.
    """

    def __init__(self, optimizer: SecondOrderOptimizer, device: torch.device, rank: int, world: int) -> None:
        if optimizer.stage_clock is not None:
            raise RuntimeError("the stages of this optimizer are timed already: close the other Analysis first")
        self._optimizer, self._device, self._rank, self._world = optimizer, device, rank, world
        self._clock = StageClock(device)
        self._clock.running = False
        self._peak_before = self._sent_before = 0

    def attach(self) -> None:
        """Attach the clock that times the stages of the optimizer."""
        self._optimizer.time_stages(self._clock)

    def run(self, due: bool) -> None:
        """Start or stop timing."""
        if due != self._clock.running:
            self._clock.take()
            self._clock.running = due

    def begin(self) -> None:
        """Record the start of a step."""
        self._peak_before, self._sent_before = self._peak(), self._sent()

    def event(self) -> dict[str, Any]:
        """Return the times, traffic and memory of the step."""
        times = self._clock.take()
        return {
            "rank": self._rank,
            "world": self._world,
            **{column: sum(times.get(name, 0.0) for name in names) for column, names in STAGES.items()},
            "wire_bytes": self._sent() - self._sent_before,
            "state_bytes": self._optimizer.memory_usage()["total"],
            "peak_bytes": self._peak() - self._peak_before if self._device.type == "cuda" else None,
        }

    def close(self) -> None:
        """Detach the clock."""
        if self._optimizer.stage_clock is self._clock:
            self._optimizer.time_stages(None)

    def _peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else 0

    def _sent(self) -> int:
        """Return the bytes that the strategy has sent so far, which are 0 with a single process."""
        return int(getattr(self._optimizer.comm, "wire_bytes", 0))
