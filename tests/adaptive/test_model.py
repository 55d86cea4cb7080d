"""Learning rate and momentum from the quadratic model, against dense solves with an explicit curvature matrix."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from secondorder import EKFAC, KFAC
from tests.support.building import built
from tests.support.grid import pairs
from tests.support.quadratic import (
    Loop,
    batch,
    damping,
    flat,
    gauss_newton,
    in_order,
    mlp,
    momenta,
    of_two_groups,
    problem,
    ratio,
    regression,
    repeat,
)


def modelled(optimizer: KFAC) -> tuple[float, float]:
    found = optimizer.diagnostics()
    return -found["model_rate"], found["model_momentum"]


@pairs(lr=[1.0, 0.3], momentum=[0.9, 0.0], decay=[0.0, 0.1], exact=[True, False], method=[KFAC, EKFAC])
def test_coefficients_and_step_are_those_of_a_dense_solve(
    method: type[KFAC], exact: bool, decay: float, momentum: float, lr: float
) -> None:
    model, (x, y), lam = mlp(), batch(), 0.05
    optimizer = built(
        method, model, lr=lr, momentum=momentum, damping=lam, kl_clip=None, factor_update_steps=1, inv_update_steps=1,
        quadratic_model=True, likelihood="categorical" if exact else None, weight_decay=decay,
    )  # fmt: skip
    loop, previous = Loop(model, optimizer, x, y, outputs=exact), None
    for t in range(5):
        theta, C = flat(model.parameters()), gauss_newton(model, x, y)
        with optimizer.keep_directions() as kept:
            optimizer.step(loop)
        delta = flat(model.parameters()) - theta
        if not exact:
            C = in_order(model, [optimizer.dense_curvature(name) for name in optimizer.blocks])
        V = flat(kept[name] for name, _ in model.named_parameters()) + decay * theta
        D = V[None] if previous is None else torch.stack([V, previous])
        M = D @ (C + (lam + decay) * torch.eye(len(theta), dtype=torch.float64)) @ D.mT
        c = D @ (flat(p.grad for p in model.parameters()) + decay * theta)
        found = -np.linalg.solve(M.numpy(), c.numpy())
        assert modelled(optimizer) == (pytest.approx(found[0], rel=1e-7), pytest.approx([*found, 0][1], abs=1e-9))
        torch.testing.assert_close(delta, lr * torch.tensor(found) @ D, rtol=1e-7, atol=1e-12)
        previous = delta / lr if momentum else None
        assert loop.calls == t + 1
    assert momentum or not any("momentum_buffer" in state for state in optimizer.state.values())


def test_each_group_enters_the_model_with_its_own_damping() -> None:
    model, optimizer, loop = of_two_groups(
        {"damping": 0.3}, {"damping": 0.02}, quadratic_model=True, likelihood="categorical", outputs=True
    )
    theta, C = flat(model.parameters()), gauss_newton(model, loop.x, loop.y)
    with optimizer.keep_directions() as kept:
        optimizer.step(loop)
    V = flat(kept[name] for name, _ in model.named_parameters())
    lam = torch.cat([torch.full((20,), 0.3), torch.full((24,), 0.02)]).double()
    alpha = -(flat(p.grad for p in model.parameters()) @ V) / (V @ C @ V + V @ (lam * V))
    assert modelled(optimizer)[0] == pytest.approx(float(alpha), rel=1e-8)
    torch.testing.assert_close(flat(model.parameters()) - theta, alpha * V)


def test_decoupled_decay_affects_only_the_parameters() -> None:
    found = []
    for decay in (0.2, 0.0):
        torch.manual_seed(0)
        model, optimizer, loop = problem(
            quadratic_model=True, likelihood="categorical", weight_decay=decay, decoupled_weight_decay=True, lr=0.5,
            outputs=True,
        )  # fmt: skip
        theta = flat(model.parameters())
        optimizer.step(loop)
        found.append(flat(model.parameters()) - (1 - 0.5 * decay) * theta)
    torch.testing.assert_close(*found)


def test_without_a_closure_the_model_is_that_of_the_blocks() -> None:
    """With new inverses and no momentum the model then gives α = −1. A likelihood needs the outputs of a closure."""
    _, optimizer, loop = problem(quadratic_model=True)
    for _ in range(3):
        loop()
        optimizer.step()
        assert modelled(optimizer) == (pytest.approx(-1), 0.0)
    _, optimizer, loop = problem(quadratic_model=True, likelihood="categorical")
    loop()
    with pytest.raises(RuntimeError, match=r"likelihood= needs step\(closure\) with a closure that returns"):
        optimizer.step()


@pytest.mark.parametrize("lr", [1.0, 0.4])
def test_the_ratio_counts_the_step_that_was_taken(lr: float) -> None:
    """On a quadratic, ρ is one for the model's own step and for the part of it that ``lr`` takes."""
    _, optimizer, loop = regression(
        lr=lr, momentum=0.9, quadratic_model=True, adaptive_damping=True, damping_interval=1, likelihood="gaussian",
        outputs=True,
    )  # fmt: skip
    for _ in range(3):
        optimizer.step(loop)
        assert ratio(optimizer) == pytest.approx(1, abs=1e-6)


def test_micro_batches_in_one_closure_are_one_batch() -> None:
    found = []
    for parts in (1, 2):
        torch.manual_seed(0)
        model, optimizer, whole = problem(
            quadratic_model=True, momentum=0.9, adaptive_damping=True, damping_interval=2, likelihood="categorical"
        )

        def closure(parts: int = parts, model: nn.Module = model, whole: Loop = whole) -> Any:
            model.zero_grad()
            outputs, total = [], torch.zeros(())
            for x, y in zip(whole.x.chunk(parts), whole.y.chunk(parts), strict=True):
                outputs.append(model(x))
                loss = F.cross_entropy(outputs[-1], y) / parts
                loss.backward()
                total = total + loss.detach()
            return total, outputs

        repeat(optimizer, closure, 4)
        found.append((flat(model.parameters()), *modelled(optimizer), damping(optimizer)))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_a_closed_gate_changes_nothing() -> None:
    """On a device, a batch that is not finite is dropped without the host; parameters and momentum stay."""
    model, optimizer, loop = problem(quadratic_model=True, momentum=0.9, likelihood="categorical", outputs=True)
    repeat(optimizer, loop, 2)
    before, buffers = flat(model.parameters()), momenta(optimizer)
    gradients = {p: torch.full_like(p, torch.nan) for p in model.parameters()}
    with torch.no_grad():
        directions, size = optimizer._trust.size(gradients, dict(gradients))
        optimizer._update.apply(gradients, directions, torch.tensor(False), size)
    assert torch.equal(flat(model.parameters()), before)
    assert torch.equal(momenta(optimizer), buffers)
