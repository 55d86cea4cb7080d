"""Messages of a step for windows of which a rank stores only a part or nothing.

::

    divided windows    dots of the parts ──sum──► the same Gram row and solve on all ─► slices of u ──gather──► u
    whole windows      u on the ranks that hold it ──copy──► u on the others of their row

Every message contains every window, with zeros if a rank has no gradient, so its size depends only on the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from secondorder.comm.layout import Layout
from secondorder.comm.strategy import CommStrategy, Parcel
from secondorder.curvature.window.shards import Slice
from secondorder.curvature.window.unit import WindowUnit, real
from secondorder.curvature.window.window import Push, padded
from secondorder.parallel.window_layout import Tensors, WindowCuts

Found = list[list[Tensor] | None]


class WindowExchange:
    """Exchanges values of windows between the ranks that store parts of them.

    Args:
        comm: Communication strategy.
        device: Device of the buffers for directions of other ranks. If None, it is that of the parameters.
    """

    def __init__(self, comm: CommStrategy, device: torch.device | None = None) -> None:
        self.comm = comm
        self.units: Sequence[WindowUnit] = ()
        self.groups: Mapping[nn.Parameter, dict[str, Any]] = {}
        self._device = device
        self._cuts: WindowCuts | None = None

    def follow(
        self,
        units: Sequence[WindowUnit],
        groups: Mapping[nn.Parameter, dict[str, Any]],
        layouts: Mapping[nn.Parameter, Layout],
    ) -> None:
        """Set the windows to exchange.

        Args:
            units: The windows.
            groups: Group of each of their parameters.
            layouts: How parameters are sharded over ranks; empty if they are not sharded.
        """
        self.units, self.groups = units, groups
        self._cuts = WindowCuts(self.comm, units, layouts) if layouts else None

    # ------------------------------------------------------------------ stage 2: gradients
    def own(self, wanted: Sequence[Tensors | None]) -> Iterator[list[Tensor | None] | None]:
        """Select the part of some tensors that belongs to the rows of this rank.

        Args:
            wanted: For each window, None or a list with a tensor or None per parameter (pieces if it is sharded).

        Yields:
            For each window, such a list for the part on this rank; None if there is no part or no list.
        """
        if self._cuts is not None:
            yield from self._cuts.own(wanted)
            return
        yield from (unit.own(x) if x and unit.is_local else None for unit, x in zip(self.units, wanted, strict=True))

    # ------------------------------------------------------------------ stage 3: dots
    def refresh_stale(self) -> None:
        """Sum the Gram matrices that were recomputed from rows of which each rank stores a part."""
        stale = [unit for unit in self.units if unit.window.stale]
        if stale:
            products = [unit.window.own_products() for unit in stale]
            total = self.comm.sum_shards(torch.cat([own.to(products[0].device) for own in products]))
            for unit, part in zip(stale, total.split([len(own) for own in products]), strict=True):
                unit.window.refresh(part.to(unit.window.device))

    def sum_dots(self, pushes: Mapping[WindowUnit, Push]) -> None:
        """Sum all products with rows over the parts of all windows, in one message."""
        units = [unit for unit in self.units if unit.part is not None]
        if not units:
            return
        device = units[0].window.device
        words = [self._words(unit, pushes.get(unit)).to(device) for unit in units]
        total = self.comm.sum_shards(torch.cat(words))
        for unit, part in zip(units, total.split([len(own) for own in words]), strict=True):
            if unit in pushes:
                self._read(unit, pushes[unit], part.to(unit.window.device))

    def _words(self, unit: WindowUnit, push: Push | None) -> Tensor:
        """Dot products of the new row with rows ``[m]`` and with momentum ``[1]``, and of decay with rows ``[m]``."""
        window, decays = unit.window, self.decays_outside(unit)
        if push is None:
            size = window.m * (2 if decays else 1) + (window.outside is not None)
            return torch.zeros(size, dtype=torch.float64, device=window.device)
        found = [padded(push.dots, window.m)]
        if push.inside is not None:
            found.append(push.inside)
        if decays:
            none = torch.zeros(0, dtype=torch.float64, device=window.device)
            found.append(padded(none if unit.decay_dots is None else unit.decay_dots, window.m))
        return torch.cat(found)

    def _read(self, unit: WindowUnit, push: Push, words: Tensor) -> None:
        m, t = unit.window.m, len(push.dots)
        push.dots = words[:t]
        if push.inside is not None:
            push.inside = words[m : m + 1]
        if unit.decay_dots is not None:
            unit.decay_dots = words[-m:][:t]

    def decay_of(self, p: nn.Parameter) -> float:
        """The weight decay of a parameter that is preconditioned but does not enter the window, or else 0."""
        group = self.groups[p]
        return float(group["weight_decay"]) if group["weight_decay_mode"] in ("reg", "both") else 0.0

    def decays_outside(self, unit: WindowUnit) -> bool:
        """Whether the weight decay of any parameter of a unit does not enter the window."""
        return any(self.decay_of(p) for p in unit.params)

    # ------------------------------------------------------------------ stage 5: directions
    def directions(self, found: Found) -> Found:
        """Return whole directions of all windows on every rank, or this rank's pieces of sharded parameters.

        Args:
            found: Directions on this rank: for each window, one tensor per parameter, which is a slice if the window is
                divided; None without gradients.

        Returns:
            The directions. Some may be None only if there is one rank.
        """
        if self._cuts is not None:
            return self._cuts.directions(found)
        parts = [(i, unit.part) for i, unit in enumerate(self.units) if unit.part is not None]
        if parts:
            found = self._gathered_directions(found, parts)
        if self.comm.combines:
            whole = [i for i, unit in enumerate(self.units) if unit.part is None]
            parcels = [Parcel(i, found[i] or self._room(self.units[i])) for i in whole]
            if parcels:
                self.comm.share_directions(parcels)
            for parcel in parcels:
                found[parcel.index] = parcel.tensors
        return found

    def _gathered_directions(self, found: Found, parts: Sequence[tuple[int, Slice]]) -> Found:
        shards, sizes = [], []
        for i, part in parts:
            own = found[i]
            window = self.units[i].window
            for j, place in enumerate(window.places):
                piece = torch.zeros(place.shape, device=place.device) if own is None else own[j]
                shards.append(piece.reshape(-1).to(window.dtype_of(j)))
                sizes.append(part.sizes(j))
        wholes = iter(self.comm.gather_shards(shards, sizes))
        gathered = list(found)
        for i, _ in parts:
            gathered[i] = [next(wholes).view(real(p).shape) for p in self.units[i].params]
        return gathered

    def _room(self, unit: WindowUnit) -> list[Tensor]:
        dtypes = [unit.window.dtype_of(i) for i in range(len(unit.params))]
        return [
            torch.zeros(real(p).shape, dtype=t, device=self._device or p.device)
            for p, t in zip(unit.params, dtypes, strict=True)
        ]
