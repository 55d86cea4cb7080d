"""Worker processes that run one function as the ranks of a process group, call after call.

Importing torch takes seconds, a fresh process group milliseconds. So processes are forked from one that has imported
torch, the first time that a test needs them, and live as long as pytest does. Every call creates and destroys its own
default group. Each xdist worker has its own pool, which grows to the largest world that its tests use.

::

    def sum_of_ranks(rank: int, world: int, start: float) -> float:      # at the top level of the test file
        total = torch.tensor(start + rank)
        dist.all_reduce(total)
        return total.item()

    def test_sum(pool: Pool) -> None:
        assert pool.run(sum_of_ranks, 1.0, world=3) == [6.0, 6.0, 6.0]

If the ranks themselves can check the results, the test is one function::

    @on_every_rank(3)
    def test_sum(rank: int, world: int) -> None:
        assert sum_of_ranks(rank, world, 1.0) == 6.0
"""

import atexit
import functools
import gc
import importlib
import inspect
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import reduce
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
# Modules that every rank needs, imported once by the process that ranks are forked from. DDP needs the last one.
PRELOADED = ["torch", "torch.distributed", "torch.nn.parallel", "secondorder", "torch._dynamo"]
START_SECONDS = 180  # to import torch, on a machine that is busy
GRACE_SECONDS = 15  # for the other ranks, once one has failed


class Failure(NamedTuple):
    """The error that a rank raised, or type ``"Died"`` and the exit code if its process ended instead."""

    type: str
    message: str
    traceback: str = ""

    def __str__(self) -> str:
        return self.traceback or f"{self.type}: {self.message}"


class RankError(AssertionError):
    """At least one rank failed; the message contains the tracebacks of all ranks that failed."""


class _Call(NamedTuple):
    """The task of a worker."""

    module: str
    function: str
    arguments: bytes  # pickled separately, so that a failed import is a failure like any other
    rank: int
    world: int
    backend: str
    rendezvous: str
    group_timeout: float


