"""MNIST in its standard files, and the two classifiers on it.

``logistic`` is a convex problem, where methods of full-matrix curvature are at home: multinomial logistic regression on
random features of the pixels, ``max(0, W x + b)`` with fixed normal ``W`` and uniform ``b``, which are drawn once and
never trained (Rahimi and Recht, "Weighted sums of random kitchen sinks", 2008). It has more parameters than the pixels
alone would give.

``convnet`` is the small network of the K-FAC examples for TensorFlow, ``kfac/examples/convnet.py`` of
https://github.com/tensorflow/kfac: two 5x5 convolutions of 16 channels, each with ReLU and a 3x3 pooling of stride 2,
then one linear layer; batches of 128. That program trains it with curvature on the chief of all workers, or with some
workers for gradients, some for factors and one for inverses, as do these:

    torchrun --nproc-per-node 2 -m benchmarks train --workload convnet --comm chief_only
    torchrun --nproc-per-node 4 -m benchmarks train --workload convnet --comm dedicated_workers
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.workloads.base import Batch, Classification, Size, accuracy, find_folder, seeded, shuffled_indices
from benchmarks.workloads.readers import read_idx

SIDE, CLASSES = 28, 10
PIXELS = SIDE**2
TRAIN_IMAGES, TRAIN_LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"
TEST_IMAGES, TEST_LABELS = "t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"
ORIGIN = "https://ossci-datasets.s3.amazonaws.com/mnist/ (or any mirror of the MNIST IDX files)"
HINT = "Put the files into <data-dir>/mnist."


def find_mnist(data_dir: Path, files: tuple[str, ...]) -> Path:
    return find_folder((data_dir / "mnist", data_dir), files, ORIGIN, HINT)


def read_images(path: Path) -> Tensor:
    """Read one file of images as unsigned bytes, a quarter of what floats would take."""
    images = read_idx(path)
    if images.shape[1:] != (SIDE, SIDE):
        raise ValueError(f"{path} must hold 28x28 images, got shape {images.shape}")
    return torch.from_numpy(images.reshape(-1, PIXELS).copy())


def read_labels(path: Path, count: int) -> Tensor:
    labels = read_idx(path)
    if labels.shape != (count,) or (count and labels.max() > 9):
        raise ValueError(f"{path} must hold {count} labels from 0 to 9, got shape {labels.shape}")
    return torch.from_numpy(labels.astype("int64"))


@dataclass(frozen=True)
class Classifier(Classification):
    """Cross-entropy on MNIST; a subclass adds the network."""

    data_dir: Path
    batch_size: int = 128

    metric: ClassVar[str] = "test accuracy"

    @property
    def examples(self) -> int:
        return len(self._train[0])

    def batches(self, seed: int) -> Iterator[Batch]:
        images, labels = self._train
        generator = torch.Generator().manual_seed(seed)
        for index in shuffled_indices(len(images), self.batch_size, generator):
            yield self.inputs(images[index]), labels[index]

    def evaluate(self, model: nn.Module, everything: bool = False) -> float:
        images, labels = self._test
        return accuracy(model, self.inputs(images), labels)

    @abstractmethod
    def inputs(self, images: Tensor) -> Tensor:
        """Return what the network takes of bytes ``[count, 784]``."""

    @cached_property
    def _train(self) -> Batch:
        return self._read(TRAIN_IMAGES, TRAIN_LABELS)

    @cached_property
    def _test(self) -> Batch:
        return self._read(TEST_IMAGES, TEST_LABELS)

    def _read(self, images: str, labels: str) -> Batch:
        folder = find_mnist(self.data_dir, (TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS))
        pixels = read_images(folder / images)
        return pixels, read_labels(folder / labels, len(pixels))


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
class Logistic(Classifier):
    """Cross-entropy of a linear classifier over random features of the pixels."""

    features: int = 2000
    """Random features of the pixels."""

    name: ClassVar[str] = "logistic"
    # An epoch; ten epochs in batches of 128 are what EFCP has for this kind of model.
    steps: ClassVar[dict[Size, int]] = {"smoke": 30, "cpu": 468, "paper": 4680}
    small: ClassVar[dict[str, Any]] = {"batch_size": 32, "features": 64}

    def build_model(self, seed: int) -> nn.Module:
        with seeded(seed):
            return nn.Sequential(_RandomFeatures(PIXELS, self.features), nn.Linear(self.features, CLASSES))

    def inputs(self, images: Tensor) -> Tensor:
        return images.float().div_(255).sub_(_MEAN).div_(_STD)


@dataclass(frozen=True)
class ConvNet(Classifier):
    """Cross-entropy of the network of the examples for TensorFlow."""

    channels: tuple[int, int] = (16, 16)

    name: ClassVar[str] = "convnet"
    steps: ClassVar[dict[Size, int]] = {"smoke": 12, "cpu": 200, "paper": 6000}
    small: ClassVar[dict[str, Any]] = {"batch_size": 32, "channels": (4, 4)}

    def build_model(self, seed: int) -> nn.Module:
        layers: list[nn.Module] = []
        with seeded(seed):
            for d_in, d_out in pairwise((1, *self.channels)):
                layers += [nn.Conv2d(d_in, d_out, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
            return nn.Sequential(*layers, nn.Flatten(), nn.Linear(self.channels[1] * (SIDE // 4) ** 2, CLASSES))

    def inputs(self, images: Tensor) -> Tensor:
        return images.view(-1, 1, SIDE, SIDE).float().div_(255)
