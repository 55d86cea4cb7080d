"""Rows of the model's own predictions against dense Gauss-Newton and Fisher matrices with one backward pass per row."""

import copy

import pytest
import torch
import torch.nn.functional as F

from secondorder.diagnostics import Analysis
from tests.support.kfac import assert_close, labels, noise
from tests.support.models import mlp
from tests.support.oracles.hylo import check_block, error, fisher, flat, layer_rows, plain_hylo, taken

N, LAMBDA, NAMES = 7, 0.3, ("0", "2")


def problem(outputs=1):
    return mlp((4, 3, outputs)), noise(N, 4, seed=3), noise(N, outputs, seed=4)


def hylo(model, **keywords):
    return plain_hylo(model, **{"damping": LAMBDA, **keywords})


def squared_error(outputs, y):
    return (outputs - y).square().sum(1).mean()


def observed(model, opt, x, y, loss=squared_error, likelihood="gaussian"):
    """Take a step whose outputs the optimizer observes, and return the directions."""
    opt.zero_grad()
    outputs = model(x)
    opt.observe(outputs, likelihood, y)
    loss(outputs, y).backward()
    return taken(opt)


def rows_along(model, name, x, vectors):
    """Gradients of every example's ⟨outputs, vector⟩ in the parameters of a layer."""
    return layer_rows(model, name, x, vectors, lambda outputs, vector: (outputs * vector).sum())


def assert_gauss_newton(opt, model, plain, x, kept, tolerance=1e-8):
    for name in NAMES:  # the Hessian of the squared error of one output is 2
        U = 2**0.5 * rows_along(plain, name, x, torch.ones(N, 1, dtype=torch.float64))
        check_block(opt, model, name, U, kept, LAMBDA, tolerance)


@pytest.mark.parametrize("mode", ["sngd", "kid", "kis", "auto"])
def test_exact_rows_solve_with_the_gauss_newton_matrix_of_each_layer(mode):
    (model, x, y), (plain, *_) = problem(), problem()
    opt = hylo(model, mode=mode, rank_fraction=1.0, fisher="exact", kid_residual="none")
    kept = observed(model, opt, x, y)
    assert_gauss_newton(opt, model, plain, x, kept, 1e-8 if mode == "sngd" else 1e-5)


@pytest.mark.parametrize("kind", ["mc", "curvature_prop"])
def test_drawn_rows_average_to_the_fisher(kind):
    (model, x, _), y, draws = problem(3), labels(N, 3, 5), 100
    p = model(x).detach().softmax(1)
    roots = p.sqrt().diag_embed() - p[:, :, None] * p.sqrt()[:, None]  # L Lᵀ = diag(p) − p pᵀ
    found = dict.fromkeys(NAMES, 0.0)
    for seed in range(draws):
        opt = hylo(copy.deepcopy(model), fisher=kind, deterministic_seed=seed)
        observed(opt.module, opt, x, y, F.cross_entropy, "categorical")
        found = {name: total + opt.dense_curvature(name) / draws for name, total in found.items()}
    for name, mean in found.items():
        wanted = sum(fisher(rows_along(model, name, x, roots[:, :, c]))[0] for c in range(3))
        assert error(mean, wanted) < 4 / draws**0.5


def test_exact_rows_of_micro_batches_are_those_of_the_whole_batch():
    (whole, x, y), (parts, *_) = problem(), problem()
    expected = observed(whole, hylo(whole, fisher="exact"), x, y)
    opt = hylo(parts, fisher="exact")
    for some in (slice(0, 3), slice(3, N)):
        outputs = parts(x[some])
        opt.observe(outputs, "gaussian")
        ((outputs - y[some]).square().sum() / N).backward()
    assert_close(flat(taken(opt)), flat(expected), 1e-9)


def test_unsupported_combinations_are_refused(tmp_path):
    model, x, y = problem(3)
    with pytest.raises(ValueError, match=r"would make 3 rows of each example.*fisher='mc'"):
        observed(model, hylo(model, fisher="exact"), x, y)
    with pytest.raises(ValueError, match="drop fisher='mc'"):
        hylo(mlp(), fisher="mc", kfac_when_cheaper=True)
    with pytest.raises(ValueError, match="forward_only"):
        hylo(mlp(), fisher="forward_only")
    with pytest.raises(ValueError, match="fisher='mc'"):
        Analysis(hylo(mlp(), fisher="mc"), tmp_path)


def test_a_step_without_observed_outputs_warns():
    model, x, y = problem()
    opt = hylo(model, fisher="mc")
    squared_error(model(x), y).backward()
    with pytest.warns(UserWarning, match="observe"):
        opt.step()
