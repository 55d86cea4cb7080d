"""The workloads, by name."""

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.workloads.base import Batch, DataMissingError, PackageMissingError, Size, Workload
from benchmarks.workloads.chargpt import CharGPT
from benchmarks.workloads.cifar import VGG16, ResNet20, ResNet32, ResNet110
from benchmarks.workloads.digits import Digits
from benchmarks.workloads.glue import Glue
from benchmarks.workloads.gpt2 import GPT2
from benchmarks.workloads.imagenet import ResNet18, ResNet50
from benchmarks.workloads.mnist import Autoencoder, Logistic
from benchmarks.workloads.multi30k import Multi30k
from benchmarks.workloads.poisson import Poisson
from benchmarks.workloads.squad import BertQA
from benchmarks.workloads.unet import UNet

__all__ = [
    "WORKLOADS", "Batch", "DataMissingError", "PackageMissingError", "Size", "Workload", "WorkloadName",
    "make_workload",
]  # fmt: skip

WorkloadName = Literal[
    "digits", "autoencoder", "resnet20", "chargpt", "logistic", "multi30k", "unet",
    "resnet32", "resnet110", "vgg16", "resnet18", "resnet50", "gpt2_small", "bert_qa", "glue", "poisson",
]  # fmt: skip

_KINDS: tuple[Any, ...] = (
    Digits, Autoencoder, ResNet20, CharGPT, Logistic, Multi30k, UNet, ResNet32, ResNet110, VGG16, ResNet18, ResNet50,
    GPT2, BertQA, Glue, Poisson,
)  # fmt: skip
WORKLOADS: dict[WorkloadName, Any] = {kind.name: kind for kind in _KINDS}


def make_workload(
    name: WorkloadName,
    data_dir: Path,
    size: Size = "cpu",
    batch_size: int | None = None,
    changes: Mapping[str, Any] | None = None,
) -> Workload:
    kind = WORKLOADS[name]
    changed = {**(changes or {}), **({} if batch_size is None else {"batch_size": batch_size})}
    known = [field.name for field in fields(kind)]
    if unknown := [key for key in changed if key not in known]:
        raise ValueError(f"{name} has no field {', '.join(unknown)}, only {', '.join(known)}")
    made: Workload = replace(kind.of_size(size, data_dir), **changed)
    return made
