"""Sparse gradients: what torch's rules do with them, the fallback does; covered layers never see one.

A window takes them as dense ones.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.methods import Method, Variant
from tests.support.tasks import Shadow, assert_identical, values

LAYERWISE = pytest.mark.option("skip_layers", "fallback")


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 3, sparse=True)
        self.head = nn.Linear(3, 2)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(indices))


def backward(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    model.zero_grad()
    indices = torch.randint(9, (6,), generator=generator)
    F.cross_entropy(model(indices), torch.randint(2, (6,), generator=generator)).backward()


@LAYERWISE
@pytest.mark.cover(momentum=[0.0, 0.9], foreach=[False, None])
def test_sgd_fallback_takes_them_as_torchs_does(method: Method, momentum: float, foreach: bool | None) -> None:
    model = Lookup().double()
    optimizer = method.build(model, momentum=momentum, foreach=foreach)
    shadow = Shadow([model.embed.weight], lambda p: torch.optim.SGD(p, method.keywords["lr"], momentum=momentum))
    before = values(model)
    for step in range(4):
        backward(model, step)
        assert model.embed.weight.grad.is_sparse
        shadow.step()
        optimizer.step()
    torch.testing.assert_close(model.embed.weight.detach(), shadow.values()[0], rtol=1e-12, atol=1e-14)
    assert not torch.equal(model.head.weight, before["head.weight"])


@LAYERWISE
def test_adamw_fallback_takes_them_as_dense_ones(method: Method) -> None:
    """`torch.optim.AdamW` refuses them; the rows that no index named still decay and keep their moments here."""
    model, twin = Lookup().double(), Lookup().double()
    twin.load_state_dict(model.state_dict())
    twin.embed.sparse = False
    for net in (model, twin):
        optimizer = method.build(net, fallback="adamw", fallback_lr=0.01, skip_layers=(nn.Embedding,))
        for step in range(4):
            backward(net, step)
            assert net.embed.weight.grad.is_sparse == (net is model)
            optimizer.step()
    for name, value in values(model).items():
        torch.testing.assert_close(value, values(twin)[name], rtol=1e-12, atol=1e-14)


@pytest.mark.cover(bad=[float("nan"), float("inf")])
def test_non_finite_sparse_gradient_drops_the_step(method: Method, bad: float) -> None:
    model = Lookup().double()
    optimizer = method.build(model, momentum=0.0)
    before = values(model)
    backward(model, 0)
    model.embed.weight.grad = model.embed.weight.grad * bad
    optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in values(model).items())


@pytest.mark.option("window_size")
@pytest.mark.cover(foreach=[False, True, None])
def test_window_takes_them_as_dense_ones(method: Method, variant: Variant, foreach: bool | None) -> None:
    """Several indices name the same row: their gradients add up."""
    model, twin = Lookup().double(), Lookup().double()
    twin.load_state_dict(model.state_dict())
    twin.embed.sparse = False
    for net in (model, twin):
        optimizer = method.build(net, foreach=foreach, weight_decay=0.1, **variant.keywords)
        for step in range(6):
            backward(net, step)
            gradient = net.embed.weight.grad
            assert gradient.is_sparse == (net is model)
            optimizer.step()
            assert net.embed.weight.grad is gradient
    for name, value in values(model).items():
        torch.testing.assert_close(value, values(twin)[name], rtol=1e-12, atol=1e-14)


@pytest.mark.option("window_size")
def test_sparse_gradient_is_not_written_to(method: Method) -> None:
    model = Lookup().double()
    optimizer = method.build(model, weight_decay=0.1, maximize=True)
    for step in range(3):
        backward(model, step)
        gradient = model.embed.weight.grad
        before = (gradient._indices().clone(), gradient._values().clone())
        optimizer.step()
        assert_identical((gradient._indices(), gradient._values()), before)
