"""What layer methods do together with other ranks: statistics, refreshes, and what a refresh found.

::

    agree      [examples, contributed, dropped, counts …] of every due block, summed     one small message
    reduce     sums of every due block ─► ranks that hold its estimate
    agree      failures of the owners' refreshes                                         one small message
    share      bases, inverses, scales ─► ranks that precondition

Which blocks are in a message follows from the step counter and from what was agreed, never from one rank's data.
"""

from __future__ import annotations

import logging
import zlib
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from secondorder.capture.sites import Captured, Statistic
from secondorder.capture.statistics.averages import all_finite
from secondorder.capture.statistics.measurement import Estimate, Measured, counts_of, mean_of, weighted
from secondorder.comm import Parcel
from secondorder.curvature.block import Block
from secondorder.curvature.schema import Place, Schema, keys, tensors
from secondorder.linalg.dense import full_precision
from secondorder.preconditioners.base import Directions, words_of_options
from secondorder.preconditioners.blocks import Capturing

log: logging.Logger = logging.getLogger("secondorder")

Sums = Callable[[Block], Schema]

#: Words that every due block has before the counts of its parts: examples, contributions, dropped ones.
_WORDS = 3


class Reducing(Capturing):
    """The stages of a step that need other ranks."""

    # ------------------------------------------------------------------ what a method supplies
    @abstractmethod
    def measure(self, block: Block, statistic: Statistic, examples: int) -> Measured:
        """What this rank captured, as parts that ranks can add up."""

    @abstractmethod
    def refresh(self, blocks: Sequence[Block], host_checks: bool) -> Tensor:
        """Recompute what preconditioning needs from the estimates; returns ``ok [len(blocks)]``."""

    @abstractmethod
    def _update_estimates(self, captured: Captured, gate: Tensor | None) -> None:
        """Fold what was measured into the running estimates."""

    @abstractmethod
    def _warn_uncaptured(self, captured: Captured, gradients: Directions) -> None:
        """Name layers that nothing was captured for."""

    def sums(self, block: Block) -> Schema:
        """The parts that this step measures of a block, as ranks add them up: by default those of its estimate."""
        schema = self.live_schema(block)
        return {key: schema[key] for key in keys(schema, Place.ESTIMATE) if schema[key].kind != "buffers"}

    # ------------------------------------------------------------------ stage 2: statistics
    def reduce(self, statistics: Captured) -> Captured:
        """Measure what was captured, and combine it over the ranks."""
        measured = {
            i: self.measure(self._blocks[i], s, statistics.examples[i])
            for i, s in statistics.statistics.items()
            if statistics.examples[i]
        }
        if not self.comm.combines:
            for i, m in measured.items():
                if "factor_a" in m.parts:
                    self._rows_seen[self._blocks[i].name] = m.examples, m.parts["factor_a"].number
            return statistics._replace(statistics=measured)  # type: ignore[arg-type]
        return self._combine(statistics, measured)

    def _combine(self, captured: Captured, measured: dict[int, Measured]) -> Captured:
        """Counts to everybody, sums to whoever holds the estimates."""
        due = [self._blocks[i] for i in sorted(self._due)]
        if not due:
            return captured._replace(statistics={})
        word = self._options_word()
        tail = [float(captured.total), float(captured.total > 0), 1.0, word, word * word]
        found, told = self._exchange(due, measured, self.sums, tail)
        examples = {i: m.examples for i, m in found.items()}
        total, ranks, everyone, words, squares = told.tolist()
        if everyone * squares != words * words:  # not one and the same word
            self._refuse_options()
        # A rank that captures no layer has as many examples as the others.
        total = round(total * self.comm.data_world / ranks) if ranks else 0
        return captured._replace(statistics=found, examples=examples, total=total)  # type: ignore[arg-type]

    def _options_word(self) -> float:
        """A number of 20 bits for the options of the groups: its square and sums of them are exact."""
        return float(zlib.crc32("\n".join(words_of_options(self.param_groups)).encode()) & 0xFFFFF)

    def _refuse_options(self) -> None:
        rates = [float(group["lr"]) for group in self.param_groups]
        raise RuntimeError(
            f"step {self._t}: the options of the parameter groups differ between ranks (lr here: {rates}), so their "
            "parameters would drift apart. Schedules must see the same numbers on every rank: average a validation "
            "loss over the ranks before it goes into one."
        )

    def _exchange(
        self, blocks: Sequence[Block], measured: Mapping[int, Measured], sums: Sums, tail: Sequence[float]
    ) -> tuple[dict[int, Measured], Tensor]:
        """Add up what the ranks measured of some blocks, and some more words.

        The sums travel while the ranks agree on counts, and have arrived when this returns.

        Returns:
            By block, for those that any rank has seen, the combined parts (where this rank holds the estimate), and the
            sums of the words.
        """
        device = blocks[0].owner.device
        schemas = {b: sums(b) for b in blocks}
        own = [self._contribution(b, measured.get(b.index), schema) for b, schema in schemas.items()]
        words, parcels = [w for w, _ in own], [parcel for _, parcel in own]
        work = self.comm.reduce_statistics(parcels)
        last = torch.tensor(tail, dtype=torch.float64, device=device)
        agreed = self.comm.agree(torch.cat([*(w.to(device) for w in words), last]))
        *totals, told = agreed.split([*map(len, words), len(tail)])
        found, numbers = dict[int, Measured](), dict[int, Tensor]()
        for (block, schema), total in zip(schemas.items(), totals, strict=True):
            if dropped := int(total[2]):
                before = self._skipped_statistics.get(block.name, 0)
                self._skipped_statistics[block.name] = before + dropped
            if n := int(total[0]):
                mine = measured.get(block.index)
                number, size = total[_WORDS:], self._count_size(block)
                seen = frozenset(key for key, c in zip(schema, number.split(size), strict=False) if bool(c.any()))
                numbers[block.index] = number
                found[block.index] = Measured({}, n, None if mine is None else mine.rest, seen)
                if next(iter(schema), "") == "factor_a":
                    ranks = float(total[1])
                    self._rows_seen[block.name] = n / ranks, float(number[0]) / ranks
        work.wait()
        for block, parcel in zip(blocks, parcels, strict=True):
            if block.index in found:
                means = self._means(block, parcel, numbers[block.index], schemas[block])
                found[block.index] = found[block.index]._replace(parts=means)
        return found, told

    def learn(self, statistics: Any, gradients: Directions, gate: Tensor | None) -> None:
        """Fold what was measured into the running estimates."""
        self._update_estimates(statistics, gate)
        self._warn_uncaptured(statistics, gradients)

    def _is_finite(self, measured: Measured) -> Tensor:
        return all_finite([part.total for part in measured.parts.values()]) if measured.parts else torch.tensor(True)

    def _count_size(self, block: Block) -> int:
        """Numbers in the count of a part: one, or one for each of the blocks of a layer."""
        return 1 if block.adapter.is_exact else block.adapter.groups

    def _contribution(self, block: Block, measured: Measured | None, schema: Schema) -> tuple[Tensor, Parcel]:
        """Words ``[examples, contributed, dropped, counts of each part …]`` and sums of this rank or zeros."""
        size, device = self._count_size(block), block.owner.device
        finite = None if measured is None else self._is_finite(measured).to(device)
        counts, found = [], []
        # Nothing of a unit travels whose owner alone captures it.
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
        """The combined parts, where this rank holds what they are folded into."""
        if not self.comm.estimates(block.index):
            return {}
        own = counts.split(self._count_size(block)) if schema else ()
        found = zip(schema, parcel.tensors, own, strict=True)
        return {key: mean_of(total, c) for key, total, c in found if bool(c.any())}  # what any rank has measured

    # ------------------------------------------------------------------ stage 4: refresh and share
    def _refresh_together(self, due: list[Block]) -> tuple[list[Block], Tensor]:
        """Let the owners refresh, and agree on how that went.

        Returns:
            The blocks that had an estimate, and whether each went well, the same on every rank.

        Raises:
            RuntimeError: On every rank, if one of them could not even try.
        """
        mine = [b for b in due if self.comm.refreshes(b.index)]
        failed, empty, error = {}, set(), None
        try:
            empty = {b for b in mine if self.is_empty(b)}
            todo = [b for b in mine if b not in empty]
            if todo:
                with full_precision(todo[0].owner.device):
                    failed = dict(zip(todo, (~self.refresh(todo, True)).cpu().tolist(), strict=True))
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
                self.state[block.owner]["factor_updates"] = 0
        kept = [b for b, without in zip(due, none.tolist(), strict=True) if not without]
        return kept, ~bad[~none]

    def is_empty(self, block: Block) -> bool:
        """Whether nothing was folded into the estimate of a new block."""
        state = self.state[block.owner]
        weight = state.get("factor_weight")
        return state["refreshes"] == 0 and isinstance(weight, Tensor) and not float(weight)

    def share(self, refreshed: list[int]) -> None:
        """Bring what was refreshed to the ranks that precondition with it."""
        if not self.comm.combines or not refreshed:
            return
        mine = [self._blocks[i] for i in refreshed if self.comm.preconditions(i)]
        wide = {self._blocks[i] for i in refreshed if self._sends_measured(self._blocks[i])}
        near = {b: [Place.CURVATURE] if b in wide else [Place.CURVATURE, Place.MEASURED] for b in mine}
        self.comm.share_curvature([self.parcel_of(b, *places, known=False) for b, places in near.items()])
        measured = [self.parcel_of(self._blocks[i], Place.MEASURED) for i in refreshed if self._blocks[i] in wide]
        self.comm.spread([parcel for parcel in measured if parcel.tensors])

    def _sends_measured(self, block: Block) -> bool:
        """Whether what is at ``Place.MEASURED`` is now on ranks that do not precondition, too."""
        return self.comm.captures_elsewhere(block.index)

    def parcel_of(self, block: Block, *places: Place, known: bool = True) -> Parcel:
        """The tensors of a block's state that are at some places, as far as they are here."""
        schema = self.live_schema(block)
        return self._shared(block, schema, sorted(k for place in places for k in keys(schema, place, known=known)))

    def _shared(self, block: Block, schema: Schema, names: Sequence[str]) -> Parcel:
        """Tensors of a block's state in this order, as far as they are here."""
        state = self.state[block.owner]
        here = [k for k in names if k in state]
        return Parcel(block.index, [state[k] for k in here], tuple(schema[k].symmetric for k in here))

    def renew(self, blocks: list[Block]) -> Tensor:
        """Refresh and share some blocks outside of their schedule."""
        if not self.comm.combines:
            with full_precision(blocks[0].owner.device):
                return self.refresh(blocks, True)
        kept, ok = self._refresh_together(blocks)
        self.share([b.index for b in kept])
        good = dict(zip(kept, ok.tolist(), strict=True))
        return torch.tensor([good.get(b, False) for b in blocks])

    # ------------------------------------------------------------------ what this rank holds
    def placed(self) -> list[tuple[int, nn.Parameter]]:
        """Blocks, and the parameter whose state theirs is."""
        return [(b.index, b.owner) for b in self._blocks]

    def places_here(self, p: nn.Parameter) -> frozenset[Place]:
        """Return where this rank is, of the places at which tensors of a parameter's state are."""
        block, everywhere = self._block_of.get(p), frozenset(Place)
        if block is None or not self.comm.combines:
            return everywhere
        i, away = block.index, set()
        if not self.comm.estimates(i):
            away.add(Place.ESTIMATE)
        if not self.comm.preconditions(i):
            away.add(Place.CURVATURE)
            if not (self.comm.captures(i) and self._sends_measured(block)):
                away.add(Place.MEASURED)
        return everywhere - away
