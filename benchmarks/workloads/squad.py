"""Extractive question answering with a BERT encoder, which finds the answer to a question in a text.

Files have the format of SQuAD, version 1.1 or 2.0. A text that is longer than a window is read in several overlapping
windows. The targets are the positions of the first and the last piece of the answer. If a window does not contain the
whole answer, or if there is none, both are 0, the position of the ``[CLS]`` token.
"""

import json
import re
import string
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.workloads.base import Batch, Classification, Size, evaluating, find_folder
from benchmarks.workloads.bert import POSITIONS, Bert, Encoding, Piece, WordPieces, new_head, trimmed

LONGEST_QUESTION = 64
"""Maximum number of pieces of a question. Longer questions are truncated."""
LONGEST_ANSWER = 30
"""Maximum number of pieces in an answer of the model."""


class Answer(NamedTuple):
    """A part of the text, and its start."""

    text: str
    start: int


@dataclass(frozen=True)
class Question:
    """A question about a text."""

    name: str
    context: str
    text: str
    answers: tuple[Answer, ...]
    """Correct answers. There are none if the text does not contain the answer."""


def read_squad(path: Path) -> list[Question]:
    try:
        articles = json.loads(path.read_text(encoding="utf-8"))["data"]
        return [
            _question(paragraph["context"], entry)
            for article in articles
            for paragraph in article["paragraphs"]
            for entry in paragraph["qas"]
        ]
    except KeyError as err:
        raise ValueError(f"{path} must be in the format of SQuAD: an entry lacks {err}") from err
    except (TypeError, ValueError) as err:
        raise ValueError(f"{path} must be in the format of SQuAD: {err}") from err


def _question(context: str, entry: dict[str, Any]) -> Question:
    impossible = bool(entry.get("is_impossible", False))
    answers = [] if impossible else [_answer(context, found) for found in entry["answers"]]
    if not answers and not impossible:
        raise ValueError(f"question {entry['id']} has no answer")
    return Question(entry["id"], context, entry["question"], tuple(answers))


def _answer(context: str, found: dict[str, Any]) -> Answer:
    """Return an answer. If it is not at its given position, use the nearest position in the text."""
    text, start = found["text"], found["answer_start"]
    if context[start : start + len(text)] == text:
        return Answer(text, start)
    places = [match.start() for match in re.finditer(re.escape(text), context)]
    if not places:
        raise ValueError(f"answer {text!r} does not stand in its text")
    return Answer(text, min(places, key=lambda place: abs(place - start)))


# ---------------------------------------------------------------------- windows
class Place(NamedTuple):
    """The part of a text that a window shows."""

    question: int
    """Index of the question."""
    pieces: Sequence[Piece]
    """All pieces of the text."""
    begin: int
    """Index of the first piece that is shown."""
    shown: int
    """Number of pieces that are shown."""
    offset: int
    """Position of the first piece in the window."""


@dataclass(frozen=True)
class Windows:
    """The inputs and targets of the model."""

    tokens: Tensor
    """``[count, length]``, as int32."""
    targets: Tensor
    """Positions of the first and the last piece of the answer ``[count, 2]``."""
    places: list[Place]


def make_windows(questions: Sequence[Question], pieces: WordPieces, length: int, stride: int) -> Windows:
    if length < LONGEST_QUESTION + 4 and length < max(len(pieces.encode(q.text)) for q in questions) + 4:
        raise ValueError(f"length must leave room for a text beside the question, got {length}")
    texts: dict[str, list[Piece]] = {}
    rows, targets, places = [], [], []
    for number, question in enumerate(questions):
        asked = [piece.number for piece in pieces.encode(question.text)[:LONGEST_QUESTION]]
        if question.context not in texts:
            texts[question.context] = pieces.encode(question.context)
        text = texts[question.context]
        span = answer_span(question, text)
        head = [pieces.begin, *asked, pieces.separator]
        for begin, count in _parts(len(text), length - len(head) - 1, stride):
            row = [*head, *(piece.number for piece in text[begin : begin + count]), pieces.separator]
            rows.append(row + [pieces.padding] * (length - len(row)))
            place = Place(number, text, begin, count, len(head))
            targets.append(_target(span, place))
            places.append(place)
    return Windows(torch.tensor(rows, dtype=torch.int32), torch.tensor(targets), places)


def _parts(count: int, room: int, stride: int) -> Iterator[tuple[int, int]]:
    """Yield the start and the length of overlapping parts that cover ``count`` pieces."""
    begin = 0
    while True:
        yield begin, min(room, count - begin)
        if begin + room >= count:
            return
        begin += max(1, room - stride)


def answer_span(question: Question, text: Sequence[Piece]) -> tuple[int, int] | None:
    if not question.answers:
        return None
    answer, start = question.answers[0]
    first = bisect_right(text, start, key=lambda piece: piece.stop)
    last = bisect_left(text, start + len(answer), key=lambda piece: piece.start) - 1
    return (first, last) if first <= last else None


