"""Coupled decay is added to the preconditioned gradient; decoupled decay shrinks the parameters beside it.

A window method adds coupled decay to the gradient, as torch's own optimizers do: it enters the window.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.methods import Method, Variant
from tests.support.tasks import Task, assert_all_close, displacements, train, values

LR, DECAY = 0.5, 0.1


Moves = list[dict[str, torch.Tensor]]


def moves(method: Method, task: Task, steps: int, **keywords: Any) -> Moves:
    model = task.model()
    return list(displacements(model, method.build(model, **method.bare(lr=LR, **keywords)), task, steps))


def decayed(method: Method, task: Task, steps: int, decoupled: bool = False, begin: int = 0, **keywords: Any) -> Moves:
    """What steps with decay (from the step `begin` on) add to the parameters without momentum, made without decay."""
    model = task.model()
    optimizer, start, taken = method.build(model, **method.bare(lr=LR, **keywords)), values(model), []

    def into_the_gradient(*_: object) -> None:
        taken.append(1)
        for parameter in model.parameters() if len(taken) > begin else ():
            parameter.grad.add_(parameter.detach(), alpha=-DECAY if keywords.get("maximize") else DECAY)

    if not decoupled and not method.layerwise:
        optimizer.register_step_pre_hook(into_the_gradient)
        return list(displacements(model, optimizer, task, steps))
    pull = [0.0] * begin + [LR * DECAY] * (steps - begin)
    without = displacements(model, optimizer, task, steps)
    return [{n: m[n] - by * start[n] for n in m} for m, by in zip(without, pull, strict=True)]


def assert_close(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert_all_close(actual, expected, rtol=1e-9, atol=1e-13)


@pytest.mark.cover(decoupled=[False, True])
def test_without_momentum_the_two_agree(method: Method, variant: Variant, task: Task, decoupled: bool) -> None:
    """`θ - lr (V + wd θ)` either way for a layer method; V is that of the gradient without decay."""
    expected = decayed(method, task, 6, decoupled, **variant.keywords)
    options = {"weight_decay": DECAY, "decoupled_weight_decay": decoupled}
    for wanted, moved in zip(expected, moves(method, task, 6, **variant.keywords, **options), strict=True):
        assert_close(moved, wanted)


def test_coupled_decay_enters_the_momentum(method: Method, mlp: Task) -> None:
    one, two = decayed(method, mlp, 2)
    _, moved = moves(method, mlp, 2, momentum=0.5, weight_decay=DECAY)
    assert_close(moved, {name: two[name] + 0.5 * one[name] for name in two})


def test_decoupled_decay_stays_out_of_the_momentum(method: Method, mlp: Task) -> None:
    start = values(mlp.model())
    one, two = moves(method, mlp, 2)
    _, moved = moves(method, mlp, 2, momentum=0.5, weight_decay=DECAY, decoupled_weight_decay=True)
    assert_close(moved, {name: two[name] + 0.5 * one[name] - LR * DECAY * start[name] for name in start})


@pytest.mark.cover(decoupled=[False, True])
def test_nesterov_looks_ahead(method: Method, mlp: Task, decoupled: bool) -> None:
    start = values(mlp.model())
    one, two = moves(method, mlp, 2) if decoupled else decayed(method, mlp, 2)
    options = {"weight_decay": DECAY, "decoupled_weight_decay": decoupled}
    _, moved = moves(method, mlp, 2, momentum=0.5, nesterov=True, **options)
    outside = {name: (LR * DECAY if decoupled else 0.0) * value for name, value in start.items()}
    expected = {}
    for name in start:
        expected[name] = two[name] + 0.5 * (two[name] + 0.5 * one[name]) - outside[name]
    assert_close(moved, expected)


@pytest.mark.cover(decoupled=[False, True])
def test_maximize_still_decays(method: Method, mlp: Task, decoupled: bool) -> None:
    (expected,) = decayed(method, mlp, 1, decoupled, maximize=True)
    options = {"weight_decay": DECAY, "decoupled_weight_decay": decoupled}
    (moved,) = moves(method, mlp, 1, maximize=True, **options)
    assert_close(moved, expected)
    if decoupled or method.layerwise:
        start, (plain,) = values(mlp.model()), moves(method, mlp, 1)
        assert_close(moved, {name: -plain[name] - LR * DECAY * start[name] for name in start})


def test_decay_is_read_at_each_step(method: Method, mlp: Task) -> None:
    model, optimizer = method.start(mlp, **method.bare(lr=LR))

    def decay() -> None:
        optimizer.param_groups[0]["weight_decay"] = DECAY

    _, moved = displacements(model, optimizer, mlp, 2, decay)
    _, expected = decayed(method, mlp, 2, begin=1)
    assert_close(moved, expected)


@pytest.mark.option("weight_decay_mode", "window_size")
def test_legacy_decay_does_not_know_the_learning_rate(method: Method, variant: Variant, mlp: Task) -> None:
    start = values(mlp.model())
    plain = moves(method, mlp, 3, **variant.keywords)
    options = {"weight_decay": DECAY, "weight_decay_mode": "legacy"}
    for without, moved in zip(plain, moves(method, mlp, 3, **variant.keywords, **options), strict=True):
        assert_close(moved, {name: without[name] - DECAY * start[name] for name in start})


@pytest.mark.option("weight_decay_mode", "damping")
def test_decay_beside_the_curvature_is_preconditioned_by_it(method: Method, mlp: Task) -> None:
    """`reg`: F⁻¹(g + wd θ) with F of raw gradients; a direction is linear in what is preconditioned."""
    start, huge = values(mlp.model()), 1e12
    keywords = {"damping": huge, "lr": huge, "weight_decay_mode": "reg"}
    model, twin = mlp.model(), mlp.model()
    for net, decay in ((model, 0.0), (twin, DECAY)):
        optimizer = method.build(net, **{**method.bare(), **keywords, "weight_decay": decay})
        train(net, optimizer, mlp, 1)
    decayed, plain = values(twin), values(model)
    for name in method.covered(model):  # F is λ up to rounding: the difference is the decay itself
        torch.testing.assert_close(plain[name] - decayed[name], DECAY * start[name], rtol=1e-6, atol=1e-9)


@pytest.mark.option("weight_decay_mode", "window_size")
def test_gradients_enter_the_window_raw_beside_their_decay(method: Method, mlp: Task) -> None:
    grams = {}
    for mode in ("standard", "legacy", "reg", "both"):
        model, optimizer = method.start(mlp, **method.bare(weight_decay=DECAY, weight_decay_mode=mode))
        for _ in displacements(model, optimizer, mlp, 3):
            pass
        grams[mode] = optimizer.state[model.first.weight]["gram"].clone()
    assert torch.equal(grams["legacy"], grams["reg"])
    assert torch.equal(grams["legacy"], grams["both"])
    assert not torch.equal(grams["legacy"], grams["standard"])


@pytest.mark.option("weight_decay_mode", "window_size")
def test_both_decays_are_the_sum_of_the_two(method: Method, mlp: Task) -> None:
    start = values(mlp.model())
    beside = moves(method, mlp, 3, weight_decay=DECAY, weight_decay_mode="reg")
    for one, moved in zip(beside, moves(method, mlp, 3, weight_decay=DECAY, weight_decay_mode="both"), strict=True):
        assert_close(moved, {name: one[name] - DECAY * start[name] for name in start})
