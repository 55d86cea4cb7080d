"""The processes of one run: those that ``torchrun`` started, or only this one.

Each rank draws the same batches and trains on its own share of each, so that a run on several ranks uses the same
examples as a run on one. ``DistributedDataParallel`` averages the gradients, unless the optimizer's strategy does.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from benchmarks.workloads import Batch

_FROM_LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True)
class RankFigures:
    rank: int
    role: str  # `"gradient"`; with dedicated workers also `"factor"` or `"inverse"`
    losses: list[float]  # losses on its share of each batch
    memory: dict[str, int]  # bytes that its optimizer stores, by kind
    sent: dict[str, float]
    """Bytes passed to collectives per step, by stage, without those of ``DistributedDataParallel``."""


@dataclass(frozen=True)
class Ranks:
    """One of the processes of a run. If there is only one, every method is the identity."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def wrap(self, model: nn.Module, optimizer: Optimizer) -> nn.Module:
        return DistributedDataParallel(model) if self.readers(optimizer)[1] == self.size > 1 else model

    def share(self, batch: Batch, optimizer: Optimizer) -> Batch:
        rank, size = self.readers(optimizer)
        examples = len(batch[0])
        if examples % size:
            raise ValueError(
                f"a batch of {examples} cannot be divided evenly among {size} ranks: take --batch-size "
                f"{examples - examples % size or size}"
            )
        inputs, targets = (part.chunk(size)[rank] for part in batch)
        return inputs, targets

    def readers(self, optimizer: Optimizer) -> tuple[int, int]:
        """Return the index of this rank among the ranks that read data, and the number of those."""
        comm = getattr(optimizer, "comm", None)
        return (self.rank, self.size) if comm is None else (comm.data_rank, comm.data_world)

    def collect(self, mine: Any) -> list[Any]:
        if self.size == 1:
            return [mine]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, mine)  # uses pickle, which is safe between the processes of one run
        return found


def own_device(kind: str) -> torch.device:
    return torch.device(kind, int(os.environ.get("LOCAL_RANK", "0"))) if kind == "cuda" else torch.device(kind)


@contextmanager
def joined(device: str | torch.device = "cpu") -> Iterator[Ranks]:
    """Join the launcher's process group, if there is one, and leave it at the end of the ``with`` block."""
    if not all(key in os.environ for key in _FROM_LAUNCHER):
        yield Ranks()
        return
    on_cuda = torch.device(device).type == "cuda"
    if on_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_cuda else "gloo", timeout=_TIMEOUT)
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size())
        dist.barrier()  # a rank that leaves early closes connections that others still use
    finally:
        dist.destroy_process_group()
