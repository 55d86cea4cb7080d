"""Parameters that are cut over ranks (FSDP2): what a step needs of them beyond this rank's pieces.

Everything that works entry by entry works on pieces. Two things do not: sums over a parameter, which are added up over
the ranks, and the curvature of a layer, which takes the whole gradient of that layer where it is preconditioned::

    pieces of ∇ ──reshard──► ∇ on the ranks that precondition the block ─► V ──reshard──► pieces of V
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import torch
from torch import Tensor, nn

from secondorder import update
from secondorder.comm import CommStrategy, default_strategy
from secondorder.comm.layout import NOTHING, Layout, Route, is_cut, layout_of, local, route
from secondorder.lifecycle import Directions, Lifecycle


class Pieces(Lifecycle):
    """Gradients, sums and directions of parameters that may be cut over ranks."""

    def _rebuild(self) -> bool:
        params = [p for group in self.param_groups for p in group["params"]]
        self._layouts: dict[nn.Parameter, Layout] = {}
        self._ways: dict[Hashable, Route] = {}
        if any(is_cut(p) for p in params):
            known = {**self._names, **self._inside()}
            names = {p: known.get(p, f"of shape {tuple(p.shape)}") for p in params}
            self._layouts = {p: layout_of(p, names[p], self.comm.world) for p in params}
            if found := [names[p] for p in params if p.is_complex()]:
                raise NotImplementedError(
                    f"parameter '{found[0]}' is complex and others are cut over the ranks (fully_shard): train complex "
                    "parameters in an optimizer of their own, or use DistributedDataParallel"
                )
            self._require_fitting_strategy()
        return super()._rebuild()

    def _begin_life(self, comm: CommStrategy | None) -> None:
        super()._begin_life(comm)
        self._layouts, self._ways = {}, {}
        self._is_default_strategy = comm is None

    def _fit_strategy(self, module: nn.Module | None) -> None:
        """Cut curvature, too, where parameters are cut and nobody chose a strategy.

        Raises:
            NotImplementedError: If parameters are those of the older wrapper, which glues layers together.
        """
        params = [p for group in self.param_groups for p in group["params"]]
        modules = [] if module is None else list(module.modules())
        if any(type(x).__name__ in ("FullyShardedDataParallel", "FlatParameter") for x in [*modules, *params]):
            raise NotImplementedError(
                f"{type(self).__name__}: FullyShardedDataParallel glues the parameters of several layers together; use "
                "torch.distributed.fsdp.fully_shard, which keeps them apart"
            )
        if self._is_default_strategy and any(is_cut(p) for p in params):
            self.comm = default_strategy(cut=True)

    def _require_fitting_strategy(self) -> None:
        """Refuse strategies that cannot serve parameters that are cut.

        Raises:
            NotImplementedError: If this is one.
        """
        if not self._layouts or not self.comm.combines:
            return
        if self.comm.averages:
            raise NotImplementedError(
                "average_gradients=True is for plain parameters: fully_shard averages gradients itself, leave it out"
            )
        if not self.comm.takes_pieces:
            raise NotImplementedError(
                f"{type(self.comm).__name__} cannot serve parameters that are cut over the ranks (fully_shard): use "
                "MemOpt(), HybridOpt(mesh=mesh) or CommOpt()"
            )

    @property
    def _is_cut(self) -> bool:
        """Whether parameters are cut over ranks."""
        return bool(self._layouts)

    # ------------------------------------------------------------------ sums over a parameter
    def _sum_pieces(self, values: Tensor, params: Sequence[nn.Parameter]) -> Tensor:
        """Sums over whole parameters from those over this rank's pieces.

        Args:
            values: ``[len(params)]``, one number for each parameter.
            params: The parameters.

        Returns:
            The sums, the same bits on every rank.
        """
        if not self._layouts or not self.comm.combines:
            return values
        rank = self.comm.rank
        mine = [self._layouts[p].counts[rank] for p in params]
        own = torch.where(torch.tensor(mine, device=values.device), values, torch.zeros_like(values))
        return self.comm.sum_pieces(own)

    def _norms(self, params: Sequence[nn.Parameter], tensors: Iterable[Tensor]) -> Tensor:
        """Norm of one tensor for each parameter ``[len(params)]``, of the whole ones if they are cut."""
        found = update.norms(tensors)
        if not self._layouts:
            return found
        return self._sum_pieces(found.to(torch.float64).square(), params).sqrt()

    def _everywhere(self, finite: Tensor) -> Tensor:
        """Whether something holds on all ranks, where what it is about is cut."""
        if not self._layouts or not self.comm.combines:
            return finite
        return self.comm.sum_pieces((~finite).to(torch.float64).reshape(1))[0] == 0

    # ------------------------------------------------------------------ whole tensors where they are needed
    def _wholes(self, params: Sequence[nn.Parameter], pieces: Directions, ranks: Sequence[Sequence[int]]) -> Directions:
        """Whole tensors on the ranks that want them.

        Args:
            params: Of which, the same on every rank.
            pieces: This rank's pieces; zeros for what is not there.
            ranks: For each parameter those that want it.

        Returns:
            The whole tensors that this rank wants.
        """
        layouts, rank = [self._layouts[p] for p in params], self.comm.rank
        ways = [self._way(p, there, False) for p, there in zip(params, ranks, strict=True)]
        flat = [one.flat(pieces[p].to(self._precision(p))) for p, one in zip(params, layouts, strict=True)]
        found: Directions = {}
        for chosen in self._alike(params):
            arrived = self.comm.reshard([flat[i] for i in chosen], [ways[i] for i in chosen], "gradients", exact=True)
            for i, x in zip(chosen, arrived, strict=True):
                if rank in ranks[i]:
                    found[params[i]] = layouts[i].whole(x)
        return found

    def _cut(self, params: Sequence[nn.Parameter], wholes: Directions, ranks: Sequence[Sequence[int]]) -> Directions:
        """Pieces of whole tensors, from the ranks that have them.

        Args:
            params: Of which, the same on every rank.
            wholes: The whole tensors that this rank has.
            ranks: For each parameter those that have it.

        Returns:
            This rank's piece of each.
        """
        layouts, rank = [self._layouts[p] for p in params], self.comm.rank
        ways = [self._way(p, there, True) for p, there in zip(params, ranks, strict=True)]
        flat = [
            one.flat(wholes[p]) if p in wholes else torch.empty(0, dtype=self._precision(p), device=p.device)
            for p, one in zip(params, layouts, strict=True)
        ]
        found: Directions = {}
        for chosen in self._alike(params):
            arrived = self.comm.reshard([flat[i] for i in chosen], [ways[i] for i in chosen], "directions")
            found |= {params[i]: layouts[i].piece(x, rank) for i, x in zip(chosen, arrived, strict=True)}
        return found

    def _way(self, p: nn.Parameter, ranks: Sequence[int], back: bool) -> Route:
        """From the pieces of a parameter to ranks that want it whole, or back."""
        key = p, ranks if isinstance(ranks, range) else tuple(ranks), back
        if key not in self._ways:
            one, there = self._layouts[p], set(ranks)
            spans = tuple((0, one.numel) if r in there else NOTHING for r in range(self.comm.world))
            ends = (spans, one.spans) if back else (one.spans, spans)
            self._ways[key] = route(*ends, one.mates, self.comm.rank)
        return self._ways[key]

    def _alike(self, params: Sequence[nn.Parameter]) -> list[list[int]]:
        """Positions of parameters that travel together: of one precision on one device."""
        found: dict[tuple[object, ...], list[int]] = {}
        for i, p in enumerate(params):
            found.setdefault((self._precision(p), p.device), []).append(i)
        return list(found.values())

    def _room_of(self, p: nn.Parameter) -> Tensor:
        """Zeros shaped as this rank's piece."""
        return torch.zeros_like(local(p), dtype=self._precision(p))
