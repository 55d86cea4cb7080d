"""Who does which stage of a step: the interface of communication strategies and its one-process null object.

``SecondOrderOptimizer.step`` calls every verb unconditionally; a strategy decides what each means on this rank and
never changes the mathematics.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

StatisticsT = TypeVar("StatisticsT")


def world_size() -> int:
    """Ranks in the default process group; 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class CommStrategy(ABC):
    """The verbs of a strategy, in the order in which a step calls them."""

    @abstractmethod
    def bind(self, names: Sequence[str]) -> None:
        """Learn the blocks; called once when they are known, by all ranks alike."""

    @abstractmethod
    def owner(self, index: int) -> int:
        """Rank that holds and refreshes the curvature of a block."""

    @abstractmethod
    def reduce_statistics(self, statistics: StatisticsT) -> StatisticsT:
        """Combine sums and counts over the ranks that have data."""

    @abstractmethod
    def share_curvature(self, indices: Sequence[int]) -> None:
        """Bring refreshed curvature to the ranks that precondition with it."""

    @abstractmethod
    def share_directions(self, directions: list[Tensor]) -> list[Tensor]:
        """Bring preconditioned gradients to the ranks that did not compute them."""


class Local(CommStrategy):
    """One process does everything; every verb is the identity."""

    def bind(self, names: Sequence[str]) -> None:
        """Nothing to prepare.

        Args:
            names: Names of the blocks.

        Raises:
            NotImplementedError: In a process group of more than one rank, whose replicas would silently diverge.
        """
        if world_size() > 1:
            raise NotImplementedError(
                f"this process group has {world_size()} ranks, and communication strategies for more than one rank are "
                "not there yet: each rank would keep its own curvature and the replicas would diverge. "
                "Train in one process, or use a first-order optimizer here."
            )

    def owner(self, index: int) -> int:
        """Rank 0."""
        return 0

    def reduce_statistics(self, statistics: StatisticsT) -> StatisticsT:
        """The statistics as they are."""
        return statistics

    def share_curvature(self, indices: Sequence[int]) -> None:
        """Nothing to share."""

    def share_directions(self, directions: list[Tensor]) -> list[Tensor]:
        """The directions as they are."""
        return directions
