"""ResNet-18 and ResNet-50 on ImageNet in its usual folders, with worker processes that decode images for GPUs.

The setup follows He et al., "Deep residual learning for image recognition" (2016), section 4.1: batches of 256 images,
with crops of random size and shape as in Szegedy et al., "Going deeper with convolutions" (2015), and 90 epochs as in
Goyal et al., "Accurate, large minibatch SGD" (2017).
"""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageOps
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

from benchmarks.workloads.base import Batch, Classification, DataMissingError, Size, evaluating, shuffled_indices
from benchmarks.workloads.readers import opened_picture
from benchmarks.workloads.resnets import BlockName, imagenet_resnet

PARTS = ("train", "val")
SUFFIXES = (".jpeg", ".jpg", ".png")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of the training pixels, per channel
EVAL_PICTURES, EVAL_BATCH = 1000, 100
AREAS, RATIOS, ATTEMPTS = (0.08, 1.0), (3 / 4, 4 / 3), 10
MARGIN = 1 / 16  # of a test image, at each side: the usual crop of 224 pixels from 256

Draw = tuple[int, int]  # index of an image and the seed of its crop, which is -1 for a center crop


@dataclass(frozen=True)
class ImageNet(Classification):
    """Cross-entropy on crops of random size and shape, which are mirrored with probability 1/2.

    The defaults are for a CPU: the first 100 classes, small crops, and a narrower network.
    """

    data_dir: Path
    batch_size: int = 64
    classes: int = 100  # number of classes: the first ones in the order of the folders' names
    side: int = 64  # height and width of a crop
    depths: tuple[int, int, int, int] = (2, 2, 2, 2)  # number of blocks in each stage
    width: int = 32  # number of channels in the blocks of the first stage
    label_smoothing: float = 0.0
    workers: int = 0
    """Number of processes that decode images. With 0, the main process decodes them."""

    name: ClassVar[str]
    metric: ClassVar[str] = "test accuracy"
    block: ClassVar[BlockName] = "basic"
    steps: ClassVar[dict[Size, int]] = {"smoke": 12, "cpu": 60, "paper": 450_000}
    small: ClassVar[dict[str, Any]] = {"batch_size": 8, "classes": 4, "side": 32, "depths": (1, 1, 1, 1), "width": 8}
    published: ClassVar[dict[str, Any]] = {"batch_size": 256, "classes": 1000, "side": 224, "width": 64, "workers": 8}

    def __post_init__(self) -> None:
        self.check_smoothing()
        if self.workers < 0:
            raise ValueError(f"workers must be >= 0, got {self.workers}")

    @property
    def examples(self) -> int:
        return len(self._train)

    def network(self) -> nn.Module:
        return imagenet_resnet(self.block, self.depths, self.width, self.classes)

    def batches(self, seed: int, skip: int = 0, rank: int = 0, ranks: int = 1) -> Iterator[Batch]:
        if self.batch_size % ranks:
            raise ValueError(f"a batch of {self.batch_size} cannot be divided evenly among {ranks} ranks")
        share = self.batch_size // ranks
        draws = islice(_draws(len(self._train), self.batch_size, seed), skip, None)
        yield from self._decoded(self._train, (draw[rank * share : (rank + 1) * share] for draw in draws))

    def evaluate(self, model: nn.Module, everything: bool = False) -> float:
        """Return the accuracy on center crops of about 1,000 held-out images, spread over the classes, or of all."""
        stride = 1 if everything else max(1, len(self._val) // EVAL_PICTURES)
        numbers = range(0, len(self._val), stride)
        draws = ([(n, -1) for n in numbers[i : i + EVAL_BATCH]] for i in range(0, len(numbers), EVAL_BATCH))
        with evaluating(model):
            hits = sum(int((model(x).argmax(1) == y).sum()) for x, y in self._decoded(self._val, draws))
        return hits / len(numbers)

    def _decoded(self, pictures: "Pictures", draws: Iterator[list[Draw]]) -> Iterator[Batch]:
        # Without a generator, the loader would draw the seed of its workers from torch's global generator.
        options: dict[str, Any] = {"num_workers": self.workers, "generator": torch.Generator().manual_seed(0)}
        return iter(DataLoader(pictures, batch_sampler=draws, collate_fn=_collate, **options))

    @cached_property
    def _folder(self) -> Path:
        candidates = (self.data_dir / "imagenet", self.data_dir)
        complete = [folder for folder in candidates if all((folder / part).is_dir() for part in PARTS)]
        if not complete:
            missing = [part for part in PARTS if not (candidates[0] / part).is_dir()]
            raise DataMissingError(candidates[0], [f"{part}/<class>/*.JPEG" for part in missing], self.name)
        return complete[0]

    @cached_property
    def _names(self) -> list[str]:
        """Names of the classes, which are those of the training folders."""
        names = sorted(entry.name for entry in os.scandir(self._folder / "train") if entry.is_dir())
        if len(names) < self.classes:
            folder, count = self._folder / "train", len(names)
            raise ValueError(f"{folder} must hold {self.classes} classes, got {count}: set classes={count} for fewer")
        return names[: self.classes]

    @cached_property
    def _train(self) -> "Pictures":
        return Pictures(self._folder / "train", self._names, self.side)

    @cached_property
    def _val(self) -> "Pictures":
        return Pictures(self._folder / "val", self._names, self.side)


@dataclass(frozen=True)
class ResNet18(ImageNet):
    name: ClassVar[str] = "resnet18"


@dataclass(frozen=True)
class ResNet50(ImageNet):
    depths: tuple[int, int, int, int] = (3, 4, 6, 3)
    width: int = 16

    name: ClassVar[str] = "resnet50"
    block: ClassVar[BlockName] = "bottleneck"


class Pictures(Dataset[tuple[Tensor, int]]):
    """The images of some folders, one per class. Images are decoded and cropped on access."""

    def __init__(self, folder: Path, classes: Sequence[str], side: int) -> None:
        self.folder, self.side = folder, side
        names: list[bytes] = []
        labels: list[int] = []
        for label, name in enumerate(classes):
            found = _pictures_in(folder / name)
            if not found:
                raise ValueError(f"{folder / name} must hold pictures ({', '.join(SUFFIXES)}), got none")
            names += [os.fsencode(f"{name}/{file}") for file in found]
            labels += [label] * len(found)
        # Arrays, because changes of reference counts would copy the memory of lists in every worker.
        self.names: npt.NDArray[np.bytes_] = np.array(names)
        self.labels: npt.NDArray[np.int64] = np.array(labels, np.int64)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, draw: Draw) -> tuple[Tensor, int]:
        number, seed = draw
        with opened_picture(self.folder / os.fsdecode(self.names[number])) as picture:
            colors = picture.convert("RGB")
            crop = middle_crop(colors, self.side) if seed < 0 else random_crop(colors, self.side, seed)
        pixels = torch.from_numpy(np.array(crop, np.uint8)).permute(2, 0, 1)
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
        return pixels.float().div_(255).sub_(mean).div_(std), int(self.labels[number])


