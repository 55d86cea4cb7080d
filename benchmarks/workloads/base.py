"""What a workload is, and what all of them share: the protocol, data lookup, seeding, shuffling."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import Self

from secondorder import Likelihood

Batch = tuple[Tensor, Tensor]
"""Inputs and targets of one optimizer step."""

Size = Literal["smoke", "cpu", "paper"]
"""``smoke``: a small model and a few steps, seconds on one core. ``cpu``: minutes on two cores. ``paper``: the size and
the length of the published run, for GPUs."""


IGNORED = -100
"""Class of a position without a loss, as ``F.cross_entropy`` and the likelihoods have it by default."""


_NAMED = 8  # missing files that an error names


class DataMissingError(FileNotFoundError):
    """A data file is not where ``--data-dir`` says; the text names it and tells where to get it."""

    def __init__(self, folder: Path, missing: Sequence[str], origin: str, hint: str = "") -> None:
        """Compose the message."""
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        names = ", ".join(missing[:_NAMED]) + more
        super().__init__(f"missing data: {folder} lacks {names}. Get it from {origin}. {hint}".strip())


class Workload(ABC):
    """A model, a loss and a seeded stream of batches. Reading the data waits for the first batch.

    Fields have the values of the size ``cpu``. Unless a workload says otherwise the model takes the inputs, and its
    outputs, logits of classes, are compared with the targets.
    """

    name: ClassVar[str]
    steps: ClassVar[dict[Size, int]]
    """Optimizer steps that a run of each size takes."""
    small: ClassVar[dict[str, Any]] = {}
    """Fields of the size ``smoke`` that are others."""
    published: ClassVar[dict[str, Any]] = {}
    """Fields of the size ``paper`` that are others."""

    @classmethod
    def smoke(cls, data_dir: Path | None = None) -> Self:
        """Return the small version of this workload."""
        make: Any = cls
        workload: Self = make(data_dir, **cls.small)
        return workload

    @classmethod
    def paper(cls, data_dir: Path | None = None) -> Self:
        """Return the published version of this workload."""
        make: Any = cls
        workload: Self = make(data_dir, **cls.published)
        return workload

    @property
    @abstractmethod
    def metric(self) -> str:
        """What :meth:`evaluate` returns, for table heads."""

    @property
    @abstractmethod
    def batch_size(self) -> int:
        """Examples per optimizer step."""

    @property
    @abstractmethod
    def examples(self) -> int:
        """Training examples, of which an epoch takes as many."""

    @property
    def likelihood(self) -> str | Likelihood:
        """What the loss says of the outputs, as ``secondorder`` names it."""
        return "categorical"

    @abstractmethod
    def build_model(self, seed: int) -> nn.Module:
        """Return a new model whose weights depend on ``seed`` only."""

    @abstractmethod
    def batches(self, seed: int) -> Iterator[Batch]:
        """Yield batches for ever; equal seeds give equal batches."""

    @abstractmethod
    def criterion(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss, a 0-dim tensor."""

    @abstractmethod
    def evaluate(self, model: nn.Module, everything: bool = False) -> float:
        """Return :attr:`metric` on held-out data, on all of it or on a part; the model's mode is left as it was."""

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        logits: Tensor = model(batch[0])
        return logits

    def targets(self, batch: Batch) -> Tensor:
        return batch[1]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.criterion(self.outputs(model, batch), self.targets(batch))

    def quality(self, model: nn.Module) -> dict[str, float]:
        """Return what else the field reports of a trained model, by name, on all held-out data; often nothing."""
        return {}


class InMemory(Workload):
    """What workloads have in common whose examples are all in memory: every epoch takes them in a new order."""

    @cached_property
    @abstractmethod
    def train(self) -> Batch:
        """All examples that are trained on."""

    @property
    def examples(self) -> int:
        return len(self.train[0])

    def batches(self, seed: int) -> Iterator[Batch]:
        inputs, targets = self.train
        generator = torch.Generator().manual_seed(seed)
        for index in shuffled_indices(len(inputs), self.batch_size, generator):
            yield self.augmented(inputs[index], generator), targets[index]

    def augmented(self, inputs: Tensor, generator: torch.Generator) -> Tensor:
        """Return what the model gets in place of the inputs of a batch in training."""
        return inputs


class Classification(Workload):
    """What workloads on classes have in common."""

    label_smoothing: float = 0.0
    """Share of the target's probability that all classes have in common, in training; a field of some workloads."""

    def criterion(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs, targets, self.label_smoothing)


def cross_entropy(outputs: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """Return the mean cross-entropy over all positions, in nats."""
    flat = outputs.flatten(0, -2)
    return F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORED, label_smoothing=smoothing)


def find_folder(candidates: Iterable[Path], files: Sequence[str], origin: str, hint: str = "") -> Path:
    """Return the first folder that holds every one of ``files``."""
    lacking = {folder: [name for name in files if not (folder / name).is_file()] for folder in candidates}
    best = min(lacking, key=lambda folder: len(lacking[folder]))
    if lacking[best]:
        raise DataMissingError(best, lacking[best], origin, hint)
    return best


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Run the body with torch's CPU generator at ``seed``, and put its state back afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Run the body in evaluation mode without gradients, then put the mode back."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def shuffled_indices(count: int, batch_size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield index batches for ever: a fresh permutation per epoch, the short rest of an epoch dropped."""
    if count < batch_size:
        raise ValueError(f"batch_size must be at most the number of examples, got {batch_size} for {count} examples")
    while True:
        order = torch.randperm(count, generator=generator)
        for start in range(0, count - batch_size + 1, batch_size):
            yield order[start : start + batch_size]


def accuracy(model: nn.Module, inputs: Tensor, targets: Tensor, batch_size: int = 500) -> float:
    """Return the share of examples that the model classifies rightly."""
    parts = [slice(start, start + batch_size) for start in range(0, len(targets), batch_size)]
    with evaluating(model):
        hits = sum(int((model(inputs[part]).argmax(1) == targets[part]).sum()) for part in parts)
    return hits / len(targets)
