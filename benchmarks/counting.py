"""Counts of a training step: operators, FLOPs, bytes moved, and bytes of new tensors.

Unlike times, counts are reproducible: the same code on the same version of torch gives the same numbers, so a larger
count means that a change made steps more expensive. ``optimizer.plan()`` counts the FLOPs of factors as
``2 N S (n_a² + n_g²)``. :func:`factor_flops` counts the products that are really computed: for a convolution of
stride 1, A is computed from the products of its c channels at every lag of its kernel k if those are fewer,
``2 N H W c² ((2k − 1)² + 1) / 2``. It works without a step, on the ``meta`` device.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from secondorder.plan.tally import cost_of


@dataclass(frozen=True)
class Counts:
    operators: int  # calls of torch's operators, without views and allocations
    flops: int  # FLOPs of products of matrices, convolutions, factorizations and solves
    moved: int  # bytes read and written without a cache
    allocated: int  # bytes of new tensors
    tensors: int  # number of new tensors

    def __sub__(self, other: "Counts") -> "Counts":
        mine, theirs = asdict(self), asdict(other)
        return Counts(**{field.name: mine[field.name] - theirs[field.name] for field in fields(self)})


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators = self.moved = self.allocated = self.tensors = 0
        self.flops = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        cost = cost_of(func, args, kwargs or {}, out)
        known = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        fresh = [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in known]
        self.operators += cost.kind != "view"
        self.moved += cost.nbytes
        self.flops += cost.flops
        self.allocated += sum(x.untyped_storage().nbytes() for x in fresh)
        self.tensors += len(fresh)
        return out


def count(step: Callable[[], object]) -> Counts:
    """Count the operators of a function, with the costs by which ``secondorder.estimate`` predicts times."""
    with _Counter() as found:
        step()
    return Counts(found.operators, round(found.flops), found.moved, found.allocated, found.tensors)


def graph_breaks(model: nn.Module, batch: tuple[Tensor, ...]) -> int:
    torch._dynamo.reset()
    try:
        return int(torch._dynamo.explain(model)(*batch).graph_break_count)
    finally:
        torch._dynamo.reset()


def counted_flops(step: Callable[[], object]) -> int:
    """Return the FLOPs of a function as torch counts them: those of matrix products, convolutions and attention."""
    with FlopCounterMode(display=False) as counter:
        step()
    return int(counter.get_total_flops())


def factor_flops(model: nn.Module, forward: Callable[[], object]) -> int:
    """Return the FLOPs of the products that compute the factors of one batch.

    An A that is not a full matrix counts as 0: the diagonal of an embedding, and the 1 of a normalization layer.
    """
    found: list[int] = []
    examples: list[int] = []

    def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
        examples.append(len(args[0]))

    def note(layer: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        found.extend(_products(layer, args, out, examples[-1]))

    handles = [model.register_forward_pre_hook(enter)]
    handles += [module.register_forward_hook(note) for module in model.modules()]
    try:
        with torch.no_grad():
            forward()
    finally:
        for handle in handles:
            handle.remove()
    return 2 * sum(found)


def _products(layer: nn.Module, args: tuple[Any, ...], out: Any, examples: int) -> Iterator[int]:
    if isinstance(layer, nn.Linear):
        n_g, n_a = layer.weight.shape
        yield out.numel() // n_g * ((n_a + (layer.bias is not None)) ** 2 + n_g**2)
    elif isinstance(layer, nn.Conv2d | nn.ConvTranspose2d):
        channels, groups = layer.out_channels, layer.groups
        n_a = layer.weight.numel() // channels + (layer.bias is not None)
        rows = out.numel() // channels
        of_a = rows * n_a**2
        if isinstance(layer, nn.Conv2d) and max(layer.stride) == 1 < max(layer.kernel_size):
            lags = (math.prod(2 * k - 1 for k in layer.kernel_size) + 1) // 2
            inputs = layer.in_channels
            of_a = min(of_a, lags * args[0].numel() // inputs * (inputs // groups) ** 2)
        yield groups * (of_a + rows * (channels // groups) ** 2)
    elif isinstance(layer, nn.MultiheadAttention):
        width, bias = layer.embed_dim, layer.in_proj_bias is not None
        for x in (*args[:3], out[0]):
            d_in = width if x is out[0] else x.shape[-1]
            yield x.numel() // x.shape[-1] * ((d_in + bias) ** 2 + width**2)
    elif isinstance(layer, nn.Embedding):
        yield args[0].numel() * layer.embedding_dim**2
    elif isinstance(layer, nn.LayerNorm | nn.BatchNorm2d):
        trained = list(layer.parameters())
        yield sum(p.numel() for p in trained[:1]) * examples * len(trained) ** 2
