"""GPT-2 small (Radford et al., "Language models are unsupervised multitask learners", 2019) on a text.

The activation is the tanh form of GELU, norms stand in front. Weights are drawn with standard deviation 0.02, those of
the positions with 0.01, and the maps that end in the residual stream with 0.02 divided by the square root of their
number; biases are zero. With the 50,257 byte pairs of GPT-2 the published shape has 124,439,808 parameters. The
small sizes are those of a text without such a vocabulary, by characters.

The head of the published shape is the table of tokens. The small sizes have a head of their own: a weight that is both
has one block in methods by layers, and with it the curvature of one of its two uses.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Self

from benchmarks.workloads.base import Size, seeded
from benchmarks.workloads.bytepairs import FILES, BytePairs
from benchmarks.workloads.chargpt import CharGPT
from benchmarks.workloads.transformer import GPT, Layer

_STD, _POSITION_STD = 0.02, 0.01


@dataclass(frozen=True)
class GPT2(CharGPT):
    """Cross-entropy of the next token, mean over all tokens of the batch."""

    batch_size: int = 8
    width: int = 256
    tied: bool = False
    """Whether the head is the table of tokens."""
    pieces: str | None = None
    """Folder with the vocab.json and merges.txt of GPT-2; unset: tokens are characters."""

    name: ClassVar[str] = "gpt2_small"
    steps: ClassVar[dict[Size, int]] = {"smoke": 12, "cpu": 150, "paper": 600_000}

    # The batch and the length of nanoGPT's config/train_gpt2.py: 480 times 1,024 tokens, for several GPUs. The text of
    # that run, OpenWebText, has to be given.
    published: ClassVar[dict[str, Any]] = {
        "batch_size": 480, "context": 1024, "width": 768, "layers": 12, "heads": 12, "tied": True,
    }  # fmt: skip

    @classmethod
    def paper(cls, data_dir: Path | None = None) -> Self:
        folder = (data_dir or Path()) / "gpt2"
        workload = super().paper(data_dir)
        return replace(workload, pieces=str(folder)) if all((folder / name).is_file() for name in FILES) else workload

    def build_model(self, seed: int) -> nn.Module:
        with seeded(seed):
            return self.architecture(self._vocabulary)

    def architecture(self, vocabulary: int) -> GPT:
        """Return the model for any number of tokens, its weights from torch's generator."""
        model = GPT(
            vocabulary,
            self.context,
            self.width,
            self.layers,
            self.heads,
            tied=self.tied,
            activation=partial(nn.GELU, approximate="tanh"),
            dropout=self.dropout,
        )
        initialise(model)
        return model

    @cached_property
    def _byte_pairs(self) -> BytePairs | None:
        return None if self.pieces is None else BytePairs.read(Path(str(self.pieces)))

    @cached_property
    def _tokens(self) -> Tensor:
        if self._byte_pairs is None:
            return super()._tokens
        return torch.tensor(self._byte_pairs.encode(self._text))

    @property
    def _vocabulary(self) -> int:
        return super()._vocabulary if self._byte_pairs is None else len(self._byte_pairs)


def initialise(model: GPT) -> None:
    """Draw the weights as GPT-2 has them; those of norms stay."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=_POSITION_STD if module is model.positions else _STD)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    ends = list(_ends_of_halves(model))
    for linear in ends:
        nn.init.normal_(linear.weight, std=_STD / math.sqrt(len(ends)))


def _ends_of_halves(model: GPT) -> Iterator[nn.Linear]:
    for layer in model.layers:
        assert isinstance(layer, Layer)
        last = layer.mlp[-1]
        assert isinstance(last, nn.Linear)
        yield from (layer.attention.out, last)
