"""`torch.distributed.algorithms.join`: ranks whose data end early, owners of layers among them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel import DistributedDataParallel as DDP

from secondorder import KFAC
from tests.support.grid import each, product
from tests.support.oracles.ranks import STRATEGIES, TASKS, Run, assert_replicas, build, descend, distance, flat, shard
from tests.support.pool import Pool, device_of
from tests.support.saving import raised
from tests.support.tasks import assert_identical

LONG, SHORT = 5, 3
# what changes the curvature or the step at the second half
EAGER = {"factor_update_steps": 1, "inv_update_steps": 2}


def batches(rank: int, world: int, run: Run, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    for step in range(steps):
        yield shard(run.batch(step), rank, world)


def owned(optimizer: Any) -> list[int]:
    """Owners of the blocks or windows."""
    curvature = optimizer.preconditioner
    count = len(curvature.plan.by_name)
    return [optimizer.comm.owner(i) for i in range(count)]


def uneven(rank: int, world: int, strategy: str, run: Run, early: int, wrapped: bool = True) -> dict[str, Any]:
    """Train with fewer batches on one rank; path, counters and owners."""
    bare = TASKS[run.task].model(device_of(rank))
    model = DDP(bare) if wrapped else bare
    optimizer = build(run.method, model, STRATEGIES[strategy](average_gradients=not wrapped), **run.keywords)
    inside = []
    with Join([model, optimizer] if wrapped else [optimizer]):
        for batch in batches(rank, world, run, SHORT if rank == early else LONG):
            descend(model, optimizer, batch, run)
            inside.append(flat(model))
    at_end = flat(model)
    sent = len(optimizer.comm.collectives.counter.records)
    after = []
    for step in range(LONG, LONG + 3):  # as if nothing had been
        descend(model, optimizer, shard(run.batch(step), rank, world), run)
        after.append(flat(model))
    stages = {record.stage for record in optimizer.comm.collectives.counter.records[sent:]}
    steps = [float(optimizer.state[p]["step"]) for p in model.parameters()]
    return {
        "inside": torch.stack(inside), "path": torch.stack([at_end, *after]), "steps": steps,
        "owners": owned(optimizer), "stages": stages, "t": optimizer.steps, "live": optimizer._join_config.enable,
    }  # fmt: skip


@each(method=["kfac_eigen", "ekfac_intra"], strategy=["mem", "comm"], early=[0, 1])
def test_a_rank_that_ends_early_takes_the_steps_of_the_others(
    pool: Pool, method: str, strategy: str, early: int
) -> None:
    answers = pool.run(uneven, strategy, Run(method=method, keywords=EAGER), early)
    assert_replicas([answer["path"] for answer in answers])
    for answer in answers:
        assert early in answer["owners"]
        assert set(answer["steps"]) == {LONG + 3.0}
        assert answer["t"] == LONG + 3
        assert not answer["live"]
        assert "copies" not in answer["stages"]
    live, joined = answers[1 - early]["inside"], answers[early]["inside"]
    assert torch.equal(live[:SHORT], joined)
    assert not torch.equal(live[SHORT - 1], live[SHORT])


@pytest.mark.parametrize("method", ["kfac_eigen", "ekfac_intra", "mfac"])
def test_last_steps_are_those_of_the_live_rank(pool: Pool, method: str) -> None:
    """DDP divides by the first number of ranks: a joined rank counts as one whose gradient is zero."""
    run = Run(method=method, keywords={} if method == "mfac" else EAGER)
    answers = pool.run(uneven, "mem", run, 0)
    reference = pool.run(halved, run, world=1)[0]
    assert_replicas([answer["path"] for answer in answers])
    assert distance(answers[1]["inside"], reference) < 1e-9


def halved(rank: int, world: int, run: Run) -> Tensor:
    """One process on both halves of a batch, then on the second half alone with half of its gradient."""
    model = TASKS[run.task].model()
    optimizer = build(run.method, model, **run.keywords)
    path = []
    for step in range(LONG):
        inputs, targets = run.batch(step)
        if step >= SHORT:
            inputs, targets = shard((inputs, targets), 1, 2)
        optimizer.zero_grad()
        run.loss(model(inputs), targets).backward()
        for p in model.parameters():
            p.grad.mul_(1.0 if step < SHORT else 0.5)
        optimizer.step()
        path.append(flat(model))
    return torch.stack(path)


@pytest.mark.slow
@product(method=["kfac_cholesky", "hylo_sngd", "hylo_kid", "mfac", "mfac_sparse", "ggt"], strategy=["mem", "comm"])
def test_every_method_under_uneven_inputs(pool: Pool, method: str, strategy: str) -> None:
    answers = pool.run(uneven, strategy, Run(method=method), 0)
    assert_replicas([answer["path"] for answer in answers])


@pytest.mark.parametrize(("strategy", "world"), [("hybrid_half", 4), ("local_factors", 2), ("chief", 3)])
def test_other_worlds_and_strategies(pool: Pool, strategy: str, world: int) -> None:
    answers = pool.run(uneven, strategy, Run(keywords=EAGER), 0, world=world)
    assert_replicas([answer["path"] for answer in answers])
    assert {tuple(answer["steps"]) for answer in answers} == {(LONG + 3.0,) * 6}


def test_without_ddp(pool: Pool) -> None:
    """Where the optimizer averages the gradients itself, it is the only one to join."""
    answers = pool.run(uneven, "mem", Run(keywords=EAGER), 0, False)
    with_ddp = pool.run(uneven, "mem", Run(keywords=EAGER), 0)
    assert_replicas([answer["path"] for answer in answers])
    assert distance(answers[0]["path"], with_ddp[0]["path"]) < 1e-9


def messages(rank: int, world: int, mode: str) -> tuple[list[Any], Tensor]:
    run = Run(keywords=EAGER)
    model = DDP(TASKS[run.task].model(device_of(rank)))
    optimizer = build(run.method, model, STRATEGIES["mem"](), **run.keywords)
    with Join([model, optimizer], enable=mode == "on") if mode != "none" else nullcontext():
        for batch in batches(rank, world, run, 4):
            descend(model, optimizer, batch, run)
    return [tuple(record) for record in optimizer.comm.collectives.counter.records], flat(model)


def test_even_inputs_cost_one_word_a_step_and_one_at_the_end(pool: Pool) -> None:
    (outside, plain), (disabled, _), (inside, joined) = (pool.run(messages, mode)[0] for mode in ("none", "off", "on"))
    assert disabled == outside
    assert len(inside) == len(outside) + 4 + 1
    assert torch.equal(plain, joined)


def early_termination(rank: int, world: int) -> tuple[str, str]:
    run = Run(keywords=EAGER)
    model = DDP(TASKS[run.task].model(device_of(rank)))
    optimizer = build(run.method, model, STRATEGIES["mem"](), **run.keywords)

    def train() -> None:
        with Join([model, optimizer], throw_on_early_termination=True):
            for batch in batches(rank, world, run, SHORT if rank == 0 else LONG):
                descend(model, optimizer, batch, run)

    return raised(train)


def test_early_termination_raises_everywhere(pool: Pool) -> None:
    answers = pool.run(early_termination, world=2, timeout=30)
    assert [kind for kind, _ in answers] == ["RuntimeError"] * 2
    assert all("exhausted" in text for _, text in answers)


def refusals(rank: int, world: int) -> list[tuple[str, str]]:
    model = TASKS["mlp"].model(device_of(rank))
    scaled = build("kfac_eigen", model, STRATEGIES["comm"](), grad_scaler=torch.amp.GradScaler("cpu"))
    judged = KFAC(model, comm=STRATEGIES["comm"](), adaptive_damping=True)
    return [raised(Join, [optimizer]) for optimizer in (scaled, judged)]


def test_what_a_rank_without_data_cannot_do_is_refused(pool: Pool) -> None:
    for of_rank in pool.run(refusals):
        for (kind, text), word in zip(of_rank, ("grad_scaler", "adaptive_damping"), strict=True):
            assert kind == "NotImplementedError"
            assert word in text


def test_copies_are_joinable_and_outside_of_any_join() -> None:
    model = TASKS["mlp"].model()
    optimizer = build("mfac", model)
    twin = copy.deepcopy(optimizer)
    assert isinstance(twin, Joinable)
    assert not twin._join_config.enable
    assert_identical(twin.state_dict(), optimizer.state_dict())


def rescheduled(rank: int, world: int) -> Tensor:
    """An interval changes where data go on; the other rank has to measure in the same steps."""
    run = Run(keywords={"factor_update_steps": 4, "inv_update_steps": 8, "refresh_warmup": False})
    model = DDP(TASKS[run.task].model(device_of(rank)))
    optimizer = build(run.method, model, STRATEGIES["comm"](), **run.keywords)
    with Join([model, optimizer]):
        for step in range(10 if rank == 0 else 4):
            if step == 6:
                optimizer.param_groups[0]["factor_update_steps"] = 3
            descend(model, optimizer, shard(run.batch(step), rank, world), run)
    return flat(model)


def test_ranks_without_data_follow_an_interval_that_changes(pool: Pool) -> None:
    first, second = pool.run(rescheduled)
    assert torch.equal(first, second)
