"""The deep autoencoder on MNIST: 784-1000-500-250-30 and back, the classic test bed of second-order methods.

After Hinton and Salakhutdinov, "Reducing the dimensionality of data with neural networks", Science 313 (2006),
with tanh instead of logistic units, as in Martens and Grosse, "Optimizing neural networks with Kronecker-factored
approximate curvature" (2015). Their batches grow exponentially from 1,000 images to all of them at step 500, as in
``kfac/examples/autoencoder_mnist.py`` of https://github.com/tensorflow/kfac; so they do here at the published size.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import count, pairwise
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.workloads.base import Batch, Size, Supervised, evaluating, seeded, shuffled_indices
from benchmarks.workloads.mnist import PIXELS, TEST_IMAGES, TRAIN_IMAGES, find_mnist, read_images
from secondorder import Likelihood

SHARES = 8
"""Batches that grow have multiples of this, so that so many ranks can share each."""


@dataclass(frozen=True)
class Autoencoder(Supervised):
    """Binary cross-entropy of the pixels, summed over pixels, mean over the batch."""

    data_dir: Path
    batch_size: int = 512
    widths: tuple[int, ...] = (1000, 500, 250, 30)
    """Encoder widths; the decoder mirrors them. The last one is the linear code."""
    growth_steps: int = 0
    """Step at which a batch, growing exponentially from the first, is all of the training images; 0: none grows."""

    name: ClassVar[str] = "autoencoder"
    metric: ClassVar[str] = "test loss"
    likelihood: ClassVar[str | Likelihood] = "bernoulli"
    steps: ClassVar[dict[Size, int]] = {
        "smoke": 200,
        "cpu": 300,
        "paper": 500,
    }  # the small one needs them to leave its first plateau
    small: ClassVar[dict[str, Any]] = {"batch_size": 64, "widths": (128, 64, 16)}
    published: ClassVar[dict[str, Any]] = {"batch_size": 1000, "growth_steps": 500}

    def __post_init__(self) -> None:
        if self.growth_steps < 0 or self.growth_steps == 1:
            raise ValueError(f"growth_steps must be 0 or at least 2, got {self.growth_steps}")

    @property
    def examples(self) -> int:
        return len(self._train)

    def build_model(self, seed: int) -> nn.Module:
        widths = (PIXELS, *self.widths, *reversed(self.widths[:-1]), PIXELS)
        code = len(self.widths) - 1
        layers: list[nn.Module] = []
        with seeded(seed):
            for index, (d_in, d_out) in enumerate(pairwise(widths)):
                linear = nn.Linear(d_in, d_out)
                nn.init.xavier_uniform_(linear.weight)
                nn.init.zeros_(linear.bias)
                is_linear = index == code or index == len(widths) - 2
                layers += [linear] if is_linear else [linear, nn.Tanh()]
        return nn.Sequential(*layers)

    def batches(self, seed: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed)
        for index in self._indices(generator):
            images = self._train[index].float().div_(255)
            yield images, images

    def _indices(self, generator: torch.Generator) -> Iterator[Tensor]:
        """Yield index batches for ever; each of those that grow is drawn from all images."""
        examples = len(self._train)
        if not self.growth_steps:
            yield from shuffled_indices(examples, self.batch_size, generator)
            return
        growth = examples / self.batch_size
        for step in count():
            size = round(self.batch_size * growth ** min(1.0, step / (self.growth_steps - 1)))
            size -= size % SHARES if size >= SHARES else 0
            yield next(shuffled_indices(examples, size, generator))

    def criterion(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(outputs, targets, reduction="sum") / len(targets)

    def evaluate(self, model: nn.Module, everything: bool = False) -> float:
        with evaluating(model):
            images = self._test.float().div_(255)
            return float(self.loss(model, (images, images)))

    @cached_property
    def _folder(self) -> Path:
        return find_mnist(self.data_dir, (TRAIN_IMAGES, TEST_IMAGES))

    @cached_property
    def _train(self) -> Tensor:
        return read_images(self._folder / TRAIN_IMAGES)

    @cached_property
    def _test(self) -> Tensor:
        return read_images(self._folder / TEST_IMAGES)
