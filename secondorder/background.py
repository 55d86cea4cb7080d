"""Work beside training: a thread, and on a GPU a stream of its own."""

from __future__ import annotations

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

    def result(self, tensors: Callable[[Any], Iterable[Tensor]]) -> Any:
        """Wait for it: the host for the thread, the stream of now for that of the work.

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
        self._future.exception()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class Background:
    """A thread for one piece of work after the other; it starts with the first and ends when nobody holds this."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._streams: dict[torch.device, Any] = {}

    def submit(self, work: Callable[[], Any], device: torch.device) -> Job:
        """Start some work on tensors as they are now on this stream; what it reads must not change until it is done."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="secondorder")
        begun, stream = None, None
        if device.type == "cuda":
            stream = self._streams.get(device) or torch.cuda.Stream(device)
            self._streams[device] = stream
            begun = torch.cuda.current_stream(device).record_event()
        return Job(self._thread.submit(_run, work, device, stream, begun, torch.get_num_threads()), device)


def _run(
    work: Callable[[], Any], device: torch.device, stream: Any, begun: Any, threads: int
) -> tuple[Any, torch.Event | None]:
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    with torch.no_grad():
        if device.type != "cuda":
            return work(), None
        with torch.cuda.stream(stream):
            stream.wait_event(begun)
            return work(), stream.record_event()
