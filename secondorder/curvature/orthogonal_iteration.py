"""Eigenbases that follow their factors by orthogonal iteration, in stacks of one size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from secondorder.curvature.eigenbasis import EigenbasisBlock
from secondorder.curvature.factorization import Found, KeyT, batched, joint_ok
from secondorder.curvature.kronecker import FactoredBlock
from secondorder.curvature.refresh import Ranks, Refresher
from secondorder.curvature.refresh_schedule import RefreshSchedule
from secondorder.linalg import eigenbasis

#: Part of a factor off the diagonal of its basis above which the next iteration takes another sweep.
_FAR_FROM_DIAGONAL = 0.1


class Start(NamedTuple):
    """A matrix, and the basis from which the iteration starts.

    Attributes:
        matrix: Symmetric ``[(Γ,) n, n]``, or its diagonal ``[(Γ,) n]``.
        basis: The last basis ``[(Γ,) n, n]``; None for a diagonal.
        sweeps: Number of iterations, at least 1.
    """

    matrix: Tensor
    basis: Tensor | None
    sweeps: int = 1


class BasisIteration:
    """Iterations of blocks from their last bases, with an additional sweep if the last one was not accurate enough."""

    def __init__(self) -> None:
        #: The off-diagonal parts of A and G after the last iterations, which are copied to the host.
        self._left: dict[FactoredBlock, Tensor] = {}

    def forget(self) -> None:
        """Read the off-diagonal parts from loaded states again."""
        self._left.clear()

    def run(self, blocks: Sequence[EigenbasisBlock]) -> dict[tuple[FactoredBlock, str], Found]:
        """Iterate the bases of some blocks, and return the results of :func:`iterate` by block and side."""
        starts: dict[tuple[FactoredBlock, str], Start] = {}
        for block in blocks:
            for side, off in zip("ag", self._left_by(block), strict=True):
                starts[block, side] = Start(block.factor(side), block.basis(side), 2 if off > _FAR_FROM_DIAGONAL else 1)
        found = iterate(starts)
        for block in blocks:
            for index, side in enumerate("ag"):
                for off in found[block, side][0][3:]:
                    block.state["off_diagonal"][index] = off.max()
        self.prepare(blocks)
        return found

    def prepare(self, blocks: Iterable[FactoredBlock]) -> None:
        """Start to copy the numbers that the next iteration of some blocks needs to the host."""
        for block in blocks:
            if "off_diagonal" in block.state:
                self._left[block] = block.state["off_diagonal"].to("cpu", non_blocking=True)

    def _left_by(self, block: EigenbasisBlock) -> Any:
        """The off-diagonal parts after the last iteration, which have already arrived or were just loaded."""
        arrived = self._left.get(block)
        return (block.state["off_diagonal"].cpu() if arrived is None else arrived).numpy()


class BasisRefresher(Refresher):
    """Computes bases by an iteration from the last bases if a block supports it."""

    def __init__(self, schedule: RefreshSchedule, interval: str, max_failures: int, comm: Ranks) -> None:
        super().__init__(schedule, interval, max_failures, comm)
        self._iteration = BasisIteration()

    def find(self, blocks: Sequence[Any], host_checks: bool, restores: bool = False) -> dict[tuple[Any, str], Found]:
        """Return eigenvalues and bases by block and side, and the additional results of :func:`iterate`."""
        warm = [] if restores else [b for b in blocks if b.may_iterate]
        cold = [b for b in blocks if b not in warm]
        found = super().find(cold, host_checks)
        self._iteration.prepare(cold)
        if warm:
            iterated: dict[tuple[Any, str], Found] = {**self._iteration.run(warm)}
            if host_checks:  # a basis that lost its orthogonality starts again
                lost = [b for b, ok in zip(warm, joint_ok(iterated, warm).cpu().numpy(), strict=True) if not ok]
                iterated.update(super().find(lost, host_checks))
            found.update(iterated)
        return found

    def forget_jobs(self) -> None:
        """Discard refreshes in progress, and read the off-diagonal parts from the states."""
        super().forget_jobs()
        self._iteration.forget()


def iterate(starts: Mapping[KeyT, Start]) -> dict[KeyT, Found]:
    """Return the results of all sweeps by name, computed in batches of equal size and number of sweeps.

    They are eigenvalues, basis, the column of the last basis that each new column continues, and the part of the
    matrix off the diagonal in the new basis. A diagonal has only eigenvalues.
    """
    found: dict[KeyT, Found] = {}
    pairs: dict[int, dict[KeyT, Tensor]] = {}
    for key, (matrix, basis, sweeps) in starts.items():
        if basis is None:
            found[key] = (matrix.clamp(min=0),), torch.isfinite(matrix).all()
        else:
            pairs.setdefault(sweeps, {})[key] = torch.cat([matrix, basis], -2)
    for sweeps, some in pairs.items():
        results = batched(list(some.values()), lambda stack, sweeps=sweeps: _sweep(stack, sweeps))  # type: ignore[misc]
        found.update(zip(some, results, strict=True))
    return found


def _sweep(pairs: Tensor, sweeps: int) -> Found:
    """Map matrix over basis ``[k, 2n, n]`` to eigenvalues, basis, order of columns, off-diagonal part, and ok."""
    matrix, basis = pairs.chunk(2, -2)
    try:
        *results, ok = eigenbasis.qr_refresh(matrix, basis, sweeps)
    except LinAlgError:  # the caller starts again
        nothing = torch.zeros_like(matrix[..., 0])
        results, ok = [nothing, basis, nothing.long(), nothing[:, 0]], nothing[:, 0].bool()
    return tuple(results), ok
