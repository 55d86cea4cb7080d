"""A script that a user might write with the public interface: it runs, and type checkers accept every line.

``assert_type`` makes a type checker fail if a result has another type, or Any.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import assert_type

import secondorder
from secondorder import (
    EKFAC,
    GGT,
    KFAC,
    MFAC,
    Categorical,
    CommOpt,
    HyLo,
    LowRank,
    MemOpt,
    ParamScheduler,
    SecondOrderOptimizer,
    SparseMFAC,
    TopK,
)
from secondorder.diagnostics import Analysis, StageClock, flat


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> float:
    """Every method is a torch optimizer."""
    loss = torch.zeros(())
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(torch.randn(16, 4)), torch.randint(3, (16,)))
        loss.backward()
        optimizer.step()
    return loss.item()


def methods() -> list[SecondOrderOptimizer]:
    """All methods, created from a model, from parameters or from groups."""
    model, parameters = network(), list(network().parameters())
    groups: list[dict[str, Any]] = [
        {"params": parameters[:2], "lr": 0.1},
        {"params": parameters[2:], "weight_decay": 0.0},
    ]
    return [
        KFAC(model, lr=0.1, momentum=0.9, damping=1e-3, comm=CommOpt()),
        KFAC(model.parameters(), lr=torch.tensor(0.1), module=model, graft="adam", decoupled_weight_decay=True),
        KFAC(model.named_parameters(), lr=0.1, module=model),
        EKFAC(model, lr=0.1, estimator="running", power=0.5, momentum_mode="pre", comm=MemOpt()),
        HyLo(model, lr=0.1, mode="kis"),
        MFAC(groups, lr=1e-3, window_size=4, compression=LowRank(rank=2)),
        SparseMFAC(parameters, lr=1e-3, window_size=4, compression=TopK(density=0.1)),
        GGT(model.parameters(), lr=1e-3, window_size=4),
        secondorder.create("kfac", model, lr=0.1),
    ]


def schedules(model: nn.Module, optimizer: KFAC) -> None:
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    damping = ParamScheduler(optimizer, damping=lambda step: 0.99**step)
    train(model, optimizer)
    cosine.step()
    damping.step()


def closures(model: nn.Module, optimizer: EKFAC) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(torch.randn(16, 4)), torch.randint(3, (16,)))
        loss.backward()
        return loss

    optimizer.step(closure)


def observed(model: nn.Module) -> None:
    optimizer = KFAC(model, lr=0.1, fisher="mc")
    outputs = model(torch.randn(16, 4))
    optimizer.observe(outputs, Categorical())
    F.cross_entropy(outputs, torch.randint(3, (16,))).backward()
    with optimizer.pause_capture():
        model(torch.randn(2, 4))
    optimizer.step()


def inspected(model: nn.Module, optimizer: KFAC, folder: Path) -> None:
    assert_type(optimizer.describe(), str)
    assert_type(flat(optimizer.diagnostics()), dict[str, float])
    assert_type(optimizer.plan(world_size=4).notes, list[str])
    clock = StageClock()
    optimizer.time_stages(clock)
    train(model, optimizer)
    optimizer.time_stages(None)
    with Analysis(optimizer, folder):
        train(model, optimizer)


def saved(optimizer: KFAC, path: Path) -> None:
    torch.save(optimizer.state_dict(), path)
    optimizer.load_state_dict(torch.load(path, weights_only=True))
    optimizer.consolidate_state_dict()


def main(folder: Path) -> None:
    model = network()
    with KFAC(model, lr=0.1, damping=1e-3) as optimizer:
        schedules(model, optimizer)
        inspected(model, optimizer, folder)
        saved(optimizer, folder / "optimizer.pt")
