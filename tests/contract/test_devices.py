"""Every method on a device: the numbers of the CPU, no mixture of devices, and no wait from the third step on.

The device is simulated, see `tests.support.device`. It has no second stream, so that methods which refresh next to
training refuse it; and what a device may lack, a factorization for example, is taken away from it.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Optimizer

from tests.support.device import SimulatedDevice
from tests.support.methods import METHODS, Method, Variant
from tests.support.tasks import Task

aten = torch.ops.aten
KEPT = (
    "momentum_buffer", "gradient_momentum", "exp_avg", "exp_avg_sq", "factor_a", "factor_g", "factor_weight", "scale",
    "scale_weight", "rows_a", "rows_g", "kernel", "kernel_damping", "window", "window_idx", "window_val", "error",
    "gram",
)  # fmt: skip
WARM_UP = 2  # steps in which state is made and sizes are looked at for the first time

RULES: dict[str, dict[str, Any]] = {
    "plain": {"momentum": 0.0},
    "no-kl-clip": {"kl_clip": None},
    "decay": {"weight_decay": 0.1, "decoupled_weight_decay": True, "nesterov": True},
    "clipped": {"clip_norm": 1.0, "clip_value": 1.0},
    "graft-sgd": {"graft": "sgd"},
    "graft-adam": {"graft": "adam"},
    "inner-adamw": {"inner": "adamw"},
    "adamw-fallback": {"fallback": "adamw"},
    "loop": {"foreach": False},
    "batched": {"foreach": True},
    "relative-damping": {"damping_mode": "relative"},
    "switched-off": {"inv_update_steps": 0},
    "switched-off, with rows": {"update_steps": 0},
    "ema": {"momentum_mode": "ema"},
    "decay-beside": {"weight_decay": 0.1, "weight_decay_mode": "both"},
    "eigh": {"solver": "eigh"},
    "window-scale": {"scale": "window"},
    "bias-correction": {"betas": (0.9, 1.0), "bias_correction": True, "sgd_weight": 0.5},
    "small-eps": {"eps": 1e-8},
    "small-damping": {"damping": 1e-8},
    "ways-out": {"skip_biases": True, "skip_norm_layers": True},
    "long-window": {"window_size": 100},
    "double-rows": {"window_dtype": torch.float64, "compression": None},
    "defaults": {"factor_update_steps": 10, "inv_update_steps": 100},
    "tensor-lr": {"lr": torch.tensor(0.01)},
}


class Run:
    """Training on the device, or on the CPU where there is none."""

    def __init__(self, method: Method, task: Task, device: SimulatedDevice | None = None, **keywords: Any) -> None:
        self.task, self.device = task, device
        self.model = task.model(torch.float64)
        if device is not None:
            device.put(self.model)
        self.optimizer: Optimizer = method.build(self.model, **keywords)

    def steps(self, count: int, start: int = 0, factor: float = 1.0) -> Run:
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
        """Parameters, and what a step that is dropped must leave alone in their states."""
        found = dict(zip((name for name, _ in self.model.named_parameters()), self.parameters(), strict=True))
        for name, parameter in self.model.named_parameters():
            state = self.optimizer.state[parameter]
            found |= {f"{name}: {key}": host(state[key]).clone() for key in KEPT if key in state}
        return found


def host(x: Tensor) -> Tensor:
    found: Tensor = getattr(x, "held", x).detach()
    return found


def late(device: SimulatedDevice) -> list[str]:
    return [what for step, what in device.waits if step >= WARM_UP]


def check(method: Method, task: Task, steps: int = 6, **keywords: Any) -> None:
    expected = Run(method, task, **keywords).steps(steps).parameters()
    with SimulatedDevice() as device:
        found = Run(method, task, device, **keywords).steps(steps).parameters()
    for p, q in zip(found, expected, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
    assert late(device) == []


def test_every_variant_trains_as_on_the_cpu_and_waits_for_nothing(method: Method, variant: Variant, task: Task) -> None:
    if variant.keywords.get("overlap"):
        with SimulatedDevice() as device, pytest.raises(ValueError, match="needs a device that does two things"):
            Run(method, task, device, **variant.keywords)
        return
    check(method, task, **variant.keywords)


@pytest.mark.rules(RULES)
def test_every_rule_trains_as_on_the_cpu_and_waits_for_nothing(method: Method, mlp: Task, rule: str) -> None:
    check(method, mlp, **RULES[rule])


def drop(method: Method, task: Task, start: int, **keywords: Any) -> None:
    """A device decides by gates whether a step is dropped, where the CPU looks at the numbers."""
    with SimulatedDevice() as device:
        run = Run(method, task, device, **{**method.eager, **keywords}).steps(start)
        before = run.kept()
        run.steps(1, start=start, factor=torch.nan)
        after, waits = run.kept(), late(device)
        moved = run.steps(2, start=start + 1).kept()
    assert [key for key, x in before.items() if not torch.equal(x, after[key])] == []
    assert waits == []
    for name, _ in run.model.named_parameters():
        assert torch.isfinite(moved[name]).all()
        assert not torch.equal(moved[name], after[name])


@pytest.mark.rules(RULES)
def test_a_batch_that_is_not_finite_changes_no_bit_and_is_not_waited_for(method: Method, mlp: Task, rule: str) -> None:
    drop(method, mlp, 3, **RULES[rule])


def test_a_first_batch_that_is_not_finite_changes_no_bit(method: Method, mlp: Task) -> None:
    drop(method, mlp, 0)


# ---------------------------------------------------------------------------------------------------------------------
# Devices that lack a factorization, or break down in it
# ---------------------------------------------------------------------------------------------------------------------

FACTORIZATIONS = (
    aten._linalg_eigh.default,
    aten.linalg_cholesky_ex.default,
    aten.linalg_qr.default,
    aten.linalg_solve_triangular.default,
    aten._linalg_solve_ex.default,
)
ERRORS = {
    "not-implemented": NotImplementedError("The operator is not implemented for this device"),
    "breakdown": RuntimeError("solver error: EXECUTION_FAILED"),
}


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
def test_factorizations_that_a_device_lacks_are_done_on_the_cpu(method: Method, error: Exception, mlp: Task) -> None:
    for variant in method.variants:
        if variant.keywords.get("overlap"):
            continue
        keywords = {**method.eager, **variant.keywords}
        expected = Run(method, mlp, **keywords).steps(4).parameters()
        with SimulatedDevice(lacking=dict.fromkeys(FACTORIZATIONS, error)) as device:
            run = Run(method, mlp, device, **keywords).steps(4)
            report = run.optimizer.diagnostics()  # type: ignore[attr-defined]
        for p, q in zip(run.parameters(), expected, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
        assert report.get("refresh_failures", 0) == report.get("solve_failures", 0) == 0


def test_what_a_device_lacks_is_logged_once(
    mlp: Task, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("secondorder.linalg.dense._elsewhere", set())
    kfac = next(method for method in METHODS if method.name == "kfac")
    lacking = {aten._linalg_eigh.default: ERRORS["not-implemented"]}
    with SimulatedDevice(lacking=lacking) as device, caplog.at_level(logging.INFO, "secondorder"):
        Run(kfac, mlp, device, **kfac.eager).steps(4)
    (record,) = [r for r in caplog.records if "is done on the CPU" in r.getMessage()]
    assert record.getMessage().startswith("linalg_eigh is done on the CPU, as lazy does not do it")
