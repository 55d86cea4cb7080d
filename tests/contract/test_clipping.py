"""`clip_norm` and `clip_value` bound the preconditioned direction; functions of `torch.nn.utils` bound gradients."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.methods import Method, Variant
from tests.support.tasks import Task, assert_all_close, assert_identical, backward, block_vector, values

BOUND = 0.05


def test_value_clamps_each_entry_and_norm_scales_all_blocks_alike(method: Method, variant: Variant, mlp: Task) -> None:
    """The norm is that of all preconditioned directions together, as in `torch.nn.utils.clip_grad_norm_`."""
    free, clamped, scaled = (
        method.bare_moves(mlp, 4, **variant.keywords, **bound)
        for bound in ({}, {"clip_value": BOUND}, {"clip_norm": BOUND})
    )
    names = sorted(method.covered(mlp.model()))
    assert max(float(one[name].abs().max()) for one in free for name in names) > BOUND
    for before, by_value, by_norm in zip(free, clamped, scaled, strict=True):
        norm = float(block_vector(before, names).norm())
        assert norm > BOUND
        for name in names:
            torch.testing.assert_close(by_value[name], before[name].clamp(-BOUND, BOUND), rtol=1e-9, atol=1e-13)
            torch.testing.assert_close(by_norm[name], before[name] * (BOUND / norm), rtol=1e-5, atol=1e-13)


@pytest.mark.rules({keyword: {keyword: 1e-6} for keyword in ("clip_norm", "clip_value", "kl_clip")})
def test_a_bound_is_read_at_each_step_and_a_large_one_has_no_effect(method: Method, mlp: Task, rule: str) -> None:
    def lift(optimizer: Any) -> None:
        optimizer.param_groups[0][rule] = None

    free = method.bare_moves(mlp, 2)
    assert_identical(method.bare_moves(mlp, 2, **{rule: 1e9}), free)
    first, second = method.bare_moves(mlp, 2, between=lift, **{rule: 1e-6})
    for name in method.covered(mlp.model()):
        assert first[name].norm() < 1e-2 * free[0][name].norm()
        torch.testing.assert_close(second[name], free[1][name], rtol=1e-9, atol=1e-13)


@pytest.mark.option("skip_layers")
def test_curvature_does_not_depend_on_clipped_gradients(method: Method, mlp: Task) -> None:
    """It is captured during backward, so clipping scales the direction by the same factor as the gradient.

    `test_undisturbed.py` tests that a bound that is not reached changes nothing.
    """
    steps = []
    for bound in (math.inf, 0.01):
        model, optimizer = method.start(mlp, **method.bare())
        backward(model, optimizer, mlp, 0)
        before = values(model)
        scale = min(1.0, bound / (float(nn.utils.clip_grad_norm_(model.parameters(), bound)) + 1e-6))
        optimizer.step()
        steps.append({name: (value - before[name]) / scale for name, value in values(model).items()})
    assert_all_close(steps[1], steps[0], rtol=1e-6, atol=1e-9)
