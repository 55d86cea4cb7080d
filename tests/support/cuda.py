"""A CUDA device that records every wait of the host, with the interface of `tests.support.device.SimulatedDevice`."""

from __future__ import annotations

import warnings
from contextlib import ExitStack

import torch
from torch import Tensor, nn


class CudaDevice:
    """The current CUDA device, a context manager in which torch warns of every operator that makes the host wait.

    Attributes:
        waits: Pairs of a step, and the place of the operator that made the host wait.
        step: Number of calls of :meth:`next_step`.
    """

    device = torch.device("cuda")

    def __init__(self) -> None:
        self.waits: list[tuple[int, str]] = []
        self.step = 0
        self._around = ExitStack()
        self._caught: list[warnings.WarningMessage] = []

    def __enter__(self) -> CudaDevice:
        caught = self._around.enter_context(warnings.catch_warnings(record=True))
        assert caught is not None
        self._caught = caught
        warnings.simplefilter("always")
        self._around.callback(torch.cuda.set_sync_debug_mode, "default")
        torch.cuda.set_sync_debug_mode("warn")
        return self

    def __exit__(self, *error: object) -> None:
        self._around.close()

    def next_step(self) -> None:
        """End a step, and record the waits that torch has warned of."""
        found = [w for w in self._caught if "synchronizing CUDA operation" in str(w.message)]
        self.waits += [(self.step, f"{w.filename}:{w.lineno}") for w in found]
        self._caught.clear()
        self.step += 1

    def tensor(self, value: Tensor) -> Tensor:
        """Return a copy of a CPU tensor on the device, which requires a gradient if the original does."""
        torch.cuda.set_sync_debug_mode("default")
        try:
            return value.detach().to(self.device).requires_grad_(value.requires_grad)
        finally:
            torch.cuda.set_sync_debug_mode("warn")

    def put(self, model: nn.Module) -> nn.Module:
        """Move a model to the device, and return it."""
        torch.cuda.set_sync_debug_mode("default")
        try:
            return model.to(self.device)
        finally:
            torch.cuda.set_sync_debug_mode("warn")
