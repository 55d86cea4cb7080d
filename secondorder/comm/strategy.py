"""Who does which stage of a step: the interface of communication strategies and its one-process null object.

``SecondOrderOptimizer.step`` calls every verb unconditionally; a strategy decides what each means on this rank. What is
placed as a whole is a *unit*: a block of a layer method, a window of a window method.

::

    place, connect      at construction: who owns what (arithmetic), then groups and a check that all ranks agree
    average_gradients   stage 0   ranks' gradients to their mean, if the strategy was asked to
    reduce_statistics   stage 2   sums and counts to the ranks that hold the estimate of a unit
    share_curvature     stage 4   what a refresh found, from the owner to the ranks that precondition
    share_directions    stage 5   preconditioned gradients to the ranks that did not compute them

The messages of a step depend on the placement, the step counter and agreed numbers only, never on the data of one rank:
that is what keeps ranks from waiting for each other for ever.
"""

from __future__ import annotations

import datetime
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from secondorder.comm.layout import Route


def world_size() -> int:
    """Ranks in the default process group; 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def default_timeout(device: torch.device) -> datetime.timedelta | None:
    """Time after which the default process group gives a missing rank up; None where it does not tell."""
    try:
        found = dist.group.WORLD._get_backend(device).options._timeout  # type: ignore[union-attr]
    except (AttributeError, RuntimeError):
        return None
    return found if isinstance(found, datetime.timedelta) else None


class Unit(NamedTuple):
    """What a strategy places.

    Attributes:
        name: Of the block or window, the same on all ranks.
        signature: Shapes, dtypes and options in words; ranks whose words differ are refused.
        refresh_flops: Of one refresh.
        step_flops: Of preconditioning one gradient.
        nbytes: Bytes of its curvature.
        interval: Steps between refreshes.
        everywhere: Whether every rank needs its estimate at every step, whatever the strategy.
        divisible: Whether its state can be cut into shards (windows) instead of being owned.
    """

    name: str
    signature: str
    refresh_flops: float = 0.0
    step_flops: float = 0.0
    nbytes: int = 0
    interval: int = 1
    everywhere: bool = False
    divisible: bool = False


@dataclass
class Parcel:
    """Tensors of one unit that travel together.

    Attributes:
        index: The unit.
        tensors: Of the same shapes and dtypes on every rank that takes part; results are written into them.
        symmetric: For each tensor whether it is a symmetric matrix ``[..., n, n]``, which travels as a triangle.
    """

    index: int
    tensors: list[Tensor]
    symmetric: tuple[bool, ...] = field(default=())

    def __post_init__(self) -> None:
        """Nothing is symmetric unless said so."""
        self.symmetric = self.symmetric or (False,) * len(self.tensors)


class Shard(NamedTuple):
    """This rank's part of a divisible unit: part ``rank`` of ``size``."""

    rank: int
    size: int


class Pending:
    """Messages on their way; here, none."""

    def wait(self) -> None:
        """Wait until the results are in the tensors of the parcels. Idempotent."""


