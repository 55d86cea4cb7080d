"""Rows of the model's own predictions, against dense Gauss-Newton and Fisher matrices made by one backward a row."""

import copy
import io

import pytest
import torch
from torch import nn

from secondorder import HyLo
from secondorder.diagnostics import Analysis

N, LAMBDA = 7, 0.3


def _data(outputs=1):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(N, 4, dtype=torch.float64, generator=generator)
    y = torch.randn(N, outputs, dtype=torch.float64, generator=generator)
    return x, y


def _net(outputs=1):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, outputs)).double()


def _squared_error(outputs, y):
    return (outputs - y).square().sum(1).mean()


def _step(model, opt, x, y, loss=_squared_error, likelihood="gaussian"):
    opt.zero_grad()
    outputs = model(x)
    opt.observe(outputs, likelihood, y)
    loss(outputs, y).backward()
    before = [p.detach().clone() for p in model.parameters()]
    opt.step()
    return [(old - p.detach()) / opt.param_groups[0]["lr"] for old, p in zip(before, model.parameters(), strict=True)]


def _hylo(model, **keywords):
    chosen = {"lr": 1e-3, "momentum": 0.0, "mode": "sngd", "approx": "expand", "damping": LAMBDA, "update_steps": 1}
    return HyLo(model, **{**chosen, **keywords})


def _rows(model, x, vectors):
    """Gradient of ⟨outputs, vector⟩ of each example, by layer ``[n, d]``."""
    layers = [m for m in model if isinstance(m, nn.Linear)]
    rows = []
    for i, vector in enumerate(vectors):
        found = [torch.autograd.grad((model(x[i : i + 1])[0] * vector).sum(), list(m.parameters())) for m in layers]
        rows.append([torch.cat([part.flatten() for part in layer]) for layer in found])
    return [torch.stack(layer) for layer in zip(*rows, strict=True)]


def _solved(model, x, y, rows, loss=_squared_error):
    """(Σ u uᵀ + λI)⁻¹ ∇ of every layer, by a dense solve."""
    gradients = torch.autograd.grad(loss(model(x), y), list(model.parameters()))
    found = []
    for weight, bias, u in zip(gradients[::2], gradients[1::2], rows, strict=True):
        gradient = torch.cat([weight.flatten(), bias])
        dense = u.T @ u + LAMBDA * torch.eye(len(gradient), dtype=torch.float64)
        solution = torch.linalg.solve(dense, gradient)
        found += [solution[: weight.numel()].view_as(weight), solution[weight.numel() :]]
    return found


def test_exact_rows_solve_with_the_gauss_newton_matrix_of_each_layer():
    model, (x, y) = _net(), _data()
    rows = [
        u * (2 / N) ** 0.5 for u in _rows(model, x, torch.ones(N, 1, dtype=torch.float64))
    ]  # Hessian 2, mean over N
    expected = _solved(model, x, y, rows)
    torch.testing.assert_close(_step(model, _hylo(model, fisher="exact"), x, y), expected, rtol=1e-8, atol=1e-10)


def test_they_do_not_vanish_with_the_errors_as_those_of_the_loss_do():
    model, (x, _) = _net(), _data()
    y = model(x).detach() + 1e-6
    exact, empirical = _hylo(model, fisher="exact"), _hylo(copy.deepcopy(model))
    steps = _step(model, exact, x, y)
    rows = [u * (2 / N) ** 0.5 for u in _rows(model, x, torch.ones(N, 1, dtype=torch.float64))]
    assert max(u.square().sum() for u in rows) > 1e-3
    other = _step(empirical.module, empirical, x, y)
    assert all(a.norm() < 0.9 * b.norm() for a, b in zip(steps, other, strict=True))


