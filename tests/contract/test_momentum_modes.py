"""Where momentum runs: over directions as torch has it, as their average, or over gradients before they are sent."""

from __future__ import annotations

import pytest
import torch

from tests.contract.methods import Method
from tests.contract.tasks import Task, assert_identical, displacements, train, values

pytestmark = pytest.mark.option("momentum_mode")


@pytest.mark.parametrize(("mode", "share"), [("heavy_ball", 1.0), ("ema", 0.75)])
def test_momentum_over_directions(method: Method, mlp: Task, mode: str, share: float) -> None:
    model, twin = mlp.model(), mlp.model()
    plain = method.build(model, **method.bare())
    heavy = method.build(twin, **method.bare(momentum=0.25, momentum_mode=mode))
    sent = {name: torch.zeros_like(value) for name, value in values(model).items()}
    for direction, moved in zip(displacements(model, plain, mlp, 6), displacements(twin, heavy, mlp, 6), strict=True):
        for name, value in direction.items():
            sent[name] = 0.25 * sent[name] + share * value
            torch.testing.assert_close(moved[name], sent[name], rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("mode", ["ema", "pre"])
def test_without_momentum_the_mode_is_of_no_account(method: Method, mlp: Task, mode: str) -> None:
    results = []
    for chosen in ("heavy_ball", mode):
        model = mlp.model()
        train(model, method.build(model, momentum=0.0, momentum_mode=chosen), mlp, 6)
        results.append(values(model))
    assert_identical(results[1], results[0])


def test_momentum_over_gradients_has_no_buffer_of_directions(method: Method, mlp: Task) -> None:
    model = mlp.model()
    optimizer = method.build(model, momentum=0.5, momentum_mode="pre")
    train(model, optimizer, mlp, 2)
    assert all("momentum_buffer" not in state for state in optimizer.state.values())
    assert all("gradient_momentum" in state for state in optimizer.state.values())
    assert optimizer.memory_usage()["momentum"] == 8 * sum(p.numel() for p in model.parameters())


def test_first_direction_of_an_average_is_the_gradients_share(method: Method, mlp: Task) -> None:
    """v ← μv + (1 - μ)g, without correction for the start; a direction is linear in what is sent."""
    model, twin = mlp.model(), mlp.model()
    plain = method.build(model, **method.bare())
    averaged = method.build(twin, **method.bare(momentum=0.75, momentum_mode="pre"))
    (direction,), (moved,) = displacements(model, plain, mlp, 1), displacements(twin, averaged, mlp, 1)
    for name, value in direction.items():
        torch.testing.assert_close(moved[name], 0.25 * value, rtol=1e-9, atol=1e-13)
