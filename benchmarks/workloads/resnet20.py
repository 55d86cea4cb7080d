"""CIFAR-10 or CIFAR-100 with ResNet-20, ResNet-32 and ResNet-110.

After He et al., "Deep residual learning for image recognition" (2016), section 4.2: 6n + 2 layers, identity shortcuts
that subsample and pad with zero channels, batches of 128 images and 64,000 steps with flips and crops.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torch import nn

from benchmarks.workloads.base import Size, seeded
from benchmarks.workloads.cifar import Cifar
from benchmarks.workloads.resnets import cifar_resnet

PUBLISHED_STEPS = 64_000


@dataclass(frozen=True)
class ResNet20(Cifar):
    """Cross-entropy on CIFAR with horizontal flips, and at the published size with crops."""

    depth: int = 3
    """Blocks of each of the three stages."""
    channels: tuple[int, int, int] = (16, 32, 64)

    name: ClassVar[str] = "resnet20"
    steps: ClassVar[dict[Size, int]] = {"smoke": 12, "cpu": 150, "paper": PUBLISHED_STEPS}

    @classmethod
    def smoke(cls, data_dir: Path) -> "ResNet20":
        return cls(data_dir, batch_size=32, depth=1, channels=(4, 8, 16))

    @classmethod
    def paper(cls, data_dir: Path) -> "ResNet20":
        return cls(data_dir, batch_size=128, augment="crops")

    def build_model(self, seed: int) -> nn.Module:
        with seeded(seed):
            return cifar_resnet(self.depth, self.channels, self.classes)


@dataclass(frozen=True)
class ResNet32(ResNet20):
    """The same with five blocks a stage."""

    depth: int = 5

    name: ClassVar[str] = "resnet32"


@dataclass(frozen=True)
class ResNet110(ResNet20):
    """The same with eighteen blocks a stage; a step takes six times as long as one of ResNet-20."""

    batch_size: int = 64
    depth: int = 18

    name: ClassVar[str] = "resnet110"
    steps: ClassVar[dict[Size, int]] = {"smoke": 12, "cpu": 60, "paper": PUBLISHED_STEPS}

    @classmethod
    def smoke(cls, data_dir: Path) -> "ResNet20":
        return cls(data_dir, batch_size=32, depth=2, channels=(4, 8, 16))
