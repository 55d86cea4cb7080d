"""What the machine can do, measured beside the benchmark: matrix products, copying, and the memory of one step."""

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

GEMM_SIDE = 1536
COPY_BYTES = 128 * 2**20  # beyond any cache


@dataclass(frozen=True)
class Rate:
    """A rate over several trials."""

    median: float
    best: float


def gemm_gflops(trials: int = 7, side: int = GEMM_SIDE) -> Rate:
    """Measure float32 matrix products.

    Args:
        trials: Number of products that are timed.
        side: Rows and columns of both factors.

    Returns:
        GFLOP per second.
    """
    a, b, out = (torch.randn(side, side) for _ in range(3))
    return _rate(lambda: torch.mm(a, b, out=out), 2 * side**3 / 1e9, trials)


def copy_gbytes(trials: int = 7, size: int = COPY_BYTES) -> Rate:
    """Measure copying a large tensor; what is read and what is written both count.

    Args:
        trials: Number of copies that are timed.
        size: Bytes of the tensor.

    Returns:
        Gigabytes per second.
    """
    source = torch.zeros(size // 4)
    target = torch.ones_like(source)
    return _rate(lambda: target.copy_(source), 2 * size / 1e9, trials)


def _rate(work: Callable[[], object], amount: float, trials: int) -> Rate:
    work()  # warm up
    seconds = []
    for _ in range(trials):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return Rate(amount / statistics.median(seconds), amount / min(seconds))


def peak_bytes(work: Callable[[], object]) -> int:
    """Return how far the memory that torch allocates rises above its level at the start of ``work``.

    The profiler's record of every allocation and release by torch's CPU allocator is summed up in order of time. That
    sees tensors and the buffers inside operators, but not the scratch memory that oneDNN and MKL take for themselves.

    Args:
        work: Such as one training step.

    Returns:
        Bytes at the highest point.
    """
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
    """Drop what native code writes to the error stream: the profiler reports there that it starts and stops.

    Yields:
        Nothing.
    """
    sys.stderr.flush()
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)
