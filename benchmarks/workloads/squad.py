"""Questions on texts in the format of SQuAD, versions 1.1 and 2.0: reading, windows of pieces, answers and their marks.

A text that is longer than a window is read in several, which overlap. The answer is given by the positions of its first
and its last piece; where a window does not hold all of it, or there is none, both are 0, the mark of the beginning.
"""

import json
import re
import string
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.workloads.wordpieces import Piece, WordPieces

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
    """Return the first and the last piece that the first answer touches."""
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
    """Return the text between the likeliest first and last piece, over all windows of each question."""
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
    """Return 1 when two answers have the same words in the same order, else 0."""
    return float(normalise(answer) == normalise(right))


def f1(answer: str, right: str) -> float:
    """Return the harmonic mean of precision and recall of the words, each counted as often as it occurs."""
    given, wanted = normalise(answer).split(), normalise(right).split()
    if not given or not wanted:
        return float(given == wanted)
    shared = sum((Counter(given) & Counter(wanted)).values())
    return 2 * shared / (len(given) + len(wanted))


def marks(questions: Sequence[Question], answers: Sequence[str]) -> dict[str, float]:
    """Return both marks, each question having that of the right answer which is nearest."""
    kinds: dict[str, Callable[[str, str], float]] = {"exact match, %": exact_match, "F1, %": f1}
    return {
        name: 100 * sum(_nearest(mark, *pair) for pair in zip(questions, answers, strict=True)) / len(questions)
        for name, mark in kinds.items()
    }


def _nearest(mark: Callable[[str, str], float], question: Question, answer: str) -> float:
    right = [text for text, _ in question.answers if normalise(text)] or [""]
    return max(mark(answer, text) for text in right)
