"""Accelerate with its FSDP2 plugin, which replaces an optimizer's parameters by sharded ones.

Accelerate shards only on accelerators, so the tests set its state to sharding on a CPU.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from secondorder import CommOpt, MemOpt
from tests.integrations.small import make, network
from tests.support.pool import Pool

WORLD, STEPS, SAVED = 2, 6, 3
STRATEGIES = {"mem": MemOpt, "comm": CommOpt}


def method_of(case: str, model: nn.Module) -> Any:
    name, strategy = case.split(", ")
    return make(name, model if name != "sparse_mfac" else model.parameters(), comm=STRATEGIES[strategy]())


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + rank))
    return nn.functional.cross_entropy(model(inputs), inputs[:, :3].argmax(1))


@contextmanager
def sharding(rank: int, world: int, kind: str) -> Iterator[Accelerator]:
    """Yield an accelerator that shards as it would on a GPU."""
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    before = dict(os.environ)
    os.environ.update({key: str(value) for key, value in variables.items()}, MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    try:
        accelerator = Accelerator(cpu=True)
        assert accelerator.num_processes == world
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, cpu_ram_efficient_loading=False, state_dict_type=kind,
            auto_wrap_policy="size_based_wrap", min_num_params=10,
        )  # fmt: skip
        for state in (PartialState._shared_state, AcceleratorState._shared_state):
            state["distributed_type"] = DistributedType.FSDP
        AcceleratorState._shared_state["fsdp_plugin"] = plugin
        yield accelerator
    finally:
        for cls in (AcceleratorState, PartialState, GradientState):
            cls._reset_state()
        os.environ.clear()
        os.environ.update(before)


def sharded(rank: int, world: int, name: str, kind: str, folder: Path, *, resume: bool) -> tuple[Any, list[Any]]:
    """Return the losses and the full parameters at the end of a run that saves on the way or resumes from that."""
    with sharding(rank, world, kind) as accelerator:
        bare = network()
        optimizer = method_of(name, bare)
        model, prepared = accelerator.prepare(bare, optimizer)
        assert {type(p).__name__ for p in model.parameters()} == {"DTensor"}
        if resume:
            accelerator.load_state(str(folder))
        losses = []
        for step in range(SAVED if resume else 0, STEPS):
            loss = loss_of(model, step, rank)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            prepared.step()
            prepared.zero_grad()
            losses.append(loss.item())
            if step + 1 == SAVED and not resume:
                if kind == "FULL_STATE_DICT":
                    optimizer.consolidate_state_dict(pieces=False)
                accelerator.save_state(str(folder))
        whole = [p.full_tensor().detach().numpy() for p in model.parameters()]  # type: ignore[attr-defined]
        assert not any("fallback" in line for line in optimizer.describe().splitlines())
        optimizer.close()
        return losses, whole


def replicated(rank: int, world: int, name: str) -> list[Any]:
    model = network()
    wrapped, optimizer = DistributedDataParallel(model), method_of(name, model)
    for step in range(STEPS):
        loss_of(wrapped, step, rank).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return [p.detach().numpy() for p in model.parameters()]


def both(rank: int, world: int, name: str, kind: str, folder: Path) -> tuple[Any, ...]:
    whole = sharded(rank, world, name, kind, folder, resume=False)
    resumed = sharded(rank, world, name, kind, folder, resume=True)
    return *whole, *resumed, replicated(rank, world, name)


@pytest.mark.filterwarnings("ignore:.*is partial")
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("kfac, mem", "FULL_STATE_DICT"),
        ("sparse_mfac, mem", "SHARDED_STATE_DICT"),
        ("ekfac, mem", "SHARDED_STATE_DICT"),
        ("kfac, comm", "SHARDED_STATE_DICT"),
        ("kfac, comm", "FULL_STATE_DICT"),
    ],
)
def test_sharded_parameters_train_as_replicated_ones_and_resume(
    pool: Pool, tmp_path: Path, name: str, kind: str
) -> None:
    ranks = pool.run(both, name, kind, tmp_path / "state", world=WORLD, timeout=120)
    for losses, trained, later, resumed, replicas in ranks:
        assert later == losses[SAVED:]
        for ours, again, theirs in zip(trained, resumed, replicas, strict=True):
            assert (ours == again).all()
            assert abs(ours - theirs).max() < 1e-6
