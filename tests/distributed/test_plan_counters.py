"""A plan says to the byte what the ranks of a run then send and store.

Every case, a method under a strategy in a world, trains once; the tests look at what was counted. A run that has begun
is compared step by step: plain steps, steps with statistics, and steps with a refresh.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from secondorder import CommOpt, DedicatedWorkers, HybridOpt, MemOpt
from secondorder.comm import rank_grid
from secondorder.comm.buffers import Buffers
from tests.support.oracles.ranks import EXAMPLES, METHODS, STRATEGIES, TASKS, Batch, build, mean_loss, shard
from tests.support.pool import Pool

PERIOD = 4  # a multiple of all intervals
STORED = ("factors", "second_order", "scale", "window", "error", "gram", "rows", "kernel", "momentum", "fallback")

GRID = ("comm", "mem", "hybrid_half", "hybrid_third", "comm_owner", "mem_replicated")
OTHERS = ("local_factors", "chief", "chief_inverses", "chief_own")
WINDOWS = ("mfac", "mfac_sparse", "ggt")
EXTRA: dict[str, tuple[str, dict[str, Any]]] = {
    "kfac_stagger": ("kfac_eigen", {"stagger": True}),
    "kfac_overlap": ("kfac_cholesky", {"overlap": True}),
    "kfac_low": ("kfac_eigen", {"factor_dtype": torch.bfloat16, "inv_dtype": torch.bfloat16}),
    "kfac_packed": ("kfac_cholesky", {"factor_storage": "packed"}),
    "kfac_diagonal": ("kfac_cholesky", {"max_factor_dim": 3}),
    "ekfac_recompute": ("ekfac_intra", {"transport": "recompute", "scale_update_steps": 2}),
    "ekfac_qr": ("ekfac_running", {"basis_update": "qr", "momentum_mode": "pre"}),
    "hylo_cheaper": ("hylo_kid", {"kfac_when_cheaper": True, "rank_fraction": 1.0}),
    "hylo_expanded": ("hylo_kis", {"approx": "expand"}),
    "hylo_told": ("hylo_sngd", {"batch_size": lambda world: EXAMPLES // world}),
    "mfac_layers": ("mfac", {"partition": "layer"}),
    "mfac_decay": ("mfac", {"weight_decay": 0.1, "weight_decay_mode": "reg"}),
}
"""Options that change what is sent."""


QUICK = {
    2: ("kfac_cholesky", "ekfac_running", "ekfac_intra", "hylo_kid", "mfac_sparse", "ggt", *EXTRA),
    3: ("ekfac_intra", "hylo_kis", "mfac"),
    4: ("kfac_eigen", "ekfac_intra", "mfac"),
}
"""Methods that every run of the tests looks at, on the grids."""


def fits(strategy: str, method: str, world: int) -> bool:
    if {"hybrid_half": world % 2, "hybrid_third": world % 3}.get(strategy, 0):
        return False
    return method not in WINDOWS or strategy in GRID[:4]


def cases(world: int, slow: bool) -> list[tuple[str, str]]:
    """Methods and strategies; the slow ones are those that the others leave out."""
    whole = [(m, s) for m in (*METHODS, *EXTRA) for s in (*GRID, *OTHERS) if fits(s, EXTRA.get(m, (m, {}))[0], world)]
    chosen = QUICK[world]
    quick = [(m, s) for m, s in whole if (m in chosen and s in GRID[:4]) or (m == "kfac_eigen" and world < 4)]
    return [case for case in whole if case not in quick] if slow else quick


def optimizer_of(method: str, model: nn.Module, world: int, comm: Any = None) -> Any:
    name, keywords = EXTRA.get(method, (method, {}))
    keywords = {key: value(world) if callable(value) else value for key, value in keywords.items()}
    return build(name, model, comm, **({"update_steps": 2} if name.startswith("hylo") else {}) | keywords)


def batch_of(step: int, rank: int, world: int) -> Batch:
    return shard(TASKS["words"].batch(step), rank, world)


def train(optimizer: Any, model: nn.Module, rank: int, world: int, steps: range) -> list[dict[str, int]]:
    """Bytes by stage of each step."""
    found = []
    for step in steps:
        inputs, targets = batch_of(step, rank, world)
        optimizer.zero_grad()
        mean_loss(model(inputs), targets).backward()
        optimizer.comm.collectives.counter.clear()
        optimizer.step()
        found.append(optimizer.comm.collectives.counter.bytes_by_stage())
    return found


def measure(rank: int, world: int, wanted: list[tuple[str, str]]) -> dict[tuple[str, str], dict[str, Any]]:
    """What one rank sends in each step of an interval, and stores, by method and strategy."""
    results = {}
    for method, strategy in wanted:
        model = TASKS["words"].model()
        comm = STRATEGIES[strategy](average_gradients=True)
        with optimizer_of(method, model, world, comm) as optimizer:
            train(optimizer, model, rank, world, range(PERIOD))
            steps = train(optimizer, model, rank, world, range(PERIOD, 2 * PERIOD))
            usage = optimizer.memory_usage()
            results[method, strategy] = {
                "steps": steps,
                "stored": {kind: usage.get(kind, 0) for kind in STORED},
                "own plan": optimizer.plan().to_dict(),
            }
    return results


_measured: dict[tuple[int, str, str], list[dict[str, Any]]] = {}


def measured(pool: Pool, world: int, method: str, strategy: str) -> list[dict[str, Any]]:
    """By rank; slow cases are measured together at the first call, others when they are asked for."""
    if (world, method, strategy) not in _measured:
        slow = cases(world, slow=True)
        wanted = slow if (method, strategy) in slow else [(method, strategy)]
        ranks = pool.run(measure, wanted, world=world, timeout=240)
        _measured.update({(world, *case): [found[case] for found in ranks] for case in wanted})
    return _measured[world, method, strategy]


@cache
def planned(method: str, strategy: str, world: int) -> Any:
    """Plan of one process that has never met another, and has taken a step with the batch of a rank."""
    model = TASKS["words"].model()
    optimizer = optimizer_of(method, model, world)
    inputs, targets = batch_of(0, 0, world)
    mean_loss(model(inputs), targets).backward()
    optimizer.step()
    return optimizer.plan(world, STRATEGIES[strategy](average_gradients=True))


ALL = [
    pytest.param(world, method, strategy, id=f"{method}-{strategy}-{world}", marks=pytest.mark.slow if slow else ())
    for world in (2, 3, 4)
    for slow in (False, True)
    for method, strategy in cases(world, slow)
]


def without_zeros(numbers: dict[str, Any]) -> dict[str, Any]:
    return {name: number for name, number in numbers.items() if number}


@pytest.mark.parametrize(("world", "method", "strategy"), ALL)
def test_bytes_sent(pool: Pool, world: int, method: str, strategy: str) -> None:
    plan = planned(method, strategy, world)
    for rank, found in enumerate(measured(pool, world, method, strategy)):
        totals: dict[str, int] = {}
        for step in found["steps"]:
            for stage, nbytes in step.items():
                totals[stage] = totals.get(stage, 0) + nbytes
        mean = {stage: nbytes / PERIOD for stage, nbytes in totals.items()}
        worst = max(found["steps"], key=lambda step: sum(step.values()))
        assert without_zeros(plan.ranks[rank].sent) == without_zeros(mean), rank
        assert without_zeros(plan.ranks[rank].worst_sent) == without_zeros(worst), rank


@pytest.mark.parametrize(("world", "method", "strategy"), ALL)
def test_bytes_stored(pool: Pool, world: int, method: str, strategy: str) -> None:
    plan = planned(method, strategy, world)
    for rank, found in enumerate(measured(pool, world, method, strategy)):
        assert {kind: plan.ranks[rank].stored.get(kind, 0) for kind in STORED} == found["stored"], rank


@pytest.mark.parametrize(("world", "method", "strategy"), ALL)
def test_a_rank_plans_the_world_it_is_in(pool: Pool, world: int, method: str, strategy: str) -> None:
    plan = planned(method, strategy, world)
    for found in measured(pool, world, method, strategy):
        assert found["own plan"] == plan.to_dict()


# ---------------------------------------------------------------------------------------------------------------------
# Worlds larger than a machine: the same code as one rank of a thousand, in a process group that sends nothing
# ---------------------------------------------------------------------------------------------------------------------

THOUSAND = 1024
LARGE: dict[str, Callable[..., Any]] = {
    "comm": CommOpt,
    "mem": MemOpt,
    "hybrid_eighth": lambda **keywords: HybridOpt(1 / 8, **keywords),
    "hybrid_rows_of_128": lambda **keywords: HybridOpt(1 / 128, **keywords),
}


@pytest.fixture
def nothing_arrives(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """A function that makes this process one rank of a thousand, whose messages leave all tensors as they are."""
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    take = Buffers.take

    def zeros(self: Buffers, *args: Any) -> Any:
        loan = take(self, *args)
        loan.view.zero_()
        return loan

    # What would have arrived is undefined; zeros make it the same in every run.
    monkeypatch.setattr(Buffers, "take", zeros)
    monkeypatch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)
    monkeypatch.setattr(rank_grid, "require_equal", lambda *args: None)
    yield lambda rank: dist.init_process_group("fake", rank=rank, world_size=THOUSAND, store=fake.FakeStore())
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.*nothing was captured")
@pytest.mark.parametrize("rank", [0, 777])
@pytest.mark.parametrize("strategy", LARGE)
@pytest.mark.parametrize("method", ["kfac_eigen", "ekfac_intra", "mfac_sparse"])
def test_one_of_a_thousand(nothing_arrives: Callable[[int], None], method: str, strategy: str, rank: int) -> None:
    nothing_arrives(rank)
    model = TASKS["words"].model()
    optimizer_of(
        method, model, THOUSAND, LARGE[strategy]()
    ).close()  # modules that are imported late are not of interest
    tracemalloc.start()
    optimizer = optimizer_of(method, model, THOUSAND, LARGE[strategy](average_gradients=True))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < THOUSAND**2  # bytes: nothing is as large as a number for every pair of ranks
    train(optimizer, model, 0, 1, range(PERIOD))
    steps = train(optimizer, model, 0, 1, range(PERIOD, 2 * PERIOD))
    own = optimizer.plan().ranks[rank]
    totals = {stage: sum(step.get(stage, 0) for step in steps) for step in steps for stage in step}
    assert without_zeros(own.sent) == {stage: nbytes / PERIOD for stage, nbytes in totals.items()}
    assert without_zeros(own.worst_sent) == max(steps, key=lambda step: sum(step.values()))
    usage = optimizer.memory_usage()
    assert {kind: own.stored.get(kind, 0) for kind in STORED} == {kind: usage.get(kind, 0) for kind in STORED}
    optimizer.close()


# ---------------------------------------------------------------------------------------------------------------------
# Ranks of different roles
# ---------------------------------------------------------------------------------------------------------------------

ROLES: dict[str, dict[str, Any]] = {
    "default": {},
    "colocated": {"allow_colocated": True},
    "degrade": {"on_loss": "degrade", "warmup": "identity"},
}


def serve(rank: int, world: int, arguments: dict[str, Any], epochs: int) -> dict[str, Any]:
    """All bytes that one rank sends in a run of so many epochs, and what it stores; `PERIOD` steps are an epoch."""
    model = TASKS["words"].model()
    comm = DedicatedWorkers(period=PERIOD, **arguments)
    with optimizer_of("kfac_eigen", model, world, comm) as optimizer:
        if comm.role == "inverse":
            comm.serve(optimizer)
        else:
            for step in range(epochs * PERIOD):
                inputs, targets = batch_of(step, comm.data_rank, comm.data_world)
                optimizer.zero_grad()
                mean_loss(model(inputs), targets).backward()
                optimizer.step()
    usage = optimizer.memory_usage()
    return {"sent": comm.collectives.counter.bytes_by_stage(), "stored": {kind: usage.get(kind, 0) for kind in STORED}}


@pytest.mark.parametrize("arguments", ROLES)
@pytest.mark.parametrize("world", [3, 4])
def test_roles(pool: Pool, world: int, arguments: str) -> None:
    keywords = ROLES[arguments]
    runs = [pool.run(serve, keywords, epochs, world=world) for epochs in (3, 6)]
    plan = optimizer_of("kfac_eigen", TASKS["words"].model(), world).plan(
        world, DedicatedWorkers(period=PERIOD, **keywords)
    )
    for rank, (short, long) in enumerate(zip(*runs, strict=True)):
        more = {stage: (n - short["sent"].get(stage, 0)) / (3 * PERIOD) for stage, n in long["sent"].items()}
        assert without_zeros(plan.ranks[rank].sent) == without_zeros(more), rank
        assert {kind: plan.ranks[rank].stored.get(kind, 0) for kind in STORED} == long["stored"], rank
