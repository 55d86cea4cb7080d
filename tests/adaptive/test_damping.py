"""Levenberg-Marquardt: λ over steps against a reference, its bounds, its calls of the closure, its side effects."""

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secondorder import KFAC
from secondorder.diagnostics.step_record import StepRecord
from tests.support.grid import pairs
from tests.support.quadratic import (
    Loop,
    batch,
    damping,
    flat,
    gauss_newton,
    in_order,
    kfac,
    mlp,
    momenta,
    of_two_groups,
    problem,
    ratio,
    repeat,
)

EVERY_STEP: dict[str, Any] = {"adaptive_damping": True, "damping_interval": 1}


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("include", [False, True])
def test_damping_over_steps_is_that_of_a_reference(exact: bool, include: bool) -> None:
    model, optimizer, loop = problem(
        lr=1.5, momentum=0.5, damping=0.02, adaptive_damping=True, damping_interval=3, min_damping=0.01,
        max_damping=0.05, include_damping_in_model=include, likelihood="categorical" if exact else None, outputs=exact,
    )  # fmt: skip
    lam, seen = 0.02, set()
    for t in range(15):
        theta, before = flat(model.parameters()), loop.value()
        C = gauss_newton(model, loop.x, loop.y)
        optimizer.step(loop)
        assert loop.calls == t + 1 + (t + 1) // 3
        if t % 3 == 2:
            delta = flat(model.parameters()) - theta
            if not exact:  # blocks as they were used in this step, over vec([W | b]) row by row
                C = in_order(model, [optimizer.dense_curvature(name) for name in optimizer.blocks])
            predicted = flat(p.grad for p in model.parameters()) @ delta + 0.5 * delta @ C @ delta
            predicted += include * 0.5 * lam * delta @ delta
            actual = loop.value() - before
            rho = actual / float(predicted)
            assert ratio(optimizer) == pytest.approx(rho, rel=1e-6)
            trusted = rho > 0.75 or (actual < 0 and predicted > 0)
            factor = 0.95**3 if trusted else 1 / 0.95**3 if rho < 0.25 else 1.0
            lam = min(max(lam * factor, 0.01), 0.05)
            seen.add(factor)
        assert damping(optimizer) == pytest.approx(lam, rel=1e-12)
    assert len(seen) > 1  # λ must change in more than one way


@pytest.mark.parametrize(
    ("bad", "call"), [(1e3, 2), *((x, i) for x in (math.nan, math.inf, -math.inf) for i in (1, 2))]
)
def test_a_loss_that_rises_or_is_not_finite_raises_damping(bad: float, call: int) -> None:
    _, optimizer, loop = problem(**EVERY_STEP)

    def closure() -> float:
        loss = float(loop().detach())
        return bad if loop.calls == call else loss

    optimizer.step(closure)
    assert damping(optimizer) == pytest.approx(0.1 / 0.95)
    optimizer.load_state_dict(optimizer.state_dict())


def test_a_batch_that_is_dropped_raises_damping_once() -> None:
    _, optimizer, loop = problem(adaptive_damping=True, damping_interval=2)
    loop.x = loop.x * math.nan
    optimizer.step(loop)
    assert damping(optimizer) == 0.1
    optimizer.step(loop)
    assert damping(optimizer) == pytest.approx(0.1 / 0.95**2)
    assert loop.calls == 2
    assert optimizer.diagnostics()["skipped_steps"] == 2


