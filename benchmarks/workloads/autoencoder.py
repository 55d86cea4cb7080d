"""The deep autoencoder on MNIST: 784-1000-500-250-30 and back, the classic test bed of second-order methods.

After Hinton and Salakhutdinov, "Reducing the dimensionality of data with neural networks", Science 313 (2006),
with tanh instead of logistic units, as in Martens and Grosse, "Optimizing neural networks with Kronecker-factored
approximate curvature" (2015).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.workloads.base import Batch, Size, Supervised, evaluating, seeded, shuffled_indices
from benchmarks.workloads.mnist import PIXELS, TEST_IMAGES, TRAIN_IMAGES, find_mnist, read_images
from secondorder import Likelihood


@dataclass(frozen=True)
class Autoencoder(Supervised):
    """Binary cross-entropy of the pixels, summed over pixels, mean over the batch."""

    data_dir: Path
    batch_size: int = 512
    widths: tuple[int, ...] = (1000, 500, 250, 30)
    """Encoder widths; the decoder mirrors them. The last one is the linear code."""

    name: ClassVar[str] = "autoencoder"
    metric: ClassVar[str] = "test loss"
    likelihood: ClassVar[str | Likelihood] = "bernoulli"
    steps: ClassVar[dict[Size, int]] = {
        "smoke": 200,
        "cpu": 300,
    }  # the small one needs them to leave its first plateau

    @classmethod
    def smoke(cls, data_dir: Path) -> "Autoencoder":
        """Return the small version of this workload.

        Args:
            data_dir: Folder that holds ``mnist``.

        Returns:
            A workload with a narrower model and a smaller batch.
        """
        return cls(data_dir, batch_size=64, widths=(128, 64, 16))

    @property
    def examples(self) -> int:
        """Training examples: an epoch takes all of them once."""
        return len(self._train)

    def build_model(self, seed: int) -> nn.Module:
        """Return the autoencoder with Xavier-uniform weights and zero biases.

        Args:
            seed: Seed of the initial weights.

        Returns:
            A model from ``[batch, 784]`` to logits ``[batch, 784]``.
        """
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
        """Yield shuffled training batches for ever; the target of an image is the image.

        Args:
            seed: Seed of the shuffling.

        Yields:
            The same images ``[batch, 784]`` in [0, 1] twice.
        """
        generator = torch.Generator().manual_seed(seed)
        for index in shuffled_indices(len(self._train), self.batch_size, generator):
            images = self._train[index].float().div_(255)
            yield images, images

    def criterion(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the reconstruction loss of one batch.

        Args:
            outputs: Logits ``[batch, 784]``.
            targets: Images of the same shape.

        Returns:
            A 0-dim tensor: nats per image.
        """
        return F.binary_cross_entropy_with_logits(outputs, targets, reduction="sum") / len(targets)

    def evaluate(self, model: nn.Module, everything: bool = False) -> float:
        """Return the reconstruction loss on the test images.

        Args:
            model: The autoencoder.
            everything: Not used: it is always all of them.

        Returns:
            Nats per image.
        """
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
