"""Rows of examples between capture and refresh, and the sizes that the state of a layer keeps of them.

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

#: Kernels of more rows are kept in the precision of the rows: in float64 they would outgrow everything else.
DOUBLE_ROWS = 4096


@dataclass(frozen=True)
class Raw:
    """Rows of a block as captured on this rank.

    Attributes:
        rows: Neither scaled nor divided by anything.
        real: Rows that are not padding.
    """

    rows: Rows
    real: float | Tensor

    @cached_property
    def finite(self) -> Tensor:
        """Whether all numbers are finite, a 0-dim bool tensor."""
        return all_finite(self.rows)


class Fresh(NamedTuple):
    """What a step captured for a block.

    Attributes:
        rows: Rows of all examples of this rank, scaled per datum: the Fisher's block is ``Σ_n u_n u_nᵀ`` over those of
            all ranks.
        examples: n, of this rank.
        real: Rows that are not padding.
        ok: Whether they may be used, a 0-dim bool tensor.
        share: n as a part of the examples of all ranks.
        damping: λ ``[(Γ)]``, where it follows from the examples of several ranks.
    """

    rows: Rows
    examples: int
    real: float | Tensor
    ok: Tensor
    share: float = 1.0
    damping: Tensor | None = None


class Batch(NamedTuple):
    """What a refresh has seen of a block, on the rank with the most of it.

    Attributes:
        examples: n.
        rows: Rows: not every example need pass a layer.
        positions: S.
        whole: Whether they were per-example gradients where they may be pairs of rows.
    """

    examples: int
    rows: int
    positions: int
    whole: bool


class Kept(NamedTuple):
    """Rows that a refresh keeps of a block, and what makes their M.

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
        d_a: Numbers in a row a with its 1, 0 where there is none.
        d_g: Numbers in a row g.
        by_index: Whether rows a are indices.
    """

    rows: int
    positions: int
    d_a: int
    d_g: int
    by_index: bool = False


def all_finite(rows: Rows) -> Tensor:
    """Whether all numbers of some rows are finite, a 0-dim bool tensor."""
    return averages.all_finite([t for t in (rows.a, rows.g) if t is not None and t.is_floating_point()])


def inputs_of(rows: Rows) -> Tensor:
    """Inputs as state keeps them: with their 1, so that a bias that is frozen or trained later shows in the shape."""
    if rows.a is None:
        return rows.g.new_zeros(*rows.g.shape[:-1], 0)
    return F.pad(rows.a, (0, 1), value=1.0) if rows.homogeneous else rows.a


def filled(kept: Kept, rows: int) -> Kept:
    """Zero rows up to a fixed number of them, which change nothing."""
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
    """``x`` itself, or a copy if it is a part of something larger."""
    return x if x.is_contiguous() and x.untyped_storage().nbytes() == x.nbytes else x.clone()
