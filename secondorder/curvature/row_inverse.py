"""Inverses for blocks with rows of examples: of kernels of rows, or of factors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from secondorder.curvature import row_choice
from secondorder.curvature.example_rows import Kept
from secondorder.curvature.factorization import factorise, joint_ok
from secondorder.curvature.row_block import RowBlock
from secondorder.linalg import kernel, stacks, woodbury

#: Names a stage of a step.
Stage = Callable[[str], AbstractContextManager[None]]


def invert_factors(good: Mapping[RowBlock, Tensor], host_checks: bool) -> dict[RowBlock, Tensor]:
    """Decompose the factors of blocks, and adopt the eigenbases where ``good`` is True.

    Args:
        good: Whether the factors of each block may be used.
        host_checks: Whether the host may check results.

    Returns:
        Whether that succeeded, by block. A block that fails keeps what it has.
    """
    if not good:
        return {}
    found = factorise({(b, side): task for b in good for side, task in b.tasks().items()}, host_checks)
    ok = dict(zip(good, joint_ok(found, list(good)).unbind(), strict=True))
    for block in good:
        ok[block] = good[block] & ok[block]
        block.adopt({side: found[block, side][0] for side in "ag"}, ok[block])
    return ok


def invert_kernels(
    kept: Mapping[RowBlock, Kept], good: Mapping[RowBlock, Tensor], stage: Stage
) -> dict[RowBlock, Tensor]:
    """Return whether the kernel of each block could be inverted; it adopts the inverse only where ``good`` is True."""
    ok: dict[RowBlock, Tensor] = {}
    kinds: dict[tuple[Any, ...], list[RowBlock]] = {}
    for block, k in kept.items():
        kinds.setdefault((k.rows.n, k.rows.g.dtype, k.rows.g.device, k.core is None), []).append(block)
    for members in kinds.values():
        for some in stacks.bounded(members, lambda b: row_choice.batch(kept[b].rows) * kept[b].rows.n ** 2):
            ok |= _invert_together({b: kept[b] for b in some}, good, stage)
    return ok


def _invert_together(
    kept: Mapping[RowBlock, Kept], usable: Mapping[RowBlock, Tensor], stage: Stage
) -> dict[RowBlock, Tensor]:
    with stage("kernel"):
        kernels = [row_choice.widened(kernel.gram(k.rows)) for k in kept.values()]
        stack, leads = stacks.joined(kernels, 2), [x.shape[:-2] for x in kernels]
        del kernels
    with stage("invert"):
        cores = [k.core.to(stack.dtype) for k in kept.values() if k.core is not None]
        if cores:
            found = woodbury.interpolated_inverse(stacks.joined(cores, 2), stack)
        else:
            found = woodbury.damped_inverse(stack, stacks.joined([k.damping for k in kept.values()], 0))
        ok = {}
        for (block, k), inverse, good in zip(kept.items(), *(stacks.parted(t, leads) for t in found), strict=True):
            ok[block] = good.all() & usable[block]
            block.with_rows.adopt(block.state, k, inverse, ok[block])
    return ok
