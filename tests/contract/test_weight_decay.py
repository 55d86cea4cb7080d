"""Coupled decay is added to the preconditioned gradient; decoupled decay shrinks the parameters separately.

A window method adds coupled decay to the gradient, as torch's own optimizers do, so that it enters the window.
"""

from typing import Any

import pytest
import torch

from tests.support.methods import Method, Variant
from tests.support.tasks import Task, assert_same_moves, displacements, values

LR, DECAY = 0.5, 0.1
Moves = list[dict[str, torch.Tensor]]


def moves(method: Method, task: Task, steps: int, **keywords: Any) -> Moves:
    return method.bare_moves(task, steps, lr=LR, **keywords)


def decayed(method: Method, task: Task, steps: int, decoupled: bool = False, begin: int = 0, **keywords: Any) -> Moves:
    """The expected changes of steps without momentum and with decay from step `begin` on."""
    model, optimizer = method.start(task, **method.bare(lr=LR, **keywords))
    start, taken = values(model), []

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


@pytest.mark.cover(decoupled=[False, True])
def test_without_momentum_the_two_agree(method: Method, variant: Variant, task: Task, decoupled: bool) -> None:
    """A layer method computes `θ - lr (V + wd θ)` in both cases, where V is the direction without decay."""
    expected = decayed(method, task, 6, decoupled, **variant.keywords)
    options = {"weight_decay": DECAY, "decoupled_weight_decay": decoupled}
    for wanted, moved in zip(expected, moves(method, task, 6, **variant.keywords, **options), strict=True):
        assert_same_moves(moved, wanted)


@pytest.mark.parametrize("decoupled", [False, True])
def test_momentum_nesterov_and_maximize_with_decay(method: Method, mlp: Task, decoupled: bool) -> None:
    """Coupled decay enters momentum and Nesterov's step; decoupled decay enters neither."""
    start = values(mlp.model())
    options = {"weight_decay": DECAY, "decoupled_weight_decay": decoupled}
    one, two = moves(method, mlp, 2) if decoupled else decayed(method, mlp, 2)
    outside = {name: (LR * DECAY if decoupled else 0.0) * value for name, value in start.items()}
    heavy = {name: two[name] + 0.5 * one[name] for name in start}
    _, moved = moves(method, mlp, 2, momentum=0.5, **options)
    assert_same_moves(moved, {name: heavy[name] - outside[name] for name in start})
    _, moved = moves(method, mlp, 2, momentum=0.5, nesterov=True, **options)
    assert_same_moves(moved, {name: two[name] + 0.5 * heavy[name] - outside[name] for name in start})

    (expected,) = decayed(method, mlp, 1, decoupled, maximize=True)
    (moved,) = moves(method, mlp, 1, maximize=True, **options)
    assert_same_moves(moved, expected)
    if decoupled or method.layerwise:
        (plain,) = moves(method, mlp, 1)
        assert_same_moves(moved, {name: -plain[name] - LR * DECAY * start[name] for name in start})


def test_decay_is_read_at_each_step(method: Method, mlp: Task) -> None:
    def decay(optimizer: Any) -> None:
        optimizer.param_groups[0]["weight_decay"] = DECAY

    assert_same_moves(moves(method, mlp, 2, between=decay)[1], decayed(method, mlp, 2, begin=1)[1])


@pytest.mark.option("weight_decay_mode", "window_size")
def test_legacy_decay_does_not_depend_on_the_learning_rate(method: Method, variant: Variant, mlp: Task) -> None:
    start = values(mlp.model())
    plain = moves(method, mlp, 3, **variant.keywords)
    options = {"weight_decay": DECAY, "weight_decay_mode": "legacy"}
    for without, moved in zip(plain, moves(method, mlp, 3, **variant.keywords, **options), strict=True):
        assert_same_moves(moved, {name: without[name] - DECAY * start[name] for name in start})


@pytest.mark.option("weight_decay_mode", "damping")
def test_decay_of_mode_reg_is_preconditioned(method: Method, mlp: Task) -> None:
    """`reg`: F⁻¹(g + wd θ), where F contains gradients without decay."""
    start, huge = values(mlp.model()), 1e12
    keywords = {**method.bare(), "damping": huge, "lr": huge, "weight_decay_mode": "reg"}
    plain, with_decay = (method.trained(mlp, 1, **{**keywords, "weight_decay": decay}) for decay in (0.0, DECAY))
    for name in method.covered(mlp.model()):  # F is λI up to rounding, so that the difference is the decay itself
        torch.testing.assert_close(plain[name] - with_decay[name], DECAY * start[name], rtol=1e-6, atol=1e-9)


@pytest.mark.option("weight_decay_mode", "window_size")
def test_gradients_enter_the_window_without_their_decay(method: Method, mlp: Task) -> None:
    """The mode `both` is the sum of the two decays."""
    start, grams, found = values(mlp.model()), {}, {}
    for mode in ("standard", "legacy", "reg", "both"):
        model, optimizer = method.start(mlp, **method.bare(lr=LR, weight_decay=DECAY, weight_decay_mode=mode))
        found[mode] = list(displacements(model, optimizer, mlp, 3))
        grams[mode] = optimizer.state[model.first.weight]["gram"].clone()
    assert torch.equal(grams["legacy"], grams["reg"])
    assert torch.equal(grams["legacy"], grams["both"])
    assert not torch.equal(grams["legacy"], grams["standard"])
    for one, both in zip(found["reg"], found["both"], strict=True):
        assert_same_moves(both, {name: one[name] - DECAY * start[name] for name in start})