@pytest.mark.parametrize(
    "options", [{}, {"likelihood": "categorical", "quadratic_model": True}], ids=["plain", "model"]
)
def test_a_batch_that_is_dropped_on_a_device(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The host does not know of it, so all stages run with a closed gate."""
    model, optimizer, loop = problem(
        momentum=0.9, adaptive_damping=True, damping_interval=2, reject_steps=True, outputs=True, **options
    )
    monkeypatch.setattr(StepRecord, "gate", lambda self, finite: (True, finite))
    optimizer.step(loop)
    before, momentum = flat(model.parameters()), momenta(optimizer)
    loop.x = loop.x * math.nan
    optimizer.step(loop)
    assert torch.equal(flat(model.parameters()), before)
    assert torch.equal(momenta(optimizer), momentum)
    assert damping(optimizer) == pytest.approx(0.1 / 0.95**2)
    assert optimizer.diagnostics()["rejected_steps"] == 0


@pytest.mark.parametrize(("sign", "bound", "lr"), [(-1.0, 0.08, 1.0), (1.0, 0.12, 1.0), (0.0, 0.1, 0.0)])
def test_damping_stays_within_its_bounds(sign: float, bound: float, lr: float) -> None:
    """The loss always falls or always rises, or a step has no length and is not judged."""
    _, optimizer, loop = problem(lr=lr, min_damping=0.08, max_damping=0.12, **EVERY_STEP)
    repeat(optimizer, loop if sign == 0.0 else lambda: sign * loop.rising(), 8)
    assert damping(optimizer) == bound


def test_all_groups_change_by_the_same_factor() -> None:
    _, optimizer, loop = of_two_groups(
        {"damping": 0.3}, {"damping": 2.0, "damping_mode": "relative"}, lr=0.1, **EVERY_STEP
    )
    optimizer.step(loop)
    assert [g["damping"] for g in optimizer.param_groups] == [pytest.approx(0.3 * 0.95), pytest.approx(2 * 0.95)]
    assert [g["damping_mode"] for g in optimizer.param_groups] == ["absolute", "relative"]


def test_the_model_includes_relative_damping_as_it_is_used() -> None:
    ratios = []
    for options in ({"damping_mode": "relative", "damping": 2.0}, {}):
        torch.manual_seed(0)
        model, (x, y) = nn.Linear(3, 4).double(), batch()
        if not options:
            probe = copy.deepcopy(model)
            first = kfac(probe)
            first.step(Loop(probe, first, x, y))
            options = {"damping": 2.0 * float(first.dense_curvature("").diagonal().mean())}
        optimizer = kfac(model, include_damping_in_model=True, **EVERY_STEP, **options)
        optimizer.step(Loop(model, optimizer, x, y))
        ratios.append(ratio(optimizer))
    assert ratios[0] == pytest.approx(ratios[1], rel=1e-10)


def test_cholesky_inverses_follow_a_new_damping_at_once() -> None:
    model, optimizer, loop = problem(
        lr=0.1, inverse_method="cholesky", inv_update_steps=100, factor_update_steps=100, **EVERY_STEP
    )
    optimizer.step(loop)
    found = [s["inverse_a"].clone() for p in model.parameters() if "inverse_a" in (s := optimizer.state[p])]
    other = kfac(model, inverse_method="cholesky", damping=damping(optimizer))
    other.load_state_dict({**optimizer.state_dict(), "param_groups": other.state_dict()["param_groups"]})
    with torch.no_grad():
        other.preconditioner.refresh(list(other.blocks.values()), True)
    expected = [s["inverse_a"] for p in model.parameters() if "inverse_a" in (s := other.state[p])]
    assert damping(optimizer) != 0.1
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_maximizing_the_negative_is_the_same() -> None:
    found = []
    for sign in (1.0, -1.0):
        torch.manual_seed(0)
        model, optimizer, loop = problem(
            maximize=sign < 0, adaptive_damping=True, damping_interval=2, quadratic_model=True, momentum=0.9,
            likelihood="categorical", outputs=True,
        )  # fmt: skip
        loop.loss = lambda f, y, sign=sign: sign * F.cross_entropy(f, y)
        repeat(optimizer, loop, 6)
        found.append([*flat(model.parameters()).tolist(), damping(optimizer), ratio(optimizer)])
    assert found[0] == found[1]


def test_groups_with_opposite_objectives_are_refused() -> None:
    _, optimizer, loop = of_two_groups({}, {"maximize": True}, **EVERY_STEP)
    with pytest.raises(RuntimeError, match="some groups maximize the loss and others minimize it"):
        optimizer.step(loop)


@pairs(exact=[True, False], modelled=[True, False])
def test_a_sum_of_losses_is_treated_as_their_mean(exact: bool, modelled: bool) -> None:
    found = []
    for reduction in ("mean", "sum"):
        torch.manual_seed(0)
        # The direction for a sum is N times as long.
        lr = 0.5 if reduction == "mean" or modelled else 0.5 / len(batch()[0])
        model, optimizer, loop = problem(
            lr=lr, momentum=0.9, loss_reduction=reduction, adaptive_damping=True, damping_interval=2, outputs=exact,
            likelihood="categorical" if exact else None, quadratic_model=modelled, include_damping_in_model=True,
        )  # fmt: skip
        loop.loss = partial(F.cross_entropy, reduction=reduction)
        repeat(optimizer, loop, 4)
        found.append((ratio(optimizer), damping(optimizer), flat(model.parameters())))
    assert found[0][:2] == (pytest.approx(found[1][0], rel=1e-9), found[1][1])
    torch.testing.assert_close(found[0][2], found[1][2])


def test_the_curvature_of_a_sum_needs_the_number_of_examples() -> None:
    _, optimizer, loop = problem(loss_reduction="sum", quadratic_model=True)
    loop()
    with pytest.raises(RuntimeError, match=r"needs the number of examples.*call step\(closure\)"):
        optimizer.step()


def test_damping_is_judged_in_the_step_before_a_refresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next inverses then use the new damping, and both losses are those of one batch."""
    _, optimizer, loop = problem(
        lr=0.1, momentum=0.9, adaptive_damping=True, damping_interval=4, factor_update_steps=4, inv_update_steps=4
    )
    used: list[float] = []
    refresh = optimizer.preconditioner.refresh

    def watched(blocks: Any, look: bool) -> Tensor:
        used.append(damping(optimizer))
        return refresh(blocks, look)

    monkeypatch.setattr(optimizer.preconditioner, "refresh", watched)
    for step in range(9):
        loop.calls, before = 0, damping(optimizer)
        optimizer.step(loop)
        loop.x = loop.x + 1  # each step has its own batch
        judged = step % 4 == 3
        assert loop.calls == 1 + judged
        assert (damping(optimizer) != before) == judged
        assert len(used) == step // 4 + 1
        assert used[-1] == (before if step % 4 == 0 else used[-1])


def test_parameters_without_a_block_enter_the_model_by_their_gradient() -> None:
    model, optimizer, loop = problem(skip_layers="3", **EVERY_STEP)
    theta, before = flat(model.parameters()), loop.value()
    optimizer.step(loop)
    delta = flat(model.parameters()) - theta
    F_block = in_order(model[0], [optimizer.dense_curvature("0")])
    predicted = flat(p.grad for p in model.parameters()) @ delta + 0.5 * delta[:20] @ F_block @ delta[:20]
    assert ratio(optimizer) == pytest.approx((loop.value() - before) / float(predicted), rel=1e-9)


# ---------------------------------------------------------------------------------------------- side effects
@pytest.mark.parametrize("set_to_none", [True, False])
def test_training_is_that_with_the_same_damping_set_by_hand(set_to_none: bool) -> None:
    """Parameters, gradients, buffers, generators and state are bitwise those of a run without second evaluations."""
    torch.manual_seed(3)
    layers = [nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.4), nn.Linear(6, 4)]
    watched = nn.Sequential(*layers).double()
    plain = copy.deepcopy(watched)
    options: dict[str, Any] = {"lr": 0.3, "momentum": 0.9, "factor_update_steps": 2, "inv_update_steps": 4}
    adaptive = kfac(watched, adaptive_damping=True, damping_interval=3, likelihood="categorical", **options)
    fixed, (x, y), values, states = kfac(plain, **options), batch(), [], []

    def closure(model: nn.Module, optimizer: KFAC) -> Any:
        optimizer.zero_grad(set_to_none=set_to_none)
        outputs = model(x + 0.01 * torch.randn_like(x))
        loss = F.cross_entropy(outputs, y)
        loss.backward()
        return loss, outputs

    def seen(model: nn.Module, optimizer: KFAC) -> list[Tensor]:
        tensors = [torch.get_rng_state(), *model.state_dict().values(), *(p.grad for p in model.parameters())]
        state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
        return [t.detach().clone() for t in (*tensors, *state) if t is not None]

    torch.manual_seed(0)
    for _ in range(11):
        values.append(damping(adaptive))
        adaptive.step(lambda: closure(watched, adaptive))
        states.append(seen(watched, adaptive))
    assert len(set(values)) > 1
    torch.manual_seed(0)
    for value, state in zip(values, states, strict=True):
        fixed.param_groups[0]["damping"] = value
        fixed.step(lambda: closure(plain, fixed))
        for a, b in zip(seen(plain, fixed), state, strict=True):
            assert torch.equal(a, b)


