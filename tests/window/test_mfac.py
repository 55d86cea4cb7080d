"""M-FAC: forms of the inverse, scales of the window, damping, momentum."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from secondorder import MFAC, SparseMFAC, TopK
from secondorder.linalg import gram
from tests.support.grid import each, pairs
from tests.support.oracles.window import Average, PublishedDynamic, fisher_direction, recursion, woodbury
from tests.support.window import assert_near, history, noise, parameters, push, ring, snapshot, states
from tests.support.window_storages import STORAGES

D = 23


def mfac(d: int = D, **keywords: Any) -> tuple[MFAC, list[torch.nn.Parameter]]:
    params = parameters([(d,)])
    return MFAC(params, **{"lr": 1.0, "window_size": 5, "damping": 1e-3, **keywords}), params


def gradients(steps: int, d: int = D, seed: int = 0) -> Tensor:
    return noise(steps, d, seed=seed)


@pairs(m=[1, 2, 5, 30], solver=["auto", "cholesky", "eigh"])
def test_push_through_is_woodbury_is_the_recursion_is_the_explicit_inverse(m: int, solver: str) -> None:
    opt, params = mfac(window_size=m, solver=solver)
    g = gradients(3 * m + 2)
    for step in range(len(g)):
        u = push(opt, params, g[step])
        if step > 6 and step % 7:
            continue
        rows = g[max(0, step + 1 - m) : step + 1]
        assert_near(u, fisher_direction(rows, rows[-1], 1e-3), 1e-9)
        assert_near(u, woodbury(rows, rows[-1], 1e-3, len(rows)), 1e-9)
        assert_near(u, recursion(rows, rows[-1], 1e-3, len(rows)), 1e-9)


@pytest.mark.parametrize("m", [7, 8])
def test_first_twenty_updates_of_the_published_dynamic_algorithm(m: int) -> None:
    """The published optimizer: gradient with L2, put into the ring, multiplied by the inverse, subtracted times lr."""
    lr, decay, target = 0.01, 0.1, noise(D, seed=7)
    (p,) = params = parameters([(D,)])
    p.data.copy_(noise(D, seed=8))
    theirs = p.detach().numpy().copy()
    published = PublishedDynamic(m, D, 1e-3)
    opt = MFAC(params, lr=lr, window_size=m, damping=1e-3, scale="window", weight_decay=decay)
    g = gradients(20, seed=1).numpy()
    for step in range(20):
        p.grad = torch.from_numpy(g[step]) * (p.detach() - target)
        opt.step()
        theirs = theirs - lr * published.step(g[step] * (theirs - target.numpy()) + decay * theirs)
        assert np.linalg.norm(p.detach().numpy() - theirs) <= 1e-9 * np.linalg.norm(theirs), step


@pairs(scale=["count", "window"], mode=["absolute", "relative"])
def test_scale_and_kind_of_damping(scale: str, mode: str) -> None:
    """They differ while the window fills, and agree from then on."""
    m, damping = 5, 0.1
    opt, params = mfac(scale=scale, damping_mode=mode, damping=damping)
    g = gradients(3 * m + 2)
    for step in range(len(g)):
        rows = g[max(0, step + 1 - m) : step + 1]
        n = len(rows) if scale == "count" else m
        expected = fisher_direction(rows, rows[-1], damping, n, relative=mode == "relative")
        assert_near(push(opt, params, g[step]), expected, 1e-9, step)


@pytest.mark.parametrize("storage", ["dense", "float32", "bfloat16", "topk", "topk-4-bit", "rank-1"])
def test_a_window_of_one_row_in_closed_form(storage: str) -> None:
    kind, params = STORAGES[storage], parameters([(4, 5), (3,)])
    opt = MFAC(params, lr=1.0, window_size=1, damping=1e-3, **kind.keywords)
    for g in gradients(4):
        u, (row,) = push(opt, params, g), ring(opt, params, [0, 1], kind.block_size)
        assert_near(u, row / (1e-3 + row @ row), 1e-12)


@each(storage=["dense", "topk", "rank-2"], mode=["absolute", "relative"])
def test_damping_changed_in_mid_run_is_a_fresh_optimizer_with_the_same_window(storage: str, mode: str) -> None:
    """Nothing but the dots of the rows outlives a step."""
    schedule = [1e-3, 1e-3, 5.0, 1e-6, 1e-6, 0.1] * 3
    keywords = {"damping_mode": mode, "solver": "cholesky", **STORAGES[storage].keywords}
    opt, params = mfac(**keywords)
    fresh = {damping: mfac(damping=damping, **keywords) for damping in sorted(set(schedule))}
    for g, damping in zip(gradients(len(schedule)), schedule, strict=True):
        opt.param_groups[0]["damping"] = damping
        directions = {value: push(*pair, g) for value, pair in fresh.items()}
        assert torch.equal(push(opt, params, g), directions[damping])


@pairs(storage=["dense", "topk", "rank-2"], factor=[2.0**-20, 1e3])
def test_directions_scale_inversely_with_gradients_at_relative_damping(storage: str, factor: float) -> None:
    keywords = {"damping_mode": "relative", "damping": 0.01, **STORAGES[storage].keywords}
    (opt, params), (scaled, others) = mfac(**keywords), mfac(**keywords)
    for g in gradients(14):
        u, v = push(opt, params, g), push(scaled, others, factor * g)
        # Stored values are float32: their rounding moves with a factor that is no power of two.
        assert_near(factor * v, u, 1e-9 if factor < 1 or storage != "topk" else 1e-5)


def test_large_damping_leaves_the_gradient_and_a_vanishing_one_the_pseudo_inverse() -> None:
    (large, many), (small, few) = mfac(damping=1e12), mfac(damping=1e-13, solver="eigh")
    g = gradients(9)
    for step in range(9):
        rows = g[max(0, step - 4) : step + 1]
        assert_near(1e12 * push(large, many, g[step]), g[step], 1e-9)
        limit = len(rows) * torch.linalg.pinv(rows)[:, -1]
        assert_near(push(small, few, g[step]), limit, 1e-9)


def test_the_order_of_the_slots_does_not_matter() -> None:
    """Rows loaded in another order, the slot to be written next apart."""
    opt, params = mfac()
    g = gradients(8)
    for row in g[:7]:
        push(opt, params, row)
    saved, order = snapshot(opt), [3, 4, 2, 1, 0]  # the next row goes to slot 2
    state = saved["state"][0]
    assert int(state["pos"]) == 2
    dots = state["window"][order] @ state["window"][order].mT
    row, column = torch.tril_indices(5, 5)
    state["window"], state["gram"] = state["window"][order], dots[row, column]
    other, others = mfac()
    other.load_state_dict(saved)
    assert_near(push(other, others, g[7]), push(opt, params, g[7]), 1e-12)


# --------------------------------------------------------------------------------------------------------- hard windows
def test_a_zero_gradient_takes_a_slot_and_moves_nothing() -> None:
    opt, params = mfac()
    g = gradients(12)
    g[[0, 3, 4, 9]] = 0
    for step in range(12):
        rows = g[max(0, step - 4) : step + 1]
        u = push(opt, params, g[step])
        if not g[step].any():
            assert u.norm() <= 1e-12
            continue
        assert_near(u, fisher_direction(rows, g[step], 1e-3))
    assert int(opt.state_dict()["state"][0]["count"]) == 12


def test_zero_gradients_at_relative_damping_are_harmless() -> None:
    opt, params = mfac(damping_mode="relative")
    for _ in range(3):
        assert torch.equal(push(opt, params, torch.zeros(D)), torch.zeros(D, dtype=torch.float64))
    assert torch.isfinite(push(opt, params, gradients(1)[0])).all()


@pairs(kind=["same", "opposite", "scaled", "nearly"], damping=[1e-3, 1e-6], solver=["auto", "cholesky", "eigh"])
def test_dependent_gradients(kind: str, damping: float, solver: str) -> None:
    opt, params = mfac(damping=damping, solver=solver, window_size=6)
    base, jitter, seen = gradients(20), gradients(20, seed=1), []
    for step in range(20):
        g = base[step // 3]
        if kind == "opposite":
            g = g * (-1) ** step
        elif kind == "scaled":
            g = g * (1 + step % 3)
        elif kind == "nearly":
            g = g + 1e-5 * jitter[step]
        seen.append(g)
        rows, tolerance = torch.stack(seen[-6:]), 1e-11 + 3e-14 / damping  # of coefficients that grow as 1/λ
        assert_near(push(opt, params, g), fisher_direction(rows, g, damping), tolerance, step)


@pytest.mark.parametrize("d", [3, 5])
def test_more_rows_than_columns(d: int) -> None:
    opt, params = mfac(d, window_size=31)
    g = gradients(70, d)
    for step in range(70):
        rows = g[max(0, step - 30) : step + 1]
        assert_near(push(opt, params, g[step]), fisher_direction(rows, g[step], 1e-3), 1e-9)


@pairs(bad=[0, 1, 2], last_resort=[False, True])
def test_a_failing_solve_does_not_change_the_others_of_its_batch(
    bad: int, last_resort: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal rows whose length is a power of two: the second pivot is exactly zero."""
    keywords: dict[str, Any] = {"lr": 1.0, "window_size": 5, "damping": 1e-18, "solver": "cholesky"}
    params, others = parameters([(8,)] * 3), parameters([(8,)] * 3)
    opt, fine = (MFAC(p, partition="layer", **keywords) for p in (params, others))
    good = [push(fine, others, noise(24, seed=step)).view(3, 8) for step in range(6)]
    assert fine.diagnostics()["solve_failures"] == 0
    filtered, calls = gram.mfac_filtered, []

    def second(*args: Any, **named: Any) -> Tensor:
        calls.append(args)
        if last_resort:
            raise torch.linalg.LinAlgError("does not converge")
        return filtered(*args, **named)

    monkeypatch.setattr(gram, "mfac_filtered", second)
    which, row = [i for i in range(3) if i != bad], torch.tensor([2.0] * 4 + [0.0] * 4, dtype=torch.float64)
    for step in range(6):
        g = noise(24, seed=step)
        g[8 * bad : 8 * bad + 8] = row
        u = push(opt, params, g).view(3, 8)
        assert_near(u[which], good[step][which], 1e-12, step)
        assert_near(u[bad], row / 16 * (min(step + 1, 5) if last_resort else 1), 1e-9, step)
    assert calls
    failures = [int(states(opt)[i]["solve_failures"]) for i in range(3)]
    assert failures == [len(calls) if last_resort and i == bad else 0 for i in range(3)]


