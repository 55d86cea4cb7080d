"""What goes wrong on one rank: the others hear of it in words, or of its silence within the timeout."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from secondorder import EKFAC, KFAC, MFAC, CommOpt, HybridOpt, MemOpt
from secondorder.curvature import factorization
from tests.support.grid import each
from tests.support.oracles.ranks import TASKS, Run, build, flat
from tests.support.pool import Pool
from tests.support.saving import raised, started, train
from tests.support.tasks import assert_identical

LONG = 600.0  # seconds that no test can wait
EAGER = {"factor_update_steps": 1, "inv_update_steps": 1}


# ---------------------------------------------------------------------------------------------------------------------
# Killed
# ---------------------------------------------------------------------------------------------------------------------

# Where a step of the victim ends: before its first message, between two messages, after its last one.
MOMENTS = ("reduce", "refresh_due", "apply")


def killed(rank: int, world: int, strategy: str, victim: int, moment: str) -> int:
    run = Run(keywords=EAGER)
    model, optimizer = started(rank, strategy, run)
    train(model, optimizer, rank, world, run, 0, 2)
    if rank == victim:
        part = optimizer._update if moment == "apply" else optimizer.preconditioner
        setattr(part, moment, lambda *args: os.kill(os.getpid(), signal.SIGKILL))
    train(model, optimizer, rank, world, run, 2, 8)
    return rank


@pytest.mark.parametrize(
    ("strategy", "world", "victim", "moment"),
    [
        ("mem", 2, 1, "refresh_due"),
        ("comm", 2, 0, "reduce"),
        pytest.param("mem", 3, 0, "apply", marks=pytest.mark.slow),
        pytest.param("hybrid_half", 4, 3, "refresh_due", marks=pytest.mark.slow),
        *(pytest.param("mem", 2, v, m, marks=pytest.mark.slow) for v in (0, 1) for m in MOMENTS[::2]),
    ],
)
def test_peers_of_a_killed_rank_raise(pool: Pool, strategy: str, world: int, victim: int, moment: str) -> None:
    """None is left waiting, not even for the timeout of the group: the pool fails the test if it has to end a rank."""
    answers = pool.run(
        killed, strategy, victim, moment, world=world, timeout=60, group_timeout=LONG, expect_failure=True
    )
    assert answers[victim][:2] == ("Died", f"exit code {-signal.SIGKILL}")
    for rank in set(range(world)) - {victim}:
        assert answers[rank].type == "RuntimeError", answers[rank]


# ---------------------------------------------------------------------------------------------------------------------
# An error on one rank
# ---------------------------------------------------------------------------------------------------------------------


def broken_refresh(rank: int, world: int, strategy: str, method: str, broken: int) -> tuple[tuple[str, str], Any]:
    """An owner's factorisation raises; what every rank says, and whether they could go on."""
    run = Run(method=method, keywords=EAGER)
    model, optimizer = started(rank, strategy, run)
    train(model, optimizer, rank, world, run, 0, 2)
    right = factorization.eigh_psd

    def wrong(*args: Any) -> Any:
        raise ValueError(f"injected on rank {rank}")

    try:
        if rank == broken:
            factorization.eigh_psd = wrong
        answer = raised(train, model, optimizer, rank, world, run, 2, 3)
    finally:
        factorization.eigh_psd = right
    train(model, optimizer, rank, world, run, 3, 5)
    return answer, flat(model)


@each(method=["kfac_eigen", "ekfac_intra"], where=[("mem", 1), ("comm", 0), ("comm", 1)])
def test_an_error_of_a_refresh_is_raised_on_all_ranks(pool: Pool, method: str, where: tuple[str, int]) -> None:
    strategy, broken = where
    answers = pool.run(broken_refresh, strategy, method, broken, world=2)
    (first, path), (second, other) = answers
    assert first == second
    kind, text = first
    assert kind == "RuntimeError"
    for word in (f"rank {broken}", "layer", "ValueError", f"injected on rank {broken}"):
        assert word in text
    assert torch.equal(path, other)


def failing_refresh(rank: int, world: int, strategy: str, most: int) -> tuple[list[int], tuple[str, str], Any]:
    """One owner's results are never good: steps that were taken, and the error that ends them."""
    run = Run(keywords={**EAGER, "max_failures": most})
    model, optimizer = started(rank, strategy, run)
    train(model, optimizer, rank, world, run, 0, 1)
    right, victim = factorization.eigh_psd, optimizer.comm.owner(0)

    def bad(*args: Any) -> Any:
        *found, ok = right(*args)
        return (*found, torch.zeros_like(ok))

    counts = []
    try:
        if rank == victim:
            factorization.eigh_psd = bad
        answer = ("", "")
        for step in range(1, 6):
            answer = raised(train, model, optimizer, rank, world, run, step, step + 1)
            if answer[0]:
                break
            counts.append(optimizer.diagnostics()["refresh_failures"])
    finally:
        factorization.eigh_psd = right
    return counts, answer, flat(model)


def test_too_many_failures_in_a_row_end_training_on_all_ranks(pool: Pool) -> None:
    for strategy in ["mem", "comm"]:
        first, second = pool.run(failing_refresh, strategy, 3, world=2)
        assert_identical(first, second)
        counts, (kind, text), _ = first
        assert len(counts) == 2
        assert kind == "RuntimeError"
        assert "layer '" in text
        assert "3 times in a row" in text


