"""N ranks on shards of a batch do what one process does on the joined batch, under every strategy.

Statistics are compared at a learning rate of 0, where gradients do not matter: those of shards of unequal size average
to something else than the gradient of the joined batch, and statistics must not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.support.oracles import ranks as oracle
from tests.support.oracles.ranks import (
    EXAMPLES,
    LENGTH,
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
    optimizer_on,
    shard,
    sum_loss,
    together,
)
from tests.support.pool import Pool, device_of

KRONECKER = ("kfac_eigen", "kfac_cholesky", "ekfac_running", "ekfac_intra")
EXACT = (*KRONECKER, "hylo_sngd", "mfac", "mfac_sparse", "ggt")
GRID = {2: ("comm", "mem", "hybrid_half"), 3: ("comm", "mem", "hybrid_third"), 4: ("comm", "mem", "hybrid_half")}
OVERRIDDEN = ("comm_owner", "mem_replicated")
CHIEF = ("chief", "chief_inverses")
STILL = {"lr": 0.0, "factor_update_steps": 1, "inv_update_steps": 1}


@cache
def reference(task: str, method: str, steps: int = 20) -> Tensor:
    return alone(Run(task, method, steps=steps))[0]


def cases(methods: Sequence[str], strategies: Callable[[int], Sequence[str]], worlds: Sequence[int]) -> list[Any]:
    """Every method under every strategy in every world, named so."""
    return [
        pytest.param(method, strategy, world, id=f"{method}-{strategy}-{world}")
        for method in methods
        for world in worlds
        for strategy in strategies(world)
    ]


@pytest.mark.parametrize(
    ("method", "strategy", "world"),
    [*cases(EXACT, lambda world: GRID[world], (2, 3, 4)), *cases(KRONECKER, lambda world: OVERRIDDEN + CHIEF, (3,))],
)
def test_shards_equal_the_joined_batch(pool: Pool, method: str, strategy: str, world: int) -> None:
    paths = pool.run(together, strategy, Run("mlp", method), world=world)
    assert_same_path(paths, reference("mlp", method))


WHITENING = {"lr": 0.01, "power": 0.5, "momentum_mode": "pre", "kl_clip": None}


@pytest.mark.parametrize(("strategy", "world"), [("comm", 2), ("mem", 3)])
@pytest.mark.parametrize(
    ("method", "keywords"), [("ekfac_intra", {}), ("ekfac_running", {}), ("ekfac_running", WHITENING)]
)
def test_null_spaces_are_the_same_for_any_number_of_ranks(
    pool: Pool, strategy: str, world: int, method: str, keywords: dict[str, Any]
) -> None:
    """Rounding decides on the basis of a null space, and differs between shards and the joined batch."""
    run = Run("broad", method, keywords, steps=10)
    assert_same_path(pool.run(together, strategy, run, world=world), alone(run)[0])


@pytest.mark.parametrize(("strategy", "world"), [("comm", 2), ("mem", 3), ("hybrid_half", 4)])
@pytest.mark.parametrize(
    ("task", "method"),
    [
        ("words", "kfac_eigen"),
        ("words", "ekfac_intra"),
        ("words", "ekfac_running"),
        ("words", "hylo_sngd"),
        ("words", "mfac_sparse"),
        ("cnn", "kfac_cholesky"),
        ("cnn", "ekfac_intra"),
        ("cnn", "hylo_sngd"),
        ("attention", "kfac_eigen"),
        ("attention", "ekfac_intra"),
    ],
)
def test_every_kind_of_layer(pool: Pool, task: str, method: str, strategy: str, world: int) -> None:
    paths = pool.run(together, strategy, Run(task, method, steps=10), world=world)
    assert_same_path(paths, reference(task, method, 10))


@pytest.mark.parametrize("strategy", ["comm", "mem"])
@pytest.mark.parametrize("method", [*KRONECKER, "hylo_sngd", "mfac"])
def test_micro_batches_without_synchronization(pool: Pool, method: str, strategy: str) -> None:
    paths = pool.run(together, strategy, Run("mlp", method, steps=10, micro=2), world=2)
    assert_same_path(paths, reference("mlp", method, 10))


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("method", ["hylo_kid", "hylo_kis"])
def test_selected_rows_do_not_depend_on_the_strategy(pool: Pool, method: str, world: int) -> None:
    """Which rows are selected depends on the shards: that is the method, and no one process can be compared with."""
    run = Run("mlp", method, steps=10)
    paths = [pool.run(together, strategy, run, world=world) for strategy in GRID[world]]
    for of_strategy in paths:
        assert_same_path(of_strategy, paths[0][0], tolerance=1e-12)


# ---------------------------------------------------------------------------------------------------------------------
# Statistics
# ---------------------------------------------------------------------------------------------------------------------


def statistics_of_shards(
    rank: int, world: int, strategy: str, run: Run, sizes: list[tuple[int, ...]]
) -> dict[str, Tensor]:
    """Curvature that a rank holds after one step for each tuple of shard sizes."""
    model = DDP(TASKS[run.task].model(device_of(rank)))
    with optimizer_on(model, strategy, run) as optimizer:
        for step, of_step in enumerate(sizes):
            descend(model, optimizer, shard(first(run.batch(step), sum(of_step)), rank, world, of_step), run)
        return curvatures(optimizer)


def first(batch: oracle.Batch, examples: int) -> oracle.Batch:
    return batch[0][:examples], batch[1][:examples]


def joined_statistics(run: Run, examples: list[int]) -> dict[str, Tensor]:
    model = TASKS[run.task].model()
    optimizer = build(run.method, model, **run.keywords)
    for step, number in enumerate(examples):
        descend(model, optimizer, first(run.batch(step), number), run)
    return curvatures(optimizer)


def assert_held(of_ranks: list[dict[str, Tensor]], expected: dict[str, Tensor], everywhere: bool) -> None:
    """Every block is held somewhere (once, or by everybody), and by everybody alike."""
    for name, dense in expected.items():
        held = [of_rank[name] for of_rank in of_ranks if name in of_rank]
        assert len(held) == (len(of_ranks) if everywhere else 1), name
        for matrix in held:
            assert distance(matrix, dense) < 1e-10, name


@pytest.mark.parametrize("strategy", ["comm", "mem"])
@pytest.mark.parametrize(("world", "sizes"), [(2, [(6, 6), (5, 2), (1, 7)]), (3, [(4, 4, 4), (5, 2, 1), (1, 8, 3)])])
@pytest.mark.parametrize("method", ["kfac_eigen", "kfac_cholesky", "ekfac_intra"])
def test_unequal_batches_are_weighted_by_their_examples(
    pool: Pool, method: str, world: int, sizes: list[tuple[int, ...]], strategy: str
) -> None:
    run = Run("mlp", method, STILL)
    held = pool.run(statistics_of_shards, strategy, run, sizes, world=world)
    assert_held(held, joined_statistics(run, [sum(of_step) for of_step in sizes]), strategy == "comm")


@pytest.mark.parametrize("strategy", ["comm", "mem"])
@pytest.mark.parametrize("method", KRONECKER)
def test_statistics_of_a_summed_loss(pool: Pool, method: str, strategy: str) -> None:
    run = Run("mlp", method, {**STILL, "loss_reduction": "sum"}, loss=sum_loss)
    held = pool.run(statistics_of_shards, strategy, run, [(4, 4, 4)] * 2, world=3)
    assert_held(held, joined_statistics(run, [EXAMPLES] * 2), strategy == "comm")


@pytest.mark.parametrize("strategy", ["comm", "mem"])
@pytest.mark.parametrize("method", ["kfac_eigen", "ekfac_intra", "hylo_sngd"])
def test_path_of_a_summed_loss(pool: Pool, method: str, strategy: str) -> None:
    """DDP averages the ranks' sums: what it hands over is the gradient of the whole sum over the number of ranks."""
    run = Run("mlp", method, {"loss_reduction": "sum", "lr": 0.005}, steps=10, loss=sum_loss)
    model = TASKS["mlp"].model()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient / 2)
    optimizer = build(method, model, **run.keywords)
    path = []
    for step in range(run.steps):
        descend(model, optimizer, run.batch(step), run)
        path.append(flat(model))
    assert_same_path(pool.run(together, strategy, run, world=2), torch.stack(path))


