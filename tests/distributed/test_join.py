"""`torch.distributed.algorithms.join`: ranks whose data end early, including owners of layers."""

import copy
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel import DistributedDataParallel as DDP

from secondorder import KFAC, AdaptationOptions
from tests.support.grid import only
from tests.support.oracles.ranks import STRATEGIES, TASKS, Run, assert_replicas, build, distance, flat, shard
from tests.support.pool import Pool, device_of, everywhere, on_every_rank
from tests.support.saving import train
from tests.support.tasks import assert_identical

LONG, SHORT = 5, 3
EAGER = {"factor_update_steps": 1, "inv_update_steps": 2}


def joined(rank: int, strategy: str, run: Run, wrapped: bool = True) -> tuple[nn.Module, Any, list[Any]]:
    """A model, its optimizer, and the list of joinables."""
    model = TASKS[run.task].model(device_of(rank))
    model = DDP(model) if wrapped else model
    optimizer = build(run.method, model, STRATEGIES[strategy](average_gradients=not wrapped), **run.keywords)
    return model, optimizer, [model, optimizer] if wrapped else [optimizer]


def uneven(rank: int, world: int, strategy: str, run: Run, early: int, wrapped: bool = True) -> dict[str, Any]:
    """Train with fewer batches on one rank; return paths, counters and owners."""
    model, optimizer, joinables = joined(rank, strategy, run, wrapped)
    with Join(joinables):
        inside = train(model, optimizer, rank, world, run, 0, SHORT if rank == early else LONG)
    at_end = flat(model)
    sent = len(optimizer.comm.collectives.counter.records)
    after = train(model, optimizer, rank, world, run, LONG, LONG + 3)
    return {
        "inside": torch.stack(inside),
        "path": torch.stack([at_end, *after]),
        "steps": [float(optimizer.state[p]["step"]) for p in model.parameters()],
        "owners": [optimizer.comm.owner(i) for i in range(len(optimizer.preconditioner.plan.by_name))],
        "stages": {record.stage for record in optimizer.comm.collectives.counter.records[sent:]},
        "t": optimizer.steps,
        "live": optimizer._join_config.enable,
    }


def shortened(run: Run, world: int, early: int) -> Tensor:
    """Train one process on full batches, and then without the part of one rank, which counts as a gradient of zero."""
    model = TASKS[run.task].model()
    optimizer = build(run.method, model, **run.keywords)
    path = []
    for step in range(LONG):
        live = [shard(run.batch(step), rank, world) for rank in range(world) if step < SHORT or rank != early]
        inputs, targets = (torch.cat(parts) for parts in zip(*live, strict=True))
        optimizer.zero_grad()
        run.loss(model(inputs), targets).backward()
        for p in model.parameters():
            p.grad.mul_(len(live) / world)
        optimizer.step()
        path.append(flat(model))
    return torch.stack(path)


METHODS = ("ekfac_intra", "kfac_cholesky", "hylo_sngd", "hylo_kid", "mfac", "mfac_sparse", "ggt")
CASES = [("kfac_eigen", strategy) for strategy in ("mem", "hybrid_half", "local_factors", "chief")]
CASES += [(method, strategy) for method in METHODS for strategy in ("mem", "comm")]


@only(
    "kfac_eigen-mem", "kfac_eigen-hybrid_half", "kfac_eigen-local_factors", "kfac_eigen-chief", "ekfac_intra-comm",
    "ekfac_intra-mem", "mfac-mem", of={"-".join(case): case for case in CASES},
)  # fmt: skip
def test_a_rank_that_ends_early_takes_the_steps_of_the_others(pool: Pool, of: tuple[str, str]) -> None:
    method, strategy = of
    eager = method in ("kfac_eigen", "ekfac_intra")
    run, early = Run(method=method, keywords=EAGER if eager else {}), int(strategy == "comm")
    world = {"hybrid_half": 4, "chief": 3}.get(strategy, 2)
    answers = pool.run(uneven, strategy, run, early, world=world)
    assert_replicas([answer["path"] for answer in answers])
    for answer in answers:
        assert not eager or early in answer["owners"]
        assert set(answer["steps"]) == {LONG + 3.0}
        assert answer["t"] == LONG + 3
        assert not answer["live"]
        assert "copies" not in answer["stages"]
    live, joined = answers[1 - early]["inside"], answers[early]["inside"]
    assert torch.equal(live[:SHORT], joined)
    if strategy != "local_factors" and method != "hylo_kid":  # they use the examples of each rank alone
        assert distance(live, shortened(run, world, early)) < 1e-9


def test_an_optimizer_that_averages_gradients_joins_without_ddp(pool: Pool) -> None:
    answers = pool.run(uneven, "mem", Run(keywords=EAGER), 0, False)
    assert_replicas([answer["path"] for answer in answers])
    assert distance(answers[1]["inside"], shortened(Run(keywords=EAGER), 2, 0)) < 1e-9


