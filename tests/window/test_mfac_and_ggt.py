"""M-FAC and GGT against explicit matrices: forms of the inverse, damping, decay of the window, momentum."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from secondorder import MFAC, SparseMFAC, TopK, WindowOptions
from secondorder.linalg import gram
from tests.support.building import built
from tests.support.grid import pairs
from tests.support.oracles import window
from tests.support.oracles.window import Average, PublishedDynamic, fisher_direction, recursion, root_direction
from tests.support.window import assert_near, history, noise, parameters, push, states
from tests.support.window_storages import METHODS, STORAGES, averaging, explicit, regular

D, SMALL = 23, 1e-3  # SMALL is the damping, or ε


def new(method: str = "mfac", d: int = D, value: float = SMALL, **keywords: Any) -> tuple[Any, list[Any]]:
    params = parameters([(d,)])
    return built(METHODS[method], params, **{"lr": 1.0, "window_size": 5, **regular(method, value), **keywords}), params


def rows_at(g: Tensor, step: int, m: int = 5) -> Tensor:
    """The gradients in a window of m rows after a step."""
    return g[max(0, step + 1 - m) : step + 1]


# -------------------------------------------------------------------------------------------------------------- inverse
@pairs(m=[1, 2, 5, 30], solver=["auto", "cholesky", "eigh"])
def test_push_through_is_woodbury_is_the_recursion_is_the_explicit_inverse(m: int, solver: str) -> None:
    opt, params = new(window_size=m, solver=solver)
    g = noise(3 * m + 2, D)
    for step in range(len(g)):
        u = push(opt, params, g[step])
        if step > 6 and step % 7:
            continue
        rows = rows_at(g, step, m)
        for form in (window.woodbury, recursion, fisher_direction):
            assert_near(u, form(rows, rows[-1], SMALL, len(rows)), 1e-9, step)


@pytest.mark.parametrize("m", [7, 8])
def test_first_twenty_updates_of_the_published_dynamic_algorithm(m: int) -> None:
    """The published optimizer stores the gradient with L2, multiplies it by the inverse and subtracts lr times it."""
    lr, decay, target = 0.01, 0.1, noise(D, seed=7)
    (p,) = params = parameters([(D,)])
    p.data.copy_(noise(D, seed=8))
    theirs = p.detach().numpy().copy()
    published = PublishedDynamic(m, D, SMALL)
    opt = MFAC(params, lr=lr, window_size=m, damping=SMALL, window=WindowOptions(divisor="window"), weight_decay=decay)
    g = noise(20, D, seed=1).numpy()
    for step in range(20):
        p.grad = torch.from_numpy(g[step]) * (p.detach() - target)
        opt.step()
        theirs = theirs - lr * published.step(g[step] * (theirs - target.numpy()) + decay * theirs)
        assert np.linalg.norm(p.detach().numpy() - theirs) <= 1e-9 * np.linalg.norm(theirs), step


DEPENDENT: dict[str, tuple[str, float, dict[str, Any]]] = {
    **{f"mfac {s} {v:g}": ("mfac", v, {"solver": s}) for s in ("auto", "cholesky", "eigh") for v in (SMALL, 1e-6)},
    **{f"ggt {beta2}": ("ggt", SMALL, {"betas": (0.0, beta2)}) for beta2 in (1.0, 0.9)},
}


def dependent(kind: str) -> Tensor:
    """Gradients of which three at a time are the same, up to the difference that ``kind`` describes."""
    step = torch.arange(20)
    factor = {"opposite": (-1.0) ** step, "scaled": 1 + step % 3, "with zeros": step % 3 > 0}.get(kind, step * 0 + 1)
    g = factor[:, None] * noise(20, D)[step // 3]
    return g + 1e-5 * noise(20, D, seed=1) if kind == "nearly" else g


@pytest.mark.parametrize("how", DEPENDENT)
def test_dependent_gradients_and_those_of_zero(how: str) -> None:
    """A gradient of zero takes a slot and moves nothing."""
    method, value, keywords = DEPENDENT[how]
    tolerance = 1e-11 + 3e-14 / value if method == "mfac" else 1e-9  # coefficients grow as 1/λ
    for kind in ("same", "opposite", "scaled", "with zeros", *(["nearly"] if method == "mfac" else [])):
        (opt, params), g = new(method, value=value, window_size=6, **keywords), dependent(kind)
        for step in range(20):
            u = push(opt, params, g[step])
            if not g[step].any():
                assert u.norm() <= 1e-12
                continue
            expected = explicit(method, rows_at(g, step, 6), g[step], value, keywords.get("betas", (0.0, 1.0))[1])
            assert_near(u, expected, tolerance, f"{kind}, step {step}")
        assert int(states(opt)[0]["count"]) == 20


@pairs(bad=[0, 1, 2], last_resort=[False, True])
def test_a_failing_solve_does_not_change_the_others_of_its_batch(
    bad: int, last_resort: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows are equal, and their length is a power of two, so that the second pivot is exactly zero."""
    keywords: dict[str, Any] = {"lr": 1.0, "window_size": 5, "damping": 1e-18, "solver": "cholesky"}
    params, others = parameters([(8,)] * 3), parameters([(8,)] * 3)
    opt, fine = (built(MFAC, p, partition="layer", **keywords) for p in (params, others))
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


