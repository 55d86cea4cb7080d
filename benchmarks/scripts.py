"""Twenty small training scripts in the style of the PyTorch examples.

Each function returns a model, an endless sequence of batches, and the loss of a model on a batch. Images are digits of
MNIST, text is tiny Shakespeare, and everything else is generated from a fixed seed. The learning rates are the usual
ones for AdamW.
"""
# mypy: disable-error-code="no-any-return"
# Calls of modules return Any, and these scripts consist of such calls.

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, pairwise, repeat
from pathlib import Path

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from benchmarks.workloads.base import Batch, cross_entropy, shuffled_indices
from benchmarks.workloads.chargpt import CharGPT
from benchmarks.workloads.mnist import SIDE, Logistic

Batches = Iterator[tuple[Tensor, ...]]
Training = tuple[nn.Module, Batches, Callable[..., Tensor]]
"""Model, batches, and the function that computes the loss from the model and the tensors of a batch."""


@dataclass(frozen=True)
class Data:
    """Seeded batches of real data, and the random numbers for generated batches."""

    mnist: Path
    shakespeare: Path
    seed: int = 0

    def images(self, batch_size: int) -> Iterator[Batch]:
        """Yield images ``[batch, 1, 28, 28]`` with values between 0 and 1, and their classes."""
        pixels, labels = Logistic(self.mnist).train
        for index in shuffled_indices(len(pixels), batch_size, torch.Generator().manual_seed(self.seed)):
            yield pixels[index].view(-1, 1, SIDE, SIDE).float().div_(255), labels[index]

    def text(self, batch_size: int, length: int) -> Iterator[Batch]:
        """Yield characters ``[batch, length]`` as numbers below 65, and the character that follows each."""
        return CharGPT(self.shakespeare, batch_size, length).batches(self.seed)

    def random(self) -> Generator:
        return Generator().manual_seed(self.seed)


Build = Callable[[Data], Training]


@dataclass(frozen=True)
class Script:
    build: Build
    lr: float
    steps: int
    weight_decay: float


SCRIPTS: dict[str, Script] = {}
CHARACTERS = 65  # in tiny Shakespeare


def script(lr: float, steps: int, weight_decay: float = 0.0) -> Callable[[Build], Build]:
    def add(build: Build) -> Build:
        SCRIPTS[build.__name__] = Script(build, lr, steps, weight_decay)
        return build

    return add


def classify(model: nn.Module, inputs: Tensor, classes: Tensor) -> Tensor:
    return cross_entropy(model(inputs), classes)


