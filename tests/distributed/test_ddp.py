"""Models with DDP in all its forms, models without DDP, and failures on one rank only."""

from collections.abc import Callable
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
from tests.support.oracles.ranks import (
    TASKS,
    Run,
    alone,
    assert_replicas,
    assert_same_path,
    build,
    curvatures,
    descend,
    distance,
    flat,
    mean_loss,
    optimizer_on,
    path_of,
    shard,
    together,
)
from tests.support.pool import Pool, device_of, on_every_rank
from tests.support.rows import Branches
from tests.support.saving import paths_of, trained

STEPS = 8
STILL = {"lr": 0.0, "factor_update_steps": 1, "inv_update_steps": 1}

BOTH = ["comm", "mem"]


# --------------------------------------------------------------------------------------------------------- Forms of DDP
def in_order(rank: int, world: int, order: str, strategy: str, run: Run) -> tuple[list[str], Tensor]:
    """Train with an optimizer that is built before or after DDP, from the wrapper or from the module inside."""
    bare = TASKS[run.task].model(device_of(rank))
    wrapped = None if order == "before" else DDP(bare)
    with optimizer_on(wrapped if order == "after" else bare, strategy, run) as optimizer:
        wrapped = wrapped or DDP(bare)
        return list(getattr(optimizer, "blocks", ())), path_of(wrapped, optimizer, rank, world, run)


@each(method=["kfac_eigen", "mfac"], strategy=BOTH)
def test_order_of_construction_does_not_matter(pool: Pool, method: str, strategy: str) -> None:
    run = Run("mlp", method, steps=STEPS)
    orders = ("before", "after", "after_on_bare")
    results = [answer for order in orders for answer in pool.run(in_order, order, strategy, run)]
    assert_same_path([path for _, path in results], alone(run)[0])
    assert all(names == results[0][0] for names, _ in results)


@each(
    wrapping=[{"gradient_as_bucket_view": True}, {"static_graph": True}, {"bucket_cap_mb": 1e-4}],
    method=["kfac_eigen", "ekfac_running", "mfac"],
    strategy=BOTH,
)
def test_forms_of_ddp(pool: Pool, wrapping: dict[str, Any], method: str, strategy: str) -> None:
    run = Run("mlp", method, steps=STEPS)
    assert_same_path(pool.run(together, strategy, run, world=2, **wrapping), alone(run)[0])


