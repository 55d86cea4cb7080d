"""Shapes of the parameters of known models: all that a window of gradients depends on."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from benchmarks.workloads import WorkloadName, make_workload

Shape = tuple[int, ...]
SizeName = Literal["digits", "resnet20", "autoencoder", "large", "resnet50"]


def shapes_of(name: SizeName) -> list[Shape]:
    """Return the shapes of one model's parameters.

    Args:
        name: A workload, or ``large`` for ResNet-18 and ``resnet50``, both as for ImageNet.

    Returns:
        The shapes.
    """
    return _SIZES[name]()


def count(shapes: Sequence[Shape]) -> int:
    """Return the number of entries of tensors, d.

    Args:
        shapes: Their shapes.

    Returns:
        The sum of their products.
    """
    return sum(math.prod(shape) for shape in shapes)


def _of_workload(name: WorkloadName) -> list[Shape]:
    model = make_workload(name, Path()).build_model(0)  # these models do not depend on data
    return [tuple(p.shape) for p in model.parameters()]


def _resnet(blocks: Sequence[int], expansion: int) -> list[Shape]:
    """Return the shapes of a ResNet for ImageNet (He et al., 2016, table 1).

    Args:
        blocks: Blocks in each of the four stages.
        expansion: 1 for blocks of two 3x3 convolutions, 4 for bottlenecks.

    Returns:
        The shapes.
    """
    shapes = _conv_norm(3, 64, 7)
    d_in = 64
    for stage, depth in enumerate(blocks):
        width = 64 * 2**stage
        d_out = expansion * width
        for _ in range(depth):
            if expansion == 1:
                shapes += _conv_norm(d_in, width, 3) + _conv_norm(width, width, 3)
            else:
                shapes += _conv_norm(d_in, width, 1) + _conv_norm(width, width, 3) + _conv_norm(width, d_out, 1)
            if d_in != d_out:
                shapes += _conv_norm(d_in, d_out, 1)  # of the shortcut
            d_in = d_out
    return [*shapes, (1000, d_in), (1000,)]


def _conv_norm(d_in: int, d_out: int, side: int) -> list[Shape]:
    return [(d_out, d_in, side, side), (d_out,), (d_out,)]


_SIZES: dict[SizeName, Callable[[], list[Shape]]] = {
    "digits": lambda: _of_workload("digits"),
    "resnet20": lambda: _of_workload("resnet20"),
    "autoencoder": lambda: _of_workload("autoencoder"),
    "large": lambda: _resnet((2, 2, 2, 2), 1),
    "resnet50": lambda: _resnet((3, 4, 6, 3), 4),
}
