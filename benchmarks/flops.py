"""FLOPs of a training step and of the parts of K-FAC and EK-FAC, from shapes: the floor under a measured step time.

With N examples of S positions each, ``n_a`` inputs (one more with a bias) and ``n_g`` outputs per layer::

    factors         A += xᵀx, G += gᵀg                          2 N S (n_a² + n_g²)
                    A of a convolution of stride 1: products of its channels c at every lag of its kernel k, where
                        those are fewer                       2 N H W c² ((2k − 1)² + 1) / 2  for n_a² there,
                        the least there can be: 2 more of 15 are computed for k = 3, and where few channels or small
                        images make lags slow, patches are taken
    refresh         cholesky: factorise and invert                n_a³ + n_g³
                    eigen: about nine times that              9 (n_a³ + n_g³)
    precondition    cholesky: G⁻¹ ∇ A⁻¹                          2 (n_g² n_a + n_g n_a²)
                    eigen: into the basis and out of it       4 (n_g² n_a + n_g n_a²)
    EK-FAC's scale  running: of the rotated gradient, no product of its own
                    intra, the least of the exact ways: rotate rows or per-example gradients, which are made of rows,
                        min(2 N S n_a², 2 N n_g n_a²) + min(2 N S n_g², 2 N n_g² n_a) + 2 N S n_a n_g
                    or multiply pairs of rotated rows    2 N S (n_a² + n_g²) + N S (S + 1) n_a n_g
    transport       at a refresh: R = Q'ᵀQ, and R∘R on both sides of the scale
                                                              2 (n_a³ + n_g³) + 2 (n_g² n_a + n_g n_a²)

Where A is no full matrix, the diagonal of an embedding or the 1 of a normalisation layer, nothing is counted for it.
Symmetric products are counted in full, because BLAS computes them in full through GEMM. A multiply-add is 2 FLOPs.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

Scheme = Literal["cholesky", "eigen", "intra", "running"]
"""How curvature is inverted: two ways of K-FAC, and EK-FAC with either estimator of its scale."""

_REFRESH = {"cholesky": 1, "eigen": 9, "intra": 9, "running": 9}  # times n³
_GEMMS = {"cholesky": 1, "eigen": 2, "intra": 2, "running": 2}  # on either side of a gradient


@dataclass(frozen=True)
class LayerShape:
    """The shape of one Kronecker block, of one group of a grouped convolution."""

    name: str
    n_a: int
    """Side of A: inputs per output, and one more with a bias."""
    n_g: int
    """Side of G: outputs."""
    rows: int
    """Examples times shared positions."""
    groups: int = 1
    full_a: bool = True
    """Whether A is a matrix: that of an embedding is a diagonal, that of a normalisation layer is 1."""
    lag_products: int | None = None
    """Products of two numbers that A takes by lags of a kernel, where it has some."""

    def products(self, triangle: bool = False) -> int:
        """Return the products of two numbers behind A and G, the fewer of both ways."""
        pairs_a, pairs_g = ((n * (n + 1) // 2 if triangle else n**2) for n in (self.n_a, self.n_g))
        by_rows = self.rows * self.full_a * pairs_a
        fewer = by_rows if self.lag_products is None else min(by_rows, self.lag_products)
        return fewer + self.rows * pairs_g


def layer_shapes(model: nn.Module, forward: Callable[[], object]) -> list[LayerShape]:
    """Return the shapes of the blocks of a model's layers, in the order in which they run."""
    shapes: list[LayerShape] = []
    examples: list[int] = []

    def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
        examples.append(args[0].shape[0])

    def note(name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        return lambda layer, args, out: shapes.extend(_shapes(name, layer, args, out, examples[-1]))

    handles = [model.register_forward_pre_hook(enter)]
    handles += [module.register_forward_hook(note(name)) for name, module in model.named_modules()]
    try:
        with torch.no_grad():
            forward()
    finally:
        for handle in handles:
            handle.remove()
    return shapes


def _shapes(name: str, layer: nn.Module, args: tuple[Any, ...], output: Any, examples: int) -> Iterable[LayerShape]:
    """Return the blocks of one call of a layer."""
    if isinstance(layer, nn.Linear | nn.Conv2d | nn.ConvTranspose2d):
        groups = 1 if isinstance(layer, nn.Linear) else layer.groups
        d_out = layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
        n_a = layer.weight.numel() // d_out + (layer.bias is not None)
        lags = _lag_products(layer, args[0]) if args and not isinstance(layer, nn.Linear) else None
        yield LayerShape(name, n_a, d_out // groups, output.numel() // d_out, groups, lag_products=lags)
    elif isinstance(layer, nn.MultiheadAttention):
        width, has_bias = layer.embed_dim, layer.in_proj_bias is not None
        for part, x in zip(("query", "key", "value", "out"), (*args[:3], output[0]), strict=True):
            d_in = width if part == "out" else x.shape[-1]
            yield LayerShape(f"{name}.{part}", d_in + has_bias, width, x.numel() // x.shape[-1])
    elif isinstance(layer, nn.Embedding):
        yield LayerShape(name, layer.num_embeddings, layer.embedding_dim, args[0].numel(), full_a=False)
    elif isinstance(layer, nn.LayerNorm | nn.BatchNorm2d):
        trained = list(layer.parameters())
        if trained:
            yield LayerShape(name, 1, len(trained), examples, trained[0].numel(), full_a=False)


def _lag_products(layer: nn.Conv2d | nn.ConvTranspose2d, x: torch.Tensor) -> int | None:
    if isinstance(layer, nn.ConvTranspose2d) or max(layer.stride) > 1 or max(layer.kernel_size) == 1:
        return None
    lags = (math.prod(2 * k - 1 for k in layer.kernel_size) + 1) // 2
    return lags * x.numel() // layer.in_channels * (layer.in_channels // layer.groups) ** 2


def factor_flops(shapes: Sequence[LayerShape], triangle: bool = False) -> int:
    """Return the FLOPs of the products behind the factors A and G of one batch."""
    return sum(2 * s.groups * s.products(triangle) for s in shapes)


def refresh_flops(shapes: Sequence[LayerShape], scheme: Scheme) -> int:
    """Return the FLOPs of one refresh of every block."""
    total = sum(_REFRESH[scheme] * s.groups * (s.full_a * s.n_a**3 + s.n_g**3) for s in shapes)
    if scheme in {"intra", "running"}:
        total += sum(s.groups * (2 * (s.full_a * s.n_a**3 + s.n_g**3) + _both_sides(s)) for s in shapes)
    return total


def precondition_flops(shapes: Sequence[LayerShape], scheme: Scheme) -> int:
    """Return the FLOPs of preconditioning every gradient once."""
    return sum(_GEMMS[scheme] * s.groups * _both_sides(s) for s in shapes)


def scale_flops(shapes: Sequence[LayerShape], scheme: Scheme, examples: int) -> int:
    """Return the FLOPs of the products behind the scale of EK-FAC for one batch."""
    return sum(s.groups * _scale_of_example(s, examples) * examples for s in shapes) if scheme == "intra" else 0


def _scale_of_example(s: LayerShape, examples: int) -> int:
    positions = s.rows // examples
    rows_g = 2 * positions * s.n_g**2
    if not s.full_a:  # the rows of g are rotated, and squared
        return rows_g
    rows_a, product = 2 * positions * s.n_a**2, 2 * positions * s.n_a * s.n_g
    gradients = min(rows_a, 2 * s.n_g * s.n_a**2) + min(rows_g, 2 * s.n_g**2 * s.n_a) + product
    return min(gradients, rows_a + rows_g + product * (positions + 1) // 2)


def _both_sides(s: LayerShape) -> int:
    """Return the FLOPs of multiplying one gradient by a matrix on either side."""
    return 2 * (s.n_g**2 * s.n_a + s.full_a * s.n_g * s.n_a**2)


def factor_bytes(shapes: Sequence[LayerShape], element: int = 4) -> int:
    """Return the bytes of all factors, which are those of all inverses or bases too."""
    return sum(element * s.groups * ((s.n_a**2 if s.full_a else s.n_a) + s.n_g**2) for s in shapes)


def counted_flops(step: Callable[[], object]) -> int:
    """Return the FLOPs of what a function computes, counted by torch: matrix products, convolutions, attention."""
    with FlopCounterMode(display=False) as counter:
        step()
    return int(counter.get_total_flops())
