"""The default options, with a model or its parameters as the only argument."""

import pytest
import torch
from torch import nn

from tests.support.checkpoints import DEFAULT_BUILDS
from tests.support.methods import Method
from tests.support.tasks import Task, assert_changed, backward, displacements, train, values
from tests.support.warned import silent


def check(method: Method, task: Task, way: str, dtype: torch.dtype) -> None:
    model = task.model(dtype)
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
    assert sum(bool(line.strip()) for line in optimizer.describe().splitlines()) >= len(list(model.parameters()))
    assert repr(optimizer).startswith(method.cls.__name__)
    usage = optimizer.memory_usage()
    assert usage["total"] == sum(size for kind, size in usage.items() if kind != "total") > 0
    assert optimizer.diagnostics()["skipped_steps"] == 0


@pytest.mark.cover(way=[*DEFAULT_BUILDS])
def test_trains_and_describes_every_parameter(method: Method, task: Task, way: str) -> None:
    check(method, task, way, torch.float32)


@pytest.mark.cover(dtype=[torch.float64, torch.bfloat16])
def test_trains_in_another_precision(method: Method, task: Task, dtype: torch.dtype) -> None:
    check(method, task, "module", dtype)


def test_training_causes_no_warning(method: Method, task: Task) -> None:
    """A layer method is tested on a model with covered layers only."""
    models = [nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()]
    with silent():
        for model in models if task.name == "mlp" else []:
            train(model, method.cls(model), task, 3)
        for build in DEFAULT_BUILDS.values() if not method.layerwise else ():
            model = task.model()
            train(model, build(method, model), task, 3)


@pytest.mark.option("window_size")
def test_the_same_batch_in_every_step(method: Method, mlp: Task) -> None:
    """Rows of the window are (nearly) equal, and the default damping is small."""
    for dtype in (torch.float32, torch.float64):
        model = mlp.model(dtype)
        optimizer = method.cls(model, lr=1.0)
        backward(model, optimizer, mlp, 0)
        gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        again = Task(mlp.name, mlp.build, lambda generator: mlp.draw(generator.manual_seed(1000)))
        for moved in displacements(model, optimizer, again, 12):
            assert all(value.isfinite().all() for value in moved.values())
            if not method.variants[0].lingers:
                assert sum(float((moved[name] * gradients[name]).sum()) for name in moved) < 0
        assert optimizer.diagnostics()["skipped_steps"] == 0
