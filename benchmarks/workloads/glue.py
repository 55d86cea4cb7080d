"""GLUE (Wang et al., 2019): classification of sentences and pairs of sentences with a BERT encoder.

The files are those of gluebenchmark.com: tab-separated, without quoting, in one folder per task such as
``<data-dir>/glue/MNLI``. Columns are found by their headers, which only CoLA lacks. Held-out data is in the file
``dev``. The loss is the cross-entropy of the class or, for STS-B, the squared error of the score.
"""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.workloads.base import Batch, Size, cross_entropy, find_folder
from benchmarks.workloads.bert import POSITIONS, Encoding, rows_of
from benchmarks.workloads.chargpt import read_text
from secondorder import Likelihood


class Sentences(NamedTuple):
    texts: list[tuple[str, ...]]  # one or two sentences per example
    labels: list[float]  # indices of classes, or scores


@dataclass(frozen=True)
class Task:
    folder: str
    texts: tuple[str, ...]  # headers of the columns with sentences
    label: str = "label"  # header of the column with the class or the score
    classes: tuple[str, ...] = ("0", "1")
    """Names of the classes in the file. Tasks with scores have none."""
    validation: tuple[str, ...] = ("dev.tsv",)
    """Files of held-out data. The metric is measured on the first one."""
    heads: tuple[str, ...] = ()  # column names of a file without headers
    gaps: bool = False  # whether the published file has incomplete lines, which are skipped


_PAIR = ("sentence1", "sentence2")
_THREE = ("entailment", "neutral", "contradiction")
_ENTAILED = ("entailment", "not_entailment")
TASKS: dict[str, Task] = {
    "mnli": Task("MNLI", _PAIR, "gold_label", _THREE, ("dev_matched.tsv", "dev_mismatched.tsv")),
    "qqp": Task("QQP", ("question1", "question2"), "is_duplicate", gaps=True),
    "mrpc": Task("MRPC", ("#1 String", "#2 String"), "Quality"),
    "stsb": Task("STS-B", _PAIR, "score", ()),
    "sst2": Task("SST-2", ("sentence",)),
    "qnli": Task("QNLI", ("question", "sentence"), classes=_ENTAILED),
    "cola": Task("CoLA", ("sentence",), heads=("source", "label", "mark", "sentence")),
    "rte": Task("RTE", _PAIR, classes=_ENTAILED),
    "wnli": Task("WNLI", _PAIR),
}


def find_files(data_dir: Path, task: Task) -> tuple[Path, list[Path]]:
    names = ("train.tsv", *task.validation)
    folder = find_folder((data_dir / "glue" / task.folder, data_dir / task.folder), names, "glue")
    return folder / names[0], [folder / name for name in task.validation]


def read_glue(path: Path, task: Task) -> Sentences:
    lines = read_text(path, "utf-8-sig").removesuffix("\n").split("\n")
    rows = csv.DictReader(lines, task.heads or None, delimiter="\t", quoting=csv.QUOTE_NONE)
    heads = rows.fieldnames or ()
    if missing := [name for name in (*task.texts, task.label) if name not in heads]:
        raise ValueError(f"{path} must have the columns {', '.join((*task.texts, task.label))}, it lacks {missing[0]}")
    found = Sentences([], [])
    for row in rows:
        if None not in row.values():
            found.texts.append(tuple(row[name] for name in task.texts))
            found.labels.append(_label(row[task.label], task, f"{path}, line {rows.line_num}"))
        elif not task.gaps:
            raise ValueError(f"{path}, line {rows.line_num}: must have {len(heads)} columns")
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


# ---------------------------------------------------------------------- metrics
def marks(name: str, found: Tensor, right: Tensor) -> dict[str, float]:
    """Return the metrics of a task by name, from predicted classes or scores."""
    if not TASKS[name].classes:
        return correlations(found, right)
    metrics = import_module("sklearn.metrics")
    marked = {"accuracy": float(metrics.accuracy_score(right, found))}
    if name in {"qqp", "mrpc"}:
        marked["F1"] = float(metrics.f1_score(right, found, zero_division=0))
    if name == "cola":
        marked["Matthews correlation"] = float(metrics.matthews_corrcoef(right, found))
    return marked


