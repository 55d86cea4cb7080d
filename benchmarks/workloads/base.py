"""The base classes of workloads, and their shared functions for data lookup, seeding and shuffling."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import Self

from secondorder import Likelihood

Batch = tuple[Tensor, Tensor]  # inputs and targets of one optimizer step

Size = Literal["smoke", "cpu", "paper"]
"""``smoke`` is a small model for a few steps, which take seconds on one core. ``cpu`` takes minutes on two cores.
``paper`` has the size and the length of the published run, for GPUs."""


IGNORED = -100
"""Class of positions without a loss: the default ``ignore_index`` of ``F.cross_entropy`` and of the likelihoods."""


_NAMED = 8  # maximum number of missing files that an error lists


class DataMissingError(FileNotFoundError):
    """Raised if data files are missing. The message lists them, and has the command that downloads them."""

    def __init__(self, folder: Path, missing: Sequence[str], workload: str | None = None) -> None:
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        how = f": python -m benchmarks fetch --workload {workload}" if workload else ""
        super().__init__(f"missing data: {folder} lacks {', '.join(missing[:_NAMED])}{more}{how}")


class PackageMissingError(ValueError):
    """Raised if an optional package is not installed."""


class Workload(ABC):
    """A model, a loss and a seeded stream of batches. The data is read when the first batch is drawn.

    The defaults of fields belong to the size ``cpu``. By default, the model maps the inputs to logits of classes, which
    the loss compares with the targets.
    """

    name: ClassVar[str]
    steps: ClassVar[dict[Size, int]]  # number of optimizer steps of a run, for each size
    small: ClassVar[dict[str, Any]] = {}  # fields that differ for the size `smoke`
    published: ClassVar[dict[str, Any]] = {}  # fields that differ for the size `paper`

    @classmethod
    def of_size(cls, size: Size, data_dir: Path | None = None) -> Self:
        fields = {"smoke": cls.small, "cpu": {}, "paper": cls.published}[size]
        make: Any = cls
        workload: Self = make(data_dir, **fields)
        return workload

    @property
    @abstractmethod
    def metric(self) -> str:
        """Name of the metric that :meth:`evaluate` returns, for table headers."""

    @property
    def higher_is_better(self) -> bool:
        """Whether higher values of :attr:`metric` are better."""
        return any(word in self.metric.lower() for word in ("accuracy", "f1", "bleu", "dice", "correlation"))

    @property
    @abstractmethod
    def batch_size(self) -> int:
        """Examples per optimizer step."""

    @property
    @abstractmethod
    def examples(self) -> int:
        """Number of training examples per epoch."""

    @property
    def likelihood(self) -> str | Likelihood:
        """The likelihood that corresponds to the loss, or its name in ``secondorder``."""
        return "categorical"

    def build_model(self, seed: int) -> nn.Module:
        """Return a new model whose weights depend on ``seed`` only."""
        with seeded(seed):
            return self.network()

    @abstractmethod
    def network(self) -> nn.Module:
        """Return a new model whose weights are drawn from torch's generator."""

    @abstractmethod
    def batches(self, seed: int) -> Iterator[Batch]:
        """Yield batches forever. Equal seeds give equal batches."""

    @abstractmethod
    def criterion(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss, a 0-dim tensor."""

    @abstractmethod
    def evaluate(self, model: nn.Module, everything: bool = False) -> float:
        """Return :attr:`metric` on all held-out data or on a part of it. The mode of the model does not change."""

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        logits: Tensor = model(batch[0])
        return logits

    def targets(self, batch: Batch) -> Tensor:
        return batch[1]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.criterion(self.outputs(model, batch), self.targets(batch))

    def quality(self, model: nn.Module) -> dict[str, float]:
        """Return other usual metrics of a trained model on all held-out data, by name. The default is none."""
        return {}


class InMemory(Workload):
    """Base class of workloads with all examples in memory. Every epoch uses them in a new order."""

    @cached_property
    @abstractmethod
    def train(self) -> Batch:
        """All training examples."""

    @property
    def examples(self) -> int:
        return len(self.train[0])

    def batches(self, seed: int) -> Iterator[Batch]:
        inputs, targets = self.train
        generator = torch.Generator().manual_seed(seed)
        for index in shuffled_indices(len(inputs), self.batch_size, generator):
            yield self.augmented(inputs[index], generator), targets[index]

    def augmented(self, inputs: Tensor, generator: torch.Generator) -> Tensor:
        """Return the inputs of a training batch after augmentation."""
        return inputs


class Classification(Workload):
    label_smoothing: float = 0.0
    """Share of the probability that the training targets spread over all classes. Some workloads have it as a field."""

    def check_smoothing(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing must be in [0, 1), got {self.label_smoothing}")

    def criterion(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs, targets, self.label_smoothing)


def cross_entropy(outputs: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """Return the mean cross-entropy over all positions, in nats."""
    flat = outputs.flatten(0, -2)
    return F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORED, label_smoothing=smoothing)


def find_folder(candidates: Iterable[Path], files: Sequence[str], workload: str) -> Path:
    """Return the first folder that contains all ``files``, which are those of a workload."""
    lacking = {folder: [name for name in files if not (folder / name).is_file()] for folder in candidates}
    best = min(lacking, key=lambda folder: len(lacking[folder]))
    if lacking[best]:
        raise DataMissingError(best, lacking[best], workload)
    return best


def optional_package(module: str, extra: str) -> Any:
    """Import a module that only an extra of this package installs."""
    package = module.partition(".")[0]
    try:
        import_module(package)
    except ModuleNotFoundError as err:
        if err.name != package:  # one of its own dependencies is missing
            raise
        raise PackageMissingError(f'{package} is not installed: pip install "secondorder[{extra}]"') from err
    return import_module(module)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's CPU generator for a ``with`` block, and restore its state afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode without gradients for a ``with`` block, and restore the mode afterwards."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def shuffled_indices(count: int, batch_size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield batches of indices forever, from a new permutation per epoch. Incomplete last batches are dropped."""
    if count < batch_size:
        raise ValueError(f"batch_size must be at most the number of examples, got {batch_size} for {count} examples")
    while True:
        order = torch.randperm(count, generator=generator)
        for start in range(0, count - batch_size + 1, batch_size):
            yield order[start : start + batch_size]


def accuracy(model: nn.Module, inputs: Tensor, targets: Tensor, batch_size: int = 500) -> float:
    parts = [slice(start, start + batch_size) for start in range(0, len(targets), batch_size)]
    with evaluating(model):
        hits = sum(int((model(inputs[part]).argmax(1) == targets[part]).sum()) for part in parts)
    return hits / len(targets)
