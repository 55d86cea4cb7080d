"""Step times of real ranks on one machine: processes of one thread each, over gloo, that train the same model.

What counts is processor time: ranks that wait for each other, or share a core, do not disturb it much.
"""

import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import secondorder
from benchmarks.timing import Intervals, StepClass, Times
from benchmarks.workloads import Size, Workload, WorkloadName, make_workload
from secondorder.comm.names import from_name

Medians = dict[StepClass, float]
"""Processor seconds by class of steps."""


@dataclass(frozen=True)
class Timed:
    """What the ranks do; plain values, because other processes get it."""

    workload: WorkloadName
    size: Size
    data_dir: Path
    batch_size: int
    """Examples of each rank."""
    seed: int
    rounds: int
    """Refresh intervals that count."""
    method: str | None
    """For ``secondorder.create``; None for SGD."""
    strategy: str
    intervals: Intervals

    def make_workload(self) -> Workload:
        return make_workload(self.workload, self.data_dir, self.size, self.batch_size)

    def make_optimizer(self, model: nn.Module, strategy: str | None) -> Any:
        if self.method is None:
            return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        comm = None if strategy is None else from_name(strategy)
        return secondorder.create(self.method, model, lr=1e-3, comm=comm, **keywords(self.method, self.intervals))


def keywords(method: str, intervals: Intervals) -> Mapping[str, Any]:
    if method == "hylo":
        return {"update_steps": intervals.refresh}
    return {"factor_update_steps": intervals.factor, "inv_update_steps": intervals.refresh, "refresh_warmup": False}


def measure(timed: Timed, world: int) -> list[Medians]:
    timed.make_workload().build_model(timed.seed)  # if data is missing, one process says so
    if world == 1:
        return [_train(timed, 0, 1)]
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results"
        spawn(_work, (timed, world, folder, results), nprocs=world)
        found: list[Medians] = torch.load(results)
        return found


def _work(rank: int, timed: Timed, world: int, folder: str, results: Path) -> None:
    """Train as one rank; the first one writes what all of them measured."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    try:
        mine = _train(timed, rank, world)
        everyone: list[Any] = [None] * world
        dist.all_gather_object(everyone, mine)
        if rank == 0:
            torch.save(everyone, results)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _train(timed: Timed, rank: int, world: int) -> Medians:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        workload = timed.make_workload()
        model = workload.build_model(timed.seed)
        wrapped = DistributedDataParallel(model) if world > 1 else model
        optimizer = timed.make_optimizer(model, timed.strategy if world > 1 else None)
        times = _time_steps(timed, workload, wrapped, optimizer, timed.seed + rank)
    finally:
        torch.set_num_threads(threads)
    if timed.method is None:
        return {"plain": statistics.median(second for own in times.values() for second in own)}
    optimizer.close()
    return {kind: statistics.median(own) for kind, own in times.items()}


def _time_steps(timed: Timed, workload: Workload, model: nn.Module, optimizer: Any, seed: int) -> Times:
    """Train, and record processor seconds; those of the first interval do not count."""
    times: Times = {}
    batches, interval = workload.batches(seed), timed.intervals.refresh
    for step in range(interval * (timed.rounds + 1)):
        batch = next(batches)
        start = time.process_time()
        optimizer.zero_grad()
        workload.loss(model, batch).backward()
        optimizer.step()
        spent = time.process_time() - start
        if step >= interval:
            times.setdefault(timed.intervals.step_class(step), []).append(spent)
    return times