def correlations(found: Tensor, right: Tensor) -> dict[str, float]:
    """Return Pearson's and Spearman's correlation, which are 0 if one side is constant."""
    stats = import_module("scipy.stats")
    pairs = {"Pearson correlation": stats.pearsonr, "Spearman correlation": stats.spearmanr}
    if min(len(found.unique()), len(right.unique())) < 2:
        return dict.fromkeys(pairs, 0.0)
    return {name: float(test(found.double().numpy(), right.double().numpy()).statistic) for name, test in pairs.items()}


EVAL_SENTENCES = 1024  # number of held-out examples that `Glue.evaluate` uses by default


@dataclass(frozen=True)
class Glue(Encoding):
    """Cross-entropy of the class, or squared error of the score."""

    batch_size: int = 32
    length: int = 64
    """Maximum number of pieces per example. Of longer examples, the longer sentence is truncated."""
    task: str = "mnli"  # mnli, qqp, mrpc, stsb, sst2, qnli, cola, rte or wnli

    name: ClassVar[str] = "glue"
    head: ClassVar[str] = "BertForSequenceClassification"
    steps: ClassVar[dict[Size, int]] = {"smoke": 12, "cpu": 150, "paper": 36_815}
    small: ClassVar[dict[str, Any]] = {"batch_size": 16, "encoder": "smallest", "length": 32, "vocabulary": 200}
    # BERT-base on MNLI for three epochs of its 392,702 pairs, as in the README of IST-DASLab/EFCP on GitHub. The batch
    # size is from the model cards of M-FAC.
    published: ClassVar[dict[str, Any]] = {"encoder": "base", "length": 128, "vocabulary": 30_522, "dropout": 0.1}

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ValueError(f"task must be one of {', '.join(TASKS)}, got {self.task!r}")
        super().__post_init__()
        if not 8 <= self.length <= POSITIONS:
            raise ValueError(f"length must be from 8 to {POSITIONS}, got {self.length}")

    @property
    def metric(self) -> str:
        return "validation accuracy" if self._task.classes else "validation Pearson correlation"

    @property
    def likelihood(self) -> str | Likelihood:
        return "categorical" if self._task.classes else "gaussian"

    @property
    def labels(self) -> int:
        return len(self._task.classes) or 1

    def texts(self) -> Iterator[str]:
        for pair in self._files[0].texts:
            yield from pair

    def logits(self, found: tuple[Tensor, ...], mask: Tensor) -> Tensor:
        return found[0]

    def criterion(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self._task.classes:
            return cross_entropy(outputs, targets)
        return (outputs - targets).square().sum(1).mean()

    def evaluate(self, model: nn.Module, everything: bool = False) -> float:
        """Return the accuracy, or Pearson's correlation, on 1,024 examples of the validation set, or on all."""
        inputs, labels = self._validation[0]
        count = len(labels) if everything else EVAL_SENTENCES
        return next(iter(self._marks(model, inputs[:count], labels[:count]).values()))

    def quality(self, model: nn.Module) -> dict[str, float]:
        files = find_files(self.data_dir, self._task)[1]
        return {
            f"{name}, {file.stem}": value
            for file, data in zip(files, self._validation, strict=True)
            for name, value in self._marks(model, *data).items()
        }

    def _marks(self, model: nn.Module, inputs: Tensor, labels: Tensor) -> dict[str, float]:
        outputs = torch.stack(self.answers(model, inputs))
        found = outputs.argmax(1) if self._task.classes else outputs[:, 0]
        return marks(self.task, found, labels.flatten())

    @property
    def _task(self) -> Task:
        return TASKS[self.task]

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
        sides = [list(side) for side in zip(*sentences.texts, strict=True)]
        labels = torch.tensor(sentences.labels)
        targets = labels.long() if self._task.classes else labels.float()[:, None]
        return torch.cat([rows_of(part) for part in self.encoded(*sides, truncation=True)]), targets