def test_gradients_and_the_returned_value_are_those_of_the_first_evaluation() -> None:
    model, optimizer, loop = problem(outputs=True, **EVERY_STEP)
    returned: list[Any] = []
    gradients: list[list[Tensor | None]] = []

    def closure() -> Any:
        returned.append(loop())
        gradients.append([p.grad for p in model.parameters()])
        return returned[-1]

    assert optimizer.step(closure) is returned[0]
    first, second = gradients
    assert all(p.grad is g for p, g in zip(model.parameters(), first, strict=True))
    assert all(a is not b for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("at", ["the second evaluation", "the update"])
def test_an_error_undoes_the_step(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, loop = problem(momentum=0.9, **EVERY_STEP)
    before, apply = flat(model.parameters()), optimizer._update.apply

    def fail() -> Any:
        raise ValueError("the data ran out")

    if at == "the update":
        monkeypatch.setattr(optimizer._update, "apply", lambda *args: (apply(*args), fail()))
    with pytest.raises(ValueError, match="the data ran out"):
        optimizer.step(lambda: fail() if loop.calls == 1 else loop())
    assert torch.equal(flat(model.parameters()), before)
    assert not momenta(optimizer).any()
    monkeypatch.undo()
    optimizer.step(Loop(model, optimizer, loop.x, loop.y))


# ---------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize("name", ["adaptive_damping", "reject_steps", "calibrate_damping"])
def test_a_step_without_a_closure_is_refused(name: str) -> None:
    _, optimizer, loop = problem(**{name: True})
    loop()
    with pytest.raises(RuntimeError, match=rf"{name}=True judges steps by their loss: call step\(closure\)"):
        optimizer.step()


def test_a_loss_scaler_is_refused() -> None:
    optimizer = kfac(mlp(), adaptive_damping=True, grad_scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(RuntimeError, match="train in bfloat16"):
        optimizer.step()


@pytest.mark.parametrize(
    ("returned", "error", "match"),
    [
        *((x, TypeError, "need a closure that returns the loss")
          for x in (None, "loss", (), torch.zeros(2), (1.0, 2.0, 3.0, 4.0))),
        ((0.0, torch.zeros(12, 4)), RuntimeError, "not among what the model returned"),
        ((0.0, "outputs"), TypeError, "with one tensor of outputs for each forward; got outputs of type str"),
        (0.0, TypeError, r"must return \(loss, outputs\), .* got outputs of type NoneType"),
        ((0.0, [torch.zeros(12, 4)] * 2), RuntimeError, "returned 2 outputs and 2 targets, but ran 1 forwards"),
    ],
    ids=str,
)  # fmt: skip
def test_invalid_results_of_a_closure_are_refused(returned: Any, error: type[Exception], match: str) -> None:
    _, optimizer, loop = problem(likelihood="categorical", **EVERY_STEP)
    with pytest.raises(error, match=match):
        optimizer.step(lambda: (loop(), returned)[1])
