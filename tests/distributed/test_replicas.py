"""Replicas stay equal to the bit, and a run is repeated to the bit, under every strategy."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.support.oracles.ranks import (
    METHODS,
    STRATEGIES,
    TASKS,
    Run,
    assert_replicas,
    optimizer_on,
    path_of,
    together,
)
from tests.support.pool import Pool, device_of

LAYERS = ("kfac_eigen", "kfac_cholesky", "ekfac_running", "ekfac_intra")
OVERRIDES = ("comm_owner", "mem_replicated", "local_factors", "chief", "chief_inverses", "chief_own")


class Small(nn.Sequential):
    """Two layers, so that 200 steps take a moment."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 4))


def long_path(rank: int, world: int, strategy: str, method: str, steps: int) -> Tensor:
    """Parameters after every step of a tiny model."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = DDP(Small().to(device_of(rank), torch.float64))
    run = Run("mlp", method, {"lr": 0.01}, steps=steps)
    with optimizer_on(model, strategy, run) as optimizer:
        return path_of(model, optimizer, rank, world, run)


def quick(method: str, strategy: str) -> bool:
    """K-FAC under every strategy that splits work in its own way, and one method of each family where all is split."""
    if method == "kfac_eigen":
        return strategy not in {"comm_owner", "mem_replicated", "hybrid_third", "chief_own"}
    return strategy == "mem" and method in {"ekfac_intra", "hylo_kid", "mfac"}


def cases() -> list[object]:
    found = []
    for strategy in STRATEGIES:
        world = {"hybrid_half": 4, "hybrid_third": 3}.get(strategy, 2)
        for method in METHODS:
            if method in LAYERS or strategy not in OVERRIDES:  # which say where factors are
                marks = () if quick(method, strategy) else (pytest.mark.slow,)
                found.append(pytest.param(method, strategy, world, id=f"{method}-{strategy}", marks=marks))
    return found


@pytest.mark.parametrize(("method", "strategy", "world"), cases())
def test_replicas_are_equal_for_200_steps(pool: Pool, method: str, strategy: str, world: int) -> None:
    paths = pool.run(long_path, strategy, method, 200, world=world)
    assert_replicas(paths)
    assert not torch.equal(paths[0][0], paths[0][-1])


@pytest.mark.parametrize("strategy", ["comm", "mem"])
@pytest.mark.parametrize("method", METHODS)
def test_a_repeated_run_has_the_same_bits(pool: Pool, method: str, strategy: str) -> None:
    run = Run("mlp", method, steps=6)
    once, again = (pool.run(together, strategy, run, world=2) for _ in range(2))
    assert_replicas(once + again)


def test_other_data_give_other_bits(pool: Pool) -> None:
    """The comparison of the bits would pass for parameters that do not move."""
    path = pool.run(together, "mem", Run("mlp", steps=3), world=2)[0]
    assert not torch.equal(path[0], path[1])
    start = torch.cat([p.detach().flatten() for p in TASKS["mlp"].model().parameters()])
    assert not torch.equal(path[0], start)
