"""Complex parameters have no Kronecker block: they take the fallback, as torch's own optimizers treat them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.contract.methods import Method
from tests.contract.tasks import Shadow, assert_identical, snapshot, values

RULES: dict[str, tuple[dict[str, Any], Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd": ({"momentum": 0.0}, lambda p: torch.optim.SGD(p, 0.05)),
    "momentum": ({}, lambda p: torch.optim.SGD(p, 0.05, momentum=0.9)),
    "nesterov": (
        {"nesterov": True, "weight_decay": 0.1, "maximize": True},
        lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True, weight_decay=0.1, maximize=True),
    ),
    "adamw": (
        {"fallback": "adamw", "fallback_lr": 0.01, "weight_decay": 0.1},
        lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1),
    ),
}


class Phase(nn.Module):
    """A complex linear map between two real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.turn = nn.Linear(4, 4, dtype=torch.complex64)
        self.last = nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.turn(self.first(inputs).to(self.turn.weight.dtype)).abs())


def fill(parameters: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


@pytest.mark.option("module", "fallback")
@pytest.mark.parametrize("foreach", [False, True, None])
@pytest.mark.parametrize("rule", RULES)
def test_fallback_of_complex_parameters_is_torchs(method: Method, rule: str, foreach: bool | None) -> None:
    keywords, reference = RULES[rule]
    generator = torch.Generator().manual_seed(0)
    parameters = [
        nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.complex128)) for shape in ((3, 2), (4,))
    ]
    optimizer = method.build(nn.Linear(2, 2), parameters, foreach=foreach, **keywords)
    shadow = Shadow(parameters, reference)
    for step in range(5):
        fill(parameters, step)
        shadow.step()
        optimizer.step()
    for mine, theirs in zip(parameters, shadow.values(), strict=True):
        torch.testing.assert_close(mine.detach(), theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.option("module", "fallback")
def test_complex_layer_in_a_model_trains_by_the_fallback(method: Method) -> None:
    model = Phase()
    optimizer = method.build(model)
    before = values(model)
    for step in range(4):
        optimizer.zero_grad()
        model(torch.randn(5, 3, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
    for name, value in values(model).items():
        assert value.isfinite().all(), name
        assert not torch.equal(value, before[name]), name
    assert optimizer.state[model.turn.weight].keys() == {"step", "momentum_buffer"}


@pytest.mark.option("module", "fallback")
def test_complex_momentum_survives_a_checkpoint(method: Method) -> None:
    parameters = [nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))]
    optimizer = method.build(nn.Linear(2, 2), parameters)
    fill(parameters, 0)
    optimizer.step()
    second = method.build(nn.Linear(2, 2), [nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))])
    second.load_state_dict(optimizer.state_dict())
    assert_identical(snapshot(second), snapshot(optimizer))
