"""Memory layout is no part of the result: transposed weights and gradients, channels_last models."""

from __future__ import annotations

import torch
from torch import nn

from tests.support.methods import Method, Variant
from tests.support.tasks import CNN, Task, assert_changed, assert_identical, backward, train, values


def assert_close(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    for name, value in values(model).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-12, msg=lambda text: f"{name}: {text}")  # noqa: B023


def test_transposed_weights(method: Method, variant: Variant, mlp: Task) -> None:
    plain, strided = mlp.model(), mlp.model()
    for layer in (strided.first, strided.second):
        layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
        assert not layer.weight.is_contiguous()
    train(plain, method.build(plain, **variant.keywords), mlp, 5)
    before = values(strided)
    train(strided, method.build(strided, **variant.keywords), mlp, 5)
    assert_changed(strided, before)
    assert_close(strided, values(plain))
    assert strided.first.weight.stride() == (1, 4)


def test_channels_last(method: Method, variant: Variant) -> None:
    plain, strided = CNN.model(), CNN.model().to(memory_format=torch.channels_last)
    train(plain, method.build(plain, **variant.keywords), CNN, 5)
    train(strided, method.build(strided, **variant.keywords), CNN, 5)
    assert_close(strided, values(plain))
    assert strided.first.weight.is_contiguous(memory_format=torch.channels_last)


def test_channels_last_inputs(method: Method) -> None:
    plain, strided = CNN.model(), CNN.model().to(memory_format=torch.channels_last)
    for model in (plain, strided):
        optimizer = method.build(model)
        for step in range(5):
            inputs, targets = CNN.batch(step)
            if model is strided:
                inputs = inputs.to(memory_format=torch.channels_last)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    assert_close(strided, values(plain))


def test_non_contiguous_gradients(method: Method, variant: Variant, task: Task) -> None:
    plain, strided = task.model(), task.model()
    ordinary, other = method.build(plain, **variant.keywords), method.build(strided, **variant.keywords)
    for step in range(5):
        backward(plain, ordinary, task, step)
        ordinary.step()
        backward(strided, other, task, step)
        for parameter in strided.parameters():
            spread = torch.stack([parameter.grad, torch.zeros_like(parameter.grad)], -1)
            parameter.grad = spread[..., 0]
            assert not parameter.grad.is_contiguous()
        other.step()
    assert_close(strided, values(plain))  # other strides may take other kernels: equal up to rounding


def test_strides_of_parameters_survive_a_step_and_a_checkpoint(method: Method) -> None:
    model = CNN.model().to(memory_format=torch.channels_last)
    optimizer = method.build(model)
    strides = [parameter.stride() for parameter in model.parameters()]
    train(model, optimizer, CNN, 3)
    other = CNN.model().to(memory_format=torch.channels_last)
    second = method.build(other)
    other.load_state_dict(model.state_dict())
    second.load_state_dict(optimizer.state_dict())
    train(model, optimizer, CNN, 3, start=3)
    train(other, second, CNN, 3, start=3)
    assert [parameter.stride() for parameter in model.parameters()] == strides
    assert_identical(values(other), values(model))
