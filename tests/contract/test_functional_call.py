"""`torch.func.functional_call`: with the module's own parameters it trains, with any others it is a bystander."""

from __future__ import annotations

import torch
from torch.func import functional_call
from torch.nn import functional as F

from tests.support.methods import Method
from tests.support.tasks import Task, assert_identical, backward, train, values


def test_own_parameters_train(method: Method, mlp: Task) -> None:
    plain, model = mlp.model(), mlp.model()
    train(plain, method.build(plain), mlp, 4)
    optimizer = method.build(model)
    for step in range(4):
        optimizer.zero_grad()
        inputs, targets = mlp.batch(step)
        F.cross_entropy(functional_call(model, dict(model.named_parameters()), (inputs,)), targets).backward()
        optimizer.step()
    assert_identical(values(model), values(plain))


def test_foreign_parameters_leave_no_trace(method: Method, mlp: Task) -> None:
    """Fast weights of a meta-learner, per-example gradients, perturbed copies: in front of every step."""
    results = []
    for disturbed in (False, True):
        model, optimizer = method.start(mlp)
        for step in range(4):
            backward(model, optimizer, mlp, step)
            if disturbed:
                inputs, targets = mlp.batch(100 + step)
                fast = {name: value.requires_grad_() for name, value in values(model).items()}
                F.cross_entropy(functional_call(model, fast, (inputs,)), targets).backward()
                torch.func.grad(lambda own, x=inputs, model=model: functional_call(model, own, (x,)).sum())(
                    values(model)
                )
            optimizer.step()
        results.append((values(model), optimizer.state_dict()))
    assert_identical(results[1], results[0])
