"""Methods that measure curvature in a basis, example by example: where that is done if data and bases are apart.

A rank that captures a layer without preconditioning it has examples and no bases. One of the two must travel, see
:mod:`secondorder.curvature.shipping`; which one is cheaper is known when the first batch has told how many rows there
are. The ranks then agree on it, layer by layer, and keep to it: until a checkpoint is loaded or the layers change.

::

    undecided    calls are kept, until the ranks have agreed
    "bases"      on all ranks from then on; sums are measured during backward and reduced
    "rows"       on the ranks that precondition; calls are kept, and gathered as rows on those that hold the estimate
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from secondorder.comm import Parcel, Unit
from secondorder.curvature import factors
from secondorder.curvature.block import Block
from secondorder.curvature.eigensums import EigenSums, ScaleRows, ScaleSums
from secondorder.curvature.kernel import Rows
from secondorder.curvature.measured import Measured, Part, counts_of, mean_of, weighted
from secondorder.curvature.shipping import (
    BASES,
    ROWS,
    SIZE_WORDS,
    Shipment,
    choose_scale_route,
    common_size,
    has_rows,
    joined,
    no_rows,
    resized,
    row_size,
    size_words,
    squares,
    tensors_of,
)
from secondorder.curvature.sites import Captured
from secondorder.curvature.statistics import all_finite
from secondorder.lifecycle import Group
from secondorder.linalg import full_precision
from secondorder.rebasing import RebasingOptimizer

#: Layers that a remark names.
_SHOWN = 4


class RoutingOptimizer(RebasingOptimizer):
    """Base of the methods that measure a scale in the eigenbases, example by example."""

    def _begin_routes(self) -> None:
        #: What travels for the scale of a block, by name: common to all ranks, and in no checkpoint.
        self._routes: dict[str, str] = {}
        #: Examples and rows of this rank's last batch, and what rows of all ranks were last filled up to, by name: what
        #: a plan supposes of the steps to come.
        self._seen_rows: dict[str, tuple[int, float]] = {}
        self._room: dict[str, tuple[int, int]] = {}
        #: In a plan, what rows are filled up to.
        self._supposed: dict[str, tuple[int, int]] | None = None
        #: Blocks whose rows travel in the exchange that goes on, on any rank.
        self._shipping: set[int] = set()

    # ------------------------------------------------------------------ what a method supplies
    @abstractmethod
    def _measures_scale(self, block: Block) -> bool:
        """Whether this step measures the scale of a block example by example, in the basis of now."""

    @abstractmethod
    def _measures_late(self, block: Block) -> bool:
        """Whether it is measured in the basis that this step will find."""

    @abstractmethod
    def _measured_scale(self, block: Block, sums: ScaleSums, examples: int) -> Part:
        """The scale of a batch, per datum."""

    # ------------------------------------------------------------------ routes
    def route_of(self, block: Block) -> str | None:
        """What travels to measure the scale of a block, None if that is not decided.

        Returns:
            ``"rows"``, or ``"bases"``, also where the bases are on all ranks that capture anyway.
        """
        return self._routes.get(block.name) if self._is_apart(block) else BASES

    def _is_apart(self, block: Block) -> bool:
        """Whether some ranks have examples of a block and no bases, unless they are sent there."""
        return block.group["estimator"] == "intra" and self.comm.captures_elsewhere(block.index)

    def place_of(self, block: Block, key: str) -> str:
        """Who holds a tensor of the state of a block."""
        if key.startswith("basis_") and self._routes.get(block.name) == BASES:
            return "everywhere"
        return super().place_of(block, key)

    def _keeps_calls(self, block: Block) -> bool:
        """Whether what is captured now is measured later."""
        return self._measures_late(block) or (self._measures_scale(block) and self.route_of(block) != BASES)

    def choose_route(self, block: Block, examples: float, positions: float, world: int) -> str:
        """What is to travel for the scale of a block.

        Args:
            block: The block.
            examples: Examples of a rank.
            positions: Rows of an example.
            world: Number of ranks.

        Returns:
            ``"bases"`` or ``"rows"``.
        """
        adapter, group = block.adapter, block.group
        if not has_rows(adapter):
            return BASES
        bases = sum(side.n**2 for side in factors.sides(adapter, group["max_factor_dim"]) if not side.diagonal)
        steps = group["inv_update_steps"], group["scale_update_steps"]
        sizes = adapter.n_a, adapter.n_g
        return choose_scale_route(*sizes, examples, positions, world, *steps, bases=bases, row=row_size(adapter))

    def _choose_routes(self, statistics: Captured) -> None:
        """Decide with the other ranks what was open, and send bases that are there already."""
        blocks = [b for b in (self._blocks[i] for i in sorted(self._due)) if self.route_of(b) is None]
        if not blocks:
            return
        seen = {i: cast(EigenSums, s).rows for i, s in statistics.statistics.items() if statistics.examples[i]}
        own = [seen.get(block.index, 0.0) for block in blocks]
        words = torch.tensor(own, dtype=torch.float64, device=blocks[0].owner.device)
        agreed = dict(zip(blocks, self.comm.agree(words).tolist(), strict=True))
        # Rows of all ranks together: as one rank with so many examples.
        self._routes |= {b.name: self.choose_route(b, n, 1, 1) for b, n in agreed.items() if n}
        given = [b for b in blocks if self._routes.get(b.name) == BASES]
        for block in given:
            self._make_room(block)
        known = [b for b in given if self.state[b.owner]["refreshes"] > 0]
        parcels = [self._shared(b, sorted(self._keys_of(b, "everywhere"))) for b in known]
        if parcels:
            self.comm.spread(parcels)

    def _make_room(self, block: Block) -> None:
        """Allocate what is now on all ranks."""
        state = self.state[block.owner]
        for key, like in self.curvature_spec(block, block.group).items():
            if isinstance(like, Tensor) and key not in state and self.place_of(block, key) == "everywhere":
                state[key] = torch.zeros_like(like, device=block.owner.device)

    def _place(self, units: Sequence[Unit]) -> None:
        self._routes.clear()
        super()._place(units)

    # ------------------------------------------------------------------ checkpoints
    def _checked_state(self, found: Mapping[Any, Any], groups: list[Group]) -> dict[nn.Parameter, dict[str, Any]]:
        """As in the base class, as if no route were decided: what is on all ranks need not be in every checkpoint."""
        routes, self._routes = self._routes, {}
        try:
            return super()._checked_state(found, groups)
        finally:
            self._routes = routes

    def _finish_load(self) -> None:
        self._routes.clear()
        super()._finish_load()

    # ------------------------------------------------------------------ what is sent
    def _new_scales(self, block: Block) -> ScaleSums:
        group = block.group
        bases = self.basis(block, "a"), self.basis(block, "g")
        like = torch.empty_like(cast(Tensor, self.curvature_spec(block, group)["scale"]), device=block.owner.device)
        tokens, kept, generator = self._sampling(block)
        return ScaleSums(block.adapter, like, *bases, tokens, kept, generator)

    def _new_rows(self, block: Block) -> ScaleRows:
        return ScaleRows(block.adapter, self._precision(block.owner), block.owner.device, *self._sampling(block))

    def _sampling(self, block: Block) -> tuple[bool, int | None, torch.Generator | None]:
        """Whether positions are data, and how many examples are drawn, by which generator."""
        group, generator = block.group, None
        if group["scale_batch_size"] is not None:
            generator = torch.Generator().manual_seed(self.seed(len(self._blocks) + block.index))
        return group["token_is_example"], group["scale_batch_size"], generator

    def _reduce(self, statistics: Captured) -> Captured:
        for i, found in statistics.statistics.items():
            if examples := statistics.examples[i]:
                self._seen_rows[self._blocks[i].name] = examples, cast(EigenSums, found).rows
        if self.comm.combines:
            self._choose_routes(statistics)
            self._shipping = {i for i in self._due if self._sends_more(self._blocks[i])}
            statistics = self._measure_kept(statistics)
        return super()._reduce(statistics)

    def _measure_kept(self, statistics: Captured) -> Captured:
        """Measure calls that were kept for want of a basis, or of a decision; a layer that refuses is left out."""
        kept = dict(statistics.statistics)
        for i, found in statistics.statistics.items():
            block, sums = self._blocks[i], cast(EigenSums, found)
            if not (sums.calls and statistics.examples[i] and self._measures_scale(block)):
                continue
            try:
                if i in self._shipping:
                    sums.shipment = self._shipment(block, sums, statistics.examples[i])
                elif self.route_of(block) == BASES:
                    sums.scales = self._new_scales(block)
                    for calls, examples in sums.calls:
                        sums.scales.add(calls, examples)
            except ValueError as error:
                self._refuse_calls(block, error)
                del kept[i]
            sums.calls.clear()
        return statistics._replace(statistics=kept)

    def _refuse_calls(self, block: Block, error: ValueError) -> None:
        """Say why nothing of a layer was captured."""
        self._require_capture().refused[block.index] = str(error)

    def _shipment(self, block: Block, sums: EigenSums, examples: int) -> Shipment:
        """The rows of the calls that were kept, scaled as this rank's part of a sum over all data."""
        found = self._new_rows(block)
        with full_precision(block.owner.device):
            for calls, count in sums.calls:
                found.add(calls, count)
        part, rows = self._measured_scale(block, found, examples), found.finish()
        counts = counts_of(part, self._count_size(block))
        weights = weighted(part, counts, torch.ones_like(part.total, dtype=torch.bool)).sqrt()
        rows = rows._replace(g=rows.g * weights[..., None])
        return Shipment(rows, counts, all_finite([x for x in tensors_of(rows) if x.is_floating_point()]))

    def _is_finite(self, measured: Measured) -> Tensor:
        finite, shipment = super()._is_finite(measured), _shipment_of(measured)
        return finite if shipment is None else finite.to(shipment.finite.device) & shipment.finite

    def _sends_more(self, block: Block) -> bool:
        """Whether rows of a block travel in this step."""
        return self._measures_scale(block) and self.route_of(block) == ROWS

    def _more_words(self, block: Block, measured: Measured | None) -> Tensor:
        """Counts of data and sizes of rows, where rows travel."""
        if block.index not in self._shipping:
            return super()._more_words(block, measured)
        shipment = _shipment_of(measured)
        if shipment is None:
            return torch.zeros(self._count_size(block) + SIZE_WORDS, dtype=torch.float64)
        sizes = torch.tensor(size_words(shipment.rows), dtype=torch.float64, device=shipment.counts.device)
        return torch.cat([shipment.counts, sizes])

    def _combine(self, captured: Captured, measured: dict[int, Measured]) -> Captured:
        combined = super()._combine(captured, measured)
        self._gather_rows(measured, cast("dict[int, Measured]", combined.statistics))
        return combined

    def _gather_rows(self, measured: Mapping[int, Measured], found: Mapping[int, Measured]) -> None:
        """Bring rows to the ranks that hold the estimate, which measure the scale with their bases."""
        sizes = self._row_sizes([self._blocks[i] for i in sorted(self._shipping)], measured, found)
        if not sizes:
            return
        packed = [self._packed(block, measured.get(block.index), *size) for block, size in sizes.items()]
        parcels = [Parcel(b.index, tensors_of(rows)) for b, rows in zip(sizes, packed, strict=True)]
        for block, like, stack in zip(sizes, packed, self.comm.gather_statistics(parcels), strict=True):
            combined = found.get(block.index)
            if combined is None or not stack.tensors or "scale" not in self.state[block.owner]:
                continue
            tokens = block.group["token_is_example"] and block.adapter.positions_are_tokens
            with full_precision(block.owner.device):
                bases = self.basis(block, "a"), self.basis(block, "g")
                total = squares(block.adapter, joined(like, stack.tensors), *bases, tokens)
            assert combined.told is not None
            counts = combined.told[: self._count_size(block)]
            cast("dict[str, Part]", combined.parts)["scale"] = mean_of(total, counts)

    def _row_sizes(
        self, blocks: Sequence[Block], measured: Mapping[int, Measured], found: Mapping[int, Measured]
    ) -> dict[Block, tuple[int, int]]:
        """Examples and positions that the rows of every rank are filled up to, of blocks that any rank has rows of."""
        if self._supposed is not None:
            return {b: self._supposed[b.name] for b in blocks}
        told = {b: found[b.index].told for b in blocks if b.index in found}
        words = {b: t[-SIZE_WORDS:].tolist() for b, t in told.items() if t is not None and t[-SIZE_WORDS]}
        sizes = {b: common_size(w) for b, w in words.items()}
        uneven = [b for b, size in sizes.items() if size is None]
        if uneven:  # a short last batch, or sequences of many lengths: ask for the largest
            own = torch.zeros(self.comm.world, len(uneven), 2, dtype=torch.float64)
            for k, block in enumerate(uneven):
                shipment = _shipment_of(measured.get(block.index))
                if shipment is not None:
                    own[self.comm.rank, k] = torch.tensor(size_words(shipment.rows)[1:3])
            agreed = self.comm.agree(own.flatten().to(uneven[0].owner.device)).view(own.shape).amax(0).long()
            sizes |= {b: (n, s) for b, (n, s) in zip(uneven, agreed.tolist(), strict=True)}
        found_sizes = cast("dict[Block, tuple[int, int]]", sizes)
        self._room |= {b.name: size for b, size in found_sizes.items()}
        return found_sizes

    def _packed(self, block: Block, measured: Measured | None, n: int, positions: int) -> Rows:
        """This rank's rows, filled up; zeros where it has none or has lost a number."""
        shipment, owner = _shipment_of(measured), block.owner
        if measured is None or shipment is None:
            device = owner.device if self._supposed is None else torch.device("meta")
            return no_rows(block.adapter, n, positions, self._precision(owner), device)
        rows, finite = resized(shipment.rows, n, positions), self._is_finite(measured)
        a = rows.a if rows.a is None else torch.where(finite, rows.a, torch.zeros_like(rows.a))
        return rows._replace(a=a, g=torch.where(finite, rows.g, torch.zeros_like(rows.g)))

    # ------------------------------------------------------------------ what it tells
    def imagine(self, batch_size: int | None, is_real: bool) -> None:
        """Suppose that steps have so many examples per rank, and as many positions as those that were seen."""
        if batch_size is not None or not is_real:
            self._routes.clear()
            self._room.clear()
        self._supposed = {}
        for block in self._blocks:
            seen, rows = self._seen_rows.get(block.name, (1, 1.0))
            drawn = block.group["scale_batch_size"] or math.inf
            examples, positions = min(batch_size or seen, drawn), rows / min(seen, drawn)
            if self.route_of(block) is None:
                known, world = batch_size is not None or block.name in self._seen_rows, self.comm.data_world
                self._routes[block.name] = self.choose_route(block, examples, positions, world) if known else BASES
            self._supposed[block.name] = self._room.get(block.name, (int(examples), math.ceil(positions)))

    def remarks(self) -> Iterator[str]:
        """What travels to measure scales, for those who read a plan."""
        apart = [b for b in self._blocks if self._is_apart(b)]
        for route, words in ((ROWS, "rows of examples go to the owners of"), (BASES, "bases go to all ranks from")):
            names = [b.name for b in apart if self._routes.get(b.name) == route]
            if names:
                shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
                yield f"to measure scales, {words} {shown}"

    def _coverage(self, p: nn.Parameter) -> tuple[str, str, str]:
        treatment, sizes, owner = super()._coverage(p)
        block = self._block_of.get(p)
        if block is None or not self._is_apart(block):
            return treatment, sizes, owner
        words = {BASES: "sends its bases to all", ROWS: "gathers rows", None: "bases or rows: not decided"}
        return treatment, sizes, f"{owner}, {words[self.route_of(block)]}"


def _shipment_of(measured: Measured | None) -> Shipment | None:
    rest = None if measured is None else measured.rest
    return rest.shipment if isinstance(rest, EigenSums) else None
