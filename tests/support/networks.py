"""Networks with one type of layer each, for tests of every method that captures layers."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.kfac import noise
from tests.support.models import Net, images, seeded_build


def squares(output, target):
    """Per-example sums of squares of a bounded output, averaged over the examples."""
    return (torch.tanh(output) - target).square().flatten(1).sum(1).mean()


def mixing(mixes: bool = True) -> Net:
    """Outputs ``[N, S, 3]`` per token; with ``mixes``, they also depend on other tokens of the example."""

    def forward(net, x):
        h = torch.tanh(net.inner(x))
        return net.outer(h + torch.cumsum(h, 1).square() / 4 if mixes else h)

    return seeded_build(lambda: Net(forward, inner=nn.Linear(3, 4), outer=nn.Linear(4, 3)))


class TwoHeads(nn.Module):
    def __init__(self, d_in: int = 4) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(d_in, 5), nn.Linear(5, 3), nn.Linear(5, 2)

    def forward(self, x):
        h = torch.tanh(self.trunk(x))
        return self.left(h), self.right(h)


def rescaled() -> Net:
    """``scale`` multiplies the first layer's inputs and divides its outputs: gradients stay, but squares overflow."""

    def forward(net, x):
        return net.second(torch.tanh(net.first(x * net.scale) / net.scale))

    return Net(forward, first=nn.Linear(4, 4, bias=False), second=nn.Linear(4, 3), scale=1.0)


CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


class Sometimes(nn.Module):
    """A layer that takes part in some forward passes only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.both = True

    def forward(self, x):
        x = torch.tanh(self.first(x))
        return self.head(torch.tanh(self.second(x)) if self.both else x)


class Words(nn.Module):
    def __init__(self, padding_idx=None, bag=None) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(6, 3, mode=bag) if bag else nn.Embedding(6, 3, padding_idx=padding_idx)
        self.head = nn.Linear(3, 3)

    def forward(self, index):
        z = self.head(torch.tanh(self.words(index)))
        return z if z.ndim == 2 else z.mean(1)


TOKENS = torch.tensor([[0, 1, 1, 4], [2, 2, 2, 2], [5, 0, 1, 3], [3, 4, 3, 0], [0, 0, 5, 1]])


class Normed(nn.Module):
    def __init__(self, norm, image: bool) -> None:
        super().__init__()
        self.image = image
        self.first = nn.Conv2d(2, 4, 2) if image else nn.Linear(4, 4)
        self.norm, self.head = norm(), nn.Linear(4, 3)
        with torch.no_grad():
            self.norm.weight.copy_(noise(4, seed=5) + 1)

    def forward(self, x):
        z = torch.tanh(self.norm(self.first(x)))
        return self.head(z.flatten(2).mean(2) if self.image else z.flatten(1, -2).mean(1) if z.ndim > 2 else z)


NORMED = {
    "LayerNorm": (lambda: Normed(lambda: nn.LayerNorm(4), False), lambda: noise(6, 4)),
    "LayerNorm tokens": (lambda: Normed(lambda: nn.LayerNorm(4), False), lambda: noise(6, 3, 4)),
    "LayerNorm no bias": (lambda: Normed(lambda: nn.LayerNorm(4, bias=False), False), lambda: noise(6, 3, 4)),
    "RMSNorm": (lambda: Normed(lambda: nn.RMSNorm(4), False), lambda: noise(6, 3, 4)),
    "GroupNorm": (lambda: Normed(lambda: nn.GroupNorm(2, 4), True), lambda: images(6)[0]),
    "InstanceNorm": (lambda: Normed(lambda: nn.InstanceNorm2d(4, affine=True), True), lambda: images(6)[0]),
}


class Around(nn.Module):
    """A convolution and two linear layers with a choice of in-place activation and of strides."""

    def __init__(self, inplace: bool = False, odd: bool = False) -> None:
        super().__init__()
        self.conv, self.mid, self.head = nn.Conv2d(2, 3, 2), nn.Linear(3, 4), nn.Linear(4, 3)
        self.act, self.odd = nn.ReLU(inplace), odd

    def forward(self, x):
        z = self.act(self.conv(x)).transpose(2, 3).flatten(2).transpose(1, 2)
        z = z.expand(-1, -1, -1) if self.odd else z.contiguous()
        return self.head(self.act(self.mid(z))).mean(1)


def around(**options):
    return seeded_build(lambda: Around(**options))


class Recomputing(torch.autograd.Function):
    """Applies a function, and computes it again to return its gradients, as reversible networks do."""

    @staticmethod
    def forward(ctx, function, x, *parameters):
        ctx.function = function
        ctx.save_for_backward(x, *parameters)
        return function(x)

    @staticmethod
    def backward(ctx, g):
        x, *parameters = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.function(x)
        return None, *torch.autograd.grad(output, (x, *parameters), g)


class Reused(nn.Module):
    """Linear layers with a choice of activation, checkpointing and repetition of the middle one."""

    def __init__(self, inplace: bool = False, mode: str = "plain", repeat: int = 1, tokens: bool = False) -> None:
        super().__init__()
        self.first, self.middle, self.head = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.act = nn.ReLU(inplace=inplace)
        self.mode, self.repeat, self.tokens = mode, repeat, tokens

    def body(self, x):
        for _ in range(self.repeat):
            x = self.act(self.middle(x))
        return x

    def forward(self, x):
        x = self.act(self.first(x))
        if self.mode == "function":
            x = Recomputing.apply(self.body, x, *self.middle.parameters())
        elif self.mode == "plain":
            x = self.body(x)
        else:
            x = checkpoint(self.body, x, use_reentrant=self.mode == "reentrant")
        x = self.head(x)
        return x.mean(1) if self.tokens else x


def reused(**options) -> Reused:
    return seeded_build(lambda: Reused(**options))


def applied(model, function) -> Net:
    """Applies a function with a model to a batch, so that the oracle can take single examples."""
    return Net(lambda net, x: function(net.model, x), model=model)


class Cell(nn.Module):
    """A recurrent cell that returns an output and its next state."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(7, 3), nn.Linear(3, 10)

    def forward(self, x, state):
        state = torch.tanh(self.inner(torch.cat([x, state], 1)))
        return self.outer(state), state


def scanned(cell, xs):
    """Call a cell once for each time of a batch ``[T, N, d]``."""
    state, outputs = xs.new_zeros(xs.shape[1], 3), []
    for x in xs:
        output, state = cell(x, state * 2)
        outputs.append(output)
    return torch.stack(outputs)


def masked() -> Net:
    """Takes a mask, which is shared by all examples, before the batch."""
    layers = {"inner": nn.Linear(4, 4), "outer": nn.Linear(4, 10)}
    return Net(lambda net, mask, x: net.outer(mask @ torch.tanh(net.inner(x))), **layers)
