"""A CUDA device that records every wait of the host, with the interface of `tests.support.device.SimulatedDevice`."""

import threading
import traceback
import warnings
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

_MAIN = threading.main_thread()


class CudaDevice:
    """The current CUDA device, a context manager in which torch warns of every operator that makes the host wait.

    Attributes:
        waits: Pairs of a step, and the function that made the host wait.
        step: Number of calls of :meth:`next_step`.
    """

    device = torch.device("cuda")

    def __init__(self) -> None:
        self.waits: list[tuple[int, str]] = []
        self.step = 0
        self._around = ExitStack()

    def __enter__(self) -> "CudaDevice":
        self._around.enter_context(warnings.catch_warnings())
        warnings.simplefilter("always")
        warnings.showwarning = self._note
        self._around.callback(torch.cuda.set_sync_debug_mode, "default")
        torch.cuda.set_sync_debug_mode("warn")
        return self

    def __exit__(self, *error: object) -> None:
        self._around.close()

    def next_step(self) -> None:
        """End a step."""
        self.step += 1

    def _note(self, message: Warning | str, *details: Any) -> None:
        """Record a wait of the main thread, unless torch checks an eigendecomposition, for which it always waits."""
        if "synchronizing CUDA operation" not in str(message) or threading.current_thread() is not _MAIN:
            return
        frames = [f for f in traceback.extract_stack()[:-1] if "/secondorder/" in f.filename or "/tests/" in f.filename]
        names = [f"{f.filename.rpartition('/')[2]}:{f.name}:{f.lineno}" for f in frames[-3:]]
        if not any(function in name for function in ("dense.py:_eigh:", "gram.py:spectrum:") for name in names):
            self.waits.append((self.step, " > ".join(names)))

    def tensor(self, value: Tensor) -> Tensor:
        """Return a copy of a CPU tensor on the device, which requires a gradient if the original does."""
        return self._moved(value.detach()).requires_grad_(value.requires_grad)

    def put(self, model: nn.Module) -> nn.Module:
        """Move a model to the device, and return it."""
        return self._moved(model)

    def _moved(self, value: Any) -> Any:
        torch.cuda.set_sync_debug_mode("default")
        try:
            return value.to(self.device)
        finally:
            torch.cuda.set_sync_debug_mode("warn")