def random_crop(picture: Image.Image, side: int, seed: int) -> Image.Image:
    """Crop a random part of random area and shape, scale it to a square, and mirror it with probability 1/2."""
    generator = torch.Generator().manual_seed(seed)
    box = _random_box(*picture.size, generator)
    crop = picture.resize((side, side), Image.Resampling.BILINEAR, box)
    return crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if torch.rand((), generator=generator) < 0.5 else crop


def middle_crop(picture: Image.Image, side: int) -> Image.Image:
    """Return the center square of an image without :data:`MARGIN` of its shorter side, scaled to ``side``."""
    return ImageOps.fit(picture, (side, side), Image.Resampling.BILINEAR, MARGIN)


def _random_box(width: int, height: int, generator: torch.Generator) -> tuple[int, int, int, int]:
    """Draw the area, the aspect ratio and the position of a part of an image."""
    for area, ratio, left, top in torch.rand(ATTEMPTS, 4, generator=generator).tolist():
        pixels = width * height * (AREAS[0] + (AREAS[1] - AREAS[0]) * area)
        shape = RATIOS[0] * (RATIOS[1] / RATIOS[0]) ** ratio
        w, h = round(math.sqrt(pixels * shape)), round(math.sqrt(pixels / shape))
        if 0 < w <= width and 0 < h <= height:
            x, y = int(left * (width - w + 1)), int(top * (height - h + 1))
            return x, y, x + w, y + h
    w, h = min(width, round(height * RATIOS[1])), min(height, round(width * RATIOS[1]))
    x, y = (width - w) // 2, (height - h) // 2
    return x, y, x + w, y + h


def _draws(count: int, batch_size: int, seed: int) -> Iterator[list[Draw]]:
    generator = torch.Generator().manual_seed(seed)
    for index in shuffled_indices(count, batch_size, generator):
        seeds = torch.randint(2**62, (batch_size,), generator=generator)
        yield list(zip(index.tolist(), seeds.tolist(), strict=True))


def _collate(examples: list[tuple[Tensor, int]]) -> Batch:
    images, labels = default_collate(examples)  # in a worker, this writes to shared memory
    return images, labels


def _pictures_in(folder: Path) -> list[str]:
    if not folder.is_dir():
        return []
    return sorted(entry.name for entry in os.scandir(folder) if entry.name.lower().endswith(SUFFIXES))
