"""Dedicated workers are equal to a delayed run of one process, end without deadlock, and report the loss of a rank."""

import copy
import os
import pickle
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import secondorder
from secondorder import StorageOptions
from secondorder.comm.dedicated.workers import DedicatedWorkers
from tests.support.building import built
from tests.support.delayed import Batch, Delayed
from tests.support.grid import only
from tests.support.oracles.ranks import flat
from tests.support.pool import Failure, Pool, everywhere, on_every_rank

T = 2
OPTIONS = {"lr": 0.1, "damping": 0.05, "factor_update_steps": 1, "inv_update_steps": T, "kl_clip": 0.01}


def build() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def batch(role: int, rank: int, step: int) -> Batch:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + role)
    inputs, targets = (torch.randn(8, n, dtype=torch.float64, generator=generator) for n in (5, 3))
    return inputs, targets


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


@contextmanager
def working(comm: Mapping[str, Any], shift: float = 0.0, **options: Any) -> Iterator[tuple[Any, Any, Any]]:
    """A model whose parameters are shifted, its strategy and its optimizer."""
    model, strategy = build(), DedicatedWorkers(**comm)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(shift)
    with built(secondorder.KFAC, model, comm=strategy, **{**OPTIONS, **options}) as optimizer:
        yield model, strategy, optimizer


def descend(model: nn.Module, optimizer: Any, step: int) -> float:
    """Take a step on the batch of this rank's role; return the loss."""
    inputs, targets = batch(optimizer.comm.role == "factor", optimizer.comm.data_rank, step)
    optimizer.zero_grad()
    value = loss(model(inputs), targets)
    value.backward()
    optimizer.step()
    return float(value.detach())


class Case(NamedTuple):
    """Arguments of the strategy, options of the optimizer, those of the delayed run, and the number of ranks.

    A run is not bitwise ``exact`` if two ranks add examples in another order than one process.
    """

    comm: dict[str, Any] = {}
    options: dict[str, Any] = {}
    simulator: dict[str, Any] = {}
    world: int = 3
    exact: bool = True


class Record(NamedTuple):
    """Parameters of a gradient rank after a step, and the age of the curvature in this step."""

    params: Tensor
    age: int | None
    staleness: set[int]


def falling(step: int) -> float:
    return 0.2 * 0.8**step


def train(
    rank: int, comm: dict[str, Any], options: dict[str, Any], steps: Mapping[str, int], scheduled: bool = False
) -> Any:
    """Run the loop of this rank's role; return the records of all steps on a gradient rank, or the role."""
    shift = 0 if rank == comm.get("gradient", [0])[0] else rank  # all ranks adopt those of the first gradient rank
    found = []
    with working(comm, shift, **options) as (model, strategy, optimizer):
        if strategy.role == "inverse":
            strategy.serve(optimizer)
        for step in range(steps.get(strategy.role, 0)):
            if scheduled and strategy.role == "gradient":  # only ranks that train follow the schedule
                optimizer.param_groups[0]["damping"] = falling(step)
            age = strategy.age(0)
            descend(model, optimizer, step)
            found.append(Record(flat(model), age, set(optimizer.diagnostics()["staleness"].values())))
    return found if strategy.role == "gradient" else strategy.role


def train_each(rank: int, world: int, runs: list[tuple[Any, ...]]) -> list[Any]:
    """Train several optimizers, one after another, in one process group."""
    return [train(rank, *run) for run in runs]


# ----------------------------------------------------------------------------------------------------------- Lockstep
CHOLESKY = {"inverse_method": "cholesky"}
DIAGONAL = {**CHOLESKY, "storage": StorageOptions(max_factor_dim=1)}
WAIT = {"warmup": "identity"}
APART = {"gradient": [0], "factor": [1]}
SCHEDULED = "a damping that is scheduled on gradient ranks"
CASES = {
    "no warm-up": Case(WAIT, {"inverse_method": "eigen"}, WAIT),
    "no warm-up, two gradient ranks": Case(WAIT, CHOLESKY, {"gradient_ranks": 2, **WAIT}, 4),
    "warm-up by two gradient ranks": Case(simulator={"gradient_ranks": 2}, world=4, exact=False),
    "roles in another order": Case({"gradient": [2], "factor": [0], "inverse": [1]}),
    "two factor ranks": Case({"gradient": [0], "factor": [1, 2]}, {}, {"factor_ranks": 2}, 4, False),
    "two inverse ranks": Case(APART, CHOLESKY, {}, 4),
    "two inverse ranks, diagonal factors": Case(APART, DIAGONAL, {}, 4),
    "together": Case({"allow_colocated": True, "seed": 3}, {}, {"factor_ranks": 2}, 3, False),
    "together, diagonal factors": Case({"allow_colocated": True}, DIAGONAL, {}, 2),
    "every step": Case({"period": 1}, CHOLESKY, {"period": 1}),
    "factors every third step": Case({"period": 4}, {"factor_update_steps": 3}, {"period": 4}),
    SCHEDULED: Case(WAIT, CHOLESKY, WAIT),
}


