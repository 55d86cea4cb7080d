"""CIFAR-10 or CIFAR-100 with VGG-16: thirteen 3x3 convolutions, five times halved, and one linear layer.

After Simonyan and Zisserman, "Very deep convolutional networks for large-scale image recognition" (2015),
configuration D, in the form that is usual for 32x32 images: batch norm after each convolution, which needs no biases
then, and one linear layer in place of three.
"""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

from torch import nn

from benchmarks.workloads.base import Size, seeded
from benchmarks.workloads.cifar import Cifar
from benchmarks.workloads.resnets import initialise_convolutions

STAGES = (2, 2, 3, 3, 3)
"""Convolutions before each halving."""
GROWTH = (1, 2, 4, 8, 8)
"""Their width, in widths of the first."""


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
    """Cross-entropy on CIFAR with horizontal flips; a quarter as wide as published, unless at the published size."""

    batch_size: int = 64
    width: int = 16
    """Channels of the first stage."""

    name: ClassVar[str] = "vgg16"
    steps: ClassVar[dict[Size, int]] = {"smoke": 12, "cpu": 100, "paper": 78_000}

    @classmethod
    def smoke(cls, data_dir: Path) -> "VGG16":
        return cls(data_dir, batch_size=32, width=4)

    @classmethod
    def paper(cls, data_dir: Path) -> "VGG16":
        return cls(data_dir, batch_size=128, width=64, augment="crops")

    def build_model(self, seed: int) -> nn.Module:
        with seeded(seed):
            return vgg16(self.width, self.classes)
