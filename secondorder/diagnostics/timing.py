"""Milliseconds of the stages of a step."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

#: A time in seconds on the host, or an event in a stream of a CUDA device.
Instant = Any


#: Number of spans that are stored separately until they are read, so that the host need not wait for a device.
_MOST_SPANS = 4096


class _Span(NamedTuple):
    name: str
    start: Instant
    stop: Instant


class StageClock:
    """Adds up the times of the stages of a step by name.

    A stage includes everything that runs inside it, including other stages. If it runs inside itself, it counts once.
    On a CUDA device, the time is measured by events in a stream, and the host waits only when times are read.

    Args:
        device: Device on which the stages run. If it is None or not a CUDA device, times are those of the host.

    Attributes:
        running: Whether stages are timed. It may be set at any time and affects stages that start afterwards.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.running = True
        self._cuda = device if device is not None and device.type == "cuda" else None
        self._spans: list[_Span] = []
        #: Stages of the current step and of the last step.
        self._current: list[_Span] = []
        self._last: list[_Span] = []
        self._summed: dict[str, float] = {}
        # Open stages are stored per thread, because the backward pass of a device runs in a separate thread.
        self._open: set[tuple[int, str]] = set()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the ``with`` block."""
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
            span = _Span(name, start, self._now())
            self._spans.append(span)
            self._current.append(span)

    def take(self) -> dict[str, float]:
        """Return the milliseconds by stage since the last call, without stages that did not run."""
        spans, self._spans = self._spans, []
        found, self._summed = self._summed, {}
        return _added(found, spans)

    def end_step(self) -> None:
        """End a step. The times since the end of the previous step become those of :meth:`last_step`."""
        self._last, self._current = self._current, []
        if len(self._spans) > _MOST_SPANS:  # they have not been read
            old, self._spans = self._spans[: -_MOST_SPANS // 2], self._spans[-_MOST_SPANS // 2 :]
            _added(self._summed, old)

    def last_step(self) -> dict[str, float]:
        """Return the milliseconds by stage of the last step and its backward passes, without affecting :meth:`take`."""
        return _added({}, self._last)

    def _now(self) -> Instant:
        if self._cuda is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._cuda))
        return event


def _added(found: dict[str, float], spans: list[_Span]) -> dict[str, float]:
    for span in spans:
        found[span.name] = found.get(span.name, 0.0) + _milliseconds(span.start, span.stop)
    return found


def _milliseconds(start: Instant, stop: Instant) -> float:
    if isinstance(start, float) or isinstance(stop, float):
        assert isinstance(start, float)
        assert isinstance(stop, float)
        return (stop - start) * 1e3
    stop.synchronize()
    return float(start.elapsed_time(stop))