def _target(span: tuple[int, int] | None, place: Place) -> tuple[int, int]:
    if span is None or span[0] < place.begin or span[1] >= place.begin + place.shown:
        return 0, 0
    shift = place.offset - place.begin
    return span[0] + shift, span[1] + shift


# ---------------------------------------------------------------------- answers
def best_answers(questions: Sequence[Question], places: Sequence[Place], logits: Sequence[Tensor]) -> list[str]:
    may_be_empty = any(not question.answers for question in questions)
    best: list[tuple[float, str]] = [(-float("inf"), "") for _ in questions]
    nothing = [float("inf") for _ in questions]
    for place, pair in zip(places, logits, strict=True):
        number = place.question
        nothing[number] = min(nothing[number], float(pair[:, 0].sum()))
        score, first, last = _best_span(pair[:, place.offset : place.offset + place.shown])
        if score > best[number][0]:
            pieces = place.pieces[place.begin : place.begin + place.shown]
            best[number] = score, questions[number].context[pieces[first].start : pieces[last].stop]
    return ["" if may_be_empty and none > score else text for (score, text), none in zip(best, nothing, strict=True)]


def _best_span(logits: Tensor) -> tuple[float, int, int]:
    """Return the largest sum of both logits over valid spans, with the first and the last piece of the span."""
    count = logits.shape[1]
    if not count:
        return -float("inf"), 0, 0
    sums = logits[0][:, None] + logits[1][None, :]
    allowed = torch.ones(count, count, dtype=torch.bool).triu().tril(LONGEST_ANSWER - 1)
    where = int(sums.masked_fill(~allowed, -float("inf")).argmax())
    first, last = divmod(where, count)
    return float(sums[first, last]), first, last


# ---------------------------------------------------------------------- metrics
def normalise(text: str) -> str:
    """Normalize an answer: convert it to lower case, and remove punctuation, articles and repeated spaces."""
    plain = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())


def exact_match(answer: str, right: str) -> float:
    return float(normalise(answer) == normalise(right))


def f1(answer: str, right: str) -> float:
    given, wanted = normalise(answer).split(), normalise(right).split()
    if not given or not wanted:
        return float(given == wanted)
    shared = sum((Counter(given) & Counter(wanted)).values())
    return 2 * shared / (len(given) + len(wanted))


def marks(questions: Sequence[Question], answers: Sequence[str]) -> dict[str, float]:
    kinds: dict[str, Callable[[str, str], float]] = {"exact match, %": exact_match, "F1, %": f1}
    return {
        name: 100 * sum(_nearest(mark, *pair) for pair in zip(questions, answers, strict=True)) / len(questions)
        for name, mark in kinds.items()
    }


def _nearest(mark: Callable[[str, str], float], question: Question, answer: str) -> float:
    right = [text for text, _ in question.answers if normalise(text)] or [""]
    return max(mark(answer, text) for text in right)


ORIGIN = "https://rajpurkar.github.io/SQuAD-explorer/"
HINT = "Put train-v2.0.json and dev-v2.0.json, or those of v1.1, into <data-dir>/squad."
VERSIONS = (2.0, 1.1)
EVAL_WINDOWS = 256


class SpanModel(nn.Module):
    """An encoder with a head that returns two logits per position."""

    def __init__(self, encoder: Bert) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = new_head(encoder.width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits ``[batch, 2, length]`` of the start and the end of the answer."""
        logits: Tensor = self.head(self.encoder(tokens)).mT
        return logits.masked_fill((tokens == self.encoder.padding)[:, None], torch.finfo(logits.dtype).min)


@dataclass(frozen=True)
class BertQA(Encoding, Classification):
    """Mean cross-entropy of the start and the end of the answer."""

    stride: int = 64
    """Number of pieces by which neighboring windows overlap."""
    version: float | None = None
    """2.0 or 1.1. The default is 2.0 if its files exist."""

    name: ClassVar[str] = "bert_qa"
    metric: ClassVar[str] = "validation loss"
    steps: ClassVar[dict[Size, int]] = {"smoke": 12, "cpu": 150, "paper": 21_720}
    small: ClassVar[dict[str, Any]] = {
        "batch_size": 8, "encoder": "smallest", "length": 48, "stride": 8, "vocabulary": 200,
    }  # fmt: skip
    # BERT-base on SQuAD 2.0 for two epochs, as in the README of IST-DASLab/EFCP on GitHub. Batch size and length are
    # from the model cards of M-FAC. An epoch counts the 130,319 questions. The number of windows is slightly larger.
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
        """Return the loss on the first 256 windows of the validation set, or on all windows."""
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
        """The files of the requested version, or of the first version that is complete."""
        candidates = (self.data_dir / "squad", self.data_dir)
        wanted = VERSIONS if self.version is None else (self.version,)
        pairs = [(f"train-v{version:.1f}.json", f"dev-v{version:.1f}.json") for version in wanted]
        whole = [pair for pair in pairs if any(all((at / name).is_file() for name in pair) for at in candidates)]
        train, validation = (whole or pairs)[0]
        folder = find_folder(candidates, (train, validation), ORIGIN, HINT)  # reports missing files
        return folder / train, folder / validation
