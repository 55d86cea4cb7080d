"""Tiny float64 networks and data for the oracle and the capture tests."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.kfac import labels, noise


def seeded_build(build, seed: int = 0) -> nn.Module:
    """Build with a fixed initialization, without a change of the global generator."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build().double()


def mlp(widths: tuple[int, ...] = (4, 5, 3), bias: bool = True, activation=nn.Tanh, seed: int = 0) -> nn.Sequential:
    def build() -> nn.Sequential:
        layers: list[nn.Module] = []
        for i, (d_in, d_out) in enumerate(zip(widths, widths[1:], strict=False)):
            if i:
                layers.append(activation())
            layers.append(nn.Linear(d_in, d_out, bias=bias))
        return nn.Sequential(*layers)

    return seeded_build(build, seed)


class ConvNet(nn.Module):
    """Two convolutions, a mean over positions, and a linear layer."""

    def __init__(self, activation: nn.Module | None = None, **conv) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 3, 3, **conv)
        self.activation = nn.Tanh() if activation is None else activation
        self.second = nn.Conv2d(3, 4, 2, bias=False)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.first(x))
        x = torch.tanh(self.second(x))
        return self.head(x.mean((2, 3)))


def convnet(seed: int = 0, activation: nn.Module | None = None, **conv) -> ConvNet:
    return seeded_build(lambda: ConvNet(activation, **conv), seed)


def vectors(n: int = 6, d: int = 4, classes: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    return noise(n, d, seed=seed), labels(n, classes, seed)


def images(n: int = 5, size: tuple[int, int] = (6, 5), seed: int = 0):
    return noise(n, 2, *size, seed=seed), labels(n, 3, seed)


def fit(model: nn.Module, opt: torch.optim.Optimizer, *shape: int, steps: int, start: int = 0) -> list[Tensor]:
    """Minimize the squares of the outputs for random inputs of this shape; return the parameters afterwards."""
    dtype = next(model.parameters()).dtype
    for step in range(start, start + steps):
        opt.zero_grad()
        model(noise(*shape, seed=step, dtype=dtype)).square().mean().backward()
        opt.step()
    return [p.detach().clone() for p in model.parameters()]


class Tokens(nn.Module):
    """Logits of each token from linear layers; ``read`` is "positions" for all of them, or "mean" for their mean."""

    def __init__(self, read: str = "positions", d: int = 3) -> None:
        super().__init__()
        self.inner, self.outer, self.read = nn.Linear(d, 4), nn.Linear(4, 3), read

    def forward(self, x: Tensor) -> Tensor:
        z = self.outer(torch.tanh(self.inner(x)))
        if self.read == "mean":
            return z.flatten(1, -2).mean(1)
        return z.movedim(-1, 1)  # torch's cross entropy expects classes on axis 1


class Net(nn.Module):
    """Layers by their names, and a function of the network and its inputs, which is its forward."""

    def __init__(self, function: Callable[..., Any], **layers: Any) -> None:
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)
