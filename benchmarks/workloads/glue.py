"""GLUE: classifying sentences and pairs of them by an encoder of BERT (Wang et al., "GLUE", 2019).

The files are those of gluebenchmark.com, tab-separated, without quoting, in folders of their own such as
``<data-dir>/glue/MNLI``. Columns are found by their heads; only CoLA has none. Held-out data is in the file ``dev``.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from benchmarks.workloads.base import find_folder
from benchmarks.workloads.wordpieces import WordPieces

ORIGIN = "https://gluebenchmark.com/tasks"
TaskName = Literal["mnli", "qqp", "mrpc", "stsb", "sst2", "qnli", "cola", "rte", "wnli"]


class Sentences(NamedTuple):
    """What one file holds."""

    texts: list[tuple[str, ...]]
    """One or two sentences each."""
    labels: list[float]
    """Numbers of classes, or scores."""


@dataclass(frozen=True)
class Task:
    """Where a task lies and how it is marked."""

    folder: str
    texts: tuple[str, ...]
    """Heads of the columns of the sentences."""
    label: str = "label"
    """Head of the column of the class or the score."""
    classes: tuple[str, ...] = ("0", "1")
    """Names of the classes in the file; none for scores."""
    validation: tuple[str, ...] = ("dev.tsv",)
    """Files of held-out data; the first one counts."""
    heads: tuple[str, ...] = ()
    """Heads of a file that has none."""
    gaps: bool = False
    """Whether the published file has lines that lack columns, which are left out."""

    @property
    def outputs(self) -> int:
        """Outputs of the model: one for a score."""
        return len(self.classes) or 1


_PAIR = ("sentence1", "sentence2")
_ENTAILED = ("entailment", "not_entailment")
TASKS: dict[TaskName, Task] = {
    "mnli": Task(
        "MNLI",
        _PAIR,
        "gold_label",
        ("entailment", "neutral", "contradiction"),
        ("dev_matched.tsv", "dev_mismatched.tsv"),
    ),
    "qqp": Task("QQP", ("question1", "question2"), "is_duplicate", gaps=True),
    "mrpc": Task("MRPC", ("#1 String", "#2 String"), "Quality"),
    "stsb": Task("STS-B", _PAIR, "score", ()),
    "sst2": Task("SST-2", ("sentence",)),
    "qnli": Task("QNLI", ("question", "sentence"), classes=_ENTAILED),
    "cola": Task("CoLA", ("sentence",), heads=("source", "label", "mark", "sentence")),
    "rte": Task("RTE", _PAIR, classes=_ENTAILED),
    "wnli": Task("WNLI", _PAIR),
}


def find_task(name: str) -> Task:
    for known, task in TASKS.items():
        if known == name:
            return task
    raise ValueError(f"task must be one of {', '.join(TASKS)}, got {name!r}")


def find_files(data_dir: Path, task: Task) -> tuple[Path, list[Path]]:
    names = ("train.tsv", *task.validation)
    hint = f"Put {', '.join(names)} into <data-dir>/glue/{task.folder}."
    folder = find_folder((data_dir / "glue" / task.folder, data_dir / task.folder), names, ORIGIN, hint)
    return folder / names[0], [folder / name for name in task.validation]


def read_glue(path: Path, task: Task) -> Sentences:
    try:
        lines = path.read_text(encoding="utf-8-sig").removesuffix("\n").split("\n")
    except UnicodeDecodeError as err:
        raise ValueError(f"{path} must be text in UTF-8: {err}") from err
    rows = [line.rstrip("\r").split("\t") for line in lines]
    heads = list(task.heads) or rows[0]
    if missing := [name for name in (*task.texts, task.label) if name not in heads]:
        raise ValueError(f"{path} must have the columns {', '.join((*task.texts, task.label))}, it lacks {missing[0]}")
    columns = [heads.index(name) for name in task.texts]
    found = Sentences([], [])
    for number, row in enumerate(rows if task.heads else rows[1:], 1 if task.heads else 2):
        if len(row) < len(heads):
            if task.gaps:
                continue
            raise ValueError(f"{path}, line {number}: must have {len(heads)} columns, got {len(row)}")
        found.texts.append(tuple(row[column] for column in columns))
        found.labels.append(_label(row[heads.index(task.label)], task, f"{path}, line {number}"))
    if not found.texts:
        raise ValueError(f"{path} must hold examples, it has none")
    return found


def _label(text: str, task: Task, where: str) -> float:
    if task.classes:
        if text not in task.classes:
            raise ValueError(f"{where}: {task.label} must be one of {', '.join(task.classes)}, got {text!r}")
        return task.classes.index(text)
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{where}: {task.label} must be a number, got {text!r}") from None


def encode_sentences(texts: Iterable[tuple[str, ...]], pieces: WordPieces, length: int) -> Tensor:
    """Turn one or two sentences each into what the encoder reads; of too long ones the longer is cut at its end."""
    rows = []
    for sentences in texts:
        parts = [[piece.number for piece in pieces.encode(sentence)] for sentence in sentences]
        while sum(map(len, parts)) > length - 1 - len(parts):
            max(parts, key=len).pop()
        row = [pieces.begin, *(number for part in parts for number in (*part, pieces.separator))]
        rows.append(row + [pieces.padding] * (length - len(row)))
    return torch.tensor(rows, dtype=torch.int32)


# ---------------------------------------------------------------------- marks
Marks = Callable[[Tensor, Tensor], dict[str, float]]


def mark(name: str, task: Task) -> Marks:
    if not task.classes:
        return correlations
    further: dict[str, tuple[str, Callable[[Tensor, Tensor], float]]] = {
        "qqp": ("F1", binary_f1),
        "mrpc": ("F1", binary_f1),
        "cola": ("Matthews correlation", matthews),
    }

    def marks(found: Tensor, right: Tensor) -> dict[str, float]:
        first = {"accuracy": float((found == right).float().mean())}
        return first if name not in further else {**first, further[name][0]: further[name][1](found, right)}

    return marks


def correlations(found: Tensor, right: Tensor) -> dict[str, float]:
    """Return Pearson's and Spearman's correlation, 0 where one side is constant."""
    stats = import_module("scipy.stats")
    pairs = {"Pearson correlation": stats.pearsonr, "Spearman correlation": stats.spearmanr}
    if min(len(found.unique()), len(right.unique())) < 2:
        return dict.fromkeys(pairs, 0.0)
    return {name: float(test(found.double().numpy(), right.double().numpy()).statistic) for name, test in pairs.items()}


def binary_f1(found: Tensor, right: Tensor) -> float:
    """Return the harmonic mean of precision and recall of class 1, 0 where it is never right."""
    hits, given, wanted = ((found * right).sum(), found.sum(), right.sum())
    return float(2 * hits / (given + wanted).clamp(min=1))


def matthews(found: Tensor, right: Tensor) -> float:
    """Return the correlation of two classes that are 0 or 1, 0 where one side is constant."""
    one, other = found.double() - found.double().mean(), right.double() - right.double().mean()
    scale = float(one.norm() * other.norm())
    return float(one @ other) / scale if scale else 0.0


def labels_tensor(labels: Sequence[float], task: Task) -> Tensor:
    return torch.tensor(labels).long() if task.classes else torch.tensor(labels).float()[:, None]
