"""Records every message that was sent, for tests, for plans and for reports of the cost of communication."""

from __future__ import annotations

from typing import NamedTuple

import torch

# Records are meant for inspecting a few steps; a training run of a million steps must not keep all of them.
MOST_RECORDS = 20_000


class Record(NamedTuple):
    """One message of this rank.

    Attributes:
        stage: Stage of the step.
        kind: Kind of the collective: ``"all_reduce"``, ``"reduce"``, ``"reduce_scatter"``, ``"broadcast"``,
            ``"all_gather"`` or ``"all_to_all"``.
        size: Number of ranks in the group.
        numel: Payload N in elements with padding, the same on every rank of the group. It is the size of the larger
            buffer: the parts of all ranks together for ``all_gather`` (``size`` times the part of one rank), and the
            elements that one rank sends to all for ``reduce_scatter`` and ``all_to_all``.
        dtype: Dtype in which it was sent.
        nbytes: Payload in bytes.
    """

    stage: str
    kind: str
    size: int
    numel: int
    dtype: torch.dtype
    nbytes: int

    @property
    def wire_bytes(self) -> float:
        """Least bytes that a rank sends: ``2(n-1)/n N`` for an all-reduce, N for one root, else ``(n-1)/n N``."""
        if self.kind in {"broadcast", "reduce"}:
            return float(self.nbytes)
        return self.nbytes * (2 if self.kind == "all_reduce" else 1) * (self.size - 1) / self.size


class Counter:
    """Messages of this rank, and their bytes by stage.

    Attributes:
        records: The messages in the order in which they were launched; in a long run, only the last ones are kept.
    """

    def __init__(self) -> None:
        self.records: list[Record] = []
        self._bytes: dict[str, int] = {}

    def add(self, stage: str, kind: str, size: int, numel: int, dtype: torch.dtype) -> None:
        """Record a message."""
        nbytes = numel * dtype.itemsize
        if len(self.records) >= MOST_RECORDS:
            del self.records[: MOST_RECORDS // 2]
        self.records.append(Record(stage, kind, size, numel, dtype, nbytes))
        self._bytes[stage] = self._bytes.get(stage, 0) + nbytes

    def bytes_by_stage(self) -> dict[str, int]:
        """Return the payload in bytes of every stage since the start, or since :meth:`clear`."""
        return dict(self._bytes)

    def clear(self) -> None:
        """Discard all records."""
        self.records.clear()
        self._bytes.clear()
