"""Shapes of the parameters of known models, and what a sparse row keeps of them."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch

from benchmarks.workloads import WorkloadName, make_workload
from benchmarks.workloads.resnets import BlockName, imagenet_resnet
from secondorder import TopK

Shape = tuple[int, ...]
SizeName = Literal["digits", "resnet20", "autoencoder", "large", "resnet50"]


def shapes_of(name: SizeName) -> list[Shape]:
    return _SIZES[name]()


def count(shapes: Sequence[Shape]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def kept(length: int, top_k: TopK) -> int:
    if length == top_k.block_size >= 64:
        return min(length, max(8, 8 * round(top_k.density * length / 8)))
    return max(1, math.ceil(top_k.density * length))


def _of_workload(name: WorkloadName) -> list[Shape]:
    model = make_workload(name, Path()).build_model(0)  # these models do not depend on data
    return [tuple(p.shape) for p in model.parameters()]


def _resnet(block: BlockName, depths: Sequence[int]) -> list[Shape]:
    with torch.device("meta"):
        return [tuple(p.shape) for p in imagenet_resnet(block, depths).parameters()]


_SIZES: dict[SizeName, Callable[[], list[Shape]]] = {
    "digits": lambda: _of_workload("digits"),
    "resnet20": lambda: _of_workload("resnet20"),
    "autoencoder": lambda: _of_workload("autoencoder"),
    "large": lambda: _resnet("basic", (2, 2, 2, 2)),
    "resnet50": lambda: _resnet("bottleneck", (3, 4, 6, 3)),
}
