"""Coupled decay is added to the preconditioned gradient; decoupled decay shrinks the parameters separately.

A window method adds coupled decay to the gradient, as torch's own optimizers do, so that it enters the window. Momentum
is a sum of directions as in torch, their average, or an average of gradients.
"""

from typing import Any

import pytest
import torch

from tests.support.methods import Method, Variant
from tests.support.tasks import Task, assert_identical, assert_same_moves, displacements, values

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
    """Coupled decay enters momentum and Nesterov's step; decoupled decay enters neither.

    `test_equal_options.py` tests the sign of `maximize`.
    """
    options = {"weight_decay": DECAY, "decoupled_weight_decay": decoupled}
    one, two = moves(method, mlp, 2) if decoupled else decayed(method, mlp, 2)
    outside = {name: LR * DECAY * decoupled * value for name, value in values(mlp.model()).items()}
    heavy = {name: two[name] + 0.5 * one[name] for name in one}
    _, moved = moves(method, mlp, 2, momentum=0.5, **options)
    assert_same_moves(moved, {name: heavy[name] - outside[name] for name in one})
    _, moved = moves(method, mlp, 2, momentum=0.5, nesterov=True, **options)
    assert_same_moves(moved, {name: two[name] + 0.5 * heavy[name] - outside[name] for name in one})
    assert_same_moves(
        *moves(method, mlp, 1, maximize=True, **options), *decayed(method, mlp, 1, decoupled, maximize=True)
    )


def test_decay_is_read_at_each_step(method: Method, mlp: Task) -> None:
    def decay(optimizer: Any) -> None:
        optimizer.param_groups[0]["weight_decay"] = DECAY

    assert_same_moves(moves(method, mlp, 2, between=decay)[1], decayed(method, mlp, 2, begin=1)[1])


@pytest.mark.option("weight_decay_mode", "window_size")
def test_gradients_may_enter_the_window_without_their_decay(method: Method, variant: Variant, mlp: Task) -> None:
    """Legacy decay does not depend on the learning rate, and the mode `both` adds it to the preconditioned decay."""
    pull, found = {name: DECAY * value for name, value in values(mlp.model()).items()}, {}
    for mode in ("standard", "legacy", "reg", "both"):
        options = {**variant.keywords, "weight_decay": DECAY, "weight_decay_mode": mode}
        model, optimizer = method.start(mlp, **method.bare(lr=LR, **options))
        found[mode] = list(displacements(model, optimizer, mlp, 3)), optimizer.state[model.first.weight]["gram"].clone()
    (legacy, gram), (reg, _), (both, _) = (found[mode] for mode in ("legacy", "reg", "both"))
    assert all(torch.equal(found[mode][1], gram) == (mode != "standard") for mode in found)
    for plain, *moved in zip(moves(method, mlp, 3, **variant.keywords), legacy, reg, both, strict=True):
        assert_same_moves(moved[0], {name: plain[name] - pull[name] for name in pull})
        assert_same_moves(moved[2], {name: moved[1][name] - pull[name] for name in pull})


@pytest.mark.option("weight_decay_mode", "damping")
def test_decay_of_mode_reg_is_preconditioned(method: Method, mlp: Task) -> None:
    """`reg`: F⁻¹(g + wd θ), where F contains gradients without decay."""
    start, huge = values(mlp.model()), 1e12
    keywords = {**method.bare(), "damping": huge, "lr": huge, "weight_decay_mode": "reg"}
    plain, with_decay = (method.trained(mlp, 1, **{**keywords, "weight_decay": decay}) for decay in (0.0, DECAY))
    for name in method.covered(mlp.model()):  # F is λI up to rounding, so that the difference is the decay itself
        torch.testing.assert_close(plain[name] - with_decay[name], DECAY * start[name], rtol=1e-6, atol=1e-9)


MODES = {mode: {"momentum_mode": mode} for mode in ("heavy_ball", "ema", "pre", "post")}


@pytest.mark.option("momentum_mode")
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


@pytest.mark.option("momentum_mode")
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
