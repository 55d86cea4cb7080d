"""Directions of float32 parameters are within 1e-5 of the float64 solve, even if x/λ − … would keep no digit, and if
windows are too large for products in float64, which are computed by chunks of columns, blocks of rows and tiles.
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from secondorder import GGT, MFAC, LowRank, TopK
from secondorder.curvature.window import lowrank, rows
from tests.support.building import built
from tests.support.grid import each, pairs
from tests.support.oracles.window import Average, extended, solve
from tests.support.window import assert_near, error_of, give, history, noise, parameters, push, put
from tests.support.window_storages import METHODS, STORAGES, averaging, explicit, regular

D, M = 100, 32
DAMPINGS = [1e-4, 1e-6, 1e-8]


def float32_rows(kind: str) -> Tensor:
    g = noise(2 * M + 30, D)
    if cosine := {"correlated": 0.8, "nearly the same": 0.9999}.get(kind):
        g = (cosine**0.5 * noise(D, seed=99) + (1 - cosine) ** 0.5 * g) / (1.0 if cosine == 0.8 else D**0.5)
    if kind in ("repeated", "repeated before"):
        g[M + 4 : M + 18] = g[M + 4]
    if kind == "huge":  # rows that are small compared with another one must not be taken for rounding errors
        g[3] *= 1e4
    return g[: {"huge": 24, "repeated": M + 18, "repeated before": 2 * M + 30}.get(kind, M + 14)].float().double()


@pytest.fixture
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense windows as small as these are multiplied in float64, larger ones in their working precision."""
    if request.param == "working":
        monkeypatch.setattr(rows, "EXACT", 0)


def over(where: Callable[..., bool] | None = None, **parameters: Iterable[Any]) -> pytest.MarkDecorator:
    """A covering grid with products in float64 and in working precision."""
    mark = pairs(where, products=["float64", "working"], **parameters)
    return pytest.mark.parametrize(*mark.args, indirect=["products"])


HOW: dict[str, tuple[str, dict[str, Any]]] = {
    **{solver: ("mfac", {"solver": solver}) for solver in ("auto", "eigh", "cholesky")},
    **{name: ("mfac", STORAGES[name].keywords) for name in ("bfloat16", "topk", "topk-4-bit", "rank-2")},
    "ggt": ("ggt", {"betas": (0.0, 1.0)}),
    "ggt, decay": ("ggt", {"betas": (0.0, 0.9)}),
}


def is_solvable(kind: str, how: str, value: float, products: str) -> bool:
    """Only "auto" and "eigh" filter the spectrum, and a small ε of GGT amplifies rounding errors of the roots."""
    if kind == "nearly the same":
        return how in ("auto", "eigh", "cholesky") and value == 1e-6 and products == "float64"
    if kind.startswith("repeated") and HOW[how][0] == "mfac" and how not in ("auto", "eigh"):
        return False
    return (value == 1e-2) == (kind == "huge") and (HOW[how][0] == "mfac" or value >= 1e-4)


@over(
    is_solvable,
    kind=["independent", "correlated", "nearly the same", "repeated", "repeated before", "huge"],
    how=list(HOW),
    value=[1e-2, *DAMPINGS],
)
@pytest.mark.usefixtures("products")
def test_the_newest_row(kind: str, how: str, value: float) -> None:
    """With repeated rows, coefficients grow along null vectors of the Gram matrix; "auto" notices after ten steps."""
    (method, keywords), params = HOW[how], parameters([(12, 5), (5, 8)], torch.float32)
    opt = built(METHODS[method], params, lr=1.0, window_size=M, **regular(method, value), **keywords)
    for g in float32_rows(kind):
        u = push(opt, params, g)
    rows = history(opt, params, [0, 1], STORAGES[how].block_size if how in STORAGES else 0)
    expected = explicit(method, rows, rows[-1], value, 0.9 if how == "ggt, decay" else 1.0)
    assert error_of(u, expected) <= (1e-4 if kind == "huge" else 1e-5)