def masked_steps(model: nn.Module, optimizer: Any, rank: int, world: int) -> Tensor:
    """Five steps on sequences of unequal length, and the parameters after each."""
    path = []
    device = next(model.parameters()).device
    for step in range(5):
        batch = TASKS["words"].batch(step)
        lengths = torch.randint(1, LENGTH + 1, (EXAMPLES,), generator=torch.Generator().manual_seed(step))
        keep = torch.arange(LENGTH) < lengths[:, None]
        inputs, targets = (t.to(device) for t in shard(batch, rank, world))
        kept = shard((keep, keep), rank, world)[0].to(device)
        optimizer.zero_grad()
        with optimizer.mask(kept):
            losses = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="none")
        (losses.view(targets.shape) * kept).sum(1).mean().backward()
        optimizer.step()
        path.append(flat(model))
    return torch.stack(path)


def masked_shards(rank: int, world: int, strategy: str, run: Run) -> tuple[Tensor, dict[str, Tensor]]:
    model = DDP(TASKS[run.task].model(device_of(rank)))
    with optimizer_on(model, strategy, run) as optimizer:
        return masked_steps(model, optimizer, rank, world), curvatures(optimizer)


@pytest.mark.parametrize("strategy", ["comm", "mem"])
@pytest.mark.parametrize("method", ["kfac_eigen", "ekfac_intra"])
def test_masked_tokens(pool: Pool, method: str, strategy: str) -> None:
    """The ranks have unequal numbers of tokens, and the same number of sequences."""
    run = Run("words", method, {"factor_update_steps": 1, "inv_update_steps": 2})
    model = TASKS["words"].model()
    optimizer = build(method, model, **run.keywords)
    path = masked_steps(model, optimizer, 0, 1)
    results = pool.run(masked_shards, strategy, run, world=3)
    assert_same_path([of_rank[0] for of_rank in results], path)
    assert_held([of_rank[1] for of_rank in results], curvatures(optimizer), strategy == "comm")


