"""The small convolutional net on MNIST of the K-FAC examples for TensorFlow.

After ``kfac/examples/convnet.py`` of https://github.com/tensorflow/kfac: two 5x5 convolutions of 16 channels, each with
ReLU and a 3x3 pooling of stride 2, then one linear layer; batches of 128. That program trains it with curvature on the
chief of all workers, or with some workers for gradients, some for factors and one for inverses, as do these:

    torchrun --nproc-per-node 2 -m benchmarks train --workload convnet --comm chief_only
    torchrun --nproc-per-node 4 -m benchmarks train --workload convnet --comm dedicated_workers
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn

from benchmarks.workloads.base import Batch, Classification, Size, accuracy, seeded, shuffled_indices
from benchmarks.workloads.mnist import (
    TEST_IMAGES,
    TEST_LABELS,
    TRAIN_IMAGES,
    TRAIN_LABELS,
    find_mnist,
    read_images,
    read_labels,
)

SIDE, CLASSES = 28, 10


@dataclass(frozen=True)
class ConvNet(Classification):
    """Cross-entropy on MNIST."""

    data_dir: Path
    batch_size: int = 128
    channels: tuple[int, int] = (16, 16)

    name: ClassVar[str] = "convnet"
    metric: ClassVar[str] = "test accuracy"
    steps: ClassVar[dict[Size, int]] = {"smoke": 12, "cpu": 200, "paper": 6000}

    @classmethod
    def smoke(cls, data_dir: Path) -> "ConvNet":
        return cls(data_dir, batch_size=32, channels=(4, 4))

    @classmethod
    def paper(cls, data_dir: Path) -> "ConvNet":
        return cls(data_dir)

    @property
    def examples(self) -> int:
        return len(self._train[0])

    def build_model(self, seed: int) -> nn.Module:
        first, second = self.channels
        with seeded(seed):
            return nn.Sequential(
                nn.Conv2d(1, first, 5, padding=2),
                nn.ReLU(),
                nn.MaxPool2d(3, 2, 1),
                nn.Conv2d(first, second, 5, padding=2),
                nn.ReLU(),
                nn.MaxPool2d(3, 2, 1),
                nn.Flatten(),
                nn.Linear(second * (SIDE // 4) ** 2, CLASSES),
            )

    def batches(self, seed: int) -> Iterator[Batch]:
        images, labels = self._train
        generator = torch.Generator().manual_seed(seed)
        for index in shuffled_indices(len(images), self.batch_size, generator):
            yield images[index].float().div_(255), labels[index]

    def evaluate(self, model: nn.Module, everything: bool = False) -> float:
        images, labels = self._test
        return accuracy(model, images.float().div_(255), labels)

    @cached_property
    def _folder(self) -> Path:
        return find_mnist(self.data_dir, (TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS))

    @cached_property
    def _train(self) -> Batch:
        return _read(self._folder, TRAIN_IMAGES, TRAIN_LABELS)

    @cached_property
    def _test(self) -> Batch:
        return _read(self._folder, TEST_IMAGES, TEST_LABELS)


def _read(folder: Path, images: str, labels: str) -> Batch:
    pixels = read_images(folder / images).view(-1, 1, SIDE, SIDE)
    return pixels, read_labels(folder / labels, len(pixels))
