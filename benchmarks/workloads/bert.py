"""The encoder of BERT (Devlin et al., "BERT: Pre-training of deep bidirectional transformers", 2019), and its weights.

Queries, keys and values are separate ``nn.Linear`` layers. With 30,522 pieces and 512 positions, the base size has
109,482,240 parameters: 23,837,184 of the embeddings, 7,087,872 of each of 12 layers, and 590,592 of the pooler, which
question answering does not use. The smaller sizes are from Turc et al., "Well-read students learn better", 2019.
"""

import pickle
import re
import unicodedata
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import Self

from benchmarks.workloads.base import InMemory, Size, seeded
from benchmarks.workloads.chargpt import Layer, dropping

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
FILE = "vocab.txt"
_LONGEST = 100
"""Maximum length of a word. Longer words are unknown."""
_CHINESE = (
    (0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F), (0x2B820, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F),
)  # fmt: skip


class Piece(NamedTuple):
    """A token and its position in the text."""

    number: int
    start: int
    stop: int


class _Word(NamedTuple):
    """A normalized word, and the position of each of its letters in the text."""

    letters: str
    places: tuple[int, ...]


class WordPieces:
    """The WordPiece vocabulary of BERT's uncased models.

    A text is split at whitespace and around every punctuation mark and Chinese character, converted to lower case, and
    its accents are removed. A word is split greedily into the longest pieces of the vocabulary, and pieces that
    continue a word begin with ``##``. A word is unknown as a whole if any part of it is not in the vocabulary.
    """

    def __init__(self, numbers: dict[str, int]) -> None:
        if missing := [name for name in SPECIAL[:4] if name not in numbers]:
            raise ValueError(f"a vocabulary must hold {', '.join(SPECIAL[:4])}, it lacks {', '.join(missing)}")
        self.numbers = numbers
        self.padding, self.unknown, self.begin, self.separator = (numbers[name] for name in SPECIAL[:4])
        self._known: dict[str, list[Piece]] = {}

    def __len__(self) -> int:
        return max(self.numbers.values()) + 1

    @classmethod
    def read(cls, path: Path) -> "WordPieces":
        """Read a vocabulary in BERT's format, with one piece per line."""
        try:
            lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
            return cls({line.rstrip("\r"): number for number, line in enumerate(lines)})
        except ValueError as err:
            raise ValueError(f"{path} must be a vocabulary of BERT: {err}") from err

    @classmethod
    def learn(cls, texts: Iterable[str], size: int) -> "WordPieces":
        chunks = Counter(chunk for text in texts for chunk in text.split())
        words: Counter[str] = Counter()
        characters: Counter[str] = Counter()
        for chunk, count in chunks.items():
            for word in _words(chunk):
                words[word.letters] += count
                for character in word.letters:
                    characters[character] += count
        alphabet = _ranked(characters)[: (size - len(SPECIAL)) // 4]
        pieces = [*SPECIAL, *alphabet, *(f"##{character}" for character in alphabet)]
        known = set(pieces)
        pieces += [word for word in _ranked(words) if word not in known][: max(0, size - len(pieces))]
        return cls({piece: number for number, piece in enumerate(pieces)})

    def encode(self, text: str) -> list[Piece]:
        out: list[Piece] = []
        for found in re.finditer(r"\S+", text):
            chunk, offset = found[0], found.start()
            if chunk not in self._known:
                self._known[chunk] = [piece for word in _words(chunk) for piece in self._pieces(word)]
            out += [Piece(number, start + offset, stop + offset) for number, start, stop in self._known[chunk]]
        return out

    def _pieces(self, word: _Word) -> list[Piece]:
        letters, places = word
        out: list[Piece] = []
        start = 0
        while start < len(letters) <= _LONGEST:
            prefix = "##" if start else ""
            ends = range(len(letters), start, -1)
            stop = next((end for end in ends if prefix + letters[start:end] in self.numbers), None)
            if stop is None:
                break
            out.append(Piece(self.numbers[prefix + letters[start:stop]], places[start], places[stop - 1] + 1))
            start = stop
        whole = start == len(letters)
        return out if whole else [Piece(self.unknown, places[0], places[-1] + 1)]


def _words(chunk: str) -> Iterator[_Word]:
    letters: list[tuple[str, int]] = []
    for place, character in enumerate(chunk):
        alone = _stands_alone(character)
        if alone and letters:
            yield _word(letters)
            letters = []
        letters += [(letter, place) for letter in _normalized(character)]
        if alone and letters:
            yield _word(letters)
            letters = []
    if letters:
        yield _word(letters)


def _word(letters: list[tuple[str, int]]) -> _Word:
    return _Word("".join(letter for letter, _ in letters), tuple(place for _, place in letters))


def _stands_alone(character: str) -> bool:
    """Return whether a character is Chinese or a punctuation mark, which includes symbols such as $ and ^."""
    code = ord(character)
    if code < 128:
        return character.isprintable() and not character.isalnum()
    return unicodedata.category(character)[0] == "P" or any(low <= code <= high for low, high in _CHINESE)


def _normalized(character: str) -> str:
    if unicodedata.category(character)[0] == "C" or character == "\ufffd":
        return ""
    parts = unicodedata.normalize("NFD", character.lower())
    return "".join(part for part in parts if unicodedata.category(part) != "Mn")


def _ranked(counts: Counter[str]) -> list[str]:
    return sorted(counts, key=lambda entry: (-counts[entry], entry))


EncoderName = Literal["smallest", "tiny", "mini", "small", "medium", "base", "large"]
SHAPES: dict[EncoderName, tuple[int, int, int]] = {
    "smallest": (1, 32, 2),
    "tiny": (2, 128, 2),
    "mini": (4, 256, 4),
    "small": (4, 512, 8),
    "medium": (8, 512, 8),
    "base": (12, 768, 12),
    "large": (24, 1024, 16),
}
"""Layers, width and heads. The first size is only for tests."""
POSITIONS = 512
_STD = 0.02
_THEIRS = (
    (r"^words\.", "embeddings.word_embeddings."),
    (r"^positions\.", "embeddings.position_embeddings."),
    (r"^segments\.", "embeddings.token_type_embeddings."),
    (r"^norm\.", "embeddings.LayerNorm."),
    (r"^pooler\.", "pooler.dense."),
    (r"^layers\.(\d+)\.attention\.out\.", r"encoder.layer.\1.attention.output.dense."),
    (r"^layers\.(\d+)\.attention\.", r"encoder.layer.\1.attention.self."),
    (r"^layers\.(\d+)\.norm1\.", r"encoder.layer.\1.attention.output.LayerNorm."),
    (r"^layers\.(\d+)\.norm2\.", r"encoder.layer.\1.output.LayerNorm."),
    (r"^layers\.(\d+)\.mlp\.0\.", r"encoder.layer.\1.intermediate.dense."),
    (r"^layers\.(\d+)\.mlp\.2\.", r"encoder.layer.\1.output.dense."),
)
"""Patterns of names in this module, and the names of Hugging Face. The first match is used."""


class Bert(nn.Module):
    """Embeddings of words, positions and segments, followed by post-norm layers."""

    def __init__(
        self, shape: tuple[int, int, int], pieces: WordPieces, dropout: float = 0.0, pooled: bool = False
    ) -> None:
        super().__init__()
        layers, width, heads = shape
        self.words = nn.Embedding(len(pieces), width, pieces.padding)
        self.positions, self.segments = nn.Embedding(POSITIONS, width), nn.Embedding(2, width)
        self.norm, self.dropout = nn.LayerNorm(width, 1e-12), dropping(dropout)
        options: dict[str, Any] = {"causal": False, "norm_first": False, "eps": 1e-12, "dropout": dropout}
        self.layers = nn.ModuleList(Layer(width, heads, **options) for _ in range(layers))
        self.pooler = nn.Linear(width, width) if pooled else None
        self.width, self.padding, self.separator = width, pieces.padding, pieces.separator
        self.apply(_initialize)

    def forward(self, tokens: Tensor) -> Tensor:
        # Positions are looked up for every example, so that each example has its own gradients.
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        there = tokens != self.padding
        ends = tokens == self.separator
        segments = ((ends.cumsum(1) - ends.long()) * there).clamp(max=1)
        x: Tensor = self.dropout(self.norm(self.words(tokens) + self.positions(positions) + self.segments(segments)))
        for layer in self.layers:
            x = layer(x, there[:, None, None])
        return x

    def first(self, tokens: Tensor) -> Tensor:
        if self.pooler is None:
            raise ValueError("the encoder was built without a pooler, pass pooled=True")
        return torch.tanh(self.pooler(self(tokens)[:, 0]))


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=_STD)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
    if isinstance(module, nn.Embedding) and module.padding_idx is not None:
        with torch.no_grad():
            module.weight[module.padding_idx].zero_()


