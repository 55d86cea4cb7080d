"""CIFAR-10 with ResNet-20, option A: identity shortcuts that subsample and pad with zero channels.

After He et al., "Deep residual learning for image recognition" (2016), section 4.2.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.workloads.base import Batch, Classification, Size, accuracy, find_folder, seeded, shuffled_indices
from benchmarks.workloads.readers import read_cifar_batch

FOLDER = "cifar-10-batches-py"
TRAIN_FILES = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST_FILE = "test_batch"
ORIGIN = "https://www.cs.toronto.edu/~kriz/cifar.html (the Python version, cifar-10-python.tar.gz)"
HINT = f"Put the folder {FOLDER} into <data-dir>/cifar10, or give that folder as --data-dir."
EVAL_EXAMPLES = 2000
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of the training pixels, per channel


class _Block(nn.Module):
    """Two 3x3 convolutions with batch norm, and a shortcut without parameters."""

    def __init__(self, d_in: int, d_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(d_in, d_out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(d_out)
        self.conv2 = nn.Conv2d(d_out, d_out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(d_out)
        self.stride, self.padding = stride, (d_out - d_in) // 2

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        if self.padding:
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.padding, self.padding))
        return F.relu(out + x)


def _resnet(depth: int, channels: tuple[int, int, int]) -> nn.Module:
    """Return a ResNet of three stages for 32x32 images.

    Args:
        depth: Blocks per stage: 3 for ResNet-20.
        channels: Width of each stage.

    Returns:
        A model from ``[batch, 3, 32, 32]`` to logits ``[batch, 10]``.
    """
    stem = (nn.Conv2d(3, channels[0], 3, 1, 1, bias=False), nn.BatchNorm2d(channels[0]), nn.ReLU())
    blocks, d_in = [], channels[0]
    for stage, d_out in enumerate(channels):
        for index in range(depth):
            blocks.append(_Block(d_in, d_out, stride=2 if stage and not index else 1))
            d_in = d_out
    model = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(d_in, 10))
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


@dataclass(frozen=True)
class ResNet20(Classification):
    """Cross-entropy on CIFAR-10 with horizontal flips."""

    data_dir: Path
    batch_size: int = 128
    depth: int = 3
    channels: tuple[int, int, int] = (16, 32, 64)

    name: ClassVar[str] = "resnet20"
    metric: ClassVar[str] = "test accuracy"
    steps: ClassVar[dict[Size, int]] = {"smoke": 12, "cpu": 150}

    @classmethod
    def smoke(cls, data_dir: Path) -> "ResNet20":
        """Return the small version of this workload.

        Args:
            data_dir: Folder that holds ``cifar10``.

        Returns:
            A workload with one block per stage, narrow, and a smaller batch.
        """
        return cls(data_dir, batch_size=32, depth=1, channels=(4, 8, 16))

    @property
    def examples(self) -> int:
        """Training examples: an epoch takes all of them once."""
        return len(self._train[0])

    def build_model(self, seed: int) -> nn.Module:
        """Return the network with weights from ``seed``.

        Args:
            seed: Seed of the initial weights.

        Returns:
            A model from ``[batch, 3, 32, 32]`` to logits ``[batch, 10]``.
        """
        with seeded(seed):
            return _resnet(self.depth, self.channels)

    def batches(self, seed: int) -> Iterator[Batch]:
        """Yield shuffled training batches for ever, each image flipped with probability one half.

        Args:
            seed: Seed of the shuffling and the flips.

        Yields:
            Normalised images ``[batch, 3, 32, 32]`` and labels ``[batch]``.
        """
        images, labels = self._train
        generator = torch.Generator().manual_seed(seed)
        for index in shuffled_indices(len(images), self.batch_size, generator):
            flip = torch.rand(len(index), generator=generator) < 0.5
            batch = images[index]
            batch[flip] = batch[flip].flip(-1)
            yield _normalise(batch), labels[index]

    def evaluate(self, model: nn.Module, everything: bool = False) -> float:
        """Return the accuracy on the first 2,000 test images: a forward pass on a CPU takes its time.

        Args:
            model: The classifier.
            everything: Take all 10,000.

        Returns:
            A number in [0, 1].
        """
        images, labels = self._test
        count = len(images) if everything else EVAL_EXAMPLES
        return accuracy(model, _normalise(images[:count]), labels[:count])

    @cached_property
    def _folder(self) -> Path:
        packs = sorted({*self.data_dir.glob("*.npz"), *(self.data_dir / "cifar10").glob("*.npz")})
        hint = HINT if not packs else f"{HINT} {_unpack_hint(packs[0])}"
        parents = (self.data_dir / "cifar10", self.data_dir)
        candidates = (*(parent / FOLDER for parent in parents), *parents)
        return find_folder(candidates, (*TRAIN_FILES, TEST_FILE), ORIGIN, hint)

    @cached_property
    def _train(self) -> Batch:
        return _read(self._folder, TRAIN_FILES)

    @cached_property
    def _test(self) -> Batch:
        return _read(self._folder, (TEST_FILE,))


def _unpack_hint(pack: Path) -> str:
    """Return how to turn a pack of compressed images, if it comes with its script, into the standard folder.

    Args:
        pack: The ``.npz`` file found.

    Returns:
        A sentence.
    """
    scripts = sorted(pack.parent.glob("unpack*.py"))
    if not scripts:
        return f"{pack} is there, but this reader takes the standard folder only."
    return f"{pack} is there: `python {scripts[0]} {pack} <out>/cifar10` writes that folder, then --data-dir <out>."


def _read(folder: Path, names: tuple[str, ...]) -> Batch:
    """Read and join batch files.

    Args:
        folder: The standard folder.
        names: Batch files.

    Returns:
        Unsigned bytes ``[count, 3, 32, 32]`` and labels ``[count]``.
    """
    parts = [read_cifar_batch(folder / name) for name in names]
    images = np.concatenate([part[0] for part in parts])
    return torch.from_numpy(images), torch.from_numpy(np.concatenate([part[1] for part in parts]))


def _normalise(images: Tensor) -> Tensor:
    """Scale bytes to zero mean and unit variance per channel.

    Args:
        images: Unsigned bytes ``[count, 3, 32, 32]``.

    Returns:
        Floats of the same shape.
    """
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    return images.float().div_(255).sub_(mean).div_(std)
