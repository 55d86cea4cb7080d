"""Dedicated workers: equal to the delayed run of one process, never stuck at the end, loud when a rank dies."""

from __future__ import annotations

import copy
import os
import pickle
import random
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import secondorder
from secondorder.comm.dedicated import lockstep
from secondorder.comm.dedicated.workers import DedicatedWorkers
from tests.support.delayed import Batch, Delayed
from tests.support.pool import Failure, Pool
from tests.support.saving import raised

T = 2
OPTIONS = {"lr": 0.1, "damping": 0.05, "factor_update_steps": 1, "inv_update_steps": T, "kl_clip": 0.01}


def build() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def batch(role: int, rank: int, step: int) -> Batch:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + role)
    n = 8
    return (
        torch.randn(n, 5, dtype=torch.float64, generator=generator),
        torch.randn(n, 3, dtype=torch.float64, generator=generator),
    )


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


def flat(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


class Record(NamedTuple):
    """What a gradient rank has after a step, and how old the curvature is that the step has used."""

    params: Tensor
    age: int | None
    staleness: set[int]


def train(
    rank: int, world: int, steps: dict[str, int], comm: dict[str, Any], options: dict[str, Any], scheduled: bool = False
) -> Any:
    """Run the loop of this rank's role; a gradient rank returns its record of every step, the others their role."""
    model = build()
    if rank != comm.get("gradient", [0])[0]:  # must not matter: all start as the first gradient rank does
        with torch.no_grad():
            for p in model.parameters():
                p.add_(rank)
    strategy = DedicatedWorkers(**comm)
    found = []
    with secondorder.KFAC(model, comm=strategy, **{**OPTIONS, **options}) as optimizer:
        if strategy.role == "inverse":
            strategy.serve(optimizer)
        for step in range(steps.get(strategy.role, 0)):
            if scheduled and strategy.role == "gradient":  # only those that train follow the schedule
                optimizer.param_groups[0]["damping"] = falling(step)
            optimizer.zero_grad()
            loss_of(model, strategy, step).backward()
            age = strategy.age(0)
            optimizer.step()
            found.append(Record(flat(model), age, set(optimizer.diagnostics()["staleness"].values())))
    return found if strategy.role == "gradient" else strategy.role


def simulated(steps: int, options: dict[str, Any], **more: Any) -> list[Tensor]:
    return Delayed(
        build, secondorder.KFAC, {**OPTIONS, **options}, loss,
        lambda rank, step: batch(0, rank, step), lambda rank, step: batch(1, rank, step),
        **{"gradient_ranks": 1, "period": T, **more},
    ).run(steps)  # fmt: skip


def assert_same(found: list[Record], expected: list[Tensor], exact: bool = True) -> None:
    for step, (a, b) in enumerate(zip(found, expected, strict=True)):
        tolerance = 0.0 if exact else 1e-12
        torch.testing.assert_close(a.params, b, rtol=tolerance, atol=tolerance, msg=lambda m, step=step: f"{step}: {m}")


def loss_of(model: nn.Module, comm: DedicatedWorkers, step: int) -> Tensor:
    x, y = batch(comm.role == "factor", comm.data_rank, step)
    return loss(model(x), y)


# --------------------------------------------------------------------------------------------------------- lockstep

CHOLESKY, DIAGONAL = {"inverse_method": "cholesky"}, {"inverse_method": "cholesky", "max_factor_dim": 1}
WAIT = {"warmup": "identity"}
# Strategy, options, simulator, world, and whether to the bit: a sum over the examples of two ranks is not added in the
# order of one batch.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], int, bool]] = {
    "no warm-up": (WAIT, {"inverse_method": "eigen"}, WAIT, 3, True),
    "no warm-up, two gradient ranks": (WAIT, CHOLESKY, {"gradient_ranks": 2, **WAIT}, 4, True),
    "warm-up by two gradient ranks": ({}, {}, {"gradient_ranks": 2}, 4, False),
    "roles in another order": ({"gradient": [2], "factor": [0], "inverse": [1]}, {}, {}, 3, True),
    "two factor ranks": ({"gradient": [0], "factor": [1, 2]}, {}, {"factor_ranks": 2}, 4, False),
    "two inverse ranks": ({"gradient": [0], "factor": [1]}, CHOLESKY, {}, 4, True),
    "two inverse ranks, diagonal factors": ({"gradient": [0], "factor": [1]}, DIAGONAL, {}, 4, True),
    "together": ({"allow_colocated": True, "seed": 3}, {}, {"factor_ranks": 2}, 3, False),
    "together, diagonal factors": ({"allow_colocated": True}, DIAGONAL, {}, 2, True),
    "every step": ({"period": 1}, CHOLESKY, {"period": 1}, 3, True),
    "factors every third step": ({"period": 4}, {"factor_update_steps": 3}, {"period": 4}, 3, True),
}


