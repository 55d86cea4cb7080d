"""The interface of communication strategies, which decide which rank does which stage of a step, and its null object.

``SecondOrderOptimizer.step`` calls every method of a strategy unconditionally; the strategy decides what each one does
on this rank. A *unit* is a block of a layer method or a window of a window method, and is placed on ranks as one piece.

::

    place, connect      at construction: owners (arithmetic), then groups and a check that all ranks agree
    average_gradients   stage 0   average the ranks' gradients, if that was requested
    reduce_statistics   stage 2   sum statistics on the ranks that hold the estimate of a unit
    share_curvature     stage 4   copy results of refreshes from the owner to the ranks that precondition
    share_directions    stage 5   copy preconditioned gradients to the ranks that did not compute them

The messages of a step depend only on the placement, the step counter and numbers that all ranks agree on, never on the
data of one rank. This prevents deadlocks.
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
    """Return the number of ranks in the default process group; 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def default_timeout(device: torch.device) -> datetime.timedelta | None:
    """Return the timeout of the default process group, or None if it does not have one."""
    try:
        found = dist.group.WORLD._get_backend(device).options._timeout  # type: ignore[union-attr]
    except (AttributeError, RuntimeError):
        return None
    return found if isinstance(found, datetime.timedelta) else None


class Unit(NamedTuple):
    """A unit that a strategy places.

    Attributes:
        name: Name of the block or window, the same on all ranks.
        signature: Shapes, dtypes and options as text, which must be equal on all ranks.
        refresh_flops: FLOPs of one refresh.
        step_flops: FLOPs of preconditioning one gradient.
        nbytes: Bytes of the unit's curvature.
        interval: Number of steps between refreshes.
        everywhere: Whether every rank needs the unit's estimate at every step under every strategy.
        divisible: Whether the unit's state can be cut into shards, as for windows, instead of having one owner.
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
    """Tensors of one unit that are sent together.

    Attributes:
        index: Index of the unit.
        tensors: Tensors of the same shapes and dtypes on every rank that takes part; results are written into them.
        symmetric: Whether each tensor is a symmetric matrix ``[..., n, n]``, which is sent as a triangle.
    """

    index: int
    tensors: list[Tensor]
    symmetric: tuple[bool, ...] = field(default=())

    def __post_init__(self) -> None:
        """Mark all tensors as not symmetric if nothing was passed."""
        self.symmetric = self.symmetric or (False,) * len(self.tensors)


class Shard(NamedTuple):
    """This rank's part of a divisible unit, which is part ``rank`` of ``size``."""

    rank: int
    size: int


class Pending:
    """Messages that have been started, or none.

    Args:
        *works: The messages, each with a method ``wait``.
    """

    def __init__(self, *works: Any) -> None:
        self._works = works

    def wait(self) -> None:
        """Wait until the results are in the tensors of the parcels. Idempotent."""
        for work in self._works:
            work.wait()


