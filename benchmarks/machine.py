"""What the machine can do, measured beside the benchmark: matrix products, copying, and the memory of one step."""

import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

GEMM_SIDE = 1536
COPY_BYTES = 128 * 2**20  # beyond any cache
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
    """Return the GB per second of copying a large tensor; what is read and what is written both count."""
    return _rate(copying(size, device), 2 * size / 1e9, trials, device)


def copying(size: int, device: torch.device = CPU) -> Callable[[], object]:
    source = torch.zeros(size // 4, device=device)
    target = torch.ones_like(source)
    return lambda: target.copy_(source)


def seconds(work: Callable[[], object], device: torch.device = CPU) -> float:
    """Return how long some work takes; CUDA is waited for, before and after."""
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
    """Return the seconds of every way, in turns, so that a busy moment of the machine hits all of them.

    Each is repeated until it takes ``least`` seconds. ``before`` is called before each turn, outside the time.
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
    """Keep Python from collecting garbage: a collection in the middle of a step would be charged to it."""
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
    """Return how far the memory that torch allocates rises above its level at the start of ``work``.

    The profiler's record of every allocation and release by torch's CPU allocator is summed up in order of time. That
    sees tensors and the buffers inside operators, but not the scratch memory that oneDNN and MKL take for themselves.
    On CUDA the allocator's own count is read.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    with _silent_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
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


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """Drop what native code writes to the error stream: the profiler reports there that it starts and stops."""
    sys.stderr.flush()
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)
