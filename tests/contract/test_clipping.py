"""`clip_norm` and `clip_value` bound the preconditioned direction."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.methods import Method, Variant
from tests.support.tasks import (
    Task,
    assert_identical,
    block_vector,
    displacements,
)

pytestmark = pytest.mark.option("clip_norm", "clip_value")


def directions(method: Method, task: Task, steps: int = 4, **keywords: Any) -> list[dict[str, torch.Tensor]]:
    model = task.model()
    return list(displacements(model, method.build(model, **method.bare(**keywords)), task, steps))


def test_value_clamps_each_number(method: Method, variant: Variant, mlp: Task) -> None:
    bound = 0.05
    free = directions(method, mlp, **variant.keywords)
    clipped = directions(method, mlp, clip_value=bound, **variant.keywords)
    covered = method.covered(mlp.model())
    assert max(float(one[name].abs().max()) for one in free for name in covered) > bound
    for before, after in zip(free, clipped, strict=True):
        for name in covered:
            torch.testing.assert_close(after[name], before[name].clamp(-bound, bound), rtol=1e-9, atol=1e-13)


def test_norm_scales_all_blocks_alike(method: Method, variant: Variant, mlp: Task) -> None:
    """As `torch.nn.utils.clip_grad_norm_`: one norm over everything that is preconditioned."""
    bound = 0.05
    names = sorted(method.covered(mlp.model()))
    free = directions(method, mlp, **variant.keywords)
    for before, after in zip(free, directions(method, mlp, clip_norm=bound, **variant.keywords), strict=True):
        norm = float(block_vector(before, names).norm())
        assert norm > bound
        expected = block_vector(before, names) * (bound / norm)
        torch.testing.assert_close(block_vector(after, names), expected, rtol=1e-5, atol=1e-13)


@pytest.mark.cover(keyword=["clip_norm", "clip_value"])
def test_generous_bound_is_no_bound(method: Method, mlp: Task, keyword: str) -> None:
    results = [method.trained(mlp, 5, **{keyword: bound}) for bound in (None, 1e9)]
    assert_identical(results[1], results[0])


@pytest.mark.cover(keyword=["clip_norm", "clip_value"])
def test_bound_is_read_at_each_step(method: Method, mlp: Task, keyword: str) -> None:
    model, optimizer = method.start(mlp, **method.bare(**{keyword: 1e-6}))

    def lift() -> None:
        optimizer.param_groups[0][keyword] = None

    first, second = displacements(model, optimizer, mlp, 2, lift)
    expected = directions(method, mlp, steps=2)[1]
    for name in method.covered(model):
        assert first[name].abs().max() <= 1e-6 * (1 + 1e-6)
        torch.testing.assert_close(second[name], expected[name], rtol=1e-9, atol=1e-13)


def test_gradients_are_not_what_is_clipped(method: Method, mlp: Task) -> None:
    model, optimizer = method.start(mlp, clip_norm=1e-6, clip_value=1e-6)
    mlp.loss(model, 0).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    optimizer.step()
    assert_identical({name: p.grad for name, p in model.named_parameters()}, gradients)
