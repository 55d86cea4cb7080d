"""A small convolutional network on scikit-learn's handwritten digits of 8x8 pixels. A step takes milliseconds."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from sklearn.datasets import load_digits
from torch import nn

from benchmarks.workloads.base import Batch, Classification, InMemory, Size, accuracy

TEST_EXAMPLES = 360  # one fifth of 1797
_SPLIT_SEED = 0  # the split is part of the workload, not of a run


@dataclass(frozen=True)
class Digits(InMemory, Classification):
    """Cross-entropy on scikit-learn's digits: 1437 training and 360 test images."""

    data_dir: Path | None = None  # unused, because the data is part of scikit-learn
    batch_size: int = 256
    channels: tuple[int, int] = (16, 32)

    name: ClassVar[str] = "digits"
    metric: ClassVar[str] = "test accuracy"
    steps: ClassVar[dict[Size, int]] = {"smoke": 30, "cpu": 200, "paper": 200}
    small: ClassVar[dict[str, Any]] = {"batch_size": 64, "channels": (4, 8)}

    def network(self) -> nn.Module:
        first, second = self.channels
        return nn.Sequential(
            nn.Conv2d(1, first, 3, padding=1), nn.ReLU(), nn.Conv2d(first, second, 3, stride=2, padding=1),
            nn.ReLU(), nn.Flatten(), nn.Linear(second * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10),
        )  # fmt: skip

    def evaluate(self, model: nn.Module, everything: bool = False) -> float:
        return accuracy(model, *self._test)

    @cached_property
    def _examples(self) -> Batch:
        digits = load_digits()
        order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(_SPLIT_SEED))
        images = torch.from_numpy(digits.images).float().div(16).unsqueeze(1)
        return images[order], torch.from_numpy(digits.target).long()[order]

    @cached_property
    def train(self) -> Batch:
        images, labels = self._examples
        return images[TEST_EXAMPLES:], labels[TEST_EXAMPLES:]

    @property
    def _test(self) -> Batch:
        images, labels = self._examples
        return images[:TEST_EXAMPLES], labels[:TEST_EXAMPLES]
