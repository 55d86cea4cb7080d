"""A small task for Lightning."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from tests.integrations import small

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)  # hides the summary of the available devices

Make = Callable[..., Any]  # takes a module and returns its optimizer
METHODS: dict[str, Make] = {name: partial(small.make, name) for name in small.METHODS}


class Module(pl.LightningModule):
    """A module with automatic optimization, whose optimizer gets this module itself if ``whole``, or else the network.

    A scheduler that ``schedule`` creates is stepped after every step of the optimizer.
    """

    def __init__(self, make: Make, *, whole: bool = False, schedule: Callable[[Optimizer], Any] | None = None) -> None:
        super().__init__()
        self.network, self.make, self.whole, self.schedule = small.network(), make, whole, schedule
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
    """Create a trainer on one CPU device that writes nothing by default."""
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return pl.Trainer(
        **{"accelerator": "cpu", "devices": 1, "max_epochs": epochs, "enable_model_summary": False, **quiet, **keywords}
    )


def fit(module: nn.Module, epochs: int = 2, **keywords: Any) -> pl.Trainer:
    """Train a module on the batches of the task and return the trainer."""
    resume = {key: keywords.pop(key) for key in ("ckpt_path", "weights_only") if key in keywords}
    fitted = trainer(epochs, **keywords)
    fitted.fit(module, small.batches(), **resume)
    return fitted
