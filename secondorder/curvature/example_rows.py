"""Rows of examples between capture and refresh, and their sizes in the state of a layer.

Unlike factors, rows have sizes that depend on the batch: R rows of S positions each.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from secondorder.capture.statistics import averages
from secondorder.linalg import kernel, woodbury
from secondorder.linalg.kernel import Rows

#: Kernels of more rows are kept in the precision of the rows, because in float64 they would be too large.
DOUBLE_ROWS = 4096


@dataclass(frozen=True)
class Raw:
    """Rows of a block as captured on this rank.

    Attributes:
        rows: The rows without any scaling.
        real: Rows that are not padding.
    """

    rows: Rows
    real: float | Tensor

    @cached_property
    def finite(self) -> Tensor:
        """Whether all numbers are finite, as a 0-dim bool tensor."""
        return all_finite(self.rows)


class Fresh(NamedTuple):
    """The rows that a step captured for a block.

    Attributes:
        rows: Rows of all examples of this rank, scaled so that the Fisher is ``Σ_n u_n u_nᵀ`` over all ranks.
        examples: n of this rank.
        real: Rows that are not padding.
        ok: Whether they may be used, as a 0-dim bool tensor.
        share: n divided by the number of examples of all ranks.
        damping: λ ``[(Γ)]`` if it depends on the examples of several ranks.
    """

    rows: Rows
    examples: int
    real: float | Tensor
    ok: Tensor
    share: float = 1.0
    damping: Tensor | None = None


class Batch(NamedTuple):
    """The sizes of the batch of a block at a refresh, on the rank with the largest batch.

    Attributes:
        examples: n.
        rows: Number of rows, which may be less than n, since not every example passes the layer.
        positions: S.
        whole: Whether the rows were per-example gradients instead of pairs of rows.
    """

    examples: int
    rows: int
    positions: int
    whole: bool


class Kept(NamedTuple):
    """Rows that a refresh keeps for a block, and the values that determine M.

    Attributes:
        rows: Rows ``[(Γ,) R, S, …]``.
        damping: λ ``[(Γ)]``.
        core: S of the interpolation ``[(Γ,) R, R]``, or None.
    """

    rows: Rows
    damping: Tensor
    core: Tensor | None = None


class Sizes(NamedTuple):
    """Sizes of the kept rows.

    Attributes:
        rows: R.
        positions: S.
        d_a: Numbers in a row a including its 1; 0 if there is no such row.
        d_g: Numbers in a row g.
        by_index: Whether rows a are indices.
    """

    rows: int
    positions: int
    d_a: int
    d_g: int
    by_index: bool = False


def all_finite(rows: Rows) -> Tensor:
    """Whether all numbers of some rows are finite, as a 0-dim bool tensor."""
    return averages.all_finite([t for t in (rows.a, rows.g) if t is not None and t.is_floating_point()])


def inputs_of(rows: Rows) -> Tensor:
    """Inputs in the form of the state, with their 1, so that freezing a bias later does not change the shape."""
    if rows.a is None:
        return rows.g.new_zeros(*rows.g.shape[:-1], 0)
    return F.pad(rows.a, (0, 1), value=1.0) if rows.homogeneous else rows.a


def filled(kept: Kept, rows: int) -> Kept:
    """Pad with zero rows, which have no effect, to a fixed number."""
    missing = rows - kept.rows.g.shape[-3]
    if missing <= 0:
        return kept
    core = kept.core
    if core is not None:
        core = woodbury.block_diagonal(
            [core, torch.eye(missing, dtype=core.dtype, device=core.device).expand(*core.shape[:-2], -1, -1)]
        )
    return Kept(kernel.padded(kept.rows, rows), kept.damping, core)


def owned(x: Tensor) -> Tensor:
    """``x`` itself, or a copy if it is a part of a larger tensor."""
    return x if x.is_contiguous() and x.untyped_storage().nbytes() == x.nbytes else x.clone()
