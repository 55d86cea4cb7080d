"""Question answering: an encoder of BERT says where in a text the answer stands.

Any file in the format of SQuAD will do, of version 1.1 or 2.0.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from benchmarks.workloads.base import Batch, Classification, Size, evaluating, find_folder
from benchmarks.workloads.bert import POSITIONS, Bert, Encoding, new_head, trimmed
from benchmarks.workloads.squad import Question, Windows, best_answers, make_windows, marks, read_squad
from benchmarks.workloads.wordpieces import WordPieces

ORIGIN = "https://rajpurkar.github.io/SQuAD-explorer/"
HINT = "Put train-v2.0.json and dev-v2.0.json, or those of v1.1, into <data-dir>/squad."
VERSIONS = (2.0, 1.1)
EVAL_WINDOWS = 256


class SpanModel(nn.Module):
    """An encoder with a map to two numbers at each place."""

    def __init__(self, encoder: Bert) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = new_head(encoder.width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        """Say where the answer begins and ends."""
        logits: Tensor = self.head(self.encoder(tokens)).mT
        return logits.masked_fill((tokens == self.encoder.padding)[:, None], torch.finfo(logits.dtype).min)


@dataclass(frozen=True)
class BertQA(Encoding, Classification):
    """Cross-entropy of the positions where the answer begins and ends, mean of both."""

    stride: int = 64
    """Pieces of a text that neighbouring windows share."""
    version: float | None = None
    """2.0 or 1.1; unset: 2.0 where its files are there."""

    name: ClassVar[str] = "bert_qa"
    metric: ClassVar[str] = "validation loss"
    steps: ClassVar[dict[Size, int]] = {"smoke": 12, "cpu": 150, "paper": 21_720}
    small: ClassVar[dict[str, Any]] = {
        "batch_size": 8, "encoder": "smallest", "length": 48, "stride": 8, "vocabulary": 200,
    }  # fmt: skip
    # BERT-base on SQuAD 2.0 for two epochs, as the README of IST-DASLab/EFCP on GitHub has it; batch and length are
    # those of the model cards of M-FAC. An epoch is counted by the 130,319 questions; there are a few more windows.
    published: ClassVar[dict[str, Any]] = {
        "batch_size": 12, "encoder": "base", "length": 384, "stride": 128, "version": 2.0, "dropout": 0.1,
        "vocabulary": 30_522,
    }  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.stride < self.length <= POSITIONS:
            raise ValueError(f"stride < length <= {POSITIONS} must hold, got {self.stride} and {self.length}")
        if self.version not in (None, *VERSIONS):
            raise ValueError(f"version must be 2.0 or 1.1, got {self.version}")

    def model_of(self, shape: tuple[int, int, int], pieces: WordPieces) -> SpanModel:
        return SpanModel(Bert(shape, pieces, self.dropout))

    def texts(self) -> Iterator[str]:
        for question in self._questions[0]:
            yield from (question.context, question.text)

    def evaluate(self, model: nn.Module, everything: bool = False) -> float:
        """Return the loss on the first 256 windows of the validation set."""
        windows = self._validation[1]
        count = len(windows.tokens) if everything else min(EVAL_WINDOWS, len(windows.tokens))
        total = 0.0
        with evaluating(model):
            for part in torch.arange(count).split(EVAL_WINDOWS):
                batch = trimmed(windows.tokens[part], self.pieces.padding), windows.targets[part]
                total += len(part) * float(self.loss(model, batch))
        return total / count

    def quality(self, model: nn.Module) -> dict[str, float]:
        questions, windows = self._validation
        return marks(questions, self.answers(model, questions, windows))

    def answers(self, model: nn.Module, questions: list[Question], windows: Windows) -> list[str]:
        logits: list[Tensor] = []
        with evaluating(model):
            for part in windows.tokens.split(EVAL_WINDOWS):
                logits += model(trimmed(part, self.pieces.padding)).float().unbind()
        return best_answers(questions, windows.places, logits)

    @cached_property
    def _questions(self) -> tuple[list[Question], list[Question]]:
        train, validation = (read_squad(path) for path in self._files)
        return train, validation

    @cached_property
    def train(self) -> Batch:
        windows = self._windows(self._questions[0])
        return windows.tokens, windows.targets

    @cached_property
    def _validation(self) -> tuple[list[Question], Windows]:
        return self._questions[1], self._windows(self._questions[1])

    def _windows(self, questions: list[Question]) -> Windows:
        return make_windows(questions, self.pieces, self.length, self.stride)

    @property
    def _files(self) -> tuple[Path, Path]:
        """The files of the version asked for, or of the first one that is complete."""
        candidates = (self.data_dir / "squad", self.data_dir)
        wanted = VERSIONS if self.version is None else (self.version,)
        names = [(f"train-v{version:.1f}.json", f"dev-v{version:.1f}.json") for version in wanted]
        for train, validation in names:
            for folder in candidates:
                if (folder / train).is_file() and (folder / validation).is_file():
                    return folder / train, folder / validation
        folder = find_folder(candidates, names[0], ORIGIN, HINT)  # which tells what is missing
        return folder / names[0][0], folder / names[0][1]