# ------------------------------------------------------------------------------------------------------------- momentum
def naive_momentum(mode: str, directions: list[Tensor], mu: float, nesterov: bool) -> Tensor:
    v = torch.zeros_like(directions[0])
    for u in directions:
        v = mu * v + (u if mode == "heavy_ball" else (1 - mu) * u)
    return directions[-1] + mu * v if nesterov else v


@pytest.mark.parametrize(("mode", "nesterov"), [("heavy_ball", False), ("heavy_ball", True), ("ema", False)])
@pytest.mark.parametrize("storage", ["dense", "topk", "rank-2"])
def test_momentum_over_directions(storage: str, mode: str, nesterov: bool) -> None:
    keywords = STORAGES[storage].keywords
    opt, params = mfac(momentum=0.75, momentum_mode=mode, nesterov=nesterov, **keywords)
    plain, others = mfac(**keywords)
    directions: list[Tensor] = []
    for g in gradients(12):
        directions.append(push(plain, others, g))
        assert_near(push(opt, params, g), naive_momentum(mode, directions, 0.75, nesterov), 1e-12)


@pairs(m=[1, 3, 8], damping=[1e-3, 1e-6])
def test_momentum_before_preconditioning(m: int, damping: float) -> None:
    """The average of all gradients, seen by a window that has forgotten most of them."""
    mu = 0.9
    opt, params = mfac(momentum=mu, momentum_mode="pre", window_size=m, damping=damping)
    g, average = gradients(3 * m + 12), Average(D, mu)
    for step in range(len(g)):
        v, rows = average.add(g[step]), g[max(0, step + 1 - m) : step + 1]
        assert_near(push(opt, params, g[step]), fisher_direction(rows, v, damping), 1e-9, step)


