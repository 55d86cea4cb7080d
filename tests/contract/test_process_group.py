"""In a process group: the default strategy trains and replicas agree, one process without a strategy is refused."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from secondorder.comm import Local
from tests.support.methods import METHODS, Method
from tests.support.pool import Pool, device_of
from tests.support.tasks import MLP, Task, assert_identical, values

STEPS = 5


def train_by_default(rank: int, world: int, name: str) -> dict[str, Tensor]:
    """Train on other batches than the other rank does; the parameters at the end."""
    method = next(m for m in METHODS if m.name == name)
    model = DDP(MLP.model().to(device_of(rank)))
    optimizer = method.build(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        MLP.loss(model, STEPS * rank + step).backward()
        optimizer.step()
    optimizer.close()
    return {name: value.cpu() for name, value in values(model.module).items()}


def test_two_ranks_train_and_agree(method: Method, mlp: Task, pool: Pool) -> None:
    ours, theirs = pool.run(train_by_default, method.name, world=2)
    assert_identical(ours, theirs)
    start = values(mlp.model())
    assert all(value.isfinite().all() and not torch.equal(value, start[name]) for name, value in ours.items())


def build_local(rank: int, world: int, name: str) -> tuple[str, str, int]:
    """What a strategy for one process says, and how many hooks it has left on a layer."""
    method = next(m for m in METHODS if m.name == name)
    model = torch.nn.Linear(3, 2)
    try:
        method.build(model, comm=Local())
    except RuntimeError as error:
        return type(error).__name__, str(error), len(model._forward_hooks) + len(model._forward_pre_hooks)
    return "", "", 0


def test_one_process_without_a_strategy_is_refused_among_two(method: Method, pool: Pool) -> None:
    for kind, said, hooks in pool.run(build_local, method.name, world=2):
        assert kind == "RuntimeError"
        assert "2 ranks" in said
        assert "CommOpt" in said
        assert hooks == 0


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
def test_group_of_one_rank_trains_as_without(method: Method, mlp: Task) -> None:
    found = method.trained(mlp, STEPS)
    dist.destroy_process_group()
    assert_identical(found, method.trained(mlp, STEPS))
