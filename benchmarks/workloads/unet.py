"""Segmentation of cell membranes in electron microscopy images of ISBI 2012 with a small U-Net.

The network follows Ronneberger, Fischer, Brox, "U-Net: Convolutional networks for biomedical image segmentation"
(2015), figure 1, with batch norm, padded convolutions and fewer, narrower levels. The published size has the paper's
levels and widths, and takes one whole image per step, like the paper.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.workloads.base import Batch, Size, Workload, evaluating, find_folder
from benchmarks.workloads.readers import read_gray_image
from secondorder import Bernoulli, Likelihood

FOLDERS = ("image", "label")
IMAGES, HELD_OUT = 30, 6  # the last ones are held out
FILES = tuple(f"{folder}/{number}.png" for folder in FOLDERS for number in range(IMAGES))
EVAL_STRIDE = 5  # evaluate every fifth held-out tile; an image has 16 tiles
EVAL_BATCH = 8
MEAN, STD = 0.491, 0.171  # of the training pixels


def _double_conv(d_in: int, d_out: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (d_in, d_out):
        layers += [nn.Conv2d(channels, d_out, 3, padding=1, bias=False), nn.BatchNorm2d(d_out), nn.ReLU()]
    return nn.Sequential(*layers)


class _UNet(nn.Module):
    """Each level down halves the size and doubles the width. The way up concatenates the outputs of the way down."""

    def __init__(self, width: int, levels: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels)]
        steps = zip([1, *widths], widths, strict=False)
        self.down = nn.ModuleList(_double_conv(d_in, d_out) for d_in, d_out in steps)
        self.lift = nn.ModuleList(nn.ConvTranspose2d(2 * d_out, d_out, 2, stride=2) for d_out in widths[:-1])
        self.up = nn.ModuleList(_double_conv(2 * d_out, d_out) for d_out in widths[:-1])
        self.head = nn.Conv2d(width, 1, 1)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        for level, stage in enumerate(self.down):
            x = stage(F.max_pool2d(x, 2) if level else x)
            seen.append(x)
        for level in reversed(range(len(self.up))):
            x = self.up[level](torch.cat([seen[level], self.lift[level](x)], 1))
        logits: Tensor = self.head(x)
        return logits


@dataclass(frozen=True)
class UNet(Workload):
    """Mean binary cross-entropy over pixels, which are membrane or not, on random crops of 24 images."""

    data_dir: Path
    batch_size: int = 8
    width: int = 16  # number of channels of the first level
    levels: int = 4
    dice: float = 0.0
    """Weight of an additional soft Dice loss. See :meth:`criterion` for its effect on second-order methods."""
    crop: int = 128  # side of the crops and of the held-out tiles

    name: ClassVar[str] = "unet"
    metric: ClassVar[str] = "test Dice"
    likelihood: ClassVar[str | Likelihood] = Bernoulli(mean=True)
    steps: ClassVar[dict[Size, int]] = {"smoke": 12, "cpu": 100, "paper": 10_000}
    small: ClassVar[dict[str, Any]] = {"batch_size": 4, "width": 4, "levels": 3, "crop": 32}
    published: ClassVar[dict[str, Any]] = {"batch_size": 1, "width": 64, "levels": 5, "crop": 512}

    def __post_init__(self) -> None:
        if not 0 <= self.dice < math.inf:
            raise ValueError(f"dice must be >= 0 and finite, got {self.dice}")
        if self.crop < 1 or self.crop % 2 ** (self.levels - 1):  # halved once per level
            raise ValueError(f"crop must be a multiple of {2 ** (self.levels - 1)}, got {self.crop}")

    def network(self) -> nn.Module:
        return _UNet(self.width, self.levels)

    def criterion(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean binary cross-entropy over all pixels, plus ``dice`` times a soft Dice loss.

        The cross-entropy is a mean over examples, which methods with per-example curvature assume of a loss. Soft Dice
        is a ratio of two sums over the batch, and therefore not such a mean: the gradient of the part that belongs to
        one example, times the number of examples, is not the gradient of a loss of that example alone. Those methods
        still run, but their Fisher is only a heuristic, and ``likelihood`` does not describe it.
        """
        loss = F.binary_cross_entropy_with_logits(outputs, targets)
        return loss + self.dice * (1 - soft_dice(outputs.sigmoid(), targets)) if self.dice else loss

    @property
    def examples(self) -> int:
        """Number of disjoint crops in the training images. An epoch draws as many crops at random."""
        height, width = self._pairs.shape[-2:]
        return (IMAGES - HELD_OUT) * (height // self.crop) * (width // self.crop)

    def batches(self, seed: int) -> Iterator[Batch]:
        pairs = self._pairs[:, : IMAGES - HELD_OUT]
        count, *size = pairs.shape[1:]
        generator = torch.Generator().manual_seed(seed)
        limits = torch.tensor([count, *(side - self.crop + 1 for side in size), 4, 2])
        while True:
            draws = torch.rand(self.batch_size, len(limits), generator=generator).mul(limits).long().tolist()
            yield _as_batch(torch.stack([self._cut(pairs, *draw) for draw in draws], 1))

    def evaluate(self, model: nn.Module, everything: bool = False) -> float:
        tiles = self._pairs[:, IMAGES - HELD_OUT :].unfold(2, self.crop, self.crop).unfold(3, self.crop, self.crop)
        images, membranes = _as_batch(tiles.flatten(1, 3)[:, :: 1 if everything else EVAL_STRIDE])
        with evaluating(model):
            found = torch.cat([model(part) for part in images.split(EVAL_BATCH)]) > 0
        return float(soft_dice(found.double(), membranes.double()))

    def _cut(self, pairs: Tensor, image: int, top: int, left: int, turns: int, mirrored: int) -> Tensor:
        crop = pairs[:, image, top : top + self.crop, left : left + self.crop].rot90(turns, (1, 2))
        return crop.flip(2) if mirrored else crop

    @cached_property
    def _pairs(self) -> Tensor:
        """Images and labels as unsigned bytes ``[2, count, height, width]``."""
        folder = find_folder((self.data_dir / "membrane", self.data_dir), FILES, self.name)
        pictures = [torch.from_numpy(read_gray_image(folder / name)) for name in FILES]
        shapes = sorted({tuple(picture.shape) for picture in pictures})
        if len(shapes) > 1 or min(shapes[0]) < self.crop:
            raise ValueError(f"{folder} must hold pictures of one size, at least {self.crop} a side, got {shapes}")
        pairs: Tensor = torch.stack(pictures).unflatten(0, (len(FOLDERS), IMAGES))
        return pairs


def soft_dice(found: Tensor, targets: Tensor) -> Tensor:
    """Return the Dice coefficient of two sets of pixels, or of the probabilities that pixels belong to them."""
    dice: Tensor = (2 * (found * targets).sum() + 1) / (found.sum() + targets.sum() + 1)
    return dice


def _as_batch(pairs: Tensor) -> Batch:
    images, labels = pairs.unsqueeze(2)
    return images.float().div(255).sub(MEAN).div(STD), (labels < 128).float()
