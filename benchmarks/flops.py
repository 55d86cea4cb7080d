"""FLOPs of a training step, and of the products behind the factors as they are really done, from one forward pass.

``optimizer.plan()`` counts all else. It counts the factors as ``2 N S (n_a² + n_g²)``; here the A of a convolution of
stride 1 takes the products of its c channels at every lag of its kernel k where those are fewer,
``2 N H W c² ((2k − 1)² + 1) / 2``, and it works without a step, on the ``meta`` device.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


def counted_flops(step: Callable[[], object]) -> int:
    """Return the FLOPs of what a function computes, counted by torch: matrix products, convolutions, attention."""
    with FlopCounterMode(display=False) as counter:
        step()
    return int(counter.get_total_flops())


def factor_flops(model: nn.Module, forward: Callable[[], object], triangle: bool = False) -> int:
    """Return the FLOPs of the products behind the factors of one batch, or of one triangle of each.

    Nothing is counted where A is no full matrix: the diagonal of an embedding, the 1 of a normalization layer.
    """
    found: list[int] = []
    examples: list[int] = []

    def pairs(n: int) -> int:
        return n * (n + 1) // 2 if triangle else n * n

    def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
        examples.append(len(args[0]))

    def note(layer: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        found.extend(_products(layer, args, out, examples[-1], pairs))

    handles = [model.register_forward_pre_hook(enter)]
    handles += [module.register_forward_hook(note) for module in model.modules()]
    try:
        with torch.no_grad():
            forward()
    finally:
        for handle in handles:
            handle.remove()
    return 2 * sum(found)


def _products(
    layer: nn.Module, args: tuple[Any, ...], out: Any, examples: int, pairs: Callable[[int], int]
) -> Iterator[int]:
    if isinstance(layer, nn.Linear):
        n_g, n_a = layer.weight.shape
        yield out.numel() // n_g * (pairs(n_a + (layer.bias is not None)) + pairs(n_g))
    elif isinstance(layer, nn.Conv2d | nn.ConvTranspose2d):
        channels, groups = layer.out_channels, layer.groups
        n_a = layer.weight.numel() // channels + (layer.bias is not None)
        rows = out.numel() // channels
        of_a = rows * pairs(n_a)
        if isinstance(layer, nn.Conv2d) and max(layer.stride) == 1 < max(layer.kernel_size):
            lags = (math.prod(2 * k - 1 for k in layer.kernel_size) + 1) // 2
            inputs = layer.in_channels
            of_a = min(of_a, lags * args[0].numel() // inputs * (inputs // groups) ** 2)
        yield groups * (of_a + rows * pairs(channels // groups))
    elif isinstance(layer, nn.MultiheadAttention):
        width, bias = layer.embed_dim, layer.in_proj_bias is not None
        for x in (*args[:3], out[0]):
            d_in = width if x is out[0] else x.shape[-1]
            yield x.numel() // x.shape[-1] * (pairs(d_in + bias) + pairs(width))
    elif isinstance(layer, nn.Embedding):
        yield args[0].numel() * pairs(layer.embedding_dim)
    elif isinstance(layer, nn.LayerNorm | nn.BatchNorm2d):
        trained = list(layer.parameters())
        yield sum(p.numel() for p in trained[:1]) * examples * pairs(len(trained))
