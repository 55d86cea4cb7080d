"""Work beside training: a thread, and on a GPU a stream of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

#: Kinds of devices that compute one thing beside another.
DEVICES = ("cpu", "cuda")


class Job:
    """Something that is being computed.

    Args:
        future: The thread's.
        device: Where it is computed.
    """

    def __init__(self, future: Future[tuple[Any, torch.Event | None]], device: torch.device) -> None:
        self._future = future
        self._device = device
        self._process = os.getpid()

    @classmethod
    def failed(cls, error: Exception, device: torch.device) -> Job:
        """A job that could not begin: its result raises."""
        future: Future[tuple[Any, torch.Event | None]] = Future()
        future.set_exception(error)
        return cls(future, device)

    @property
    def is_here(self) -> bool:
        """Whether this process has the thread: a fork of it has not."""
        return self._process == os.getpid()

    def result(self, tensors: Callable[[Any], Iterable[Tensor]]) -> Any:
        """Wait for the result: the host for the thread, the stream of now for that of the work.

        Args:
            tensors: The tensors of a result, which this stream uses from now on.

        Returns:
            The result.

        Raises:
            Exception: What the work raised.
        """
        found, done = self._future.result()
        if self._device.type == "cuda" and done is not None:
            here = torch.cuda.current_stream(self._device)
            here.wait_event(done)
            for tensor in tensors(found):
                tensor.record_stream(here)
        return found

    def wait(self) -> None:
        """Wait until nothing of it is used any more, however it ends."""
        if self.is_here:
            self._future.exception()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)


class Background:
    """A thread for one piece of work after the other; it starts with the first."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._process = os.getpid()
        self._streams: dict[torch.device, Any] = {}

    def submit(self, work: Callable[[], Any], device: torch.device) -> Job:
        """Start some work on tensors as they are now on this stream; what it reads must not change until it is done."""
        if self._thread is None or self._process != os.getpid():
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="secondorder")
            self._process = os.getpid()
        begun, stream = None, None
        if device.type == "cuda":
            stream = self._streams.get(device) or torch.cuda.Stream(device)
            self._streams[device] = stream
            begun = torch.cuda.current_stream(device).record_event()
        return Job(self._thread.submit(_run, work, device, stream, begun), device)

    def close(self) -> None:
        """Let the thread end when it has nothing left to do; the next work starts another."""
        if self._thread is not None and self._process == os.getpid():
            self._thread.shutdown(wait=False)
        self._thread = None


def _run(work: Callable[[], Any], device: torch.device, stream: Any, begun: Any) -> tuple[Any, torch.Event | None]:
    with torch.no_grad():
        if device.type != "cuda":
            return work(), None
        with torch.cuda.stream(stream):
            stream.wait_event(begun)
            return work(), stream.record_event()