def assert_curvatures(held: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert held
    assert all(distance(dense, expected[name]) < 1e-10 for name, dense in held.items())


@pytest.mark.parametrize("strategy", BOTH)
def test_a_communication_hook_that_rounds_gradients_does_not_affect_statistics(pool: Pool, strategy: str) -> None:
    run = Run("mlp", "kfac_eigen", STILL, steps=2)
    expected = curvatures(alone(run)[2])
    for found in pool.run(trained, strategy, run, fp16_compress_hook, dense=True):
        assert_curvatures(found["curvature"], expected)
    moving = Run("mlp", "kfac_eigen", steps=STEPS)
    paths = paths_of(pool.run(trained, strategy, moving, fp16_compress_hook))
    assert_replicas(paths)
    assert 1e-9 < distance(paths[0], alone(moving)[0]) < 0.1


# --------------------------------------------------------------------------------------------- Ranks that are not alike
class Unused(Branches):
    """A network with a layer that some passes use, and one that no pass uses."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(4, 4)


def branches() -> Unused:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Unused().double()


def branching(
    rank: int, world: int, strategy: str, run: Run, user: int, average: bool = False
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Train while one rank uses the branch; return the trajectory, the final parameters, and curvatures."""
    bare = branches().to(device_of(rank))
    model = bare if average else DDP(bare, find_unused_parameters=True)
    path = []
    with optimizer_on(model, strategy, run, average_gradients=average) as optimizer:
        for step in range(run.steps):
            inputs, targets = (t.to(device_of(rank)) for t in shard(run.batch(step), rank, world))
            optimizer.zero_grad()
            mean_loss(model(inputs, rank == user), targets).backward()
            optimizer.step()
            path.append(flat(model))
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
    for ranks in results:
        assert_same_path([path for path, _, _ in ranks], results[0][0][0], tolerance=1e-12)
        for _, end, _ in ranks:
            moved = {name: not torch.equal(value, start[name]) for name, value in end.items()}
            assert moved == {name: not name.startswith("never") for name in moved}


@each(user={"0": 0, "1": 1}, strategy=BOTH)
def test_statistics_of_a_layer_come_from_the_only_rank_that_uses_it(pool: Pool, user: int, strategy: str) -> None:
    run = Run("mlp", "kfac_eigen", STILL, steps=2)
    model = branches()
    optimizer = build("kfac_eigen", model, **STILL)
    for step in range(run.steps):
        inputs, targets = shard(run.batch(step), user, 2)
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
    run, moving = Run("mlp", method, STILL, steps=2), Run("mlp", method, steps=STEPS)
    of_ranks = ([replace(whole, micro=micro, sizes=(8, 4)) for micro in (2, 1)] for whole in (run, moving))
    still, moved = (pool.run(trained, strategy, runs, dense=runs[0].steps == 2) for runs in of_ranks)
    expected = curvatures(alone(run)[2])
    for found in still:
        assert_curvatures(found["curvature"], expected)
    assert_replicas(paths_of(moved))


# ------------------------------------------------------------------------------------------ Numbers that are not finite


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


def poisoned_backward(model: nn.Module, optimizer: Any, inputs: Tensor, targets: Tensor, poison: bool) -> None:
    """A backward pass with valid gradients, whose captured statistics contain a NaN if ``poison`` is true."""
    optimizer.zero_grad()
    mean_loss(model(inputs * (torch.nan if poison else 1.0)), targets).backward()
    parameters = list(model.parameters())
    with optimizer.pause_capture():
        gradients = torch.autograd.grad(mean_loss(model(inputs), targets), parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad.copy_(gradient)


def poisoned_statistics(
    rank: int, world: int, strategy: str, run: Run, poisoned: list[tuple[int, ...]]
) -> tuple[Tensor, list[dict[str, Tensor]], int]:
    """Take steps with valid gradients in which some ranks have statistics with a NaN."""
    model = TASKS[run.task].model(device_of(rank))
    path, held = [], []
    with optimizer_on(model, strategy, run, average_gradients=True) as optimizer:
        for step, ranks in enumerate(poisoned):
            inputs, targets = (t.to(device_of(rank)) for t in shard(run.batch(step), rank, world))
            poisoned_backward(model, optimizer, inputs, targets, rank in ranks)
            optimizer.step()
            path.append(flat(model))
            held.append(curvatures(optimizer))
        return torch.stack(path), held, optimizer.diagnostics()["skipped_statistics"]


@each(method=["kfac_eigen", "kfac_cholesky", "ekfac_intra"], strategy=BOTH)
def test_statistics_with_a_nan_are_dropped_on_their_rank_only(pool: Pool, method: str, strategy: str) -> None:
    run = Run("mlp", method, STILL)
    results = pool.run(poisoned_statistics, strategy, run, [(), (1,), (0, 1), ()])
    model = TASKS["mlp"].model()
    optimizer = build(method, model, **STILL)
    for step, ranks in enumerate([(0, 1), (0,), (), (0, 1)]):
        batch = run.batch(step)
        if ranks:
            descend(model, optimizer, batch if len(ranks) == 2 else shard(batch, 0, 2), run)
        for _, held, _ in results:
            assert_curvatures(held[step], curvatures(optimizer))
    assert [skipped > 0 for _, _, skipped in results] == [True, True]


@each(method=["ekfac_intra", "hylo_sngd"], strategy=BOTH)
def test_training_continues_after_statistics_with_a_nan(pool: Pool, method: str, strategy: str) -> None:
    eager = {"update_steps": 1} if method.startswith("hylo") else {"factor_update_steps": 1, "inv_update_steps": 2}
    run = Run("mlp", method, eager)
    results = pool.run(poisoned_statistics, strategy, run, [(0,), *[()] * 5])
    assert_replicas([path for path, *_ in results])
    assert not torch.equal(results[0][0][0], results[0][0][-1])
    assert sum(skipped for *_, skipped in results) > 0


# ------------------------------------------------------------------------------------------------------- Which strategy
@on_every_rank(2)
def test_default_strategy(rank: int, world: int) -> None:
    comm = build("kfac_eigen", TASKS["mlp"].model(device_of(rank))).comm
    assert (type(comm), comm.data_rank, comm.data_world) == (CommOpt, rank, 2)


ONE_PROCESS: list[Callable[[], Any]] = [
    CommOpt, lambda: CommOpt(average_gradients=True), MemOpt, lambda: HybridOpt(1.0), LocalFactors, ChiefOnly
]  # fmt: skip


def test_a_strategy_changes_nothing_in_one_process() -> None:
    assert isinstance(build("kfac_eigen", TASKS["mlp"].model()).comm, Local)
    for make, method in zip(ONE_PROCESS, cycle(["kfac_eigen", "ekfac_intra", "hylo_kid", "mfac"])):
        run = Run("words", method, steps=4)
        path, _, optimizer = alone(run, make())
        plain, _, other = alone(run)
        assert torch.equal(path, plain)
        assert optimizer.memory_usage()["total"] == other.memory_usage()["total"]


def test_a_group_of_one_rank_trains_as_one_process(pool: Pool) -> None:
    run = Run("words", "kfac_eigen", steps=4)
    for strategy in (None, "comm", "mem", "local_factors", "chief"):
        (path,) = pool.run(together, strategy, run, world=1)
        assert distance(path, alone(run)[0]) <= 1e-9  # another process or device may round differently
