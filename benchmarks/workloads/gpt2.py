"""GPT-2 small (Radford et al., "Language models are unsupervised multitask learners", 2019) on a text.

The layers are pre-norm, with the tanh approximation of GELU. Weights are drawn with standard deviation 0.02, those of
the positions with 0.01, and those of the layers that write to the residual stream with 0.02 divided by the square root
of their number. Biases are zero. With the 50,257 byte pairs of GPT-2, the published shape has 124,439,808 parameters.
The small sizes use characters as tokens.

The published shape ties its head to the token embedding. The small sizes do not: methods that work on layers have one
block for a tied weight, with the curvature of only one of its two uses.
"""

import json
import math
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Self

from benchmarks.workloads.base import DataMissingError, Size, seeded
from benchmarks.workloads.chargpt import GPT, CharGPT

FILES = ("vocab.json", "merges.txt")
ORIGIN = "https://huggingface.co/openai-community/gpt2 (vocab.json and merges.txt)"
_PRINTABLE = (range(ord("!"), ord("~") + 1), range(ord("¡"), ord("¬") + 1), range(ord("®"), ord("ÿ") + 1))
"""Bytes that are written as the character with the same code point. The others use code points from 256."""


def byte_characters() -> dict[int, str]:
    shown = {byte for span in _PRINTABLE for byte in span}
    hidden = [byte for byte in range(256) if byte not in shown]
    return {**{byte: chr(byte) for byte in shown}, **{byte: chr(256 + index) for index, byte in enumerate(hidden)}}


def split_words(text: str) -> list[str]:
    """Split a text into units that merges cannot cross: endings such as 's, letters, numbers, symbols, whitespace."""
    letters, numbers = (_of_category(text, first, kind) for first, kind in (("a", "L"), ("0", "N")))
    endings = "'(?:s|t|re|ve|m|ll|d)"
    rest = rf"[^\s{letters}{numbers}]"
    return re.findall(rf"{endings}| ?[{letters}]+| ?[{numbers}]+| ?{rest}+|\s+(?!\S)|\s+", text)


def _of_category(text: str, first: str, kind: str) -> str:
    """Return the characters of a text that are in a Unicode category, for a character class of a regex."""
    return "".join(sorted({first, *(c for c in set(text) if unicodedata.category(c)[0] == kind)}))


@dataclass(frozen=True)
class BytePairs:
    """The byte-pair vocabulary of GPT-2, with its merges.

    The text is split into words, each with the space before it. The bytes of a word are written as printable
    characters, and neighboring tokens are merged in the order of the list of merges until no pair is in the list.
    """

    numbers: dict[str, int]
    """Index of each token."""
    ranks: dict[tuple[str, str], int]
    """Index of each pair in the list of merges."""
    _known: dict[str, list[int]] = field(default_factory=dict)
    _characters: dict[int, str] = field(default_factory=byte_characters)

    def __len__(self) -> int:
        return max(self.numbers.values()) + 1

    @classmethod
    def read(cls, folder: Path) -> "BytePairs":
        if missing := [name for name in FILES if not (folder / name).is_file()]:
            raise DataMissingError(folder, missing, ORIGIN)
        vocabulary, merges = (folder / name for name in FILES)
        try:
            numbers = json.loads(vocabulary.read_text(encoding="utf-8"))
            lines = merges.read_text(encoding="utf-8").splitlines()
        except ValueError as err:
            raise ValueError(f"{folder} must hold a vocabulary of GPT-2: {err}") from err
        if not isinstance(numbers, dict) or not numbers or not all(type(value) is int for value in numbers.values()):
            raise ValueError(f"{vocabulary} must hold the number of each token")
        return cls(numbers, _ranks(merges, lines))

    def encode(self, text: str) -> list[int]:
        return [number for word in split_words(text) for number in self._word(word)]

    def _word(self, word: str) -> list[int]:
        if word not in self._known:
            parts = self._merged([self._characters[byte] for byte in word.encode("utf-8")])
            if unknown := [part for part in parts if part not in self.numbers]:
                raise ValueError(f"the vocabulary lacks {unknown[0]!r}, of {word!r}")
            self._known[word] = [self.numbers[part] for part in parts]
        return self._known[word]

    def _merged(self, parts: list[str]) -> list[str]:
        last = len(self.ranks)
        while len(parts) > 1:
            best = min(pairwise(parts), key=lambda pair: self.ranks.get(pair, last))
            if best not in self.ranks:
                break
            parts = _joined(parts, best)
        return parts


def _joined(parts: list[str], pair: tuple[str, str]) -> list[str]:
    out: list[str] = []
    index = 0
    while index < len(parts):
        met = tuple(parts[index : index + 2]) == pair
        out.append("".join(pair) if met else parts[index])
        index += 2 if met else 1
    return out


def _ranks(path: Path, lines: Iterable[str]) -> dict[tuple[str, str], int]:
    pairs = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
    if damaged := [pair for pair in pairs if len(pair) != 2]:
        raise ValueError(f"{path} must hold two tokens a line, got {' '.join(damaged[0])!r}")
    return {(pair[0], pair[1]): rank for rank, pair in enumerate(pairs)}


_STD, _POSITION_STD = 0.02, 0.01


@dataclass(frozen=True)
class GPT2(CharGPT):
    """Cross-entropy of the next token, averaged over all tokens of the batch."""

    batch_size: int = 8
    width: int = 256
    tied: bool = False
    """Whether the head shares its weight with the token embedding."""
    pieces: str | None = None
    """Folder with the vocab.json and merges.txt of GPT-2. Without it, tokens are characters."""

    name: ClassVar[str] = "gpt2_small"
    steps: ClassVar[dict[Size, int]] = {"smoke": 12, "cpu": 150, "paper": 600_000}

    # The batch size and context of nanoGPT's config/train_gpt2.py: 480 times 1,024 tokens, for several GPUs. The user
    # has to provide the text of that run, OpenWebText.
    published: ClassVar[dict[str, Any]] = {
        "batch_size": 480, "context": 1024, "width": 768, "layers": 12, "heads": 12, "tied": True,
    }  # fmt: skip

    @classmethod
    def of_size(cls, size: Size, data_dir: Path | None = None) -> Self:
        folder = (data_dir or Path()) / "gpt2"
        known = size == "paper" and all((folder / name).is_file() for name in FILES)
        return replace(super().of_size(size, data_dir), pieces=str(folder) if known else None)

    def build_model(self, seed: int) -> nn.Module:
        with seeded(seed):
            return self.architecture(self._vocabulary)

    def architecture(self, vocabulary: int) -> GPT:
        shape, activation = (self.context, self.width, self.layers, self.heads), partial(nn.GELU, approximate="tanh")
        model = GPT(vocabulary, *shape, tied=self.tied, activation=activation, dropout=self.dropout)
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
    """Initialize the weights as in GPT-2, except for those of norms."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=_POSITION_STD if module is model.positions else _STD)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    layers: Any = model.layers
    ends = [linear for layer in layers for linear in (layer.attention.out, layer.mlp[-1])]
    for linear in ends:
        nn.init.normal_(linear.weight, std=_STD / math.sqrt(len(ends)))
