r"""Sums of squared per-example gradients in a Kronecker eigenbasis, and the cheapest way to compute them.

The scale of :mod:`secondorder.linalg.eigenbasis` averages ``(Q_Gᵀ G_n Q_A)²`` over examples, where the gradient
``G_n = Σ_s g_{n,s} a_{n,s}ᵀ`` of example n is summed over positions before it is squared. Several routes give this sum
exactly::

    gramian        pairs of rotated rows, without any gradient          few positions
    gradient       rotate rows, then form the gradient and square it    many positions
    unprojected    form the gradient, then rotate it                    more positions than rows of the gradient

:func:`choose_route` compares their costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from secondorder.linalg.dense import Workspace, aligned, product

#: Bytes that the temporaries of :func:`scale_intra` may take together.
CHUNK_BYTES = 16 * 2**20
#: Flops in the time that one element takes to or from memory: 4 bytes at 5 flops per byte, a lower end of today's
#: processors. It decides only between many flops on rows and few on per-example gradients.
_FLOPS_PER_MOVE = 20

# Maps the routes that form per-example gradients to whether (a, g) are rotated late: as gradients, not as rows.
_LATE = {
    "gradient": (False, False),
    "unprojected": (True, True),
    "unprojected_a": (True, False),
    "unprojected_g": (False, True),
}


class RouteCost(NamedTuple):
    """The cost of a route per example and group.

    Attributes:
        flops: Floating-point operations of its matrix products.
        moved: Elements read and written in addition.
        memory: Elements of temporaries alive at the same time.
    """

    flops: int
    moved: int
    memory: int


def route_costs(
    positions: int, n_a: int, n_g: int, rotate_a: bool = True, rotate_g: bool = True
) -> dict[str, RouteCost]:
    """Return the costs of every exact way to compute ``(Q_Gᵀ G_n Q_A)²``.

    * ``"gramian"`` multiplies pairs of rows, ``Σ_{s,t} (g̃_s ∘ g̃_t)(ã_s ∘ ã_t)ᵀ``, by symmetry those of t ≥ s only. With
      one position this is the product of the squared rows.
    * ``"gradient"`` rotates rows, forms the gradient and squares it.
    * ``"unprojected"`` forms the gradient and rotates that; ``"unprojected_a"`` and ``"unprojected_g"``, on one side.

    Args:
        positions: S, positions of an example.
        n_a: Number of columns of the gradient matrix.
        n_g: Number of its rows.
        rotate_a: Whether there is a basis on the side of a.
        rotate_g: Whether there is a basis on the side of g.

    Returns:
        Costs by name of the route.
    """
    size, width, pairs = n_a * n_g, n_a + n_g, positions * (positions + 1) // 2
    # The costs of rotating rows, and of rotating gradients.
    early = 2 * positions * n_a**2 * rotate_a, 2 * positions * n_g**2 * rotate_g
    late = 2 * n_g * n_a**2 * rotate_a, 2 * n_a * n_g**2 * rotate_g
    rows = 3 * positions * (_padded(n_a) + _padded(n_g))  # the rotated ones, and copies before or after the rotation
    costs = {"gramian": RouteCost(sum(early) + 2 * pairs * size, 4 * pairs * width, rows)}
    for name, (late_a, late_g) in _LATE.items():
        late_a, late_g = late_a and rotate_a, late_g and rotate_g
        flops = (late if late_a else early)[0] + (late if late_g else early)[1] + 2 * positions * size
        memory = rows + n_g * _padded(n_a) + (n_g * _padded(n_a) if late_a or late_g else 0)
        costs[name] = RouteCost(flops, (4 + 2 * late_a + 4 * late_g) * size, memory)
    return costs


def choose_route(positions: int, n_a: int, n_g: int, rotate_a: bool = True, rotate_g: bool = True) -> str:
    """Return the name of the cheapest route; arguments are those of :func:`route_costs`, and N does not matter."""
    if positions == 1:
        return "gramian"
    costs = route_costs(positions, n_a, n_g, rotate_a, rotate_g)
    # Pairs of rows are worth it only while they are smaller than the gradient that they represent.
    if positions**2 * (n_a + n_g) >= n_a * n_g:
        del costs["gramian"]
    return min(costs, key=lambda name: costs[name].flops + _FLOPS_PER_MOVE * costs[name].moved)


def scale_intra(
    a: Tensor | None,
    g: Tensor,
    basis_a: Tensor | None,
    basis_g: Tensor | None,
    route: str | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    homogeneous: bool = False,
) -> Tensor:
    """Return ``Σ_n (Q_Gᵀ G_n Q_A)²``, which is exact for every number of positions.

    Args:
        a: Inputs ``[(Γ,) N, S, n_a]``, or None for a constant 1 (``n_a = 1``).
        g: Output gradients ``[(Γ,) N, S, n_g]``.
        basis_a: ``Q_A [(Γ,) n_a, n_a]`` or None.
        basis_g: ``Q_G [(Γ,) n_g, n_g]`` or None.
        route: A key of :func:`route_costs`; None for the cheapest.
        chunk_bytes: Bound on temporaries, unless those of a single example do not fit.
        homogeneous: Whether to append a 1 to every row of ``a`` (without copying), which has ``n_a − 1`` columns.

    Returns:
        The sum ``[(Γ,) n_g, n_a]``, in the precision of the bases, without them in that of g but at least float32.
        Of captured gradients, s is the sum times ``N / captured`` times the ``gradient_scale`` of N examples.

    Raises:
        ValueError: If there is no such route.
    """
    dtype = next((basis.dtype for basis in (basis_a, basis_g) if basis is not None), g.dtype)
    dtype = torch.promote_types(dtype, torch.float32)
    groups = g.shape[0] if g.dim() == 4 else 1
    budget = chunk_bytes // (dtype.itemsize * groups)
    basis_g = None if basis_g is None else aligned(basis_g, Workspace())
    if a is None:  # then Q_A = ±1, and the square does not depend on its sign
        return _scale_bias(g, basis_g, dtype, budget)
    positions, n_a, n_g = g.shape[-2], a.shape[-1] + homogeneous, g.shape[-1]
    rotated = basis_a is not None, basis_g is not None
    route = choose_route(positions, n_a, n_g, *rotated) if route is None else route
    costs = route_costs(positions, n_a, n_g, *rotated)
    if route not in costs:
        raise ValueError(f"route must be one of {sorted(costs)} or None, got {route!r}")
    basis_a = None if basis_a is None else aligned(basis_a, Workspace())
    total = g.new_zeros((*g.shape[:-3], n_g, n_a), dtype=dtype)
    late_a, late_g = _LATE.get(route, (False, False))
    # In addition to the memory of an example, the sum of a chunk's squares is held.
    spare = 0 if route == "gramian" else n_g * n_a
    for part in _chunks(g.shape[-3], budget - spare, costs[route].memory):
        rows_a = _rows(a[..., part, :, :].to(dtype), None if late_a else basis_a, homogeneous)
        rows_g = _rows(g[..., part, :, :].to(dtype), None if late_g else basis_g)
        if route == "gramian":
            _add_gramian_(total, rows_a, rows_g)
        else:
            total += _squared_gradients(rows_a, rows_g, basis_a if late_a else None, basis_g if late_g else None)
    return total.clamp_(min=0)  # differences of pairs may be rounded below it


def _padded(n: int) -> int:
    """Return an upper bound on the elements that a row takes in aligned memory."""
    return n + 15 if n >= 64 else n


def _chunks(examples: int, room: int, memory: int) -> Iterator[slice]:
    """Yield slices of as many examples as fit into the room, but of at least one."""
    size = max(1, room // max(memory, 1))
    return (slice(start, min(start + size, examples)) for start in range(0, examples, size))


def _rows(x: Tensor, basis: Tensor | None, homogeneous: bool = False) -> Tensor:
    """Rotate rows ``x [..., N, S, d]`` by ``[..., n, n]`` to ``[..., N, S, n]``; ``homogeneous`` appends a 1."""
    if basis is None:
        return F.pad(x, (0, 1), value=1.0) if homogeneous else x
    d = x.shape[-1]
    flat = product(x.flatten(-3, -2), basis[..., :d, :])
    if homogeneous:
        flat += basis[..., d:, :]
    rotated: Tensor = flat.unflatten(-2, x.shape[-3:-1])
    return rotated


def _add_gramian_(total: Tensor, rows_a: Tensor, rows_g: Tensor) -> None:
    """Add ``Σ_n Σ_{s,t} (g_s ∘ g_t)(a_s ∘ a_t)ᵀ``, pairs of equal distance t − s ≥ 0 at a time.

    Views of the rows make the pairs, so that no row is gathered and memory grows with S, not with S².
    """
    for distance in range(rows_g.shape[-2]):
        left, right = (
            (rows[..., : rows.shape[-2] - distance, :] * rows[..., distance:, :]).flatten(-3, -2)
            for rows in (rows_g, rows_a)
        )
        add = total.addmm_ if total.dim() == 2 else total.baddbmm_
        add(left.mT, right, alpha=2 if distance else 1)


def _squared_gradients(rows_a: Tensor, rows_g: Tensor, basis_a: Tensor | None, basis_g: Tensor | None) -> Tensor:
    """Return ``Σ_n (Q_Gᵀ G_n Q_A)² [..., n_g, n_a]`` with ``G_n = Σ_s g aᵀ`` of rows ``[..., N, S, n]``."""
    gradients, examples = rows_g.mT @ rows_a, -3
    if basis_g is not None:
        # The layout [..., n_g, N, n_a] makes the rotation of all examples one product on either side.
        gradients, examples = gradients.transpose(-3, -2).contiguous(), -2
        gradients = (basis_g.mT @ gradients.flatten(-2)).view_as(gradients)
    if basis_a is not None:
        rotated = product(gradients.flatten(-3, -2), basis_a)
        gradients = rotated.unflatten(-2, gradients.shape[-3:-1])
    total: Tensor = gradients.square_().sum(examples)
    return total


def _scale_bias(g: Tensor, basis_g: Tensor | None, dtype: torch.dtype, budget: int) -> Tensor:
    """Compute :func:`scale_intra` for a constant input: squares of sums over positions ``[..., n_g, 1]``."""
    total = g.new_zeros((*g.shape[:-3], g.shape[-1]), dtype=dtype)
    for part in _chunks(g.shape[-3], budget, 3 * _padded(g.shape[-1])):
        sums = g[..., part, :, :].sum(-2, dtype=dtype)
        total += (sums if basis_g is None else product(sums, basis_g)).square_().sum(-2)
    return total[..., None]