class CommStrategy(ABC):
    """The verbs of a strategy, in the order in which a step calls them."""

    #: What this process does: ``"gradient"``, ``"factor"`` or ``"inverse"``.
    role: str = "gradient"
    #: Whether ranks may run out of data one after another, inside of torch's ``Join``.
    takes_joiners: bool = True
    #: Whether it serves parameters that are cut over the ranks (FSDP2).
    takes_pieces: bool = False

    @property
    def combines(self) -> bool:
        """Whether several ranks work together; False in a world of one process."""
        return False

    @property
    def replicates(self) -> bool:
        """Whether every rank holds the running estimates of all units."""
        return True

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers of messages."""
        return 0

    # ------------------------------------------------------------------ life
    @abstractmethod
    def place(self, units: Sequence[Unit]) -> None:
        """Decide who does what; arithmetic only. Units that were placed before stay where they are."""

    @abstractmethod
    def connect(self, facts: Mapping[str, Sequence[str]], device: torch.device) -> None:
        """Make the groups and compare the ranks' plans; collective. Again after units have changed.

        Args:
            facts: What must be equal on all ranks, in words, by what it is about.
            device: Device of small messages.

        Raises:
            ValueError: On all ranks, if they differ, naming the first difference.
            RuntimeError: If not all ranks come.
        """

    def close(self) -> None:  # noqa: B027 - most strategies have nothing to end
        """End what runs beside the training loop, and leave the groups. Idempotent."""

    def claim(self, optimizer: Any) -> None:  # noqa: B027 - most strategies take any
        """Serve this optimizer from now on, before anything is placed.

        Raises:
            ValueError: If the strategy serves another one.
        """

    def compare(self, facts: Mapping[str, Sequence[str]]) -> None:  # noqa: B027 - nobody to compare with
        """Compare facts over the ranks; as many on every rank.

        Raises:
            ValueError: On all ranks, if they differ, naming the first difference.
        """

    def admit(self, optimizer: Any) -> None:  # noqa: B027 - most strategies take any
        """Look at the optimizer, before the ranks meet.

        Raises:
            NotImplementedError: If the strategy cannot serve it.
        """

    def abandon(self, error: BaseException) -> None:  # noqa: B027 - others hear of it when their time runs out
        """This rank leaves its training loop with an error."""

    # ------------------------------------------------------------------ who
    @property
    def averages(self) -> bool:
        """Whether the strategy brings gradients to their mean itself."""
        return False

    @property
    def updates(self) -> bool:
        """Whether this rank updates its parameters itself; one that does not only estimates."""
        return True

    @property
    def stopped(self) -> bool:
        """Whether training has ended for ranks that do not update."""
        return False

    @property
    def rank(self) -> int:
        """This process among those of the strategy."""
        return 0

    @property
    def world(self) -> int:
        """Number of processes of the strategy."""
        return world_size()

    @property
    def standing(self) -> str:
        """This rank, its world and what places the curvature, in words that two ranks never share."""
        return f"rank {self.rank} of {self.world} under {type(self).__name__}()"

    @property
    def data_rank(self) -> int:
        """Index of this process among those that read data."""
        return self.rank

    @property
    def data_world(self) -> int:
        """Number of processes that read data."""
        return 1

    @abstractmethod
    def owner(self, index: int) -> int:
        """Rank that refreshes the curvature of a unit."""

    def captures(self, index: int) -> bool:
        """Whether this rank captures statistics of a unit."""
        return True

    def sources(self, index: int) -> int:
        """Number of ranks that capture statistics of a unit which not every rank estimates."""
        return self.data_world

    def captures_elsewhere(self, index: int) -> bool:
        """Whether any rank captures statistics of a unit without preconditioning it; the same answer on all ranks."""
        return False

    def estimates(self, index: int) -> bool:
        """Whether this rank holds the running estimate (factors) of a unit."""
        return True

    def preconditions(self, index: int) -> bool:
        """Whether this rank holds what a refresh finds, and preconditions with it."""
        return True

    def preconditioners(self, index: int) -> Sequence[int]:
        """Ranks of which :meth:`preconditions` says so."""
        return range(self.world)

    def refreshes(self, index: int) -> bool:
        """Whether this rank is the owner of a unit."""
        return self.owner(index) == self.rank

    def learns(self, index: int) -> bool:
        """Whether the ranks that step together estimate a unit, in steps whose statistics are due."""
        return True

    def renews(self, index: int) -> bool:
        """Whether the ranks that step together refresh a unit, in steps in which that is due."""
        return True

    def shard(self, index: int) -> Shard:
        """This rank's part of a divisible unit."""
        return Shard(0, 1)

    def shards(self, index: int) -> Sequence[int]:
        """By rank which part of a divisible unit it has."""
        return (0,) * self.world

    # ------------------------------------------------------------------ verbs of a step
    def begin_step(self) -> None:  # noqa: B027 - nothing to prepare
        """A step begins."""

    def end_step(self) -> None:  # noqa: B027 - nothing to do
        """A step was taken; what the next one captures is not decided yet."""

    def average_gradients(self, params: Sequence[nn.Parameter]) -> None:  # noqa: B027 - nobody to send to
        """Bring ``.grad`` to its mean over the ranks, where the strategy was asked to do that."""

    def agree(self, words: Tensor) -> Tensor:
        """Sum of a small float64 vector over the ranks that have data, on the CPU.

        Args:
            words: The same number of words on every rank.

        Returns:
            The sums, the same bits on every rank.
        """
        return words.cpu()

    def fail_together(self, error: str | None, failed: bool) -> None:
        """Raise the error of the first rank that has one, on every rank.

        Args:
            error: This rank's error, or None.
            failed: Whether any rank has one, as agreed.

        Raises:
            RuntimeError: If so.
        """
        if failed:
            raise RuntimeError(error)

    def reduce_statistics(self, parcels: Sequence[Parcel]) -> Pending:
        """Sum parcels of the same units over all ranks; the sum is valid where :meth:`estimates` says so."""
        return Pending()

    def gather_statistics(self, parcels: Sequence[Parcel]) -> list[Parcel]:
        """Tensors ``[...]`` of all ranks stacked in rank order ``[W, ...]``, valid where :meth:`estimates` says so."""
        return [Parcel(p.index, [t[None] for t in p.tensors]) for p in parcels]

    def share_curvature(self, parcels: Sequence[Parcel]) -> None:  # noqa: B027 - nobody to send to
        """Copy parcels from the owners of their units to the ranks that precondition.

        Args:
            parcels: One for each refreshed unit that this rank preconditions.
        """

    def spread(self, parcels: Sequence[Parcel]) -> None:  # noqa: B027 - nobody to send to
        """Copy parcels from the owners of their units to all ranks; every rank gives all of them."""

    def post_directions(self, parcels: Sequence[Parcel]) -> Pending:
        """Begin to copy directions from the ranks that preconditioned to the others; every rank gives all of them."""
        return Pending()

    def share_directions(self, parcels: Sequence[Parcel]) -> None:
        """Copy directions from the ranks that preconditioned to the others."""
        self.post_directions(parcels).wait()

    # ------------------------------------------------------------------ verbs of parameters that are cut over ranks
    def reshard(
        self, tensors: Sequence[Tensor], routes: Sequence[Route], stage: str, exact: bool = False
    ) -> list[Tensor]:
        """Bring tensors of one dtype from one cut to another.

        Args:
            tensors: What this rank has of each, flat, possibly empty.
            routes: Of each.
            stage: Under which the message is counted.
            exact: Whether numbers travel as they are, whatever the wire dtype.

        Returns:
            What this rank shall have of each, flat.
        """
        return [x[way.want[0] : way.want[1]] for x, way in zip(tensors, routes, strict=True)]

    def sum_pieces(self, values: Tensor) -> Tensor:
        """Sum of a vector over all ranks, the same bits on each."""
        return values

    # ------------------------------------------------------------------ verbs for once in a while
    def meet(self, what: str) -> None:  # noqa: B027 - nobody to wait for
        """Wait until every rank has come here.

        Args:
            what: What all ranks must call, for the text of the error.

        Raises:
            RuntimeError: If not all ranks come, after the timeout.
        """

    def copy_from(self, source: int, tensors: Sequence[Tensor]) -> None:  # noqa: B027 - nobody to send to
        """Copy tensors of one rank to all others, in place; every rank gives all of them, of the same shapes."""

    # ------------------------------------------------------------------ verbs of divisible units
    def sum_shards(self, values: Tensor) -> Tensor:
        """Sum of a vector over the ranks that together hold one copy of a divisible unit."""
        return values

    def gather_shards(self, shards: Sequence[Tensor], sizes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Flat tensors from the parts of the ranks that together hold one copy.

        Args:
            shards: This rank's part of each tensor, flat, possibly empty.
            sizes: Sizes of the parts of each tensor, by part.

        Returns:
            The whole tensors, flat.
        """
        return list(shards)


class Local(CommStrategy):
    """One process does everything; every verb is the identity."""

    def place(self, units: Sequence[Unit]) -> None:
        """Nothing to place."""

    def connect(self, facts: Mapping[str, Sequence[str]], device: torch.device) -> None:
        """Nobody to connect to.

        Raises:
            RuntimeError: In a process group of more than one rank, whose replicas would silently diverge.
        """
        if world_size() > 1:
            raise RuntimeError(
                f"this process group has {world_size()} ranks: with comm=Local() each would keep its own curvature and "
                "the replicas would diverge. Leave comm out, or use secondorder.CommOpt()."
            )

    def owner(self, index: int) -> int:
        """Rank 0."""
        return 0
