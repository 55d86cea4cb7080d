"""Milliseconds of the stages of a step."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

#: A time in seconds on the host, or an event in the stream of a CUDA device.
Instant = Any


#: Number of spans that are kept one by one until they are taken, so that the host need not wait for a device.
_MOST_SPANS = 4096


class _Span(NamedTuple):
    name: str
    start: Instant
    stop: Instant


class StageClock:
    """Adds up how long the stages of a step take, by name.

    A stage includes all that runs inside it, other stages too; if it runs inside itself, it counts once. On a CUDA
    device the time is the device's own, measured by events in its stream: the host waits only when the times are read.

    Args:
        device: Device on which the stages run; times on None or a device other than CUDA are those of the host.

    Attributes:
        running: Whether stages are timed; it may be set at any time, and affects stages that start afterwards.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.running = True
        self._cuda = device if device is not None and device.type == "cuda" else None
        self._spans: list[_Span] = []
        #: Stages of the current step, and of the last one.
        self._current: list[_Span] = []
        self._last: list[_Span] = []
        self._summed: dict[str, float] = {}
        # Stages are open per thread: the backward pass of a device runs in a thread of its own.
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
            span = _Span(name, start, self._now())
            self._spans.append(span)
            self._current.append(span)

    def take(self) -> dict[str, float]:
        """Return milliseconds by stage since the last call, without stages that did not run."""
        spans, self._spans = self._spans, []
        found, self._summed = self._summed, {}
        return _added(found, spans)

    def end_step(self) -> None:
        """End a step: the time since the previous one becomes that of :meth:`last_step`."""
        self._last, self._current = self._current, []
        if len(self._spans) > _MOST_SPANS:  # nobody has taken them
            old, self._spans = self._spans[: -_MOST_SPANS // 2], self._spans[-_MOST_SPANS // 2 :]
            _added(self._summed, old)

    def last_step(self) -> dict[str, float]:
        """Return milliseconds by stage of the last step and its backward passes; it does not affect :meth:`take`."""
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
