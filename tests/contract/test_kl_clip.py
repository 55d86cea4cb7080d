"""kl-clip: one factor `min(1, sqrt(κ / s))` for all blocks, with `s = Σ η² ⟨V, ∇⟩` and the current learning rates.

The factor may be computed in single precision, hence the tolerance of 1e-6. `test_clipping.py` tests that the bound is
read at each step.
"""

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.methods import Method, Variant
from tests.support.tasks import Task, assert_all_close, covered_names, displacements, values

pytestmark = pytest.mark.option("kl_clip")


def lr_of(name: str) -> float:
    return 0.3 if name.startswith("first.") else 0.7


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups, of which the second has a tensor as its learning rate."""
    named, lrs = list(model.named_parameters()), {0.3: 0.3, 0.7: torch.tensor(0.7, dtype=torch.float64)}
    return [{"params": [p for name, p in named if lr_of(name) == rate], "lr": lr} for rate, lr in lrs.items()]


def check(method: Method, task: Task, kl_clip: float, gamma: float = 1.0, **keywords: Any) -> list[float]:
    """Compare six steps with the formula, and return the factors; learning rates decay by `gamma` after each step."""
    twin, clipped = method.start(task, params=groups, **method.bare(**{**keywords, "kl_clip": kl_clip}))
    schedule = torch.optim.lr_scheduler.ExponentialLR(clipped, gamma)
    factors, covered = [], covered_names(twin)
    pairs = zip(
        method.bare_moves(task, 6, **keywords), displacements(twin, clipped, task, 6, schedule.step), strict=True
    )
    for step, (direction, moved) in enumerate(pairs):
        gradients = {name: p.grad for name, p in twin.named_parameters()}
        lrs = {name: lr_of(name) * gamma**step for name in gradients}
        s = sum(lrs[n] ** 2 * float((-direction[n] * gradients[n]).sum()) for n in covered)
        factors.append(min(1.0, (kl_clip / abs(s)) ** 0.5))
        for name in covered:
            torch.testing.assert_close(moved[name], lrs[name] * factors[-1] * direction[name], rtol=1e-6, atol=1e-13)
        gain = "scale.gain"
        torch.testing.assert_close(moved[gain], -lrs[gain] * gradients[gain], rtol=1e-9, atol=1e-13)
    return factors


@pytest.mark.cover(kl_clip=[1e-6, 1e-4])
def test_formula_over_groups(method: Method, variant: Variant, task: Task, kl_clip: float) -> None:
    assert min(check(method, task, kl_clip, **variant.keywords)) < 1


def test_scheduled_lr_enters_the_factor(method: Method, mlp: Task) -> None:
    """s is proportional to the square of the learning rate, so the factor doubles when lr halves, up to 1."""
    first, *_, last = check(method, mlp, 1e-4, gamma=0.25)
    assert first < 0.5
    assert last == 1.0


def test_decoupled_weight_decay_does_not_enter(method: Method, mlp: Task) -> None:
    start = values(mlp.model())
    (plain,), (decayed,) = (
        method.bare_moves(mlp, 1, lr=0.5, kl_clip=1e-6, weight_decay=decay, decoupled_weight_decay=True)
        for decay in (0.0, 0.5)
    )
    expected = {name: plain[name] - 0.25 * start[name] for name in covered_names(mlp.model())}
    assert_all_close({name: decayed[name] for name in expected}, expected, rtol=1e-6, atol=1e-12)
