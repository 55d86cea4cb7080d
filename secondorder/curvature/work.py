"""FLOPs of the stages of a step, computed from the sizes of blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from secondorder.curvature.block import Block
from secondorder.curvature.schema import Schema, tensors
from secondorder.linalg import polar
from secondorder.linalg.eigenpairs import OVERSAMPLING, PASSES

#: FLOPs divided by n³ of an eigendecomposition of [n, n], and of a Cholesky factorization with the inverse.
_EIGEN, _CHOLESKY = 9.0, 1.0


def flops_of_products(block: Block, examples: float, rows: float) -> float:
    """Return the FLOPs of the sums behind the factors of a layer, for some examples with ``rows`` rows each."""
    sizes = (block.adapter.n_a, block.adapter.n_g)
    sums = block.sums()
    dense = [sums[f"factor_{s}"].symmetric for s in "ag"]
    squares = sum(size**2 if full else size for size, full in zip(sizes, dense, strict=True))
    return 2.0 * block.adapter.groups * examples * rows * squares


def flops_of_scale(block: Block, examples: float, rows: float) -> float:
    """Return the FLOPs of the squared per-example gradients in the eigenbases, for the cheapest exact algorithm."""
    n_a, n_g = block.adapter.n_a, block.adapter.n_g
    rows_a, rows_g, product = 2.0 * rows * n_a**2, 2.0 * rows * n_g**2, 2.0 * rows * n_a * n_g
    gradient = min(rows_a, 2.0 * n_g * n_a**2) + min(rows_g, 2.0 * n_g**2 * n_a) + product
    return block.adapter.groups * examples * min(gradient, rows_a + rows_g + product * (rows + 1) / 2)


def flops_of_refresh(block: Block, schema: Schema) -> float:
    """Return the FLOPs of a refresh of a block."""
    found = tensors(schema)
    if "rows_g" in found:
        return _flops_of_kernel(found["rows_g"], found["rows_a"])
    n_a, n_g, groups = block.adapter.n_a, block.adapter.n_g, block.adapter.groups
    total = 0.0
    for n, factorise, _ in _factorizations(block, found):
        total += groups * factorise
        if "scale" in found:  # it is transformed into the new basis
            total += 2.0 * groups * (n**3 + n * n_a * n_g)
    return total


def flops_of_direction(block: Block, schema: Schema) -> float:
    """Return the FLOPs of a preconditioned gradient of a block, or of one without curvature if the schema is empty."""
    found = tensors(schema)
    n_a, n_g, groups = block.adapter.n_a, block.adapter.n_g, block.adapter.groups
    if "rows_g" in found:
        total = _flops_of_woodbury(found["rows_g"], found["rows_a"], n_a, n_g)
    else:
        total = sum(2.0 * groups * columns * n_a * n_g for _, _, columns in _factorizations(block, found))
    # With ``orthogonalize``, the direction is replaced by its polar factor.
    return total + (groups * polar.flops(n_g, n_a) if block.sets_length else 0.0)


def _factorizations(block: Block, found: Mapping[str, Tensor]) -> Iterator[tuple[int, float, int]]:
    """Yield the size of each factor that is not diagonal, the FLOPs to factorize it, and the columns of products."""
    vector = 1 + (block.adapter.groups > 1)
    for side, n in zip("ag", (block.adapter.n_a, block.adapter.n_g), strict=True):
        basis, inverse = (found.get(f"{name}_{side}") for name in ("basis", "inverse"))
        if basis is not None and basis.dim() > vector:
            columns = basis.shape[-1]
            yield n, _EIGEN * n**3 if columns == n else 2.0 * PASSES * (columns + OVERSAMPLING) * n**2, 2 * columns
        if inverse is not None and inverse.dim() > vector:
            yield n, _CHOLESKY * n**3, n


def _flops_of_kernel(g: Tensor, a: Tensor) -> float:
    """Return the FLOPs of a kernel of rows and its inverse."""
    (r, positions, d_g), groups = g.shape[-3:], g.shape[:-3].numel()
    return groups * (2.0 * r**2 * positions**2 * (_width(a) + d_g) + r**3)


def _flops_of_woodbury(g: Tensor, a: Tensor, n_a: int, n_g: int) -> float:
    """Return the FLOPs of a direction, given rows and the inverse of their kernel."""
    (r, positions, d_g), groups = g.shape[-3:], g.shape[:-3].numel()
    return groups * (4.0 * r * positions * (n_a * n_g if _width(a) else d_g) + 2.0 * r**2)


def _width(a: Tensor) -> int:
    """Return the number of elements in a row of inputs, or 0 if the row is an index."""
    return a.shape[-1] if a.is_floating_point() else 0