def simulated(steps: int, case: Case, **more: Any) -> list[Tensor]:
    return Delayed(
        build, secondorder.KFAC, {**OPTIONS, **case.options}, loss,
        lambda rank, step: batch(0, rank, step), lambda rank, step: batch(1, rank, step),
        **{"gradient_ranks": 1, "period": T, **case.simulator, **more},
    ).run(steps)  # fmt: skip


@pytest.mark.parametrize("world", [2, 3, 4])
def test_lockstep_is_equal_to_the_delayed_run(pool: Pool, world: int) -> None:
    """Inverse ranks use the damping of the gradient ranks, and the age of the curvature is that of the schedule."""
    cases = {name: case for name, case in CASES.items() if case.world == world}
    steps = {name: 13 if "period" in case.simulator else 9 for name, case in cases.items()}
    runs = [
        (case.comm, case.options, dict.fromkeys(("gradient", "factor"), steps[name]), name == SCHEDULED)
        for name, case in cases.items()
    ]
    for (name, case), *found in zip(cases.items(), *pool.run(train_each, runs, world=world), strict=True):
        expected = simulated(steps[name], case, damping=falling if name == SCHEDULED else None)
        paths = [path for path in found if isinstance(path, list)]
        assert len(paths) == case.simulator.get("gradient_ranks", 1)
        tolerance = 0.0 if case.exact else 1e-12
        for path in paths:
            params = torch.stack([record.params for record in path])
            torch.testing.assert_close(
                params, torch.stack(expected), rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
            )
            if case.comm == WAIT:
                assert [record.age for record in path] == [None] * 4 + [4, 5, 4, 5, 4]
                # A version arrives between two steps, so its age is 0 after the step before the first use.
                staleness = [set(), set(), set(), {0}, {1}, {0}, {1}, {0}, {1}]
                assert [record.staleness for record in path] == staleness, name


# ---------------------------------------------------------------------------------------------------- End of training
@pytest.mark.parametrize(
    ("world", "comms"),
    [
        (2, [{"mode": "opportunistic", "allow_colocated": True}]),
        (3, [{"allow_colocated": True}]),
        (4, [{}, {"mode": "opportunistic"}]),
    ],
)
def test_training_may_end_at_any_step_of_any_role(pool: Pool, world: int, comms: list[dict[str, Any]]) -> None:
    lengths = [(3, 8), (7, 2), (6, 5), (0, 0), (T, 0), (0, 5)]
    runs = [(comm, {}, {"gradient": g, "factor": f}) for comm in comms for g, f in lengths]
    first, *_, last = pool.run(train_each, runs, world=world, timeout=60)
    assert [len(path) for path in first] == [steps["gradient"] for _, _, steps in runs]
    assert all(role in ("factor", "inverse") for role in last)


@on_every_rank(3)
def test_a_factor_rank_can_see_that_training_has_ended(rank: int, world: int) -> None:
    with working({}) as (model, comm, optimizer):
        if comm.role == "inverse":
            comm.serve(optimizer)
            assert comm.stopped
            return
        step = 0
        while step < 4 if comm.role == "gradient" else not comm.stopped:
            descend(model, optimizer, step)
            step += 1
        before = flat(model)
        if comm.role == "factor":  # steps after the end have no effect
            descend(model, optimizer, step)
        assert torch.equal(flat(model), before)
        # a factor rank stops at the end of the epoch in which training ended
        assert (comm.stopped, step) == ((False, 4) if comm.role == "gradient" else (True, 6))


