"""CIFAR-10 and CIFAR-100: their files and augmentation, and the networks that train on them.

ResNet-20, -32 and -110 follow He et al., "Deep residual learning for image recognition" (2016), section 4.2: 6n + 2
layers, identity shortcuts that subsample and pad with zero channels, batches of 128 images and 64,000 steps with flips
and crops. VGG-16 follows Simonyan and Zisserman, "Very deep convolutional networks for large-scale image recognition"
(2015), configuration D, with the usual changes for 32x32 images: thirteen 3x3 convolutions without biases, each with
batch norm, five poolings, and one linear layer in place of three.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.workloads.base import Batch, Classification, InMemory, Size, accuracy, find_folder
from benchmarks.workloads.readers import CifarName, read_cifar_batch
from benchmarks.workloads.resnets import cifar_resnet, initialise_convolutions

Augment = Literal["none", "flips", "crops"]
"""``flips`` mirrors each image with probability 1/2. ``crops`` also takes random crops of the padded image."""


@dataclass(frozen=True)
class CifarFiles:
    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    classes: int
    mean: tuple[float, float, float]  # mean of the training pixels, per channel
    std: tuple[float, float, float]


CIFAR: dict[CifarName, CifarFiles] = {
    "cifar10": CifarFiles(
        "cifar-10-batches-py", tuple(f"data_batch_{number}" for number in range(1, 6)), ("test_batch",), 10,
        (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616),
    ),
    "cifar100": CifarFiles(
        "cifar-100-python", ("train",), ("test",), 100, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762),
    ),
}  # fmt: skip
EVAL_EXAMPLES = 2000
PADDING = 4


@dataclass(frozen=True)
class Cifar(InMemory, Classification):
    """Cross-entropy on CIFAR-10 or CIFAR-100. Subclasses add the network."""

    data_dir: Path
    batch_size: int = 128
    dataset: CifarName = "cifar10"
    augment: Augment = "flips"
    label_smoothing: float = 0.0

    metric: ClassVar[str] = "test accuracy"

    def __post_init__(self) -> None:
        for key, value, known in (("dataset", self.dataset, CIFAR), ("augment", self.augment, get_args(Augment))):
            if value not in known:
                raise ValueError(f"{key} must be one of {', '.join(known)}, got {value!r}")
        self.check_smoothing()

    @property
    def classes(self) -> int:
        return CIFAR[self.dataset].classes

    def augmented(self, inputs: Tensor, generator: torch.Generator) -> Tensor:
        if self.augment != "none":
            flip = torch.rand(len(inputs), generator=generator) < 0.5
            inputs[flip] = inputs[flip].flip(-1)
        images = self.normalised(inputs)
        return random_crops(images, generator) if self.augment == "crops" else images

    def evaluate(self, model: torch.nn.Module, everything: bool = False) -> float:
        """Return the accuracy on the first 2,000 test images, because a forward pass on a CPU is slow, or on all."""
        images, labels = self._test
        count = len(images) if everything else EVAL_EXAMPLES
        return accuracy(model, self.normalised(images[:count]), labels[:count])

    def normalised(self, images: Tensor) -> Tensor:
        files = CIFAR[self.dataset]
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (files.mean, files.std))
        return images.float().div_(255).sub_(mean).div_(std)

    @cached_property
    def train(self) -> Batch:
        return self._read(CIFAR[self.dataset].train)

    @cached_property
    def _test(self) -> Batch:
        return self._read(CIFAR[self.dataset].test)

    def _read(self, names: tuple[str, ...]) -> Batch:
        folder = _find(self.data_dir, self.dataset)
        parts = zip(*(read_cifar_batch(folder / name, self.dataset) for name in names), strict=True)
        images, labels = (torch.from_numpy(np.concatenate(part)) for part in parts)
        return images, labels


def random_crops(images: Tensor, generator: torch.Generator) -> Tensor:
    """Pad each image with zeros, and crop it to its size at a random position."""
    count, _, side, _ = images.shape
    padded = F.pad(images, (PADDING,) * 4)
    places = torch.randint(0, 2 * PADDING + 1, (count, 2), generator=generator).tolist()
    crops = [padded[i, :, top : top + side, left : left + side] for i, (top, left) in enumerate(places)]
    return torch.stack(crops)


def _find(data_dir: Path, dataset: CifarName) -> Path:
    files = CIFAR[dataset]
    parents = (data_dir / dataset, data_dir)
    folders = (*(parent / files.folder for parent in parents), *parents)
    return find_folder(folders, (*files.train, *files.test), "vgg16")  # fetches both


PUBLISHED_STEPS = 64_000


@dataclass(frozen=True)
class ResNet20(Cifar):
    """Cross-entropy on CIFAR with horizontal flips and, at the published size, crops."""

    depth: int = 3  # number of blocks in each of the three stages
    channels: tuple[int, int, int] = (16, 32, 64)

    name: ClassVar[str] = "resnet20"
    steps: ClassVar[dict[Size, int]] = {"smoke": 12, "cpu": 150, "paper": PUBLISHED_STEPS}
    small: ClassVar[dict[str, Any]] = {"batch_size": 32, "depth": 1, "channels": (4, 8, 16)}
    published: ClassVar[dict[str, Any]] = {"batch_size": 128, "augment": "crops"}

    def network(self) -> nn.Module:
        return cifar_resnet(self.depth, self.channels, self.classes)


@dataclass(frozen=True)
class ResNet32(ResNet20):
    depth: int = 5

    name: ClassVar[str] = "resnet32"


@dataclass(frozen=True)
class ResNet110(ResNet20):
    """ResNet-110, with eighteen blocks per stage. A step takes six times as long as with ResNet-20."""

    batch_size: int = 64
    depth: int = 18

    name: ClassVar[str] = "resnet110"
    steps: ClassVar[dict[Size, int]] = {"smoke": 12, "cpu": 60, "paper": PUBLISHED_STEPS}
    small: ClassVar[dict[str, Any]] = {"batch_size": 32, "depth": 2, "channels": (4, 8, 16)}


STAGES = (2, 2, 3, 3, 3)  # number of convolutions before each pooling
GROWTH = (1, 2, 4, 8, 8)  # width of each stage, relative to the first


def vgg16(width: int, classes: int) -> nn.Module:
    widths = [growth * width for depth, growth in zip(STAGES, GROWTH, strict=True) for _ in range(depth)]
    last = {sum(STAGES[: stage + 1]) - 1 for stage in range(len(STAGES))}
    layers: list[nn.Module] = []
    for index, (d_in, d_out) in enumerate(pairwise([3, *widths])):
        layers += [nn.Conv2d(d_in, d_out, 3, padding=1, bias=False), nn.BatchNorm2d(d_out), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if index in last else []
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(widths[-1], classes))
    initialise_convolutions(model)
    return model


@dataclass(frozen=True)
class VGG16(Cifar):
    """Cross-entropy on CIFAR with horizontal flips. The smaller sizes are narrower than the published network."""

    batch_size: int = 64
    width: int = 16  # channels of the first stage

    name: ClassVar[str] = "vgg16"
    steps: ClassVar[dict[Size, int]] = {"smoke": 12, "cpu": 100, "paper": 78_000}
    small: ClassVar[dict[str, Any]] = {"batch_size": 32, "width": 4}
    published: ClassVar[dict[str, Any]] = {"batch_size": 128, "width": 64, "augment": "crops"}

    def network(self) -> nn.Module:
        return vgg16(self.width, self.classes)
