"""A character-level GPT on tiny Shakespeare or any other text: 4 layers, width 128, 4 heads, context 128.

Its weights are initialised as torch does by default. The small embeddings of GPT-2 (standard deviation 0.02) need a
warm-up of the learning rate: without one SGD diverges or stays at the frequencies of the characters.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from benchmarks.workloads.base import Batch, Classification, DataMissingError, Size, evaluating, find_folder, seeded
from benchmarks.workloads.transformer import GPT

FILE = "input.txt"
ORIGIN = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
HINT = f"Put the file into <data-dir>/shakespeare as {FILE}, or name any other with --workload-set text=PATH."
TRAIN_SHARE = 0.9
EVAL_WINDOWS = 64


@dataclass(frozen=True)
class CharGPT(Classification):
    """Cross-entropy of the next character, mean over all tokens of the batch."""

    data_dir: Path
    batch_size: int = 32
    context: int = 128
    width: int = 128
    layers: int = 4
    heads: int = 4
    dropout: float = 0.0
    """Share of the hidden states that is dropped."""
    text: str | None = None
    """A text file; unset: tiny Shakespeare in the data folder."""

    name: ClassVar[str] = "chargpt"
    metric: ClassVar[str] = "test loss"
    steps: ClassVar[dict[Size, int]] = {"smoke": 12, "cpu": 150, "paper": 5000}
    small: ClassVar[dict[str, Any]] = {"batch_size": 8, "context": 32, "width": 32, "layers": 1, "heads": 2}
    # As in nanoGPT's config/train_shakespeare_char.py, whose layers have no biases, though.
    published: ClassVar[dict[str, Any]] = {
        "batch_size": 64,
        "context": 256,
        "width": 384,
        "layers": 6,
        "heads": 6,
        "dropout": 0.2,
    }

    @property
    def examples(self) -> int:
        """Windows of the training text side by side: an epoch takes as many at random."""
        return (len(self._split[0]) - 1) // self.context

    def build_model(self, seed: int) -> nn.Module:
        with seeded(seed):
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
            folder = find_folder((self.data_dir / "shakespeare", self.data_dir), (FILE,), ORIGIN, HINT)
            return read_text(folder / FILE)
        path = Path(str(self.text))
        if not path.is_file():
            raise DataMissingError(path.parent, [path.name], "wherever your text comes from")
        return read_text(path)


def read_text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as err:
        raise ValueError(f"{path} must be text in UTF-8: {err}") from err
    if not text:
        raise ValueError(f"{path} must hold some text, it is empty")
    return text
