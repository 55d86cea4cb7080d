"""Multinomial logistic regression on MNIST: a convex problem, where methods of full-matrix curvature are at home.

The inputs are random features of the pixels, ``max(0, W x + b)`` with fixed normal ``W`` and uniform ``b``, which are
drawn once and never trained (Rahimi and Recht, "Weighted sums of random kitchen sinks", 2008): the problem stays convex
and has more parameters than the pixels alone would give.
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

    name: ClassVar[str] = "logistic"
    metric: ClassVar[str] = "test accuracy"
    steps: ClassVar[dict[Size, int]] = {"smoke": 30, "cpu": 468}  # the second is one epoch

    @classmethod
    def smoke(cls, data_dir: Path) -> "Logistic":
        """Return the small version of this workload.

        Args:
            data_dir: Folder that holds ``mnist``.

        Returns:
            A workload with few features and a smaller batch.
        """
        return cls(data_dir, batch_size=32, features=64)

    @property
    def examples(self) -> int:
        """Training examples: an epoch takes all of them once."""
        return len(self._train[0])

    def build_model(self, seed: int) -> nn.Module:
        """Return the fixed features and the linear classifier with weights from ``seed``.

        Args:
            seed: Seed of the initial weights.

        Returns:
            A model from ``[batch, 784]`` to logits ``[batch, 10]``.
        """
        with seeded(seed):
            return nn.Sequential(_RandomFeatures(PIXELS, self.features), nn.Linear(self.features, 10))

    def batches(self, seed: int) -> Iterator[Batch]:
        """Yield shuffled training batches for ever.

        Args:
            seed: Seed of the shuffling.

        Yields:
            Normalised images ``[batch, 784]`` and labels ``[batch]``.
        """
        images, labels = self._train
        generator = torch.Generator().manual_seed(seed)
        for index in shuffled_indices(len(images), self.batch_size, generator):
            yield _normalise(images[index]), labels[index]

    def evaluate(self, model: nn.Module, everything: bool = False) -> float:
        """Return the accuracy on the test images.

        Args:
            model: The classifier.
            everything: Not used: it is always all of them.

        Returns:
            A number in [0, 1].
        """
        images, labels = self._test
        return accuracy(model, _normalise(images), labels)

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
    """Scale bytes to zero mean and unit variance over the training set.

    Args:
        images: Unsigned bytes ``[count, 784]``.

    Returns:
        Floats of the same shape.
    """
    return images.float().div_(255).sub_(_MEAN).div_(_STD)
