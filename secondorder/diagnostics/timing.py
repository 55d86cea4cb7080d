"""Milliseconds of the stages of a step."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

Instant = float | torch.cuda.Event


class _Span(NamedTuple):
    name: str
    start: Instant
    stop: Instant


class StageClock:
    """Adds up how long the stages of a step take, by name.

    A stage counts all that runs inside it, other stages too; one that runs inside itself counts once. On a CUDA device
    the time is the device's own, measured by events in its stream: the host waits only when the times are read.

    Args:
        device: Where the stages run; None or any other device than a CUDA one: as the host sees them.

    Attributes:
        running: Whether stages are timed; may be set at any time, and holds for stages that begin then.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.running = True
        self._cuda = device if device is not None and device.type == "cuda" else None
        self._spans: list[_Span] = []
        # By thread: the backward pass of a device runs in a thread of its own.
        self._open: set[tuple[int, str]] = set()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time what runs inside the ``with`` block."""
        key = threading.get_ident(), name
        if not self.running or key in self._open:
            yield
            return
        self._open.add(key)
        start = self._now()
        try:
            yield
        finally:
            self._open.discard(key)
            self._spans.append(_Span(name, start, self._now()))

    def take(self) -> dict[str, float]:
        """Milliseconds by stage since the last call; a stage that did not run is not there."""
        spans, self._spans = self._spans, []
        found: dict[str, float] = {}
        for span in spans:
            found[span.name] = found.get(span.name, 0.0) + _milliseconds(span.start, span.stop)
        return found

    def _now(self) -> Instant:
        if self._cuda is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._cuda))
        return event


def _milliseconds(start: Instant, stop: Instant) -> float:
    if isinstance(start, float) or isinstance(stop, float):
        assert isinstance(start, float)
        assert isinstance(stop, float)
        return (stop - start) * 1e3
    stop.synchronize()
    return float(start.elapsed_time(stop))
