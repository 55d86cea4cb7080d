"""Ranks as threads of one process, for tests of the communication of window methods without a network."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from secondorder.comm import CommStrategy, Parcel, Shard, Unit


class Meeting:
    """A barrier at which all ranks exchange a value."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._barrier = threading.Barrier(world, timeout=60)
        self._values: list[Any] = [None] * world

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait()
        found = list(self._values)
        self._barrier.wait()
        return found

    def leave(self) -> None:
        self._barrier.abort()


class ThreadRank(CommStrategy):
    """One rank of ``world`` on a grid of ``workers`` rows; units go to the ranks in turn.

    Attributes:
        sent: Verb and bytes of every message, in order.
    """

    combines = True  # type: ignore[assignment]

    def __init__(self, meeting: Meeting, rank: int, workers: int = 1) -> None:
        self.meeting, self.here, self.width = meeting, rank, meeting.world // workers
        self.sent: list[tuple[str, int]] = []
        self.units: list[Unit] = []
        self.homes: dict[str, int] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> "ThreadRank":
        return self

    @property
    def rank(self) -> int:
        return self.here

    @property
    def world(self) -> int:
        return self.meeting.world

    def place(self, units: Sequence[Unit]) -> None:
        self.units = list(units)
        for i, unit in enumerate(units):
            self.homes.setdefault(unit.name, i % self.world)  # units that were placed before keep their rank

    def connect(self, facts: Mapping[str, Sequence[str]], device: torch.device) -> None:
        mine = {**facts, "units": [f"{unit.name} {unit.signature}" for unit in self.units]}
        assert all(theirs == mine for theirs in self.meeting.exchange(self.here, mine))

    def owner(self, index: int) -> int:
        return self.homes[self.units[index].name]

    def preconditions(self, index: int) -> bool:
        return self.owner(index) % self.width == self.here % self.width

    def shard(self, index: int) -> Shard:
        return Shard(self.here % self.width, self.width)

    def meet(self, what: str) -> None:
        assert set(self.meeting.exchange(self.here, what)) == {what}

    def _row(self, found: list[Any]) -> list[Any]:
        first = self.here // self.width * self.width
        return found[first : first + self.width]

    def _say(self, verb: str, tensors: Sequence[Tensor]) -> list[Any]:
        self.sent.append((verb, sum(t.nbytes for t in tensors)))
        found = self.meeting.exchange(self.here, (verb, [t.clone() for t in tensors]))
        assert {theirs[0] for theirs in found} == {verb}
        return [theirs[1] for theirs in found]

    def agree(self, words: Tensor) -> Tensor:
        return torch.stack([theirs[0] for theirs in self._say("agree", [words])]).sum(0)

    def sum_shards(self, values: Tensor) -> Tensor:
        return torch.stack([theirs[0] for theirs in self._row(self._say("sum", [values]))]).sum(0)

    def gather_shards(self, shards: Sequence[Tensor], sizes: Sequence[Sequence[int]]) -> list[Tensor]:
        assert [len(shard) for shard in shards] == [own[self.here % self.width] for own in sizes]
        rows = self._row(self._say("gather", shards))
        return [torch.cat([row[i] for row in rows]) for i in range(len(shards))]

    def share_directions(self, parcels: Sequence[Parcel]) -> None:
        self._copy("directions", parcels, lambda i: self.here // self.width * self.width + self.owner(i) % self.width)

    def spread(self, parcels: Sequence[Parcel]) -> None:
        self._copy("spread", parcels, self.owner)

    def _copy(self, verb: str, parcels: Sequence[Parcel], root: Callable[[int], int]) -> None:
        mine = [(root(parcel.index), t) for parcel in parcels for t in parcel.tensors]
        found = self._say(verb, [tensor for _, tensor in mine])
        for i, (source, tensor) in enumerate(mine):
            theirs = found[source][i]
            assert (theirs.shape, theirs.dtype) == (tensor.shape, tensor.dtype)
            tensor.copy_(theirs)


def run(world: int, function: Callable[[ThreadRank], Any], workers: int = 1) -> list[Any]:
    """Run ``function(comm)`` on all ranks in parallel; return the results by rank, or raise the error of a rank."""
    meeting = Meeting(world)

    def rank(r: int) -> Any:
        try:
            return function(ThreadRank(meeting, r, workers))
        except BaseException:
            meeting.leave()
            raise

    with ThreadPoolExecutor(world) as threads:
        calls = [threads.submit(rank, r) for r in range(world)]
    errors = [error for call in calls if (error := call.exception())]
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return [call.result() for call in calls]
