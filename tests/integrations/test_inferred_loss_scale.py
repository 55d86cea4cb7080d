"""The loss scaler that a trainer makes is found by the first step that it calls, with nothing said to the optimizer."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.nn.functional import cross_entropy

from secondorder import KFAC
from tests.integrations.lightning_models import BATCHES, Module, batches, network, trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*Precision 16-mixed is not supported by the model summary"),
]


def still_kfac(model: torch.nn.Module) -> KFAC:
    return KFAC(model, lr=0.0, damping=0.1, factor_decay=0.0, factor_update_steps=1, inv_update_steps=1)


def curvature(optimizer: KFAC) -> dict[str, Tensor]:
    return {name: optimizer.dense_curvature(name) for name in optimizer.blocks}


def of_last_batch() -> dict[str, Tensor]:
    """In float32, with nothing scaled."""
    model = network()
    optimizer = still_kfac(model)
    *_, (x, y) = batches()
    cross_entropy(model(x), y).backward()
    optimizer.step()
    return curvature(optimizer)


def assert_alike(optimizer: KFAC) -> None:
    found = curvature(optimizer)
    for name, expected in of_last_batch().items():
        assert float((found[name] - expected).norm() / expected.norm()) < 2e-2, name


def test_accelerate() -> None:
    Accelerator(cpu=True)  # its optimizer needs its state; float16 itself it refuses on a CPU
    scaler, model = torch.amp.GradScaler("cpu", init_scale=2.0**12), network()
    optimizer = still_kfac(model)
    wrapped = AcceleratedOptimizer(optimizer, scaler=scaler)
    for x, y in batches():
        wrapped.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        wrapped.step()
        assert not wrapped.step_was_skipped
    assert optimizer.grad_scaler is scaler
    assert_alike(optimizer)


def test_lightning() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    fitted = trainer(plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)], gradient_clip_val=0.5, max_epochs=1)
    fitted.fit(Module(still_kfac), batches())
    (optimizer,) = fitted.optimizers
    assert isinstance(optimizer, KFAC)
    assert optimizer.grad_scaler is scaler
    assert optimizer.diagnostics()["step"] == BATCHES
    assert_alike(optimizer)
