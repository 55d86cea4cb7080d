"""Logistic regression on a file of features: :mod:`benchmarks.workloads.logistic` without its MNIST.

Files in ``<data-dir>/features`` go by their names: ``resnet20`` is what ``python -m benchmarks features`` writes. The
README of IST-DASLab/EFCP on GitHub has this problem on features of ImageNet by the network RN50x16 of CLIP, for ten
epochs in batches of 128; the tensors that it points to, saved as the arrays named there, make another such file.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from benchmarks.workloads.base import Size
from benchmarks.workloads.logistic import Logistic


@dataclass(frozen=True)
class Features(Logistic):
    """Cross-entropy of a linear classifier over the inputs of a file."""

    features: int | str = ""
    """A file, or the name of one in <data-dir>/features; unset: the first one there."""

    name: ClassVar[str] = "features"
    steps: ClassVar[dict[Size, int]] = {"smoke": 30, "cpu": 390, "paper": 3900}
    """The second is one epoch of the training images of CIFAR-10, the third ten."""

    @classmethod
    def smoke(cls, data_dir: Path) -> "Features":
        """Return the small version of this workload.

        Args:
            data_dir: Folder that holds ``features``.

        Returns:
            A workload with a smaller batch.
        """
        return cls(data_dir, batch_size=32)

    @classmethod
    def paper(cls, data_dir: Path) -> "Features":
        """Return the same problem: ten epochs in batches of 128 are what EFCP has for it.

        Args:
            data_dir: Folder that holds ``features``.

        Returns:
            A workload.
        """
        return cls(data_dir)
