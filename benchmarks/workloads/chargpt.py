"""A character-level GPT on tiny Shakespeare or any other text: 4 layers, width 128, 4 heads, context 128.

Its weights have torch's default initialization. The small embeddings of GPT-2 (standard deviation 0.02) would need a
warm-up of the learning rate: without one, SGD diverges or learns only the frequencies of the characters.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.workloads.base import Batch, Classification, DataMissingError, Size, evaluating, find_folder


class Attention(nn.Module):
    """Causal self-attention with separate projections."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.heads, self.dropout = heads, dropout

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = (batch, length, self.heads, width // self.heads)
        q, k, v = (layer(x).view(split).transpose(1, 2) for layer in (self.query, self.key, self.value))
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class Layer(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, width: int, heads: int, activation: Callable[[], nn.Module], dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), activation(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        out: Tensor = x + self.dropout(self.mlp(self.norm2(x)))
        return out


class GPT(nn.Module):
    """Token and position embeddings, causal pre-norm layers, a norm and a head.

    The weights have torch's default initialization. :func:`benchmarks.workloads.gpt2.initialise` applies that of GPT-2.
    """

    def __init__(
        self,
        vocabulary: int,
        context: int,
        width: int,
        layers: int,
        heads: int,
        *,
        tied: bool = False,
        activation: Callable[[], nn.Module] = nn.GELU,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.Sequential(*(Layer(width, heads, activation, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=not tied)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        # Positions are looked up for every example, so that each example has its own gradients.
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        x = self.dropout(self.tokens(tokens) + self.positions(positions))
        logits: Tensor = self.head(self.norm(self.layers(x)))
        return logits


FILE = "input.txt"
TRAIN_SHARE = 0.9
EVAL_WINDOWS = 64


@dataclass(frozen=True)
class CharGPT(Classification):
    """Cross-entropy of the next character, averaged over all tokens of the batch."""

    data_dir: Path
    batch_size: int = 32
    context: int = 128
    width: int = 128
    layers: int = 4
    heads: int = 4
    dropout: float = 0.0  # dropout probability of the hidden states
    text: str | None = None
    """A text file. The default is tiny Shakespeare in the data folder."""

    name: ClassVar[str] = "chargpt"
    metric: ClassVar[str] = "test loss"
    steps: ClassVar[dict[Size, int]] = {"smoke": 12, "cpu": 150, "paper": 5000}
    small: ClassVar[dict[str, Any]] = {"batch_size": 8, "context": 32, "width": 32, "layers": 1, "heads": 2}
    # From nanoGPT's config/train_shakespeare_char.py, except that its layers have no biases.
    published: ClassVar[dict[str, Any]] = {
        "batch_size": 64, "context": 256, "width": 384, "layers": 6, "heads": 6, "dropout": 0.2,
    }  # fmt: skip

    @property
    def examples(self) -> int:
        """Number of disjoint windows in the training text. An epoch draws as many windows at random."""
        return (len(self._split[0]) - 1) // self.context

    def network(self) -> nn.Module:
        return GPT(self._vocabulary, self.context, self.width, self.layers, self.heads, dropout=self.dropout)

    def batches(self, seed: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed)
        text, _ = self._split
        while True:
            starts = torch.randint(len(text) - self.context, (self.batch_size,), generator=generator)
            yield self._windows(text, starts)

    def evaluate(self, model: nn.Module, everything: bool = False) -> float:
        _, text = self._split
        starts = torch.linspace(0, len(text) - self.context - 1, EVAL_WINDOWS).long()
        if everything:
            starts = torch.arange(0, len(text) - self.context, self.context)
        with evaluating(model):
            parts = starts.split(EVAL_WINDOWS)
            return sum(len(part) * float(self.loss(model, self._windows(text, part))) for part in parts) / len(starts)

    def _windows(self, text: Tensor, starts: Tensor) -> Batch:
        index = starts[:, None] + torch.arange(self.context)
        return text[index], text[index + 1]

    @property
    def _split(self) -> Batch:
        tokens = self._tokens
        cut = int(TRAIN_SHARE * len(tokens))
        if len(tokens) - cut <= self.context:
            raise ValueError(f"the text must be longer, got {len(tokens)} tokens for context {self.context}")
        return tokens[:cut], tokens[cut:]

    @cached_property
    def _tokens(self) -> Tensor:
        text = self._text
        number = {character: index for index, character in enumerate(sorted(set(text)))}
        return torch.tensor([number[character] for character in text])

    @property
    def _vocabulary(self) -> int:
        return int(self._tokens.max()) + 1

    @cached_property
    def _text(self) -> str:
        if self.text is None:
            folder = find_folder((self.data_dir / "shakespeare", self.data_dir), (FILE,), self.name)
            return read_text(folder / FILE)
        path = Path(str(self.text))
        if not path.is_file():
            raise DataMissingError(path.parent, [path.name])
        return read_text(path)


def read_text(path: Path, encoding: str = "utf-8") -> str:
    try:
        text = path.read_text(encoding=encoding)
    except UnicodeDecodeError as err:
        raise ValueError(f"{path} must be text in UTF-8: {err}") from err
    if not text:
        raise ValueError(f"{path} must contain text, but it is empty")
    return text