@pytest.mark.parametrize("name", CASES)
def test_lockstep_is_the_delayed_run(pool: Pool, name: str) -> None:
    comm, options, simulator, world, exact = CASES[name]
    steps = 13 if simulator.get("period", T) > T else 9
    found = pool.run(train, {"gradient": steps, "factor": steps}, comm, options, world=world)
    paths = [f for f in found if isinstance(f, list)]
    assert len(paths) == simulator.get("gradient_ranks", 1)
    expected = simulated(steps, options, **simulator)
    for path in paths:
        assert_same(path, expected, exact)


def falling(step: int) -> float:
    return 0.2 * 0.8**step


def test_inverse_ranks_follow_a_damping_that_is_scheduled_where_training_runs(pool: Pool) -> None:
    found, *others = pool.run(train, {"gradient": 9, "factor": 9}, WAIT, CHOLESKY, True, world=3)
    assert others == ["factor", "inverse"]
    assert_same(found, simulated(9, CHOLESKY, damping=falling, **WAIT))


def test_curvature_is_as_old_as_the_schedule_says(pool: Pool) -> None:
    found, *_ = pool.run(train, {"gradient": 10, "factor": 10}, WAIT, {}, world=3)
    assert [record.age for record in found] == [lockstep.age_of(step, T) for step in range(10)]
    # A version arrives between two steps: it is new after the one before those that use it.
    staleness = [record.staleness for record in found]
    assert staleness == [set(), set(), set(), {0}, {1}, {0}, {1}, {0}, {1}, {0}]


# ---------------------------------------------------------------------------------------------------------- the end


def train_often(rank: int, world: int, runs: list[dict[str, int]], comm: dict[str, Any]) -> list[Any]:
    """Several optimizers, one after another, in one process group."""
    return [train(rank, world, run, comm, {}) for run in runs]


@pytest.mark.parametrize(("comm", "world"), [
    ({}, 4),
    ({"allow_colocated": True}, 3),
    ({"mode": "opportunistic"}, 4),
    ({"mode": "opportunistic", "allow_colocated": True}, 2),
])  # fmt: skip
def test_the_end_comes_at_any_step_of_any_role(pool: Pool, comm: dict[str, Any], world: int) -> None:
    random.seed(world)
    runs = [{"gradient": random.randrange(9), "factor": random.randrange(9)} for _ in range(3)]
    runs += [{"gradient": 0, "factor": 0}, {"gradient": T, "factor": 0}, {"gradient": 0, "factor": 5}]
    found = pool.run(train_often, runs, comm, world=world, timeout=60)
    assert [len(path) for path in found[0]] == [run["gradient"] for run in runs]
    assert all(role in ("factor", "inverse") for role in found[-1])


def stop_early(rank: int, world: int) -> Any:
    model = build()
    comm = DedicatedWorkers()
    with secondorder.KFAC(model, comm=comm, **OPTIONS) as optimizer:
        if comm.role == "inverse":
            comm.serve(optimizer)
            return comm.stopped
        step = 0
        while step < 4 if comm.role == "gradient" else not comm.stopped:
            optimizer.zero_grad()
            loss_of(model, comm, step).backward()
            optimizer.step()
            step += 1
        before = flat(model)
        if comm.role == "factor":  # steps after the end do nothing
            optimizer.zero_grad()
            loss_of(model, comm, step).backward()
            optimizer.step()
        return bool(torch.equal(flat(model), before)), comm.stopped, step


