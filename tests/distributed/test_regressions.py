"""Ways in which ranks once drifted apart, waited for each other or lost state, each in a few steps of a tiny model."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from secondorder import EKFAC, KFAC, MFAC, CommOpt, HyLo, MemOpt
from tests.support.pool import Pool
from tests.support.saving import raised

WORLD, EXAMPLES = 2, 6
OPTIONS: dict[str, Any] = {
    "lr": 0.1, "damping": 0.1, "factor_update_steps": 1, "inv_update_steps": 4, "refresh_warmup": False
}  # fmt: skip
LEAN = {**OPTIONS, "checkpoint_curvature": "factors"}
STRATEGIES: dict[str, Any] = {"comm": CommOpt, "mem": MemOpt}


def _net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def _loss(model: nn.Module, step: int, rank: int | None = None) -> Tensor:
    """Of this rank's part of a batch, or of all of it."""
    x = torch.randn(WORLD * EXAMPLES, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return model(x if rank is None else x.chunk(WORLD)[rank]).square().mean()


def _train(model: nn.Module, optimizer: Any, rank: int | None, first: int, last: int) -> Tensor:
    """Take some steps; the parameters after them, flat."""
    for step in range(first, last):
        optimizer.zero_grad()
        _loss(model, step, rank).backward()
        optimizer.step()
    return _flat(model)


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def _mem(**keywords: Any) -> MemOpt:
    return MemOpt(average_gradients=True, **keywords)


def _close(found: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


# ---------------------------------------------------------------------------------------------------------------------
# Statistics of the last batch
# ---------------------------------------------------------------------------------------------------------------------


def _factors(optimizer: Any) -> dict[tuple[int, str], Tensor]:
    state = optimizer.state_dict()["state"]
    return {(i, key): v for i, found in state.items() for key, v in found.items() if key in ("factor_a", "factor_g")}


def _consolidated(rank: int, world: int) -> dict[tuple[int, str], Tensor]:
    model = _net()
    optimizer = KFAC(model, comm=_mem(), **{**OPTIONS, "inv_update_steps": 10})
    _train(model, optimizer, rank, 0, 5)
    optimizer.consolidate_state_dict()
    return _factors(optimizer) if rank == 0 else {}


def test_consolidated_factors_have_the_last_batch(pool: Pool) -> None:
    model = _net()
    alone = KFAC(model, **{**OPTIONS, "inv_update_steps": 10})
    _train(model, alone, None, 0, 5)
    expected = _factors(alone)
    found, _ = pool.run(_consolidated)
    assert len(expected) == 6
    assert found.keys() == expected.keys()
    for place, factor in expected.items():
        _close(found[place], factor)


def _decaying(rank: int | None, model: nn.Module, optimizer: KFAC) -> Tensor:
    for step in range(9):
        for group in optimizer.param_groups:
            group["factor_decay"] = 0.5 if step % 2 else 0.9
        _train(model, optimizer, rank, step, step + 1)
    return _flat(model)


def _decaying_ranks(rank: int, world: int) -> list[Tensor]:
    found = []
    for make in STRATEGIES.values():
        model = _net()
        with KFAC(model, comm=make(average_gradients=True), **OPTIONS) as optimizer:
            found.append(_decaying(rank, model, optimizer))
    return found


def test_a_decay_edited_between_steps_is_that_of_the_step_that_measured(pool: Pool) -> None:
    model = _net()
    expected = _decaying(None, model, KFAC(model, **OPTIONS))
    for of_rank in pool.run(_decaying_ranks):
        for params in of_rank:
            _close(params, expected)


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints without curvature
# ---------------------------------------------------------------------------------------------------------------------


def _interrupted(rank: int, world: int, strategy: str, chosen: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Parameters of a run, and of one that another optimizer went on with right after a refresh."""

    def make(model: nn.Module) -> EKFAC:
        return EKFAC(model, comm=STRATEGIES[strategy](average_gradients=True), **LEAN, **chosen)

    model = _net()
    optimizer = make(model)
    _train(model, optimizer, rank, 0, 5)
    other = copy.deepcopy(model)
    saved = copy.deepcopy(optimizer.state_dict())
    expected = _train(model, optimizer, rank, 5, 12)
    fresh = make(other)
    fresh.load_state_dict(saved)
    return expected, _train(other, fresh, rank, 5, 12)


@pytest.mark.filterwarnings("ignore:.*partial")
@pytest.mark.parametrize("chosen", [{"estimator": "running"}, {"estimator": "intra", "scale_update_steps": 2}])
@pytest.mark.parametrize("strategy", ["comm", "mem"])
def test_ekfac_goes_on_exactly_from_factors_and_scale(pool: Pool, strategy: str, chosen: dict[str, Any]) -> None:
    for expected, found in pool.run(_interrupted, strategy, chosen):
        _close(found, expected, 1e-10)


def _renewed_late(rank: int, world: int) -> dict[str, tuple[Tensor, list[int]]]:
    model = _net()
    optimizer = KFAC(model, comm=_mem(), **LEAN)
    _train(model, optimizer, rank, 0, 5)
    optimizer.consolidate_state_dict(to=None)
    saved, trained = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model)
    found = {}
    for how in ("once", "twice", "copied"):
        model = copy.deepcopy(trained)
        optimizer = KFAC(model, comm=_mem(), **LEAN)
        optimizer.load_state_dict(saved)
        if how == "twice":
            optimizer.load_state_dict(optimizer.state_dict())
        if how == "copied":
            model, optimizer = copy.deepcopy(model), copy.deepcopy(optimizer)
            optimizer.attach(model)
        refreshes = [optimizer.state[block.owner]["refreshes"] for block in optimizer.preconditioner.plan.blocks]
        found[how] = _train(model, optimizer, rank, 5, 9), refreshes
    return found


@pytest.mark.filterwarnings("ignore:.*partial")
def test_loaded_factors_may_be_saved_and_copied_before_the_first_step(pool: Pool) -> None:
    first, second = pool.run(_renewed_late)
    expected = first["once"][0]
    for how in ("once", "twice", "copied"):
        assert torch.equal(first[how][0], second[how][0])
        assert torch.equal(first[how][0], expected)
        assert first[how][1] == second[how][1] == [2, 2, 2]


# ---------------------------------------------------------------------------------------------------------------------
# What ranks must have in common
# ---------------------------------------------------------------------------------------------------------------------


def _apart_at_the_start(rank: int, world: int) -> dict[str, tuple[str, str]]:
    bare = _net()
    found = {"not averaged": raised(_train, bare, KFAC(bare, **OPTIONS), rank, 0, 1)}
    seeded = _net(rank)
    averaging = KFAC(seeded, comm=_mem(), **OPTIONS)
    return {**found, "other seeds": raised(_train, seeded, averaging, rank, 0, 1)}


def test_ranks_that_start_apart_are_told_at_the_first_step(pool: Pool) -> None:
    for found in pool.run(_apart_at_the_start):
        for case, words in (
            ("not averaged", "gradients of the first step"),
            ("other seeds", "values of the parameters"),
        ):
            kind, text = found[case]
            assert kind == "ValueError"
            assert words in text


def _other_options(rank: int, world: int) -> dict[str, tuple[str, str]]:
    own: dict[str, dict[str, Any]] = {
        "stagger": {"stagger": rank == 0},
        "refresh_warmup": {"refresh_warmup": rank == 0},
        "fisher": {"fisher": "mc" if rank == 0 else "exact"},
        "damping_interval": {"adaptive_damping": True, "damping_interval": 2 + rank},
    }
    found = {}
    for name, chosen in own.items():
        found[name] = raised(KFAC, _net(), comm=CommOpt(average_gradients=True), **{**OPTIONS, **chosen})
    return found


def test_options_of_the_whole_optimizer_must_be_equal_on_all_ranks(pool: Pool) -> None:
    for found in pool.run(_other_options):
        assert len(found) == 4
        for name, (kind, text) in found.items():
            assert kind == "ValueError", name
            assert name in text


def _loaded_on_one(rank: int, world: int) -> tuple[str, str]:
    model = _net()
    optimizer = KFAC(model, comm=CommOpt(average_gradients=True), **OPTIONS)
    _train(model, optimizer, rank, 0, 5)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.close()
    optimizer = KFAC(model, comm=CommOpt(average_gradients=True), **OPTIONS)
    if rank == 0:
        optimizer.load_state_dict(saved)
    return raised(_train, model, optimizer, rank, 5, 6)


def test_a_checkpoint_loaded_on_one_rank_alone_is_told_at_the_first_step(pool: Pool) -> None:
    for kind, text in pool.run(_loaded_on_one):
        assert kind == "ValueError"
        assert "steps taken" in text


# ---------------------------------------------------------------------------------------------------------------------
# Gradients that the strategy averages
# ---------------------------------------------------------------------------------------------------------------------


def _scaled(rank: int, world: int) -> tuple[tuple[str, str], tuple[str, str], tuple[str, str]]:
    def make(scaler: Any, comm: Any) -> KFAC:
        return KFAC(_net(), comm=comm, grad_scaler=scaler, **OPTIONS)

    at_birth = raised(make, torch.amp.GradScaler("cpu"), _mem())
    late = raised(setattr, make(None, _mem()), "grad_scaler", torch.amp.GradScaler("cpu"))
    make(torch.amp.GradScaler("cpu", enabled=False), _mem())
    return at_birth, late, raised(make, torch.amp.GradScaler("cpu"), MemOpt())


def test_a_loss_scaler_is_refused_where_gradients_are_averaged_after_it(pool: Pool) -> None:
    for *refused, allowed in pool.run(_scaled):
        for kind, text in refused:
            assert kind == "NotImplementedError"
            assert "average_gradients=True" in text
        assert allowed == ("", "")


def _averaged_halves(rank: int, world: int) -> list[float]:
    layer = nn.Linear(4, 4).half()
    optimizer = MFAC(layer.parameters(), lr=0.1, comm=_mem())
    for p in layer.parameters():
        p.grad = torch.full_like(p, 40000.0 + 16384.0 * rank)
    optimizer.comm.average_gradients(list(layer.parameters()))
    return [value for p in layer.parameters() for value in (p.grad.min().item(), p.grad.max().item())]


def test_the_mean_of_large_float16_gradients_is_finite(pool: Pool) -> None:
    assert pool.run(_averaged_halves) == [[48192.0] * 4] * 2


# ---------------------------------------------------------------------------------------------------------------------
# Strategies, copies and groups
# ---------------------------------------------------------------------------------------------------------------------


def _hooks(model: nn.Module) -> int:
    return sum(
        len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules()
    )  # fmt: skip


def _refused_second(rank: int, world: int) -> tuple[Tensor, Tensor, tuple[str, str], int, Tensor]:
    undisturbed = _net()
    with KFAC(undisturbed, comm=_mem(), **OPTIONS) as optimizer:
        expected = _train(undisturbed, optimizer, rank, 0, 7)
    comm, model, other = _mem(), _net(), nn.Sequential(nn.Linear(5, 3)).double()
    optimizer = KFAC(model, comm=comm, **OPTIONS)
    _train(model, optimizer, rank, 0, 3)
    refusal = raised(KFAC, other, comm=comm, **OPTIONS)
    hooks = _hooks(other)
    found = _train(model, optimizer, rank, 3, 7)
    optimizer.close()
    model = _net()
    again = _train(model, KFAC(model, comm=comm, **OPTIONS), rank, 0, 7)
    return expected, found, refusal, hooks, again


def test_a_strategy_goes_on_serving_its_optimizer_and_another_one_after_it(pool: Pool) -> None:
    for expected, found, (kind, text), hooks, again in pool.run(_refused_second):
        assert kind == "ValueError"
        assert "serves another optimizer already" in text
        assert hooks == 0
        assert torch.equal(found, expected)
        assert torch.equal(again, expected)


def _verified_copy(rank: int, world: int) -> tuple[Tensor, Tensor]:
    model = _net()
    optimizer = KFAC(model, comm=_mem(verify_every=1), **OPTIONS)
    _train(model, optimizer, rank, 0, 3)
    twin, copied = copy.deepcopy(model), copy.deepcopy(optimizer)
    copied.attach(twin)
    return _train(twin, copied, rank, 3, 7), _train(model, optimizer, rank, 3, 7)


def test_copies_are_verified_too(pool: Pool) -> None:
    for copied, own in pool.run(_verified_copy):
        assert torch.equal(copied, own)


def _outlived(rank: int, world: int, directory: str) -> int:
    def left_over() -> tuple[nn.Module, KFAC]:
        model = _net()
        optimizer = KFAC(model, comm=_mem(), **{**OPTIONS, "inv_update_steps": 10})
        _train(model, optimizer, rank, 0, 3)
        return model, optimizer

    (model, optimizer), (other, second) = left_over(), left_over()
    dist.destroy_process_group()
    second.close()
    dist.init_process_group("gloo", init_method=f"file://{directory}/again", rank=rank, world_size=world)
    for _ in range(2):
        optimizer.close()
    return _hooks(model) + _hooks(other)


def test_closing_outlives_the_default_group(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(_outlived, str(tmp_path)) == [0, 0]


@pytest.mark.parametrize("method", [KFAC, EKFAC, HyLo])
def test_one_process_plans_after_a_step(method: Any) -> None:
    model = _net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = method(model, lr=0.1)
        _train(model, optimizer, None, 0, 1)
        assert optimizer.plan().world_size == 1
        assert optimizer.plan(world_size=4).world_size == 4


# ---------------------------------------------------------------------------------------------------------------------
# Uneven inputs
# ---------------------------------------------------------------------------------------------------------------------


def _rescheduled(rank: int, world: int) -> Tensor:
    bare = _net()
    model = DistributedDataParallel(bare)
    optimizer = KFAC(bare, comm=CommOpt(), **{**OPTIONS, "factor_update_steps": 4, "inv_update_steps": 8})
    with Join([model, optimizer]):
        for step in range(10 if rank == 0 else 4):
            if step == 6:
                for group in optimizer.param_groups:
                    group["factor_update_steps"] = 3
            _train(model, optimizer, rank, step, step + 1)
    return _flat(bare)


def test_ranks_without_data_follow_an_interval_that_changes(pool: Pool) -> None:
    first, second = pool.run(_rescheduled)
    assert torch.equal(first, second)
