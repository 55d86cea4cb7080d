"""Strategies that estimate from some ranks' examples alone: each layer from those of its owner, to scale."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.support.grid import each
from tests.support.oracles.ranks import TASKS, Run, assert_same_path, build, flat, optimizer_on, path_of, shard
from tests.support.pool import Pool, device_of


def shards_and_owners(rank: int, world: int, strategy: str, run: Run) -> tuple[Tensor, dict[str, int]]:
    model = DDP(TASKS[run.task].model(device_of(rank)))
    keywords = {"root": 1} if strategy == "chief_own" else {}
    with optimizer_on(model, strategy, run, **keywords) as optimizer:
        owners = {name: optimizer.comm.owner(block.index) for name, block in optimizer.blocks.items()}
        path = path_of(model, optimizer, rank, world, run)
        assert "statistics" not in optimizer.comm.collectives.counter.bytes_by_stage()
        return path, owners


def simulated(run: Run, owners: dict[str, int], world: int) -> Tensor:
    """One process: a copy of the model for each rank captures from its shard alone and steps with the joined gradient.

    Of each layer the step of the copy of its owner counts, for all copies.
    """
    models = [TASKS[run.task].model() for _ in range(world)]
    optimizers = [build(run.method, model, **run.keywords) for model in models]
    path = []
    for step in range(run.steps):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            inputs, targets = shard(run.batch(step), rank, world)
            optimizer.zero_grad()
            run.loss(model(inputs), targets).backward()
        for replicas in zip(*(model.parameters() for model in models), strict=True):
            mean = torch.stack([p.grad for p in replicas]).mean(0)
            for p in replicas:
                p.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            for name, rank in owners.items():
                source = models[rank].get_submodule(name).state_dict()
                for model in models:
                    model.get_submodule(name).load_state_dict(source)
        path.append(flat(models[0]))
    return torch.stack(path)


UNCLIPPED = {"kl_clip": None, "factor_update_steps": 1, "inv_update_steps": 2}
RUNS = {
    "kfac_eigen": Run("mlp", "kfac_eigen", UNCLIPPED, steps=6),
    "kfac_cholesky": Run("mlp", "kfac_cholesky", UNCLIPPED, steps=6),
    "ekfac_intra": Run("mlp", "ekfac_intra", UNCLIPPED, steps=6),
    "hylo_sngd": Run("mlp", "hylo_sngd", steps=5),
    "hylo_kid": Run("mlp", "hylo_kid", {"rank_fraction": 1.0}, steps=5),
}


@each(run=RUNS, where=[("local_factors", 3), ("local_factors", 2), ("chief_own", 2)])
def test_owners_estimate_from_their_own_examples(pool: Pool, run: Run, where: tuple[str, int]) -> None:
    strategy, world = where
    found = pool.run(shards_and_owners, strategy, run, world=world)
    owners = found[0][1]
    assert all(of_rank == owners for _, of_rank in found)
    assert set(owners.values()) == ({1} if strategy == "chief_own" else set(range(world)))
    assert_same_path([path for path, _ in found], simulated(run, owners, world), tolerance=1e-10)
