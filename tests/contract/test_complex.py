"""Complex parameters have no Kronecker block: they take the fallback, as torch's own optimizers treat them.

In a window they are pairs of real numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.methods import Method, Variant
from tests.support.tasks import Shadow, assert_changed, assert_identical, snapshot, values

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


LAYERWISE = pytest.mark.option("skip_layers", "fallback")
WINDOWED = pytest.mark.option("window_size")


@LAYERWISE
@pytest.mark.cover(rule=[*RULES], foreach=[False, True, None])
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


def test_complex_layer_in_a_model_trains(method: Method) -> None:
    model = Phase()
    optimizer = method.build(model)
    before = values(model)
    for step in range(4):
        optimizer.zero_grad()
        model(torch.randn(5, 3, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
    assert_changed(model, before)
    expected = {"step", "momentum_buffer"} | (set() if method.layerwise else {method.landmark})
    assert optimizer.state[model.turn.weight].keys() >= expected
    if method.layerwise:
        assert optimizer.state[model.turn.weight].keys() == expected


def test_complex_momentum_survives_a_checkpoint(method: Method) -> None:
    parameters = [nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))]
    optimizer = method.build(nn.Linear(2, 2), parameters)
    fill(parameters, 0)
    optimizer.step()
    second = method.build(nn.Linear(2, 2), [nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))])
    second.load_state_dict(optimizer.state_dict())
    assert_identical(snapshot(second), snapshot(optimizer))


WINDOW_RULES: dict[str, dict[str, Any]] = {
    "momentum": {},
    "plain": {"momentum": 0.0},
    "nesterov": {"nesterov": True, "weight_decay": 0.1, "maximize": True},
    "decoupled": {"weight_decay": 0.1, "decoupled_weight_decay": True},
    "inner-adamw": {"inner": "adamw", "weight_decay": 0.1},
    "graft-sgd": {"graft": "sgd"},
    "graft-adam": {"graft": "adam"},
    "clipped": {"clip_norm": 0.5, "clip_value": 0.1},
}


def trained_as_pairs(method: Method, pairs: bool, steps: int = 6, **keywords: Any) -> tuple[list[torch.Tensor], Any]:
    """Complex parameters, or real ones in their place, and the optimizer; the values as pairs either way."""
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator, dtype=torch.complex128) for shape in ((3, 2), (4,), ())]
    parameters = [nn.Parameter(torch.view_as_real(value).clone() if pairs else value.clone()) for value in start]
    optimizer = method.cls(parameters, **{**method.keywords, **keywords})
    for step in range(steps):
        generator.manual_seed(1 + step)
        for parameter, value in zip(parameters, start, strict=True):
            gradient = torch.randn(value.shape, generator=generator, dtype=value.dtype)
            parameter.grad = torch.view_as_real(gradient) if pairs else gradient
        optimizer.step()
    return [p.detach() if pairs else torch.view_as_real(p.detach()) for p in parameters], optimizer


@WINDOWED
@pytest.mark.cover(foreach=[False, True])
@pytest.mark.rules(WINDOW_RULES)
def test_window_takes_complex_numbers_as_pairs(method: Method, rule: str, foreach: bool) -> None:
    keywords = {**WINDOW_RULES[rule], "foreach": foreach}
    turned, _ = trained_as_pairs(method, pairs=False, **keywords)
    paired, _ = trained_as_pairs(method, pairs=True, **keywords)
    for mine, theirs in zip(turned, paired, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)


@WINDOWED
def test_every_window_trains_and_resumes_with_complex_numbers(method: Method, variant: Variant) -> None:
    ahead, optimizer = trained_as_pairs(method, pairs=False, **variant.keywords)
    assert all(value.isfinite().all() for value in ahead)
    _, second = trained_as_pairs(method, pairs=False, steps=0, **variant.keywords)
    second.load_state_dict(snapshot(optimizer))
    assert_identical(snapshot(second), snapshot(optimizer))
    real = {torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int16, torch.uint8}
    for state in optimizer.state.values():
        kept = {key: value.dtype for key, value in state.items() if key in variant.dtypes(torch.float64)}
        assert set(kept.values()) <= real
    first = optimizer.param_groups[0]["params"][0]
    window = optimizer.state[first].get("window")
    assert window is None or window.shape == (method.keywords["window_size"], 3, 2, 2)
