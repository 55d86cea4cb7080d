"""Workloads on random numbers, for timing steps of published shapes without data."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from typing import Any, ClassVar

import torch

from benchmarks.workloads.base import Batch, Size, Workload
from benchmarks.workloads.gpt2 import GPT2
from benchmarks.workloads.imagenet import ResNet50


@dataclass(frozen=True)
class RandomResNet50(ResNet50):
    def batches(self, seed: int, skip: int = 0, rank: int = 0, ranks: int = 1) -> Iterator[Batch]:
        """Yield the same random batch forever, because the cost of a step does not depend on it."""
        generator = torch.Generator().manual_seed(seed)
        count = self.batch_size // ranks
        pictures = torch.randn(count, 3, self.side, self.side, generator=generator)
        labels = torch.randint(self.classes, (count,), generator=generator)
        yield from repeat((pictures, labels))


@dataclass(frozen=True)
class RandomGPT2(GPT2):
    tokens: int = 50_257
    """Number of different tokens. The default is the number of byte pairs of GPT-2."""

    small: ClassVar[dict[str, Any]] = {**GPT2.small, "tokens": 64}

    def batches(self, seed: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed)
        text = torch.randint(self.tokens, (self.batch_size, self.context + 1), generator=generator)
        yield from repeat((text[:, :-1], text[:, 1:]))

    @property
    def _vocabulary(self) -> int:
        return self.tokens


def random_workload(name: str, size: Size, batch_size: int | None = None) -> Workload:
    kinds: dict[str, type[RandomResNet50 | RandomGPT2]] = {"resnet50": RandomResNet50, "gpt2_small": RandomGPT2}
    if name not in kinds:
        raise ValueError(f"random batches are made for {' and '.join(kinds)} only, not for {name}")
    kind = kinds[name]
    found = kind.of_size(size, Path())
    return found if batch_size is None else replace(found, batch_size=batch_size)
