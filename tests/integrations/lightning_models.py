"""A small task for Lightning, and the loop that a user would write for it by hand."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from secondorder import EKFAC, KFAC, HyLo, SparseMFAC

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)  # which devices there are, and such

Make = Callable[[nn.Module], Optimizer]
#: Several updates and refreshes in the dozen steps of a test, and an interval that no epoch ends with.
METHODS: dict[str, Make] = {
    "KFAC": lambda m, **k: KFAC(m, lr=0.05, damping=0.01, factor_update_steps=1, inv_update_steps=4, **k),
    "EKFAC": lambda m, **k: EKFAC(m, lr=0.05, damping=0.01, factor_update_steps=2, inv_update_steps=4, **k),
    "SparseMFAC": lambda m, **k: SparseMFAC(m, lr=1e-2, window_size=8, momentum=0.9, **k),
    "HyLo": lambda m, **k: HyLo(m, lr=0.05, update_steps=4, **k),
}
BATCHES = 6


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batches(size: int = 8) -> DataLoader[Any]:
    """Six batches, the same in every epoch."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(BATCHES * size, 6, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs[:, :3].argmax(1)), batch_size=size)


class Module(pl.LightningModule):
    """Automatic optimization.

    Args:
        make: Makes the optimizer.
        whole: Whether it gets this module itself instead of the network inside.
        schedule: Makes a scheduler of every step.
    """

    def __init__(self, make: Make, *, whole: bool = False, schedule: Callable[[Optimizer], Any] | None = None) -> None:
        super().__init__()
        self.network, self.make, self.whole, self.schedule = network(), make, whole, schedule
        self.losses: list[float] = []

    def forward(self, inputs: Tensor) -> Tensor:
        return self.network(inputs)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        loss = cross_entropy(self(inputs) if self.whole else self.network(inputs), targets)
        self.losses.append(float(loss.detach()))
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self if self.whole else self.network)
        if self.schedule is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.schedule(optimizer), "interval": "step"}}


def trainer(epochs: int = 2, **keywords: Any) -> pl.Trainer:
    """A trainer on one CPU device that writes nothing unless it is told to."""
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return pl.Trainer(
        **{"accelerator": "cpu", "devices": 1, "max_epochs": epochs, "enable_model_summary": False, **quiet, **keywords}
    )


def parameters(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def assert_same_bits(found: nn.Module, expected: nn.Module) -> None:
    theirs = parameters(expected)
    for name, value in parameters(found).items():
        assert torch.equal(value, theirs[name]), f"{name}: {(value - theirs[name]).abs().max()} apart"
