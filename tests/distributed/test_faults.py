"""Failures of one rank: all other ranks raise an error that describes it, or one after the timeout."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from secondorder import EKFAC, KFAC, MFAC, AdaptationOptions, CommOpt, HybridOpt, MemOpt, RefreshOptions
from secondorder.curvature.factorization import EIGEN
from secondorder.curvature.inverse import Eigen
from tests.support.grid import each, only
from tests.support.oracles.ranks import TASKS, Run, build, flat
from tests.support.pool import Pool, everywhere, on_every_rank
from tests.support.saving import raised, snapshot, started, train
from tests.support.tasks import assert_identical

LONG = 600.0  # seconds that no test can wait
EAGER = {"factor_update_steps": 1, "inv_update_steps": 1}


# --------------------------------------------------------------------------------------------------------------- Killed
# The victim is killed before its first message, between two messages, or after its last one.
MOMENTS = ("reduce", "refresh_due", "apply")
KILLS = {"mem": 3, "comm": 2, "hybrid_half": 4}


def killed(rank: int, world: int, strategy: str, victim: int, moment: str) -> int:
    run = Run(keywords=EAGER)
    model, optimizer = started(rank, strategy, run)
    train(model, optimizer, rank, world, run, 0, 2)
    if rank == victim:
        part = optimizer._update if moment == "apply" else optimizer.preconditioner
        setattr(part, moment, lambda *args: os.kill(os.getpid(), signal.SIGKILL))
    train(model, optimizer, rank, world, run, 2, 8)
    return rank


@only(
    "mem-last-refresh_due", "comm-first-reduce", strategy=list(KILLS), victim={"first": 0, "last": -1}, moment=MOMENTS
)
def test_peers_of_a_killed_rank_raise(pool: Pool, strategy: str, victim: int, moment: str) -> None:
    """No rank waits for the timeout of the group: the pool fails the test if it has to kill a rank."""
    world = KILLS[strategy]
    victim %= world
    answers = pool.run(
        killed, strategy, victim, moment, world=world, timeout=60, group_timeout=LONG, expect_failure=True
    )
    assert answers[victim][:2] == ("Died", f"exit code {-signal.SIGKILL}")
    for rank in set(range(world)) - {victim}:
        assert answers[rank].type == "RuntimeError", answers[rank]


def started_again(rank: int, world: int, strategy: str, how: str, folder: Path, killed: bool) -> Tensor:
    """Train from the last checkpoint, which is one file or one per rank; the last rank may be killed within a step."""
    run, every, model_file = Run(), 4, folder / "model.pt"
    file = folder / ("all.pt" if how == "one" else f"rank-{rank}.pt")
    model, optimizer = started(rank, strategy, run)
    first = 0
    if file.exists():
        first = every
        model.load_state_dict(torch.load(model_file, weights_only=True))
        optimizer.load_state_dict(torch.load(file, weights_only=True))
    train(model, optimizer, rank, world, run, first, every)
    if first == 0:
        if how == "one":
            optimizer.consolidate_state_dict()
        if rank == 0:
            torch.save(model.state_dict(), model_file)
        if how == "each" or rank == 0:
            torch.save(snapshot(optimizer), file)
        dist.barrier()
    if killed and rank == world - 1:
        optimizer.preconditioner.refresh_due = lambda: os.kill(os.getpid(), signal.SIGKILL)
    return torch.stack(train(model, optimizer, rank, world, run, every, 8))


@pytest.mark.parametrize(("strategy", "how"), [("mem", "one"), ("mem", "each"), ("comm", "one")])
def test_ranks_that_start_again_after_a_kill_end_as_if_nothing_had_happened(
    pool: Pool, tmp_path: Path, strategy: str, how: str
) -> None:
    limits = {"group_timeout": LONG, "expect_failure": True}
    disturbed = pool.run(started_again, strategy, how, tmp_path, True, **limits)
    assert [answer.type for answer in disturbed] == ["RuntimeError", "Died"]
    again = pool.run(started_again, strategy, how, tmp_path, False)
    (tmp_path / "undisturbed").mkdir()
    undisturbed = pool.run(started_again, strategy, how, tmp_path / "undisturbed", False)
    assert_identical(again, undisturbed)


# ------------------------------------------------------------------------------------------------- An error on one rank
def factorized_by(dense: Callable[..., Any]) -> Any:
    """Refresh eigenbases with another function."""
    return mock.patch.object(Eigen, "way", EIGEN._replace(dense=dense))


@each(method=["kfac_eigen", "ekfac_intra"], where=[("mem", 1), ("comm", 0), ("comm", 1)])
@on_every_rank(2)
def test_an_error_of_a_refresh_is_raised_on_all_ranks(
    rank: int, world: int, method: str, where: tuple[str, int]
) -> None:
    """The factorization of an owner raises, and all ranks can continue after it."""
    strategy, broken = where
    run = Run(method=method, keywords=EAGER)
    model, optimizer = started(rank, strategy, run)
    train(model, optimizer, rank, world, run, 0, 2)

    def wrong(*args: Any) -> Any:
        raise ValueError(f"injected on rank {rank}")

    with factorized_by(wrong if rank == broken else EIGEN.dense):
        kind, text = raised(train, model, optimizer, rank, world, run, 2, 3)
    assert kind == "RuntimeError"
    for word in (f"rank {broken}", "layer", "ValueError", f"injected on rank {broken}"):
        assert word in text
    assert everywhere(text) == [text] * world
    train(model, optimizer, rank, world, run, 3, 5)
    assert_identical(*everywhere(flat(model)))


@pytest.mark.parametrize("strategy", ["mem", "comm"])
@on_every_rank(2)
def test_too_many_failures_in_a_row_end_training_on_all_ranks(rank: int, world: int, strategy: str) -> None:
    """All factorizations of one owner fail."""
    run = Run(keywords={**EAGER, "max_failures": 3})
    model, optimizer = started(rank, strategy, run)
    train(model, optimizer, rank, world, run, 0, 1)
    right, counts = EIGEN.dense, []

    def bad(*args: Any) -> Any:
        *found, ok = right(*args)
        return (*found, torch.zeros_like(ok))

    with factorized_by(bad if rank == optimizer.comm.owner(0) else right):
        for step in (1, 2):
            train(model, optimizer, rank, world, run, step, step + 1)
            counts.append(optimizer.diagnostics()["refresh_failures"])
        kind, text = raised(train, model, optimizer, rank, world, run, 3, 4)
    assert kind == "RuntimeError"
    assert "layer '" in text
    assert "3 times in a row" in text
    assert_identical(*everywhere([counts, text, flat(model)]))


# --------------------------------------------------------------------------------------------- Ranks that are not alike
def _net(width: int = 6, dtype: torch.dtype = torch.float64, names: tuple[str, str] = ("first", "second")) -> nn.Module:
    net = nn.Sequential()
    net.add_module(names[0], nn.Linear(5, width))
    net.add_module(names[1], nn.Linear(width, 4))
    return net.to(dtype)


Build = Callable[[], Any]

UNLIKE: dict[str, tuple[Build, Build, str]] = {
    "width": (lambda: KFAC(_net()), lambda: KFAC(_net(7)), "weight"),
    "dtype": (lambda: KFAC(_net()), lambda: KFAC(_net(dtype=torch.float32)), "float32"),
    "names": (lambda: KFAC(_net()), lambda: KFAC(_net(names=("first", "last"))), "last"),
    "layers": (lambda: KFAC(_net()), lambda: KFAC(nn.Linear(5, 6).double()), "parameters"),
    "option": (lambda: KFAC(_net(), damping=0.1), lambda: KFAC(_net(), damping=0.2), "damping"),
    "skipped layer": (lambda: KFAC(_net()), lambda: KFAC(_net(), skip_layers="first"), "first"),
    "method": (lambda: KFAC(_net()), lambda: EKFAC(_net()), "EKFAC"),
    "window": (lambda: MFAC(_net(), window_size=4), lambda: MFAC(_net(), window_size=5), "window_size"),
    "stagger": (lambda: KFAC(_net(), refresh=RefreshOptions(stagger=True)), lambda: KFAC(_net()), "stagger"),
    "fisher": (lambda: KFAC(_net(), fisher="mc"), lambda: KFAC(_net(), fisher="exact"), "fisher"),
    "adaptive": (
        lambda: KFAC(_net(), adaptation=AdaptationOptions(adaptive_damping=True, damping_interval=2)),
        lambda: KFAC(_net(), adaptation=AdaptationOptions(adaptive_damping=True, damping_interval=3)),
        "damping_interval",
    ),
    "strategy": (lambda: KFAC(_net(), comm=CommOpt()), lambda: KFAC(_net(), comm=MemOpt()), "MemOpt"),
    "groups of ranks": (lambda: KFAC(_net(), comm=HybridOpt(0.5)), lambda: KFAC(_net(), comm=MemOpt()), "HybridOpt"),
}


@pytest.mark.parametrize("world", [2, 4])
@on_every_rank(timeout=60, group_timeout=LONG)
def test_ranks_that_are_not_alike_are_refused_everywhere(rank: int, world: int) -> None:
    """The error is immediate: no rank waits for a message until the timeout of the group."""
    for what, (*builds, word) in UNLIKE.items():
        if (what == "groups of ranks") == (world == 4):
            kind, text = raised(builds[rank == world - 1])
            assert kind == "ValueError", what
            assert "rank" in text, what
            assert any(word in of_rank for of_rank in everywhere(text)), what


@on_every_rank(2)
def test_different_initial_states_are_an_error_at_the_first_step(rank: int, world: int) -> None:
    """Causes are gradients that are not averaged, different seeds, and a checkpoint on one rank only."""
    bare = TASKS["mlp"].model()
    with pytest.raises(ValueError, match="gradients of the first step"):
        train(bare, build("kfac_eigen", bare), rank, world, Run(), 0, 1)
    seeded, averaging = started(rank, "mem", Run())
    with torch.no_grad():
        seeded[0].weight.add_(rank)
    with pytest.raises(ValueError, match="values of the parameters"):
        train(seeded, averaging, rank, world, Run(), 0, 1)
    model, optimizer = started(rank, "comm", Run())
    train(model, optimizer, rank, world, Run(), 0, 5)
    twin = build("kfac_eigen", model, CommOpt(average_gradients=True))
    if rank == 0:
        twin.load_state_dict(optimizer.state_dict())
    optimizer.close()
    with pytest.raises(ValueError, match="steps taken"):
        train(model, twin, rank, world, Run(), 5, 6)


@on_every_rank(2)
def test_an_optimizer_on_one_rank_only_is_refused(rank: int, world: int) -> None:
    """Rank 1 builds no optimizer, and stays alive until rank 0 has raised."""
    if rank == 0:
        kind, text = raised(KFAC, _net(), comm=MemOpt(timeout=1.0))
        assert kind == "RuntimeError"
        for word in ("within 1 s only rank 0 of 2 came", "Every rank", "construct the optimizer"):
            assert word in text
    dist.barrier()


@pytest.mark.slow
@on_every_rank(2, timeout=120, group_timeout=100)
def test_a_missing_rank_is_an_error_after_the_timeout(rank: int, world: int) -> None:
    """It is the timeout of the strategy, not that of the process group, and long enough to create groups when busy."""
    run = Run(keywords=EAGER)
    model, optimizer = started(rank, "mem", run, timeout=15.0)
    train(model, optimizer, rank, world, run, 0, 2)
    if rank == 0:  # rank 1 leaves the loop early and stays alive
        with pytest.raises(RuntimeError, match="imed out"):
            train(model, optimizer, rank, world, run, 2, 3)
    dist.barrier()
