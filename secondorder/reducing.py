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

from secondorder.capturing import Capturing
from secondorder.comm import Parcel
from secondorder.curvature.block import Block
from secondorder.curvature.measured import Measured, Part, counts_of, mean_of, weighted
from secondorder.curvature.sites import Captured, Statistic
from secondorder.curvature.statistics import all_finite
from secondorder.lifecycle import Directions, State
from secondorder.linalg import full_precision

log: logging.Logger = logging.getLogger("secondorder")

Spec = Callable[[Block], Mapping[str, Tensor]]

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

    def measured_spec(self, block: Block) -> Mapping[str, Tensor]:
        """Shapes of the parts that this step measures of a block, as ``meta`` tensors by state key."""
        return {}

    def is_symmetric(self, block: Block, key: str) -> bool:
        """Whether a tensor of the state is a symmetric matrix."""
        return False

    def shared_keys(self, block: Block) -> list[str]:
        """State that a refresh changes and every rank that preconditions needs."""
        return self._keys_of(block, "curvature")

    def _keys_of(self, block: Block, place: str) -> list[str]:
        held = sorted(self.state[block.owner].items())  # a loaded state may have another order on each rank
        return [k for k, v in held if isinstance(v, Tensor) and self.place_of(block, k) == place]

    # ------------------------------------------------------------------ stage 2: statistics
    def _reduce(self, statistics: Captured) -> Captured:
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
        found, told = self._exchange(due, measured, self.measured_spec, tail)
        examples = {i: m.examples for i, m in found.items()}
        total, ranks, everyone, words, squares = told.tolist()
        if everyone * squares != words * words:  # not one and the same word
            self._refuse_options()
        # A rank that captures no layer has as many examples as the others.
        total = round(total * self.comm.data_world / ranks) if ranks else 0
        return captured._replace(statistics=found, examples=examples, total=total)  # type: ignore[arg-type]

    def _options_word(self) -> float:
        """A number of 20 bits for the options of the groups: its square and sums of them are exact."""
        return float(zlib.crc32("\n".join(self._facts()["options of the groups"]).encode()) & 0xFFFFF)

    def _refuse_options(self) -> None:
        rates = [float(group["lr"]) for group in self.param_groups]
        raise RuntimeError(
            f"step {self._t}: the options of the parameter groups differ between ranks (lr here: {rates}), so their "
            "parameters would drift apart. Schedules must see the same numbers on every rank: average a validation "
            "loss over the ranks before it goes into one."
        )

    def _exchange(
        self, blocks: Sequence[Block], measured: Mapping[int, Measured], spec: Spec, tail: Sequence[float]
    ) -> tuple[dict[int, Measured], Tensor]:
        """Add up what the ranks measured of some blocks, and some more words.

        The sums travel while the ranks agree on counts, and have arrived when this returns.

        Returns:
            By block, for those that any rank has seen, the combined parts (where this rank holds the estimate), and the
            sums of the words.
        """
        device = blocks[0].owner.device
        own = [self._contribution(b, measured.get(b.index), spec(b)) for b in blocks]
        words, parcels = [w for w, _ in own], [parcel for _, parcel in own]
        work = self.comm.reduce_statistics(parcels)
        last = torch.tensor(tail, dtype=torch.float64, device=device)
        agreed = self.comm.agree(torch.cat([*(w.to(device) for w in words), last]))
        *sums, told = agreed.split([*map(len, words), len(tail)])
        found, numbers = dict[int, Measured](), dict[int, Tensor]()
        for block, total in zip(blocks, sums, strict=True):
            if dropped := int(total[2]):
                before = self._skipped_statistics.get(block.name, 0)
                self._skipped_statistics[block.name] = before + dropped
            if n := int(total[0]):
                mine = measured.get(block.index)
                number, size = total[_WORDS:], self._count_size(block)
                seen = frozenset(key for key, c in zip(spec(block), number.split(size), strict=False) if bool(c.any()))
                numbers[block.index] = number
                found[block.index] = Measured({}, n, None if mine is None else mine.rest, seen)
                if next(iter(spec(block)), "") == "factor_a":
                    ranks = float(total[1])
                    self._rows_seen[block.name] = n / ranks, float(number[0]) / ranks
        work.wait()
        for block, parcel in zip(blocks, parcels, strict=True):
            if block.index in found:
                means = self._means(block, parcel, numbers[block.index], spec(block))
                found[block.index] = found[block.index]._replace(parts=means)
        return found, told

    def _learn(self, statistics: Any, gradients: Directions, gate: Tensor | None) -> None:
        """Fold what was measured into the running estimates."""
        self._update_estimates(statistics, gate)
        self._warn_uncaptured(statistics, gradients)

    def _is_finite(self, measured: Measured) -> Tensor:
        return all_finite([part.total for part in measured.parts.values()]) if measured.parts else torch.tensor(True)

    def _count_size(self, block: Block) -> int:
        """Numbers in the count of a part: one, or one for each of the blocks of a layer."""
        return 1 if block.adapter.is_exact else block.adapter.groups

    def _contribution(
        self, block: Block, measured: Measured | None, spec: Mapping[str, Tensor]
    ) -> tuple[Tensor, Parcel]:
        """Words ``[examples, contributed, dropped, counts of each part …]`` and sums of this rank or zeros."""
        size, device = self._count_size(block), block.owner.device
        finite = None if measured is None else self._is_finite(measured).to(device)
        counts, tensors = [], []
        # Nothing of a unit travels whose owner alone captures it.
        sends = self.comm.captures(block.index) or self.comm.sources(block.index) > 1
        for key, like in spec.items():
            part = None if measured is None else measured.parts.get(key)
            if part is None or finite is None:
                counts.append(torch.zeros(size, dtype=torch.float64, device=device))
                tensors += [torch.zeros(like.shape, dtype=like.dtype, device=device)] if sends else []
            else:
                counts.append(counts_of(part, size).to(device))
                tensors.append(weighted(part, counts[-1], finite).to(like.dtype))
        head = [0.0, 0.0, 0.0] if measured is None else [float(measured.examples), 1.0, 0.0]
        words = torch.cat([torch.tensor(head, dtype=torch.float64, device=device), *counts])
        if finite is not None:
            lost = torch.zeros_like(words)
            lost[2] = 1.0
            words = torch.where(finite, words, lost)
        return words, Parcel(block.index, tensors, tuple(self.is_symmetric(block, k) for k in spec) if tensors else ())

    def _means(self, block: Block, parcel: Parcel, counts: Tensor, spec: Mapping[str, Tensor]) -> dict[str, Part]:
        """The combined parts, where this rank holds what they are folded into."""
        if not self.comm.estimates(block.index):
            return {}
        own = counts.split(self._count_size(block)) if spec else ()
        found = zip(spec, parcel.tensors, own, strict=True)
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
            empty = {b for b in mine if self._is_empty(b)}
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

    def _is_empty(self, block: Block) -> bool:
        """Whether nothing was folded into the estimate of a new block."""
        state = self.state[block.owner]
        weight = state.get("factor_weight")
        return state["refreshes"] == 0 and isinstance(weight, Tensor) and not float(weight)

    def _share(self, refreshed: list[int]) -> None:
        """Bring what was refreshed to the ranks that precondition with it."""
        if not self.comm.combines or not refreshed:
            return
        mine = [self._blocks[i] for i in refreshed if self.comm.preconditions(i)]
        self.comm.share_curvature([self._shared(b, self.shared_keys(b)) for b in mine])
        known = [(self._blocks[i], self._keys_of(self._blocks[i], "everywhere")) for i in refreshed]
        self.comm.spread([self._shared(b, keys) for b, keys in known if keys])

    def _shared(self, block: Block, keys: Sequence[str]) -> Parcel:
        state = self.state[block.owner]
        return Parcel(block.index, [state[k] for k in keys], tuple(self.is_symmetric(block, k) for k in keys))

    def _renew(self, blocks: list[Block]) -> Tensor:
        """Refresh and share some blocks outside of their schedule."""
        if not self.comm.combines:
            with full_precision(blocks[0].owner.device):
                return self.refresh(blocks, True)
        kept, ok = self._refresh_together(blocks)
        self._share([b.index for b in kept])
        good = dict(zip(kept, ok.tolist(), strict=True))
        return torch.tensor([good.get(b, False) for b in blocks])

    # ------------------------------------------------------------------ what this rank holds
    def place_of(self, block: Block, key: str) -> str:
        """Who holds a tensor of the state of a block.

        Returns:
            ``"estimate"`` for what the running estimate is made of, ``"curvature"`` for what preconditioning needs,
            ``"everywhere"`` for what all ranks have from the owner, ``"own"`` for what each has by itself.
        """
        kind = self.kinds.get(key)
        if kind in ("second_order", "scale", "kernel", "rows"):
            return "curvature"
        return "estimate" if kind in ("factors", "buffers") else "own"

    def _placed(self) -> list[tuple[int, nn.Parameter]]:
        """Blocks, and the parameter whose state theirs is."""
        return [(b.index, b.owner) for b in self._blocks]

    def _held(self, p: nn.Parameter, spec: State) -> State:
        """The part of a parameter's curvature that this rank holds."""
        block = self._block_of.get(p)
        if block is None or not self.comm.combines:
            return spec
        i, away = block.index, set()
        if not self.comm.estimates(i):
            away.add("estimate")
        if not self.comm.preconditions(i):
            away.add("curvature")
        return {k: v for k, v in spec.items() if not isinstance(v, Tensor) or self.place_of(block, k) not in away}
