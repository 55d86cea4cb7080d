"""The workloads, by name."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

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


def make_workload(name: WorkloadName, data_dir: Path, size: Size = "full", batch_size: int | None = None) -> Workload:
    """Return a workload.

    Args:
        name: Which one.
        data_dir: Folder with one folder per data set.
        size: ``"smoke"`` for the small version.
        batch_size: Another batch size than the workload's own.

    Returns:
        The workload; its data is read at the first use.
    """
    kind = WORKLOADS[name]
    workload = kind.smoke(data_dir) if size == "smoke" else kind(data_dir)
    return workload if batch_size is None else replace(workload, batch_size=batch_size)
