"""Windows over parameters that are sharded over ranks (FSDP2), and the conversion between the two divisions.

::

    weight, flat              0 ────── rank 0 ────── rank 1 ── 20       as FSDP2 shards it
    its part of the window    0 ─ rank 0 ─ rank 1 ──────────── 20       at block boundaries, of nearly equal cost

Gradients are sent to the ranks with the rows, and directions to the ranks with the parameters. Entries that a rank has
in both divisions are not sent. If there are as many shards as parts, dense rows are divided like the parameters, and
nothing is sent. Blocks of sparse rows are never divided, so the two divisions differ by less than a block there, if the
parts are then even enough. The content of a window does not depend on its division: rows, sums and gathered checkpoints
are those of replicas. A parameter that is sharded along another dimension than the first is sent completely.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from secondorder.comm.layout import NOTHING, Layout, Route, Spans, route
from secondorder.comm.strategy import CommStrategy
from secondorder.curvature.window.shards import Bounds, Cutting
from secondorder.parallel.shards import zeros_like_shard

if TYPE_CHECKING:
    from secondorder.curvature.window.unit import WindowUnit

#: Bytes of complete tensors that are sent together, for each rank.
_PORTION = 32 * 2**20
#: Smallest number of blocks of sparse rows in every part of a parameter if it is divided like the parameter.
_BLOCKS = 8

Tensors = Sequence[Tensor | None]


class WindowCuts:
    """Converts gradients from the division of the parameters to that of the windows, and directions back.

    Args:
        comm: Communication strategy.
        units: The windows.
        layouts: The sharding of the parameters.
    """

    def __init__(self, comm: CommStrategy, units: Sequence[WindowUnit], layouts: Mapping[nn.Parameter, Layout]) -> None:
        self.comm, self.units, self.layouts = comm, units, layouts
        self._ways: dict[tuple[WindowUnit, int, bool], Route] = {}

    def own(self, wanted: Sequence[Tensors | None]) -> Iterator[list[Tensor | None] | None]:
        """Yield the entries for this rank's rows.

        Args:
            wanted: For each window, a tensor or None per parameter, which are shards if it is sharded; or None.

        Yields:
            For each window, the same for this rank's part; None if it has no part, or if None was passed.
        """
        arrived = iter(self._gathered_pieces(wanted))
        for unit, given in zip(self.units, wanted, strict=True):
            own = [next(arrived) for _ in unit.params]
            there = given is not None and unit.is_local
            yield [x if g is not None else None for x, g in zip(own, given or (), strict=True)] if there else None

    def _gathered_pieces(self, wanted: Sequence[Tensors | None]) -> list[Tensor]:
        """Return the entries of all parameters of all windows for this rank's rows, with zeros for missing ones."""
        sent, ways, members = [], [], []
        for index, (unit, given) in enumerate(zip(self.units, wanted, strict=True)):
            for i, p in enumerate(unit.params):
                x = None if given is None else given[i]
                sent.append(self.layouts[p].flat((zeros_like_shard(p) if x is None else x).to(p.dtype)))
                ways.append(self._way_of_rows(index, i, False))
                members.append((unit, i))
        arrived = self._moved(sent, ways, "gradients", exact=True)
        return [self._as_rows(unit, i, x) for (unit, i), x in zip(members, arrived, strict=True)]

    def _as_rows(self, unit: WindowUnit, i: int, x: Tensor) -> Tensor:
        """Return the received entries in the form that the window expects."""
        layout = self.layouts[unit.params[i]]
        if not x.numel():
            return x
        if not layout.dim:
            return x.view(unit.window.places[i].shape)
        found = layout.whole(x)
        return found if unit.part is None else unit.part.slice(i, found)

    def directions(self, found: Sequence[Sequence[Tensor] | None]) -> list[list[Tensor] | None]:
        """Return the directions of this rank's shards of the parameters.

        Args:
            found: For each window, this rank's part of the direction, a tensor per parameter; None if it has no part.

        Returns:
            For each window, a tensor per parameter.
        """
        sent, ways = [], []
        for index, (unit, own) in enumerate(zip(self.units, found, strict=True)):
            for i, p in enumerate(unit.params):
                way = self._way_of_rows(index, i, True)
                size = way.have[1] - way.have[0]
                x = torch.zeros(size, device=p.device) if own is None else own[i].reshape(-1)
                sent.append(x.to(unit.window.dtype_of(i)))
                ways.append(way)
        arrived = iter(self._moved(sent, ways, "directions"))
        return [[self._piece_of(p, next(arrived)) for p in unit.params] for unit in self.units]

    def _piece_of(self, p: nn.Parameter, x: Tensor) -> Tensor:
        """Return this rank's shard from the received entries."""
        layout, rank = self.layouts[p], self.comm.rank
        if layout.dim:
            start, stop = layout.spans[rank]
            x = layout.flat(x.view(layout.shape))[start:stop]
        return layout.piece(x, rank)

    # ------------------------------------------------------------------ who has what
    def _way_of_rows(self, index: int, i: int, back: bool) -> Route:
        """Return the route from the shards of parameter i of a window to the rows of each rank, or back."""
        unit = self.units[index]
        key = unit, i, back
        if key not in self._ways:
            layout, rows = self.layouts[unit.params[i]], self._rows_by_rank(index, i)
            if back:
                ends = rows, layout.everywhere if layout.dim else layout.spans
            else:  # sharded along another dimension: send it completely to every rank that needs a part
                ends = layout.spans, tuple((0, layout.numel) if layout.dim and r != NOTHING else r for r in rows)
            self._ways[key] = route(*ends, layout.mates, self.comm.rank)
        return self._ways[key]

    def _rows_by_rank(self, index: int, i: int) -> Spans:
        """Return the entries of parameter i of a window for which each rank has rows."""
        unit, ranks = self.units[index], range(self.comm.world)
        if unit.part is None:
            there = set(self.comm.preconditioners(index))
            return tuple((0, unit.params[i].numel()) if r in there else NOTHING for r in ranks)
        spans = [unit.part.span(i, k) for k in self.comm.shards(index)]
        return tuple(span if span[0] < span[1] else NOTHING for span in spans)

    def _moved(self, tensors: Sequence[Tensor], ways: Sequence[Route], stage: str, exact: bool = False) -> list[Tensor]:
        """Convert flat tensors from one division to another, in messages of bounded size."""
        found: list[Tensor] = list(tensors)
        for chosen in _portions(tensors, [way.numel for way in ways], _PORTION * self.comm.world):
            arrived = self.comm.reshard([tensors[i] for i in chosen], [ways[i] for i in chosen], stage, exact)
            for i, x in zip(chosen, arrived, strict=True):
                found[i] = x
        return found


