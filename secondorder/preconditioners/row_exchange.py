"""Rows of examples of several ranks: every rank chooses among its own rows, and one rank inverts the common kernel.

::

    agree     examples, rows and positions of every rank, trace of the kernel     one small message
    choose    rows of own examples, scaled for those of all ranks                  every rank separately
    agree     failures, errors of probes                                           one small message
    gather    rows, cores of interpolations ─► ranks that hold the estimate
    refresh   the kernel of all rows                                               their owner
    share     kernel, and rows where only the owner has them ─► ranks that precondition

Every rank sends the same number of rows, r of the largest batch, padded with zeros that are removed when the rows are
combined. Each rank draws rows by its own scores. With r rows from every rank, these probabilities sample the union with
the least variance. With a common factor for all ranks, ranks with low scores would send fewer rows than possible.

For layers with factors instead of rows, ranks add up second moments of rows, as in K-FAC.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from secondorder.capture.sites import Captured
from secondorder.capture.statistics.examples import multiplied_out, second_moments
from secondorder.capture.statistics.measurement import Reduced
from secondorder.comm.strategy import Parcel
from secondorder.curvature.example_rows import Batch, Fresh, Kept, Raw, filled, inputs_of
from secondorder.curvature.row_block import RowBlock
from secondorder.curvature.schema import tensors
from secondorder.linalg import kernel
from secondorder.linalg.kernel import scaled
from secondorder.parallel.rows import Census, census_of, count_words, filled_up, put_together, sum_together, words_of

if TYPE_CHECKING:
    from secondorder.preconditioners.row_plan import RowPlan
    from secondorder.preconditioners.row_selection import RowSelection


class RowExchange:
    """The rows of a step, which ranks combine if several of them share their examples.

    Args:
        plan: The blocks.
        selection: The selection among the rows of this rank.
        device: Device of tensors of messages. If None, it is that of the parameters of each block.

    Attributes:
        seen: Blocks that some rank captured in this step, with the rows of this rank, or None.
        census: The sizes that the ranks captured for each block in this step.
        ranks: Number of rows that every rank sends for each block.
    """

    def __init__(self, plan: RowPlan, selection: RowSelection, device: torch.device | None = None) -> None:
        self._comm, self._plan, self._selection, self._device = plan.comm, plan, selection, device
        self.forget()

    # ------------------------------------------------------------------ the rows of a step
    def forget(self) -> None:
        """Discard the rows of a step."""
        for block in self._plan.blocks:
            block.fresh = block.union = None
        #: Number of examples of this rank, by block if it captured some, and in all its forward passes.
        self._own_examples: tuple[Mapping[int, int], int] = {}, 0
        self._gate: Tensor | None = None
        self.seen: dict[RowBlock, Raw | None] = {}
        self.census: dict[RowBlock, Census] = {}
        self.ranks: dict[RowBlock, int] = {}

    def begin(self, own: Captured) -> None:
        """Begin a step in which this rank captured some examples."""
        self.forget()
        self._own_examples = dict(own.examples), own.total

    def take(self, reduced: Reduced, gate: Tensor | None) -> None:
        """Take the captured rows of this rank for the blocks that any rank has seen."""
        if self._comm.combines:
            self.seen = {self._plan.blocks[i]: measured.rest for i, measured in sorted(reduced.measured.items())}
            self._gate = gate

    def good(self, block: RowBlock) -> Tensor:
        """Return whether the step may be used, as a 0-dim bool tensor."""
        return torch.ones((), dtype=torch.bool, device=self._device_of(block)) if self._gate is None else self._gate

    def _device_of(self, block: RowBlock) -> torch.device:
        return self._device or block.owner.device

    # ------------------------------------------------------------------ together
    def bring_together(self) -> None:
        """Send factors of all ranks' rows, and rows that all ranks have chosen, to the ranks that store them."""
        self.census = self._take_census(list(self.seen))
        for block in self.census:
            self._take_own(block)
        factored = [b for b in self.census if b.is_factored]
        others = [b for b in self.census if not b.is_factored]
        self._selection.decide(others)
        self.ranks = self._agree_on_ranks(others)
        mine = [b for b in others if b.fresh is not None]
        own = {b: min(self.ranks[b], b.captured.rows.n) for b in mine}
        moments, kept = dict[RowBlock, list[Tensor]](), dict[RowBlock, Kept]()

        def attempt() -> Tensor:
            moments.update({b: self._own_moments(b) for b in factored})
            kept.update(self._selection.choose(mine, own))
            errors = [float(error) for error in self._selection.probe_errors(mine, own)]
            return torch.tensor([sum(errors), len(errors)], dtype=torch.float64)

        error, count = sum_together(self._comm, "choosing rows", [2], attempt)
        if count:
            self._plan.modes.policy.probe(error / count)
        self._add_moments(moments)
        if others:
            parcels = [self._parcel(b, kept.get(b)) for b in others]
            self.read_rows(self._comm.gather_statistics(parcels))

    # ------------------------------------------------------------------ who has what
    def _take_census(self, blocks: Sequence[RowBlock]) -> dict[RowBlock, Census]:
        """Agree on the sizes that all ranks captured for some blocks. Blocks without rows are left out."""
        sizes = [count_words(b, self._comm.data_world) for b in blocks]
        agreed = sum_together(self._comm, "looking at its rows", [sum(sizes)], lambda: self._own_words(blocks))
        return self.read_census(dict(zip(blocks, agreed.split(sizes), strict=True)))

    def read_census(self, words: Mapping[RowBlock, Tensor]) -> dict[RowBlock, Census]:
        """Interpret the words of all ranks about some blocks. Blocks without rows are left out."""
        found = {block: census_of(block, own, self._comm.data_world) for block, own in words.items()}
        return {block: census for block, census in found.items() if census is not None}

    def _own_words(self, blocks: Sequence[RowBlock]) -> Tensor:
        """Return what this rank contributes to the census. Rows that are not finite are not counted."""
        looked_at = dict[RowBlock, Tensor]()
        for block in blocks:
            if (raw := self.seen[block]) is not None:
                traces = kernel.norms(raw.rows).sum(-1).double().reshape(-1)
                looked_at[block] = torch.cat([raw.finite.to(traces).reshape(1), traces])
        if looked_at:  # one wait for the device
            host = torch.cat([x.to(self._device_of(blocks[0])) for x in looked_at.values()]).cpu()
            looked_at = dict(zip(looked_at, host.split([len(x) for x in looked_at.values()]), strict=True))
        return torch.cat([self._words(block, looked_at.get(block)) for block in blocks])

    def _words(self, block: RowBlock, looked_at: Tensor | None) -> Tensor:
        rank, world = self._comm.rank, self._comm.data_world
        if looked_at is not None and not looked_at[0]:
            self.seen[block] = None
            return torch.zeros(count_words(block, world), dtype=torch.float64)
        captured, total = self._own_examples
        n = captured.get(block.index, total) if self._comm.captures(block.index) else 0
        traces = None if looked_at is None else looked_at[1:]
        return words_of(block, self.seen[block], traces, n, rank=rank, world=world)

    def _take_own(self, block: RowBlock) -> None:
        """Settle the form of a block, and scale this rank's rows for the examples of all ranks."""
        census, raw = self.census[block], self.seen[block]
        rows = self._plan.planned_rows(block, block.group, self._plan.batch_size or max(census.examples))
        pairs = not census.whole and not block.adapter.constant_input
        if self._plan.choose_form(block, rows, census.positions, pairs):
            census = self.census[block] = census._replace(whole=True)
        batch = Batch(max(census.examples), max(census.rows), census.positions, census.whole)
        self._plan.last_batch[block.name] = batch
        if raw is None:
            return
        n = census.examples[self._comm.rank]
        share = n / census.total
        found = scaled(raw.rows, (block.gradient_scale(n) * share) ** 0.5)
        found = multiplied_out(found) if census.whole else found
        block.fresh = Fresh(found, n, raw.real, self.good(block), share, self._damping(block))

    def _damping(self, block: RowBlock) -> Tensor:
        """Return λ, which follows from the examples of all ranks."""
        census = self.census[block]
        return block.damping_of(census.trace, census.total).to(self._device_of(block))

    # ------------------------------------------------------------------ how many rows
    def _agree_on_ranks(self, blocks: Sequence[RowBlock]) -> dict[RowBlock, int]:
        """Return r, the number of rows that every rank sends. With an energy, it is the most that any rank needs."""
        limits = {block: self.most_rows(block) for block in blocks}
        asked = [b for b in blocks if self._plan.asks_energy(b)]
        needed = torch.zeros(0, self._comm.data_world)
        if asked:
            attempt = partial(self._needed, {b: limits[b] for b in asked})
            needed = sum_together(self._comm, "measuring its kernels", [len(asked), self._comm.data_world], attempt)
        return limits | self.read_ranks(limits, dict(zip(asked, needed, strict=True)))

    def read_ranks(self, limits: Mapping[RowBlock, int], needed: Mapping[RowBlock, Tensor]) -> dict[RowBlock, int]:
        """Return the largest number of rows that any rank needs of each block, given those of all ranks ``[W]``."""
        return {block: min(int(by_rank.max()), limits[block]) for block, by_rank in needed.items()}

    def most_rows(self, block: RowBlock) -> int:
        """Return the number of rows that every rank sends for a block, or its limit with an energy."""
        census, planned, ranks = self.census[block], self._plan.batch_size, self._comm.sources(block.index)
        wanted = [
            min(self._plan.rank_of(block.group, planned or n, ranks), rows)
            for n, rows in set(zip(census.examples, census.rows, strict=True))
            if rows
        ]
        return max([*wanted, self._plan.rank_of(block.group, planned, ranks) if planned else 0])

    def _needed(self, limits: Mapping[RowBlock, int]) -> Tensor:
        """Return the numbers of rows for the energies of this rank's kernels, in this rank's column ``[blocks, W]``."""
        own = {b: min(r, b.fresh.rows.n) for b, r in limits.items() if b.fresh is not None}
        found = own | self._selection.by_energy(own)
        words = torch.zeros(len(limits), self._comm.data_world, dtype=torch.float64)
        words[:, self._comm.rank] = torch.tensor([float(found.get(b, 0)) for b in limits])
        return words

    def _counts(self, block: RowBlock) -> list[int]:
        """Return the number of rows of each rank that sends any."""
        counts = [min(self.ranks[block], n) for n in self.census[block].rows]
        return counts if self._comm.sources(block.index) > 1 else [counts[self._comm.owner(block.index)]]

    def total_rows(self, block: RowBlock) -> int:
        """Return R, the rows of all ranks."""
        planned = self._plan.batch_size
        fixed = self._plan.planned_rows(block, block.group, planned) if planned else 0
        return max(sum(self._counts(block)), fixed)

    # ------------------------------------------------------------------ factors
    def _own_moments(self, block: RowBlock) -> list[Tensor]:
        """Return this rank's part of A and G."""
        fresh, likes = block.fresh, tensors(self._plan.live_schema(block))
        if fresh is None:
            return [torch.zeros_like(likes[key], device=self._device_of(block)) for key in ("factor_a", "factor_g")]
        a, g = second_moments(fresh.rows, fresh.real)
        part = torch.as_tensor(fresh.real, dtype=torch.float64).cpu() / self.census[block].real.clamp(min=1)
        return [a * part.to(a.device, a.dtype).reshape(*block.with_rows.lead, 1, 1), g]

    def _add_moments(self, moments: Mapping[RowBlock, list[Tensor]]) -> None:
        """Sum second moments, and update factors with them."""
        if not moments:
            return
        self._comm.reduce_statistics([Parcel(b.index, m, (True, True)) for b, m in moments.items()]).wait()
        for block, found in moments.items():
            good = self.good(block)
            if self._comm.estimates(block.index):
                block.with_factors.fold(block.state, block.group, found, self.census[block].total, good)
            if self._comm.preconditions(block.index):
                block.with_factors.keep_damping(block.state, self._damping(block), good)

    # ------------------------------------------------------------------ rows
    def _parcel(self, block: RowBlock, kept: Kept | None) -> Parcel:
        """Return this rank's rows, padded to r rows of S positions."""
        if not self._comm.captures(block.index):
            return Parcel(block.index, [])
        sizes, interpolates = self.census[block].sizes(block, self.ranks[block]), self._plan.interpolates(block)
        found = filled_up(block, sizes, kept, interpolates=interpolates, device=self._device_of(block))
        return Parcel(block.index, found)

    def read_rows(self, gathered: Sequence[Parcel]) -> None:
        """Combine the rows of all ranks on the ranks that store them."""
        for found in gathered:
            if found.tensors and self._comm.preconditions(found.index):
                block = self._plan.blocks[found.index]
                block.union = self._put_together(block, found.tensors)

    def _put_together(self, block: RowBlock, stacks: Sequence[Tensor]) -> Kept:
        """Return the rows of all ranks in the order of the ranks."""
        counts, interpolates = self._counts(block), self._plan.interpolates(block)
        sizes = self.census[block].sizes(block, sum(counts))
        found = put_together(block, sizes, stacks, counts, self._damping(block), interpolates=interpolates)
        return filled(found, self.total_rows(block))

    # ------------------------------------------------------------------ what the owner of a block sends
    def make_room(self, block: RowBlock) -> None:
        """Allocate what this rank receives from the owner of a block, and store what it already knows."""
        is_sent = self._comm.preconditions(block.index) and not self._comm.refreshes(block.index)
        if block.is_factored or not is_sent:
            return
        device, kept = self._device_of(block), block.union
        schema = block.with_rows.schema(self.census[block].sizes(block, self.total_rows(block)))
        known = {} if kept is None else {"rows_a": inputs_of(kept.rows), "rows_g": kept.rows.g}
        known |= {
            "kernel_damping": self._damping(block),
            "interpolated": torch.full((), int(self._plan.interpolates(block)), device=device),
        }
        for key, like in tensors(schema).items():
            if key not in known:
                known[key] = torch.empty_like(like, device=device)
        block.state.update(known)
