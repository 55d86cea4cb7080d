"""Question answering: an encoder of BERT says where in a text the answer stands.

Any file in the format of SQuAD will do, of version 1.1 or 2.0. Pieces come from a ``vocab.txt`` of BERT where there is
one in ``<data-dir>/bert``, else from the words of the training file. Without ``checkpoint`` the weights are new, and
what the model learns in a short run is little.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from benchmarks.workloads.base import (
    Batch,
    Classification,
    Size,
    evaluating,
    find_folder,
    seeded,
    shuffled_indices,
)
from benchmarks.workloads.bert import POSITIONS, SHAPES, Bert, EncoderName, load_checkpoint, new_head, trimmed
from benchmarks.workloads.squad import Question, Windows, best_answers, make_windows, marks, read_squad
from benchmarks.workloads.wordpieces import WordPieces, find_pieces

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
class BertQA(Classification):
    """Cross-entropy of the positions where the answer begins and ends, mean of both."""

    data_dir: Path
    batch_size: int = 16
    encoder: EncoderName = "tiny"
    """Size of the encoder."""
    length: int = 192
    """Pieces of a window."""
    stride: int = 64
    """Pieces of a text that neighbouring windows share."""
    version: float | None = None
    """2.0 or 1.1; unset: 2.0 where its files are there."""
    vocabulary: int = 8000
    """Pieces that are made where there is no vocabulary of BERT."""
    dropout: float = 0.0
    """Share of the hidden states that is dropped."""
    checkpoint: str | None = None
    """File with the weights of a published encoder."""

    name: ClassVar[str] = "bert_qa"
    metric: ClassVar[str] = "validation loss"
    steps: ClassVar[dict[Size, int]] = {"smoke": 12, "cpu": 150, "paper": 21_720}

    def __post_init__(self) -> None:
        if self.encoder not in SHAPES:
            raise ValueError(f"encoder must be one of {', '.join(SHAPES)}, got {self.encoder!r}")
        if not 0 <= self.stride < self.length <= POSITIONS:
            raise ValueError(f"stride < length <= {POSITIONS} must hold, got {self.stride} and {self.length}")
        if self.version not in (None, *VERSIONS):
            raise ValueError(f"version must be 2.0 or 1.1, got {self.version}")

    @classmethod
    def smoke(cls, data_dir: Path) -> "BertQA":
        return cls(data_dir, batch_size=8, encoder="smallest", length=48, stride=8, vocabulary=200)

    @classmethod
    def paper(cls, data_dir: Path) -> "BertQA":
        """Return BERT-base on SQuAD 2.0 for two epochs, as the README of IST-DASLab/EFCP on GitHub has it.

        Batch and length are those of the model cards of M-FAC. An epoch is counted by the 130,319 questions; there are
        a few more windows.
        """
        weights = data_dir / "bert" / "pytorch_model.bin"
        checkpoint = str(weights) if weights.is_file() else None
        return cls(
            data_dir, 12, "base", length=384, stride=128, version=2.0, dropout=0.1, checkpoint=checkpoint,
            vocabulary=30_522,
        )  # fmt: skip

    @property
    def examples(self) -> int:
        """Training windows: an epoch takes all of them once."""
        return len(self._train[1].tokens)

    def build_model(self, seed: int) -> nn.Module:
        """Return the encoder and its head with weights from ``seed``; the encoder's are the checkpoint's, if any."""
        with seeded(seed):
            model = SpanModel(Bert(SHAPES[self.encoder], self._pieces, self.dropout))
        if self.checkpoint is not None:
            load_checkpoint(model.encoder, Path(str(self.checkpoint)))
        return model

    def batches(self, seed: int) -> Iterator[Batch]:
        windows = self._train[1]
        generator = torch.Generator().manual_seed(seed)
        for index in shuffled_indices(len(windows.tokens), self.batch_size, generator):
            yield trimmed(windows.tokens[index], self._pieces.padding), windows.targets[index]

    def evaluate(self, model: nn.Module, everything: bool = False) -> float:
        """Return the loss on the first 256 windows of the validation set."""
        windows = self._validation[1]
        count = len(windows.tokens) if everything else min(EVAL_WINDOWS, len(windows.tokens))
        total = 0.0
        with evaluating(model):
            for part in torch.arange(count).split(EVAL_WINDOWS):
                batch = trimmed(windows.tokens[part], self._pieces.padding), windows.targets[part]
                total += len(part) * float(self.loss(model, batch))
        return total / count

    def quality(self, model: nn.Module) -> dict[str, float]:
        questions, windows = self._validation
        return marks(questions, self.answers(model, questions, windows))

    def answers(self, model: nn.Module, questions: list[Question], windows: Windows) -> list[str]:
        logits: list[Tensor] = []
        with evaluating(model):
            for part in windows.tokens.split(EVAL_WINDOWS):
                logits += model(trimmed(part, self._pieces.padding)).float().unbind()
        return best_answers(questions, windows.places, logits)

    @cached_property
    def _pieces(self) -> WordPieces:
        questions = self._questions[0]
        texts = dict.fromkeys(text for question in questions for text in (question.context, question.text))
        return find_pieces(self.data_dir, texts, self.vocabulary)

    @cached_property
    def _questions(self) -> tuple[list[Question], list[Question]]:
        train, validation = (read_squad(path) for path in self._files)
        return train, validation

    @cached_property
    def _train(self) -> tuple[list[Question], Windows]:
        return self._windows(self._questions[0])

    @cached_property
    def _validation(self) -> tuple[list[Question], Windows]:
        return self._windows(self._questions[1])

    def _windows(self, questions: list[Question]) -> tuple[list[Question], Windows]:
        return questions, make_windows(questions, self._pieces, self.length, self.stride)

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
