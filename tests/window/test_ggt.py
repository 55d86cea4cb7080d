"""GGT against the explicit root of the d × d matrix: decay, momentum on gradients, the weight of the complement."""

from typing import Any

import pytest
import torch
from torch import Tensor

from secondorder import GGT
from tests.support.grid import pairs
from tests.support.oracles.window import Average, root_direction
from tests.support.window import assert_near, history, noise, parameters, push
from tests.support.window_storages import STORAGES

D, EPS = 23, 1e-3


def ggt(d: int = D, **keywords: Any) -> tuple[GGT, list[torch.nn.Parameter]]:
    params = parameters([(d,)])
    return GGT(params, **{"lr": 1.0, "window_size": 4, "eps": EPS, **keywords}), params


def gradients(steps: int, d: int = D, seed: int = 0) -> Tensor:
    return noise(steps, d, seed=seed)


@pairs(m=[1, 4, 9], beta2=[1.0, 0.9, 0.5], eps=[1e-2, 1e-5])
def test_decay_of_the_window(m: int, beta2: float, eps: float) -> None:
    opt, params = ggt(betas=(0.0, beta2), window_size=m, eps=eps)
    g = gradients(3 * m + 2)
    for step in range(len(g)):
        rows = g[max(0, step + 1 - m) : step + 1]
        assert_near(push(opt, params, g[step]), root_direction(rows, g[step], eps, beta2), 1e-9, step)


@pytest.mark.parametrize("storage", ["bfloat16", "topk", "topk-4-bit", "rank-2"])
def test_decay_of_compressed_windows(storage: str) -> None:
    kind, params = STORAGES[storage], parameters([(4, 5), (3,)])
    opt = GGT(params, lr=1.0, window_size=4, eps=EPS, betas=(0.0, 0.8), **kind.keywords)
    for g in gradients(14):
        u, rows = push(opt, params, g), history(opt, params, [0, 1], kind.block_size)
        assert_near(u, root_direction(rows, rows[-1], EPS, 0.8))


@pairs(m=[1, 3, 8], betas=[(0.9, 1.0), (0.9, 0.5), (0.5, 0.9), (0.99, 0.8)], correct=[False, True])
def test_momentum_on_gradients(m: int, betas: tuple[float, float], correct: bool) -> None:
    """Over four turns and more: most of the momentum comes from rows that are gone."""
    beta1, beta2 = betas
    opt, params = ggt(betas=betas, window_size=m, bias_correction=correct)
    g, average = gradients(4 * m + 10), Average(D, beta1)
    for step in range(len(g)):
        x = average.add(g[step], correct=correct)
        rows = g[max(0, step + 1 - m) : step + 1]
        assert_near(push(opt, params, g[step]), root_direction(rows, x, EPS, beta2), 1e-9, step)


@pytest.mark.parametrize("storage", ["float32", "bfloat16", "topk", "topk-8-bit", "rank-1"])
def test_momentum_averages_what_was_stored(storage: str) -> None:
    kind, params = STORAGES[storage], parameters([(4, 5), (3,)])
    opt = GGT(params, lr=1.0, window_size=3, eps=EPS, betas=(0.9, 0.7), **kind.keywords)
    average = Average(D, 0.9)
    for g in gradients(14):
        u, rows = push(opt, params, g), history(opt, params, [0, 1], kind.block_size)
        assert_near(u, root_direction(rows, average.add(rows[-1]), EPS, 0.7))


@pytest.mark.parametrize("weight", [None, 0.0, 3.0, 1 / EPS])
@pytest.mark.parametrize("beta1", [0.0, 0.9])
def test_weight_of_the_complement(weight: float | None, beta1: float) -> None:
    """For the newest row it has no effect; for an average the span and the rest are weighted apart."""
    opt, params = ggt(betas=(beta1, 0.9), sgd_weight=weight)
    g, average = gradients(14), Average(D, beta1)
    for step in range(14):
        v = average.add(g[step])
        rows = g[max(0, step - 3) : step + 1]
        assert_near(push(opt, params, g[step]), root_direction(rows, v, EPS, 0.9, weight), 1e-9, step)


@pytest.mark.parametrize("storage", ["dense", "float32", "bfloat16"])
def test_a_window_of_one_row_in_closed_form(storage: str) -> None:
    opt, params = ggt(window_size=1, **STORAGES[storage].keywords)
    for g in gradients(4):
        row = g.bfloat16().double() if storage == "bfloat16" else g
        assert_near(push(opt, params, g), row / (row.norm() + EPS), 1e-12)


@pairs(kind=["same", "opposite", "scaled", "with zeros"], beta2=[1.0, 0.9])
def test_dependent_gradients(kind: str, beta2: float) -> None:
    opt, params = ggt(window_size=6, betas=(0.0, beta2))
    base, seen = gradients(20), []
    for step in range(20):
        g = base[step // 3]
        if kind == "opposite":
            g = g * (-1) ** step
        elif kind == "scaled":
            g = g * (1 + step % 3)
        elif kind == "with zeros" and step % 3 == 0:
            g = torch.zeros_like(g)
        seen.append(g)
        u = push(opt, params, g)
        if not g.any():
            assert u.norm() <= 1e-12
        else:
            assert_near(u, root_direction(torch.stack(seen[-6:]), g, EPS, beta2), 1e-9, step)


@pytest.mark.parametrize("d", [3, 5])
def test_more_rows_than_columns(d: int) -> None:
    opt, params = ggt(d, window_size=31, betas=(0.0, 0.95))
    g = gradients(70, d)
    for step in range(70):
        rows = g[max(0, step - 30) : step + 1]
        assert_near(push(opt, params, g[step]), root_direction(rows, g[step], EPS, 0.95), 1e-9)


def test_eps_and_beta2_changed_in_mid_run_are_a_fresh_optimizer_with_the_same_window() -> None:
    schedule = [(EPS, 1.0), (EPS, 0.5), (1.0, 0.5), (1e-5, 1.0), (1e-5, 0.9)] * 3
    opt, params = ggt()
    fresh = {pair: ggt(eps=pair[0], betas=(0.0, pair[1])) for pair in sorted(set(schedule))}
    for g, pair in zip(gradients(len(schedule)), schedule, strict=True):
        opt.param_groups[0].update(eps=pair[0], betas=(0.0, pair[1]))
        directions = {key: push(*value, g) for key, value in fresh.items()}
        assert torch.equal(push(opt, params, g), directions[pair])


def test_large_eps_leaves_the_gradient() -> None:
    opt, params = ggt(eps=1e12)
    for g in gradients(9):
        assert_near(1e12 * push(opt, params, g), g, 1e-9)


def test_heavy_ball_over_directions() -> None:
    (opt, params), (plain, others) = ggt(momentum=0.75, nesterov=True), ggt()
    v = torch.zeros(D, dtype=torch.float64)
    for g in gradients(10):
        u = push(plain, others, g)
        v = 0.75 * v + u
        assert_near(push(opt, params, g), u + 0.75 * v, 1e-12)
