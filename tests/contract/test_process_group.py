"""In a process group, the default strategy trains equal replicas, and the strategy for one process is refused."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from secondorder.comm import Local
from tests.support.methods import METHODS, Method
from tests.support.pool import Pool, device_of
from tests.support.tasks import MLP, Task, assert_identical, train, values

STEPS = 5


def method_of(name: str) -> Method:
    return next(method for method in METHODS if method.name == name)


def train_by_default(rank: int, world: int, name: str) -> dict[str, Tensor]:
    """Train on batches that differ between ranks; return the final parameters."""
    model = DDP(MLP.model().to(device_of(rank)))
    with method_of(name).build(model) as optimizer:
        train(model, optimizer, MLP, STEPS, start=STEPS * rank)
    return {name: value.cpu() for name, value in values(model.module).items()}


def test_two_ranks_train_and_agree(method: Method, mlp: Task, pool: Pool) -> None:
    ours, theirs = pool.run(train_by_default, method.name, world=2)
    assert_identical(ours, theirs)
    start = values(mlp.model())
    assert all(value.isfinite().all() and not torch.equal(value, start[name]) for name, value in ours.items())


def build_local(rank: int, world: int, name: str) -> int:
    """The number of hooks that are left on a layer if the strategy is for one process."""
    model = torch.nn.Linear(3, 2)
    with pytest.raises(RuntimeError, match=r"2 ranks.*CommOpt"):
        method_of(name).build(model, comm=Local())
    return len(model._forward_hooks) + len(model._forward_pre_hooks)


def test_the_strategy_for_one_process_is_refused_on_two_ranks(method: Method, pool: Pool) -> None:
    assert pool.run(build_local, method.name, world=2) == [0, 0]


@pytest.mark.usefixtures("group_of_one")
def test_a_group_of_one_rank_trains_as_without_a_group(method: Method, mlp: Task) -> None:
    found = method.trained(mlp, STEPS)
    dist.destroy_process_group()
    assert_identical(found, method.trained(mlp, STEPS))
