"""The encoder of BERT (Devlin et al., "BERT: Pre-training of deep bidirectional transformers", 2019), and its weights.

Queries, keys and values are separate ``nn.Linear`` layers. With 30,522 pieces and 512 positions the base size has
109,482,240 parameters: 23,837,184 of the embeddings, 7,087,872 of each of 12 layers, 590,592 of the pooler, which
question answering does without. The sizes below base are those of Turc et al., "Well-read students learn better", 2019.
"""

import pickle
import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import Self

from benchmarks.workloads.base import Batch, Workload, seeded, shuffled_indices
from benchmarks.workloads.transformer import Layer, dropping
from benchmarks.workloads.wordpieces import WordPieces, find_pieces

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
"""Layers, width and heads; the first one is for checks only."""
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
"""Names here, and those of Hugging Face; the first that matches counts."""


class Bert(nn.Module):
    """Embeddings of words, positions and segments, then layers with their norms behind."""

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
        self.apply(_initialise)

    def forward(self, tokens: Tensor) -> Tensor:
        # Positions are looked up for every example, so that each has gradients of its own there.
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
            raise ValueError("the encoder was built without a pooler, take pooled=True")
        return torch.tanh(self.pooler(self(tokens)[:, 0]))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=_STD)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
    if isinstance(module, nn.Embedding) and module.padding_idx is not None:
        with torch.no_grad():
            module.weight[module.padding_idx].zero_()


def trimmed(tokens: Tensor, padding: int) -> Tensor:
    """Return sentences without the places that are padding in all of them."""
    longest = int((tokens != padding).sum(1).max())
    return tokens[:, :longest].long()


def new_head(width: int, outputs: int) -> nn.Linear:
    head = nn.Linear(width, outputs)
    _initialise(head)
    return head


def load_checkpoint(encoder: Bert, path: Path) -> None:
    """Take the weights of a published model, as ``torch.save`` wrote its state under Hugging Face's names.

    Heads of other tasks in it are not used; without a pooler in it the encoder keeps its new one.
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
                f"the encoder has {tuple(own[name].shape)}; words are as many as its vocab.txt has lines"
            )
    encoder.load_state_dict({**own, **taken})


def their_name(name: str) -> str:
    pattern, to = next((pattern, to) for pattern, to in _THEIRS if re.match(pattern, name))
    return re.sub(pattern, to, name)


def _read_state(path: Path) -> dict[str, Tensor]:
    """Read a state, its names without ``bert.`` and with today's words for the parts of a norm."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as err:
        raise ValueError(f"{path} must be a state that torch.save wrote: {err}") from err
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"{path} must hold tensors by name")
    today = (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias"))
    names = {name: name.removeprefix("bert.") for name in state}
    for old, new in today:
        names = {name: short.replace(old, new) for name, short in names.items()}
    return {names[name]: value for name, value in state.items()}


# ---------------------------------------------------------------------- workloads
@dataclass(frozen=True)
class Encoding(Workload):
    """What the workloads on an encoder have in common.

    Pieces come from a ``vocab.txt`` of BERT where there is one in ``<data-dir>/bert``, else from the words of the
    training file. Without ``checkpoint`` the weights are new, and what the model learns in a short run is little.
    """

    data_dir: Path
    batch_size: int = 16
    encoder: EncoderName = "tiny"
    """Size of the encoder."""
    length: int = 192
    """Pieces that are read at a time."""
    vocabulary: int = 8000
    """Pieces that are made where there is no vocabulary of BERT."""
    dropout: float = 0.0
    """Share of the hidden states that is dropped."""
    checkpoint: str | None = None
    """File with the weights of a published encoder."""

    def __post_init__(self) -> None:
        if self.encoder not in SHAPES:
            raise ValueError(f"encoder must be one of {', '.join(SHAPES)}, got {self.encoder!r}")

    @classmethod
    def paper(cls, data_dir: Path | None = None) -> Self:
        weights = (data_dir or Path()) / "bert" / "pytorch_model.bin"
        make: Any = cls
        workload: Self = make(data_dir, checkpoint=str(weights) if weights.is_file() else None, **cls.published)
        return workload

    @property
    def examples(self) -> int:
        return len(self.train[0])

    def build_model(self, seed: int) -> nn.Module:
        with seeded(seed):
            model = self.model_of(SHAPES[self.encoder], self.pieces)
        if self.checkpoint is not None:
            encoder = model.encoder
            assert isinstance(encoder, Bert)
            load_checkpoint(encoder, Path(str(self.checkpoint)))
        return model

    def batches(self, seed: int) -> Iterator[Batch]:
        tokens, targets = self.train
        generator = torch.Generator().manual_seed(seed)
        for index in shuffled_indices(len(tokens), self.batch_size, generator):
            yield trimmed(tokens[index], self.pieces.padding), targets[index]

    @cached_property
    def pieces(self) -> WordPieces:
        return find_pieces(self.data_dir, dict.fromkeys(self.texts()), self.vocabulary)

    @abstractmethod
    def texts(self) -> Iterable[str]:
        """Return the texts of the training file."""

    @abstractmethod
    def model_of(self, shape: tuple[int, int, int], pieces: WordPieces) -> nn.Module:
        """Return a new encoder with its head, from torch's generator."""

    @cached_property
    @abstractmethod
    def train(self) -> Batch:
        """All pieces that are trained on, padded to one length, and what is to be said of them."""
