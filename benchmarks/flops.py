"""FLOPs of a training step and of the parts of K-FAC, from shapes: the floor under a measured step time.

With N rows (examples times shared positions), ``n_a`` inputs (one more with a bias) and ``n_g`` outputs per layer::

    factors         A += xᵀx, G += gᵀg                          2 N (n_a² + n_g²)
    refresh         cholesky: factorise and invert                n_a³ + n_g³
                    eigen: about nine times that              9 (n_a³ + n_g³)
    precondition    cholesky: G⁻¹ ∇ A⁻¹                          2 (n_g² n_a + n_g n_a²)
                    eigen: into the basis and out of it       4 (n_g² n_a + n_g n_a²)

Symmetric products are counted in full, because BLAS computes them in full through GEMM. A multiply-add is 2 FLOPs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

InverseMethod = Literal["cholesky", "eigen"]

_REFRESH = {"cholesky": 1, "eigen": 9}  # times n³
_GEMMS = {"cholesky": 2, "eigen": 4}


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


def layer_shapes(model: nn.Module, forward: Callable[[], object]) -> list[LayerShape]:
    """Return the shapes of a model's linear and convolution layers, in the order in which they run.

    Args:
        model: The model.
        forward: Runs one batch through it, without gradients.

    Returns:
        One shape per call of a layer.
    """
    shapes: list[LayerShape] = []
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)}
    hooks = [
        module.register_forward_hook(lambda layer, _, out, name=name: shapes.append(_shape(name, layer, out)))
        for name, module in layers.items()
    ]
    try:
        with torch.no_grad():
            forward()
    finally:
        for hook in hooks:
            hook.remove()
    return shapes


def _shape(name: str, layer: nn.Linear | nn.Conv2d, output: Tensor) -> LayerShape:
    groups = layer.groups if isinstance(layer, nn.Conv2d) else 1
    d_out = layer.weight.shape[0]
    n_a = layer.weight[0].numel() + (layer.bias is not None)
    return LayerShape(name, n_a, d_out // groups, output.numel() // d_out, groups)


def factor_flops(shapes: Sequence[LayerShape]) -> int:
    """Return the FLOPs of the products behind the factors A and G of one batch.

    Args:
        shapes: The blocks.

    Returns:
        Number of FLOPs.
    """
    return sum(2 * s.groups * s.rows * (s.n_a**2 + s.n_g**2) for s in shapes)


def refresh_flops(shapes: Sequence[LayerShape], method: InverseMethod) -> int:
    """Return the FLOPs of one refresh of every block.

    Args:
        shapes: The blocks.
        method: How a factor is inverted.

    Returns:
        Number of FLOPs.
    """
    return sum(_REFRESH[method] * s.groups * (s.n_a**3 + s.n_g**3) for s in shapes)


def precondition_flops(shapes: Sequence[LayerShape], method: InverseMethod) -> int:
    """Return the FLOPs of preconditioning every gradient once.

    Args:
        shapes: The blocks.
        method: How a factor is inverted.

    Returns:
        Number of FLOPs.
    """
    return sum(_GEMMS[method] * s.groups * (s.n_g**2 * s.n_a + s.n_g * s.n_a**2) for s in shapes)


def factor_bytes(shapes: Sequence[LayerShape], element: int = 4) -> int:
    """Return the bytes of all factors, which are those of all inverses or bases too.

    Args:
        shapes: The blocks.
        element: Bytes per number.

    Returns:
        Number of bytes.
    """
    return sum(element * s.groups * (s.n_a**2 + s.n_g**2) for s in shapes)


def counted_flops(step: Callable[[], object]) -> int:
    """Return the FLOPs of what a function computes, counted by torch: matrix products, convolutions, attention.

    Args:
        step: Such as one forward and backward pass.

    Returns:
        Number of FLOPs.
    """
    with FlopCounterMode(display=False) as counter:
        step()
    return int(counter.get_total_flops())