class _Worker:
    def __init__(self, backend: str) -> None:
        # a process that is forked from one that has initialized CUDA cannot use it
        context = multiprocessing.get_context("spawn" if backend == "nccl" else "forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.ready = False

    def wait_ready(self) -> None:
        if not self.ready:
            if not self.pipe.poll(START_SECONDS):
                raise RankError(f"a worker process did not start within {START_SECONDS} s")
            self.pipe.recv_bytes()
            self.ready = True

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()

    def answer(self) -> tuple[bool, Any]:
        """Whether the process can take another call, and the result of the current one, or a failure."""
        try:
            answer = self.pipe.recv_bytes()
        except (EOFError, OSError):  # the process has ended, which closed its end of the pipe
            self.process.join()
            return False, Failure("Died", f"exit code {self.process.exitcode}")
        return bool(answer[0]), pickle.loads(answer[1:])


class Pool:
    """Processes that wait for calls; see the docstring of the module.

    Args:
        size: Largest world.
        backend: Backend of the process groups. With ``"nccl"``, rank r uses device r, and a world larger than the
            number of devices skips the test.
    """

    def __init__(self, size: int = 4, backend: str = "gloo") -> None:
        self.size, self.backend = size, backend
        self._workers: list[_Worker] = []
        self._directory = tempfile.mkdtemp(prefix="ranks")
        self._calls = 0
        atexit.register(self.close)

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        world: int = 2,
        timeout: float = 60.0,
        group_timeout: float | None = None,
        backend: str | None = None,
        expect_failure: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """Return the results of ``function(rank, world, *args, **kwargs)`` on the ranks of a fresh process group.

        Args:
            function: A top-level function of a module below the root of the repository.
            *args: Anything that can be pickled; tensors are copied.
            world: Number of ranks.
            timeout: Seconds after which ranks that have not ended are killed, which fails the test in any case.
            group_timeout: Timeout of the process group; half of ``timeout`` by default.
            backend: Backend of the process group; the pool's by default.
            expect_failure: Whether to return a `Failure` for a rank that raised, and not to raise a `RankError`.
            **kwargs: Further arguments, as ``*args``.
        """
        backend = backend or self.backend
        if backend == "nccl" and world > torch.cuda.device_count():
            import pytest

            pytest.skip(f"nccl needs a device per rank: {world} ranks, {torch.cuda.device_count()} devices")
        self._calls += 1
        call = _Call(
            *_import_path(function), pickle.dumps((args, kwargs)), 0, world, backend,
            str(Path(self._directory, str(self._calls))), timeout / 2 if group_timeout is None else group_timeout,
        )  # fmt: skip
        workers = self._hired(world)
        for rank, worker in enumerate(workers):
            worker.pipe.send_bytes(pickle.dumps(call._replace(rank=rank)))
        results = self._collect(workers, timeout, patient=expect_failure)
        failures = {rank: result for rank, result in enumerate(results) if isinstance(result, Failure)}
        if any(failure.type == "Hung" for failure in failures.values()) or (failures and not expect_failure):
            raise RankError("\n".join(f"rank {rank} of {world}: {f}" for rank, f in failures.items()))
        return results

    def close(self) -> None:
        """End all processes. Idempotent."""
        for worker in self._workers:
            worker.kill()
        self._workers = []
        shutil.rmtree(self._directory, ignore_errors=True)
        atexit.unregister(self.close)

    def _hired(self, world: int) -> list[_Worker]:
        """``world`` living workers that are ready."""
        if not 1 <= world <= self.size:
            raise ValueError(f"a world of {world} ranks, and the pool has {self.size}")
        os.makedirs(self._directory, exist_ok=True)
        for worker in [w for w in self._workers if not w.process.is_alive()]:
            self._dismiss(worker)
        while len(self._workers) < world:
            self._workers.append(_Worker(self.backend))
        workers = self._workers[:world]
        for worker in workers:
            worker.wait_ready()
        return workers

    def _dismiss(self, worker: _Worker) -> None:
        worker.kill()
        self._workers.remove(worker)

    def _collect(self, workers: list[_Worker], timeout: float, patient: bool) -> list[Any]:
        """Results and failures by rank; workers that died or did not answer in time are dismissed."""
        results: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        while len(results) < len(workers):
            waiting = {worker.pipe: rank for rank, worker in enumerate(workers) if rank not in results}
            answered = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not answered:
                for rank in waiting.values():
                    self._dismiss(workers[rank])
                    results[rank] = Failure("Hung", "did not end in time and was killed")
            for pipe in answered:
                rank = waiting[pipe]  # type: ignore[index]
                is_alive, results[rank] = workers[rank].answer()
                if not is_alive:
                    self._dismiss(workers[rank])
                if isinstance(results[rank], Failure) and not patient:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return [results[rank] for rank in range(len(workers))]


def on_every_rank(world: int | None = None, **limits: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turn a function of a rank into a test that runs it on every rank of a process group.

    Args:
        world: Number of ranks. By default, it is a parameter of the test, as all arguments after the first two are.
        **limits: Keywords of `Pool.run`.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        def test(pool: Pool, **values: Any) -> None:
            pool.run(function, **({"world": world} if world else {}), **limits, **values)

        names = ["pool", *list(inspect.signature(function).parameters)[2 if world else 1 :]]
        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        functools.update_wrapper(test, function)
        test.of_rank = function  # type: ignore[attr-defined]
        function.__qualname__ += ".of_rank"  # ranks look the function up under this name
        return test

    return decorate


def everywhere(value: Any) -> list[Any]:
    """The values of all ranks of the default group, by rank."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _import_path(function: Callable[..., Any]) -> tuple[str, str]:
    """Module and name by which a process with the root of the repository in its path can import a function.

    The name under which pytest imported a test file is not usable: it depends on which folders are packages.
    """
    while not hasattr(function, "__code__"):
        function = function.__wrapped__  # type: ignore[attr-defined]
    file = Path(function.__code__.co_filename).resolve()
    if "<" in function.__qualname__:
        raise ValueError(f"{function.__qualname__}: only a top-level function of a file can be sent to ranks")
    return ".".join(file.relative_to(ROOT).with_suffix("").parts), function.__qualname__


# ------------------------------------------------------------------------------------------- Code of the worker process


def _serve(pipe: Connection) -> None:
    """Answer calls until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles an interrupt of the terminal
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    sys.path[:0] = [str(ROOT)] if str(ROOT) not in sys.path else []
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    pipe.send_bytes(b"")
    while True:
        try:
            call: _Call = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        pipe.send_bytes(_answer_of(call))


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)  # without regard to the main thread, which may be waiting for a peer forever


def _answer_of(call: _Call) -> bytes:
    """The pickled result or failure of a call, after a byte that is 1 if this process can take another call."""
    try:
        answer = pickle.dumps(_joined(call))
    except BaseException as error:
        answer = pickle.dumps(Failure(type(error).__name__, str(error), traceback.format_exc()))
        # frames of the traceback keep groups alive, and peers only notice that this rank is gone when its sockets close
        traceback.clear_frames(error.__traceback__)
    gc.collect()
    # a failed initialization increments torch's counter of groups, so that names of later groups would not match
    clean = dist.is_initialized()
    try:
        dist.destroy_process_group()
    except Exception:
        clean = False
    gc.collect()
    return bytes([clean]) + answer


_known_modules: set[str] = set()


def _joined(call: _Call) -> Any:
    """Call the function as a rank of a new default group, from the same random state and settings every time."""
    random.seed(0)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    device = torch.device("cuda", call.rank) if call.backend == "nccl" else None
    if device is not None:
        torch.cuda.set_device(device)
    function = reduce(getattr, call.function.split("."), importlib.import_module(call.module))
    args, kwargs = pickle.loads(call.arguments)
    if sys.modules.keys() - _known_modules:
        _known_modules.update(sys.modules)
        gc.collect()
        gc.freeze()  # objects of imported modules are exempt from garbage collection, which runs after every call
    dist.init_process_group(
        call.backend, init_method=f"file://{call.rendezvous}", rank=call.rank, world_size=call.world,
        timeout=timedelta(seconds=call.group_timeout), device_id=device,
    )  # fmt: skip
    dist.barrier()  # a rank with nothing to do must not leave while others still connect to it
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* get no curvature and follow the fallback rule", UserWarning)
        return function(call.rank, call.world, *args, **kwargs)


def device_of(rank: int) -> torch.device:
    """The device of a rank of the current default group."""
    return torch.device("cuda", rank) if dist.get_backend() == "nccl" else torch.device("cpu")
