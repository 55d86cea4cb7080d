"""Forms of a Kronecker factor: a dense matrix ``[(Γ,) n, n]``, or its diagonal ``[(Γ,) n]``.

A factor is diagonal by nature when rows are one-hot (an embedding's A), and by decision beyond ``max_factor_dim``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from secondorder.capture.layers.adapter import Adapter

#: The widest side that is dense by default on a CPU, by what a refresh does with it: either takes about a second of two
#: cores there, and eight times as long for twice the side (``python -m benchmarks linalg``).
_CPU_BOUNDS = {"eigen": 2048, "cholesky": 4096}
#: The same on other devices, which factorise faster; and the widest that is worth a word where it is not dense.
WIDEST = 8192


def default_bound(device_type: str, way: str) -> int:
    """``max_factor_dim="auto"``: the same on every rank, since it depends on nothing that is measured in a run.

    Args:
        device_type: Where the factors are.
        way: ``"eigen"`` or ``"cholesky"``.

    Returns:
        The bound.
    """
    return _CPU_BOUNDS.get(way, WIDEST) if device_type == "cpu" else WIDEST


class Side(NamedTuple):
    """Form of one factor of a layer.

    Attributes:
        n: Size.
        lead: ``(Γ,)``, or ``()`` for a single block.
        diagonal: Whether only the diagonal is kept.
        by_nature: Whether the factor has nothing off its diagonal.
    """

    n: int
    lead: tuple[int, ...]
    diagonal: bool
    by_nature: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the factor."""
        return (*self.lead, self.n) if self.diagonal else (*self.lead, self.n, self.n)


def sides(adapter: Adapter, max_dim: int | None) -> tuple[Side, Side]:
    """Forms of A and G of a layer, neither being dense beyond ``max_dim``."""
    lead = (adapter.groups,) if adapter.groups > 1 else ()

    def side(n: int, by_nature: bool) -> Side:
        return Side(n, lead, by_nature or (max_dim is not None and n > max_dim), by_nature)

    return side(adapter.n_a, adapter.one_hot), side(adapter.n_g, False)


def named_sides(adapter: Adapter, max_dim: int | None) -> dict[str, Side]:
    """The same as :func:`sides`, under ``"a"`` and ``"g"``."""
    return dict(zip("ag", sides(adapter, max_dim), strict=True))


def dense_keys(name: str, named: Mapping[str, Side]) -> list[str]:
    """State keys of the dense ones of two matrices that have the forms of the factors."""
    return [f"{name}_{key}" for key, side in named.items() if not side.diagonal]


def is_diagonal(factor: Tensor, adapter: Adapter) -> bool:
    """Whether a factor of a layer is stored as its diagonal."""
    return factor.dim() == 1 + (adapter.groups > 1)


def mean_diagonal(factor: Tensor, diagonal: bool) -> Tensor:
    """Mean eigenvalue ``tr X / n`` of a factor, ``[...]``."""
    return factor.mean(-1) if diagonal else factor.diagonal(dim1=-2, dim2=-1).mean(-1)


def as_dense(factor: Tensor, diagonal: bool) -> Tensor:
    """The factor as a matrix ``[..., n, n]``."""
    return torch.diag_embed(factor) if diagonal else factor


def kron(a: Tensor, g: Tensor) -> Tensor:
    """``G ⊗ A`` of matrices ``[(Γ,) n, n]``; block-diagonal over Γ."""
    if a.dim() == 2:
        return torch.kron(g.contiguous(), a.contiguous())
    return torch.block_diag(*(torch.kron(g_i, a_i) for g_i, a_i in zip(g, a, strict=True)))  # type: ignore[no-any-return]


def times(x: Tensor, factor: Tensor, *, left: bool) -> Tensor:
    """``factor · x`` (left) or ``x · factor`` of matrices ``x [(Γ,) n_g, n_a]``, the factor dense or diagonal."""
    if factor.dim() < x.dim():
        return x * (factor[..., :, None] if left else factor[..., None, :])
    return factor @ x if left else x @ factor