def test_a_factor_rank_can_see_that_training_has_ended(pool: Pool) -> None:
    gradient, factor, inverse = pool.run(stop_early, world=3)
    assert gradient == (True, False, 4)
    assert factor == (True, True, 6)  # the end of the epoch in which training ended
    assert inverse is True


# ------------------------------------------------------------------------------------------------------------- loss


def train_with_a_death(rank: int, world: int, dies: str, at: int, steps: int, comm: dict[str, Any]) -> Any:
    """One rank dies: an inverse rank in its refresh, the others in a step. In opportunistic mode that is waited for."""
    model = build()
    strategy = DedicatedWorkers(**comm)
    optimizer = secondorder.KFAC(model, comm=strategy, **OPTIONS)
    last = strategy.data_rank == strategy.data_world - 1
    if strategy.role == "inverse":
        if dies == "inverse" and last:
            count = iter(range(at))
            refresh = optimizer.preconditioner.refresh

            def last_refresh(*given: Any) -> Tensor:
                return refresh(*given) if next(count, None) is not None else os._exit(3)

            optimizer.preconditioner.refresh = last_refresh  # type: ignore[method-assign]
        strategy.serve(optimizer)
        optimizer.close()
        return "inverse"
    ages = []
    waits = comm.get("mode") == "opportunistic" and strategy.role == "gradient"
    for step in range(10**6):
        if step >= steps and (strategy.lost or not waits):
            break
        time.sleep(0.002 if waits else 0)
        if dies == strategy.role and last and step == at:
            os._exit(3)
        optimizer.zero_grad()
        loss_of(model, strategy, step).backward()
        optimizer.step()
        ages.append([strategy.age(index) for index in range(3)])
    optimizer.close()
    return flat(model), ages, strategy.lost


DEATHS = [("inverse", 0), ("factor", 3), ("gradient", 5)]


@pytest.mark.parametrize(("mode", "dies", "at"), [
    ("lockstep", "inverse", 1),
    *(pytest.param("lockstep", *death, marks=pytest.mark.slow) for death in DEATHS),
    *(pytest.param("opportunistic", *death, marks=pytest.mark.slow) for death in DEATHS),
])  # fmt: skip
def test_the_loss_of_a_rank_ends_all_ranks(pool: Pool, mode: str, dies: str, at: int) -> None:
    comm = {"timeout": 5.0, "mode": mode}
    found = pool.run(train_with_a_death, dies, at, 20, comm, world=4, timeout=40, group_timeout=20, expect_failure=True)
    assert [f.type for f in found].count("Died") == 1
    assert [f.type for f in found].count("RuntimeError") == 3, found


@pytest.mark.slow
def test_an_opportunistic_run_goes_on_without_an_inverse_rank(pool: Pool) -> None:
    comm = {"timeout": 8.0, "on_loss": "degrade", "mode": "opportunistic", "max_staleness": 40}
    found = pool.run(
        train_with_a_death, "inverse", 2, 200, comm, world=4, timeout=60, group_timeout=30, expect_failure=True
    )
    (first, ages, lost), (second, *_) = found[:2]
    assert torch.equal(first, second)
    assert lost == [3]
    assert max(age for at_step in ages for age in at_step if age is not None) <= 40
    assert all(age is not None for age in ages[-1])


@pytest.mark.parametrize("warmup", ["sync", pytest.param("identity", marks=pytest.mark.slow)])
def test_training_goes_on_without_an_inverse_rank_if_asked_to(pool: Pool, warmup: str) -> None:
    comm = {"timeout": 8.0, "on_loss": "degrade", "max_staleness": 8, "warmup": warmup, "gradient": [0, 1]}
    comm |= {"factor": [2], "inverse": [3]}
    found = pool.run(
        train_with_a_death, "inverse", 1, 20, comm, world=4, timeout=60, group_timeout=30, expect_failure=True
    )
    assert [getattr(f, "type", "") for f in found[2:]] == ["", "Died"], found
    (first, ages, lost), (second, *_) = found[:2]
    assert torch.equal(first, second)
    assert lost == [3]
    after = [age[0] for age in ages]
    assert all(age is None or age <= 8 for age in after)
    if warmup == "identity":
        assert after[-1] is None
    else:  # the gradient ranks have found curvature themselves since, when the last version was too old
        assert after[-1] is not None
        assert 8 in after


