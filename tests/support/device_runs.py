"""Comparisons of training on a simulated or a real device with training on the CPU."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from tests.support.cuda import CudaDevice
from tests.support.device import SimulatedDevice
from tests.support.tasks import Task

#: Keys of the state of a parameter that a dropped step must not change.
KEPT = (
    "momentum_buffer", "gradient_momentum", "exp_avg", "exp_avg_sq", "factor_a", "factor_g", "factor_weight", "scale",
    "scale_weight", "rows_a", "rows_g", "kernel", "kernel_damping", "window", "window_idx", "window_val", "error",
    "gram",
)  # fmt: skip

Device = SimulatedDevice | CudaDevice

WARM_UP = 2  # steps that create state and read sizes for the first time, and may wait for the device


class DeviceRun:
    """Training on the device, or on the CPU if ``device`` is None."""

    def __init__(self, build: Callable[[nn.Module], Optimizer], task: Task, device: Device | None = None) -> None:
        self.task, self.device = task, device
        self.model = task.model(torch.float64)
        if device is not None:
            device.put(self.model)
        self.optimizer = build(self.model)

    def steps(self, count: int, start: int = 0, factor: float = 1.0) -> "DeviceRun":
        for step in range(start, start + count):
            inputs, targets = self.task.batch(step, torch.float64)
            if self.device is not None:
                inputs, targets = self.device.tensor(inputs), self.device.tensor(targets)
            self.optimizer.zero_grad()
            (factor * F.cross_entropy(self.model(inputs).flatten(0, -2), targets.flatten())).backward()
            self.optimizer.step()
            if self.device is not None:
                self.device.next_step()
        return self

    def parameters(self) -> list[Tensor]:
        return [host(p).clone() for p in self.model.parameters()]

    def kept(self) -> dict[str, Tensor]:
        """Copies of all parameters and of the state that a dropped step must not change."""
        found = dict(zip((name for name, _ in self.model.named_parameters()), self.parameters(), strict=True))
        for name, parameter in self.model.named_parameters():
            state = self.optimizer.state[parameter]
            found |= {f"{name}: {key}": host(state[key]).clone() for key in KEPT if key in state}
        return found


def host(x: Tensor) -> Tensor:
    found: Tensor = getattr(x, "held", x).detach()
    return found.cpu()


def late(device: Device) -> list[str]:
    return [what for step, what in device.waits if step >= WARM_UP]


def check(
    build: Callable[[nn.Module], Optimizer], task: Task, steps: int = 6, kind: type[Device] = SimulatedDevice
) -> None:
    """Assert that training agrees with the CPU, and that no step after the warm-up waits for the device."""
    expected = DeviceRun(build, task).steps(steps).parameters()
    with kind() as device:
        run = DeviceRun(build, task, device).steps(steps)
        waits, found = late(device), run.parameters()
    for p, q in zip(found, expected, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
    assert not waits, waits


def drop(build: Callable[[nn.Module], Optimizer], task: Task, start: int, kind: type[Device] = SimulatedDevice) -> None:
    """Assert that a step with gradients of NaN is dropped without a wait and without a trace."""
    with kind() as device:
        run = DeviceRun(build, task, device).steps(start)
        before = run.kept()
        device.waits.clear()
        run.steps(1, start=start, factor=torch.nan)
        waits, after = late(device), run.kept()
        moved = run.steps(2, start=start + 1).kept()
    assert [key for key, x in before.items() if not torch.equal(x, after[key])] == []
    assert not waits, waits
    for name, _ in run.model.named_parameters():
        assert torch.isfinite(moved[name]).all()
        assert not torch.equal(moved[name], after[name])