@pytest.mark.parametrize("fisher", ["mc", "curvature_prop"])
def test_drawn_rows_average_to_the_fisher(fisher):
    """Of a softmax: kernels of many draws, on one model, against the Fisher with every class."""
    model, (x, _) = _net(3), _data()
    y = torch.randint(3, (N,), generator=torch.Generator().manual_seed(5))
    logits = model(x).detach()
    p = logits.softmax(1)
    roots = [torch.diag(q.sqrt()) - torch.outer(q, q.sqrt()) for q in p]  # L Lᵀ = diag(p) − p pᵀ
    fishers = [
        sum(u.T @ u for u in (_rows(model, x, [root[:, c] for root in roots])[layer] for c in range(3))) / N
        for layer in range(2)
    ]
    sums, draws = [0.0, 0.0], 100
    for seed in range(draws):
        opt = _hylo(copy.deepcopy(model), fisher=fisher, deterministic_seed=seed)
        _step(opt.module, opt, x, y, nn.functional.cross_entropy, "categorical")
        for layer, name in enumerate(("0", "2")):
            sums[layer] = sums[layer] + opt.dense_curvature(name)
    for total, fisher_matrix, sizes in zip(sums, fishers, ((3, 5), (3, 4)), strict=True):
        d_o, d_a = sizes  # dense_curvature is over [W | b], rows first
        order = torch.cat(
            [torch.arange(d_o * (d_a - 1)).view(d_o, -1), d_o * (d_a - 1) + torch.arange(d_o)[:, None]], 1
        )
        wanted = fisher_matrix[order.flatten()][:, order.flatten()]
        off = torch.linalg.matrix_norm(total / draws - wanted) / torch.linalg.matrix_norm(wanted)
        assert off < 4 / draws**0.5


def test_micro_batches_are_one_batch():
    x, y = _data()
    whole, parts = _net(), _net()
    expected = _step(whole, _hylo(whole, fisher="exact"), x, y)
    opt = _hylo(parts, fisher="exact")
    before = [p.detach().clone() for p in parts.parameters()]
    for some in (slice(0, 3), slice(3, N)):
        outputs = parts(x[some])
        opt.observe(outputs, "gaussian")
        ((outputs - y[some]).square().sum() / N).backward()
    opt.step()
    found = [(old - p.detach()) / 1e-3 for old, p in zip(before, parts.parameters(), strict=True)]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("mode", ["kid", "kis", "auto"])
def test_every_mode_takes_them(mode):
    model, (x, y) = _net(), _data()
    opt = _hylo(model, mode=mode, rank_fraction=1.0, fisher="exact", kid_residual="none")
    rows = [u * (2 / N) ** 0.5 for u in _rows(model, x, torch.ones(N, 1, dtype=torch.float64))]
    expected = _solved(model, x, y, rows)
    torch.testing.assert_close(_step(model, opt, x, y), expected, rtol=1e-5, atol=1e-7)


def test_copies_and_files_go_on_alike():
    model, (x, y) = _net(), _data()
    opt = _hylo(model, fisher="mc", mode="kis", rank_fraction=0.5, momentum=0.9)
    _step(model, opt, x, y)
    twin_model = copy.deepcopy(model)
    twin = copy.deepcopy(opt)
    twin.attach(twin_model)
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    again_model = copy.deepcopy(model)
    again = _hylo(again_model, fisher="mc", mode="kis", rank_fraction=0.5, momentum=0.9)
    again.load_state_dict(torch.load(file))
    for _ in range(2):
        _step(model, opt, x, y)
        _step(again_model, again, x, y)
    for p, q in zip(model.parameters(), again_model.parameters(), strict=True):
        assert torch.equal(p, q)
    assert twin.fisher == opt.fisher == "mc"


def test_what_it_cannot_do_is_refused():
    model, (x, y) = _net(3), _data(3)
    with pytest.raises(ValueError, match=r"would make 3 rows of each example.*fisher='mc'"):
        _step(model, _hylo(model, fisher="exact"), x, y)
    with pytest.raises(ValueError, match="drop fisher='mc'"):
        _hylo(_net(), fisher="mc", kfac_when_cheaper=True)
    with pytest.raises(ValueError, match="forward_only"):
        _hylo(_net(), fisher="forward_only")


def test_an_analysis_of_other_rows_is_refused(tmp_path):
    with pytest.raises(ValueError, match="fisher='mc'"):
        Analysis(_hylo(_net(), fisher="mc"), tmp_path)


def test_a_step_that_nobody_observed_is_the_gradient_and_a_warning():
    model, (x, y) = _net(), _data()
    opt = _hylo(model, fisher="mc")
    _squared_error(model(x), y).backward()
    with pytest.warns(UserWarning, match="observe"):
        opt.step()
