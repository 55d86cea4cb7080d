"""Rates of the machine, which are measured with each benchmark: matrix products, copying, and the peak memory."""

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

GEMM_SIDE = 1536
COPY_BYTES = 128 * 2**20  # larger than any cache
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Rate:
    """A rate over several trials."""

    median: float
    best: float


def gemm_gflops(
    trials: int = 7, side: int = GEMM_SIDE, dtype: torch.dtype = torch.float32, device: torch.device = CPU
) -> Rate:
    a, b, out = (torch.randn(side, side, dtype=dtype, device=device) for _ in range(3))
    return _rate(lambda: torch.mm(a, b, out=out), 2 * side**3 / 1e9, trials, device)


def copy_gbytes(trials: int = 7, size: int = COPY_BYTES, device: torch.device = CPU) -> Rate:
    """Return the GB per second of copying a large tensor, where reads and writes both count."""
    return _rate(copying(size, device), 2 * size / 1e9, trials, device)


def copying(size: int, device: torch.device = CPU) -> Callable[[], object]:
    source = torch.zeros(size // 4, device=device)
    target = torch.ones_like(source)
    return lambda: target.copy_(source)


def seconds(work: Callable[[], object], device: torch.device = CPU) -> float:
    """Return the seconds that ``work`` takes. CUDA devices are synchronized before and after."""
    _wait_for(device)
    start = time.perf_counter()
    work()
    _wait_for(device)
    return time.perf_counter() - start


def timed_in_turns(
    ways: Mapping[Any, Callable[[], object]],
    trials: int,
    device: torch.device = CPU,
    least: float = 0.0,
    before: Callable[[], object] = lambda: None,
) -> dict[Any, list[float]]:
    """Return the seconds of all functions, called in turns, so that other load on the machine affects all of them.

    Each is repeated until it takes ``least`` seconds. ``before`` is called before each turn and is not timed.
    """
    repeats = {}
    before()
    for name, way in ways.items():
        first = min(seconds(way, device) for _ in range(3 if least else 1))
        repeats[name] = max(1, round(least / first))
    times: dict[Any, list[float]] = {name: [] for name in ways}
    with no_collections():
        for _ in range(trials):
            before()
            for name, way in ways.items():
                times[name].append(seconds(_repeated(way, repeats[name]), device) / repeats[name])
    return times


@contextmanager
def no_collections() -> Iterator[None]:
    """Disable Python's garbage collection, which would add to the time of the step that it interrupts."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _repeated(way: Callable[[], object], times: int) -> Callable[[], object]:
    return lambda: [way() for _ in range(times)]


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _rate(work: Callable[[], object], amount: float, trials: int, device: torch.device) -> Rate:
    work()  # warm up
    times = [seconds(work, device) for _ in range(trials)]
    return Rate(amount / statistics.median(times), amount / min(times))


def peak_bytes(work: Callable[[], object], device: torch.device = CPU) -> int:
    """Return the peak of the memory that torch allocates during ``work``, relative to its level at the start.

    On the CPU, the profiler records every allocation and release of torch's allocator. This includes tensors and the
    buffers inside operators, but not the scratch memory of oneDNN and MKL. On CUDA, the allocator reports the peak.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # no messages about the start and the end
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        work()
    kineto = record.profiler
    assert kineto is not None
    assert kineto.kineto_results is not None
    memory = [event for event in kineto.kineto_results.events() if event.name() == "[memory]"]
    level = top = 0
    for event in sorted(memory, key=lambda event: event.start_ns()):
        level += event.nbytes()
        top = max(top, level)
    return top
