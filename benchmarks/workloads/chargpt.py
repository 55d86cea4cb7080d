"""A character-level GPT on tiny Shakespeare: 4 layers, width 128, 4 heads, context 128.

Queries, keys and values are separate ``nn.Linear`` layers, so each one is a Kronecker block of its own.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.workloads.base import Batch, Classification, Size, evaluating, find_folder, seeded

FILE = "input.txt"
ORIGIN = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
HINT = f"Put the file into <data-dir>/shakespeare as {FILE}."
TRAIN_SHARE = 0.9
EVAL_WINDOWS = 64


class _Attention(nn.Module):
    """Causal self-attention with separate projections."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = (batch, length, self.heads, width // self.heads)
        q, k, v = (layer(x).view(split).transpose(1, 2) for layer in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class _Layer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = _Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class _GPT(nn.Module):
    """Token and position embeddings, the layers, a norm and an untied head, initialised as torch does by default.

    The small embeddings of GPT-2 (standard deviation 0.02) need a warm-up of the learning rate: without one SGD
    diverges or stays at the frequencies of the characters.
    """

    def __init__(self, vocabulary: int, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.layers = nn.Sequential(*(_Layer(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        # Looked up for every example, so that each has gradients of its own there.
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        x = self.tokens(tokens) + self.positions(positions)
        logits: Tensor = self.head(self.norm(self.layers(x)))
        return logits


@dataclass(frozen=True)
class CharGPT(Classification):
    """Cross-entropy of the next character, mean over all tokens of the batch."""

    data_dir: Path
    batch_size: int = 32
    context: int = 128
    width: int = 128
    layers: int = 4
    heads: int = 4

    name: ClassVar[str] = "chargpt"
    metric: ClassVar[str] = "test loss"
    steps: ClassVar[dict[Size, int]] = {"smoke": 12, "cpu": 150}

    @classmethod
    def smoke(cls, data_dir: Path) -> "CharGPT":
        """Return the small version of this workload.

        Args:
            data_dir: Folder that holds ``shakespeare``.

        Returns:
            A workload with one narrow layer, a short context and a smaller batch.
        """
        return cls(data_dir, batch_size=8, context=32, width=32, layers=1, heads=2)

    @property
    def examples(self) -> int:
        """Windows of the training text side by side: an epoch takes as many at random."""
        return (len(self._split[0]) - 1) // self.context

    def build_model(self, seed: int) -> nn.Module:
        """Return the transformer with weights from ``seed``; the text decides the vocabulary.

        Args:
            seed: Seed of the initial weights.

        Returns:
            A model from tokens ``[batch, context]`` to logits ``[batch, context, vocabulary]``.
        """
        with seeded(seed):
            return _GPT(int(self._text.max()) + 1, self.context, self.width, self.layers, self.heads)

    def batches(self, seed: int) -> Iterator[Batch]:
        """Yield windows at random places of the training text for ever.

        Args:
            seed: Seed of the places.

        Yields:
            Tokens and the tokens one place later, each ``[batch, context]``.
        """
        generator = torch.Generator().manual_seed(seed)
        text, _ = self._split
        while True:
            starts = torch.randint(len(text) - self.context, (self.batch_size,), generator=generator)
            yield self._windows(text, starts)

    def evaluate(self, model: nn.Module, everything: bool = False) -> float:
        """Return the loss on evenly spread windows of the held-out text.

        Args:
            model: The transformer.
            everything: Take every whole window of the text.

        Returns:
            Nats per token.
        """
        _, text = self._split
        starts = torch.linspace(0, len(text) - self.context - 1, EVAL_WINDOWS).long()
        if everything:
            starts = torch.arange(0, len(text) - self.context, self.context)
        with evaluating(model):
            parts = starts.split(EVAL_WINDOWS)
            return sum(len(part) * float(self.loss(model, self._windows(text, part))) for part in parts) / len(starts)

    def _windows(self, text: Tensor, starts: Tensor) -> Batch:
        """Cut windows and their shifted targets.

        Args:
            text: Token numbers ``[length]``.
            starts: First index of each window ``[batch]``.

        Returns:
            Tokens and targets ``[batch, context]``.
        """
        index = starts[:, None] + torch.arange(self.context)
        return text[index], text[index + 1]

    @property
    def _split(self) -> Batch:
        """The training text and the held-out text.

        Raises:
            ValueError: When the held-out text is shorter than one window.
        """
        cut = int(TRAIN_SHARE * len(self._text))
        if len(self._text) - cut <= self.context:
            raise ValueError(f"the text must be longer, got {len(self._text)} characters for context {self.context}")
        return self._text[:cut], self._text[cut:]

    @cached_property
    def _text(self) -> Tensor:
        """The text as numbers of its characters in sorted order."""
        folder = find_folder((self.data_dir / "shakespeare", self.data_dir), (FILE,), ORIGIN, HINT)
        text = (folder / FILE).read_text(encoding="utf-8")
        number = {character: index for index, character in enumerate(sorted(set(text)))}
        return torch.tensor([number[character] for character in text])
