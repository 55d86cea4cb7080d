"""Parameters without a module: a layer method asks for `module=`; what that module does not hold takes the fallback."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.contract.methods import METHODS, Method
from tests.contract.tasks import Shadow, Task, assert_identical

pytestmark = pytest.mark.option("module", "skip_layers")


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 4), (4,), (2, 3, 2), ()]
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in shapes]


def fill(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in params:
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def groups_of(params: list[nn.Parameter]) -> list[dict[str, object]]:
    return [{"params": params[:2]}, {"params": params[2:], "lr": 0.25}]


@pytest.mark.parametrize("wrap", [iter, list, groups_of, lambda params: [(str(i), p) for i, p in enumerate(params)]])
def test_without_a_module_the_error_says_what_to_pass(method: Method, wrap: object) -> None:
    with pytest.raises(ValueError, match=r"module="):
        method.cls(wrap(parameters()))


def test_with_a_foreign_module_they_follow_the_fallback(method: Method) -> None:
    params = parameters()
    optimizer = method.build(nn.Linear(2, 2), params)
    shadow = Shadow(params, lambda copies: torch.optim.SGD(copies, method.keywords["lr"], momentum=0.9))
    for step in range(5):
        fill(params, step)
        shadow.step()
        optimizer.step()
    shadow.assert_identical()
    assert all(state.keys() <= {"step", "momentum_buffer", "global_step"} for state in optimizer.state.values())


def test_groups_of_them_follow_the_fallback(method: Method) -> None:
    params = parameters()
    optimizer = method.build(nn.Linear(2, 2), groups_of(params), weight_decay=0.1, nesterov=True)
    shadow = Shadow(
        params,
        lambda copies: torch.optim.SGD(groups_of(copies), 0.05, momentum=0.9, weight_decay=0.1, nesterov=True),
    )
    for step in range(5):
        fill(params, step)
        shadow.step()
        optimizer.step()
    shadow.assert_identical()


def test_module_that_owns_some_of_them(method: Method, mlp: Task) -> None:
    model = mlp.model()
    stranger = parameters()[0]
    optimizer = method.build(model, [*model.parameters(), stranger], momentum=0.0)
    start = stranger.detach().clone()
    mlp.loss(model, 0).backward()
    fill([stranger], 0)
    optimizer.step()
    assert_identical(stranger.detach(), start.add(stranger.grad, alpha=-method.keywords["lr"]))


def test_window_methods_take_bare_parameters() -> None:
    for method in METHODS:
        if not method.needs_module:
            params = parameters()
            optimizer = method.cls(params, **method.keywords)
            fill(params, 0)
            optimizer.step()
            assert all(parameter.isfinite().all() for parameter in params)