# ---------------------------------------------------------------------------------------------------------------------
# Ranks that are not alike
# ---------------------------------------------------------------------------------------------------------------------


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
    "intervals": (
        lambda: KFAC(_net(), factor_update_steps=2, inv_update_steps=4),
        lambda: KFAC(_net(), factor_update_steps=2, inv_update_steps=6),
        "inv_update_steps",
    ),
    "skipped layer": (lambda: KFAC(_net()), lambda: KFAC(_net(), skip_layers="first"), "first"),
    "method": (lambda: KFAC(_net()), lambda: EKFAC(_net()), "EKFAC"),
    "family": (lambda: KFAC(_net()), lambda: MFAC(_net()), "MFAC"),
    "window": (lambda: MFAC(_net(), window_size=4), lambda: MFAC(_net(), window_size=5), "window_size"),
    "stagger": (lambda: KFAC(_net(), stagger=True), lambda: KFAC(_net()), "stagger"),
    "refresh_warmup": (lambda: KFAC(_net()), lambda: KFAC(_net(), refresh_warmup=False), "refresh_warmup"),
    "fisher": (lambda: KFAC(_net(), fisher="mc"), lambda: KFAC(_net(), fisher="exact"), "fisher"),
    "adaptive": (
        lambda: KFAC(_net(), adaptive_damping=True, damping_interval=2),
        lambda: KFAC(_net(), adaptive_damping=True, damping_interval=3),
        "damping_interval",
    ),
    "strategy": (lambda: KFAC(_net(), comm=CommOpt()), lambda: KFAC(_net(), comm=MemOpt()), "MemOpt"),
    "groups of ranks": (lambda: KFAC(_net(), comm=HybridOpt(0.5)), lambda: KFAC(_net(), comm=MemOpt()), "HybridOpt"),
}


def unlike(rank: int, world: int, cases: list[str]) -> dict[str, tuple[str, str]]:
    """The last rank builds something else; what every rank says."""
    return {what: raised(UNLIKE[what][rank == world - 1]) for what in cases}  # type: ignore[arg-type]


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_are_not_alike_are_refused_everywhere(pool: Pool, world: int) -> None:
    """At once: no message is missed, for which ranks would wait as long as the group allows."""
    cases = [what for what in UNLIKE if (what == "groups of ranks") == (world == 4)]
    answers = pool.run(unlike, cases, world=world, timeout=60, group_timeout=LONG)
    for what in cases:
        assert [of_rank[what][0] for of_rank in answers] == ["ValueError"] * world, answers
        texts = [of_rank[what][1] for of_rank in answers]
        assert any(UNLIKE[what][2] in text for text in texts), texts
        assert all("rank" in text for text in texts)


def apart(rank: int, world: int) -> dict[str, tuple[str, str]]:
    """What the first step says of gradients that nobody averages, other seeds, and a checkpoint that one rank has."""
    bare = TASKS["mlp"].model()
    found = {"gradients of the first step": raised(train, bare, build("kfac_eigen", bare), rank, world, Run(), 0, 1)}
    seeded, averaging = started(rank, "mem", Run())
    with torch.no_grad():
        seeded[0].weight.add_(rank)
    found["values of the parameters"] = raised(train, seeded, averaging, rank, world, Run(), 0, 1)
    model, optimizer = started(rank, "comm", Run())
    train(model, optimizer, rank, world, Run(), 0, 5)
    twin = build("kfac_eigen", model, CommOpt(average_gradients=True))
    if rank == 0:
        twin.load_state_dict(optimizer.state_dict())
    optimizer.close()
    found["steps taken"] = raised(train, model, twin, rank, world, Run(), 5, 6)
    return found


def test_ranks_that_start_apart_are_told_at_the_first_step(pool: Pool) -> None:
    for found in pool.run(apart):
        for words, (kind, text) in found.items():
            assert kind == "ValueError", words
            assert words in text


def alone(rank: int, world: int) -> tuple[str, str]:
    """Rank 1 has other things to do, and stays alive until the first one has given up."""
    answer = raised(KFAC, _net(), comm=MemOpt(timeout=1.0)) if rank == 0 else ("", "")
    dist.barrier()
    return answer


def test_an_optimizer_on_one_rank_only_is_refused(pool: Pool) -> None:
    (kind, text), _ = pool.run(alone, world=2)
    assert kind == "RuntimeError"
    for word in ("within 1 s only rank 0 of 2 came", "Every rank", "construct the optimizer"):
        assert word in text


def away(rank: int, world: int, seconds: float) -> tuple[str, str]:
    """Rank 1 leaves the loop early, without a word, and stays alive."""
    run = Run(keywords=EAGER)
    model, optimizer = started(rank, "mem", run, timeout=seconds)
    train(model, optimizer, rank, world, run, 0, 2)
    answer = ("", "") if rank else raised(train, model, optimizer, rank, world, run, 2, 3)
    dist.barrier()
    return answer


@pytest.mark.slow
def test_a_rank_that_stays_away_from_a_step_is_an_error_after_the_timeout(pool: Pool) -> None:
    """The timeout of the strategy, not the one of the process group; long enough for a busy machine to make groups."""
    (kind, text), _ = pool.run(away, 15.0, world=2, timeout=120, group_timeout=100)
    assert kind == "RuntimeError"
    assert "imed out" in text