@on_every_rank(2)
def test_even_inputs_need_one_message_per_step_and_one_at_the_end(rank: int, world: int) -> None:
    run, records, ends = Run(keywords=EAGER), {}, {}
    for mode in ("none", "off", "on"):
        model, optimizer, joinables = joined(rank, "mem", run)
        with Join(joinables, enable=mode == "on") if mode != "none" else nullcontext():
            ends[mode] = train(model, optimizer, rank, world, run, 0, 4)[-1]
        records[mode] = [tuple(record) for record in optimizer.comm.collectives.counter.records]
    assert records["off"] == records["none"]
    assert len(records["on"]) == len(records["none"]) + 4 + 1
    assert torch.equal(ends["none"], ends["on"])


@on_every_rank(2, timeout=30)
def test_early_termination_raises_everywhere(rank: int, world: int) -> None:
    run = Run(keywords=EAGER)
    model, optimizer, joinables = joined(rank, "mem", run)
    with pytest.raises(RuntimeError, match="exhausted"), Join(joinables, throw_on_early_termination=True):
        train(model, optimizer, rank, world, run, 0, SHORT if rank == 0 else LONG)


@on_every_rank(2)
def test_options_that_need_data_on_every_rank_are_refused(rank: int, world: int) -> None:
    model = TASKS["mlp"].model(device_of(rank))
    scaled = build("kfac_eigen", model, STRATEGIES["comm"](), grad_scaler=torch.amp.GradScaler("cpu"))
    judged = KFAC(model, comm=STRATEGIES["comm"](), adaptation=AdaptationOptions(adaptive_damping=True))
    for optimizer, word in ((scaled, "grad_scaler"), (judged, "adaptive_damping")):
        with pytest.raises(NotImplementedError, match=word):
            Join([optimizer])


def test_a_copy_is_joinable_and_not_in_a_join() -> None:
    model = TASKS["mlp"].model()
    optimizer = build("mfac", model)
    twin = copy.deepcopy(optimizer)
    assert isinstance(twin, Joinable)
    assert not twin._join_config.enable
    assert_identical(twin.state_dict(), optimizer.state_dict())


def test_a_rank_without_data_discards_its_last_batch_before_it_steps() -> None:
    model = TASKS["mlp"].model()
    optimizer, seen = build("kfac_eigen", model), Mock()
    model(TASKS["mlp"].batch(0)[0]).sum().backward()
    optimizer.preconditioner.hooks.discard, optimizer.step = seen.discard, seen.step
    optimizer.join_hook().main_hook()
    assert seen.mock_calls == [call.discard(), call.step()]
    assert all(p.grad is None for p in model.parameters())


@on_every_rank(2)
def test_ranks_without_data_follow_options_that_change(rank: int, world: int) -> None:
    """They change on the rank that still has data, and the other rank has to measure in the same steps."""
    for rule in ({"graft": "adam"}, {"fallback": "adamw"}):  # Adam's rule for covered parameters, and for the others
        check_options_that_change(rank, world, rule)


def check_options_that_change(rank: int, world: int, rule: dict[str, str]) -> None:
    rate, own = torch.tensor(0.05, dtype=torch.float64), {"factor_update_steps": 4, "inv_update_steps": 8}
    run = Run(keywords={**own, **rule, "lr": rate, "refresh_warmup": False})
    model, optimizer, joinables = joined(rank, "comm", run)
    (group,) = optimizer.param_groups
    with Join(joinables):
        train(model, optimizer, rank, world, run, 0, 4)
        if rank == 0:
            train(model, optimizer, rank, world, run, 4, 6)
            group.update(factor_update_steps=3, betas=(0.5, 0.75))
            rate.fill_(0.02)
            train(model, optimizer, rank, world, run, 6, 10)
            group.update(inv_update_steps=12)  # after the last step
    assert group["lr"] is rate
    assert (float(rate), group["betas"], group["graft"]) == (0.02, (0.5, 0.75), rule.get("graft"))
    assert (group["factor_update_steps"], group["inv_update_steps"]) == (3, 12)
    assert_identical(*everywhere(flat(model)))


@on_every_rank(2)
def test_ranks_without_data_adopt_sparse_and_missing_gradients(rank: int, world: int) -> None:
    p, q, frozen = (nn.Parameter(torch.zeros(2), requires_grad=trains) for trains in (True, True, False))
    optimizer = build("mfac", [p, q, frozen], STRATEGIES["comm"](), graft="sgd", momentum=0.0, lr=0.5)
    with Join([optimizer]):
        if rank == 0:
            p.grad = torch.tensor([0.0, 4.0]).to_sparse()
            optimizer.step()
    assert p.tolist() == [0.0, -2.0]
    assert q.grad is None
    assert p.grad is not None
    assert p.grad.to_dense().tolist() == [0.0, 4.0]
