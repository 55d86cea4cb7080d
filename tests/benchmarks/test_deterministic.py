"""L-BFGS and Gauss-Newton of the benchmarks agree with torch's optimizer and explicit least-squares solutions."""

import copy

import pytest
import torch
from torch import nn

from benchmarks.peers import PEERS
from benchmarks.runner import race
from tests.support.workloads import trainer_of


def evaluation(optimizer, model, x, y):
    def closure():
        optimizer.zero_grad()
        outputs = model(x)
        loss = (outputs - y).square().sum(1).mean()
        loss.backward()
        return loss, outputs, y

    return closure


def problem(hidden=False):
    torch.manual_seed(0)
    x, y = torch.randn(30, 5, dtype=torch.float64), torch.randn(30, 2, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)) if hidden else nn.Linear(5, 2)
    return model.double(), x, y


def test_lbfgs_agrees_with_torch():
    model, x, y = problem(hidden=True)
    twin = copy.deepcopy(model)
    optimizer = PEERS["lbfgs"].build(model, "poisson", {"history_size": 7})
    options = {
        "history_size": 7, "max_iter": 4, "line_search_fn": "strong_wolfe", "tolerance_grad": 0.0,
        "tolerance_change": 0.0,
    }  # fmt: skip
    theirs = torch.optim.LBFGS(twin.parameters(), **options)
    closure = evaluation(theirs, twin, x, y)
    for _ in range(3):
        found = optimizer.step(evaluation(optimizer, model, x, y))
        expected = theirs.step(lambda: closure()[0])
        assert float(found[0].detach()) == float(expected.detach())
    for ours, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, other)


def test_gauss_newton_solves_a_linear_problem_in_one_step():
    model, x, y = problem()
    optimizer = PEERS["gauss_newton"].build(model, "poisson", {"damping": 1e-8})
    optimizer.step(evaluation(optimizer, model, x, y))
    solution = torch.linalg.lstsq(torch.cat([x, torch.ones(30, 1, dtype=torch.float64)], 1), y).solution.mT
    torch.testing.assert_close(
        torch.cat([model.weight, model.bias[:, None]], 1).detach(), solution, rtol=1e-5, atol=1e-6
    )


def test_gauss_newton_is_the_damped_normal_equation():
    model, x, y = problem(hidden=True)
    damping, params = 0.3, list(model.parameters())
    before = torch.cat([p.detach().flatten() for p in params])
    residuals = (model(x) - y).flatten()
    rows = [torch.cat([g.flatten() for g in torch.autograd.grad(r, params, retain_graph=True)]) for r in residuals]
    jacobian = torch.stack(rows)
    matrix = jacobian.mT @ jacobian + 30 * damping * torch.eye(len(before), dtype=torch.float64)
    expected = before - torch.linalg.solve(matrix, jacobian.mT @ residuals.detach())
    optimizer = PEERS["gauss_newton"].build(model, "poisson", {"damping": damping})
    optimizer.step(evaluation(optimizer, model, x, y))
    torch.testing.assert_close(torch.cat([p.detach().flatten() for p in params]), expected, rtol=1e-9, atol=1e-11)


def test_gauss_newton_undoes_a_bad_step():
    model, x, y = problem(hidden=True)
    with torch.no_grad():
        model[0].weight.mul_(8)  # saturated units, for which the linear model is wrong
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = PEERS["gauss_newton"].build(model, "poisson", {"damping": 1e-14})
    optimizer.step(evaluation(optimizer, model, x, y))
    for p, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(p.detach(), old)
    assert optimizer.param_groups[0]["damping"] == pytest.approx(3e-14)


def test_gauss_newton_survives_a_loss_that_is_not_finite():
    class Logarithm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1, 1, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.log(x @ self.weight)

    model, x = Logarithm(), torch.ones(4, 1, dtype=torch.float64)
    optimizer = PEERS["gauss_newton"].build(model, "poisson", {"damping": 1e-12})
    optimizer.step(evaluation(optimizer, model, x, torch.full((4, 1), -5.0, dtype=torch.float64)))  # weight below zero
    assert torch.equal(model.weight.detach(), torch.ones(1, 1, dtype=torch.float64))
    assert optimizer.param_groups[0]["damping"] == pytest.approx(3e-12)


@pytest.mark.parametrize("name", ["lbfgs", "gauss_newton"])
def test_training_on_the_workload_of_the_recipe(name):
    trainer = trainer_of(name, "poisson")
    race([trainer], 5)
    assert trainer.history.losses[-1] < trainer.history.losses[0]