@pytest.mark.slow
def test_layers_of_the_other_inverse_ranks_are_not_touched_by_a_loss(pool: Pool) -> None:
    comm = {"timeout": 8.0, "on_loss": "degrade", "gradient": [0], "factor": [1], "inverse": [2, 3]}
    found = pool.run(
        train_with_a_death, "inverse", 1, 20, comm, world=4, timeout=60, group_timeout=30, expect_failure=True
    )
    _, ages, lost = found[0]
    assert lost == [3]
    fresh = [index for index, age in enumerate(ages[-1]) if age < 3 * T]
    assert 0 < len(fresh) < 3
    assert all(ages[-1][index] > 3 * T for index in range(3) if index not in fresh)


# ----------------------------------------------------------------------------------------------------- opportunistic


def train_until(rank: int, world: int, takes: int, steps: int, comm: dict[str, Any]) -> Any:
    """Train for some steps and until so many versions were taken, or exactly so many steps in a repetition."""
    model = build()
    strategy = DedicatedWorkers(mode="opportunistic", **comm)
    with secondorder.KFAC(model, comm=strategy, **OPTIONS) as optimizer:
        if strategy.role == "inverse":
            strategy.serve(optimizer)
            return None
        found, ages, step = [], [], 0
        while not strategy.stopped:
            if strategy.role == "gradient" and step >= steps:
                taken = sum(entry[0] == "take" for entry in strategy.log)
                if taken >= takes or step >= 5000:
                    break
            optimizer.zero_grad()
            loss_of(model, strategy, step).backward()
            ages.append([strategy.age(index) for index in range(3)])
            time.sleep(0.002 if strategy.role == "gradient" else 0)  # so that versions come before they are too old
            optimizer.step()
            found.append(flat(model))
            step += 1
        return (torch.stack(found), ages, strategy.log) if strategy.role == "gradient" else None


