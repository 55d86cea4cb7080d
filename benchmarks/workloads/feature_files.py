"""Files of features: inputs and classes as arrays, such as what a trained network makes of images."""

import zipfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.workloads.base import Batch, DataMissingError

INPUTS, TARGETS = ("inputs", "test_inputs"), ("targets", "test_targets")
ORIGIN = "python -m benchmarks features, or any program that saves the arrays inputs and targets by numpy.savez"
_HELD_OUT = 10
"""Every which example is held out where the file has no test set."""

Array = npt.NDArray[np.generic]


def find_features(data_dir: Path, name: str = "") -> Path:
    """Return a file of features.

    Args:
        data_dir: Folder with one folder per data set.
        name: A path, or the name of a file in ``<data-dir>/features`` with or without its ending; empty: the first
            file there.

    Returns:
        Its path.

    Raises:
        DataMissingError: When there is none.
    """
    folder = data_dir / "features"
    candidates = [Path(name), folder / name, folder / f"{name}.npz"] if name else sorted(folder.glob("*.npz"))
    found = next((path for path in candidates if path.is_file()), None)
    if found is None:
        hint = "Put the file into <data-dir>/features, or name it with --workload-set features=PATH."
        raise DataMissingError(folder, [name or "*.npz"], ORIGIN, hint)
    return found


def read_features(path: Path) -> tuple[Batch, Batch]:
    """Read a file of features.

    Args:
        path: An ``.npz`` file.

    Returns:
        Inputs ``[count, features]`` and classes ``[count]`` for training, and the same held out.

    Raises:
        ValueError: When it is damaged, or arrays are missing or do not fit.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in (*INPUTS, *TARGETS) if name in file}
    except (OSError, EOFError, ValueError, zipfile.BadZipFile) as err:
        raise ValueError(f"{path} must be an .npz file of arrays: {err}") from err
    own, held = (_table(path, arrays, *names) for names in zip(INPUTS, TARGETS, strict=True))
    if own is None:
        raise ValueError(f"{path} must hold {INPUTS[0]} and {TARGETS[0]}, got {', '.join(arrays) or 'neither'}")
    if held is None:
        out = torch.arange(len(own[1])) % _HELD_OUT == _HELD_OUT - 1
        own, held = (own[0][~out], own[1][~out]), (own[0][out], own[1][out])
    if own[0].shape[1] != held[0].shape[1] or not len(held[1]):
        raise ValueError(f"{path}: held-out inputs must be some of shape {own[0].shape[1]}, got {held[0].shape}")
    return own, held


def _table(path: Path, arrays: dict[str, Array], inputs_name: str, targets_name: str) -> Batch | None:
    """Return one set of examples, or None when the file has neither of its arrays."""
    inputs, targets = arrays.get(inputs_name), arrays.get(targets_name)
    if inputs is None and targets is None:
        return None
    if inputs is None or targets is None:
        raise ValueError(f"{path} must hold both {inputs_name} and {targets_name}, got one of them")
    if inputs.ndim != 2 or inputs.dtype.kind not in "fiu" or not np.isfinite(inputs).all():
        raise ValueError(f"{path}: {inputs_name} must be finite numbers [count, features], got {inputs.shape}")
    if targets.shape != inputs.shape[:1] or targets.dtype.kind not in "iu" or (targets.size and targets.min() < 0):
        raise ValueError(
            f"{path}: {targets_name} must be {len(inputs)} classes from 0 on, got {targets.dtype} {targets.shape}"
        )
    return torch.from_numpy(inputs.astype("float32")), torch.from_numpy(targets.astype("int64"))
