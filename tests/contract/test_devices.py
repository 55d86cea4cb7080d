"""Every method on a device has the results of the CPU, does not mix devices, and does not wait from the third step on.

The device is simulated, see `tests.support.device`, or a CUDA device where there is one. The former has no second
stream, so `overlap` raises an error. Some tests remove operators from it that other devices may not support, such as
factorizations.
"""

import logging
from functools import partial
from typing import Any

import pytest
import torch

from tests.support import contract
from tests.support.cuda import CudaDevice
from tests.support.device import SimulatedDevice
from tests.support.device_runs import Device, DeviceRun, check, drop, late
from tests.support.methods import METHODS, Method, Variant
from tests.support.tasks import Task

aten = torch.ops.aten

#: Rules that run the same operations as others do.
OTHERS = {"momentum", "coupled-decay", "nesterov", "legacy-decay", "decay-reg", "betas", "in-the-span"}
RULES: dict[str, dict[str, Any]] = {
    **{name: rule for name, rule in contract.RULES.items() if name not in OTHERS}, "no-kl-clip": {"kl_clip": None},
    "decay": {"weight_decay": 0.1, "decoupled_weight_decay": True, "nesterov": True}, "loop": {"foreach": False},
    "batched": {"foreach": True}, "switched-off": {"inv_update_steps": 0},
    "switched-off, with rows": {"update_steps": 0},
    "bias-correction": {"betas": (0.9, 1.0), "bias_correction": True, "sgd_weight": 0.5}, "small-eps": {"eps": 1e-8},
    "small-damping": {"damping": 1e-8}, "ways-out": {"skip_biases": True, "skip_norm_layers": True},
    "long-window": {"window_size": 100}, "double-rows": {"window_dtype": torch.float64, "compression": None},
    "defaults": {"factor_update_steps": 10, "inv_update_steps": 100}, "tensor-lr": {"lr": torch.tensor(0.01)},
}  # fmt: skip


@pytest.fixture(params=[SimulatedDevice, pytest.param(CudaDevice, marks=pytest.mark.gpu)], ids=["simulated", "cuda"])
def kind(request: pytest.FixtureRequest) -> type[Device]:
    return request.param


@pytest.mark.gpu
def test_a_wait_for_a_cuda_device_is_noticed() -> None:
    with CudaDevice() as device:
        x = device.tensor(torch.ones(3))
        device.next_step()
        assert x.sum().item() == 3
        device.next_step()
    ((step, place),) = device.waits
    assert step == 1
    assert "test_a_wait_for_a_cuda_device_is_noticed" in place


def test_every_variant_trains_as_on_the_cpu_and_waits_for_nothing(
    method: Method, variant: Variant, task: Task, kind: type[Device]
) -> None:
    if variant.keywords.get("overlap") and kind is SimulatedDevice:
        with SimulatedDevice() as device, pytest.raises(ValueError, match="needs a device that does two things"):
            DeviceRun(partial(method.build, **variant.keywords), task, device)
        return
    check(partial(method.build, **variant.keywords), task, kind=kind)


@pytest.mark.rules(RULES)
def test_every_rule_trains_as_on_the_cpu_and_waits_for_nothing(
    method: Method, mlp: Task, rule: str, kind: type[Device]
) -> None:
    """A batch that is not finite changes no bit and does not cause a wait either."""
    check(partial(method.build, **RULES[rule]), mlp, kind=kind)
    drop(partial(method.build, **{**method.eager, **RULES[rule]}), mlp, 3, kind)


def test_the_defaults_wait_for_nothing_and_a_first_batch_may_be_dropped(
    method: Method, mlp: Task, kind: type[Device]
) -> None:
    check(method.cls, mlp, steps=13, kind=kind)
    drop(partial(method.build, **method.eager), mlp, 0, kind)


def test_a_tensor_lr_on_the_device_stays_there(method: Method, mlp: Task, kind: type[Device]) -> None:
    with kind() as device:
        lr = device.tensor(torch.tensor(0.01))
        run = DeviceRun(partial(method.build, lr=lr), mlp, device).steps(4)
        waits, found = late(device), run.parameters()
    assert waits == []
    expected = DeviceRun(partial(method.build, lr=0.01), mlp).steps(4).parameters()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


FACTORIZATIONS = (
    aten._linalg_eigh.default, aten.linalg_cholesky_ex.default, aten.linalg_qr.default,
    aten.linalg_solve_triangular.default, aten._linalg_solve_ex.default,
)  # fmt: skip
ERRORS = {
    "not-implemented": NotImplementedError("The operator is not implemented for this device"),
    "breakdown": RuntimeError("solver error: EXECUTION_FAILED"),
}


@pytest.mark.cover(error=ERRORS)
def test_unsupported_factorizations_run_on_the_cpu(
    method: Method, variant: Variant, error: Exception, mlp: Task
) -> None:
    if variant.keywords.get("overlap"):
        return
    keywords = {**method.eager, **variant.keywords}
    expected = DeviceRun(partial(method.build, **keywords), mlp).steps(4).parameters()
    with SimulatedDevice(lacking=dict.fromkeys(FACTORIZATIONS, error)) as device:
        run = DeviceRun(partial(method.build, **keywords), mlp, device).steps(4)
        report = run.optimizer.diagnostics()  # type: ignore[attr-defined]
    torch.testing.assert_close(run.parameters(), expected, rtol=1e-6, atol=1e-7)
    assert report.get("refresh_failures", 0) == report.get("solve_failures", 0) == 0


def test_unsupported_operators_are_logged_once(
    mlp: Task, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("secondorder.linalg.dense._elsewhere", set())
    kfac = next(method for method in METHODS if method.name == "kfac")
    lacking = {aten._linalg_eigh.default: ERRORS["not-implemented"]}
    with SimulatedDevice(lacking=lacking) as device, caplog.at_level(logging.INFO, "secondorder"):
        DeviceRun(partial(kfac.build, **kfac.eager), mlp, device).steps(4)
    (record,) = [r for r in caplog.records if "is done on the CPU" in r.getMessage()]
    assert record.getMessage().startswith("linalg_eigh is done on the CPU, as lazy does not do it")