def regress(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(model(inputs), targets)


def binary(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(inputs), targets)


def perceptron(*widths: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    layers = [layer for d_in, d_out in pairwise(widths) for layer in (nn.Linear(d_in, d_out), activation())]
    return nn.Sequential(*layers[:-1])


class Function(nn.Module):
    """A layer without parameters, given by a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Residual(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


def transformer(width: int, heads: int, layers: int, causal: bool) -> nn.Sequential:
    blocks: list[nn.Module] = []
    for _ in range(layers):
        mlp = perceptron(width, 4 * width, width, activation=nn.GELU)
        blocks += [Residual(nn.LayerNorm(width), Attention(width, heads, causal)), Residual(nn.LayerNorm(width), mlp)]
    return nn.Sequential(*blocks, nn.LayerNorm(width))


@script(lr=1e-3, steps=300)
def mlp(data: Data) -> Training:
    return nn.Sequential(nn.Flatten(), perceptron(784, 512, 512, 10)), data.images(128), classify


@script(lr=1e-3, steps=150)
def convnet(data: Data) -> Training:
    convolutions = nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(*convolutions, nn.Flatten(), perceptron(9216, 128, 10)), data.images(64), classify


@script(lr=1e-3, steps=400)
def vae(data: Data) -> Training:
    class VAE(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = nn.Linear(784, 400), perceptron(20, 400, 784)
            self.mean, self.log_variance = nn.Linear(400, 20), nn.Linear(400, 20)

        def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            h = F.relu(self.encoder(x))
            mean, log_variance = self.mean(h), self.log_variance(h)
            return self.decoder(mean + noise * (0.5 * log_variance).exp()), mean, log_variance

    def loss(model: nn.Module, x: Tensor, noise: Tensor) -> Tensor:
        logits, mean, log_variance = model(x, noise)
        distance = F.binary_cross_entropy_with_logits(logits, x, reduction="sum")
        return (distance - 0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum()) / len(x)

    g = data.random()
    return VAE(), ((x.flatten(1), torch.randn(len(x), 20, generator=g)) for x, _ in data.images(128)), loss


@script(lr=1e-3, steps=200)
def super_resolution(data: Data) -> Training:
    first = nn.Conv2d(1, 64, 5, padding=2), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()
    last = nn.Conv2d(64, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 4, 3, padding=1), nn.PixelShuffle(2)
    return nn.Sequential(*first, *last), ((F.avg_pool2d(x, 2), x) for x, _ in data.images(16)), regress


@script(lr=1e-3, steps=200)
def siamese(data: Data) -> Training:
    """Classify whether two digits are the same."""

    class Siamese(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = nn.Conv2d(1, 16, 3, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU(), nn.Flatten()
            self.features, self.head = nn.Sequential(*layers), perceptron(2 * 1152, 256, 1)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.head(torch.cat([self.features(a), self.features(b)], 1)).squeeze(1)

    def pairs(x: Tensor, classes: Tensor) -> tuple[Tensor, ...]:
        first, second = classes.argsort().view(-1, 2).T.clone()
        second[::2] = second[::2].roll(8)  # in about half of the pairs, the digits now differ
        return x[first], x[second], (classes[first] == classes[second]).float()

    def loss(model: nn.Module, a: Tensor, b: Tensor, same: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(a, b), same)

    return Siamese(), (pairs(x, y) for x, y in data.images(128)), loss


@script(lr=1e-3, steps=150)
def lstm(data: Data) -> Training:
    last = Function(lambda found: found[0][:, -1])
    model = nn.Sequential(nn.Flatten(1, 2), nn.LSTM(28, 64, batch_first=True), last, nn.Linear(64, 10))
    return model, data.images(64), classify


@script(lr=1e-3, steps=300)
def rnn(data: Data) -> Training:
    class Characters(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.inputs = nn.Embedding(CHARACTERS, 64), nn.Linear(64, 128)
            self.hidden, self.out = nn.Linear(128, 128), nn.Linear(128, CHARACTERS)

        def forward(self, x: Tensor) -> Tensor:
            h, outputs = torch.zeros(len(x), 128), []
            for characters in x.unbind(1):
                h = torch.tanh(self.inputs(self.embedding(characters)) + self.hidden(h))
                outputs.append(self.out(h))
            return torch.stack(outputs, 1)

    return Characters(), data.text(32, 25), classify


@script(lr=1e-3, steps=150)
def nanogpt(data: Data) -> Training:
    class Embedding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.positions = nn.Embedding(CHARACTERS, 128), nn.Embedding(64, 128)

        def forward(self, x: Tensor) -> Tensor:
            return self.tokens(x) + self.positions(torch.arange(x.shape[1]))

    model = nn.Sequential(Embedding(), transformer(128, 4, 4, causal=True), nn.Linear(128, CHARACTERS))
    return model, data.text(12, 64), classify


@script(lr=1e-3, steps=150)
def vit(data: Data) -> Training:
    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches, self.positions = nn.Conv2d(1, 64, 4, 4), nn.Parameter(0.02 * torch.randn(49, 64))

        def forward(self, x: Tensor) -> Tensor:
            return self.patches(x).flatten(2).transpose(1, 2) + self.positions

    mean = Function(lambda x: x.mean(1))
    model = nn.Sequential(Patches(), transformer(64, 4, 4, causal=False), mean, nn.Linear(64, 10))
    return model, data.images(32), classify


@script(lr=1e-3, steps=100)
def unet(data: Data) -> Training:
    def block(d_in: int, d_out: int) -> nn.Sequential:
        first = nn.Conv2d(d_in, d_out, 3, padding=1), nn.BatchNorm2d(d_out), nn.ReLU()
        return nn.Sequential(*first, nn.Conv2d(d_out, d_out, 3, padding=1), nn.BatchNorm2d(d_out), nn.ReLU())

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down1, self.down2, self.bottom = block(1, 16), block(16, 32), block(32, 64)
            self.up2, self.up1 = nn.ConvTranspose2d(64, 32, 2, 2), nn.ConvTranspose2d(32, 16, 2, 2)
            self.merge2, self.merge1, self.out = block(64, 32), block(32, 16), nn.Conv2d(16, 1, 1)

        def forward(self, x: Tensor) -> Tensor:
            a = self.down1(x)
            b = self.down2(F.max_pool2d(a, 2))
            c = self.bottom(F.max_pool2d(b, 2))
            c = self.merge2(torch.cat([self.up2(c), b], 1))
            return self.out(self.merge1(torch.cat([self.up1(c), a], 1)))

    g = data.random()
    return UNet(), ((x + 0.5 * torch.randn(x.shape, generator=g), x) for x, _ in data.images(16)), regress


@script(lr=1e-3, steps=150)
def tcn(data: Data) -> Training:
    """Add the two marked numbers of a sequence."""

    def batches(g: Generator) -> Batches:
        for _ in count():
            values, marks = torch.rand(32, 60, generator=g), torch.zeros(32, 60)
            places = torch.randint(30, (32, 2), generator=g) + torch.tensor([0, 30])
            yield torch.stack([values, marks.scatter(1, places, 1.0)], 1), values.gather(1, places).sum(1, keepdim=True)

    def block(d_in: int, d_out: int, dilation: int) -> list[nn.Module]:
        return [nn.ConstantPad1d((4 * dilation, 0), 0), nn.Conv1d(d_in, d_out, 5, dilation=dilation), nn.ReLU()]

    blocks = [Residual(*block(24, 24, dilation)) for dilation in (2, 4, 8)]
    last = Function(lambda x: x[..., -1])
    return nn.Sequential(*block(2, 24, 1), *blocks, last, nn.Linear(24, 1)), batches(data.random()), regress


@script(lr=1e-3, steps=400)
def multitask(data: Data) -> Training:
    """Classify digits with ten binary tasks, each with its own head."""

    class Heads(nn.ModuleList):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([head(x) for head in self], 1)

    model = nn.Sequential(perceptron(196, 64, 64), nn.ReLU(), Heads(perceptron(64, 32, 1) for _ in range(10)))
    return model, ((x.flatten(1)[:, ::4], F.one_hot(y, 10).float()) for x, y in data.images(64)), binary


@script(lr=1e-3, steps=300)
def lora(data: Data) -> Training:
    class Adapted(nn.Module):
        def __init__(self, d_in: int, d_out: int, rank: int = 8) -> None:
            super().__init__()
            self.frozen = nn.Linear(d_in, d_out).requires_grad_(False)
            self.down, self.up = nn.Linear(d_in, rank, bias=False), nn.Linear(rank, d_out, bias=False)
            nn.init.zeros_(self.up.weight)

        def forward(self, x: Tensor) -> Tensor:
            return self.frozen(x) + 2 * self.up(self.down(x))

    layers = [layer for d_in in (784, 512, 512) for layer in (Adapted(d_in, 512), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(512, 10)), data.images(64), classify


@script(lr=1e-2, steps=300, weight_decay=5e-4)
def gcn(data: Data) -> Training:
    """Classify the nodes of a generated graph. Every fifth node has a known class."""
    g = Generator().manual_seed(0)
    classes = torch.randint(7, (1500,), generator=g)
    chances = torch.where(classes[:, None] == classes, 0.012, 0.0012)
    edges = (torch.rand(1500, 1500, generator=g) < chances).float()
    edges = ((edges + edges.T + torch.eye(1500)) > 0).float()
    scale = edges.sum(1).rsqrt()
    graph = (scale[:, None] * edges * scale).to_sparse()
    words = 0.02 + 0.02 * (torch.arange(500) % 7 == classes[:, None])
    features = (torch.rand(1500, 500, generator=g) < words).float()
    spread = Function(lambda x: graph @ x)
    model = nn.Sequential(nn.Linear(500, 16), spread, nn.ReLU(), nn.Linear(16, 7), spread)
    known = torch.arange(0, 1500, 5)
    return model, repeat((features, classes[known])), lambda m, x, y: F.cross_entropy(m(x)[known], y)


@script(lr=1e-3, steps=150)
def autoencoder(data: Data) -> Training:
    return perceptron(784, 500, 250, 30, 250, 500, 784), ((x.flatten(1),) * 2 for x, _ in data.images(128)), binary


@script(lr=1e-3, steps=600)
def tabular(data: Data) -> Training:
    g = Generator().manual_seed(0)
    table = torch.randn(8000, 12, generator=g) @ torch.randn(12, 12, generator=g)
    a, b, c, d = table[:, :4].split(1, 1)
    targets, g = a.sin() + b * c / 10 + d.abs(), data.random()
    rows = (torch.randint(8000, (64,), generator=g) for _ in count())
    return perceptron(12, 64, 64, 1), ((table[row], targets[row]) for row in rows), regress


@script(lr=1e-3, steps=400)
def neural_field(data: Data) -> Training:
    """Fit a function of two coordinates."""
    g = data.random()
    points = (torch.rand(256, 2, generator=g) for _ in count())
    batches = ((p, (3 * math.pi * p[:, :1]).sin() * (2 * math.pi * p[:, 1:]).cos()) for p in points)
    return perceptron(2, 48, 48, 48, 1, activation=nn.Tanh), batches, regress


@script(lr=1e-2, steps=300)
def recommender(data: Data) -> Training:
    class Ratings(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.users, self.items, self.head = nn.Embedding(600, 32), nn.Embedding(400, 32), perceptron(64, 64, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.cat([self.users(x[:, 0]), self.items(x[:, 1])], 1)).squeeze(1)

    g = Generator().manual_seed(0)
    users, items = torch.randn(600, 6, generator=g), torch.randn(400, 6, generator=g)
    g, most = data.random(), torch.tensor([600, 400])
    pairs = ((torch.rand(128, 2, generator=g) * most).long() for _ in count())
    return Ratings(), ((x, (users[x[:, 0]] * items[x[:, 1]]).sum(1).tanh()) for x in pairs), regress


@script(lr=1e-3, steps=60)
def resnet(data: Data) -> Training:
    class Block(nn.Module):
        def __init__(self, d_in: int, d_out: int, stride: int) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(d_in, d_out, 3, stride, padding=1, bias=False)
            self.conv2 = nn.Conv2d(d_out, d_out, 3, padding=1, bias=False)
            self.norm1, self.norm2 = nn.BatchNorm2d(d_out), nn.BatchNorm2d(d_out)
            self.shortcut = nn.Identity() if stride == 1 else nn.Conv2d(d_in, d_out, 1, stride, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            h = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
            return F.relu(h + self.shortcut(x))

    blocks = Block(16, 16, 1), Block(16, 32, 2), Block(32, 32, 1), Block(32, 64, 2), Block(64, 64, 1)
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)
    return nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), *blocks, *head), data.images(64), classify


@script(lr=1e-3, steps=200)
def mixer(data: Data) -> Training:
    def block() -> list[nn.Module]:
        flip = Function(lambda x: x.transpose(1, 2))
        tokens, channels = perceptron(49, 64, 49, activation=nn.GELU), perceptron(64, 128, 64, activation=nn.GELU)
        return [Residual(nn.LayerNorm(64), flip, tokens, flip), Residual(nn.LayerNorm(64), channels)]

    patches = nn.Conv2d(1, 64, 4, 4), Function(lambda x: x.flatten(2).transpose(1, 2))
    head = Function(lambda x: x.mean(1)), nn.Linear(64, 10)
    return nn.Sequential(*patches, *block(), *block(), *block(), *head), data.images(64), classify
