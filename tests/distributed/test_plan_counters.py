"""A plan predicts exactly how many bytes the ranks of a run send and store.

Every case is a method under a strategy in a world, which trains once and counts. The comparison covers all steps of an
interval: plain steps, steps with statistics, and steps with a refresh.
"""

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
from tests.support.grid import sample
from tests.support.oracles.ranks import EXAMPLES, METHODS, STRATEGIES, TASKS, Run, build, descend, shard
from tests.support.pool import Pool

PERIOD = 4  # a multiple of all intervals
STORED = ("factors", "second_order", "scale", "window", "error", "gram", "rows", "kernel", "momentum", "fallback")

GRID = ("comm", "mem", "hybrid_half", "hybrid_third", "comm_owner", "mem_replicated")
OTHERS = ("local_factors", "chief", "chief_inverses", "chief_own")
WINDOWS = ("mfac", "mfac_sparse", "ggt")
#: Options that change the messages.
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
    "hylo_batch": ("hylo_sngd", {"batch_size": lambda world: EXAMPLES // world}),
    "mfac_layers": ("mfac", {"partition": "layer"}),
    "mfac_decay": ("mfac", {"weight_decay": 0.1, "weight_decay_mode": "reg"}),
}


def fits(strategy: str, method: str, world: int) -> bool:
    if {"hybrid_half": world % 2, "hybrid_third": world % 3}.get(strategy, 0):
        return False
    return method not in WINDOWS or strategy in GRID[:4]


#: Cases that are not slow: each method, and K-FAC under each strategy, in one world each.
QUICK = {
    2: ["kfac_cholesky-mem", "ekfac_running-comm", "hylo_kid-mem", "mfac_sparse-comm", "kfac_eigen-comm_owner",
        "kfac_eigen-mem_replicated", "kfac_eigen-local_factors", "kfac_eigen-chief_inverses", "kfac_stagger-comm",
        "kfac_overlap-mem", "kfac_low-comm", "kfac_packed-mem", "kfac_diagonal-comm", "ekfac_recompute-mem",
        "hylo_cheaper-comm", "hylo_batch-mem", "mfac_layers-mem", "mfac_decay-mem"],
    3: ["kfac_eigen-hybrid_third", "ekfac_intra-mem", "hylo_kis-comm", "hylo_expanded-hybrid_third", "ekfac_qr-comm",
        "kfac_eigen-chief", "kfac_eigen-chief_own", "mfac-mem"],
    4: ["kfac_eigen-hybrid_half", "ekfac_intra-hybrid_half", "hylo_sngd-hybrid_half", "ggt-hybrid_half"],
}  # fmt: skip


def cases(world: int, slow: bool) -> list[tuple[str, str]]:
    """Methods and strategies: those in `QUICK`, or all others if ``slow`` is true."""
    whole = [(m, s) for m in (*METHODS, *EXTRA) for s in (*GRID, *OTHERS) if fits(s, EXTRA.get(m, (m, {}))[0], world)]
    return [case for case in whole if ("-".join(case) in QUICK[world]) != slow]


def optimizer_of(method: str, model: nn.Module, world: int, comm: Any = None) -> Any:
    name, keywords = EXTRA.get(method, (method, {}))
    keywords = {key: value(world) if callable(value) else value for key, value in keywords.items()}
    return build(name, model, comm, **({"update_steps": 2} if name.startswith("hylo") else {}) | keywords)


def train(optimizer: Any, model: nn.Module, rank: int, world: int, steps: range) -> list[dict[str, int]]:
    """Bytes by stage of each step."""
    found = []
    for step in steps:
        optimizer.comm.collectives.counter.clear()
        descend(model, optimizer, shard(TASKS["words"].batch(step), rank, world), Run())
        found.append(optimizer.comm.collectives.counter.bytes_by_stage())
    return found


def stored(optimizer: Any) -> dict[str, int]:
    usage = optimizer.memory_usage()
    return {kind: usage.get(kind, 0) for kind in STORED}


def measure(rank: int, world: int, wanted: list[tuple[str, str]]) -> dict[tuple[str, str], dict[str, Any]]:
    """The bytes that one rank sends in each step of an interval, and stores, by method and strategy."""
    results = {}
    for method, strategy in wanted:
        model = TASKS["words"].model()
        with optimizer_of(method, model, world, STRATEGIES[strategy](average_gradients=True)) as optimizer:
            train(optimizer, model, rank, world, range(PERIOD))
            steps = train(optimizer, model, rank, world, range(PERIOD, 2 * PERIOD))
            plan = optimizer.plan().to_dict()
            results[method, strategy] = {"steps": steps, "stored": stored(optimizer), "own plan": plan}
    return results


@cache
def planned(method: str, strategy: str, world: int) -> Any:
    """The plan of a single process after a step with the batch of a rank."""
    model = TASKS["words"].model()
    optimizer = optimizer_of(method, model, world)
    descend(model, optimizer, shard(TASKS["words"].batch(0), 0, world), Run())
    return optimizer.plan(world, STRATEGIES[strategy](average_gradients=True))


def without_zeros(numbers: dict[str, Any]) -> dict[str, Any]:
    return {name: number for name, number in numbers.items() if number}


@pytest.mark.parametrize("slow", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["chosen", "all_others"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_plan_predicts_what_every_rank_sends_and_stores(pool: Pool, world: int, slow: bool) -> None:
    """The plan of every rank for its own world is equal to that of a single process."""
    wanted = cases(world, slow)
    assert slow or len(wanted) == len(QUICK[world])
    for rank, results in enumerate(pool.run(measure, wanted, world=world, timeout=300)):
        for case, found in results.items():
            plan = planned(*case, world)
            own = plan.ranks[rank]
            where = f"rank {rank} of {world}: {case}"
            assert without_zeros(own.sent) == mean_of(found["steps"]), where
            assert without_zeros(own.worst_sent) == without_zeros(worst_of(found["steps"])), where
            assert {kind: own.stored.get(kind, 0) for kind in STORED} == found["stored"], where
            assert found["own plan"] == plan.to_dict(), where


def mean_of(steps: list[dict[str, int]]) -> dict[str, float]:
    """Average bytes per step by stage."""
    stages = {stage for step in steps for stage in step}
    return without_zeros({stage: sum(step.get(stage, 0) for step in steps) / PERIOD for stage in stages})


def worst_of(steps: list[dict[str, int]]) -> dict[str, int]:
    return max(steps, key=lambda step: sum(step.values()))


# ---------------------------------------- Large worlds: one rank of a thousand, in a process group that sends nothing
THOUSAND = 1024
LARGE: dict[str, Callable[..., Any]] = {
    "comm": CommOpt,
    "mem": MemOpt,
    "hybrid_eighth": lambda **keywords: HybridOpt(1 / 8, **keywords),
    "hybrid_rows_of_128": lambda **keywords: HybridOpt(1 / 128, **keywords),
}


@pytest.fixture
def nothing_arrives(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """A function that makes this process one rank of a thousand, whose messages do not change any tensor."""
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    take = Buffers.take

    def zeros(self: Buffers, *args: Any) -> Any:
        loan = take(self, *args)
        loan.view.zero_()
        return loan

    # Received values are undefined; zeros make them the same in every run.
    monkeypatch.setattr(Buffers, "take", zeros)
    monkeypatch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)
    monkeypatch.setattr(rank_grid, "require_equal", lambda *args: None)
    yield lambda rank: dist.init_process_group("fake", rank=rank, world_size=THOUSAND, store=fake.FakeStore())
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.*nothing was captured")
@sample(strategy=list(LARGE), method=["kfac_eigen", "ekfac_intra", "mfac_sparse"], rank={"0": 0, "777": 777})
def test_a_plan_for_a_thousand_ranks(
    nothing_arrives: Callable[[int], None], method: str, strategy: str, rank: int
) -> None:
    nothing_arrives(rank)
    model = TASKS["words"].model()
    optimizer_of(method, model, THOUSAND, LARGE[strategy]()).close()  # imports modules before the measurement
    tracemalloc.start()
    optimizer = optimizer_of(method, model, THOUSAND, LARGE[strategy](average_gradients=True))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < THOUSAND**2  # bytes: no data structure has an entry for every pair of ranks
    train(optimizer, model, 0, 1, range(PERIOD))
    steps = train(optimizer, model, 0, 1, range(PERIOD, 2 * PERIOD))
    own = optimizer.plan().ranks[rank]
    assert without_zeros(own.sent) == mean_of(steps)
    assert without_zeros(own.worst_sent) == worst_of(steps)
    assert {kind: own.stored.get(kind, 0) for kind in STORED} == stored(optimizer)
    optimizer.close()


# --------------------------------------------------------------------------------------------- Ranks of different roles
ROLES: dict[str, dict[str, Any]] = {
    "default": {},
    "colocated": {"allow_colocated": True},
    "degrade": {"on_loss": "degrade", "warmup": "identity"},
}


def serve(rank: int, world: int, arguments: dict[str, Any], epochs: int) -> dict[str, Any]:
    """The bytes that one rank sends in a run of some epochs of `PERIOD` steps, and the bytes that it stores."""
    model = TASKS["words"].model()
    comm = DedicatedWorkers(period=PERIOD, **arguments)
    with optimizer_of("kfac_eigen", model, world, comm) as optimizer:
        if comm.role == "inverse":
            comm.serve(optimizer)
        else:
            for step in range(epochs * PERIOD):
                batch = shard(TASKS["words"].batch(step), comm.data_rank, comm.data_world)
                descend(model, optimizer, batch, Run())
    return {"sent": comm.collectives.counter.bytes_by_stage(), "stored": stored(optimizer)}


@sample(arguments=list(ROLES), world={"3": 3, "4": 4})
def test_a_plan_of_dedicated_workers(pool: Pool, arguments: str, world: int) -> None:
    keywords = ROLES[arguments]
    runs = [pool.run(serve, keywords, epochs, world=world) for epochs in (3, 6)]
    plan = optimizer_of("kfac_eigen", TASKS["words"].model(), world).plan(
        world, DedicatedWorkers(period=PERIOD, **keywords)
    )
    for rank, (short, long) in enumerate(zip(*runs, strict=True)):
        more = {stage: (n - short["sent"].get(stage, 0)) / (3 * PERIOD) for stage, n in long["sent"].items()}
        assert without_zeros(plan.ranks[rank].sent) == without_zeros(more), rank
        assert {kind: plan.ranks[rank].stored.get(kind, 0) for kind in STORED} == long["stored"], rank
