"""No step asks the host for a number: plain, factor and refresh steps alike, hooks and a full window included.

On a CPU nothing would be slow, so the calls that would wait for a device are counted instead. Two ways
of reading what is on the host already are none of them: `Tensor.numpy`, which raises for a tensor on a device, and
`Tensor.cpu` of a CPU tensor. What a step does on a device only (a gate in place of a branch) is not seen here.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.methods import Method, Variant
from tests.support.tasks import Task, train

aten = torch.ops.aten
WAITING = {aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default, aten.is_nonzero.default}
READING = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__")


class Waits(TorchDispatchMode):
    """Notes every operator whose result the host has to wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in WAITING:
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []

    def counting(name: str) -> Any:
        original = getattr(Tensor, name)

        def read(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            seen.append(name)
            return original(self, *args, **kwargs)

        return read

    for name in READING:
        monkeypatch.setattr(Tensor, name, counting(name))
    return seen


def check(method: Method, task: Task, readings: list[str], steps: int = 13, **keywords: Any) -> None:
    model = task.model(torch.float32)
    optimizer = method.build(model, **keywords)
    readings.clear()
    with Waits() as waits:
        train(model, optimizer, task, steps)
    assert waits.seen == []
    assert readings == []


def test_the_counters_count(readings: list[str]) -> None:
    tensor = torch.tensor([1.0, 2.0])
    with Waits() as waits:
        tensor.sum().item()
        tensor.tolist()
        bool(tensor[0] > 0)
    assert waits.seen
    assert {"item", "tolist", "__bool__"} <= set(readings)


@pytest.mark.cover(lr={"float": 0.05, "tensor": torch.tensor(0.01)})
def test_no_sync_for_every_variant_and_task(
    method: Method, variant: Variant, task: Task, lr: Any, readings: list[str]
) -> None:
    check(method, task, readings, **variant.keywords, lr=lr)


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
}


@pytest.mark.rules(RULES)
def test_no_sync_under_every_rule(method: Method, mlp: Task, rule: str, readings: list[str]) -> None:
    check(method, mlp, readings, **RULES[rule])


def test_no_sync_on_a_dropped_step(method: Method, mlp: Task, readings: list[str]) -> None:
    model = mlp.model(torch.float32)
    optimizer = method.build(model, **method.eager)
    train(model, optimizer, mlp, 2)
    readings.clear()
    with Waits() as waits:
        optimizer.zero_grad()
        (torch.inf * mlp.loss(model, 2)).backward()
        optimizer.step()
    assert waits.seen == []
    assert readings == []
