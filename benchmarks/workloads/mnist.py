"""MNIST in its standard files, with a classifier and an autoencoder.

``logistic`` is a convex problem, which suits methods with full-matrix curvature: multinomial logistic regression on
random features of the pixels, ``max(0, W x + b)`` with fixed normal ``W`` and uniform ``b``, which are drawn once and
never trained (Rahimi and Recht, "Weighted sums of random kitchen sinks", 2008). It has more parameters than
regression on the pixels.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import count, pairwise
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.workloads.base import (
    Batch,
    Classification,
    InMemory,
    Size,
    Workload,
    accuracy,
    evaluating,
    find_folder,
    shuffled_indices,
)
from benchmarks.workloads.readers import read_idx
from secondorder import Likelihood

SIDE, CLASSES = 28, 10
PIXELS = SIDE**2
TRAIN_IMAGES, TRAIN_LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"
TEST_IMAGES, TEST_LABELS = "t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"


def find_mnist(data_dir: Path, files: tuple[str, ...]) -> Path:
    return find_folder((data_dir / "mnist", data_dir), files, "autoencoder")


def read_images(path: Path) -> Tensor:
    """Read a file of images as unsigned bytes, which take a quarter of the memory of floats."""
    images = read_idx(path)
    if images.shape[1:] != (SIDE, SIDE):
        raise ValueError(f"{path} must hold 28x28 images, got shape {images.shape}")
    return torch.from_numpy(images.reshape(-1, PIXELS).copy())


def read_labels(path: Path, count: int) -> Tensor:
    labels = read_idx(path)
    if labels.shape != (count,) or (count and labels.max() > 9):
        raise ValueError(f"{path} must hold {count} labels from 0 to 9, got shape {labels.shape}")
    return torch.from_numpy(labels.astype("int64"))


_FEATURE_SEED = 0  # the features are part of the workload, not of a run
_MEAN, _STD = 0.1307, 0.3081  # of the training pixels


class _RandomFeatures(nn.Module):
    """A fixed random layer, whose tensors are buffers, so that no optimizer trains them."""

    weight: Tensor
    bias: Tensor

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(_FEATURE_SEED)
        self.register_buffer("weight", torch.randn(d_out, d_in, generator=generator) / d_in**0.5)
        self.register_buffer("bias", torch.rand(d_out, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(F.linear(x, self.weight, self.bias))


@dataclass(frozen=True)
class Logistic(InMemory, Classification):
    """Cross-entropy of a linear classifier over random features of the pixels."""

    data_dir: Path
    batch_size: int = 128
    features: int = 2000  # number of random features of the pixels

    name: ClassVar[str] = "logistic"
    metric: ClassVar[str] = "test accuracy"
    # The size cpu trains for one epoch, and paper for ten, as EFCP trains this kind of model.
    steps: ClassVar[dict[Size, int]] = {"smoke": 30, "cpu": 468, "paper": 4680}
    small: ClassVar[dict[str, Any]] = {"batch_size": 32, "features": 64}

    def network(self) -> nn.Module:
        return nn.Sequential(_RandomFeatures(PIXELS, self.features), nn.Linear(self.features, CLASSES))

    def augmented(self, inputs: Tensor, generator: torch.Generator) -> Tensor:
        return _standardized(inputs)

    def evaluate(self, model: nn.Module, everything: bool = False) -> float:
        images, labels = self._test
        return accuracy(model, _standardized(images), labels)

    @cached_property
    def train(self) -> Batch:
        return self._read(TRAIN_IMAGES, TRAIN_LABELS)

    @cached_property
    def _test(self) -> Batch:
        return self._read(TEST_IMAGES, TEST_LABELS)

    def _read(self, images: str, labels: str) -> Batch:
        folder = find_mnist(self.data_dir, (TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS))
        pixels = read_images(folder / images)
        return pixels, read_labels(folder / labels, len(pixels))


def _standardized(images: Tensor) -> Tensor:
    return images.float().div_(255).sub_(_MEAN).div_(_STD)


SHARES = 8  # growing batches have multiples of this size, so that up to 8 ranks can divide them evenly


@dataclass(frozen=True)
class Autoencoder(Workload):
    """Binary cross-entropy of the pixels, summed over the pixels and averaged over the batch."""

    data_dir: Path
    batch_size: int = 512
    widths: tuple[int, ...] = (1000, 500, 250, 30)
    """Widths of the encoder, which the decoder mirrors. The last one is that of the linear code."""
    growth_steps: int = 0
    """Step at which exponentially growing batches contain all training images. With 0, batches do not grow."""

    name: ClassVar[str] = "autoencoder"
    metric: ClassVar[str] = "test loss"
    likelihood: ClassVar[str | Likelihood] = "bernoulli"
    # The small model needs 200 steps to leave its first plateau.
    steps: ClassVar[dict[Size, int]] = {"smoke": 200, "cpu": 300, "paper": 500}
    small: ClassVar[dict[str, Any]] = {"batch_size": 64, "widths": (128, 64, 16)}
    published: ClassVar[dict[str, Any]] = {"batch_size": 1000, "growth_steps": 500}

    def __post_init__(self) -> None:
        if self.growth_steps < 0 or self.growth_steps == 1:
            raise ValueError(f"growth_steps must be 0 or at least 2, got {self.growth_steps}")

    @property
    def examples(self) -> int:
        return len(self._train)

    def network(self) -> nn.Module:
        widths = (PIXELS, *self.widths, *reversed(self.widths[:-1]), PIXELS)
        code = len(self.widths) - 1
        layers: list[nn.Module] = []
        for index, (d_in, d_out) in enumerate(pairwise(widths)):
            linear = nn.Linear(d_in, d_out)
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)
            is_linear = index == code or index == len(widths) - 2
            layers += [linear] if is_linear else [linear, nn.Tanh()]
        return nn.Sequential(*layers)

    def batches(self, seed: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed)
        for index in self._indices(generator):
            images = self._train[index].float().div_(255)
            yield images, images

    def _indices(self, generator: torch.Generator) -> Iterator[Tensor]:
        """Yield batches of indices forever. Each growing batch is drawn from all images."""
        examples = len(self._train)
        if not self.growth_steps:
            yield from shuffled_indices(examples, self.batch_size, generator)
            return
        growth = examples / self.batch_size
        for step in count():
            size = round(self.batch_size * growth ** min(1.0, step / (self.growth_steps - 1)))
            size -= size % SHARES if size >= SHARES else 0
            yield next(shuffled_indices(examples, size, generator))

    def criterion(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(outputs, targets, reduction="sum") / len(targets)

    def evaluate(self, model: nn.Module, everything: bool = False) -> float:
        with evaluating(model):
            images = self._test.float().div_(255)
            return float(self.loss(model, (images, images)))

    @cached_property
    def _folder(self) -> Path:
        return find_mnist(self.data_dir, (TRAIN_IMAGES, TEST_IMAGES))

    @cached_property
    def _train(self) -> Tensor:
        return read_images(self._folder / TRAIN_IMAGES)

    @cached_property
    def _test(self) -> Tensor:
        return read_images(self._folder / TEST_IMAGES)
