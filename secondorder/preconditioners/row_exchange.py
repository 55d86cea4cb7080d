"""Rows of examples that are spread over ranks: every rank chooses from its own, one factorises the kernel of all.

::

    agree     examples, rows and positions of every rank, trace of the kernel     one small message
    choose    rows of own examples, scaled for those of all ranks                  every rank by itself
    agree     failures, errors of probes                                           one small message
    gather    rows, cores of interpolations ─► ranks that hold the estimate
    refresh   the kernel of all rows                                               their owner
    share     kernel, and rows where only the owner has them ─► ranks that precondition

Every rank sends equally many rows, r of the largest batch, filled up with zeros; put together they have no fillings.
Rows are drawn on each rank by its own scores: with r rows from every rank, these are the probabilities that sample the
union with the least variance. One factor for all ranks would leave rows unsent where scores are low.

Layers that take factors instead of rows add up second moments of rows, as K-FAC does.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from secondorder.capture.sites import Captured
from secondorder.capture.statistics.examples import multiplied_out, second_moments
from secondorder.comm.strategy import Parcel
from secondorder.curvature import row_choice
from secondorder.curvature.example_rows import Batch, Fresh, Kept, Raw, filled, inputs_of
from secondorder.curvature.mode import ModeSwitch
from secondorder.curvature.row_block import RowBlock
from secondorder.curvature.row_choice import Energy
from secondorder.curvature.schema import tensors
from secondorder.linalg import kernel
from secondorder.linalg.dense import full_precision
from secondorder.linalg.kernel import scaled
from secondorder.parallel.rows import Census, census_of, count_words, filled_up, put_together, words_of
from secondorder.preconditioners.layer_capture import Setting
from secondorder.preconditioners.row_layers import RowLayers

log: logging.Logger = logging.getLogger("secondorder")


class GatheringOptimizer(RowLayers):
    """Base of the methods whose rows may come from several ranks."""

    def __init__(self, setting: Setting, batch_size: int | None, modes: ModeSwitch) -> None:
        super().__init__(setting, batch_size, modes)
        #: This rank's examples of the step, by block where it captured some, and of all its forwards.
        self._own_examples: tuple[Mapping[int, int], int] = {}, 0
        self._gate: Tensor | None = None
        #: Blocks that some rank captured in this step, with what this rank did.
        self._seen: dict[RowBlock, Raw | None] = {}
        self._census: dict[RowBlock, Census] = {}
        self._ranks_sent: dict[RowBlock, int] = {}

    # ------------------------------------------------------------------ what a method supplies
    @abstractmethod
    def choose_rows(self, blocks: Sequence[RowBlock], ranks: Mapping[RowBlock, int]) -> dict[RowBlock, Kept]:
        """Choose so many rows of this step."""

    @abstractmethod
    def invert_rows(self, kept: Mapping[RowBlock, Kept], good: Mapping[RowBlock, Tensor]) -> dict[RowBlock, Tensor]:
        """Invert kernels, and take over those that may be used; returns by block whether that went well."""

    @abstractmethod
    def probe_errors(self, blocks: Sequence[RowBlock], ranks: Mapping[RowBlock, int]) -> list[Tensor]:
        """What few rows of this rank's examples get wrong, on a few blocks."""

    # ------------------------------------------------------------------ which mode
    def begin_rows(self, blocks: Sequence[RowBlock]) -> None:
        """Ask the policy for the mode of this refresh if any of the blocks depends on it."""
        if any(block.group["mode"] == "auto" for block in blocks):
            self.plan.modes.decide(self.runtime.step)

    def interpolates(self, block: RowBlock) -> bool:
        """Whether the mode of a block is KID."""
        return self.plan.modes.mode_in(block.group) == "kid"

    def device_of(self, block: RowBlock) -> torch.device:
        """Where the rows of a block are."""
        return block.owner.device

    def most_rows(self, blocks: Sequence[RowBlock]) -> dict[RowBlock, int]:
        """r, the rows that every rank sends of each block: where an energy decides, as many as the neediest needs."""
        limits = {block: self._most_rows(block) for block in blocks}
        asked = [b for b in blocks if self._asks_energy(b)]
        if asked:
            needed = self._try_together("measuring its kernels", [len(asked), self.comm.data_world], partial(
                self._needed, {b: limits[b] for b in asked}
            ))  # fmt: skip
            limits |= {b: min(int(by_rank.max()), limits[b]) for b, by_rank in zip(asked, needed, strict=True)}
        return limits

    def _needed(self, limits: Mapping[RowBlock, int]) -> Tensor:
        """Rows that the energies of this rank's kernels ask for, in its place ``[blocks, W]``."""
        own = {b: min(r, b.fresh.rows.n) for b, r in limits.items() if b.fresh is not None}
        found = own | self._by_energy(own)
        words = torch.zeros(len(limits), self.comm.data_world, dtype=torch.float64)
        words[:, self.comm.rank] = torch.tensor([float(found.get(b, 0)) for b in limits])
        return words

    def _asks_energy(self, block: RowBlock) -> bool:
        return block.group["rank_energy"] is not None and self.plan.modes.mode_in(block.group) != "sngd"

    def _by_energy(self, limits: Mapping[RowBlock, int]) -> dict[RowBlock, int]:
        """R of the blocks for which the energy of their kernels decides."""
        asking = [b for b in limits if self._asks_energy(b)]
        return row_choice.by_energy({b: Energy(b.captured.rows, limits[b], b.group["rank_energy"]) for b in asking})

    def _most_rows(self, block: RowBlock) -> int:
        census, ranks = self._census[block], self.comm.sources(block.index)
        wanted = [
            min(self.plan.rank_of(block.group, self.plan.batch_size or n, ranks), rows)
            for n, rows in set(zip(census.examples, census.rows, strict=True))
            if rows
        ]
        return max(
            [*wanted, self.plan.rank_of(block.group, self.plan.batch_size, ranks) if self.plan.batch_size else 0]
        )

    # ------------------------------------------------------------------ stages 2 and 3: what was captured
    def reduce(self, statistics: Captured) -> Captured:
        self._own_examples = dict(statistics.examples), statistics.total
        return super().reduce(statistics)

    def fold(self, captured: Captured, gate: Tensor | None) -> None:
        if self.comm.combines:
            found = sorted(captured.statistics.items())
            self._seen = {self.plan.blocks[i]: measured.rest for i, measured in found}  # type: ignore[attr-defined]
            self._gate = gate
        super().fold(captured, gate)

    def forget_step(self) -> None:
        """Forget what only the current step uses."""
        for block in self.plan.blocks:
            block.fresh = block.union = None
        self._gradients_now = {}
        self._own_examples, self._gate = ({}, 0), None
        self._seen, self._census, self._ranks_sent = {}, {}, {}

    # ------------------------------------------------------------------ stage 4: refresh
    def is_due(self, block: RowBlock) -> bool:
        return block in self._census if self.comm.combines else super().is_due(block)

    def refresh_due(self) -> list[int]:
        """As in the base class, after the ranks have agreed on how many rows each of them has."""
        if self.comm.combines and self._seen:
            with full_precision(next(iter(self._seen)).owner.device), self.runtime.stage("select"):
                self._census = self._take_census(list(self._seen))
                self._bring_together(list(self._census))
        return super().refresh_due()

    def refresh(self, blocks: Sequence[RowBlock], host_checks: bool, *, restores: bool = False) -> Tensor:
        """Renew rows and factors; a block that fails keeps its last good ones."""
        if not self.comm.combines:
            return super().refresh(blocks, host_checks)
        factored = [b for b in blocks if b.is_factored]
        ok = self.factorise({b: self._good(b) for b in factored}, host_checks)
        others = [b for b in blocks if b not in ok]
        ok |= self.invert_rows({b: b.union for b in others if b.union is not None}, {b: self._good(b) for b in others})
        return torch.stack([ok[b] for b in blocks])

    def _good(self, block: RowBlock) -> Tensor:
        """Whether this step may be used."""
        return torch.ones((), dtype=torch.bool, device=self.device_of(block)) if self._gate is None else self._gate

    def _try_together(self, what: str, shape: Sequence[int], attempt: Callable[[], Tensor]) -> Tensor:
        """Work on every rank that ends in words, which are added up.

        Args:
            what: What is tried.
            shape: Of the words.
            attempt: The work.

        Returns:
            The sums, float64 on the CPU.

        Raises:
            RuntimeError: On every rank, if one of them failed.
        """
        words, error = torch.zeros(*shape, dtype=torch.float64), None
        try:
            words = attempt()
        except Exception as found:  # the others wait for this rank: they must hear of it
            error = f"rank {self.comm.rank}: {what} failed: {type(found).__name__}: {found}"
            log.exception("%s failed", what)
        flag = torch.tensor([float(error is not None)], dtype=torch.float64)
        agreed = self.comm.agree(torch.cat([words.cpu().flatten(), flag]))
        self.comm.fail_together(error, bool(agreed[-1]))
        return agreed[:-1].view(*shape)

    # ------------------------------------------------------------------ who has what
    def _take_census(self, blocks: Sequence[RowBlock]) -> dict[RowBlock, Census]:
        """What all ranks captured of some blocks, of those that have rows."""
        sizes = [count_words(b, self.comm.data_world) for b in blocks]
        agreed = self._try_together("looking at its rows", [sum(sizes)], lambda: self._own_words(blocks)).split(sizes)
        found = {b: census_of(b, words, self.comm.data_world) for b, words in zip(blocks, agreed, strict=True)}
        return {block: census for block, census in found.items() if census is not None}

    def _own_words(self, blocks: Sequence[RowBlock]) -> Tensor:
        """What this rank contributes to the census; rows that are not finite count for nothing."""
        looked_at = dict[RowBlock, Tensor]()
        for block in blocks:
            if (raw := self._seen[block]) is not None:
                traces = kernel.norms(raw.rows).sum(-1).double().reshape(-1)
                assert raw.finite is not None
                looked_at[block] = torch.cat([raw.finite.to(traces).reshape(1), traces])
        if looked_at:  # one wait for the device
            host = torch.cat([x.to(self.device_of(blocks[0])) for x in looked_at.values()]).cpu()
            looked_at = dict(zip(looked_at, host.split([len(x) for x in looked_at.values()]), strict=True))
        return torch.cat([self._words(block, looked_at.get(block)) for block in blocks])

    def _words(self, block: RowBlock, looked_at: Tensor | None) -> Tensor:
        rank, world = self.comm.rank, self.comm.data_world
        if looked_at is not None and not looked_at[0]:
            self._seen[block] = None
            return torch.zeros(count_words(block, world), dtype=torch.float64)
        captured, total = self._own_examples
        n = captured.get(block.index, total) if self.comm.captures(block.index) else 0
        traces = None if looked_at is None else looked_at[1:]
        return words_of(block, self._seen[block], traces, n, rank=rank, world=world)

    # ------------------------------------------------------------------ what everybody has chosen
    def _bring_together(self, blocks: Sequence[RowBlock]) -> None:
        """Factors of all ranks' rows where they belong, and rows that all ranks chose."""
        for block in blocks:
            self._take_own(block)
        factored = [b for b in blocks if b.is_factored]
        others = [b for b in blocks if b not in factored]
        if others:
            self.begin_rows(others)
        ranks = self._ranks_sent = self.most_rows(others)
        mine = [b for b in others if b.fresh is not None]
        own = {b: min(ranks[b], b.captured.rows.n) for b in mine}
        moments, kept = dict[RowBlock, list[Tensor]](), dict[RowBlock, Kept]()

        def attempt() -> Tensor:
            moments.update({b: self._own_moments(b) for b in factored})
            kept.update(self.choose_rows(mine, own))
            errors = [float(error) for error in self.probe_errors(mine, own)]
            return torch.tensor([sum(errors), len(errors)], dtype=torch.float64)

        error, count = self._try_together("choosing rows", [2], attempt)
        if count:
            self.plan.modes.policy.probe(error / count)
        self._add_moments(moments)
        self._gather({b: kept.get(b) for b in others})

    def _damping(self, block: RowBlock) -> Tensor:
        """λ, from the examples of all ranks."""
        census = self._census[block]
        return block.damping_of(census.trace, census.total).to(self.device_of(block))

    def _settle_form(self, block: RowBlock, census: Census) -> Census:
        """Decide between rows and factors, and between pairs of rows and gradients."""
        rows = self.plan.planned_rows(block, block.group, self.plan.batch_size or max(census.examples))
        pairs = not census.whole and not block.adapter.constant_input
        if self.plan.choose_form(block, rows, census.positions, pairs):
            self._census[block] = census._replace(whole=True)
        return self._census[block]

    def _take_own(self, block: RowBlock) -> None:
        """Settle the form of a block, and scale this rank's rows for the examples of all ranks."""
        census, raw = self._settle_form(block, self._census[block]), self._seen[block]
        self._last_batch[block.name] = Batch(max(census.examples), max(census.rows), census.positions, census.whole)
        if raw is None:
            return
        n = census.examples[self.comm.rank]
        share = n / census.total
        found = scaled(raw.rows, (block.gradient_scale(n) * share) ** 0.5)
        found = multiplied_out(found) if census.whole else found
        block.fresh = Fresh(found, n, raw.real, self._good(block), share, self._damping(block))

    # ------------------------------------------------------------------ factors
    def _own_moments(self, block: RowBlock) -> list[Tensor]:
        """This rank's part of A and G."""
        fresh, likes = block.fresh, tensors(self.plan.live_schema(block))
        if fresh is None:
            return [torch.zeros_like(likes[key], device=self.device_of(block)) for key in ("factor_a", "factor_g")]
        a, g = second_moments(fresh.rows, fresh.real)
        part = torch.as_tensor(fresh.real, dtype=torch.float64).cpu() / self._census[block].real.clamp(min=1)
        return [a * part.to(a.device, a.dtype).reshape(*block.with_rows.lead, 1, 1), g]

    def _add_moments(self, moments: Mapping[RowBlock, list[Tensor]]) -> None:
        """Add up second moments, and fold them into factors."""
        if not moments:
            return
        self.comm.reduce_statistics([Parcel(b.index, m, (True, True)) for b, m in moments.items()]).wait()
        for block, found in moments.items():
            good = self._good(block)
            if self.comm.estimates(block.index):
                block.fold_moments(found, self._census[block].total, good)
            if self.comm.preconditions(block.index):
                block.with_factors.keep_damping(block.state, self._damping(block), good)

    # ------------------------------------------------------------------ rows
    def _gather(self, chosen: Mapping[RowBlock, Kept | None]) -> None:
        """Bring the rows of all ranks to those that hold the estimate."""
        if not chosen:
            return
        stacks = self.comm.gather_statistics([self._parcel(block, kept) for block, kept in chosen.items()])
        for block, stack in zip(chosen, stacks, strict=True):
            if stack.tensors and self.comm.preconditions(block.index):
                block.union = self._put_together(block, stack.tensors)

    def _counts(self, block: RowBlock) -> list[int]:
        """Rows of the ranks that send some."""
        counts = [min(self._ranks_sent[block], n) for n in self._census[block].rows]
        return counts if self.comm.sources(block.index) > 1 else [counts[self.comm.owner(block.index)]]

    def _total_rows(self, block: RowBlock) -> int:
        """R, of all ranks."""
        fixed = self.plan.planned_rows(block, block.group, self.plan.batch_size) if self.plan.batch_size else 0
        return max(sum(self._counts(block)), fixed)

    def _parcel(self, block: RowBlock, kept: Kept | None) -> Parcel:
        """This rank's rows, filled up to r and S."""
        if not self.comm.captures(block.index):
            return Parcel(block.index, [])
        sizes, interpolates = self._census[block].sizes(block, self._ranks_sent[block]), self.interpolates(block)
        return Parcel(
            block.index, filled_up(block, sizes, kept, interpolates=interpolates, device=self.device_of(block))
        )

    def _put_together(self, block: RowBlock, stacks: Sequence[Tensor]) -> Kept:
        """Rows of all ranks, in their order."""
        counts, interpolates = self._counts(block), self.interpolates(block)
        sizes = self._census[block].sizes(block, sum(counts))
        found = put_together(block, sizes, stacks, counts, self._damping(block), interpolates=interpolates)
        return filled(found, self._total_rows(block))

    # ------------------------------------------------------------------ stage 4: share
    def share(self, refreshed: list[int]) -> None:
        if self.comm.combines:  # the others keep what they have, of whatever size
            refreshed = [i for i in refreshed if self.plan.blocks[i].name not in self.refresher.failures]
            for block in (self.plan.blocks[i] for i in refreshed):
                if self.comm.preconditions(block.index) and not self.comm.refreshes(block.index):
                    self._make_room(block)
        super().share(refreshed)

    def _make_room(self, block: RowBlock) -> None:
        """Have tensors of the sizes of what the owner will send, and what is known without it."""
        if block.is_factored:
            return
        state, kept = block.state, block.union
        schema = block.with_rows.schema(self._census[block].sizes(block, self._total_rows(block)))
        known = {} if kept is None else {"rows_a": inputs_of(kept.rows), "rows_g": kept.rows.g}
        known |= {
            "kernel_damping": self._damping(block),
            "interpolated": torch.full((), int(self.interpolates(block)), device=self.device_of(block)),
        }
        for key, like in tensors(schema).items():
            if key not in known:
                known[key] = torch.empty_like(like, device=self.device_of(block))
        state.update(known)
