"""The loss scaler that a trainer makes is found by the first step that it calls, with nothing said to the optimizer."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from lightning.pytorch.plugins import MixedPrecision
from torch.nn.functional import cross_entropy

from secondorder import KFAC
from tests.integrations.lightning_models import Module, fit
from tests.integrations.small import BATCHES, batches, network

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*Precision 16-mixed is not supported by the model summary"),
]


def still_kfac(model: torch.nn.Module) -> KFAC:
    return KFAC(model, lr=0.0, damping=0.1, factor_decay=0.0, factor_update_steps=1, inv_update_steps=1)


def assert_sees_the_last_batch(optimizer: KFAC) -> None:
    """As it is in float32, with nothing scaled."""
    model = network()
    expected = still_kfac(model)
    *_, (x, y) = batches()
    cross_entropy(model(x), y).backward()
    expected.step()
    assert len(optimizer.blocks) == len(expected.blocks) == 2
    for ours, theirs in zip(optimizer.blocks, expected.blocks, strict=True):
        curvature = expected.dense_curvature(theirs)
        assert float((optimizer.dense_curvature(ours) - curvature).norm() / curvature.norm()) < 2e-2, theirs


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
    assert_sees_the_last_batch(optimizer)


def test_lightning() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    fitted = fit(Module(still_kfac), 1, plugins=[plugin], gradient_clip_val=0.5)
    (optimizer,) = fitted.optimizers
    assert isinstance(optimizer, KFAC)
    assert optimizer.grad_scaler is scaler
    assert optimizer.diagnostics()["step"] == BATCHES
    assert_sees_the_last_batch(optimizer)
