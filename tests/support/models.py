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


def images(n: int = 5, channels: int = 2, size: tuple[int, int] = (6, 5), classes: int = 3, seed: int = 0):
    return noise(n, channels, *size, seed=seed), labels(n, classes, seed)


class Tokens(nn.Module):
    """Logits of each token from linear layers; ``read`` is "positions" for all of them, or "mean" for their mean."""

    def __init__(self, read: str = "positions", bias: bool = True, d: int = 3, hidden: int = 4) -> None:
        super().__init__()
        self.inner = nn.Linear(d, hidden, bias=bias)
        self.outer = nn.Linear(hidden, 3, bias=bias)
        self.read = read

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
