"""Large known models on torch's ``meta`` device: all shapes and no numbers, so that they are built in a moment.

They are there for what depends on shapes alone: bytes, messages and FLOPs. A forward pass on the ``meta`` device counts
the positions of every layer, see :func:`benchmarks.flops.layer_shapes`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ModelName = Literal["resnet20", "resnet32", "resnet50", "bert-base", "bert-large", "decoder-7b"]


@dataclass(frozen=True)
class Architecture:
    """A model without numbers, and what one example of its input looks like."""

    model: nn.Module
    inputs: Callable[[int], Tensor]
    """Makes a batch of so many examples."""
    batch_size: int
    """Examples per rank that are usual."""


def architecture(name: ModelName) -> Architecture:
    """Build a model on the ``meta`` device.

    Args:
        name: ``resnet20`` and ``resnet32`` are those for CIFAR-10, ``resnet50`` is that for ImageNet (He et al., 2016),
            ``bert-base`` and ``bert-large`` are encoders of 512 positions with their masked-word head (Devlin et al.,
            2019), and ``decoder-7b`` has the shapes of LLaMA (Touvron et al., 2023) with 2,048 positions.

    Returns:
        The model and its inputs.
    """
    with torch.device("meta"):
        return _MODELS[name]()


# ---------------------------------------------------------------------- residual networks
class _Residual(nn.Module):
    """Some layers beside a shortcut."""

    def __init__(self, body: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.body, self.shortcut = body, shortcut

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


class _Subsample(nn.Module):
    """A shortcut without parameters: every other pixel, and channels of zeros."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, self.channels))


def _conv(d_in: int, d_out: int, side: int, stride: int = 1, relu: bool = True) -> list[nn.Module]:
    layers = [nn.Conv2d(d_in, d_out, side, stride, side // 2, bias=False), nn.BatchNorm2d(d_out)]
    return [*layers, nn.ReLU()] if relu else layers


def _stages(d_in: int, depths: Sequence[int], widths: Sequence[int], expansion: int) -> tuple[list[nn.Module], int]:
    """Return residual blocks and the channels that leave them.

    Args:
        d_in: Channels that enter.
        depths: Blocks of each stage.
        widths: Channels inside the blocks of each stage.
        expansion: 1 for blocks of two 3x3 convolutions, with shortcuts that have no parameters; 4 for bottlenecks.

    Returns:
        The blocks, and the channels.
    """
    blocks: list[nn.Module] = []
    for stage, (depth, width) in enumerate(zip(depths, widths, strict=True)):
        for index in range(depth):
            stride, d_out = 2 if stage and not index else 1, expansion * width
            if expansion == 1:
                body = [*_conv(d_in, width, 3, stride), *_conv(width, d_out, 3, relu=False)]
            else:
                body = [*_conv(d_in, width, 1), *_conv(width, width, 3, stride), *_conv(width, d_out, 1, relu=False)]
            shortcut: nn.Module = nn.Identity()
            if d_in != d_out:
                projection = _conv(d_in, d_out, 1, stride, relu=False)
                shortcut = _Subsample(d_out - d_in) if expansion == 1 else nn.Sequential(*projection)
            blocks.append(_Residual(nn.Sequential(*body), shortcut))
            d_in = d_out
    return blocks, d_in


def _classifier(stem: Sequence[nn.Module], blocks: Sequence[nn.Module], width: int, classes: int) -> nn.Module:
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))


def _images(side: int) -> Callable[[int], Tensor]:
    return lambda n: torch.empty(n, 3, side, side, device="meta")


def _resnet50() -> Architecture:
    blocks, width = _stages(64, (3, 4, 6, 3), (64, 128, 256, 512), 4)
    model = _classifier([*_conv(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)], blocks, width, 1000)
    return Architecture(model, _images(224), 32)


def _resnet_cifar(depth: int) -> Architecture:
    blocks, width = _stages(16, (depth,) * 3, (16, 32, 64), 1)
    return Architecture(_classifier(_conv(3, 16, 3), blocks, width, 10), _images(32), 128)


# ---------------------------------------------------------------------- transformers
class _Bert(nn.Module):
    """An encoder with word, position and segment embeddings, and the transform of its masked-word head.

    The head's last map is the table of words, which is tied to it and stands here once.
    """

    def __init__(self, width: int, depth: int, heads: int, words: int = 30522, positions: int = 512) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(words, width), nn.Embedding(positions, width)
        self.segments = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.transform, self.head_norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device).expand_as(x)
        found = self.norm(self.words(x) + self.positions(places) + self.segments(torch.zeros_like(x)))
        found = self.head_norm(F.gelu(self.transform(self.encoder(found))))
        logits: Tensor = found @ self.words.weight.mT
        return logits


class _DecoderLayer(nn.Module):
    """Attention and a gated feed-forward layer, without biases."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        maps = (self.query, self.key, self.value)
        query, key, value = (m(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2) for m in maps)
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(found.transpose(1, 2).flatten(-2))
        normed = self.norm2(x)
        added: Tensor = self.down(F.silu(self.gate(normed)) * self.up(normed))
        return x + added


def _words(words: int, positions: int) -> Callable[[int], Tensor]:
    return lambda n: torch.empty(n, positions, dtype=torch.int64, device="meta")


def _bert(width: int, depth: int) -> Architecture:
    return Architecture(_Bert(width, depth, width // 64), _words(30522, 512), 8)


def _decoder() -> Architecture:
    width, words = 4096, 32000
    layers = [_DecoderLayer(width, 32, 11008) for _ in range(32)]
    head = [nn.RMSNorm(width), nn.Linear(width, words, bias=False)]
    return Architecture(nn.Sequential(nn.Embedding(words, width), *layers, *head), _words(words, 2048), 2)


_MODELS: dict[ModelName, Callable[[], Architecture]] = {
    "resnet20": lambda: _resnet_cifar(3),
    "resnet32": lambda: _resnet_cifar(5),
    "resnet50": _resnet50,
    "bert-base": lambda: _bert(768, 12),
    "bert-large": lambda: _bert(1024, 24),
    "decoder-7b": _decoder,
}
