"""Every method on a CUDA device has the results of the CPU, and does not make the host wait from the third step on.

`test_devices.py` tests the same on a simulated device, which needs no hardware but has no second stream.
"""

from functools import partial

import pytest
import torch

from tests.contract.test_devices import RULES
from tests.support.cuda import CudaDevice
from tests.support.device_runs import DeviceRun, check, drop, late
from tests.support.methods import Method, Variant
from tests.support.tasks import Task

pytestmark = pytest.mark.gpu


def test_a_wait_is_noticed() -> None:
    with CudaDevice() as device:
        x = device.tensor(torch.ones(3))
        device.next_step()
        assert x.sum().item() == 3
        device.next_step()
    ((step, place),) = device.waits
    assert step == 1
    assert "test_a_wait_is_noticed" in place


def test_every_variant_trains_as_on_the_cpu_and_waits_for_nothing(method: Method, variant: Variant, task: Task) -> None:
    check(partial(method.build, **variant.keywords), task, kind=CudaDevice)


@pytest.mark.rules(RULES)
def test_every_rule_trains_as_on_the_cpu_and_drops_a_batch_without_a_wait(method: Method, mlp: Task, rule: str) -> None:
    check(partial(method.build, **RULES[rule]), mlp, kind=CudaDevice)
    drop(partial(method.build, **{**method.eager, **RULES[rule]}), mlp, 3, CudaDevice)


def test_the_defaults_wait_for_nothing_and_a_first_batch_may_be_dropped(method: Method, mlp: Task) -> None:
    check(method.cls, mlp, steps=13, kind=CudaDevice)
    drop(partial(method.build, **method.eager), mlp, 0, CudaDevice)


def test_a_tensor_lr_on_the_device_stays_there(method: Method, mlp: Task) -> None:
    with CudaDevice() as device:
        lr = device.tensor(torch.tensor(0.01))
        run = DeviceRun(partial(method.build, lr=lr), mlp, device).steps(4)
        waits, found = late(device), run.parameters()
    assert not waits, waits
    expected = DeviceRun(partial(method.build, lr=0.01), mlp).steps(4).parameters()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
