"""A task of GLUE, by an encoder of BERT and a map from what it makes of the first position.

The loss is the cross-entropy of the class, or, for STS-B, the squared error of the score.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from benchmarks.workloads.base import Batch, Size, cross_entropy, evaluating
from benchmarks.workloads.bert import POSITIONS, Bert, Encoding, new_head, trimmed
from benchmarks.workloads.glue import (
    Sentences,
    Task,
    encode_sentences,
    find_files,
    find_task,
    labels_tensor,
    mark,
    read_glue,
)
from benchmarks.workloads.transformer import dropping
from benchmarks.workloads.wordpieces import WordPieces
from secondorder import Likelihood

EVAL_SENTENCES = 256
EVAL_BATCHES = 4


class SentenceModel(nn.Module):
    """An encoder with a map from what its pooler returns."""

    def __init__(self, encoder: Bert, outputs: int, dropout: float) -> None:
        super().__init__()
        self.encoder, self.dropout = encoder, dropping(dropout)
        self.head = new_head(encoder.width, outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.dropout(self.encoder.first(tokens)))
        return out


@dataclass(frozen=True)
class Glue(Encoding):
    """Cross-entropy of the class, or squared error of the score."""

    batch_size: int = 32
    length: int = 64
    """Pieces of a pair of sentences; more are cut off."""
    task: str = "mnli"
    """mnli, qqp, mrpc, stsb, sst2, qnli, cola, rte or wnli."""

    name: ClassVar[str] = "glue"
    steps: ClassVar[dict[Size, int]] = {"smoke": 12, "cpu": 150, "paper": 36_815}
    small: ClassVar[dict[str, Any]] = {"batch_size": 16, "encoder": "smallest", "length": 32, "vocabulary": 200}
    # BERT-base on MNLI for three epochs of its 392,702 pairs, as the README of IST-DASLab/EFCP on GitHub has it; the
    # batch is that of the model cards of M-FAC.
    published: ClassVar[dict[str, Any]] = {"encoder": "base", "length": 128, "vocabulary": 30_522, "dropout": 0.1}

    def __post_init__(self) -> None:
        find_task(self.task)
        super().__post_init__()
        if not 8 <= self.length <= POSITIONS:
            raise ValueError(f"length must be from 8 to {POSITIONS}, got {self.length}")

    @property
    def metric(self) -> str:
        """Accuracy; of scores, Pearson's correlation."""
        return "validation accuracy" if self._task.classes else "validation Pearson correlation"

    @property
    def likelihood(self) -> str | Likelihood:
        """Classes, or the squared error of a score."""
        return "categorical" if self._task.classes else "gaussian"

    def model_of(self, shape: tuple[int, int, int], pieces: WordPieces) -> SentenceModel:
        return SentenceModel(Bert(shape, pieces, self.dropout, pooled=True), self._task.outputs, self.dropout)

    def texts(self) -> Iterator[str]:
        for pair in self._files[0].texts:
            yield from pair

    def criterion(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self._task.classes:
            return cross_entropy(outputs, targets)
        return (outputs - targets).square().sum(1).mean()

    def evaluate(self, model: nn.Module, everything: bool = False) -> float:
        """Return the accuracy, or Pearson's correlation, on the first 1,024 examples of the validation set."""
        tokens, labels = self._validation[0]
        count = len(labels) if everything else EVAL_BATCHES * EVAL_SENTENCES
        return next(iter(self._marks(model, tokens[:count], labels[:count]).values()))

    def quality(self, model: nn.Module) -> dict[str, float]:
        files = find_files(self.data_dir, self._task)[1]
        return {
            f"{name}, {file.stem}": value
            for file, data in zip(files, self._validation, strict=True)
            for name, value in self._marks(model, *data).items()
        }

    def _marks(self, model: nn.Module, tokens: Tensor, labels: Tensor) -> dict[str, float]:
        with evaluating(model):
            parts = [model(trimmed(part, self.pieces.padding)).float() for part in tokens.split(EVAL_SENTENCES)]
        outputs = torch.cat(parts)
        found = outputs.argmax(1) if self._task.classes else outputs[:, 0]
        return mark(self.task, self._task)(found, labels.flatten())

    @property
    def _task(self) -> Task:
        return find_task(self.task)

    @cached_property
    def _files(self) -> tuple[Sentences, list[Sentences]]:
        train, validation = find_files(self.data_dir, self._task)
        return read_glue(train, self._task), [read_glue(path, self._task) for path in validation]

    @cached_property
    def train(self) -> Batch:
        return self._encoded(self._files[0])

    @cached_property
    def _validation(self) -> list[Batch]:
        return [self._encoded(sentences) for sentences in self._files[1]]

    def _encoded(self, sentences: Sentences) -> Batch:
        tokens = encode_sentences(sentences.texts, self.pieces, self.length)
        return tokens, labels_tensor(sentences.labels, self._task)
