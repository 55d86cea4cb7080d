"""The base class of workloads with BERT (Devlin et al., 2019), whose model and tokenizer are those of Transformers.

The library is an extra: ``pip install "secondorder[text]"``. With 30,522 pieces and 512 positions, the base size has
109,482,240 parameters: 23,837,184 of the embeddings, 7,087,872 of each of 12 layers, and 590,592 of the pooler, which
question answering does not use. The smaller sizes are from Turc et al., "Well-read students learn better", 2019.
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from typing_extensions import Self

from benchmarks.workloads.base import Batch, InMemory, Size, evaluating, optional_package
from benchmarks.workloads.multi30k import number_words

EncoderName = Literal["smallest", "tiny", "mini", "small", "medium", "base", "large"]
SHAPES: dict[EncoderName, tuple[int, int, int]] = {
    "smallest": (1, 32, 2), "tiny": (2, 128, 2), "mini": (4, 256, 4), "small": (4, 512, 8), "medium": (8, 512, 8),
    "base": (12, 768, 12), "large": (24, 1024, 16),
}  # fmt: skip
"""Layers, width and heads. The first size is only for tests."""
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
POSITIONS = 512
EVAL_EXAMPLES = 256
PART = 1000  # number of texts that are encoded at once, because the tokenizer needs much more memory than its result
_ROWS = ("input_ids", "token_type_ids", "attention_mask")


def library() -> Any:
    return optional_package("transformers", "text")


@dataclass(frozen=True)
class Encoding(InMemory):
    """Base class of workloads with an encoder. Inputs are pieces, segments and a mask, ``[batch, 3, length]``.

    The vocabulary is that of the checkpoint, or ``<data-dir>/bert/vocab.txt``, or the most frequent words of the
    training file. Without ``checkpoint``, the weights are random, and a short run teaches the model little.
    """

    data_dir: Path
    batch_size: int = 16
    encoder: EncoderName = "tiny"  # size of the encoder, if there is no checkpoint
    length: int = 192  # number of pieces per input
    vocabulary: int = 8000  # number of words if there is no vocabulary of BERT
    dropout: float = 0.0  # dropout probability of the hidden states
    checkpoint: str | None = None  # name or folder of a published encoder with its vocabulary, for `from_pretrained`

    head: ClassVar[str]  # name of the model in Transformers

    def __post_init__(self) -> None:
        if self.encoder not in SHAPES:
            raise ValueError(f"encoder must be one of {', '.join(SHAPES)}, got {self.encoder!r}")

    @classmethod
    def of_size(cls, size: Size, data_dir: Path | None = None) -> Self:
        folder = (data_dir or Path()) / "bert"
        known = size == "paper" and (folder / "config.json").is_file()
        return replace(super().of_size(size, data_dir), checkpoint=str(folder) if known else None)

    @property
    @abstractmethod
    def labels(self) -> int:
        """Number of outputs of the head."""

    def network(self) -> nn.Module:
        kind, dropout = getattr(library(), self.head), self.dropout
        options = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout, "num_labels": self.labels}
        if self.checkpoint is not None:
            model = kind.from_pretrained(self.checkpoint, **options)
        else:
            model = kind(self.configuration(len(self.tokenizer), **options))
        training: nn.Module = model.train()
        return training

    def configuration(self, pieces: int, **options: Any) -> Any:
        layers, width, heads = SHAPES[self.encoder]
        sizes = {"vocab_size": pieces, "hidden_size": width, "intermediate_size": 4 * width}
        return library().BertConfig(num_hidden_layers=layers, num_attention_heads=heads, **sizes, **options)

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        pieces, segments, mask = batch[0].unbind(1)
        # Positions are looked up for every example, so that each example has its own gradients.
        positions = torch.arange(pieces.shape[1], device=pieces.device).expand_as(pieces)
        rows = dict(zip(_ROWS, (pieces, segments, mask), strict=True))
        return self.logits(model(**rows, position_ids=positions, return_dict=False), mask)

    @abstractmethod
    def logits(self, found: tuple[Tensor, ...], mask: Tensor) -> Tensor:
        """Return the logits from the outputs of the head."""

    def answers(self, model: nn.Module, inputs: Tensor) -> list[Tensor]:
        """Return the logits of each example in evaluation mode."""
        found: list[Tensor] = []
        with evaluating(model):
            for part in inputs.split(EVAL_EXAMPLES):
                found += self.outputs(model, (trimmed(part), part)).float().unbind()
        return found

    def augmented(self, inputs: Tensor, generator: torch.Generator) -> Tensor:
        return trimmed(inputs)

    @cached_property
    def tokenizer(self) -> Any:
        kind, folder = library().BertTokenizer, self.data_dir / "bert"
        if self.checkpoint is not None or (folder / "vocab.txt").is_file():
            return kind.from_pretrained(self.checkpoint or folder)
        splitting = kind().backend_tokenizer
        texts = map(splitting.normalizer.normalize_str, dict.fromkeys(self.texts()))
        words = ([word for word, _ in splitting.pre_tokenizer.pre_tokenize_str(text)] for text in texts)
        return kind(number_words(words, self.vocabulary, SPECIAL))

    def encoded(self, *texts: list[str], **options: Any) -> Iterator[Any]:
        """Yield texts, or pairs of texts, as the tokenizer encodes them, padded and ``PART`` at a time."""
        options |= {"max_length": self.length, "padding": "max_length", "return_tensors": "pt"}
        for start in range(0, len(texts[0]), PART):
            yield self.tokenizer(*(side[start : start + PART] for side in texts), **options)

    @abstractmethod
    def texts(self) -> Iterable[str]:
        """Return the texts of the training file."""


def rows_of(encoded: Any) -> Tensor:
    """Return the inputs of a model, as int32."""
    return torch.stack([encoded[name] for name in _ROWS], 1).int()


def trimmed(inputs: Tensor) -> Tensor:
    """Return examples without the positions at which all of them have padding."""
    longest = int(inputs[:, 2].sum(1).max())
    return inputs[..., :longest].long()
