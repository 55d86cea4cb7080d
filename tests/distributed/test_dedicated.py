"""Dedicated workers: equal to the delayed run of one process, never stuck at the end, loud or patient when a rank dies."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import secondorder
from secondorder.comm.dedicated import DedicatedWorkers
from tests.distributed.delayed import Batch, Delayed
from tests.distributed.pool import Failure, Pool

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
    if rank:  # must not matter: all start from the parameters of the first gradient rank
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


def simulated(
    steps: int, options: dict[str, Any], gradient_ranks: int, factor_ranks: int = 1, **more: Any
) -> list[Tensor]:
    return Delayed(
        build, secondorder.KFAC, {**OPTIONS, **options}, loss,
        lambda rank, step: batch(0, rank, step), lambda rank, step: batch(1, rank, step),
        gradient_ranks=gradient_ranks, factor_ranks=factor_ranks, period=more.pop("period", T), **more,
    ).run(steps)  # fmt: skip


@pytest.mark.parametrize("world", [3, 4])
@pytest.mark.parametrize("method", ["eigen", "cholesky"])
def test_lockstep_is_the_delayed_run_to_the_bit(pool: Pool, world: int, method: str) -> None:
    steps, options = 9, {"inverse_method": method}
    found = pool.run(train, {"gradient": steps, "factor": steps}, {"warmup": "identity"}, options, world=world)
    expected = simulated(steps, options, world - 2, warmup="identity")
    assert found[world - 2 :] == ["factor", "inverse"]
    for trajectory in found[: world - 2]:
        for step, (a, b) in enumerate(zip(trajectory, expected, strict=True)):
            assert torch.equal(a, b), f"step {step}: {(a - b).abs().max()}"
