"""Models with DDP in all its forms, models without DDP, and failures on one rank only."""

from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel as DDP

from secondorder import ChiefOnly, CommOpt, HybridOpt, LocalFactors, MemOpt
from secondorder.comm import Local
from tests.support.grid import each, sample
from tests.support.models import seeded_build
from tests.support.oracles import ranks
from tests.support.oracles.ranks import TASKS, Run, alone, assert_same_path, build, distance, mean_loss, optimizer_on
from tests.support.pool import Pool, device_of
from tests.support.rows import Branches
from tests.support.saving import paths_of, trained

STEPS = 8
STILL = {"lr": 0.0, "factor_update_steps": 1, "inv_update_steps": 1}
BOTH = ["comm", "mem"]


# --------------------------------------------------------------------------------------------------------- Forms of DDP
def formed(rank: int, world: int, strategy: str, run: Run, order: str, wrapping: dict[str, Any]) -> Tensor:
    """Train with an optimizer that is built before or after DDP, from the wrapper or from the module inside."""
    bare = TASKS[run.task].model(device_of(rank))
    wrapped = None if order == "before" else DDP(bare, **wrapping)
    with optimizer_on(wrapped if order == "wrapper" else bare, strategy, run) as optimizer:
        return ranks.path_of(wrapped or DDP(bare, **wrapping), optimizer, rank, world, run)


FORMS = {
    "built before": ("before", {}),
    "built on the module inside": ("inside", {}),
    "views of buckets": ("wrapper", {"gradient_as_bucket_view": True}),
    "static graph": ("wrapper", {"static_graph": True}),
    "many buckets": ("wrapper", {"bucket_cap_mb": 1e-4}),
}


@each(form=FORMS, method=["kfac_eigen", "ekfac_running", "mfac"], strategy=BOTH)
def test_forms_of_ddp(pool: Pool, form: tuple[str, dict[str, Any]], method: str, strategy: str) -> None:
    run = Run("mlp", method, steps=STEPS)
    assert_same_path(pool.run(formed, strategy, run, *form), alone(run)[0])


def assert_statistics(pool: Pool, strategy: str, run: Run, *given: Any) -> None:
    """Ranks have the curvature of one process."""
    expected = ranks.curvatures(alone(run)[2])
    for found in pool.run(trained, strategy, *given, dense=True):
        assert found["curvature"]
        assert all(distance(dense, expected[name]) < 1e-10 for name, dense in found["curvature"].items())


@pytest.mark.parametrize("strategy", BOTH)
def test_a_communication_hook_that_rounds_gradients_does_not_affect_statistics(pool: Pool, strategy: str) -> None:
    run = Run("mlp", "kfac_eigen", STILL, steps=2)
    assert_statistics(pool, strategy, run, run, fp16_compress_hook)


# --------------------------------------------------------------------------------------------- Ranks that are not alike
def branches() -> nn.Module:
    """A network with a layer that some passes use, and one that no pass uses."""
    model = seeded_build(Branches)
    model.never = nn.Linear(4, 4, dtype=torch.float64)
    return model


def branching(
    rank: int, world: int, strategy: str, run: Run, user: int, average: bool = False
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Train while one rank uses the branch; return the trajectory, the final parameters, and curvatures."""
    bare = branches().to(device_of(rank))
    model = bare if average else DDP(bare, find_unused_parameters=True)
    path = []
    with optimizer_on(model, strategy, run, average_gradients=average) as optimizer:
        for step in range(run.steps):
            inputs, targets = (t.to(device_of(rank)) for t in ranks.shard(run.batch(step), rank, world))
            optimizer.zero_grad()
            mean_loss(model(inputs, rank == user), targets).backward()
            optimizer.step()
            path.append(ranks.flat(model))
        indices = {name: block.index for name, block in optimizer.blocks.items() if name != "never"}
        held = {n: optimizer.dense_curvature(n).cpu() for n, i in indices.items() if optimizer.comm.estimates(i)}
    return torch.stack(path), {name: p.detach().cpu() for name, p in bare.named_parameters()}, held


@sample(
    method=["kfac_eigen", "ekfac_intra", "hylo_sngd"], user={"0": 0, "1": 1}, average={"no_ddp": True, "ddp": False}
)
def test_layer_used_on_one_rank_and_layer_used_nowhere(pool: Pool, method: str, user: int, average: bool) -> None:
    run = Run("mlp", method, steps=STEPS)
    start = dict(branches().named_parameters())
    results = [pool.run(branching, strategy, run, user, average) for strategy in ("comm", "mem")]
    for of_ranks in results:
        assert_same_path([path for path, _, _ in of_ranks], results[0][0][0], tolerance=1e-12)
        for _, end, _ in of_ranks:
            moved = {name: not torch.equal(value, start[name]) for name, value in end.items()}
            assert moved == {name: not name.startswith("never") for name in moved}


@each(user={"0": 0, "1": 1}, strategy=BOTH)
def test_statistics_of_a_layer_come_from_the_only_rank_that_uses_it(pool: Pool, user: int, strategy: str) -> None:
    run = Run("mlp", "kfac_eigen", STILL, steps=2)
    model = branches()
    optimizer = build("kfac_eigen", model, **STILL)
    for step in range(run.steps):
        inputs, targets = ranks.shard(run.batch(step), user, 2)
        optimizer.zero_grad()
        mean_loss(model(inputs, True), targets).backward()
        optimizer.step()
    expected = optimizer.dense_curvature("sometimes")
    held = [dense["sometimes"] for _, _, dense in pool.run(branching, strategy, run, user) if "sometimes" in dense]
    assert len(held) == (2 if strategy == "comm" else 1)
    assert all(distance(dense, expected) < 1e-10 for dense in held)


@each(method=["kfac_eigen", "ekfac_intra"], strategy=BOTH)
def test_different_numbers_of_micro_batches(pool: Pool, method: str, strategy: str) -> None:
    """Rank 0 has two micro-batches and the other rank one, all of the same size."""
    run = Run("mlp", method, STILL, steps=2)
    assert_statistics(pool, strategy, run, [replace(run, micro=micro, sizes=(8, 4)) for micro in (2, 1)])


@sample(
    method=["kfac_eigen", "ekfac_running", "ekfac_intra", "hylo_sngd", "mfac", "ggt"],
    strategy=BOTH,
    poison={"3": 3, "4": 4},
)
def test_batch_with_a_nan_on_one_rank_is_dropped_by_all(pool: Pool, method: str, strategy: str, poison: int) -> None:
    """One of the steps is due to update and refresh the estimates, and the other is not."""
    run = Run("mlp", method, steps=STEPS, poison=poison)
    results = pool.run(trained, strategy, run)
    paths = paths_of(results)
    assert_same_path(paths, alone(run)[0])
    assert torch.equal(paths[0][poison], paths[0][poison - 1])
    assert [found["skipped"] for found in results] == [1, 1]


def test_a_strategy_changes_nothing_in_one_process() -> None:
    assert isinstance(build("kfac_eigen", TASKS["mlp"].model()).comm, Local)
    strategies = (CommOpt(), CommOpt(average_gradients=True), MemOpt(), HybridOpt(1.0), LocalFactors(), ChiefOnly())
    for comm, method in zip(strategies, cycle(["kfac_eigen", "ekfac_intra", "hylo_kid", "mfac"])):
        run = Run("words", method, steps=4)
        path, _, optimizer = alone(run, comm)
        plain, _, other = alone(run)
        assert torch.equal(path, plain)
        assert optimizer.memory_usage()["total"] == other.memory_usage()["total"]
