"""Question answering: an encoder of BERT says where in a text the answer stands.

Any file in the format of SQuAD will do, of version 1.1 or 2.0. A text that is longer than a window is read in several,
which overlap. The answer is given by the positions of its first and its last piece; where a window does not hold all of
it, or there is none, both are 0, the mark of the beginning.
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
"""Pieces of a question; more are cut off."""
LONGEST_ANSWER = 30
"""Pieces that an answer of the model may have."""


class Answer(NamedTuple):
    """Words of the text, and where they start in it."""

    text: str
    start: int


@dataclass(frozen=True)
class Question:
    """A question on a text."""

    name: str
    context: str
    text: str
    answers: tuple[Answer, ...]
    """Right answers; none where the text does not tell."""


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
    """Return an answer; where it does not stand at its place, at the nearest place where it does."""
    text, start = found["text"], found["answer_start"]
    if context[start : start + len(text)] == text:
        return Answer(text, start)
    places = [match.start() for match in re.finditer(re.escape(text), context)]
    if not places:
        raise ValueError(f"answer {text!r} does not stand in its text")
    return Answer(text, min(places, key=lambda place: abs(place - start)))


# ---------------------------------------------------------------------- windows
class Place(NamedTuple):
    """What a window shows of a text."""

    question: int
    """Number of the question."""
    pieces: Sequence[Piece]
    """All pieces of the text."""
    begin: int
    """The first of them that is shown."""
    shown: int
    """How many are."""
    offset: int
    """Position of the first one in the window."""


@dataclass(frozen=True)
class Windows:
    """What the model reads."""

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
    """Yield begin and length of overlapping parts that cover ``count`` pieces."""
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
    """Return the largest sum of both logits, and where: the last piece not before the first, nor too far behind."""
    count = logits.shape[1]
    if not count:
        return -float("inf"), 0, 0
    sums = logits[0][:, None] + logits[1][None, :]
    allowed = torch.ones(count, count, dtype=torch.bool).triu().tril(LONGEST_ANSWER - 1)
    where = int(sums.masked_fill(~allowed, -float("inf")).argmax())
    first, last = divmod(where, count)
    return float(sums[first, last]), first, last


# ---------------------------------------------------------------------- marks
def normalise(text: str) -> str:
    """Return what of an answer counts: small letters, no punctuation marks, no articles, single blanks."""
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
        pairs = [(f"train-v{version:.1f}.json", f"dev-v{version:.1f}.json") for version in wanted]
        whole = [pair for pair in pairs if any(all((at / name).is_file() for name in pair) for at in candidates)]
        train, validation = (whole or pairs)[0]
        folder = find_folder(candidates, (train, validation), ORIGIN, HINT)  # which tells what is missing
        return folder / train, folder / validation
