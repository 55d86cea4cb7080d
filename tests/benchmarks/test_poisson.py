"""The physics-informed network: its forward derivatives agree with autograd, and layer methods use all of them."""

import math
from dataclasses import replace
from itertools import islice

import pytest
import torch

from benchmarks.workloads.poisson import Poisson
from secondorder import EKFAC, KFAC, HyLo, ScaleOptions

WORKLOAD = replace(Poisson.of_size("smoke"), batch_size=30, widths=(5, 4))


def _problem(seed=0):
    return WORKLOAD.build_model(seed), next(WORKLOAD.batches(seed))


def _value(model, point, weights=None):
    """The value of the network, with ordinary biases, at one point ``[2]``."""
    h = point
    for number, w in enumerate(weights or [layer.weight for layer in model.layers]):
        h = (h if number == 0 else torch.tanh(h)) @ w[:, :-1].T + w[:, -1]
    return h.squeeze(-1)


def _residuals(model, batch):
    """``-Δu - f`` of the points inside, and u of those on the boundary, by two backward passes."""
    inside, boundary = [], []
    for x, y, *_ in batch[0].tolist():
        point = torch.tensor([x, y], dtype=torch.float64, requires_grad=True)
        u = _value(model, point)
        if {x, y} & {0.0, 1.0}:
            boundary.append(u)
            continue
        (slope,) = torch.autograd.grad(u, point, create_graph=True)
        second = [torch.autograd.grad(slope[k], point, create_graph=True)[0][k] for k in range(2)]
        f = 2 * math.pi**2 * math.sin(math.pi * x) * math.sin(math.pi * y)
        inside.append(-second[0] - second[1] - f)
    return torch.stack(inside), torch.stack(boundary)


def test_loss_and_gradients_agree_with_two_backward_passes():
    model, batch = _problem()
    inside, boundary = _residuals(model, batch)
    assert (len(inside), len(boundary)) == (26, 4)
    expected = inside.square().mean() / 2 + boundary.square().mean() / 2
    loss = WORKLOAD.loss(model, batch)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    weights = list(model.parameters())
    found, wanted = torch.autograd.grad(loss, weights), torch.autograd.grad(expected, weights)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)


def _output_gradients(model, batch):
    """Gradients of the scaled residual of each point ``[batch, *weight]``, with one backward pass per point."""
    weights = list(model.parameters())
    rows = [torch.autograd.grad(output, weights, retain_graph=True) for output in model(batch[0])]
    return [torch.stack(parts) for parts in zip(*rows, strict=True)]


def _take_statistics(optimizer, model, batch):
    optimizer.zero_grad()
    outputs = model(batch[0])
    optimizer.observe(outputs, WORKLOAD.likelihood, batch[1])
    WORKLOAD.criterion(outputs, batch[1]).backward()
    optimizer.step()


def test_ekfac_measures_the_gradients_of_single_residuals():
    """The scales are mean squares of the gradients in the Gauss-Newton matrix 2 Σ ∇r ∇rᵀ / N, in the eigenbasis."""
    model, batch = _problem()
    gradients = _output_gradients(model, batch)
    optimizer = EKFAC(model, lr=0.0, fisher="exact", estimator="intra", scale=ScaleOptions(decay=0.0))
    for _ in range(2):  # the first step computes the basis, the second one measures in it
        _take_statistics(optimizer, model, batch)
    for layer, rows in zip(model.layers, gradients, strict=True):
        state = optimizer.state[layer.weight]
        turned = state["basis_g"].T @ rows @ state["basis_a"]
        torch.testing.assert_close(state["scale"], 2 * turned.square().mean(0), rtol=1e-8, atol=1e-12)
    optimizer.close()


