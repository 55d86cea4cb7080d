"""The default options, with a model or its parameters as the only argument."""

from contextlib import nullcontext

import pytest
import torch

from tests.support.checkpoints import DEFAULT_BUILDS
from tests.support.methods import Method
from tests.support.tasks import Task, assert_changed, backward, displacements, values
from tests.support.warned import silent


@pytest.mark.cover(way=[*DEFAULT_BUILDS], dtype=[torch.float32, torch.float64, torch.bfloat16])
def test_the_loss_falls(method: Method, task: Task, way: str, dtype: torch.dtype) -> None:
    """Training causes no warning, except that a layer method names parameters without a block."""
    model = task.model(dtype)
    with silent() if not method.layerwise else nullcontext():
        optimizer, before = DEFAULT_BUILDS[way](method, model), values(model)
        losses = [float(backward(model, optimizer, task, 0))]
        for _ in range(6):
            optimizer.step()
            losses.append(float(backward(model, optimizer, task, 0)))
    if dtype is torch.bfloat16:  # a small step may be rounded to zero
        assert all(value.isfinite().all() for value in values(model).values())
    else:
        assert_changed(model, before)
        assert losses[-1] < losses[0]
    assert optimizer.diagnostics()["skipped_steps"] == 0


@pytest.mark.option("window_size")
def test_the_same_batch_in_every_step(method: Method, mlp: Task) -> None:
    """Rows of the window are (nearly) equal, and the default damping is small."""
    again = Task(mlp.name, mlp.build, lambda generator: mlp.draw(generator.manual_seed(1000)))
    for dtype in (torch.float32, torch.float64):
        model = mlp.model(dtype)
        optimizer = method.cls(model, lr=1.0)
        for moved in displacements(model, optimizer, again, 12):
            assert all(value.isfinite().all() for value in moved.values())
            if not method.variants[0].lingers:
                assert sum(float((moved[name] * p.grad).sum()) for name, p in model.named_parameters()) < 0
        assert optimizer.diagnostics()["skipped_steps"] == 0
