"""Extractive question answering with a BERT encoder, which finds the answer to a question in a text.

Files have the format of SQuAD, version 1.1 or 2.0. A text that is longer than a window is read in several overlapping
windows. The targets are the positions of the first and the last piece of the answer. If a window does not contain the
whole answer, or if there is none, both are 0, the position of the ``[CLS]`` token.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.workloads.base import Batch, Classification, Size, find_folder, optional_package
from benchmarks.workloads.bert import PART, POSITIONS, Encoding, rows_of

LONGEST_ANSWER = 30  # maximum number of pieces in an answer of the model
VERSIONS = (2.0, 1.1)
EVAL_WINDOWS = 256  # number of held-out windows that `BertQA.evaluate` uses by default


class Question(NamedTuple):
    context: str
    text: str
    answers: tuple[str, ...] = ()
    """Correct answers. There are none if the text does not contain the answer."""
    start: int = 0  # position of the first answer in the text


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
    if entry.get("is_impossible", False):
        return Question(context, entry["question"])
    if not entry["answers"]:
        raise ValueError(f"question {entry['id']} has no answer")
    answers = tuple(answer["text"] for answer in entry["answers"])
    if answers[0] not in context:
        raise ValueError(f"answer {answers[0]!r} does not stand in its text")
    return Question(context, entry["question"], answers, entry["answers"][0]["answer_start"])


# ---------------------------------------------------------------------- windows
class Windows(NamedTuple):
    inputs: Tensor
    targets: Tensor  # positions of the first and the last piece of the answer `[count, 2]`
    questions: Tensor  # index of the question of each window
    places: Tensor
    """Start and end in the text of every piece ``[count, length, 2]``. Outside the text, both are 0."""


def make_windows(questions: Sequence[Question], encoded: Iterable[Any]) -> Windows:
    """Return the windows of questions and texts, which a tokenizer encodes ``PART`` at a time."""
    parts = []
    for number, part in enumerate(encoded):
        owners = part["overflow_to_sample_mapping"] + number * PART
        targets = [_target(part, window, questions[owner]) for window, owner in enumerate(owners.tolist())]
        places = part["offset_mapping"] * part["token_type_ids"][..., None]
        parts.append((rows_of(part), torch.tensor(targets), owners, places.int()))
    return Windows(*map(torch.cat, zip(*parts, strict=True)))


def _target(encoded: Any, window: int, question: Question) -> tuple[int, int]:
    if not question.answers:
        return 0, 0
    answer = question.answers[0]
    first = question.start + len(answer) - len(answer.lstrip())
    ends = [encoded.char_to_token(window, place, 1) for place in (first, question.start + len(answer.rstrip()) - 1)]
    return (0, 0) if None in ends else (ends[0], ends[1])


# ---------------------------------------------------------------------- answers
def best_answers(questions: Sequence[Question], windows: Windows, logits: Sequence[Tensor]) -> list[str]:
    """Return the best spans over all windows, from logits of starts and ends ``[2, length]`` of each window."""
    may_be_empty = any(not question.answers for question in questions)
    best: list[tuple[float, str]] = [(-float("inf"), "") for _ in questions]
    nothing = [float("inf") for _ in questions]
    for number, places, pair in zip(windows.questions.tolist(), windows.places, logits, strict=True):
        nothing[number] = min(nothing[number], float(pair[:, 0].sum()))
        score, first, last = _best_span(pair.masked_fill(places[: pair.shape[1], 1] == 0, -float("inf")))
        if score > best[number][0]:
            best[number] = score, questions[number].context[places[first, 0] : places[last, 1]]
    return ["" if may_be_empty and none > score else text for (score, text), none in zip(best, nothing, strict=True)]


def _best_span(logits: Tensor) -> tuple[float, int, int]:
    """Return the largest sum of both logits over valid spans, with the first and the last piece of the span."""
    sums = logits[0][:, None] + logits[1][None, :]
    allowed = torch.ones_like(sums, dtype=torch.bool).triu().tril(LONGEST_ANSWER - 1)
    where = int(sums.masked_fill(~allowed, -float("inf")).argmax())
    first, last = divmod(where, len(sums))
    return float(sums[first, last]), first, last


def marks(questions: Sequence[Question], answers: Sequence[str]) -> dict[str, float]:
    squad = optional_package("torchmetrics.functional.text", "text").squad
    right = [list(question.answers) or [""] for question in questions]
    found = squad(
        [{"id": str(number), "prediction_text": answer} for number, answer in enumerate(answers)],
        [{"id": str(n), "answers": {"text": texts, "answer_start": [0] * len(texts)}} for n, texts in enumerate(right)],
    )
    return {"exact match, %": float(found["exact_match"]), "F1, %": float(found["f1"])}


@dataclass(frozen=True)
class BertQA(Encoding, Classification):
    """Mean cross-entropy of the start and the end of the answer."""

    stride: int = 64  # number of pieces by which neighboring windows overlap
    version: float = 2.0  # 2.0 or 1.1

    name: ClassVar[str] = "bert_qa"
    head: ClassVar[str] = "BertForQuestionAnswering"
    labels: ClassVar[int] = 2
    metric: ClassVar[str] = "validation loss"
    steps: ClassVar[dict[Size, int]] = {"smoke": 12, "cpu": 150, "paper": 21_720}
    small: ClassVar[dict[str, Any]] = {
        "batch_size": 8, "encoder": "smallest", "length": 48, "stride": 8, "vocabulary": 200,
    }  # fmt: skip
    # BERT-base on SQuAD 2.0 for two epochs, as in the README of IST-DASLab/EFCP on GitHub. Batch size and length are
    # from the model cards of M-FAC. An epoch counts the 130,319 questions. The number of windows is slightly larger.
    published: ClassVar[dict[str, Any]] = {
        "batch_size": 12, "encoder": "base", "length": 384, "stride": 128, "dropout": 0.1, "vocabulary": 30_522,
    }  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.stride < self.length <= POSITIONS:
            raise ValueError(f"stride < length <= {POSITIONS} must hold, got {self.stride} and {self.length}")
        if self.version not in VERSIONS:
            raise ValueError(f"version must be 2.0 or 1.1, got {self.version}")

    def texts(self) -> Iterator[str]:
        for question in self._questions[0]:
            yield from (question.context, question.text)

    def logits(self, found: tuple[Tensor, ...], mask: Tensor) -> Tensor:
        """Return the logits ``[batch, 2, length]`` of the start and the end of the answer, which is not in padding."""
        ends = torch.stack(found, 1)
        return ends.masked_fill(mask[:, None] == 0, torch.finfo(ends.dtype).min)

    def evaluate(self, model: nn.Module, everything: bool = False) -> float:
        """Return the loss on the first 256 windows of the validation set, or on all windows."""
        inputs, targets = self._validation[:2]
        count = len(inputs) if everything else EVAL_WINDOWS
        logits = self.answers(model, inputs[:count])
        losses = [self.criterion(pair, target) for pair, target in zip(logits, targets[:count], strict=True)]
        return float(torch.stack(losses).mean())

    def quality(self, model: nn.Module) -> dict[str, float]:
        logits = self.answers(model, self._validation.inputs)
        return marks(self._questions[1], best_answers(self._questions[1], self._validation, logits))

    @cached_property
    def _questions(self) -> tuple[list[Question], list[Question]]:
        train, validation = f"train-v{self.version:.1f}.json", f"dev-v{self.version:.1f}.json"
        folder = find_folder((self.data_dir / "squad", self.data_dir), (train, validation), self.name)
        return read_squad(folder / train), read_squad(folder / validation)

    @cached_property
    def train(self) -> Batch:
        windows = self._windows(self._questions[0])
        return windows.inputs, windows.targets

    @cached_property
    def _validation(self) -> Windows:
        return self._windows(self._questions[1])

    def _windows(self, questions: list[Question]) -> Windows:
        asked, contexts = [question.text for question in questions], [question.context for question in questions]
        needed = self.stride + 4 + max(map(len, self.tokenizer(asked, add_special_tokens=False)["input_ids"]))
        if self.length < needed:
            raise ValueError(f"length must be at least {needed} for the longest question, got {self.length}")
        options = {"return_overflowing_tokens": True, "return_offsets_mapping": True, "stride": self.stride}
        return make_windows(questions, self.encoded(asked, contexts, truncation="only_second", **options))
