"""Rows that travel to a basis: how EK-FAC's scale is measured where data and bases are on different ranks.

=============  ==================================================  ========================================
``"bases"``    owner ── Q_A, Q_G ─► all ranks, at every refresh    sums [n_g, n_a] of each rank ─► owner
``"rows"``     rows a, g of each rank ─► owner, which rotates them and adds up their squares
=============  ==================================================  ========================================

Rows that are zero add nothing, so that every rank sends as many as the one with the most.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from secondorder.curvature import scale
from secondorder.curvature.adapters.embedding import EmbeddingAdapter, EmbeddingBagAdapter
from secondorder.curvature.kernel import Rows
from secondorder.curvature.layers import Adapter

BASES, ROWS = "bases", "rows"
#: Words that tell whether a rank has rows, how many examples and positions, and the squares of these two.
SIZE_WORDS = 5


class Shipment(NamedTuple):
    """What one rank knows of the scale of a layer, before any basis.

    Attributes:
        rows: Rows ``[(Γ,) n, S, …]``, weighted such that sums of squared gradients are over ``counts``.
        counts: Number of data ``[Γ or 1]``, float64.
        finite: Whether all rows are, a 0-dim bool tensor.
    """

    rows: Rows
    counts: Tensor
    finite: Tensor


def choose_scale_route(
    n_a: int,
    n_g: int,
    examples: float,
    positions: float,
    world: int,
    inv_steps: int,
    scale_steps: int,
    *,
    bases: int | None = None,
    row: int | None = None,
) -> str:
    """What sends fewer numbers per step: bases to the data, or rows of data to the owner; on a tie rows.

    ::

        "bases"   (n_a² + n_g²) / inv_steps + n_a n_g / scale_steps
        "rows"    world · examples · positions · (n_a + n_g) / scale_steps

    Args:
        n_a: Columns of the gradient matrix.
        n_g: Its rows.
        examples: Examples of a rank.
        positions: S, rows of an example.
        world: Number of ranks.
        inv_steps: Steps between refreshes.
        scale_steps: Steps between updates of the scale.
        bases: Numbers in both bases, where that is not ``n_a² + n_g²``: a diagonal factor has none.
        row: Numbers in a pair of rows, where that is not ``n_a + n_g``: a row of a table is told by its index.

    Returns:
        ``"bases"`` or ``"rows"``.
    """
    bases = n_a**2 + n_g**2 if bases is None else bases
    row = n_a + n_g if row is None else row
    # Of inv_steps · scale_steps steps: whole numbers, which are equal where they should be.
    by_bases = bases * scale_steps + n_a * n_g * inv_steps
    return ROWS if world * examples * positions * row * inv_steps <= by_bases else BASES


def has_rows(adapter: Adapter) -> bool:
    """Whether the examples of a layer have rows of one shape."""
    return not isinstance(adapter, EmbeddingBagAdapter)


def row_size(adapter: Adapter) -> int:
    """Numbers in a pair of rows."""
    return (1 if adapter.one_hot else adapter.n_a) + adapter.n_g


# ---------------------------------------------------------------------- sizes that ranks agree on
def size_words(rows: Rows | None) -> list[float]:
    """``[1, n, S, n², S²]`` of this rank's rows, to be summed over the ranks; zeros without any."""
    if rows is None:
        return [0.0] * SIZE_WORDS
    n, positions = rows.g.shape[-3:-1]
    return [1.0, float(n), float(positions), float(n * n), float(positions * positions)]


def common_size(words: Sequence[float]) -> tuple[int, int] | None:
    """Examples and positions from the sums of :func:`size_words`; None if not all ranks with rows have as many."""
    ranks, *sums, n_squares, s_squares = words
    alike = all(ranks * q == x * x for x, q in zip(sums, (n_squares, s_squares), strict=True))  # no variance
    return (round(sums[0] / ranks), round(sums[1] / ranks)) if alike else None


# ---------------------------------------------------------------------- shapes
def no_rows(adapter: Adapter, n: int, positions: int, dtype: torch.dtype, device: torch.device | str) -> Rows:
    """Zero rows of a layer, of the shapes of :class:`~secondorder.curvature.eigensums.ScaleRows`."""
    lead = (adapter.groups,) if adapter.groups > 1 else ()
    g = torch.zeros(*lead, n, positions, adapter.d_out, dtype=dtype, device=device)
    if adapter.constant_input:
        return Rows(None, g)
    if isinstance(adapter, EmbeddingAdapter):
        index = torch.zeros(n, positions, dtype=torch.int64, device=device)
        return Rows(index, g, columns=adapter.d_in)
    return Rows(g.new_zeros(*lead, n, positions, adapter.d_in), g, adapter.has_bias)


def resized(rows: Rows, n: int, positions: int) -> Rows:
    """The rows with zero ones after them, up to n examples of so many positions."""
    after, more = positions - rows.g.shape[-2], n - rows.n
    if not after and not more:
        return rows
    inside, a = (0, after, 0, more), rows.a
    if a is not None:
        a = F.pad(a, (0, 0, *inside) if a.is_floating_point() else inside)
    return rows._replace(a=a, g=F.pad(rows.g, (0, 0, *inside)))


def stacked(parts: Sequence[Rows]) -> Rows:
    """Rows of Γ blocks, each filled by calls of its own, as ``[Γ, n, S, …]``."""
    n, positions = max(p.n for p in parts), max(p.g.shape[-2] for p in parts)
    parts = [resized(p, n, positions) for p in parts]
    inputs = [p.a for p in parts if p.a is not None]
    a = torch.stack(inputs) if inputs else None
    return parts[0]._replace(a=a, g=torch.stack([p.g for p in parts]))


def tensors_of(rows: Rows) -> list[Tensor]:
    """What travels."""
    return [rows.g] if rows.a is None else [rows.g, rows.a]


def joined(like: Rows, stacks: Sequence[Tensor]) -> Rows:
    """The rows of all ranks, in their order, from :func:`tensors_of` stacked to ``[W, (Γ,) n, S, …]``."""
    g, *inputs = stacks
    lead = g.dim() - 4
    found = [x.movedim(0, lead).flatten(lead, lead + 1) for x in (g, *inputs)]
    return like._replace(g=found[0], a=found[1] if inputs else None)


# ---------------------------------------------------------------------- squares
def squares(
    adapter: Adapter, rows: Rows, basis_a: Tensor | None, basis_g: Tensor | None, tokens: bool = False
) -> Tensor:
    """``Σ_n (Q_Gᵀ G_n Q_A)² [(Γ,) n_g, n_a]`` of rows.

    Args:
        adapter: The layer's shapes.
        rows: Rows ``[(Γ,) n, S, …]``.
        basis_a: ``Q_A [(Γ,) n_a, n_a]``, None for the identity.
        basis_g: ``Q_G [(Γ,) n_g, n_g]``, None for the identity.
        tokens: Take every position as a datum of its own.

    Returns:
        The sum.
    """
    a, g = rows.a, rows.g
    if tokens:
        g = g.flatten(-3, -2)[..., None, :]
        if a is not None:
            a = a.flatten(-3, -2)[..., None, :] if a.is_floating_point() else a.reshape(-1, 1)
    if isinstance(adapter, EmbeddingAdapter):
        assert a is not None
        flat = g.flatten(0, 1)
        return adapter.example_squares(a, flat if basis_g is None else flat @ basis_g, len(a))
    return scale.scale_intra(a, g, basis_a, basis_g, homogeneous=rows.homogeneous)
