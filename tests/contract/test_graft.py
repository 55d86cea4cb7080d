"""`graft`: every block steps in the method's direction, as far as SGD or Adam would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW

from tests.support.methods import Method, Variant
from tests.support.tasks import (
    Shadow,
    Task,
    assert_identical,
    backward,
    block_vector,
    displacements,
    values,
)

pytestmark = pytest.mark.option("graft")

RULES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: SGD(p, 0.05),
    "adam": lambda p: AdamW(p, 0.05, weight_decay=0.0),
}


def lengths(variant: Variant, model: torch.nn.Module, moved: dict[str, torch.Tensor]) -> dict[str, float]:
    return {block: float(block_vector(moved, names).norm()) for block, names in variant.units(model).items()}


def compare_lengths(
    method: Method, variant: Variant, task: Task, rule: str, steps: int, scheduled: bool, **keywords: Any
) -> None:
    model, optimizer = method.start(
        task, **{"graft": rule, "lr": 0.05, "momentum": 0.0, **variant.keywords, **keywords}
    )
    shadow = Shadow(list(model.parameters()), RULES[rule])
    names = [name for name, _ in model.named_parameters()]
    schedules = [
        torch.optim.lr_scheduler.CosineAnnealingLR(o, steps) for o in (optimizer, shadow.optimizer) if scheduled
    ]
    for step in range(steps):
        ours, theirs = values(model), shadow.values()
        backward(model, optimizer, task, step)
        shadow.step()
        optimizer.step()
        for schedule in schedules:
            schedule.step()
        moved = {name: value - ours[name] for name, value in values(model).items()}
        reference = {name: new - old for name, new, old in zip(names, shadow.values(), theirs, strict=True)}
        assert lengths(variant, model, moved) == pytest.approx(lengths(variant, model, reference), rel=1e-6)


@pytest.mark.cover(rule=[*RULES])
def test_block_steps_are_as_long_as_the_rules(method: Method, variant: Variant, task: Task, rule: str) -> None:
    """All of a block together; the size depends on the gradients seen, not on the parameters."""
    compare_lengths(method, variant, task, rule, steps=6, scheduled=False)


@pytest.mark.cover(rule=[*RULES])
def test_lengths_follow_the_schedule(method: Method, mlp: Task, rule: str) -> None:
    compare_lengths(method, method.variants[0], mlp, rule, steps=6, scheduled=True)


@pytest.mark.option("kl_clip")
@pytest.mark.cover(rule=[*RULES])
def test_kl_clip_does_not_shorten_them(method: Method, mlp: Task, rule: str) -> None:
    compare_lengths(method, method.variants[0], mlp, rule, steps=3, scheduled=False, kl_clip=1e-12)


@pytest.mark.cover(rule=[*RULES])
def test_first_direction_is_the_methods(method: Method, task: Task, rule: str) -> None:
    """On the first step Adam's first moment is the gradient itself."""
    model, twin = task.model(), task.model()
    plain, grafted = method.build(model, **method.bare()), method.build(twin, **method.bare(graft=rule))
    (direction,), (moved,) = displacements(model, plain, task, 1), displacements(twin, grafted, task, 1)
    for names in method.variants[0].units(model).values():
        cosine = torch.cosine_similarity(block_vector(moved, names), block_vector(direction, names), dim=0)
        torch.testing.assert_close(cosine, torch.ones_like(cosine), rtol=0, atol=1e-9)


def test_sgd_grafting_is_the_direction_scaled_at_every_step(method: Method, variant: Variant, mlp: Task) -> None:
    model, twin = mlp.model(), mlp.model()
    plain = method.build(model, **method.bare(**variant.keywords))
    grafted = method.build(twin, **method.bare(graft="sgd", **variant.keywords))
    pairs = zip(displacements(model, plain, mlp, 6), displacements(twin, grafted, mlp, 6), strict=True)
    for direction, moved in pairs:
        gradients = {name: p.grad for name, p in twin.named_parameters()}
        for names in variant.units(model).values():
            v, g = block_vector(direction, names), block_vector(gradients, names)
            torch.testing.assert_close(block_vector(moved, names), v * g.norm() / v.norm(), rtol=1e-6, atol=1e-13)


def test_momentum_runs_over_sgd_grafted_directions(method: Method, mlp: Task) -> None:
    model, twin = mlp.model(), mlp.model()
    plain = method.build(model, **method.bare(graft="sgd"))
    heavy = method.build(twin, **method.bare(graft="sgd", momentum=0.5))
    one, two, three = displacements(model, plain, mlp, 3)
    *_, moved = displacements(twin, heavy, mlp, 3)
    for name in moved:
        expected = three[name] + 0.5 * two[name] + 0.25 * one[name]
        torch.testing.assert_close(moved[name], expected, rtol=1e-9, atol=1e-13)


def test_no_heavy_ball_over_adam_grafting(method: Method, mlp: Task) -> None:
    """Adam's first moment is the momentum."""
    results = [method.trained(mlp, 5, graft="adam", lr=0.01, momentum=momentum) for momentum in (0.0, 0.9)]
    assert_identical(results[1], results[0])


def test_adam_grafting_has_adams_betas_and_eps(method: Method, mlp: Task) -> None:
    """With eps far above the gradients the step is the first moment over eps."""
    model, optimizer = method.start(mlp, graft="adam", lr=1.0, fallback_betas=(0.5, 0.75), fallback_eps=1e6)
    start = values(model)
    backward(model, optimizer, mlp, 0)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    optimizer.step()
    moved = {name: value - start[name] for name, value in values(model).items()}
    variant = method.variants[0]
    expected = {block: length / 1e6 for block, length in lengths(variant, model, gradients).items()}
    assert lengths(variant, model, moved) == pytest.approx(expected, rel=1e-4)


@pytest.mark.cover(rule=[*RULES])
def test_weight_decay_is_not_grafted(method: Method, mlp: Task, rule: str) -> None:
    """Decoupled: the parameters shrink by lr times decay beside the grafted step."""
    model, twin = mlp.model(), mlp.model()
    plain = method.build(model, **method.bare(lr=0.5, graft=rule))
    decayed = method.build(
        twin, **{**method.bare(lr=0.5, graft=rule), "weight_decay": 0.1, "decoupled_weight_decay": True}
    )
    start = values(model)
    (without,), (moved,) = displacements(model, plain, mlp, 1), displacements(twin, decayed, mlp, 1)
    for name in moved:
        torch.testing.assert_close(moved[name], without[name] - 0.05 * start[name], rtol=1e-9, atol=1e-13)


@pytest.mark.option("window_size")
def test_adam_grafting_goes_where_the_window_sends_adams_first_moment(method: Method, mlp: Task) -> None:
    """The direction is that of the bias-corrected average of the stored gradients, linear in what they are."""
    model, twin = mlp.model(), mlp.model()
    keywords = method.bare(fallback_betas=(0.0, 0.999))
    plain, grafted = method.build(model, **keywords), method.build(twin, **keywords, graft="adam")
    for direction, moved in zip(displacements(model, plain, mlp, 6), displacements(twin, grafted, mlp, 6), strict=True):
        names = list(direction)
        cosine = torch.cosine_similarity(block_vector(moved, names), block_vector(direction, names), dim=0)
        torch.testing.assert_close(cosine, torch.ones_like(cosine), rtol=0, atol=1e-9)
