"""What a run will store, send and compute on every rank, as numbers: no tensors, no messages.

A unit (a block or a window) says what it is made of in a :class:`Ledger`; a strategy and its placement say which rank
pays which part of it. The payload of a message is what a rank hands to the collective, so that a broadcast or a gather
counts on every rank that takes part, and padding counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

#: Ranks up to which a table has a column for each.
_COLUMNS = 4


@dataclass(frozen=True)
class RankPlan:
    """One rank.

    Attributes:
        stored: Bytes kept between steps, by kind of ``memory_usage()``.
        sent: Bytes handed to collectives per step, by stage: the mean over one refresh interval.
        worst_sent: Bytes of the heaviest step, by stage.
        flops: FLOPs per step, by stage: the mean over one refresh interval.
        messages: Messages per step, by stage: the mean over one refresh interval.
    """

    stored: dict[str, int]
    sent: dict[str, float]
    worst_sent: dict[str, int]
    flops: dict[str, float]
    messages: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """All ranks.

    Attributes:
        ranks: By rank.
        world_size: How many there are.
        method: Class of the optimizer.
        strategy: The strategy, in words.
        groups: Communicators that a rank is a member of, at most.
        padding: Part of the statistics that is sent only to make all shares equal.
        notes: What a user should know.
    """

    ranks: list[RankPlan]
    world_size: int
    method: str
    strategy: str
    groups: int = 0
    padding: float = 0.0
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Everything as numbers, words, lists and dicts, as JSON takes them."""
        return asdict(self)

    def __str__(self) -> str:
        """A table: a column per rank, or the smallest, mean and largest of many ranks."""
        s = "" if self.world_size == 1 else "s"
        title = f"{self.method} · {self.strategy} · {self.world_size} rank{s} · {self.groups} groups"
        if self.padding:
            title += f" · {self.padding:.1%} padding"
        lines = [title, *_aligned([self._head(), *self._rows()])]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def _head(self) -> list[str]:
        if self.world_size <= _COLUMNS:
            return ["", "", *(f"rank {rank}" for rank in range(self.world_size))]
        return ["", "", "min", "mean", "max", "heaviest"]

    def _rows(self) -> Iterator[list[str]]:
        tables: list[tuple[str, Callable[[RankPlan], Mapping[str, float]], Callable[[float], str]]] = [
            ("stored", lambda rank: rank.stored, _bytes),
            ("sent per step", lambda rank: rank.sent, _bytes),
            ("sent in the worst", lambda rank: rank.worst_sent, _bytes),
            ("FLOPs per step", lambda rank: rank.flops, _flops),
        ]
        for title, part, words in tables:
            found = [part(rank) for rank in self.ranks]
            names = [name for name in dict.fromkeys(n for each in found for n in each) if any(e[name] for e in found)]
            for name in names:
                yield [title, name, *self._cells([each[name] for each in found], words)]
                title = ""
            if len(names) > 1:
                yield ["", "total", *self._cells([sum(each.values()) for each in found], words)]

    def _cells(self, values: Sequence[float], words: Callable[[float], str]) -> list[str]:
        if self.world_size <= _COLUMNS:
            return [words(value) for value in values]
        largest = max(values)
        mean = sum(values) / len(values)
        where = "all" if min(values) == largest else f"rank {values.index(largest)}"
        return [words(min(values)), words(mean), words(largest), where]


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of a table whose two first columns are words and whose others are numbers."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        yield "  ".join(cells).rstrip()


def _bytes(n: float) -> str:
    return _scaled(n, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def _flops(n: float) -> str:
    return _scaled(n, 1000, ("", "k", "M", "G", "T", "P"))


def _scaled(n: float, base: int, units: Sequence[str]) -> str:
    size, place = float(n), 0
    while size >= base and place < len(units) - 1:
        size, place = size / base, place + 1
    digits = 0 if size == int(size) and place == 0 else 1
    return f"{size:.{digits}f} {units[place]}".rstrip()
