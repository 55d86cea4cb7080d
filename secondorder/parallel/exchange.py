"""The exchange of layer methods with other ranks: statistics, outcomes of refreshes, and refreshed curvature.

::

    agree      [examples, contributed, dropped, counts …] of every due block, summed     one small message
    reduce     sums of every due block ─► ranks that hold its estimate
    agree      failures of the owners' refreshes                                         one small message
    share      bases, inverses, scales ─► ranks that precondition

The blocks in a message depend on the step counter and on agreed numbers, but never on the data of one rank.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from secondorder.capture.statistics.measurement import Estimate, Measured, counts_of, mean_of, weighted
from secondorder.comm.strategy import CommStrategy, Parcel, Pending
from secondorder.curvature.block import Block, BlockT
from secondorder.curvature.schema import Place, Schema, keys, tensors
from secondorder.linalg.dense import full_precision, precision_of

log: logging.Logger = logging.getLogger("secondorder")

#: Number of words of every due block before the counts of its parts: examples, contributed, dropped.
_WORDS = 3
#: Number of counters of several blocks that are kept; after that, each block has a counter.
_COUNTERS = 64


@dataclass(frozen=True)
class Posted:
    """Statistics that were sent.

    Attributes:
        schemas: The parts that were sent for each block.
        measured: The measurements of this rank, by index of the block.
        parcels: The sums, which have arrived when ``work`` has ended.
        words: The words of each block and those of the caller, summed over the ranks.
        work: The pending messages.
    """

    schemas: Mapping[Block, Schema]
    measured: Mapping[int, Measured]
    parcels: Sequence[Parcel]
    words: Sequence[Tensor]
    work: Pending


class StatisticsExchange:
    """Sums statistics over ranks, and sends the resulting curvature to the ranks that use it.

    Args:
        comm: Communication strategy.
        device: Device of tensors of messages. If None, it is that of the parameters of each block.

    Attributes:
        skipped: Number of batches that were not finite, by block.
        learned_at: Step of the last statistics, by block. It is not known after loading a checkpoint.
        rows_seen: Number of examples of a rank in the last batch and of their rows, by block, for plans.
        unsent: Names of blocks whose tensors at ``Place.MEASURED`` are so far only on ranks that precondition.
    """

    def __init__(self, comm: CommStrategy, device: torch.device | None = None) -> None:
        self.comm, self._device = comm, device
        self._skipped: dict[tuple[str, ...], int | Tensor] = {}
        self.learned_at: dict[str, int] = {}
        self.rows_seen: dict[str, tuple[float, float | Tensor]] = {}
        self.unsent: set[str] = set()
        self._holds_back = False

    def _device_of(self, block: Block) -> torch.device:
        return self._device or block.owner.device

    def room(self, block: Block) -> list[Tensor]:
        """Return tensors for the directions of a block that another rank computes."""
        return [torch.zeros(p.shape, dtype=precision_of(p), device=self._device or p.device) for p in block.params]

    # ------------------------------------------------------------------ statistics
    def combine(
        self, schemas: Mapping[Block, Schema], measured: Mapping[int, Measured], words: Sequence[float]
    ) -> tuple[dict[int, Measured], Tensor]:
        """Return the sums of the measurements of all ranks for some blocks, and the sums of additional words.

        Only blocks that any rank has seen and whose estimate this rank holds are included.

        Args:
            schemas: The parts that are measured for each block.
            measured: The measurements of this rank, by index of the block.
            words: Additional numbers to sum.
        """
        return self.read(self.post(schemas, measured, words))

    def post(self, schemas: Mapping[Block, Schema], measured: Mapping[int, Measured], words: Sequence[float]) -> Posted:
        """Send statistics, with the arguments of :meth:`combine`. Sums are sent while ranks agree on counts."""
        own = [self._contribution(b, measured.get(b.index), schema) for b, schema in schemas.items()]
        counts, parcels = [w for w, _ in own], [parcel for _, parcel in own]
        work = self.comm.reduce_statistics(parcels)
        device = self._device_of(next(iter(schemas)))
        last = torch.tensor(words, dtype=torch.float64, device=device)
        agreed = self.comm.agree(torch.cat([*(w.to(device) for w in counts), last]))
        return Posted(schemas, measured, parcels, agreed.split([*map(len, counts), len(words)]), work)

    def read(self, posted: Posted) -> tuple[dict[int, Measured], Tensor]:
        """Interpret received messages; see :meth:`combine`."""
        *totals, words = posted.words
        found, numbers = dict[int, Measured](), dict[int, Tensor]()
        for (block, schema), total in zip(posted.schemas.items(), totals, strict=True):
            if dropped := int(total[2]):
                self.skip([block], dropped)
            if n := int(total[0]):
                mine = posted.measured.get(block.index)
                number = numbers[block.index] = total[_WORDS:]
                parts = zip(schema, number.split(block.adapter.row_groups), strict=False)
                seen = frozenset(key for key, count in parts if bool(count.any()))
                found[block.index] = Measured({}, n, None if mine is None else mine.rest, seen)
                if next(iter(schema), "") == "factor_a":
                    ranks = float(total[1])
                    self.rows_seen[block.name] = n / ranks, float(number[0]) / ranks
        posted.work.wait()
        for (block, schema), parcel in zip(posted.schemas.items(), posted.parcels, strict=True):
            if block.index in found:
                means = self._means(block, parcel, numbers[block.index], schema)
                found[block.index] = found[block.index]._replace(parts=means)
        return found, words

    def skip(self, blocks: Sequence[Block], counts: int | Tensor) -> None:
        """Count batches of blocks that were not finite: a number, or one for each block ``[len(blocks)]``."""
        names = tuple(block.name for block in blocks)
        if isinstance(counts, Tensor) and names not in self._skipped and len(self._skipped) >= _COUNTERS:
            for name, count in zip(names, counts.split(1), strict=True):  # the blocks of stacks differ between steps
                self._skipped[name,] = self._skipped.get((name,), 0) + count
        else:
            self._skipped[names] = self._skipped.get(names, 0) + counts

    @property
    def skipped(self) -> dict[str, int]:
        """Number of batches that were not finite, by block. Reading it may wait for the device."""
        found: dict[str, int] = {}
        for names, counts in self._skipped.items():
            each = counts.tolist() if isinstance(counts, Tensor) else [counts] * len(names)
            for name, count in zip(names, each, strict=True):
                found[name] = found.get(name, 0) + int(count)
        return found

    def _contribution(self, block: Block, measured: Measured | None, schema: Schema) -> tuple[Tensor, Parcel]:
        """Words ``[examples, contributed, dropped, counts of each part …]`` and sums of this rank or zeros."""
        size, device = block.adapter.row_groups, self._device_of(block)
        finite = None if measured is None else block.is_finite(measured).to(device)
        counts, found = [], []
        # Nothing is sent for a unit that only its owner captures.
        sends = self.comm.captures(block.index) or self.comm.sources(block.index) > 1
        for key, like in tensors(schema).items():
            part = None if measured is None else measured.parts.get(key)
            if part is None or finite is None:
                counts.append(torch.zeros(size, dtype=torch.float64, device=device))
                found += [torch.zeros(like.shape, dtype=like.dtype, device=device)] if sends else []
            else:
                counts.append(counts_of(part, size).to(device))
                found.append(weighted(part, counts[-1], finite).to(like.dtype))
        head = [0.0, 0.0, 0.0] if measured is None else [float(measured.examples), 1.0, 0.0]
        words = torch.cat([torch.tensor(head, dtype=torch.float64, device=device), *counts])
        if finite is not None:
            lost = torch.zeros_like(words)
            lost[2] = 1.0
            words = torch.where(finite, words, lost)
        return words, Parcel(block.index, found, tuple(entry.symmetric for entry in schema.values()) if found else ())

    def _means(self, block: Block, parcel: Parcel, counts: Tensor, schema: Schema) -> dict[str, Estimate]:
        """The combined parts of the blocks whose estimates this rank holds."""
        if not self.comm.estimates(block.index):
            return {}
        own = counts.split(block.adapter.row_groups) if schema else ()
        found = zip(schema, parcel.tensors, own, strict=True)
        return {key: mean_of(total, c) for key, total, c in found if bool(c.any())}  # what any rank has measured

    # ------------------------------------------------------------------ refreshes
    def refresh_together(
        self, due: list[BlockT], refresh: Callable[[list[BlockT], bool], Tensor]
    ) -> tuple[list[BlockT], Tensor]:
        """Return the blocks that had an estimate, and whether each refresh succeeded, the same on every rank.

        Args:
            due: The blocks.
            refresh: Refreshes blocks and returns ``ok [len(blocks)]``; the flag says that the host checks results.

        Raises:
            RuntimeError: On every rank, if the refresh raised an error on any rank.
        """
        mine = [b for b in due if self.comm.refreshes(b.index)]
        failed, empty, error = dict[BlockT, bool](), set[BlockT](), None
        try:
            empty = {b for b in mine if b.is_empty}
            todo = [b for b in mine if b not in empty]
            if todo:
                with full_precision(todo[0].owner.device):
                    failed = dict(zip(todo, (~refresh(todo, True)).cpu().tolist(), strict=True))
        except Exception as found:  # the others wait for this rank: they must hear of it
            names = ", ".join(repr(b.label) for b in mine[:8]) + (", …" if len(mine) > 8 else "")
            what = f"the refresh of layer{'s' if len(mine) > 1 else ''} {names} failed"
            error = f"rank {self.comm.rank}: {what}: {type(found).__name__}: {found}"
            log.exception("refresh failed")
        flags = [*(failed.get(b, False) for b in due), *(b in empty for b in due), error is not None]
        words = torch.tensor(flags, dtype=torch.float64, device=due[0].owner.device)
        agreed = self.comm.agree(words).bool()
        self.comm.fail_together(error, bool(agreed[-1]))
        bad, none = agreed[: len(due)], agreed[len(due) : -1]
        for block, without in zip(due, none.tolist(), strict=True):
            if without:  # its only batch was not finite
                block.state["factor_updates"] = 0
        kept = [b for b, without in zip(due, none.tolist(), strict=True) if not without]
        return kept, ~bad[~none]

    # ------------------------------------------------------------------ curvature
    def share(self, schemas: Mapping[Block, Schema]) -> None:
        """Send the refreshed curvature of some blocks to the ranks that precondition with it."""
        mine = {b: schema for b, schema in schemas.items() if self.comm.preconditions(b.index)}
        wide = {b: schema for b, schema in schemas.items() if self.sends_measured(b)}
        near = {b: [Place.CURVATURE] if b in wide else [Place.CURVATURE, Place.MEASURED] for b in mine}
        self.comm.share_curvature([parcel_of(b, mine[b], *places, known=False) for b, places in near.items()])
        measured = [parcel_of(b, schema, Place.MEASURED) for b, schema in wide.items()]
        self.comm.spread([parcel for parcel in measured if parcel.tensors])

    def lacks_measured(self, block: Block) -> bool:
        """Whether ranks that only capture a block still need the tensors with which it is measured."""
        return self._is_unsent(block) and self.comm.captures_elsewhere(block.index)

    def sends_measured(self, block: Block) -> bool:
        """Whether the tensors at ``Place.MEASURED`` are now also on ranks that do not precondition."""
        return self.comm.captures_elsewhere(block.index) and not self._is_unsent(block)

    def _is_unsent(self, block: Block) -> bool:
        return self._holds_back or block.name in self.unsent

    @contextmanager
    def holding_back(self) -> Iterator[None]:
        """Treat tensors at ``Place.MEASURED`` as not sent inside the ``with`` block, in which a checkpoint is read."""
        self._holds_back = True
        try:
            yield
        finally:
            self._holds_back = False

    def places_here(self, block: Block | None) -> frozenset[Place]:
        """Return the places of tensors of a block's state that this rank has."""
        everywhere = frozenset(Place)
        if block is None or not self.comm.combines:
            return everywhere
        i, away = block.index, set()
        if not self.comm.estimates(i):
            away.add(Place.ESTIMATE)
        if not self.comm.preconditions(i):
            away.add(Place.CURVATURE)
            if not (self.comm.captures(i) and self.sends_measured(block)):
                away.add(Place.MEASURED)
        return everywhere - away


def parcel_of(block: Block, schema: Schema, *places: Place, known: bool = True) -> Parcel:
    """The tensors of a block's state at some places, as far as this rank has them."""
    return parcel_with(block, schema, sorted(k for place in places for k in keys(schema, place, known=known)))


def parcel_with(block: Block, schema: Schema, names: Sequence[str]) -> Parcel:
    """The tensors of a block's state with these keys, in this order, as far as this rank has them."""
    state = block.state
    here = [k for k in names if k in state]
    return Parcel(block.index, [state[k] for k in here], tuple(schema[k].symmetric for k in here))
