"""N ranks on shards of a batch do what one process does on the joined batch, under every strategy.

Statistics are compared at a learning rate of 0, where gradients do not matter: those of shards of unequal size average
to something else than the gradient of the joined batch, and statistics must not.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.support.grid import each, sample
from tests.support.oracles.ranks import (
    EXAMPLES,
    LENGTH,
    TASKS,
    Run,
    alone,
    assert_held,
    assert_replicas,
    assert_same_path,
    build,
    curvatures,
    descend,
    distance,
    flat,
    joined_statistics,
    optimizer_on,
    shard,
    statistics_of_shards,
    sum_loss,
    together,
)
from tests.support.pool import Pool, device_of
from tests.support.saving import started, train

KRONECKER = ("kfac_eigen", "kfac_cholesky", "ekfac_running", "ekfac_intra")
EXACT = (*KRONECKER, "hylo_sngd", "mfac", "mfac_sparse", "ggt")
STILL = {"lr": 0.0, "factor_update_steps": 1, "inv_update_steps": 1}


#: A strategy in a world; the overrides say where factors are.
LAYOUTS = {
    f"{strategy}-{world}": (strategy, world)
    for strategy, world in [
        ("comm", 2), ("hybrid_half", 4), ("mem", 3), ("hybrid_third", 3), ("comm", 4), ("mem", 4), ("mem", 2),
    ]
}  # fmt: skip
OVERRIDES = {s: (s, 3) for s in ("comm_owner", "mem_replicated", "chief", "chief_inverses")}
FEW = {name: LAYOUTS[name] for name in ("comm-2", "mem-3", "hybrid_half-4")}
BOTH = ["comm", "mem"]


@cache
def reference(task: str, method: str, steps: int = 12) -> Tensor:
    return alone(Run(task, method, steps=steps))[0]


@sample(
    lambda method, layout: method in KRONECKER or layout not in OVERRIDES.values(),
    method=EXACT,
    layout=LAYOUTS | OVERRIDES,
)
def test_shards_equal_the_joined_batch(pool: Pool, method: str, layout: tuple[str, int]) -> None:
    strategy, world = layout
    paths = pool.run(together, strategy, Run("mlp", method, steps=12), world=world)
    assert_same_path(paths, reference("mlp", method))


@pytest.mark.parametrize("layout", FEW)
def test_refreshes_beside_training_are_adopted_in_the_same_step_as_in_one_process(pool: Pool, layout: str) -> None:
    run = Run(keywords={"overlap": True, "factor_update_steps": 1, "inv_update_steps": 2}, steps=8)
    assert_same_path(pool.run(together, FEW[layout][0], run, world=FEW[layout][1]), alone(run)[0])


WHITENING = {"lr": 0.01, "power": 0.5, "momentum_mode": "pre", "kl_clip": None}


BROAD = {"intra": ("ekfac_intra", {}), "running": ("ekfac_running", {}), "whitening": ("ekfac_running", WHITENING)}


@each(run_of=BROAD, layout={name: LAYOUTS[name] for name in ("comm-2", "mem-3")})
def test_null_spaces_are_the_same_for_any_number_of_ranks(
    pool: Pool, run_of: tuple[str, dict[str, Any]], layout: tuple[str, int]
) -> None:
    """Rounding decides on the basis of a null space, and differs between shards and the joined batch."""
    run = Run("broad", *run_of, steps=10)
    assert_same_path(pool.run(together, layout[0], run, world=layout[1]), alone(run)[0])


KINDS = {
    f"{task}-{method}": (task, method)
    for task, methods in {
        "words": ("kfac_eigen", "ekfac_intra", "ekfac_running", "hylo_sngd", "mfac_sparse"),
        "cnn": ("kfac_cholesky", "ekfac_intra", "hylo_sngd"),
        "attention": ("kfac_eigen", "ekfac_intra"),
    }.items()
    for method in methods
}


@sample(kind=KINDS, layout=FEW)
def test_every_kind_of_layer(pool: Pool, kind: tuple[str, str], layout: tuple[str, int]) -> None:
    paths = pool.run(together, layout[0], Run(*kind, steps=6), world=layout[1])
    assert_same_path(paths, reference(*kind, 6))


@each(method=[*KRONECKER, "hylo_sngd", "mfac"], strategy=BOTH)
def test_micro_batches_without_synchronization(pool: Pool, method: str, strategy: str) -> None:
    paths = pool.run(together, strategy, Run("mlp", method, steps=10, micro=2), world=2)
    assert_same_path(paths, reference("mlp", method, 10))


@each(method=["hylo_kid", "hylo_kis"], of={"2": (2, BOTH), "4": (4, [*BOTH, "hybrid_half"])})
def test_selected_rows_do_not_depend_on_the_strategy(pool: Pool, method: str, of: tuple[int, list[str]]) -> None:
    """Which rows are selected depends on the shards: that is the method, and no one process can be compared with."""
    world, strategies = of
    run = Run("mlp", method, steps=10)
    paths = [pool.run(together, strategy, run, world=world) for strategy in strategies]
    for of_strategy in paths:
        assert_same_path(of_strategy, paths[0][0], tolerance=1e-12)


# ---------------------------------------------------------------------------------------------------------------------
# Statistics
# ---------------------------------------------------------------------------------------------------------------------


SIZES = {"2": [(6, 6), (5, 2), (1, 7)], "3": [(4, 4, 4), (5, 2, 1), (1, 8, 3)]}


@each(
    run_of=[("mlp", "kfac_eigen"), ("mlp", "kfac_cholesky"), ("mixed", "ekfac_intra"), ("words", "ekfac_intra")],
    sizes=SIZES,
    strategy=["mem", "comm"],
)
def test_unequal_batches_are_weighted_by_their_examples(
    pool: Pool, run_of: tuple[str, str], sizes: list[tuple[int, ...]], strategy: str
) -> None:
    run = Run(*run_of, STILL)
    held = pool.run(statistics_of_shards, strategy, run, sizes, world=len(sizes[0]))
    assert_held(held, joined_statistics(run, [sum(of_step) for of_step in sizes]), strategy == "comm")


@each(method=KRONECKER, strategy=BOTH)
def test_statistics_of_a_summed_loss(pool: Pool, method: str, strategy: str) -> None:
    run = Run("mlp", method, {**STILL, "loss_reduction": "sum"}, loss=sum_loss)
    held = pool.run(statistics_of_shards, strategy, run, [(4, 4, 4)] * 2, world=3)
    assert_held(held, joined_statistics(run, [EXAMPLES] * 2), strategy == "comm")


@each(method=["kfac_eigen", "ekfac_intra", "hylo_sngd"], strategy=BOTH)
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


def decaying(rank: int, world: int, strategy: str, run: Run) -> Tensor:
    """Parameters after each step, between which the decay changes."""
    model, optimizer = started(rank, strategy, run) if world > 1 else started_alone(run)
    path = []
    for step in range(9):
        optimizer.param_groups[0]["factor_decay"] = 0.5 if step % 2 else 0.9
        path += train(model, optimizer, rank, world, run, step, step + 1)
    return torch.stack(path)


def started_alone(run: Run) -> tuple[nn.Module, Any]:
    model = TASKS[run.task].model()
    return model, build(run.method, model, **run.keywords)


@pytest.mark.parametrize("strategy", BOTH)
def test_a_decay_edited_between_steps_is_that_of_the_step_that_measured(pool: Pool, strategy: str) -> None:
    run = Run(keywords={"factor_update_steps": 1, "inv_update_steps": 4, "refresh_warmup": False})
    assert_same_path(pool.run(decaying, strategy, run), decaying(0, 1, "", run), tolerance=1e-11)


@each(method=["kfac_eigen", "ekfac_intra"], strategy=BOTH)
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


@pytest.mark.parametrize("strategy", ["comm", "mem", "hybrid_third", "chief", "chief_inverses", "chief_own"])
def test_factors_are_those_of_a_plain_list_of_examples(pool: Pool, strategy: str) -> None:
    run = Run("mlp", "kfac_eigen", STILL)
    own = 5 if strategy == "chief_own" else EXAMPLES  # the chief's shard alone
    expected = factors_by_example(TASKS["mlp"].model(), *(t[:own] for t in run.batch(0)))
    held = pool.run(statistics_of_shards, strategy, run, [(5, 4, 3)], world=3)
    assert_held(held, {name: torch.kron(g, a) for name, (a, g) in expected.items()}, strategy == "comm")
    if strategy.startswith("chief"):
        assert [len(of_rank) for of_rank in held] == [3, 0, 0]


def test_batches_tell_the_difference(pool: Pool) -> None:
    """Shards that all ranks had alike would hide an average that is missing."""
    run = Run("mlp", "kfac_eigen", steps=10)
    local = pool.run(together, "local_factors", run, world=2)
    assert_replicas(local)
    assert distance(local[0], reference("mlp", "kfac_eigen", 10)) > 1e-4
