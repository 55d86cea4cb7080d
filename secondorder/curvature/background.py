"""Work in parallel with training, in a separate thread and, on a GPU, in a separate stream."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

#: Types of devices that can run two tasks in parallel.
DEVICES = ("cpu", "cuda")


class Job:
    """A computation in progress, in a thread and on a device."""

    def __init__(self, future: Future[tuple[Any, torch.Event | None]], device: torch.device) -> None:
        self._future = future
        self._device = device
        self._process = os.getpid()

    @classmethod
    def failed(cls, error: Exception, device: torch.device) -> Job:
        """Return a job that could not begin, whose result raises an error."""
        future: Future[tuple[Any, torch.Event | None]] = Future()
        future.set_exception(error)
        return cls(future, device)

    @property
    def is_here(self) -> bool:
        """Whether this process has the thread, which a forked process does not."""
        return self._process == os.getpid()

    def result(self, tensors: Callable[[Any], Iterable[Tensor]]) -> Any:
        """Wait for the result. The host waits for the thread, and the current stream waits for that of the work.

        Args:
            tensors: Returns the tensors of a result, which this stream uses from now on.

        Returns:
            The result.

        Raises:
            Exception: The error that the work raised.
        """
        found, done = self._future.result()
        if self._device.type == "cuda" and done is not None:
            here = torch.cuda.current_stream(self._device)
            here.wait_event(done)
            for tensor in tensors(found):
                tensor.record_stream(here)
        return found

    def wait(self) -> None:
        """Wait until the job uses nothing any more, whether or not it succeeds."""
        if self.is_here:
            self._future.exception()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)


class Background:
    """A thread that runs one piece of work after the other. It starts with the first piece."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._process = os.getpid()
        self._streams: dict[torch.device, Any] = {}

    def submit(self, work: Callable[[], Any], device: torch.device) -> Job:
        """Start some work on tensors in their current state on this stream. They must not change until it is done."""
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
        """End the thread when it has no work left. The next work starts another thread."""
        if self._thread is not None and self._process == os.getpid():
            self._thread.shutdown(wait=False)
        self._thread = None


#: Threads in which a GPU factorizes parts of a stack. Each starts when it is used for the first time.
_HELPERS = tuple(Background() for _ in range(8))


def in_parallel(function: Callable[[Tensor], tuple[tuple[Tensor, ...], Tensor]], stack: Tensor) -> Any:
    """Return the results of a function for a stack of matrices ``[k, n, n]``, on a GPU from several threads.

    An eigendecomposition leaves most of a GPU idle unless the matrix has thousands of rows.

    Args:
        function: Returns tensors and flags, all with one entry for each matrix.
        stack: The matrices.
    """
    if stack.device.type != "cuda" or len(stack) < 2:
        return function(stack)
    parts = stack.chunk(len(_HELPERS))
    jobs = [helper.submit(partial(function, part), stack.device) for helper, part in zip(_HELPERS, parts, strict=False)]
    try:
        found, flags = zip(*(job.result(lambda result: (*result[0], result[1])) for job in jobs), strict=True)
    except BaseException:
        for job in jobs:  # they read the stack
            job.wait()
        raise
    return tuple(map(torch.cat, zip(*found, strict=True))), torch.cat(flags)


def _run(work: Callable[[], Any], device: torch.device, stream: Any, begun: Any) -> tuple[Any, torch.Event | None]:
    with torch.no_grad():
        if device.type != "cuda":
            return work(), None
        with torch.cuda.stream(stream):
            stream.wait_event(begun)
            return work(), stream.record_event()