@over(method=list(METHODS), value=DAMPINGS)
@pytest.mark.usefixtures("products")
def test_momentum_on_gradients(method: str, value: float) -> None:
    """While every gradient is a row, x/λ must cancel; later, gradients that have left the window dominate."""
    params, average = parameters([(D,)], torch.float32), Average(D, 0.9)
    opt = built(
        METHODS[method], params, lr=1.0, window_size=M, **averaging(method, 0.9, 0.95), **regular(method, value)
    )
    g = float32_rows("independent")
    for step in range(len(g)):
        u, x = push(opt, params, g[step]), average.add(g[step])
        if step in (0, 1, M // 2, M - 1, M, M + 9):
            rows = g[max(0, step + 1 - M) : step + 1]
            assert error_of(u, explicit(method, rows, x, value, 0.95)) <= 1e-5, step


@over(method=list(METHODS), value=DAMPINGS)
@pytest.mark.usefixtures("products")
def test_decay_in_addition_to_the_newest_row(method: str, value: float) -> None:
    params = parameters([(D,)], torch.float32)
    keywords = {"weight_decay": 0.125, "weight_decay_mode": "reg", **regular(method, value)}
    opt = built(METHODS[method], params, lr=1.0, window_size=M, **keywords)
    g, p = float32_rows("independent"), noise(D, seed=77)
    for row in g:
        put(params, p)
        give(params, row)
        with opt.keep_directions() as kept:
            opt.step()
    (u,) = kept.values()
    assert error_of(u.double(), explicit(method, g[-M:], g[-1] + 0.125 * p, value)) <= 1e-5


# ---------------------------------------------------------------------------------------------- nearly the same rows
def push_through(rows: Tensor, damping: float) -> Tensor:
    """``Gᵀ (λI + GGᵀ/n)⁻¹ e`` for the newest row, the last: `fisher_direction` for a large d."""
    G = extended(rows)
    unit = np.zeros(len(G))
    unit[-1] = 1
    a = solve(damping * np.eye(len(G), dtype=np.longdouble) + G @ G.T / len(G), unit)
    return torch.from_numpy((G.T @ a).astype(np.float64))


@pytest.mark.parametrize("d", [40, 2000])  # products of the small window are exact
def test_the_same_gradient_in_every_step(d: int) -> None:
    for scale in (1e-3, 1.0, 100.0):
        params, g = parameters([(d,)], torch.float32), scale * noise(d, dtype=torch.float32)
        opt = MFAC(params, lr=1.0)
        exact = g.double()
        expected = exact / (1e-5 + exact @ exact)
        for step in range(14):
            assert_near(push(opt, params, g), expected, 1e-3, f"{scale}, step {step}")


@pytest.mark.parametrize("d", [40, 2000])
def test_a_schedule_that_begins_with_steps_of_length_zero(d: int) -> None:
    params = parameters([(d,)], torch.float32)
    params[0].data += noise(d, seed=1, dtype=torch.float32)
    target, rows = noise(d, seed=2, dtype=torch.float32), []
    opt = MFAC(params, lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: float(step >= 3))
    for step in range(8):
        give(params, params[0].detach() - target)
        rows.append(params[0].grad.clone())
        with opt.keep_directions() as kept:
            opt.step()
        schedule.step()
        (u,) = kept.values()
        expected = push_through(torch.stack(rows), 1e-5)
        if step <= 3:
            assert_near(u, expected, 1e-3, step)
        else:  # the new gradient differs from the old ones only by rounding, which may be ignored
            assert float(u.norm()) <= 1.01 * float(expected.norm())
            assert float((u * rows[-1]).sum()) > 0
    assert torch.equal(rows[0], rows[3])


@pytest.mark.parametrize("t", [1, 257])
def test_products_in_chunks(t: int) -> None:
    for d in (1, 4095, 4096, 4097, 16389, 33000):
        window, x, a = (noise(*shape, seed=s, dtype=torch.float32) for s, shape in enumerate(((t, d), (d,), (t,))))
        out = torch.full((d,), torch.nan)
        rows.combine_rows(window, a, out)
        dots, wanted = rows.row_dots(window, x), window.double() @ x.double()
        lengths = window.double().norm(dim=1) * x.double().norm()
        # The filter of the spectrum regards this as rounding.
        assert float(((dots - wanted).abs() / lengths).max()) < 2e-7
        assert error_of(out, window.double().T @ a.double()) < 2e-6


FORMS: dict[str, dict[str, Any]] = {
    "dense": {},
    "bfloat16": {"window_dtype": torch.bfloat16},
    "topk": {"compression": TopK(density=0.05, block_size=4096)},
    "low-rank": {"compression": LowRank(4)},
}


@each(cls=[MFAC, GGT], form=list(FORMS))
def test_whole_steps_of_a_wide_window(cls: Any, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "TILE", 1 << 15)
    monkeypatch.setattr(lowrank, "TILE", 1 << 12)
    params = parameters([(130, 300), (77,)], torch.float32)  # d = 39,077: nine whole chunks and a shorter one
    opt = built(cls, params, lr=1.0, window_size=20, **{"damping": 1e-4} if cls is MFAC else {}, **FORMS[form])
    for step in range(27):
        with opt.keep_directions() as kept:
            push(opt, params, noise(39077, seed=step, dtype=torch.float32))
    G = history(opt, params, [0, 1], 4096 if form == "topk" else 0)
    u = torch.cat([d.flatten() for d in kept.values()])
    if cls is MFAC:
        assert_near(u, push_through(G, 1e-4), 1e-5)
        return
    values, vectors = torch.linalg.eigh(G @ G.T)
    assert_near(u, G.T @ (vectors @ (vectors[-1] / (values.sqrt() + 1e-4))), 1e-5)
