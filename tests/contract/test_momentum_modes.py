"""Where momentum runs: over directions as torch has it, as their average, or over gradients before they are sent."""

from __future__ import annotations

import pytest
import torch

from tests.support.methods import Method
from tests.support.tasks import Task, assert_identical, displacements, values

pytestmark = pytest.mark.option("momentum_mode")

MODES = {mode: {"momentum_mode": mode} for mode in ("heavy_ball", "ema", "pre", "post")}
OVER_DIRECTIONS = {mode: MODES[mode] for mode in ("heavy_ball", "ema", "post")}


@pytest.mark.rules(OVER_DIRECTIONS)
def test_momentum_over_directions(method: Method, mlp: Task, rule: str) -> None:
    share = 0.75 if rule == "ema" else 1.0
    model, twin = mlp.model(), mlp.model()
    plain = method.build(model, **method.bare())
    heavy = method.build(twin, **method.bare(momentum=0.25, momentum_mode=rule))
    sent = {name: torch.zeros_like(value) for name, value in values(model).items()}
    for direction, moved in zip(displacements(model, plain, mlp, 6), displacements(twin, heavy, mlp, 6), strict=True):
        for name, value in direction.items():
            sent[name] = 0.25 * sent[name] + share * value
            torch.testing.assert_close(moved[name], sent[name], rtol=1e-9, atol=1e-13)


@pytest.mark.rules(MODES)
def test_without_momentum_the_mode_is_of_no_account(method: Method, mlp: Task, rule: str) -> None:
    results = [method.trained(mlp, 6, momentum=0.0, **chosen) for chosen in ({}, MODES[rule])]
    assert_identical(results[1], results[0])


def test_momentum_over_gradients_has_no_buffer_of_directions(method: Method, mlp: Task) -> None:
    model, optimizer = method.start(mlp, 2, momentum=0.5, momentum_mode="pre")
    for name, parameter in model.named_parameters():
        covered = name in method.covered(model)
        assert ("gradient_momentum" in optimizer.state[parameter]) == covered
        assert ("momentum_buffer" in optimizer.state[parameter]) == (not covered)
    assert optimizer.memory_usage()["momentum"] == 8 * sum(p.numel() for p in model.parameters())


def test_first_direction_of_an_average_is_the_gradients_share(method: Method, mlp: Task) -> None:
    """v ← μv + (1 - μ)g, which a layer method corrects for its start; a direction is linear in what is sent."""
    model, twin = mlp.model(), mlp.model()
    plain = method.build(model, **method.bare())
    averaged = method.build(twin, **method.bare(momentum=0.75, momentum_mode="pre"))
    (direction,), (moved,) = displacements(model, plain, mlp, 1), displacements(twin, averaged, mlp, 1)
    for name, value in direction.items():
        share = 1.0 if method.layerwise else 0.25
        torch.testing.assert_close(moved[name], share * value, rtol=1e-9, atol=1e-13)