OPPORTUNISTIC: dict[str, tuple[dict[str, Any], int]] = {
    "one of each": ({}, 3),
    "two gradient ranks": ({"max_staleness": 30}, 4),
    "two inverse ranks": ({"gradient": [0], "factor": [1], "max_staleness": 20, "warmup": "identity"}, 4),
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

    again = [
        f for f in pool.run(train_until, 0, len(trajectory), {**comm, "replay": log}, world=world) if f is not None
    ]
    repeated, repeated_ages, repeated_log = again[0]
    assert repeated_log == log
    assert repeated_ages == ages
    assert torch.equal(repeated, trajectory)


# ------------------------------------------------------------------------------------------------------------ errors


REFUSED: dict[str, tuple[Callable[[nn.Module, int], Any], type[Exception], str]] = {
    "EKFAC": (lambda m, rank: secondorder.EKFAC(m, comm=DedicatedWorkers()), NotImplementedError, "Use KFAC"),
    "HyLo": (lambda m, rank: secondorder.HyLo(m, comm=DedicatedWorkers()), NotImplementedError, "Use KFAC"),
    "MFAC": (lambda m, rank: secondorder.MFAC(m, comm=DedicatedWorkers()), NotImplementedError, "MemOpt"),
    "adaptive": (lambda m, rank: kfac(m, adaptive_damping=True), NotImplementedError, "adaptive_damping"),
    "lean": (lambda m, rank: kfac(m, checkpoint_curvature="factors"), NotImplementedError, "checkpoint_curvature"),
    "staleness": (lambda m, rank: kfac(m, DedicatedWorkers(max_staleness=4)), ValueError, "max_staleness=4"),
    "different": (lambda m, rank: kfac(m, damping=0.1 * (rank + 1)), ValueError, "damping"),
    "world": (lambda m, rank: kfac(m, DedicatedWorkers([0], [1], [3])), ValueError, "beyond the world of 3"),
}


def kfac(model: nn.Module, comm: DedicatedWorkers | None = None, **options: Any) -> secondorder.KFAC:
    return secondorder.KFAC(model, comm=comm or DedicatedWorkers(), **{**OPTIONS, **options})


def refused(rank: int, world: int) -> dict[str, tuple[str, str]]:
    """What building an optimizer says."""
    found = {}
    for kind, (make, *_) in REFUSED.items():
        dist.barrier()  # what is refused sends nothing: nobody may leave while others still come
        found[kind] = raised(make, build(), rank)
    return found


def test_what_cannot_work_is_refused_on_all_ranks(pool: Pool) -> None:
    for found in pool.run(refused, world=3, timeout=30):
        for kind, (_, error, words) in REFUSED.items():
            assert found[kind][0] == error.__name__, kind
            assert words in found[kind][1]


def fail_in(rank: int, world: int, where: str) -> None:
    model = build()
    comm = DedicatedWorkers(timeout=20.0)
    with secondorder.KFAC(model, comm=comm, max_failures=1, **OPTIONS) as optimizer:
        if where == "refresh" and comm.role == "inverse":
            optimizer.preconditioner.refresh = lambda blocks, host: torch.zeros(len(blocks), dtype=torch.bool)  # type: ignore[method-assign]
        if comm.role == "inverse":
            comm.serve(optimizer)
            return
        for step in range(12):
            if where == comm.role and step == 3:
                raise ValueError("the loader is empty")
            optimizer.zero_grad()
            loss_of(model, comm, step).backward()
            optimizer.step()


@pytest.mark.parametrize(("where", "words"), [
    ("refresh", "could not be factorised"),
    ("factor", "the loader is empty"),
    ("gradient", "the loader is empty"),
])  # fmt: skip
def test_an_error_on_one_rank_is_heard_on_all(pool: Pool, where: str, words: str) -> None:
    found = pool.run(fail_in, where, world=3, timeout=50, expect_failure=True)
    assert all(isinstance(f, Failure) and words in f.message for f in found), found


def misuse(rank: int, world: int) -> str:
    model = build()
    comm = DedicatedWorkers()
    with secondorder.KFAC(model, comm=comm, **OPTIONS) as optimizer:
        said = []
        for wrong in (lambda: comm.serve(optimizer), optimizer.step, optimizer.consolidate_state_dict):
            if (comm.role == "inverse") == (wrong == optimizer.step) or wrong == optimizer.consolidate_state_dict:
                try:
                    wrong()
                except RuntimeError as error:
                    said.append(str(error))
        with pytest.raises(NotImplementedError, match="ranks without data"):
            optimizer.join_hook()
        return " / ".join(said)


def test_each_role_refuses_the_work_of_another(pool: Pool) -> None:
    gradient, factor, inverse = pool.run(misuse, world=3)
    assert "this is a gradient rank" in gradient
    assert "this is a factor rank" in factor
    assert "calls comm.serve(optimizer)" in inverse
    assert all("state_dict() of every rank" in said for said in (gradient, factor, inverse))


# ------------------------------------------------------------------------------------------------- what ranks hold


def held(rank: int, world: int, comm: dict[str, Any]) -> Any:
    model = build()
    strategy = DedicatedWorkers(**comm)
    with secondorder.KFAC(model, comm=strategy, **OPTIONS) as optimizer:
        memory = optimizer.memory_usage()
        kept = [sorted(k for k in ("factor_a", "basis_a") if k in optimizer.state[p]) for p in model.parameters()]
        return strategy.role, memory["factors"], memory["second_order"], kept[::2]


def test_ranks_keep_what_their_role_needs(pool: Pool) -> None:
    comm = {"gradient": [0], "factor": [1], "warmup": "identity"}
    gradient, factor, *inverse = pool.run(held, comm, world=4)
    assert gradient[0] == "gradient"
    assert gradient[1] == 0
    assert gradient[2] > 0
    assert factor[0] == "factor"
    assert factor[1] > 0
    assert factor[2] == 0
    assert [a[1] + b[1] for a, b in [inverse]] == [factor[1]]
    assert sum(r[2] for r in inverse) == gradient[2]
    assert all(sorted([*a, *b]) == ["basis_a", "factor_a"] for a, b in zip(*(r[3] for r in inverse), strict=True))


def resume(rank: int, world: int, steps: int) -> Any:
    """Train, save, and train on from what was saved; returns the losses before and after."""
    found, saved = [], None
    for _ in range(2):
        model = build()
        comm = DedicatedWorkers()
        with secondorder.KFAC(model, comm=comm, **OPTIONS) as optimizer:
            if saved is not None:
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
                active = [comm.role != "gradient" or optimizer.role_worker.has_curvature(i) for i in range(3)]
            if comm.role == "inverse":
                comm.serve(optimizer)
            else:
                for _ in range(steps):
                    optimizer.zero_grad()
                    value = loss_of(model, comm, 0)
                    value.backward()
                    optimizer.step()
                    found.append(float(value.detach()))
            saved = model.state_dict(), optimizer.state_dict()
    return comm.role, found, active


@pytest.mark.filterwarnings("ignore:.*is partial:UserWarning")
def test_every_rank_goes_on_from_what_it_saved(pool: Pool) -> None:
    (role, losses, active), *_ = pool.run(resume, 7, world=3)
    assert role == "gradient"
    assert all(active)  # with the curvature that was in use, without a warm-up
    assert losses[7] < losses[6]


class Halves(nn.Module):
    """Two layers, of which a forward uses one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 3), nn.Linear(5, 3)]).double()

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.layers[which](x)  # type: ignore[no-any-return]


def train_apart(rank: int, world: int) -> Any:
    """Each gradient rank uses another layer, and nobody the third."""
    model = Halves()
    comm = DedicatedWorkers(warmup="identity")
    options = {**OPTIONS, "lr": 1.0, "momentum": 0.0, "kl_clip": None}
    before = flat(model)
    gradients = []
    with secondorder.KFAC(model, comm=comm, **options) as optimizer:
        if comm.role != "inverse":
            x, y = batch(0, comm.data_rank, 0)
            loss(model(x, comm.data_rank), y).backward()
            gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
            optimizer.step()
        else:
            comm.serve(optimizer)
    return comm.role, flat(model) - before, gradients


def test_a_parameter_that_some_gradient_ranks_use_moves_on_all_of_them(pool: Pool) -> None:
    (_, first, own), (_, second, other), *_ = pool.run(train_apart, world=4)
    assert torch.equal(first, second)
    expected = [g for g in (*own[:2], *other[2:4]) if g is not None]
    assert own[4] is None
    torch.testing.assert_close(first[:36], -torch.cat([g.flatten() for g in expected]) / 2)
    assert not first[36:].any()


# ----------------------------------------------------------------------------------------------------- one process


@pytest.mark.parametrize(("arguments", "error", "words"), [
    ({"mode": "later"}, ValueError, "'later'"),
    ({"warmup": 1}, ValueError, "warmup"),
    ({"on_loss": "ignore"}, ValueError, "on_loss"),
    ({"period": 0}, ValueError, "period must be at least 1"),
    ({"period": 1.5}, TypeError, "whole number"),
    ({"timeout": -1}, ValueError, "timeout"),
    ({"allow_colocated": 1}, TypeError, "allow_colocated"),
    ({"replay": []}, ValueError, "opportunistic"),
    ({"replay": [["turn", 1]], "mode": "opportunistic"}, ValueError, "entry"),
    ({"gradient": []}, ValueError, "at least one rank"),
])  # fmt: skip
def test_bad_arguments_are_refused(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        DedicatedWorkers(**arguments)


def test_one_process_is_too_few() -> None:
    with pytest.raises(ValueError, match="at least 3 ranks"):
        secondorder.KFAC(build(), comm=DedicatedWorkers())


def test_how_it_prints_and_copies() -> None:
    strategy = DedicatedWorkers([0], [1], [2], period=4, warmup="identity")
    told = "DedicatedWorkers(gradient=[0], factor=[1], inverse=[2], period=4, warmup='identity')"
    assert repr(strategy) == told
    assert repr(copy.deepcopy(strategy)) == told
    assert repr(pickle.loads(pickle.dumps(strategy))) == told
