"""The workloads, by name."""

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.workloads.autoencoder import Autoencoder
from benchmarks.workloads.base import Batch, DataMissingError, Size, Workload
from benchmarks.workloads.chargpt import CharGPT
from benchmarks.workloads.digits import Digits
from benchmarks.workloads.logistic import Logistic
from benchmarks.workloads.multi30k import Multi30k
from benchmarks.workloads.resnet20 import ResNet20
from benchmarks.workloads.unet import UNet

__all__ = ["WORKLOADS", "Batch", "DataMissingError", "Size", "Workload", "WorkloadName", "make_workload"]

WorkloadName = Literal["digits", "autoencoder", "resnet20", "chargpt", "logistic", "multi30k", "unet"]

WORKLOADS: dict[WorkloadName, type[Digits | Autoencoder | ResNet20 | CharGPT | Logistic | Multi30k | UNet]] = {
    "digits": Digits,
    "autoencoder": Autoencoder,
    "resnet20": ResNet20,
    "chargpt": CharGPT,
    "logistic": Logistic,
    "multi30k": Multi30k,
    "unet": UNet,
}


def make_workload(
    name: WorkloadName,
    data_dir: Path,
    size: Size = "cpu",
    batch_size: int | None = None,
    changes: Mapping[str, Any] | None = None,
) -> Workload:
    """Return a workload.

    Args:
        name: Which one.
        data_dir: Folder with one folder per data set.
        size: ``"smoke"`` for the small version.
        batch_size: Another batch size than the workload's own.
        changes: Values of its fields that replace its own.

    Returns:
        The workload; its data is read at the first use.

    Raises:
        ValueError: When it has no such field.
    """
    kind = WORKLOADS[name]
    workload = kind.smoke(data_dir) if size == "smoke" else kind(data_dir)
    changed = {**(changes or {}), **({} if batch_size is None else {"batch_size": batch_size})}
    known = [field.name for field in fields(workload)]
    if unknown := [key for key in changed if key not in known]:
        raise ValueError(f"{name} has no field {', '.join(unknown)}, only {', '.join(known)}")
    return replace(workload, **changed)