# ----------------------------------------------------------------------------------------------------- Loss of a rank
def train_with_a_death(rank: int, world: int, dies: str, at: int, steps: int, comm: dict[str, Any]) -> Any:
    """Train while one rank dies in a refresh or a step. In opportunistic mode, gradient ranks wait for this."""
    with working(comm) as (model, strategy, optimizer):
        last = strategy.data_rank == strategy.data_world - 1
        if strategy.role == "inverse":
            if dies == "inverse" and last:
                count, refresh = iter(range(at)), optimizer.preconditioner.refresh
                optimizer.preconditioner.refresh = lambda *given: (
                    refresh(*given) if next(count, None) is not None else os._exit(3)
                )
            strategy.serve(optimizer)
            return "inverse"
        ages = []
        waits = comm.get("mode") == "opportunistic" and strategy.role == "gradient"
        for step in range(10**6):
            if step >= steps and (strategy.lost or not waits):
                break
            time.sleep(0.002 if waits else 0)
            if dies == strategy.role and last and step == at:
                os._exit(3)
            descend(model, optimizer, step)
            ages.append([strategy.age(index) for index in range(3)])
    return flat(model), ages, strategy.lost


#: The step in which each role dies.
DEATHS = {"inverse": 0, "factor": 3, "gradient": 5}


@only("lockstep-inverse", mode=["lockstep", "opportunistic"], dies=list(DEATHS))
def test_the_loss_of_a_rank_ends_all_ranks(pool: Pool, mode: str, dies: str) -> None:
    given, limits = (DEATHS[dies], 20, {"timeout": 5.0, "mode": mode}), {"timeout": 40, "group_timeout": 20}
    found = pool.run(train_with_a_death, dies, *given, world=4, expect_failure=True, **limits)
    assert sorted(f.type for f in found) == ["Died"] + 3 * ["RuntimeError"], found


def degraded(pool: Pool, at: int, steps: int, **comm: Any) -> list[Any]:
    """Parameters, ages by step, and the lost rank, of four ranks that continue without the last one."""
    comm = {"timeout": 8.0, "on_loss": "degrade", **comm}
    limits = {"timeout": 60, "group_timeout": 30, "expect_failure": True}
    found = pool.run(train_with_a_death, "inverse", at, steps, comm, world=4, **limits)
    assert getattr(found[3], "type", "") == "Died", found
    assert not any(isinstance(f, Failure) for f in found[:3]), found
    assert found[0][2] == [3]
    return found


@pytest.mark.slow
def test_an_opportunistic_run_continues_without_an_inverse_rank(pool: Pool) -> None:
    (first, ages, _), (second, *_), *_ = degraded(pool, 2, 200, mode="opportunistic", max_staleness=40)
    assert torch.equal(first, second)
    assert max(age for at_step in ages for age in at_step if age is not None) <= 40
    assert all(age is not None for age in ages[-1])


@pytest.mark.parametrize("warmup", ["sync", pytest.param("identity", marks=pytest.mark.slow)])
def test_on_loss_degrade_continues_training_without_an_inverse_rank(pool: Pool, warmup: str) -> None:
    roles = {"gradient": [0, 1], "factor": [2], "inverse": [3]}
    (first, ages, _), (second, *_), *_ = degraded(pool, 1, 20, max_staleness=8, warmup=warmup, **roles)
    assert torch.equal(first, second)
    after = [age[0] for age in ages]
    assert all(age is None or age <= 8 for age in after)
    if warmup == "identity":
        assert after[-1] is None
    else:  # the gradient ranks have computed curvature themselves when the last version was too old
        assert after[-1] is not None
        assert 8 in after


@pytest.mark.slow
def test_a_loss_does_not_affect_layers_of_other_inverse_ranks(pool: Pool) -> None:
    _, ages, _ = degraded(pool, 1, 20, gradient=[0], factor=[1], inverse=[2, 3])[0]
    fresh = [index for index, age in enumerate(ages[-1]) if age < 3 * T]
    assert 0 < len(fresh) < 3
    assert all(ages[-1][index] > 3 * T for index in range(3) if index not in fresh)


# ------------------------------------------------------------------------------------------------------ Opportunistic
def train_until(rank: int, world: int, takes: int, steps: int, comm: dict[str, Any]) -> Any:
    """Train for at least ``steps`` steps, until at least ``takes`` versions were adopted."""
    with working({"mode": "opportunistic", **comm}) as (model, strategy, optimizer):
        if strategy.role == "inverse":
            strategy.serve(optimizer)
            return None
        found, ages = [], []
        while not strategy.stopped:
            if strategy.role == "gradient" and len(found) >= steps:
                taken = sum(entry[0] == "take" for entry in strategy.log)
                if taken >= takes or len(found) >= 5000:
                    break
            ages.append([strategy.age(index) for index in range(3)])
            time.sleep(0.002 if strategy.role == "gradient" else 0)  # so that versions arrive before they are too old
            descend(model, optimizer, len(found))
            found.append(flat(model))
        return (torch.stack(found), ages, strategy.log) if strategy.role == "gradient" else None