def trimmed(tokens: Tensor, padding: int) -> Tensor:
    """Return sentences without the positions at which all of them have padding."""
    longest = int((tokens != padding).sum(1).max())
    return tokens[:, :longest].long()


def new_head(width: int, outputs: int) -> nn.Linear:
    head = nn.Linear(width, outputs)
    _initialize(head)
    return head


def load_checkpoint(encoder: Bert, path: Path) -> None:
    """Load the weights of a published model from a ``state_dict`` file with Hugging Face's names.

    The heads of other tasks are ignored. If the file has no pooler, the encoder keeps its new one.
    """
    theirs = _read_state(path)
    own = encoder.state_dict()
    taken = {name: theirs[their_name(name)] for name in own if their_name(name) in theirs}
    if missing := [their_name(name) for name in own if name not in taken and not name.startswith("pooler.")]:
        raise ValueError(f"{path} lacks {missing[0]} and {len(missing) - 1} more of {len(own)} tensors of the encoder")
    layers = {int(found[1]) for name in theirs if (found := re.match(r"encoder\.layer\.(\d+)\.", name))}
    if len(layers) != len(encoder.layers):
        raise ValueError(f"{path} has {len(layers)} layers, the encoder has {len(encoder.layers)}")
    for name, tensor in taken.items():
        if tensor.shape != own[name].shape:
            raise ValueError(
                f"{path}: {their_name(name)} has shape {tuple(tensor.shape)}, "
                f"the encoder has {tuple(own[name].shape)}; its vocab.txt must have one line per word"
            )
    encoder.load_state_dict({**own, **taken})


