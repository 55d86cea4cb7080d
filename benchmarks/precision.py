"""The device and the precision of a run: autocast, and the scaling of float16 losses."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from secondorder import SecondOrderOptimizer

Amp = Literal["bfloat16", "float16"]
DeviceName = Literal["cpu", "cuda"]


class Precision:
    """Computes losses and takes steps. Without arguments, it does exactly the same as a plain training loop."""

    def __init__(self, device: str | torch.device = "cpu", amp: Amp | None = None) -> None:
        self.device = torch.device(device)
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device {device}: torch {torch.__version__} sees no CUDA device here, take cpu")
        self._dtype: torch.dtype | None = None if amp is None else getattr(torch, amp)
        self.scaler = torch.amp.GradScaler(self.device.type) if amp == "float16" else None

    def prepare(self, optimizer: Optimizer, closure: bool) -> None:
        if self.scaler is None:
            return
        if closure:
            raise ValueError("amp float16: a GradScaler takes no closure, which this optimizer needs; take bfloat16")
        if isinstance(optimizer, SecondOrderOptimizer):
            optimizer.grad_scaler = self.scaler

    def autocast(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._dtype is None else torch.autocast(self.device.type, self._dtype)

    def backward(self, loss: Tensor) -> None:
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def step(self, optimizer: Optimizer) -> None:
        if self.scaler is None:
            optimizer.step()
        else:
            self.scaler.step(optimizer)
            self.scaler.update()

    def now(self) -> tuple[float, float]:
        """Return wall-clock and processor seconds, which are the same for a device, after its work has finished."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return time.perf_counter(), time.perf_counter()
        return time.perf_counter(), time.process_time()

    def random_state(self) -> dict[str, Tensor]:
        found = {"cpu": torch.get_rng_state()}
        return {**found, "cuda": torch.cuda.get_rng_state(self.device)} if self.device.type == "cuda" else found

    def restore_random_state(self, states: dict[str, Tensor]) -> None:
        torch.set_rng_state(states["cpu"])
        if self.device.type == "cuda" and "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"], self.device)


def moved(value: Any, device: torch.device) -> Any:
    """Return tensors on a device. The host waits for copies to the CPU, because it reads them."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=device.type != "cpu"), value)


@contextmanager
def answering_cpu(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Let a model on another device take and return tensors on the CPU, because evaluations use those."""
    if device.type == "cpu":
        yield
        return

    def take(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return cast("tuple[Any, ...]", moved(args, device)), cast("dict[str, Any]", moved(kwargs, device))

    def give(_: nn.Module, __: tuple[Any, ...], outputs: Any) -> Any:
        return moved(outputs, torch.device("cpu"))

    handles = [model.register_forward_pre_hook(take, with_kwargs=True), model.register_forward_hook(give)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
