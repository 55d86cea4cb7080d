"""Readers of the standard file formats: IDX (MNIST), the Python pickles of CIFAR-10 and CIFAR-100, and images.

They need no library for data sets, and they do not download anything.
"""

import gzip
import pickle
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from PIL import Image

UInt8Array = npt.NDArray[np.uint8]
CifarName = Literal["cifar10", "cifar100"]

#: The errors that damaged bytes cause in the unpickler, and in Pillow. MemoryError is one of a wrong length.
_DAMAGED = (
    ArithmeticError, AttributeError, EOFError, ImportError, LookupError, MemoryError, RuntimeError, SystemError,
    TypeError, ValueError,
)  # fmt: skip
_DAMAGED_PICKLE = (*_DAMAGED, pickle.PickleError)
_DAMAGED_PICTURE = (*_DAMAGED, Image.DecompressionBombError, OSError, SyntaxError, struct.error, zlib.error)
_IDX_UINT8 = 0x08  # third byte of the magic number: element type

# The name of each data set, the key of the labels in its batches, and its number of classes.
_CIFAR: dict[CifarName, tuple[str, str, int]] = {
    "cifar10": ("CIFAR-10", "labels", 10),
    "cifar100": ("CIFAR-100", "fine_labels", 100),
}

# The only names in a CIFAR batch: those of NumPy arrays, and of bytes that Python 3 wrote in protocol 2.
_PICKLE_NAMES = {
    ("numpy.core.multiarray", "_reconstruct"), ("numpy._core.multiarray", "_reconstruct"), ("numpy", "ndarray"),
    ("numpy", "dtype"), ("_codecs", "encode"),
}  # fmt: skip


def read_idx(path: Path) -> UInt8Array:
    try:
        raw = gzip.decompress(path.read_bytes())
    except (EOFError, zlib.error, gzip.BadGzipFile) as err:
        raise ValueError(f"{path} is truncated or not gzip: {err}") from err
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] != _IDX_UINT8:
        raise ValueError(f"{path} is not an IDX file of unsigned bytes: magic number {raw[:4].hex()}")
    header = 4 + 4 * raw[3]
    if len(raw) < header:
        raise ValueError(f"{path} is truncated: its header needs {header} bytes, got {len(raw)}")
    shape = struct.unpack(f">{raw[3]}I", raw[4:header])
    data = np.frombuffer(raw, np.uint8, offset=header)
    if data.size != np.prod(shape, dtype=np.int64):
        raise ValueError(f"{path} is truncated or damaged: header says {shape}, got {data.size} bytes")
    return data.reshape(shape)


class _ArrayUnpickler(pickle.Unpickler):
    """Loads NumPy arrays and plain containers, and rejects all other names, because a data file must not run code."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        if (module_name, global_name) not in _PICKLE_NAMES:
            raise pickle.UnpicklingError(f"refused to load {module_name}.{global_name}")
        current = module_name.replace("numpy.core", "numpy._core")  # the name before NumPy 2
        return getattr(import_module(current), global_name)


def read_cifar_batch(path: Path, dataset: CifarName = "cifar10") -> tuple[UInt8Array, npt.NDArray[np.int64]]:
    label, key, classes = _CIFAR[dataset]
    try:
        with path.open("rb") as file:
            batch = _ArrayUnpickler(file, encoding="bytes").load()
        if not isinstance(batch, dict):
            raise pickle.UnpicklingError(f"expected a dictionary, got {type(batch).__name__}")
        batch = {key.decode() if isinstance(key, bytes) else key: value for key, value in batch.items()}
        images = np.asarray(batch["data"], np.uint8).reshape(-1, 3, 32, 32)
        labels = np.asarray(batch[key], np.int64)
    except _DAMAGED_PICKLE as err:
        raise ValueError(f"{path} is truncated or not a {label} batch: {err}") from err
    if labels.shape != (len(images),):
        raise ValueError(f"{path} is damaged: {len(images)} images but {labels.size} labels")
    if labels.size and not 0 <= labels.min() <= labels.max() < classes:
        raise ValueError(f"{path} must hold labels from 0 to {classes - 1}, got {labels.min()} to {labels.max()}")
    return images, labels


def read_gray_image(path: Path) -> UInt8Array:
    with opened_picture(path) as picture:
        if picture.mode != "L":
            raise ValueError(f"{path} must have 8 bits of gray a pixel, got mode {picture.mode}")
        return np.array(picture, np.uint8)


@contextmanager
def opened_picture(path: Path) -> Iterator[Image.Image]:
    try:
        picture = Image.open(path)
        picture.load()
    except FileNotFoundError:
        raise
    except _DAMAGED_PICTURE as err:
        raise ValueError(f"{path} is truncated or no picture: {err}") from err
    with picture:
        yield picture
