"""Factors to eigenbases or inverses: many matrices in stacks of one size, with their flags. Tensors in, tensors out."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from secondorder.linalg.dense import eigh_psd, inverse_pd, mirror_upper_

#: Matrices above this size are factorised one by one: a batch would only cost memory.
_BATCH_LIMIT = 512

#: What was found of a matrix, and whether it came out well.
Found = tuple[tuple[Tensor, ...], Tensor]
KeyT = TypeVar("KeyT", bound=Hashable)


class Task(NamedTuple):
    """A matrix to factorise.

    Attributes:
        matrix: Symmetric ``[(Γ,) n, n]``, or its diagonal ``[(Γ,) n]``.
        method: ``"eigen"``, for eigenvalues and basis, or ``"cholesky"``, for the inverse.
        diagonal: Whether it is its diagonal.
    """

    matrix: Tensor
    method: str
    diagonal: bool


def factorise(tasks: Mapping[KeyT, Task], host_checks: bool, mirrors: bool = False) -> dict[KeyT, Found]:
    """Return eigenvalues and basis, or the inverse, by name; tasks of one method and size are done together.

    Args:
        tasks: Matrices by name.
        host_checks: As in :func:`secondorder.linalg.dense.eigh_psd`.
        mirrors: Whether inverses are symmetric bit by bit, so that ranks that receive a triangle have the same.
    """
    found: dict[KeyT, Found] = {}
    invert = _inverse_mirrored if mirrors else inverse_pd
    for method, dense in (("eigen", eigh_psd), ("cholesky", invert)):
        some = {k: t.matrix for k, t in tasks.items() if t.method == method and not t.diagonal}
        results = batched(list(some.values()), lambda stack, dense=dense: pack(dense(stack, host_checks)))  # type: ignore[misc]
        found.update(zip(some, results, strict=True))
    for key, task in tasks.items():
        if task.diagonal:
            result = task.matrix.clamp(min=0) if task.method == "eigen" else task.matrix.reciprocal()
            found[key] = (result,), torch.isfinite(result).all()
    return found


def _inverse_mirrored(stack: Tensor, host_checks: bool) -> tuple[Tensor, Tensor]:
    inverse, ok = inverse_pd(stack, host_checks)
    return mirror_upper_(inverse), ok


def pack(results: tuple[Tensor, ...]) -> Found:
    """Results and their flag apart."""
    return results[:-1], results[-1]


def joint_ok(found: Mapping[tuple[Any, str], Found], blocks: Sequence[Any]) -> Tensor:
    """``[len(blocks)]``: whether all that was found of a block came out well."""
    by_block: dict[Any, Tensor] = {}
    for (block, _), (_, ok) in found.items():
        by_block[block] = by_block[block] & ok if block in by_block else ok
    return torch.stack([by_block[b] if b in by_block else torch.tensor(True, device=b.owner.device) for b in blocks])


def batched(matrices: Sequence[Tensor], dense: Callable[[Tensor], Found]) -> list[Found]:
    """Factorise matrices ``[(Γ,) n, n]`` in stacks of one size; results in the given order, ``ok`` 0-dim."""
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