@pytest.mark.parametrize("solver", ["cholesky", "eigh"])
def test_momentum_before_preconditioning_inside_the_span(solver: str) -> None:
    """Every gradient is still a row: nothing to cancel, at a damping where x/λ would leave few digits."""
    opt, params = mfac(momentum=0.9, momentum_mode="pre", window_size=20, damping=1e-8, solver=solver)
    g, average = gradients(12), Average(D, 0.9)
    for step in range(12):
        v = average.add(g[step])
        assert_near(push(opt, params, g[step]), fisher_direction(g[: step + 1], v, 1e-8), 1e-9, step)


def test_momentum_before_preconditioning_averages_what_was_stored() -> None:
    compression = TopK(density=0.5, block_size=4, value_dtype=torch.float64)
    opt, params = mfac(momentum=0.5, momentum_mode="pre", compression=compression)
    plain, others = mfac(compression=compression)
    rows: list[Tensor] = []
    average = Average(D, 0.5)
    for g in gradients(14):
        push(plain, others, g)
        rows.append(history(plain, others, [0], 4)[-1])
        v = average.add(rows[-1])
        assert_near(push(opt, params, g), fisher_direction(torch.stack(rows[-5:]), v, 1e-3), 1e-9)


# --------------------------------------------------------------------------------------------------------------- sparse
def test_sparse_mfac_is_mfac_with_top_k() -> None:
    pairs = []
    for cls, keywords in ((SparseMFAC, {}), (MFAC, {"compression": TopK()})):
        params = parameters([(130, 40)], torch.float32)
        opt = cls(params, lr=1.0, window_size=3, **keywords)
        pairs.append([push(opt, params, noise(5200, seed=step)) for step in range(5)])
        state = opt.state_dict()["state"][0]
        assert state["window_idx"].shape == (1, 3, 40)
        assert state["tail_idx"].shape == (1, 3, 12)  # ceil of 11.04
        assert state["window_idx"].dtype == torch.int16
    assert all(torch.equal(a, b) for a, b in zip(*pairs, strict=True))