# ---------------------------------------------------------------------------------------------------------------------
# Against a plain list of examples
# ---------------------------------------------------------------------------------------------------------------------


def factors_by_example(model: nn.Module, inputs: Tensor, targets: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """A and G of every Linear layer of a sequence: means of aaᵀ and ggᵀ, from a backward pass for each example."""
    sums: dict[str, list[Tensor]] = {}
    for x, y in zip(inputs, targets, strict=True):
        outputs, taps = x, {}
        for name, layer in model.named_children():
            a = torch.cat([outputs.detach(), torch.ones(1, dtype=x.dtype)])
            outputs = layer(outputs)
            if isinstance(layer, nn.Linear):
                taps[name] = (a, outputs)
        gradients = torch.autograd.grad(F.cross_entropy(outputs, y), [output for _, output in taps.values()])
        for (name, (a, _)), g in zip(taps.items(), gradients, strict=True):
            total = sums.setdefault(name, [torch.zeros(()), torch.zeros(())])
            sums[name] = [total[0] + torch.outer(a, a), total[1] + torch.outer(g, g)]
    return {name: (a / len(inputs), g / len(inputs)) for name, (a, g) in sums.items()}


@pytest.mark.parametrize("strategy", ["comm", "mem", "hybrid_third"])
def test_factors_are_those_of_a_plain_list_of_examples(pool: Pool, strategy: str) -> None:
    run = Run("mlp", "kfac_eigen", STILL)
    expected = factors_by_example(TASKS["mlp"].model(), *run.batch(0))
    held = pool.run(statistics_of_shards, strategy, run, [(5, 4, 3)], world=3)
    assert_held(held, {name: torch.kron(g, a) for name, (a, g) in expected.items()}, strategy == "comm")


@pytest.mark.parametrize("strategy", ["chief", "chief_inverses", "chief_own"])
def test_chief_holds_every_factor(pool: Pool, strategy: str) -> None:
    run = Run("mlp", "kfac_eigen", STILL)
    inputs, targets = run.batch(0)
    own = 5 if strategy == "chief_own" else EXAMPLES
    expected = factors_by_example(TASKS["mlp"].model(), inputs[:own], targets[:own])
    held = pool.run(statistics_of_shards, strategy, run, [(5, 4, 3)], world=3)
    assert [len(of_rank) for of_rank in held] == [3, 0, 0]
    assert_held(held, {name: torch.kron(g, a) for name, (a, g) in expected.items()}, everywhere=False)


# ---------------------------------------------------------------------------------------------------------------------
# Factors of the owner's shard
# ---------------------------------------------------------------------------------------------------------------------


def shards_and_owners(rank: int, world: int, run: Run) -> tuple[Tensor, dict[str, int]]:
    model = DDP(TASKS[run.task].model(device_of(rank)))
    with optimizer_on(model, "local_factors", run) as optimizer:
        owners = {name: optimizer.comm.owner(block.index) for name, block in optimizer.blocks.items()}
        return oracle.path_of(model, optimizer, rank, world, run), owners


def simulate_local_factors(run: Run, owners: dict[str, int], world: int) -> Tensor:
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
        for together_ in zip(*(model.parameters() for model in models), strict=True):
            mean = torch.stack([p.grad for p in together_]).mean(0)
            for p in together_:
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


@pytest.mark.parametrize("method", ["kfac_eigen", "kfac_cholesky"])
@pytest.mark.parametrize("world", [2, 4])
def test_local_factors_are_those_of_the_owner_s_shard(pool: Pool, method: str, world: int) -> None:
    run = Run("mlp", method, {"kl_clip": None}, steps=10)
    results = pool.run(shards_and_owners, run, world=world)
    owners = results[0][1]
    assert all(of_rank[1] == owners for of_rank in results)
    assert len(set(owners.values())) == min(world, 3)  # three layers
    assert_same_path([of_rank[0] for of_rank in results], simulate_local_factors(run, owners, world))


def test_batches_tell_the_difference(pool: Pool) -> None:
    """Shards that all ranks had alike would hide an average that is missing."""
    run = Run("mlp", "kfac_eigen", steps=10)
    local = pool.run(together, "local_factors", run, world=2)
    assert_replicas(local)
    assert distance(local[0], reference("mlp", "kfac_eigen", 10)) > 1e-4
