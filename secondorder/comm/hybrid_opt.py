"""HYBRID_OPT: a fraction of the ranks preconditions a unit, and each of them does so for the ranks of its row."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from secondorder import options
from secondorder.comm.placement import workers_of
from secondorder.comm.rank_grid import RankGrid
from secondorder.options import complete_docstring

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def _fraction_of(mesh: DeviceMesh, given: float | None) -> float:
    """Return the number of gradient workers divided by the number of ranks, for a mesh."""
    ranks = getattr(mesh, "mesh", None)
    if not isinstance(ranks, torch.Tensor):
        raise TypeError(f"mesh must be a torch.distributed DeviceMesh, got {mesh!r}")
    if ranks.dim() != 2 or ranks.flatten().tolist() != list(range(dist.get_world_size())):
        raise ValueError(f"mesh must be two-dimensional over all ranks in their order, got {ranks.tolist()}")
    fraction = ranks.shape[0] / ranks.numel()
    if given is not None and given != fraction:
        raise ValueError(f"mesh has grad_worker_fraction={fraction}, got {given}: drop one of them")
    return fraction


@complete_docstring(RankGrid.__doc__)
class HybridOpt(RankGrid):
    """Is a compromise between :class:`CommOpt` (fraction 1) and :class:`MemOpt` (fraction 1 / W).

    Rows of the grid are runs of consecutive ranks, so that with ``W · fraction`` nodes the directions of every step
    stay inside a node. Windows are cut into ``1 / fraction`` parts.

    Args:
        grad_worker_fraction: Number of gradient workers of a unit divided by the number of ranks W; the number of
            gradient workers must divide W. If None, it is taken from ``mesh`` if that is set, and is 0.5 otherwise.
        mesh: The grid as a two-dimensional ``DeviceMesh`` ``[m, W / m]`` over the ranks in their order, with its second
            dimension inside a node. Rows and columns then use its process groups, and no others are created.
        replicate_factors: Whether to store the running factors of all units on every rank. If None, it is False.

    Raises:
        TypeError: If a value has the wrong type.
        ValueError: If a value is out of range, or, when the optimizer is constructed, if the number of ranks does not
            allow the fraction. The message lists the allowed fractions.
    """

    def __init__(
        self,
        grad_worker_fraction: float | None = None,
        *,
        mesh: DeviceMesh | None = None,
        replicate_factors: bool | None = None,
        average_gradients: bool = False,
        wire_dtype: torch.dtype | None = None,
        timeout: float | None = None,
        verify_every: int | None = None,
    ) -> None:
        if mesh is not None:
            grad_worker_fraction = _fraction_of(mesh, grad_worker_fraction)
        elif grad_worker_fraction is None:
            grad_worker_fraction = 0.5
        options.number(0.0, 1.0, low_open=True)("grad_worker_fraction", grad_worker_fraction)
        self._fraction, self._mesh = float(grad_worker_fraction), mesh
        super().__init__(
            replicate_factors=replicate_factors,
            average_gradients=average_gradients,
            wire_dtype=wire_dtype,
            timeout=timeout,
            verify_every=verify_every,
        )

    def workers(self, world: int) -> int:
        """Return ``W · fraction``; in a world of one process, return 1."""
        return 1 if world == 1 else workers_of(world, self._fraction)

    def _axes(self, wait: datetime.timedelta | None) -> tuple[Any, Any]:
        return super()._axes(wait) if self._mesh is None else (self._mesh.get_group(1), self._mesh.get_group(0))

    def _own_groups(self) -> list[Any]:
        return super()._own_groups() if self._mesh is None else [self._world]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of copies, without groups and therefore without the mesh, which consists of groups."""
        return {**super().__getstate__(), "_mesh": None}

    def arguments(self) -> dict[str, Any]:
        """Return the fraction, and the arguments of all grids."""
        return {"grad_worker_fraction": self._fraction, **super().arguments()}