@pytest.mark.parametrize("approx", ["expand", "reduce"])
def test_kfac_counts_value_and_derivatives_as_positions(approx):
    model, batch = _problem()
    inputs, outputs, weights = [], [], list(model.parameters())

    def keep(_, x, y):
        inputs.append(x[0].detach())
        outputs.append(y)

    kept = [layer.register_forward_hook(keep) for layer in model.layers]
    total = model(batch[0]).sum()  # outputs of different points are independent
    pulled = torch.autograd.grad(total, [*outputs, *weights])
    pulled, whole = pulled[: len(weights)], pulled[len(weights) :]
    for handle in kept:
        handle.remove()
    optimizer = KFAC(model, lr=0.0, fisher="exact", approx=approx)
    _take_statistics(optimizer, model, batch)
    for layer, a, g, gradient in zip(model.layers, inputs, pulled, whole, strict=True):
        state = optimizer.state[layer.weight]
        assert a.shape == (30, 4, layer.in_features)
        torch.testing.assert_close((g.mT @ a).sum(0), gradient)
        a, g = (a.flatten(0, 1), g.flatten(0, 1)) if approx == "expand" else (a.mean(1), g.sum(1))
        torch.testing.assert_close(state["factor_a"], a.T @ a / len(a))
        torch.testing.assert_close(state["factor_g"], 2 * g.T @ g / 30)
    optimizer.close()


@pytest.mark.parametrize("fisher", ["empirical", "exact"])
def test_hylo_with_all_rows_is_exact(fisher):
    """A step solves with the Fisher of each layer: of the gradients of the loss, or the Gauss-Newton matrix."""
    model, batch = _problem()
    errors = (model(batch[0]) - batch[1]).detach()
    jacobians = _output_gradients(model, batch)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = HyLo(model, lr=1.0, momentum=0.0, mode="sngd", approx="expand", fisher=fisher, damping=0.5)
    _take_statistics(optimizer, model, batch)
    for p, old, rows in zip(model.parameters(), before, jacobians, strict=True):
        gradients = (2 * errors[..., None] * rows).flatten(1)
        flat = gradients if fisher == "empirical" else math.sqrt(2) * rows.flatten(1)
        curvature = flat.T @ flat / 30 + 0.5 * torch.eye(flat.shape[1], dtype=flat.dtype)
        direction = torch.linalg.solve(curvature, gradients.mean(0)).reshape_as(p)
        torch.testing.assert_close(old - p.detach(), direction, rtol=1e-6, atol=1e-9)
    optimizer.close()


def test_the_true_solution_has_no_residual():
    """The right-hand sides agree with the derivatives of u, also for another frequency."""
    workload = replace(WORKLOAD, frequency=3)
    points, targets = next(workload.batches(0))
    for (x, y, of_value, of_laplacian), target in zip(points.tolist(), targets[:, 0].tolist(), strict=True):
        u = math.sin(3 * math.pi * x) * math.sin(3 * math.pi * y)
        assert of_value * u - of_laplacian * 18 * math.pi**2 * u == pytest.approx(target, abs=1e-9)
        assert (0 < x < 1 and 0 < y < 1) == (of_value == 0)


def test_points_are_fixed_and_cover_all_sides():
    first, second = islice(Poisson().batches(0), 2)
    assert first[0].equal(second[0])
    x, y = first[0][:, 0], first[0][:, 1]
    sides = [int((axis == end).sum()) for axis in (x, y) for end in (0.0, 1.0)]
    assert sum(sides) == 120
    assert min(sides) > 15


def test_the_error_is_relative_to_the_solution():
    model = WORKLOAD.build_model(0)
    with torch.no_grad():
        model.layers[-1].weight.zero_()
    assert WORKLOAD.evaluate(model) == pytest.approx(1)
    single = replace(WORKLOAD, double=False)
    assert {p.dtype for p in single.build_model(0).parameters()} == {torch.float32}
    assert next(single.batches(0))[1].dtype == torch.float32
    assert 0.5 < single.evaluate(single.build_model(0)) < 2


@pytest.mark.parametrize(("field", "value"), [("batch_size", 1), ("frequency", 0)])
def test_invalid_problems_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} must be at least"):
        replace(WORKLOAD, **{field: value})
