"""Large known models on torch's ``meta`` device: all shapes and no numbers, so that they are built in a moment.

They are there for what depends on shapes alone: bytes, messages and FLOPs. A forward pass on the ``meta`` device counts
the positions of every layer, see :func:`benchmarks.flops.factor_flops`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.workloads.resnets import cifar_resnet, imagenet_resnet

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
    with torch.device("meta"):
        return _MODELS[name]()


# ---------------------------------------------------------------------- residual networks
def _images(side: int) -> Callable[[int], Tensor]:
    return lambda n: torch.empty(n, 3, side, side, device="meta")


def _resnet50() -> Architecture:
    return Architecture(imagenet_resnet("bottleneck", (3, 4, 6, 3)), _images(224), 32)


def _resnet_cifar(depth: int) -> Architecture:
    return Architecture(cifar_resnet(depth), _images(32), 128)


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
