"""The result of ``plan()``: bytes stored, bytes sent and FLOPs on every rank.

The payload of a message is what the counter of a run records: the elements of the larger buffer, with padding. It is
the same for all ranks that take part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from secondorder.plan.words import aligned, bytes_in_words, flops_in_words

#: Largest number of ranks for which a table has one column per rank.
_COLUMNS = 4


@dataclass(frozen=True)
class RankPlan:
    """The plan of one rank.

    Attributes:
        stored: Bytes that are kept between steps, by kind of ``memory_usage()``.
        sent: Bytes that are passed to collectives per step, by stage, averaged over one refresh interval.
        worst_sent: Bytes that are sent in the step that sends most, by stage.
        flops: FLOPs per step, by stage, averaged over one refresh interval.
        wire: Smallest number of bytes that have to leave the rank per step, by stage.
        messages: Number of messages per step, by stage, averaged over one refresh interval.
    """

    stored: dict[str, int]
    sent: dict[str, float]
    worst_sent: dict[str, int]
    flops: dict[str, float]
    wire: dict[str, float] = field(default_factory=dict)
    messages: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """The plan of all ranks.

    Attributes:
        ranks: The plan of each rank.
        world_size: Number of ranks.
        method: Class of the optimizer.
        strategy: The strategy as text.
        groups: Number of communicators that a rank belongs to.
        padding: Bytes of statistics that are sent only to make shares equal, divided by the other bytes of statistics.
        notes: Notes for the user.
    """

    ranks: list[RankPlan]
    world_size: int
    method: str
    strategy: str
    groups: int = 0
    padding: float = 0.0
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as a dict that ``json.dumps`` accepts."""
        return asdict(self)

    def __str__(self) -> str:
        """Return a table with one column per rank, or with the minimum, mean and maximum if there are many ranks."""
        ranks, groups = _counted(self.world_size, "rank"), _counted(self.groups, "group")
        title = f"{self.method} · {self.strategy} · {ranks} · {groups} per rank"
        if self.padding:
            title += f" · {self.padding:.1%} padding"
        lines = [title, *aligned([self._head(), *self._rows()], words=2)]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def _head(self) -> list[str]:
        if self.world_size <= _COLUMNS:
            return ["", "", *(f"rank {rank}" for rank in range(self.world_size))]
        return ["", "", "min", "mean", "max", "heaviest"]

    def _rows(self) -> Iterator[list[str]]:
        tables: list[tuple[str, Callable[[RankPlan], Mapping[str, float]], Callable[[float], str]]] = [
            ("stored", lambda rank: rank.stored, bytes_in_words),
            ("sent per step", lambda rank: rank.sent, bytes_in_words),
            ("sent in the largest step", lambda rank: rank.worst_sent, bytes_in_words),
            ("FLOPs per step", lambda rank: rank.flops, flops_in_words),
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
        smallest, largest = min(values), max(values)
        where = "all" if smallest == largest else f"rank {values.index(largest)}"
        return [words(smallest), words(sum(values) / len(values)), words(largest), where]


# ---------------------------------------------------------------------- sums by rank
class Holding(NamedTuple):
    """Bytes that are stored on some ranks.

    Attributes:
        ranks: The ranks, or None for all ranks.
        kind: Kind of ``memory_usage()``.
        nbytes: Number of bytes on each of these ranks.
    """

    ranks: Sequence[int] | None
    kind: str
    nbytes: int


class Work(NamedTuple):
    """FLOPs per step that some ranks compute.

    Attributes:
        ranks: The ranks, or None for all ranks.
        stage: Stage of the step.
        flops: Number of FLOPs on each of these ranks.
    """

    ranks: Sequence[int] | None
    stage: str
    flops: float


class Sum(NamedTuple):
    """The sum of some messages.

    Attributes:
        nbytes: Bytes of payload.
        wire: Smallest number of bytes that have to leave a rank.
        messages: Number of messages.
    """

    nbytes: int = 0
    wire: float = 0.0
    messages: int = 0

    def plus(self, other: Sum) -> Sum:
        """Return the sum of this and another sum."""
        return Sum(self.nbytes + other.nbytes, self.wire + other.wire, self.messages + other.messages)


Stages = Mapping[str, Sum]


class Traffic(NamedTuple):
    """Messages of one kind of step.

    Attributes:
        steps: Number of steps of this kind.
        common: Messages that every rank sends in one step, by stage.
        by_column: Messages that the ranks of each column send in addition, by stage.
    """

    steps: int
    common: Stages
    by_column: Mapping[int, Stages]


def spread(
    entries: Iterable[tuple[Sequence[int] | None, str, float]], names: Iterable[str], world: int
) -> list[dict[str, Any]]:
    """Add up numbers by rank and name.

    Args:
        entries: Tuples of ranks (None for all ranks), a name and a number.
        names: All names.
        world: Number of ranks.

    Returns:
        For each rank, the sum by name.
    """
    everywhere: dict[str, Any] = dict.fromkeys(names, 0)
    own: dict[int, Counter[str]] = {}
    for ranks, name, value in entries:
        if ranks is None:
            everywhere[name] += value
        else:
            for rank in ranks:
                own.setdefault(rank, Counter())[name] += value  # type: ignore[assignment]  # of any numbers
    return [{name: value + own[rank][name] for name, value in everywhere.items()} if rank in own else {**everywhere}
            for rank in range(world)]  # fmt: skip


class Means(NamedTuple):
    """Means of the messages that the ranks of a column send, by stage; see :class:`RankPlan`."""

    sent: dict[str, float]
    worst_sent: dict[str, int]
    wire: dict[str, float]
    messages: dict[str, float]


def means(traffic: Sequence[Traffic], columns: int) -> list[Means]:
    """Return the mean over all steps of an interval, and the step that sends most.

    Args:
        traffic: The traffic of each kind of step in an interval.
        columns: Number of columns.

    Returns:
        The means of each column.
    """
    stages = list(dict.fromkeys(s for t in traffic for found in (t.common, *t.by_column.values()) for s in found))
    special = {column for t in traffic for column in t.by_column}
    alike = _of_column(traffic, stages, -1)  # for columns that send nothing in addition
    return [_of_column(traffic, stages, c) if c in special else alike for c in range(columns)]


def _of_column(traffic: Sequence[Traffic], stages: Sequence[str], column: int) -> Means:
    none, nothing = Sum(), dict[str, Sum]()
    steps: list[tuple[int, dict[str, Sum]]] = []
    for t in traffic:
        own = t.by_column.get(column, nothing)
        steps.append((t.steps, {s: t.common.get(s, none).plus(own.get(s, none)) for s in stages}))
    count = max(1, sum(number for number, _ in steps))

    def mean(field: str) -> dict[str, float]:
        return {s: sum(number * getattr(step[s], field) for number, step in steps) / count for s in stages}

    heaviest = max((step for _, step in steps), key=lambda step: sum(x.nbytes for x in step.values()), default=nothing)
    worst = {stage: heaviest[stage].nbytes for stage in stages}
    return Means(mean("nbytes"), worst, mean("wire"), mean("messages"))


# ---------------------------------------------------------------------- text
def _counted(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"