def their_name(name: str) -> str:
    pattern, to = next((pattern, to) for pattern, to in _THEIRS if re.match(pattern, name))
    return re.sub(pattern, to, name)


def _read_state(path: Path) -> dict[str, Tensor]:
    """Read a ``state_dict``, and convert its names: no ``bert.``, and the current names of norm parameters."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as err:
        raise ValueError(f"{path} must be a state that torch.save wrote: {err}") from err
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"{path} must hold tensors by name")
    for old, new in ((r"^bert\.", ""), ("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")):
        state = {re.sub(old, new, name): value for name, value in state.items()}
    return state


# ---------------------------------------------------------------------- workloads
@dataclass(frozen=True)
class Encoding(InMemory):
    """Base class of workloads with an encoder.

    The vocabulary is BERT's ``vocab.txt`` if ``<data-dir>/bert`` contains it, and is built from the words of the
    training file otherwise. Without ``checkpoint``, the weights are random, and a short run teaches the model little.
    """

    data_dir: Path
    batch_size: int = 16
    encoder: EncoderName = "tiny"
    """Size of the encoder."""
    length: int = 192
    """Number of pieces per input."""
    vocabulary: int = 8000
    """Size of the vocabulary that is built if there is none of BERT."""
    dropout: float = 0.0
    """Dropout probability of the hidden states."""
    checkpoint: str | None = None
    """File with the weights of a published encoder."""

    def __post_init__(self) -> None:
        if self.encoder not in SHAPES:
            raise ValueError(f"encoder must be one of {', '.join(SHAPES)}, got {self.encoder!r}")

    @classmethod
    def of_size(cls, size: Size, data_dir: Path | None = None) -> Self:
        weights = (data_dir or Path()) / "bert" / "pytorch_model.bin"
        known = size == "paper" and weights.is_file()
        return replace(super().of_size(size, data_dir), checkpoint=str(weights) if known else None)

    def build_model(self, seed: int) -> nn.Module:
        with seeded(seed):
            model = self.model_of(SHAPES[self.encoder], self.pieces)
        if self.checkpoint is not None:
            encoder = model.encoder
            assert isinstance(encoder, Bert)
            load_checkpoint(encoder, Path(str(self.checkpoint)))
        return model

    def augmented(self, inputs: Tensor, generator: torch.Generator) -> Tensor:
        return trimmed(inputs, self.pieces.padding)

    @cached_property
    def pieces(self) -> WordPieces:
        path = self.data_dir / "bert" / FILE
        texts = dict.fromkeys(self.texts())  # reports missing files in any case
        return WordPieces.read(path) if path.is_file() else WordPieces.learn(texts, self.vocabulary)

    @abstractmethod
    def texts(self) -> Iterable[str]:
        """Return the texts of the training file."""

    @abstractmethod
    def model_of(self, shape: tuple[int, int, int], pieces: WordPieces) -> nn.Module:
        """Return a new encoder with its head, initialized by torch's global generator."""
