"""Eigenbases or inverses of factors, computed for stacks of equal matrices, with flags. All functions are pure."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from secondorder.curvature.background import in_parallel
from secondorder.linalg.dense import eigh_psd, inverse_pd, mirror_upper_

#: Matrices above this size are factorized one by one, because a batch would only cost memory.
_BATCH_LIMIT = 512

#: The results for a matrix, and whether they are good.
Found = tuple[tuple[Tensor, ...], Tensor]
KeyT = TypeVar("KeyT", bound=Hashable)


class Factorization(NamedTuple):
    """A factorization of a matrix.

    Attributes:
        dense: Returns the results for a stack of matrices ``[k, n, n]``, followed by whether each is good, ``[k]``. Its
            second argument is whether the host may check results.
        entrywise: Returns the results for a diagonal ``[(Γ,) n]``.
        symmetric: Whether the first result consists of symmetric matrices, of which ranks receive a triangle.
    """

    dense: Callable[[Tensor, bool], tuple[Tensor, ...]]
    entrywise: Callable[[Tensor], Tensor]
    symmetric: bool = False


#: Eigenvalues and the basis, and the inverse by Cholesky.
EIGEN = Factorization(eigh_psd, lambda diagonal: diagonal.clamp(min=0))
CHOLESKY = Factorization(inverse_pd, torch.reciprocal, symmetric=True)


class Task(NamedTuple):
    """A matrix to factorize.

    Attributes:
        matrix: Symmetric ``[(Γ,) n, n]``, or its diagonal ``[(Γ,) n]``.
        way: The factorization.
        diagonal: Whether ``matrix`` is the diagonal.
    """

    matrix: Tensor
    way: Factorization
    diagonal: bool


def factorise(tasks: Mapping[KeyT, Task], host_checks: bool, mirrors: bool = False) -> dict[KeyT, Found]:
    """Return the results for each matrix by name. Matrices of equal factorization and size are processed together.

    Args:
        tasks: Matrices by name.
        host_checks: As in :func:`secondorder.linalg.dense.eigh_psd`.
        mirrors: Whether inverses are symmetric bit for bit, so that ranks that receive a triangle have the same.
    """
    found: dict[KeyT, Found] = {}
    for way in dict.fromkeys(task.way for task in tasks.values()):
        some = {k: t.matrix for k, t in tasks.items() if t.way == way and not t.diagonal}
        dense = partial(_dense, way, host_checks, mirrors)
        results = batched(list(some.values()), partial(in_parallel, dense) if way is EIGEN else dense)
        found.update(zip(some, results, strict=True))
    for key, task in tasks.items():
        if task.diagonal:
            result = task.way.entrywise(task.matrix)
            found[key] = (result,), torch.isfinite(result).all()
    return found


def _dense(way: Factorization, host_checks: bool, mirrors: bool, stack: Tensor) -> Found:
    """Return the results for a stack of matrices ``[k, n, n]``, and their flags ``[k]``."""
    first, *rest, ok = way.dense(stack, host_checks)
    return (mirror_upper_(first) if mirrors and way.symmetric else first, *rest), ok


def joint_ok(found: Mapping[tuple[Any, str], Found], blocks: Sequence[Any]) -> Tensor:
    """Whether all results for each block are good, ``[len(blocks)]``."""
    by_block: dict[Any, Tensor] = {}
    for (block, _), (_, ok) in found.items():
        by_block[block] = by_block[block] & ok if block in by_block else ok
    return torch.stack([by_block[b] if b in by_block else torch.tensor(True, device=b.owner.device) for b in blocks])


def batched(matrices: Sequence[Tensor], dense: Callable[[Tensor], Found]) -> list[Found]:
    """Factorize matrices ``[(Γ,) n, n]`` in stacks of one size; results in the given order, ``ok`` 0-dim."""
    results: list[Found | None] = [None] * len(matrices)
    for stack in _stacks(matrices):
        parts = [matrices[i].reshape(-1, *matrices[i].shape[-2:]) for i in stack]
        tensors, ok = dense(parts[0] if len(parts) == 1 else torch.cat(parts))
        start = 0
        for i, part in zip(stack, parts, strict=True):
            stop = start + len(part)
            results[i] = tuple(t[start:stop] for t in tensors), ok[start:stop].all()
            start = stop
    return [r for r in results if r is not None]


def _stacks(matrices: Sequence[Tensor]) -> Iterable[list[int]]:
    sizes: dict[Any, list[int]] = {}
    for i, matrix in enumerate(matrices):
        n = matrix.shape[-1]
        key: Any = (n, matrix.dtype, matrix.device) if n <= _BATCH_LIMIT else i
        sizes.setdefault(key, []).append(i)
    return sizes.values()