# -------------------------------------------------------------------------------------------------------------- damping
@pairs(scale=["count", "window"], mode=["absolute", "relative"], storage=["dense", "topk", "bfloat16"])
def test_scale_and_kind_of_damping(scale: str, mode: str, storage: str) -> None:
    """They differ while the window fills, and agree from then on."""
    opt, params = new(scale=scale, damping_mode=mode, damping=0.1, **STORAGES[storage].keywords)
    for step in range(17):
        u, rows = push(opt, params, noise(D, seed=step)), history(opt, params, [0], STORAGES[storage].block_size)
        n = len(rows) if scale == "count" else 5
        assert_near(u, fisher_direction(rows, rows[-1], 0.1, n, relative=mode == "relative"), 1e-9, step)


DAMPINGS = [{"damping": value} for value in (1e-3, 1e-3, 5.0, 1e-6, 1e-6, 0.1)] * 3
DECAYS = [(SMALL, 1.0), (SMALL, 0.5), (1.0, 0.5), (1e-5, 1.0), (1e-5, 0.9)] * 3


@pytest.mark.parametrize(
    ("method", "schedule", "keywords"),
    [
        ("mfac", DAMPINGS, {"solver": "cholesky"}),
        ("mfac", DAMPINGS, {"solver": "cholesky", **STORAGES["topk"].keywords}),
        ("mfac", DAMPINGS, {"damping_mode": "relative", **STORAGES["rank-2"].keywords}),
        ("ggt", [{"eps": eps, "betas": (0.0, beta2)} for eps, beta2 in DECAYS], {}),
    ],
    ids=["dense", "topk", "rank-2, relative", "ggt"],
)
def test_changing_options_is_like_a_new_optimizer_with_the_same_window(
    method: str, schedule: list[dict[str, Any]], keywords: dict[str, Any]
) -> None:
    """A step leaves only the dots of the rows."""
    opt, params = new(method, **keywords)
    fresh = {str(options): new(method, **{**keywords, **options}) for options in schedule}
    for g, options in zip(noise(len(schedule), D), schedule, strict=True):
        opt.param_groups[0].update(options)
        directions = {key: push(*value, g) for key, value in fresh.items()}
        assert torch.equal(push(opt, params, g), directions[str(options)])


# ------------------------------------------------------------------------------------------------ decay of GGT's window
@pytest.mark.parametrize("beta1", [0.0, 0.9])
def test_weight_of_the_complement(beta1: float) -> None:
    """It has no effect on the newest row; for an average, the span and its complement have separate weights."""
    for weight in (None, 0.0, 3.0, 1 / SMALL):
        opt, params = new("ggt", betas=(beta1, 0.9), sgd_weight=weight)
        g, average = noise(14, D), Average(D, beta1)
        for step in range(14):
            expected = root_direction(rows_at(g, step), average.add(g[step]), SMALL, 0.9, weight)
            assert_near(push(opt, params, g[step]), expected, 1e-9, f"{weight}, step {step}")