class CommStrategy(ABC):
    """Interface of a strategy. The methods appear in the order in which a step calls them."""

    #: The role of this process: ``"gradient"``, ``"factor"`` or ``"inverse"``.
    role: str = "gradient"
    #: Whether ranks may run out of data one after another, inside of torch's ``Join``.
    takes_joiners: bool = True
    #: Whether the strategy supports parameters that are sharded over the ranks (FSDP2).
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
    def place(self, units: Sequence[Unit]) -> None:  # noqa: B027 - one process has all units
        """Assign units to ranks without communication. Units that were placed before do not move."""

    @abstractmethod
    def connect(self, facts: Mapping[str, Sequence[str]], device: torch.device) -> None:
        """Create the groups and compare the ranks' plans. This collective is repeated after units have changed.

        Args:
            facts: Texts that must be equal on all ranks, by their subject.
            device: Device of small messages.

        Raises:
            ValueError: On all ranks, if texts differ. The message names the first difference.
            RuntimeError: If not all ranks call this.
        """

    def close(self) -> None:  # noqa: B027 - most strategies have nothing to end
        """Stop everything that runs in parallel with the training loop and destroy the groups. Idempotent."""

    def claim(self, optimizer: Any) -> None:  # noqa: B027 - most strategies take any
        """Bind the strategy to an optimizer, before anything is placed.

        Raises:
            ValueError: If the strategy already serves another optimizer.
        """

    def compare(self, facts: Mapping[str, Sequence[str]]) -> None:  # noqa: B027 - no rank to compare with
        """Compare facts over the ranks. Every rank passes the same number of them.

        Raises:
            ValueError: On all ranks, if facts differ. The message names the first difference.
        """

    def admit(self, optimizer: Any) -> None:  # noqa: B027 - most strategies take any
        """Check the optimizer before the ranks communicate.

        Raises:
            NotImplementedError: If the strategy does not support the optimizer.
        """

    def abandon(self, error: BaseException) -> None:  # noqa: B027 - others notice it at their timeout
        """Handle that this rank leaves its training loop with an error."""

    # ------------------------------------------------------------------ who
    @property
    def averages(self) -> bool:
        """Whether the strategy averages gradients itself."""
        return False

    @property
    def updates(self) -> bool:
        """Whether this rank updates parameters; otherwise it only estimates curvature."""
        return True

    @property
    def stopped(self) -> bool:
        """Whether training has ended for ranks that do not update."""
        return False

    @property
    def rank(self) -> int:
        """Rank of this process among those of the strategy."""
        return 0

    @property
    def world(self) -> int:
        """Number of processes of the strategy."""
        return world_size()

    @property
    def identity(self) -> str:
        """This rank, its world and the arguments that place the curvature, as text that is unique to the rank."""
        return f"rank {self.rank} of {self.world} under {type(self).__name__}()"

    @property
    def data_rank(self) -> int:
        """Index of this process among the processes that read data."""
        return self.rank

    @property
    def data_world(self) -> int:
        """Number of processes that read data."""
        return 1

    def owner(self, index: int) -> int:
        """Return the rank that refreshes the curvature of a unit."""
        return 0

    def captures(self, index: int) -> bool:
        """Whether this rank captures statistics of a unit."""
        return True

    def sources(self, index: int) -> int:
        """Return the number of ranks that capture statistics of a unit that not every rank estimates."""
        return self.data_world

    def captures_elsewhere(self, index: int) -> bool:
        """Whether any rank captures statistics of a unit without preconditioning it; the same answer on all ranks."""
        return False

    def estimates(self, index: int) -> bool:
        """Whether this rank holds the running estimate (factors) of a unit."""
        return True

    def preconditions(self, index: int) -> bool:
        """Whether this rank holds the results of refreshes of a unit, and preconditions with them."""
        return True

    def preconditioners(self, index: int) -> Sequence[int]:
        """Return the ranks for which :meth:`preconditions` is True."""
        return range(self.world)

    def refreshes(self, index: int) -> bool:
        """Whether this rank is the owner of a unit."""
        return self.owner(index) == self.rank

    def learns(self, index: int) -> bool:
        """Whether the ranks that step together estimate a unit in steps whose statistics are due."""
        return True

    def renews(self, index: int) -> bool:
        """Whether the ranks that step together refresh a unit in steps in which a refresh is due."""
        return True

    def shard(self, index: int) -> Shard:
        """Return this rank's part of a divisible unit."""
        return Shard(0, 1)

    def shards(self, index: int) -> Sequence[int]:
        """Return the part of a divisible unit that each rank has."""
        return (0,) * self.world

    # ------------------------------------------------------------------ verbs of a step
    def begin_step(self) -> None:  # noqa: B027 - nothing to prepare
        """Prepare a step."""

    def end_step(self) -> None:  # noqa: B027 - nothing to do
        """Finish a step, before it is decided what the next step captures."""

    def average_gradients(self, params: Sequence[nn.Parameter]) -> None:  # noqa: B027 - no rank to send to
        """Average ``.grad`` over the ranks, if that was requested."""

    def agree(self, words: Tensor) -> Tensor:
        """Sum a small float64 vector over the ranks that have data, and return it on the CPU.

        Args:
            words: The vector, which has the same length on every rank.

        Returns:
            The sums, with the same bits on every rank.
        """
        return words.cpu()

    def fail_together(self, error: str | None, failed: bool) -> None:
        """Raise the error of the first rank that has one, on every rank.

        Args:
            error: This rank's error, or None.
            failed: Whether any rank has an error, as all ranks agreed.

        Raises:
            RuntimeError: If any rank has one.
        """
        if failed:
            raise RuntimeError(error)

    def reduce_statistics(self, parcels: Sequence[Parcel]) -> Pending:
        """Sum parcels of the same units over all ranks. The sum is valid where :meth:`estimates` is True."""
        return Pending()

    def gather_statistics(self, parcels: Sequence[Parcel]) -> list[Parcel]:
        """Stack tensors ``[...]`` of all ranks in rank order as ``[W, ...]``, valid where :meth:`estimates` is True."""
        return [Parcel(p.index, [t[None] for t in p.tensors]) for p in parcels]

    def share_curvature(self, parcels: Sequence[Parcel]) -> None:  # noqa: B027 - no rank to send to
        """Copy parcels from the owners of their units to the ranks that precondition.

        Args:
            parcels: One for each refreshed unit that this rank preconditions.
        """

    def spread(self, parcels: Sequence[Parcel]) -> None:  # noqa: B027 - no rank to send to
        """Copy parcels from the owners of their units to all ranks. Every rank passes all of them."""

    def post_directions(self, parcels: Sequence[Parcel]) -> Pending:
        """Start to copy directions from the ranks that preconditioned to the others. Every rank passes all of them."""
        return Pending()

    def share_directions(self, parcels: Sequence[Parcel]) -> None:
        """Copy directions from the ranks that preconditioned to the others."""
        self.post_directions(parcels).wait()

    # ------------------------------------------------------------------ verbs of parameters that are sharded over ranks
    def reshard(
        self, tensors: Sequence[Tensor], routes: Sequence[Route], stage: str, exact: bool = False
    ) -> list[Tensor]:
        """Convert tensors of one dtype from one sharding to another.

        Args:
            tensors: This rank's shard of each tensor, flat, possibly empty.
            routes: Route of each tensor.
            stage: Stage under which the message is counted.
            exact: Whether to ignore the wire dtype.

        Returns:
            This rank's new shard of each tensor, flat.
        """
        return [x[way.want[0] : way.want[1]] for x, way in zip(tensors, routes, strict=True)]

    def sum_pieces(self, values: Tensor) -> Tensor:
        """Sum a vector over all ranks, to the same bits on each."""
        return values

    # ------------------------------------------------------------------ verbs that are called rarely
    def meet(self, what: str) -> None:  # noqa: B027 - no rank to wait for
        """Wait until every rank has called this.

        Args:
            what: The function that all ranks must call, for the error message.

        Raises:
            RuntimeError: If not all ranks call this within the timeout.
        """

    def copy_from(self, source: int, tensors: Sequence[Tensor]) -> None:  # noqa: B027 - no rank to send to
        """Copy tensors of one rank to all others, in place. Every rank passes all of them, with the same shapes."""

    # ------------------------------------------------------------------ verbs of divisible units
    def sum_shards(self, values: Tensor) -> Tensor:
        """Sum a vector over the ranks that together hold one copy of a divisible unit."""
        return values

    def gather_shards(self, shards: Sequence[Tensor], sizes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Assemble flat tensors from the parts of the ranks that together hold one copy.

        Args:
            shards: This rank's part of each tensor, flat, possibly empty.
            sizes: Sizes of the parts of each tensor, by part.

        Returns:
            The complete tensors, flat.
        """
        return list(shards)


class Local(CommStrategy):
    """Does everything in one process. Every message is the identity."""

    def connect(self, facts: Mapping[str, Sequence[str]], device: torch.device) -> None:
        """Check that there is no other process.

        Raises:
            RuntimeError: If the process group has more than one rank, because the replicas would silently diverge.
        """
        if world_size() > 1:
            raise RuntimeError(
                f"this process group has {world_size()} ranks: with comm=Local(), each rank would have its own "
                "curvature, and the replicas would diverge. Leave comm out, or use secondorder.CommOpt()."
            )
