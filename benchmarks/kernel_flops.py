"""FLOPs of SNGD and HyLo, from shapes: the floor under a measured step time.

With n examples of which R rows are kept, S positions a row, ``d_i`` inputs (one more with a bias) and ``d_o`` outputs::

    rows           reduce: sums over the positions                    n S (d_i + d_o), and S = 1 from here on
                   expand: per-example gradients, where they are less     2 n S d_i d_o
    kis            norms of all rows, the kernel of those that are kept   2 (n + R²) S² (d_i + d_o)
                   factorise and invert                                   R³
    kid            kernel of all rows, that of the kept ones within it    2 n² S² (d_i + d_o)
                   pivoted Cholesky, interpolation, S = P D⁻¹ Pᵀ          4 n R²
                   factorise S, factorise and invert                      2 R³
    sngd           kernel of all rows, factorise and invert               2 n² S² (d_i + d_o) + n³
    precondition   project, multiply by M, combine                        4 R S d_i d_o + 2 R²

A normalisation layer is one block of all its units; of an embedding only the columns that occur count. Kernels are
counted in full, because BLAS computes them in full through GEMM. A multiply-add is 2 FLOPs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.flops import LayerShape
from benchmarks.timing import Work

KernelScheme = Literal["kis", "kid", "sngd"]
"""Which rows are kept."""
Approx = Literal["reduce", "expand"]
"""How the positions of an example are treated."""


@dataclass(frozen=True)
class _Rows:
    """Rows of one layer."""

    groups: int
    positions: int
    width: int
    """Numbers of a pair of rows that are multiplied for an entry of the kernel, per pair of positions."""
    products: int
    """Multiplications of a row with the gradient, per position."""
    forming: int
    """FLOPs of making them."""


def kernel_work(
    shapes: Sequence[LayerShape],
    training: int,
    examples: int,
    rank: int,
    scheme: KernelScheme,
    approx: Approx = "reduce",
) -> Work:
    """Count what a training step and its refreshes add up to."""
    layers = [_rows(shape, examples, approx) for shape in shapes]
    refresh = sum(rows.forming + rows.groups * _refresh(rows, examples, rank, scheme) for rows in layers)
    kept = examples if scheme == "sngd" else rank
    precondition = sum(r.groups * (4 * kept * r.positions * r.products + 2 * kept**2) for r in layers)
    return Work(training, precondition, factor=0, refresh=refresh)


def _rows(s: LayerShape, examples: int, approx: Approx) -> _Rows:
    """Return the rows of a layer."""
    positions = s.rows // examples
    if not s.full_a and s.n_a == 1:  # a norm
        return _Rows(1, 1, s.groups * s.n_g, s.groups * s.n_g, forming=0)
    if not s.full_a:  # an embedding
        return _Rows(1, positions, s.n_g, s.n_g, forming=0)
    if approx == "reduce":
        sums = s.groups * s.rows * (s.n_a + s.n_g) if positions > 1 else 0
        return _Rows(s.groups, 1, s.n_a + s.n_g, s.n_a * s.n_g, sums)
    if positions == 1 or positions**2 * (s.n_a + s.n_g) < s.n_a * s.n_g:
        return _Rows(s.groups, positions, s.n_a + s.n_g, s.n_a * s.n_g, forming=0)
    return _Rows(s.groups, 1, s.n_a * s.n_g, s.n_a * s.n_g, 2 * s.groups * s.rows * s.n_a * s.n_g)


def _refresh(rows: _Rows, examples: int, rank: int, scheme: KernelScheme) -> int:
    """Return the FLOPs of one refresh of one group, beside making the rows."""
    pair = 2 * rows.positions**2 * rows.width
    if scheme == "kis":
        return pair * (examples + rank**2) + rank**3
    if scheme == "kid":
        return pair * examples**2 + 4 * examples * rank**2 + 2 * rank**3
    return pair * examples**2 + examples**3