def wished_bounds(p: nn.Parameter, layout: Layout | None, parts: Sequence[int], cutting: Cutting) -> Bounds | None:
    """Return the best bounds for dividing a parameter of a window into parts; None for no preference."""
    if layout is None or layout.dim or not cutting.grain or p.is_complex():
        return None
    spans = dict(zip(parts, layout.spans, strict=True))
    if any(spans[k] != span for k, span in zip(parts, layout.spans, strict=True)):
        return None
    bounds = [0]
    for k in range(len(spans)):
        start, stop = spans[k] if spans[k] != NOTHING else (bounds[-1], bounds[-1])
        if start != bounds[-1]:
            return None
        bounds.append(stop)
    if cutting.blocked and p.numel() < _BLOCKS * len(spans) * cutting.grain:
        return None  # evenness matters more
    grain = cutting.grain if cutting.blocked else 1
    inside = [min(p.numel(), round(b / grain) * grain) for b in bounds[1:-1]]
    return (0, *inside, p.numel()) if bounds[-1] == p.numel() else None


def _portions(tensors: Sequence[Tensor], sizes: Sequence[int], nbytes: int) -> Iterator[list[int]]:
    """Yield the positions of tensors of one dtype and device that are sent together."""
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i, x in enumerate(tensors):
        kinds.setdefault((x.dtype, x.device), []).append(i)
    for (dtype, _), members in kinds.items():
        chosen: list[int] = []
        room = nbytes
        for i in members:
            chosen.append(i)
            room -= sizes[i] * dtype.itemsize
            if room <= 0:
                yield chosen
                chosen, room = [], nbytes
        if chosen:
            yield chosen
