"""Strategies that count messages instead of sending them.

The methods of :class:`~secondorder.comm.RankGrid` run with tensors on the ``meta`` device, in groups that are only
lists of ranks. All ranks send the same messages to the world and to their row, and all ranks of a column send the same
messages to that column, so it is enough to run one rank of each column.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from secondorder.comm.buffers import Buffers, Item, real, reduce_kind, total
from secondorder.comm.collectives import Collectives
from secondorder.comm.counter import Counter, Record
from secondorder.comm.messages import Call, Work
from secondorder.comm.placement import Grid
from secondorder.comm.rank_grid import RankGrid
from secondorder.comm.strategy import CommStrategy, Parcel, Pending, Shard, Unit
from secondorder.plan.plan import Sum, Traffic

#: Stage of the messages that differ from column to column.
_OF_COLUMN = "curvature"


class Imagined:
    """A process group that does not exist.

    Args:
        ranks: The members of the group, in ascending order.
        rank: The member that uses the group.
    """

    def __init__(self, ranks: Sequence[int], rank: int) -> None:
        self.size: int = len(ranks)
        self.places: dict[int, int] = {member: place for place, member in enumerate(ranks)}
        self.rank: int = self.places[rank]


class DryCounter(Counter):
    """Counts messages and the padding in them.

    Attributes:
        padding: Bytes of sums that are sent only to make parts equal.
    """

    def __init__(self) -> None:
        super().__init__()
        self.padding = 0

    def add(self, stage: str, kind: str, size: int, numel: int, dtype: torch.dtype) -> None:
        """Record a message. The number of records has no limit, because every column of a large world may send some."""
        self.records.append(Record(stage, kind, size, numel, dtype, numel * dtype.itemsize))

    def clear(self) -> None:
        """Discard all records."""
        super().clear()
        self.padding = 0


class DryCall(Call):
    """Counts the messages that a :class:`~secondorder.comm.messages.Call` would send."""

    counter: DryCounter

    def __init__(self, group: Imagined, stage: str, counter: DryCounter) -> None:
        self.group, self.stage, self.counter = group, stage, counter
        self.buffers, self.work = Buffers(), Work(1)
        self.size, self.rank = group.size, group.rank

    def padding(self, numel: int, dtype: torch.dtype) -> None:
        """Count elements that are sent only to make parts equal."""
        self.counter.padding += numel * dtype.itemsize

    def local(self, rank: int) -> int:
        """Return the position of a global rank in the group."""
        place: int = self.group.places[rank]
        return place

    def all_reduce(self, items: Sequence[Item], count: float | None) -> None:
        """Count one message."""
        self.count("all_reduce", total(items), items[0].tensor.dtype)

    def all_reduce_rounded(self, items: Sequence[Item], wire: torch.dtype) -> None:
        """Count a message that sends equal parts to their ranks, and one that sends their sums to all ranks."""
        padded = -(-total(items) // self.size) * self.size
        self.count("all_to_all", padded, wire)
        self.count("all_gather", padded, wire)

    def reduce(self, message: Sequence[Sequence[Item]], wire: torch.dtype) -> None:
        """Count the messages that reduce lists of these sizes."""
        shares = [total(items) for items in message]
        dtype = next(items[0].tensor.dtype for items in message if items)
        kind = reduce_kind(shares, rounded=wire != dtype)
        if kind == "reduce_scatter":
            self.count(kind, self.size * max(shares), dtype)
            self.padding(self.size * max(shares) - sum(shares), dtype)
        elif kind == "all_to_all":
            self.count(kind, sum(shares), wire)
        elif kind == "twice":
            part = -(-sum(shares) // self.size)
            self.count("all_to_all", part * self.size, wire)
            self.count("all_to_all", part, dtype)
        else:
            for share in filter(None, shares):
                self.count(kind, share, dtype)

    def broadcast(self, items: Sequence[Item], wire: torch.dtype) -> None:
        """Count one message."""
        self.count("broadcast", total(items), wire)

    def all_gather(self, items: Sequence[Item], stacks: Sequence[Tensor]) -> None:
        """Count one message."""
        self.count("all_gather", total(items) * self.size, items[0].tensor.dtype)

    def gather(self, message: Sequence[Sequence[Item]], stacks: Sequence[Tensor]) -> None:
        """Count one message."""
        dtype = next(items[0].tensor.dtype for items in message if items)
        self.count("all_to_all", sum(map(total, message)), dtype)

    def gather_uneven(
        self, items: Sequence[Item], sizes: Sequence[Sequence[int]], wholes: Sequence[Tensor], capacity: int
    ) -> None:
        """Count the messages that are necessary for the largest share."""
        largest = max(sum(of[rank] for of in sizes) for rank in range(self.size))
        for start in range(0, largest, capacity):
            self.count("all_gather", min(capacity, largest - start) * self.size, items[0].tensor.dtype)

    def combine(self, vector: Tensor, op: str) -> None:
        """Count one message."""
        self.count("all_reduce", vector.numel(), vector.dtype)


class DryCollectives(Collectives):
    """Collectives in process groups that do not exist."""

    def __init__(self, like: Collectives) -> None:
        super().__init__(wire_dtype=like.wire_dtype, bucket_bytes=like.bucket_bytes)
        self.counter: DryCounter = DryCounter()

    def _call(self, group: Any, stage: str) -> Call:
        return DryCall(group, stage, self.counter)


class Rehearsal(CommStrategy):
    """Rehearses all ranks of a strategy at once and counts each message for the ranks that send it.

    Args:
        strategy: The strategy, which is not changed.
        units: The units to place.
        world: Number of ranks.
        homes: Owners that are already known, by the name of the unit.
        is_real: Whether the optimizer runs in this world under this strategy.

    Attributes:
        owners: Owner of each unit.
        grid: The grid of the ranks.
    """

    def __init__(
        self,
        strategy: RankGrid,
        units: Sequence[Unit],
        world: int,
        homes: Mapping[str, int] | None = None,
        is_real: bool = False,
    ) -> None:
        self._strategy, self._units = strategy, list(units)
        self.is_real = is_real
        self.owners: list[int] = strategy.owners_of(units, world, homes)
        self.grid: Grid = Grid(world, strategy.workers(world))
        self._played: dict[int, RankGrid] = {}
        self._collectives: dict[int, DryCollectives] = {}
        self._reduced: dict[Hashable, tuple[list[Record], int]] = {}
        self._world = Imagined(range(self.grid.world), 0)
        self._first = self.seen_from(0)

    def seen_from(self, rank: int) -> RankGrid:
        """Return the strategy as a rank sees it, in groups that do not exist."""
        if rank not in self._played:
            own, grid = copy.copy(self._strategy), self.grid
            own.collectives = self._collectives[rank] = DryCollectives(self._strategy.collectives)
            row, column = (
                None if len(ranks) == 1 else self._world if len(ranks) == grid.world else Imagined(ranks, rank)
                for ranks in (grid.row_of(rank), grid.column_of(rank))
            )
            own.imagine(rank, grid, self._units, self.owners, (self._world, row, column))
            self._played[rank] = own
        return self._played[rank]

    def traffic(self, steps: int) -> tuple[Traffic, int]:
        """Return the traffic since the last call, for ``steps`` equal steps, and the padding of statistics in one."""
        counters = {rank: own.counter for rank, own in self._collectives.items()}
        padding = counters[0].padding
        own = {rank: [r for r in c.records if rank or r.stage == _OF_COLUMN] for rank, c in counters.items()}
        common = [r for r in counters[0].records if r.stage != _OF_COLUMN]
        for counter in counters.values():
            counter.clear()
        return Traffic(steps, summed(common), {rank: summed(found) for rank, found in own.items() if found}), padding

    def holders(self, index: int, place: str) -> Sequence[int] | None:
        """Return the ranks that store or compute a part of a unit.

        Args:
            index: Index of the unit.
            place: ``"estimate"``, ``"curvature"``, ``"directions"``, ``"owner"``, or ``"captures"`` for the ranks whose
                examples are used.

        Returns:
            The ranks, or None for all ranks.
        """
        owner = self.owners[index]
        if place in ("curvature", "directions"):
            return None if self.grid.workers == self.grid.world else self.grid.column_of(owner)
        if place == "captures" and self.sources(index) > 1:
            return None
        return None if place != "owner" and self._first.is_everywhere(index) else (owner,)

    @property
    def owned(self) -> list[int]:
        """Owners of the units that are not divided into shards."""
        return [owner for owner, unit in zip(self.owners, self._units, strict=True) if not unit.divisible]

    @property
    def groups(self) -> int:
        """Number of communicators that a rank belongs to."""
        inside = sum(1 < size < self.grid.world for size in (self.grid.workers, self.grid.width))
        return inside + 1 if self.combines else 0

    # ------------------------------------------------------------------ work of a strategy between steps
    def intervals(self) -> list[int]:
        """Return the numbers of steps after which the strategy itself sends messages."""
        return []

    def key(self, t: int) -> Hashable:
        """Return a key that is the same for steps after which the strategy sends the same messages."""
        return None

    def after(self, worker: Any, t: int) -> None:
        """Count the messages that the strategy itself sends after step t."""

    # ------------------------------------------------------------------ the interface of a strategy
    def connect(self, facts: Mapping[str, Sequence[str]], device: torch.device) -> None:
        """Do nothing, since there are no other processes."""

    @property
    def combines(self) -> bool:
        """Whether several ranks work together."""
        return self.grid.world > 1

    @property
    def replicates(self) -> bool:
        """Whether every rank holds the running estimates of all units."""
        return self._first.replicates

    @property
    def data_world(self) -> int:
        """Number of processes that read data."""
        return self._first.data_world

    def owner(self, index: int) -> int:
        """Return the rank that refreshes a unit."""
        return self.owners[index]

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.grid.world

    def sources(self, index: int) -> int:
        """Return the number of ranks that capture statistics of a unit."""
        return self._first.sources(index)

    def refreshes(self, index: int) -> bool:
        """Return False, since nothing is computed."""
        return False

    def captures_elsewhere(self, index: int) -> bool:
        """Whether any rank captures statistics of a unit without preconditioning it."""
        return self._first.captures_elsewhere(index)

    def shard(self, index: int) -> Shard:
        """Return the shard of the first rank."""
        return self._first.shard(index)

    # ------------------------------------------------------------------ messages
    def average_gradients(self, params: Sequence[nn.Parameter]) -> None:
        """Count the messages that average gradients, if the strategy averages them."""
        own = self._first
        if own.averages:
            trained = [p for p in params if p.requires_grad]
            own.agree(torch.zeros(len(trained)))
            grads = [real(torch.empty_like(p, device="meta")) for p in trained]
            own.collectives.average(grads, group=self._world, stage="gradients", count=1).wait()

    def agree(self, words: Tensor) -> Tensor:
        """Count words and return them unchanged, since no other rank adds any."""
        return self._first.agree(torch.zeros(words.shape) if words.device.type == "meta" else words)

    def reduce_statistics(self, parcels: Sequence[Parcel]) -> Pending:
        """Count sums. For shapes that were summed before, repeat the earlier count."""
        counter = self._collectives[0].counter
        shapes = tuple((p.index, *(t.shape for t in p.tensors)) for p in parcels)
        if shapes in self._reduced:
            records, padding = self._reduced[shapes]
            counter.records.extend(records)
            counter.padding += padding
            return Pending()
        before, padding = len(counter.records), counter.padding
        pending = self._first.reduce_statistics(parcels)
        self._reduced[shapes] = counter.records[before:], counter.padding - padding
        return pending

    def gather_statistics(self, parcels: Sequence[Parcel]) -> list[Parcel]:
        """Count rows and return those that the first rank receives."""
        return self._first.gather_statistics(parcels)

    def share_curvature(self, parcels: Sequence[Parcel]) -> None:
        """Count the curvature that owners send, column by column."""
        if self.grid.workers == 1:
            return
        columns: dict[int, list[Parcel]] = {}
        for parcel in parcels:
            columns.setdefault(self.owners[parcel.index] % self.grid.width, []).append(parcel)
        for column, own in columns.items():
            self.seen_from(column).share_curvature(own)

    def spread(self, parcels: Sequence[Parcel]) -> None:
        """Count the messages that owners send to all ranks."""
        self._first.spread(parcels)

    def post_directions(self, parcels: Sequence[Parcel]) -> Pending:
        """Count directions."""
        return self._first.post_directions(parcels)

    def sum_shards(self, values: Tensor) -> Tensor:
        """Count dot products."""
        return self._first.sum_shards(values)

    def gather_shards(self, shards: Sequence[Tensor], sizes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Count parts of directions."""
        return self._first.gather_shards(shards, sizes)


def summed(records: Sequence[Record]) -> dict[str, Sum]:
    """Return the sum of messages by stage."""
    found: dict[str, Sum] = {}
    for record in records:
        found[record.stage] = found.get(record.stage, Sum()).plus(Sum(record.nbytes, record.wire_bytes, 1))
    return found
