"""``ranks``: the bytes that each rank stores and sends with every strategy, optionally compared with kfac-pytorch.

The processes run on this machine and communicate with gloo. Bytes are counted, not modeled: those of the optimizer's
tensors, and those of tensors that are passed to collectives, amortized over the intervals.
"""

import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import secondorder
from benchmarks import report
from benchmarks.commands.options import Output
from benchmarks.peers.checkouts import package, set_paths
from benchmarks.report import Table
from benchmarks.workloads.cifar import ResNet20
from secondorder import comm as strategies
from secondorder.comm.names import from_name

_CURVATURE = ("factors", "second_order", "scale")


@dataclass
class Ranks(Output):
    """Count the bytes that ranks store and send, for each strategy."""

    world: int = 4
    """Number of processes."""
    method: str = "kfac"
    """Method of this package."""
    strategies: tuple[str, ...] = ("comm_opt", "hybrid_opt:0.5", "mem_opt", "local_factors", "chief_only")
    """Names of the strategies."""
    batch: int = 32
    """Batch size of each rank."""
    steps: int = 20
    """Number of steps, which is one refresh interval."""
    factor_steps: int = 10
    """Steps between factor updates."""
    kfac_pytorch: Path | None = None
    """Checkout of kfac-pytorch, whose bytes are counted as well."""

    def run(self) -> int:
        cases = [("secondorder", name) for name in self.strategies]
        if self.kfac_pytorch is not None:
            cases += [("kfac-pytorch", name) for name in ("COMM_OPT", "HYBRID_OPT", "MEM_OPT")]
        found = []
        for whose, name in cases:
            with tempfile.TemporaryDirectory() as folder:
                results = Path(folder) / "results"
                spawn(_work, (self, whose, name, folder, results), nprocs=self.world)
                found.append({"whose": whose, "strategy": name, "world": self.world, "ranks": torch.load(results)})
        report.save(self.out_dir, "ranks", [_table(found)], {"method": self.method, "results": found})
        return 0


def _work(rank: int, command: Ranks, whose: str, name: str, folder: str, results: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=command.world)
    torch.manual_seed(0)
    model = ResNet20(Path()).build_model(0)
    wrapped = DistributedDataParallel(model)
    if whose == "secondorder":
        step, count = _ours(model, command, name)
    else:
        step, count = _kfac_pytorch(model, command, name)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(command.steps):
        x = torch.randn(command.batch, 3, 32, 32, generator=generator)
        y = torch.randint(0, 10, (command.batch,), generator=generator)
        model.zero_grad()
        cross_entropy(wrapped(x), y).backward()
        step()
    mine = torch.tensor(count(), dtype=torch.float64)
    everyone = [torch.zeros_like(mine) for _ in range(command.world)]
    dist.all_gather(everyone, mine)
    if rank == 0:
        torch.save([row.tolist() for row in everyone], results)
    dist.destroy_process_group()


Counted = Callable[[], tuple[float, float]]


def _ours(model: nn.Module, command: Ranks, name: str) -> tuple[Callable[[], None], Counted]:
    intervals = {"factor_update_steps": command.factor_steps, "inv_update_steps": command.steps}
    grid = from_name(name)
    optimizer = secondorder.create(
        command.method, model, lr=0.01, comm=grid, skip_layers=nn.BatchNorm2d, **intervals
    )  # kfac-pytorch ignores norm layers
    assert isinstance(grid, strategies.RankGrid)

    def count() -> tuple[float, float]:
        usage = optimizer.memory_usage()
        sent = grid.collectives.counter.bytes_by_stage()
        sent.pop("agreement", None)
        return float(sum(usage.get(kind, 0) for kind in _CURVATURE)), sum(sent.values()) / command.steps

    return optimizer.step, count


def _kfac_pytorch(model: nn.Module, command: Ranks, name: str) -> tuple[Callable[[], None], Counted]:
    set_paths([f"kfac_pytorch={command.kfac_pytorch}"])
    strategies_of_it = package("kfac_pytorch", "kfac.enums").DistributedStrategy
    KFACPreconditioner = package("kfac_pytorch", "kfac.preconditioner").KFACPreconditioner

    sent: list[int] = []
    intervals = {"factor_update_steps": command.factor_steps, "inv_update_steps": command.steps}
    preconditioner = KFACPreconditioner(model, lr=0.01, grad_worker_fraction=strategies_of_it[name], **intervals)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        with _counted(sent):
            preconditioner.step()
        optimizer.step()

    return step, lambda: (float(preconditioner.memory_usage()["total"]), sum(sent) / command.steps)


@contextmanager
def _counted(sent: list[int]) -> Iterator[None]:
    """Append the bytes of each tensor that is passed to all-reduce or broadcast to ``sent``."""

    def counting(function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            sent.append(tensor.nbytes)
            return function(tensor, *args, **kwargs)

        return counted

    with mock.patch.multiple(dist, all_reduce=counting(dist.all_reduce), broadcast=counting(dist.broadcast)):
        yield


def _table(found: Sequence[dict[str, Any]]) -> Table:
    rows = []
    for entry in found:
        kept, sent = zip(*entry["ranks"], strict=True)
        means = {"mean": statistics.mean(kept), "most": max(kept), "sent": statistics.mean(sent)}
        rows.append({"strategy": f"{entry['whose']} {entry['strategy']}", "world": entry["world"], **means})
    columns = report.columns(
        "strategy; ranks = world; curvature of a rank (mean), MB = mean .2f MB; "
        "curvature of the fullest rank, MB = most .2f MB; sent per step, MB = sent .3f MB"
    )
    return report.table_of("ResNet-20: bytes that ranks store and send", rows, columns)
