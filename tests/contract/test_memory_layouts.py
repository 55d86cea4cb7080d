"""Memory layout is no part of the result: transposed weights and gradients, channels_last models."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.methods import Method, Variant
from tests.support.tasks import CNN, Task, assert_changed, backward, train, values


def assert_close(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    for name, value in values(model).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-12, msg=lambda text: f"{name}: {text}")  # noqa: B023


def spread(gradient: torch.Tensor) -> torch.Tensor:
    """The same numbers with gaps between them."""
    return torch.stack([gradient, torch.zeros_like(gradient)], -1)[..., 0]


def test_transposed_weights_and_gradients_with_gaps(method: Method, variant: Variant, mlp: Task) -> None:
    plain, strided = mlp.model(), mlp.model()
    for layer in (strided.first, strided.second):
        layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
        assert not layer.weight.is_contiguous()
    ordinary, other = method.build(plain, **variant.keywords), method.build(strided, **variant.keywords)
    before = values(strided)
    train(plain, ordinary, mlp, 5)
    for step in range(5):
        backward(strided, other, mlp, step)
        for parameter in strided.parameters() if step % 2 else ():
            parameter.grad = spread(parameter.grad)
            assert not parameter.grad.is_contiguous()
        other.step()
    assert_changed(strided, before)
    assert_close(strided, values(plain))
    assert strided.first.weight.stride() == (1, 4)


@pytest.mark.cover(inputs_too=[False, True])
def test_channels_last(method: Method, variant: Variant, inputs_too: bool) -> None:
    plain, strided = CNN.model(), CNN.model().to(memory_format=torch.channels_last)
    for model in (plain, strided):
        optimizer = method.build(model, **variant.keywords)
        for step in range(5):
            inputs, targets = CNN.batch(step)
            if model is strided and inputs_too:
                inputs = inputs.to(memory_format=torch.channels_last)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    assert_close(strided, values(plain))
    assert strided.first.weight.is_contiguous(memory_format=torch.channels_last)
