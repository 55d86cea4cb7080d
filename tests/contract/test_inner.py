"""`inner="adamw"`: AdamW consumes the preconditioned gradient of covered blocks."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.optim import AdamW

from tests.support.methods import Method
from tests.support.tasks import Shadow, Task, backward, displacements, train, values

pytestmark = pytest.mark.option("inner")

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "decay": ({"weight_decay": 0.1}, {"weight_decay": 0.1}),
    "betas": (
        {"fallback_betas": (0.5, 0.75), "fallback_eps": 1e-4},
        {"betas": (0.5, 0.75), "eps": 1e-4},
    ),
    "momentum is not applied on top": ({"momentum": 0.9}, {}),
    "decoupled is what it is anyway": (
        {"weight_decay": 0.1, "decoupled_weight_decay": True},
        {"weight_decay": 0.1},
    ),
}


@pytest.mark.cover(case=[*CASES])
def test_is_adamw_fed_with_directions(method: Method, task: Task, case: str) -> None:
    """The directions come from a twin whose step is the direction; every step starts from the same parameters."""
    ours, theirs = CASES[case]
    model, twin = task.model(), task.model()
    plain = method.build(twin, **method.bare())
    optimizer = method.build(model, **{**method.bare(lr=0.01, inner="adamw"), **ours})
    names = sorted(method.covered(model))
    start = values(model)
    # the loss does not depend on the keys' bias: all that is there is rounding, divided by its own size and ε
    noise = 1e-12 if method.accepts("factor_update_steps") else 1e-10
    fed = {name: torch.nn.Parameter(start[name].clone()) for name in names}
    reference = AdamW(fed.values(), 0.01, **{"weight_decay": 0.0, **theirs})
    for direction, moved in zip(
        displacements(twin, plain, task, 6), displacements(model, optimizer, task, 6), strict=True
    ):
        for name in names:
            fed[name].grad = -direction[name]
        reference.step()
        with torch.no_grad():
            for name in names:
                torch.testing.assert_close(moved[name], fed[name] - start[name], rtol=1e-6, atol=noise)
                fed[name].copy_(start[name])


def test_state_of_covered_parameters(method: Method, mlp: Task) -> None:
    model, variant = mlp.model(), method.variants[0]
    optimizer = method.build(model, inner="adamw", **method.leave_out)
    train(model, optimizer, mlp, 2)
    own = variant.own_state(model.first.weight)
    keys = optimizer.state[model.first.weight].keys()
    kept = variant.of(model.first) | variant.first_state | own
    assert keys == kept | {"step", "exp_avg", "exp_avg_sq", "global_step"}
    for name in method.left_out(model):
        assert optimizer.state[model.get_parameter(name)].keys() == {"step", "momentum_buffer"}


def test_directions_enter_not_gradients(method: Method, mlp: Task) -> None:
    """After one step `exp_avg` is (1 - β₁) times the direction."""
    model, twin = mlp.model(), mlp.model()
    (direction,) = displacements(twin, method.build(twin, **method.bare()), mlp, 1)
    optimizer = method.build(model, **method.bare(inner="adamw"))
    train(model, optimizer, mlp, 1)
    for name in method.covered(model):
        average = optimizer.state[model.get_parameter(name)]["exp_avg"]
        torch.testing.assert_close(average, -0.1 * direction[name], rtol=1e-9, atol=1e-13)


@pytest.mark.option("inner", "skip_layers")
def test_a_block_without_estimate_follows_adamw_under_inner_adamw(method: Method, task: Task) -> None:
    model = task.model()
    optimizer = method.build(
        model, lr=0.02, inner="adamw", weight_decay=0.1, fallback_betas=(0.8, 0.95), fallback_eps=1e-6
    )
    own = [model.get_parameter(name) for name in sorted(method.covered(model))]
    shadow = Shadow(own, lambda copies: AdamW(copies, 0.02, (0.8, 0.95), 1e-6, 0.1))
    with warnings.catch_warnings(), optimizer.pause_capture():
        warnings.simplefilter("ignore")  # nothing is captured, on purpose
        for step in range(4):
            backward(model, optimizer, task, step)
            shadow.step()
            optimizer.step()
    assert all(optimizer.state[block.owner]["refreshes"] == 0 for block in optimizer.blocks.values())
    shadow.assert_identical()
