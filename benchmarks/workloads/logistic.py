"""Multinomial logistic regression: a convex problem, where methods of full-matrix curvature are at home.

On MNIST the inputs are random features of the pixels, ``max(0, W x + b)`` with fixed normal ``W`` and uniform ``b``,
which are drawn once and never trained (Rahimi and Recht, "Weighted sums of random kitchen sinks", 2008): the problem
stays convex and has more parameters than the pixels alone would give.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.workloads.base import Batch, Classification, Size, accuracy, seeded, shuffled_indices
from benchmarks.workloads.mnist import (
    PIXELS,
    TEST_IMAGES,
    TEST_LABELS,
    TRAIN_IMAGES,
    TRAIN_LABELS,
    find_mnist,
    read_images,
    read_labels,
)

_FEATURE_SEED = 0  # the features are part of the workload, not of a run
_MEAN, _STD = 0.1307, 0.3081  # of the training pixels


class _RandomFeatures(nn.Module):
    """A fixed random layer; its tensors are buffers, so that no optimizer sees them."""

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
class Logistic(Classification):
    """Cross-entropy of a linear classifier over random features of the pixels."""

    data_dir: Path
    batch_size: int = 128
    features: int = 2000
    """Random features of the pixels."""

    name: ClassVar[str] = "logistic"
    metric: ClassVar[str] = "test accuracy"
    steps: ClassVar[dict[Size, int]] = {"smoke": 30, "cpu": 468, "paper": 4680}  # one epoch, ten epochs

    @classmethod
    def smoke(cls, data_dir: Path) -> "Logistic":
        return cls(data_dir, batch_size=32, features=64)

    @classmethod
    def paper(cls, data_dir: Path) -> "Logistic":
        """Return the same problem: ten epochs in batches of 128 are what EFCP has for this kind of model."""
        return cls(data_dir)

    @property
    def examples(self) -> int:
        return len(self._train[0])

    def build_model(self, seed: int) -> nn.Module:
        """Return the linear classifier with weights from ``seed``, behind the fixed features."""
        with seeded(seed):
            return nn.Sequential(_RandomFeatures(PIXELS, self.features), nn.Linear(self.features, 10))

    def batches(self, seed: int) -> Iterator[Batch]:
        inputs, labels = self._train
        generator = torch.Generator().manual_seed(seed)
        for index in shuffled_indices(len(inputs), self.batch_size, generator):
            yield _normalise(inputs[index]), labels[index]

    def evaluate(self, model: nn.Module, everything: bool = False) -> float:
        inputs, labels = self._test
        return accuracy(model, _normalise(inputs), labels)

    @cached_property
    def _folder(self) -> Path:
        return find_mnist(self.data_dir, (TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS))

    @cached_property
    def _train(self) -> Batch:
        return self._read(TRAIN_IMAGES, TRAIN_LABELS)

    @cached_property
    def _test(self) -> Batch:
        return self._read(TEST_IMAGES, TEST_LABELS)

    def _read(self, images: str, labels: str) -> Batch:
        pixels = read_images(self._folder / images)
        return pixels, read_labels(self._folder / labels, len(pixels))


def _normalise(images: Tensor) -> Tensor:
    return images.float().div_(255).sub_(_MEAN).div_(_STD)
