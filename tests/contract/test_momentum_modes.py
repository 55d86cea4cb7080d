"""The modes of momentum: a sum of directions as in torch, their average, or an average of gradients."""

import pytest
import torch

from tests.support.methods import Method
from tests.support.tasks import Task, assert_identical, assert_same_moves, values

pytestmark = pytest.mark.option("momentum_mode")

MODES = {mode: {"momentum_mode": mode} for mode in ("heavy_ball", "ema", "pre", "post")}


@pytest.mark.rules(MODES)
def test_momentum_over_directions_and_momentum_of_zero(method: Method, mlp: Task, rule: str) -> None:
    assert_identical(method.trained(mlp, momentum=0.0, **MODES[rule]), method.trained(mlp, momentum=0.0))
    if rule == "pre":
        return
    share = 0.75 if rule == "ema" else 1.0
    expected = {name: torch.zeros_like(value) for name, value in values(mlp.model()).items()}
    plain, heavy = method.bare_moves(mlp, 6), method.bare_moves(mlp, 6, momentum=0.25, momentum_mode=rule)
    for direction, moved in zip(plain, heavy, strict=True):
        expected = {name: 0.25 * expected[name] + share * value for name, value in direction.items()}
        assert_same_moves(moved, expected)


def test_momentum_over_gradients_has_no_buffer_of_directions(method: Method, mlp: Task) -> None:
    """The average is v ← μv + (1 - μ)g. Only a layer method corrects its bias, so that others start with a share."""
    model, optimizer = method.start(mlp, 2, momentum=0.5, momentum_mode="pre")
    for name, parameter in model.named_parameters():
        covered = name in method.covered(model)
        assert ("gradient_momentum" in optimizer.state[parameter]) == covered
        assert ("momentum_buffer" in optimizer.state[parameter]) == (not covered)
    assert optimizer.memory_usage()["momentum"] == 8 * sum(p.numel() for p in model.parameters())
    (direction,), (moved,) = (
        method.bare_moves(mlp, 1, **momentum) for momentum in ({}, {"momentum": 0.75, "momentum_mode": "pre"})
    )
    share = 1.0 if method.layerwise else 0.25
    assert_same_moves(moved, {name: share * value for name, value in direction.items()})