OPPORTUNISTIC: dict[str, tuple[dict[str, Any], int]] = {
    "two gradient ranks": ({"max_staleness": 30}, 4),
    "two inverse ranks": ({**APART, "max_staleness": 20, "warmup": "identity"}, 4),
    "together": ({"allow_colocated": True}, 2),
}


@pytest.mark.parametrize("name", OPPORTUNISTIC)
def test_opportunistic_runs_keep_replicas_equal_bound_the_age_and_can_be_repeated(pool: Pool, name: str) -> None:
    comm, world = OPPORTUNISTIC[name]
    found = [f for f in pool.run(train_until, 5, 20, comm, world=world) if f is not None]
    trajectory, ages, log = found[0]
    assert sum(entry[0] == "take" for entry in log) >= 5
    for other, *_ in found[1:]:
        assert torch.equal(other, trajectory)
    oldest = max((age for at_step in ages for age in at_step if age is not None), default=0)
    assert oldest <= comm.get("max_staleness", 10**9)
    repeated, *rest = pool.run(train_until, 0, len(trajectory), {**comm, "replay": log}, world=world)[0]
    assert rest == [ages, log]
    assert torch.equal(repeated, trajectory)


# ------------------------------------------------------------------------------------------------------------- Errors
def kfac(model: nn.Module, comm: DedicatedWorkers | None = None, **options: Any) -> secondorder.KFAC:
    return built(secondorder.KFAC, model, comm=comm or DedicatedWorkers(), **{**OPTIONS, **options})


@on_every_rank(3, timeout=30)
def test_unsupported_options_are_refused_on_all_ranks(rank: int, world: int) -> None:
    for make, error, words in [
        (lambda m: secondorder.EKFAC(m, comm=DedicatedWorkers()), NotImplementedError, "Use KFAC"),
        (lambda m: secondorder.HyLo(m, comm=DedicatedWorkers()), NotImplementedError, "Use KFAC"),
        (lambda m: secondorder.MFAC(m, comm=DedicatedWorkers()), NotImplementedError, "MemOpt"),
        (lambda m: kfac(m, adaptive_damping=True), NotImplementedError, "adaptive_damping"),
        (lambda m: kfac(m, checkpoint_curvature="factors"), NotImplementedError, "checkpoint_curvature"),
        (lambda m: kfac(m, DedicatedWorkers(max_staleness=4)), ValueError, "max_staleness=4"),
        (lambda m: kfac(m, damping=0.1 * (rank + 1)), ValueError, "damping"),
        (lambda m: kfac(m, DedicatedWorkers([0], [1], [3])), ValueError, "beyond the world of 3"),
    ]:
        dist.barrier()  # no rank may leave while others still connect, because a refusal does not communicate
        with pytest.raises(error, match=words):
            make(build())


def fail_in(rank: int, world: int, where: str) -> None:
    with working({"timeout": 20.0}, max_failures=1) as (model, comm, optimizer):
        if comm.role == "inverse":
            if where == "refresh":
                optimizer.preconditioner.refresh = lambda blocks, host: torch.zeros(len(blocks), dtype=torch.bool)
            comm.serve(optimizer)
            return
        for step in range(12):
            if where == comm.role and step == 3:
                raise ValueError("the loader is empty")
            descend(model, optimizer, step)


def test_an_error_on_one_rank_is_raised_on_all(pool: Pool) -> None:
    empty = "the loader is empty"
    for where, words in {"refresh": "could not be factorized", "factor": empty, "gradient": empty}.items():
        found = pool.run(fail_in, where, world=3, timeout=50, expect_failure=True)
        assert all(isinstance(f, Failure) and words in f.message for f in found), found


@on_every_rank(3)
def test_each_role_refuses_the_work_of_other_roles_and_unsupported_calls(rank: int, world: int) -> None:
    words = ("this is a gradient rank", "this is a factor rank", r"calls comm\.serve\(optimizer\)")
    with working({}) as (_, comm, optimizer):
        foreign = optimizer.step if comm.role == "inverse" else lambda: comm.serve(optimizer)
        for call, error, match in (
            (foreign, RuntimeError, words[rank]),
            (optimizer.consolidate_state_dict, RuntimeError, r"state_dict\(\) of every rank"),
            (optimizer.join_hook, NotImplementedError, "ranks without data"),
        ):
            with pytest.raises(error, match=match):
                call()


