"""Directions of float32 parameters within 1e-5 of the float64 solve, at dampings where x/λ − … keeps no digit."""

import pytest
import torch
from torch import Tensor

from secondorder import GGT, MFAC
from secondorder.curvature.window import rows
from tests.support.oracles.window import Average, fisher_direction, root_direction
from tests.support.window import error_of, give, history, noise, parameters, push, put
from tests.support.window_storages import METHODS, STORAGES, averaging, explicit, regular

D, M = 100, 32
DAMPINGS = [1e-4, 1e-6, 1e-8]


def float32_rows(kind: str, steps: int) -> Tensor:
    g = noise(steps, D)
    if kind == "correlated":  # cosines about 0.8
        g = 0.8**0.5 * noise(D, seed=99) + 0.2**0.5 * g
    if kind == "repeated":
        g[M + 4 :] = g[M + 4]
    return g.float().double()


def worst(g: Tensor, damping: float, checked: int, **keywords: str) -> float:
    params = parameters([(60,), (5, 8)], torch.float32)
    opt = MFAC(params, lr=1.0, window_size=M, damping=damping, **keywords)
    errors = []
    for step in range(len(g)):
        u = push(opt, params, g[step])
        if step >= len(g) - checked:
            errors.append(error_of(u, fisher_direction(g[step + 1 - M : step + 1], g[step], damping)))
    return max(errors)


@pytest.fixture(autouse=True, params=[None, 0], ids=["float64-products", "working-precision"])
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense windows as small as these are multiplied in float64; larger ones, in their working precision, are not."""
    if request.param is not None:
        monkeypatch.setattr(rows, "EXACT", request.param)


@pytest.mark.parametrize("solver", ["auto", "eigh"])
@pytest.mark.parametrize("damping", DAMPINGS)
@pytest.mark.parametrize("kind", ["independent", "correlated"])
def test_table_of_the_newest_row(kind: str, damping: float, solver: str) -> None:
    assert worst(float32_rows(kind, M + 14), damping, 2, solver=solver) <= 1e-5


@pytest.mark.parametrize("solver", ["auto", "eigh"])
@pytest.mark.parametrize("damping", DAMPINGS)
def test_a_repeated_gradient(damping: float, solver: str) -> None:
    """Coefficients grow along the null vectors of the Gram matrix; "auto" notices after its lag of ten steps."""
    assert worst(float32_rows("repeated", M + 18), damping, 2, solver=solver) <= 1e-5


def test_auto_keeps_its_accuracy_once_the_repetition_leaves_the_window() -> None:
    g = torch.cat([float32_rows("repeated", M + 18), noise(M + 12, D, seed=5)])
    assert worst(g, 1e-6, 2, solver="auto") <= 1e-5


@pytest.mark.parametrize("storage", ["bfloat16", "topk", "topk-4-bit", "rank-2"])
@pytest.mark.parametrize("damping", [1e-6, 1e-8])
def test_compressed_windows(damping: float, storage: str) -> None:
    """Against the rows as stored."""
    kind, params = STORAGES[storage], parameters([(12, 8), (4,)], torch.float32)
    opt = MFAC(params, lr=1.0, window_size=M, damping=damping, **kind.keywords)
    for step in range(M + 6):
        u = push(opt, params, noise(D, seed=step))
    rows = history(opt, params, [0, 1], kind.block_size)
    assert error_of(u, fisher_direction(rows, rows[-1], damping)) <= 1e-5


@pytest.mark.parametrize("value", DAMPINGS)
@pytest.mark.parametrize("method", METHODS)
def test_momentum_on_gradients(method: str, value: float) -> None:
    """While every gradient is a row nothing may be left of x/λ; later what has dropped out of the window dominates."""
    params, average = parameters([(D,)], torch.float32), Average(D, 0.9)
    opt = METHODS[method](params, lr=1.0, window_size=M, **averaging(method, 0.9, 0.95), **regular(method, value))
    g = float32_rows("independent", M + 10)
    for step in range(M + 10):
        u, x = push(opt, params, g[step]), average.add(g[step])
        if step in (0, 1, M // 2, M - 1, M, M + 9):
            rows = g[max(0, step + 1 - M) : step + 1]
            assert error_of(u, explicit(method, rows, x, value, 0.95)) <= 1e-5, step


@pytest.mark.parametrize("value", DAMPINGS)
@pytest.mark.parametrize("method", METHODS)
def test_decay_beside_the_newest_row(method: str, value: float) -> None:
    params = parameters([(D,)], torch.float32)
    keywords = {"weight_decay": 0.125, "weight_decay_mode": "reg", **regular(method, value)}
    opt = METHODS[method](params, lr=1.0, window_size=M, **keywords)
    g, p = float32_rows("independent", M + 10), noise(D, seed=77)
    for row in g:
        put(params, p)
        give(params, row)
        with opt.keep_directions() as kept:
            opt.step()
    (u,) = kept.values()
    assert error_of(u.double(), explicit(method, g[-M:], g[-1] + 0.125 * p, value)) <= 1e-5


@pytest.mark.parametrize(
    ("method", "solver"), [("mfac", "cholesky"), ("mfac", "auto"), ("mfac", "eigh"), ("ggt", None)]
)
def test_one_huge_gradient_does_not_silence_those_after_it(method: str, solver: str | None) -> None:
    """Small rows beside a large one are no rounding: they stay what they are until it leaves the window."""
    params, g = parameters([(D,)], torch.float32), float32_rows("independent", 24)
    g[3] *= 1e4
    opt = METHODS[method](
        params, lr=1.0, window_size=M, **regular(method, 1e-2), **({"solver": solver} if solver else {})
    )
    for step in range(24):
        u = push(opt, params, g[step])
    assert error_of(u, explicit(method, g, g[-1], 1e-2)) <= 1e-4


@pytest.mark.parametrize("beta2", [1.0, 0.9])
@pytest.mark.parametrize("kind", ["independent", "correlated", "repeated"])
def test_ggt(kind: str, beta2: float) -> None:
    g, params = float32_rows(kind, M + 8), parameters([(D,)], torch.float32)
    opt = GGT(params, lr=1.0, window_size=M, eps=1e-4, betas=(0.0, beta2))
    for step in range(len(g)):
        u = push(opt, params, g[step])
    assert error_of(u, root_direction(g[-M:], g[-1], 1e-4, beta2)) <= 1e-5