# ------------------------------------------------------------------------------------------------------------- momentum
@pytest.mark.parametrize(
    ("method", "beta1", "beta2", "more"),
    [
        ("mfac", 0.9, 1.0, {}),
        ("mfac", 0.9, 1.0, {"damping": 1e-6}),
        ("mfac", 0.9, 1.0, {"damping": 1e-8, "solver": "cholesky"}),
        ("mfac", 0.9, 1.0, {"damping": 1e-8, "solver": "eigh"}),
        ("ggt", 0.9, 0.5, {}),
        ("ggt", 0.5, 0.9, {"bias_correction": True}),
        ("ggt", 0.99, 0.8, {"bias_correction": True}),
    ],
    ids=str,
)
def test_momentum_on_gradients(method: str, beta1: float, beta2: float, more: dict[str, Any]) -> None:
    """After more than four turns of the ring, most of the momentum comes from rows that are gone.

    At a tiny damping, every gradient is still a row, so x/λ, which would leave few digits, need not be computed.
    """
    for m in (20,) if "solver" in more else (1, 3, 8):
        opt, params = new(method, window_size=m, **averaging(method, beta1, beta2), **more)
        g, average = noise(12 if m == 20 else 4 * m + 10, D), Average(D, beta1)
        for step in range(len(g)):
            v = average.add(g[step], correct="bias_correction" in more)
            expected = explicit(method, rows_at(g, step, m), v, more.get("damping", SMALL), beta2)
            assert_near(push(opt, params, g[step]), expected, 1e-9, f"{m} rows, step {step}")


@pairs(
    storage=["float32", "bfloat16", "topk", "topk-4-bit", "topk-8-bit", "rank-1", "rank-2"],
    how={"ggt, decay": ("ggt", 0.0), "ggt": ("ggt", 0.9), "mfac": ("mfac", 0.5)},
)
def test_momentum_averages_what_was_stored(storage: str, how: tuple[str, float]) -> None:
    """Without momentum the average is the newest row."""
    (method, beta1), kind, params = how, STORAGES[storage], parameters([(4, 5), (3,)])
    keywords = {**averaging(method, beta1, 0.8), **regular(method, SMALL), **kind.keywords}
    opt, average = built(METHODS[method], params, lr=1.0, window_size=4, **keywords), Average(D, beta1)
    for g in noise(14, D):
        u, rows = push(opt, params, g), history(opt, params, [0, 1], kind.block_size)
        assert_near(u, explicit(method, rows, average.add(rows[-1]), SMALL, 0.8))


def test_sparse_mfac_is_mfac_with_top_k() -> None:
    found = []
    for cls, keywords in ((SparseMFAC, {}), (MFAC, {"compression": TopK()})):
        params = parameters([(130, 40)], torch.float32)
        opt = built(cls, params, lr=1.0, window_size=3, **keywords)
        found.append([push(opt, params, noise(5200, seed=step)) for step in range(5)])
        state = opt.state_dict()["state"][0]
        assert state["window_idx"].shape == (1, 3, 40)
        assert state["tail_idx"].shape == (1, 3, 12)  # ceil of 11.04
        assert state["window_idx"].dtype == torch.int16
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pairs(m=[1, 4, 9], beta2=[1.0, 0.9, 0.5], eps=[1e-2, 1e-5])
def test_decay_of_the_window(m: int, beta2: float, eps: float) -> None:
    opt, params = new("ggt", betas=(0.0, beta2), window_size=m, eps=eps)
    g = noise(3 * m + 2, D)
    for step in range(len(g)):
        expected = root_direction(rows_at(g, step, m), g[step], eps, beta2)
        assert_near(push(opt, params, g[step]), expected, 1e-9, step)
