"""Brain tumours in magnetic resonance images by a U-Net: the lower-grade gliomas of The Cancer Genome Atlas.

After Buda, Saha and Mazurowski, "Association of genomic subtypes of lower-grade gliomas with shape features
automatically extracted by a deep learning algorithm" (2019), and their program for PyTorch,
https://github.com/mateuszbuda/brain-segmentation-pytorch: its network, its sampling of slices and its augmentation.
Other than there pictures are not cropped to the brain, and a fifth of the patients is held out, not ten.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.workloads.base import Batch, DataMissingError, Size, evaluating
from benchmarks.workloads.readers import read_colour_image, read_gray_image
from benchmarks.workloads.unet import EVAL_BATCH, Segmentation, soft_dice

Augment = Literal["none", "flips", "affine"]
"""``flips``: slices are mirrored with probability one half. ``affine``: they are turned and scaled a little, too."""

ORIGIN = "https://www.kaggle.com/datasets/mateuszbuda/lgg-mri-segmentation (folder kaggle_3m)"
HINT = "Put its folders TCGA_*, one per patient, into <data-dir>/lgg."
PLACES = ("lgg", "lgg/kaggle_3m", "lgg-mri-segmentation/kaggle_3m", "kaggle_3m", "")
HELD_OUT_EVERY = 5  # patients, in the order of their names, which groups them by hospital
EVAL_EVERY = 5  # held-out patients
UNIFORM_SHARE = 0.1  # of the draws of a slice, beside those in proportion to its tumour
ANGLE, SCALE = math.radians(15), 0.05


class Patient(NamedTuple):
    """The slices of one patient."""

    images: Tensor
    """Unsigned bytes ``[count, 3, side, side]``."""
    masks: Tensor
    """1 for tumour, else 0: unsigned bytes ``[count, 1, side, side]``."""
    mean: Tensor
    """Of all pixels, ``[3, 1, 1]``: intensities mean something beside those of the same patient only."""
    std: Tensor

    def normalised(self) -> Tensor:
        """Return the slices with zero mean and unit variance per channel."""
        return (self.images.float() - self.mean) / self.std


@dataclass(frozen=True)
class LGG(Segmentation):
    """Tumour against the rest, on whole slices of four fifths of the patients."""

    side: int = 128
    """Height and width that slices are scaled to; they come with 256."""
    augment: Augment = "flips"

    name: ClassVar[str] = "lgg"
    channels: ClassVar[int] = 3
    steps: ClassVar[dict[Size, int]] = {"smoke": 12, "cpu": 100, "paper": 20_000}
    small: ClassVar[dict[str, Any]] = {"batch_size": 4, "width": 4, "levels": 3, "side": 32}
    published: ClassVar[dict[str, Any]] = {
        "batch_size": 16, "width": 32, "levels": 5, "side": 256, "augment": "affine", "dice": 1.0,
    }  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_side("side", self.side)
        if self.augment not in get_args(Augment):
            raise ValueError(f"augment must be one of {', '.join(get_args(Augment))}, got {self.augment!r}")

    @property
    def examples(self) -> int:
        """Training slices: an epoch takes as many at random."""
        return sum(len(_slices(folder)) for folder in self._folders[0])

    def batches(self, seed: int) -> Iterator[Batch]:
        folders = self._folders[0]
        generator = torch.Generator().manual_seed(seed)
        while True:
            numbers = torch.randint(len(folders), (self.batch_size,), generator=generator).tolist()
            pairs = [self._draw(self._patient(folders[number]), generator) for number in numbers]
            images, masks = (torch.stack(parts) for parts in zip(*pairs, strict=True))
            yield (images, masks) if self.augment == "none" else augmented(images, masks, self.augment, generator)

    def evaluate(self, model: nn.Module, everything: bool = False) -> float:
        folders = self._folders[1][:: 1 if everything else EVAL_EVERY]
        with evaluating(model):
            return fmean(self._dice(model, self._patient(folder)) for folder in folders)

    def _dice(self, model: nn.Module, patient: Patient) -> float:
        found = torch.cat([model(part) for part in patient.normalised().split(EVAL_BATCH)]) > 0
        return float(soft_dice(found.double(), patient.masks.double()))

    def _draw(self, patient: Patient, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        areas = patient.masks.sum((1, 2, 3), dtype=torch.float64)
        weights = areas / areas.sum().clamp(min=1) + UNIFORM_SHARE / len(areas)
        index = int(torch.multinomial(weights, 1, generator=generator))
        return (patient.images[index].float() - patient.mean) / patient.std, patient.masks[index].float()

    def _patient(self, folder: Path) -> Patient:
        """Return the slices of a patient, which are read at the first use only."""
        if folder not in self._read:
            self._read[folder] = read_patient(folder, self.side)
        return self._read[folder]

    @cached_property
    def _read(self) -> dict[Path, Patient]:
        return {}

    @cached_property
    def _folders(self) -> tuple[list[Path], list[Path]]:
        """The patients: those to train on, and those held out."""
        folders = _find(self.data_dir)
        if len(folders) < HELD_OUT_EVERY:
            raise ValueError(f"{folders[0].parent} must hold at least {HELD_OUT_EVERY} patients, got {len(folders)}")
        held_out = folders[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
        return [folder for folder in folders if folder not in held_out], held_out


def read_patient(folder: Path, side: int) -> Patient:
    images, masks = [], []
    for picture, mask in _slices(folder):
        images.append(torch.from_numpy(read_colour_image(picture)))
        masks.append(torch.from_numpy(read_gray_image(mask)))
        if not images[0].shape[1:] == images[-1].shape[1:] == masks[-1].shape:
            sizes = [tuple(part.shape) for part in (images[0][0], images[-1][0], masks[-1])]
            raise ValueError(f"{mask} and {picture.name} must be of the size of the first slice, got {sizes}")
    pixels, tumours = torch.stack(images), (torch.stack(masks) > 127).to(torch.uint8).unsqueeze(1)
    if pixels.shape[2:] != (side, side):
        pixels = F.interpolate(pixels.float(), (side, side), mode="area").round_().to(torch.uint8)
        tumours = F.interpolate(tumours, (side, side), mode="nearest")
    std, mean = torch.std_mean(pixels.float(), (0, 2, 3), keepdim=True, correction=0)
    return Patient(pixels, tumours, mean[0], std[0].clamp(min=1.0))


def augmented(images: Tensor, masks: Tensor, augment: Augment, generator: torch.Generator) -> Batch:
    """Mirror slices with probability one half, and turn and scale them a little."""
    draws = torch.rand(len(images), 3, generator=generator)
    both = torch.cat([images, masks], 1)
    flip = draws[:, 0] < 0.5
    both[flip] = both[flip].flip(-1)
    if augment == "affine":
        angle, scale = ANGLE * (2 * draws[:, 1] - 1), 1 + SCALE * (2 * draws[:, 2] - 1)
        cos, sin, zero = scale * angle.cos(), scale * angle.sin(), torch.zeros(len(images))
        maps = torch.stack([cos, -sin, zero, sin, cos, zero], 1).view(-1, 2, 3)
        grid = F.affine_grid(maps, list(both.shape), align_corners=False)
        both = F.grid_sample(both, grid, padding_mode="border", align_corners=False)
    return both[:, :-1], (both[:, -1:] > 0.5).float()


def _find(data_dir: Path) -> list[Path]:
    for place in PLACES:
        folders = sorted(folder for folder in (data_dir / place).glob("TCGA_*") if folder.is_dir())
        if folders:
            return folders
    raise DataMissingError(data_dir / PLACES[0], ["TCGA_*/TCGA_*.tif"], ORIGIN, HINT)


def _slices(folder: Path) -> list[tuple[Path, Path]]:
    matches = [re.fullmatch(rf"{re.escape(folder.name)}_(\d+)\.tif", path.name) for path in folder.iterdir()]
    numbers = sorted(int(match[1]) for match in matches if match)
    names = [(f"{folder.name}_{number}.tif", f"{folder.name}_{number}_mask.tif") for number in numbers]
    missing = [mask for _, mask in names if not (folder / mask).is_file()]
    if missing or not names:
        raise DataMissingError(folder, missing or [f"{folder.name}_1.tif"], ORIGIN, HINT)
    return [(folder / picture, folder / mask) for picture, mask in names]
