"""MNIST in its standard files: where they are, and how they are read."""

from pathlib import Path

import torch
from torch import Tensor

from benchmarks.workloads.base import find_folder
from benchmarks.workloads.readers import read_idx

PIXELS = 784
TRAIN_IMAGES, TRAIN_LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"
TEST_IMAGES, TEST_LABELS = "t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"
ORIGIN = "https://ossci-datasets.s3.amazonaws.com/mnist/ (or any mirror of the MNIST IDX files)"
HINT = "Put the files into <data-dir>/mnist."


def find_mnist(data_dir: Path, files: tuple[str, ...]) -> Path:
    return find_folder((data_dir / "mnist", data_dir), files, ORIGIN, HINT)


def read_images(path: Path) -> Tensor:
    """Read one file of images as unsigned bytes, a quarter of what floats would take."""
    images = read_idx(path)
    if images.shape[1:] != (28, 28):
        raise ValueError(f"{path} must hold 28x28 images, got shape {images.shape}")
    return torch.from_numpy(images.reshape(-1, PIXELS).copy())


def read_labels(path: Path, count: int) -> Tensor:
    labels = read_idx(path)
    if labels.shape != (count,) or (count and labels.max() > 9):
        raise ValueError(f"{path} must hold {count} labels from 0 to 9, got shape {labels.shape}")
    return torch.from_numpy(labels.astype("int64"))
