"""`clip_norm` and `clip_value` bound the preconditioned direction; functions of `torch.nn.utils` bound gradients."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.methods import Method, Variant
from tests.support.tasks import (
    Task,
    assert_all_close,
    assert_identical,
    assert_same_moves,
    backward,
    block_vector,
    values,
)

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


@pytest.mark.parametrize("keyword", ["clip_norm", "clip_value"])
def test_a_bound_is_read_at_each_step_and_a_large_one_has_no_effect(method: Method, mlp: Task, keyword: str) -> None:
    def lift(optimizer: Any) -> None:
        optimizer.param_groups[0][keyword] = None

    free = method.bare_moves(mlp, 2)
    assert_identical(method.bare_moves(mlp, 2, **{keyword: 1e9}), free)
    first, second = method.bare_moves(mlp, 2, between=lift, **{keyword: 1e-6})
    covered = method.covered(mlp.model())
    assert all(first[name].abs().max() <= 1e-6 * (1 + 1e-6) for name in covered)
    assert_same_moves({n: second[n] for n in covered}, {n: free[1][n] for n in covered})


def gradients_clipped(method: Method, task: Task, clip: Any) -> dict[str, torch.Tensor]:
    model, optimizer = method.start(task)
    for step in range(4):
        backward(model, optimizer, task, step)
        clip(model)
        optimizer.step()
    return values(model)


@pytest.mark.parametrize("by", ["norm", "value"])
def test_a_step_uses_clipped_gradients(method: Method, mlp: Task, by: str) -> None:
    """`test_undisturbed.py` tests that a bound that is not reached changes nothing."""
    bound = 0.01

    def by_torch(model: nn.Module) -> None:
        clip = nn.utils.clip_grad_norm_ if by == "norm" else nn.utils.clip_grad_value_
        clip(model.parameters(), bound)

    def by_hand(model: nn.Module) -> None:
        gradients = [p.grad for p in model.parameters()]
        norm = torch.sqrt(sum(g.square().sum() for g in gradients))
        factor = bound / (norm + 1e-6)
        for p, g in zip(model.parameters(), gradients, strict=True):
            p.grad = g * factor if by == "norm" else g.clamp(-bound, bound)

    found, expected, free = (gradients_clipped(method, mlp, clip) for clip in (by_torch, by_hand, lambda model: None))
    assert_all_close(found, expected, rtol=1e-9, atol=1e-12)
    assert any(not torch.equal(found[name], free[name]) for name in free)


@pytest.mark.option("factor_update_steps")
def test_factors_do_not_depend_on_clipped_gradients(method: Method, mlp: Task) -> None:
    """Factors are captured during backward, so clipping scales the direction by the same factor as the gradient."""
    steps = []
    for bound in (None, 0.01):
        model, optimizer = method.start(mlp, **method.bare())
        backward(model, optimizer, mlp, 0)
        before, scale = values(model), 1.0
        if bound is not None:
            scale = bound / (float(nn.utils.clip_grad_norm_(model.parameters(), bound)) + 1e-6)
        optimizer.step()
        steps.append({name: (value - before[name]) / scale for name, value in values(model).items()})
    assert_all_close(steps[1], steps[0], rtol=1e-6, atol=1e-9)
