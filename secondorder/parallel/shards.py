"""Parameters that are sharded over ranks (FSDP2), and the parts of a step that need more than this rank's shards.

Operations that work entry by entry work on shards. Two operations do not: sums over a parameter, which are summed over
the ranks, and the curvature of a layer, which needs the complete gradient where the layer is preconditioned::

    shards of ∇ ──gather──► ∇ on the ranks that precondition the block ─► V ──scatter──► shards of V
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from secondorder.comm.layout import NOTHING, Layout, Route, is_cut, layout_of, local, route
from secondorder.comm.strategy import CommStrategy
from secondorder.linalg import first_order
from secondorder.linalg.dense import precision_of

Directions = dict[nn.Parameter, Tensor]


class WholeParameters:
    """Parameters of which every rank has all entries."""

    #: Whether parameters are sharded over ranks.
    is_sharded = False
    #: How each parameter is sharded; empty if they are not.
    layouts: Mapping[nn.Parameter, Layout] = {}

    def require_fitting_strategy(self) -> None:
        """Reject a strategy that does not support sharded parameters, which may be known only after units are placed.

        Raises:
            NotImplementedError: If the strategy is one of these.
        """

    def sum(self, values: Tensor, params: Sequence[nn.Parameter]) -> Tensor:
        """Return sums over complete parameters, equal on all ranks, from those over shards ``[len(params)]``."""
        return values

    def norms(self, params: Sequence[nn.Parameter], tensors: Iterable[Tensor]) -> Tensor:
        """Return the norm of one tensor for each parameter ``[len(params)]``, over all ranks if they are sharded."""
        return first_order.norms(tensors)

    def everywhere(self, flag: Tensor) -> Tensor:
        """Return whether a flag about shards is True on all ranks (0-dim bool)."""
        return flag

    def gather(self, params: Sequence[nn.Parameter], shards: Directions, ranks: Sequence[Sequence[int]]) -> Directions:
        """Return the complete tensors that this rank needs, given its shards, with zeros for missing ones.

        ``ranks`` are those that need each parameter. Parameters are the same on every rank.
        """
        return shards

    def scatter(self, params: Sequence[nn.Parameter], wholes: Directions, ranks: Sequence[Sequence[int]]) -> Directions:
        """Return the shard of this rank of each parameter, given the complete tensors that this rank has.

        ``ranks`` are those that have each parameter. Parameters are the same on every rank.
        """
        return wholes


class ParameterShards:
    """Parameters that ``fully_shard`` has divided over the ranks.

    Args:
        names: The parameters with their names.
        comm: The strategy.

    Raises:
        NotImplementedError: If a parameter is sharded in a way that is not supported, or is complex.
    """

    #: As in :class:`WholeParameters`.
    is_sharded = True

    def __init__(self, names: Mapping[nn.Parameter, str], comm: CommStrategy) -> None:
        self.comm = comm
        self.layouts = {p: layout_of(p, name, comm.world) for p, name in names.items()}
        self._ways: dict[Hashable, Route] = {}
        if found := [name for p, name in names.items() if p.is_complex()]:
            raise NotImplementedError(
                f"parameter '{found[0]}' is complex and others are sharded over the ranks (fully_shard): train complex "
                "parameters in a separate optimizer, or use DistributedDataParallel"
            )
        self.require_fitting_strategy()

    def require_fitting_strategy(self) -> None:
        """See :class:`WholeParameters`."""
        if not self.comm.combines:
            return
        if self.comm.averages:
            raise NotImplementedError(
                "average_gradients=True is for plain parameters: fully_shard averages gradients itself, leave it out"
            )
        if not self.comm.takes_pieces:
            raise NotImplementedError(
                f"{type(self.comm).__name__} cannot serve parameters that are sharded over the ranks (fully_shard): "
                "use MemOpt(), HybridOpt(mesh=mesh) or CommOpt()"
            )

    def sum(self, values: Tensor, params: Sequence[nn.Parameter]) -> Tensor:
        """See :class:`WholeParameters`."""
        if not self.comm.combines:
            return values
        rank = self.comm.rank
        mine = [self.layouts[p].counts[rank] for p in params]
        own = torch.where(torch.tensor(mine, device=values.device), values, torch.zeros_like(values))
        return self.comm.sum_pieces(own)

    def norms(self, params: Sequence[nn.Parameter], tensors: Iterable[Tensor]) -> Tensor:
        """See :class:`WholeParameters`."""
        return self.sum(first_order.norms(tensors).to(torch.float64).square(), params).sqrt()

    def everywhere(self, flag: Tensor) -> Tensor:
        """See :class:`WholeParameters`."""
        if not self.comm.combines:
            return flag
        return self.comm.sum_pieces((~flag).to(torch.float64).reshape(1))[0] == 0

    # ------------------------------------------------------------------ whole tensors where they are needed
    def gather(self, params: Sequence[nn.Parameter], shards: Directions, ranks: Sequence[Sequence[int]]) -> Directions:
        """See :class:`WholeParameters`."""
        layouts, rank = [self.layouts[p] for p in params], self.comm.rank
        ways = [self._way(p, there, False) for p, there in zip(params, ranks, strict=True)]
        flat = [one.flat(shards[p].to(precision_of(p))) for p, one in zip(params, layouts, strict=True)]
        found: Directions = {}
        for chosen in _alike(params):
            arrived = self.comm.reshard([flat[i] for i in chosen], [ways[i] for i in chosen], "gradients", exact=True)
            for i, x in zip(chosen, arrived, strict=True):
                if rank in ranks[i]:
                    found[params[i]] = layouts[i].whole(x)
        return found

    def scatter(self, params: Sequence[nn.Parameter], wholes: Directions, ranks: Sequence[Sequence[int]]) -> Directions:
        """See :class:`WholeParameters`."""
        layouts, rank = [self.layouts[p] for p in params], self.comm.rank
        ways = [self._way(p, there, True) for p, there in zip(params, ranks, strict=True)]
        flat = [
            one.flat(wholes[p]) if p in wholes else torch.empty(0, dtype=precision_of(p), device=p.device)
            for p, one in zip(params, layouts, strict=True)
        ]
        found: Directions = {}
        for chosen in _alike(params):
            arrived = self.comm.reshard([flat[i] for i in chosen], [ways[i] for i in chosen], "directions")
            found |= {params[i]: layouts[i].piece(x, rank) for i, x in zip(chosen, arrived, strict=True)}
        return found

    def _way(self, p: nn.Parameter, ranks: Sequence[int], back: bool) -> Route:
        """Return the route from the shards of a parameter to ranks that need it whole, or back."""
        key = p, ranks if isinstance(ranks, range) else tuple(ranks), back
        if key not in self._ways:
            one, there = self.layouts[p], set(ranks)
            spans = tuple((0, one.numel) if r in there else NOTHING for r in range(self.comm.world))
            ends = (spans, one.spans) if back else (one.spans, spans)
            self._ways[key] = route(*ends, one.mates, self.comm.rank)
        return self._ways[key]


#: The parameters of an optimizer, whole or sharded.
Shards = WholeParameters | ParameterShards


def find_shards(names: Mapping[nn.Parameter, str], comm: CommStrategy) -> Shards:
    """Return how parameters, given with their names, are sharded over the ranks."""
    return ParameterShards(names, comm) if any(is_cut(p) for p in names) else WholeParameters()


def zeros_like_shard(p: nn.Parameter) -> Tensor:
    """Return zeros shaped as the shard of this rank, in the precision of its curvature."""
    return torch.zeros_like(local(p), dtype=precision_of(p))


def require_separate_parameters(method: str, module: nn.Module | None, params: Sequence[nn.Parameter]) -> None:
    """Reject the parameters of the older wrapper, which joins those of several layers.

    Raises:
        NotImplementedError: If there are any.
    """
    modules = [] if module is None else list(module.modules())
    if any(type(x).__name__ in ("FullyShardedDataParallel", "FlatParameter") for x in [*modules, *params]):
        raise NotImplementedError(
            f"{method}: FullyShardedDataParallel joins the parameters of several layers; use "
            "torch.distributed.fsdp.fully_shard, which keeps them separate"
        )


def _alike(params: Sequence[nn.Parameter]) -> list[list[int]]:
    """Positions of parameters that travel together because they have one precision and one device."""
    found: dict[tuple[object, ...], list[int]] = {}
    for i, p in enumerate(params):
        found.setdefault((precision_of(p), p.device), []).append(i)
    return list(found.values())
