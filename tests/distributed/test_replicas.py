"""Replicas stay equal to the bit, and a run is repeated to the bit, under every strategy."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.support.oracles.ranks import (
    METHODS,
    STRATEGIES,
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


def cases(chosen: set[tuple[str, str]]) -> list[object]:
    """Every method under every strategy that it works under; slow, but for the chosen ones."""
    found = []
    for strategy in STRATEGIES:
        world = {"hybrid_half": 4, "hybrid_third": 3}.get(strategy, 2)
        for method in METHODS:
            if method in LAYERS or strategy not in OVERRIDES:  # which say where factors are
                marks = () if (method, strategy) in chosen else (pytest.mark.slow,)
                found.append(pytest.param(method, strategy, world, id=f"{method}-{strategy}", marks=marks))
    return found


@pytest.mark.parametrize(("method", "strategy", "world"), cases({("ekfac_intra", "mem")}))
def test_replicas_are_equal_for_200_steps(pool: Pool, method: str, strategy: str, world: int) -> None:
    paths = pool.run(long_path, strategy, method, 200, world=world)
    assert_replicas(paths)
    assert not torch.equal(paths[0][0], paths[0][-1])


REPEATED = {("kfac_eigen", "mem"), ("hylo_kis", "comm"), ("mfac_sparse", "mem")}


@pytest.mark.parametrize(("method", "strategy", "world"), cases(REPEATED))
def test_a_repeated_run_has_the_same_bits(pool: Pool, method: str, strategy: str, world: int) -> None:
    run = Run("mlp", method, steps=6)
    once, again = (pool.run(together, strategy, run, world=world) for _ in range(2))
    assert_replicas(once + again)
