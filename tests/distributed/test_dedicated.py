"""Dedicated workers: equal to the delayed run of one process, never stuck at the end, loud when a rank dies."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import secondorder
from secondorder.comm.dedicated import DedicatedWorkers
from tests.distributed.delayed import Batch, Delayed
from tests.distributed.pool import Pool

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


def train(rank: int, world: int, steps: dict[str, int], comm: dict[str, Any], options: dict[str, Any]) -> Any:
    """Run the loop of this rank's role; returns the parameters after each step, or the role's name."""
    model = build()
    if (
        rank != comm.get("gradient", [0])[0]
    ):  # must not matter: all start from the parameters of the first gradient rank
        with torch.no_grad():
            for p in model.parameters():
                p.add_(rank)
    strategy = DedicatedWorkers(**comm)
    optimizer = secondorder.KFAC(model, comm=strategy, **{**OPTIONS, **options})
    found = []
    if strategy.role == "inverse":
        strategy.serve(optimizer)
    else:
        for step in range(steps[strategy.role]):
            optimizer.zero_grad()
            x, y = batch(strategy.role == "factor", strategy.data_rank, step)
            loss(model(x), y).backward()
            optimizer.step()
            found.append(flat(model))
    optimizer.close()
    return found if strategy.role == "gradient" else strategy.role


def simulated(steps: int, options: dict[str, Any], **more: Any) -> list[Tensor]:
    return Delayed(
        build, secondorder.KFAC, {**OPTIONS, **options}, loss,
        lambda rank, step: batch(0, rank, step), lambda rank, step: batch(1, rank, step),
        **{"gradient_ranks": 1, "period": T, **more},
    ).run(steps)  # fmt: skip


def assert_same(found: list[Tensor], expected: list[Tensor], exact: bool) -> None:
    for step, (a, b) in enumerate(zip(found, expected, strict=True)):
        if exact:
            assert torch.equal(a, b), f"step {step}: {(a - b).abs().max()}"
        else:
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, msg=lambda text, step=step: f"step {step}: {text}")


# --------------------------------------------------------------------------------------------------------- lockstep


@pytest.mark.parametrize("world", [3, 4])
@pytest.mark.parametrize("method", ["eigen", "cholesky"])
def test_lockstep_is_the_delayed_run_to_the_bit(pool: Pool, world: int, method: str) -> None:
    steps, options = 9, {"inverse_method": method}
    found = pool.run(train, {"gradient": steps, "factor": steps}, {"warmup": "identity"}, options, world=world)
    expected = simulated(steps, options, gradient_ranks=world - 2, warmup="identity")
    assert found[world - 2 :] == ["factor", "inverse"]
    for trajectory in found[: world - 2]:
        assert_same(trajectory, expected, exact=True)


# Strategy, options, simulator, world, and whether to the bit: a sum over the examples of two ranks is not added in the
# order of one batch.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], int, bool]] = {
    "warm-up by one gradient rank": ({}, {}, {}, 3, True),
    "warm-up by two gradient ranks": ({}, {}, {"gradient_ranks": 2}, 4, False),
    "roles in another order": ({"gradient": [2], "factor": [0], "inverse": [1]}, {}, {}, 3, True),
    "two factor ranks": ({"gradient": [0], "factor": [1, 2]}, {}, {"factor_ranks": 2}, 4, False),
    "two inverse ranks": ({"gradient": [0], "factor": [1]}, {"inverse_method": "cholesky"}, {}, 4, True),
    "factors and inverses together": ({"allow_colocated": True}, {}, {}, 2, True),
    "the same on two ranks": ({"allow_colocated": True, "seed": 3}, {}, {"factor_ranks": 2}, 3, False),
    "a period of its own": ({"period": 3}, {}, {"period": 3}, 3, True),
    "every step": ({"period": 1}, {"inverse_method": "cholesky"}, {"period": 1}, 3, True),
    "factors every third step": ({"period": 4}, {"factor_update_steps": 3}, {"period": 4}, 3, True),
}


@pytest.mark.parametrize("name", CASES)
def test_lockstep_is_the_delayed_run_in_other_settings(pool: Pool, name: str) -> None:
    comm, options, simulator, world, exact = CASES[name]
    steps = 13 if simulator.get("period", T) > T else 9
    found = pool.run(train, {"gradient": steps, "factor": steps}, comm, options, world=world)
    expected = simulated(steps, options, **simulator)
    trajectories = [f for f in found if isinstance(f, list)]
    assert len(trajectories) == simulator.get("gradient_ranks", 1)
    for trajectory in trajectories:
        assert_same(trajectory, expected, exact)


def train_on_a_schedule(rank: int, world: int, steps: int) -> Any:
    model = build()
    comm = DedicatedWorkers(warmup="identity")
    optimizer = secondorder.KFAC(model, comm=comm, **{**OPTIONS, "inverse_method": "cholesky"})
    found = []
    if comm.role == "inverse":
        comm.serve(optimizer)
    else:
        for step in range(steps):
            if comm.role == "gradient":  # only those that train follow the schedule
                optimizer.param_groups[0]["damping"] = falling(step)
            optimizer.zero_grad()
            loss_of(model, comm, step).backward()
            optimizer.step()
            found.append(flat(model))
    optimizer.close()
    return found if comm.role == "gradient" else comm.role


def falling(step: int) -> float:
    return 0.2 * 0.8**step


def loss_of(model: nn.Module, comm: DedicatedWorkers, step: int) -> Tensor:
    x, y = batch(comm.role == "factor", comm.data_rank, step)
    return loss(model(x), y)


def test_inverse_ranks_follow_a_damping_that_is_scheduled_where_training_runs(pool: Pool) -> None:
    found = pool.run(train_on_a_schedule, 9, world=3)
    expected = simulated(9, {"inverse_method": "cholesky"}, warmup="identity", damping=falling)
    assert_same(found[0], expected, exact=True)


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
    runs = [{"gradient": random.randrange(9), "factor": random.randrange(9)} for _ in range(6)]
    runs += [{"gradient": 0, "factor": 0}, {"gradient": T, "factor": 0}, {"gradient": 0, "factor": 5}]
    found = pool.run(train_often, runs, comm, world=world, timeout=60)
    assert [len(trajectory) for trajectory in found[0]] == [run["gradient"] for run in runs]
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
    """One rank dies: an inverse rank in its refresh, the others in a step."""
    model = build()
    strategy = DedicatedWorkers(**comm)
    optimizer = secondorder.KFAC(model, comm=strategy, **OPTIONS)
    last = strategy.data_rank == strategy.data_world - 1
    if strategy.role == "inverse":
        if dies == "inverse" and last:
            count = iter(range(at))
            refresh = optimizer.refresh

            def last_refresh(*given: Any) -> Tensor:
                return refresh(*given) if next(count, None) is not None else os._exit(3)

            optimizer.refresh = last_refresh  # type: ignore[method-assign]
        strategy.serve(optimizer)
        optimizer.close()
        return "inverse"
    ages = []
    for step in range(steps):
        if dies == strategy.role and last and step == at:
            os._exit(3)
        optimizer.zero_grad()
        loss_of(model, strategy, step).backward()
        optimizer.step()
        ages.append([strategy.age(index) for index in range(3)])
    optimizer.close()
    return flat(model), ages, strategy.lost


@pytest.mark.parametrize(("dies", "at"), [("inverse", 0), ("inverse", 1), ("factor", 3), ("gradient", 5)])
def test_the_loss_of_a_rank_ends_all_ranks(pool: Pool, dies: str, at: int) -> None:
    found = pool.run(
        train_with_a_death, dies, at, 20, {"timeout": 3.0}, world=4, timeout=40, group_timeout=20, expect_failure=True
    )
    assert [f.type for f in found].count("Died") == 1
    assert [f.type for f in found].count("RuntimeError") == 3, found


@pytest.mark.parametrize("warmup", ["sync", "identity"])
def test_training_goes_on_without_an_inverse_rank_if_asked_to(pool: Pool, warmup: str) -> None:
    comm = {"timeout": 3.0, "on_loss": "degrade", "max_staleness": 8, "warmup": warmup, "gradient": [0, 1]}
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


def test_layers_of_the_other_inverse_ranks_are_not_touched_by_a_loss(pool: Pool) -> None:
    comm = {"timeout": 3.0, "on_loss": "degrade", "gradient": [0], "factor": [1], "inverse": [2, 3]}
    found = pool.run(
        train_with_a_death, "inverse", 1, 20, comm, world=4, timeout=60, group_timeout=30, expect_failure=True
    )
    _, ages, lost = found[0]
    assert lost == [3]
    fresh = [index for index, age in enumerate(ages[-1]) if age < 3 * T]
    assert 0 < len(fresh) < 3
    assert all(ages[-1][index] > 3 * T for index in range(3) if index not in fresh)
