"""Helpers that the tests of several trainers share: methods, a small network, its batches and a bitwise comparison."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from secondorder import EKFAC, KFAC, HyLo, SecondOrderOptimizer, SparseMFAC

#: The dozen steps of a test include several updates and refreshes, and no interval divides an epoch.
METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "kfac": (KFAC, {"lr": 0.05, "damping": 0.01, "factor_update_steps": 1, "inv_update_steps": 4}),
    "ekfac": (EKFAC, {"lr": 0.05, "damping": 0.01, "factor_update_steps": 2, "inv_update_steps": 4}),
    "sparse_mfac": (SparseMFAC, {"lr": 0.01, "window_size": 8, "momentum": 0.9}),
    "hylo": (HyLo, {"lr": 0.05, "update_steps": 4}),
}
BATCHES = 6


def make(name: str, model: nn.Module, **changed: Any) -> SecondOrderOptimizer:
    method, options = METHODS[name]
    return method(model, **options | changed)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batches(size: int = 8) -> DataLoader[Any]:
    """Six batches, the same in every epoch."""
    inputs = torch.randn(BATCHES * size, 6, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(inputs, inputs[:, :3].argmax(1)), batch_size=size)


def regress(model: nn.Module, optimizer: Any, steps: int = 1) -> None:
    """Take some steps of a layer of four inputs."""
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 4, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()


def by_hand(
    make: Callable[[nn.Module], Any],
    epochs: int = 2,
    *,
    accumulate: int = 1,
    clip: float = float("inf"),
    schedule: Callable[..., Any] | None = None,
    cast: torch.dtype | None = None,
    scaler: torch.amp.GradScaler | None = None,
    observe: Callable[..., None] = lambda optimizer, logits: None,
) -> tuple[nn.Module, Any]:
    """Train with the loop that a user would write, with the settings of the trainer."""
    model = network()
    optimizer = make(model)
    if scaler:
        optimizer.grad_scaler = scaler
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    scheduler = schedule(optimizer) if schedule else None
    for number, (inputs, targets) in enumerate(repeated(epochs)):
        with torch.autocast("cpu", cast, enabled=cast is not None, cache_enabled=False):
            logits = model(inputs)
            observe(optimizer, logits)
            loss = cross_entropy(logits, targets) / accumulate
        scaler.scale(loss).backward()
        if (number + 1) % accumulate == 0:
            scaler.unscale_(optimizer)
            if math.isfinite(clip):
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if scheduler:
                scheduler.step()
    return model, optimizer


def repeated(epochs: int) -> list[Any]:
    return [batch for _ in range(epochs) for batch in batches()]


def parameters(module: nn.Module) -> dict[str, Tensor]:
    """Return copies by name."""
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def assert_same_bits(found: nn.Module, expected: nn.Module) -> None:
    ours, theirs = parameters(found), parameters(expected)
    assert ours.keys() == theirs.keys()
    assert not {name for name, p in ours.items() if not torch.equal(p, theirs[name])}


def give_a_scaler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a loss scaler to every accelerator that is created from now on. On a CPU, Accelerate does not."""
    original = Accelerator.__init__

    def with_scaler(self: Accelerator, *args: Any, **settings: Any) -> None:
        original(self, *args, **settings)
        self.scaler, self.native_amp = torch.amp.GradScaler("cpu", init_scale=2.0**10), True

    monkeypatch.setattr(Accelerator, "__init__", with_scaler)