# ----------------------------------------------------------------------------------------------------- State of ranks
@on_every_rank(4)
def test_ranks_only_store_the_state_of_their_role(rank: int, world: int) -> None:
    with working({**APART, **WAIT}) as (model, strategy, optimizer):
        memory = optimizer.memory_usage()
        kept = [sorted(k for k in ("factor_a", "basis_a") if k in optimizer.state[p]) for p in model.parameters()]
        roles, held, layers = zip(*everywhere([strategy.role, memory, kept[::2]]), strict=True)
    assert roles == ("gradient", "factor", "inverse", "inverse")
    factors, second_order = ([of_rank[kind] for of_rank in held] for kind in ("factors", "second_order"))
    assert factors[:2] == [0, factors[2] + factors[3]]
    assert second_order[:2] == [second_order[2] + second_order[3], 0]
    assert second_order[0] > 0
    assert factors[1] > 0
    assert all(sorted([*a, *b]) == ["basis_a", "factor_a"] for a, b in zip(*layers[2:], strict=True))


@pytest.mark.filterwarnings("ignore:.*is partial:UserWarning")
@on_every_rank(3)
def test_every_rank_continues_from_its_own_state(rank: int, world: int) -> None:
    """It uses the saved curvature, without a warm-up."""
    losses, saved = [], None
    for _ in range(2):
        with working({}) as (model, comm, optimizer):
            if saved is not None:
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
                assert comm.role != "gradient" or all(optimizer.role_worker.has_curvature(i) for i in range(3))
            if comm.role == "inverse":
                comm.serve(optimizer)
            else:
                losses += [descend(model, optimizer, 0) for _ in range(7)]
            saved = model.state_dict(), optimizer.state_dict()
    assert comm.role != "gradient" or losses[7] < losses[6]


@on_every_rank(4)
def test_a_parameter_that_some_gradient_ranks_use_changes_on_all_of_them(rank: int, world: int) -> None:
    """Each gradient rank uses a different layer, and no rank uses the third."""
    model = nn.ModuleList([nn.Linear(5, 3, dtype=torch.float64) for _ in range(3)])
    before, gradient = flat(model), torch.zeros(0)
    comm = DedicatedWorkers(warmup="identity")
    with kfac(model, comm, lr=1.0, momentum=0.0, kl_clip=None) as optimizer:
        if comm.role == "inverse":
            comm.serve(optimizer)
        else:
            x, y = batch(0, comm.data_rank, 0)
            loss(model[comm.data_rank](x), y).backward()
            gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
            optimizer.step()
    (first, own), (second, other), *_ = everywhere((flat(model) - before, gradient))
    assert torch.equal(first, second)
    torch.testing.assert_close(first, torch.cat([-own / 2, -other / 2, torch.zeros(18)]).double())


# -------------------------------------------------------------------------------------------------------- One process
def test_invalid_arguments_are_refused_and_valid_ones_are_shown() -> None:
    for arguments, error, words in [
        ({"mode": "later"}, ValueError, "'later'"),
        ({"warmup": 1}, TypeError, "warmup"),
        ({"on_loss": "ignore"}, ValueError, "on_loss"),
        ({"period": 0}, ValueError, "period must be"),
        ({"period": 1.5}, TypeError, "period must be an integer"),
        ({"timeout": -1}, ValueError, "timeout"),
        ({"allow_colocated": 1}, TypeError, "allow_colocated"),
        ({"replay": []}, ValueError, "opportunistic"),
        ({"replay": [["turn", 1]], "mode": "opportunistic"}, ValueError, "entry"),
    ]:
        with pytest.raises(error, match=words):
            DedicatedWorkers(**arguments)
    with pytest.raises(ValueError, match="at least 3 ranks"):
        kfac(build())
    strategy = DedicatedWorkers([0], [1], [2], period=4, warmup="identity")
    for same in (strategy, copy.deepcopy(strategy), pickle.loads(pickle.dumps(strategy))):
        assert repr(same) == "DedicatedWorkers(gradient=[0], factor=[1], inverse=[2], period=4, warmup='identity')"
