"""Counts the messages of ``DedicatedWorkers``: the bytes that ranks of each role send in an epoch in lockstep mode.

Factor ranks combine their statistics as in other strategies. The table in :mod:`secondorder.comm.dedicated.links` lists
the messages between roles. In opportunistic mode, no rank sends more than in lockstep mode.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from secondorder.comm.buffers import real
from secondorder.comm.collectives import Collectives
from secondorder.comm.dedicated.links import contents
from secondorder.comm.dedicated.lockstep import ends_epoch
from secondorder.comm.dedicated.roles import resolve
from secondorder.comm.dedicated.workers import DedicatedWorkers, owners_of
from secondorder.comm.placement import Grid
from secondorder.comm.strategy import Parcel, Pending, Shard, Unit
from secondorder.plan.plan import Sum, Traffic
from secondorder.plan.rehearsal import DryCollectives, Imagined, Rehearsal, summed


class RoleRehearsal(Rehearsal):
    """Rehearses all roles at once. Every rank is a separate column.

    Args:
        strategy: The strategy, which is not changed.
        units: The units to place.
        world: Number of ranks.
        is_real: Whether the optimizer runs in this world under this strategy.
    """

    def __init__(self, strategy: DedicatedWorkers, units: Sequence[Unit], world: int, is_real: bool = False) -> None:
        self._arguments, self._units, self.is_real = strategy.arguments, list(units), is_real
        self.roles = resolve(world, self._arguments.roles, self._arguments.allow_colocated)
        self.period: int = self._arguments.period_of([unit.interval for unit in units])
        self.grid: Grid = Grid(world, 1)
        self.owners: list[int] = owners_of(units, world, self.roles)
        self._groups: dict[str, tuple[Sequence[int], DryCollectives]] = {
            name: (ranks, DryCollectives(Collectives())) for name, ranks in self.roles.groups.items()
        }

    def _in(self, name: str) -> tuple[DryCollectives, Imagined]:
        ranks, collectives = self._groups[name]
        return collectives, Imagined(ranks, ranks[0])

    def traffic(self, steps: int) -> tuple[Traffic, int]:
        """Return the traffic since the last call, for a kind of step that occurs ``steps`` times, without padding."""
        by_rank: dict[int, dict[str, Sum]] = {}
        for ranks, collectives in self._groups.values():
            for stage, found in summed(collectives.counter.records).items():
                for rank in ranks:
                    own = by_rank.setdefault(rank, {})
                    own[stage] = own.get(stage, Sum()).plus(found)
            collectives.counter.clear()
        return Traffic(steps, {}, by_rank), 0

    # ------------------------------------------------------------------ ranks
    def holders(self, index: int, place: str) -> Sequence[int] | None:
        """Return the ranks that store or compute a part of a unit; see the base class."""
        owner, roles = self.owners[index], self.roles
        if place == "owner":
            return (owner,)
        if place in ("directions", "captures"):
            return roles.gradient if place == "directions" else roles.factor
        if place == "curvature":
            return (*roles.gradient, owner)
        warms_up = self._arguments.warmup == "sync" or self._units[index].everywhere
        there = (*(roles.gradient if warms_up else ()), *roles.factor)
        return there if owner in there else (*there, owner)

    @property
    def owned(self) -> list[int]:
        """An empty list, since ranks without units have another role and are not idle."""
        return []

    @property
    def groups(self) -> int:
        """The largest number of communicators of a rank, including the one for the start and the end."""
        sizes = [ranks for ranks, _ in self._groups.values() if len(ranks) > 1]
        return 1 + max(sum(rank in ranks for ranks in sizes) for rank in range(self.world))

    @property
    def replicates(self) -> bool:
        """Always False, because no rank holds the estimates of all units."""
        return False

    @property
    def data_world(self) -> int:
        """Number of factor ranks."""
        return len(self.roles.factor)

    def sources(self, index: int) -> int:
        """Return the number of factor ranks."""
        return self.data_world

    def captures_elsewhere(self, index: int) -> bool:
        """Return False, since only sums are passed on."""
        return False

    def renews(self, index: int) -> bool:
        """Return False, since inverse ranks refresh between steps."""
        return False

    def shard(self, index: int) -> Shard:
        """Return the complete unit as one shard, since units are not divided."""
        return Shard(0, 1)

    # ------------------------------------------------------------------ messages of a step
    def average_gradients(self, params: Sequence[nn.Parameter]) -> None:
        """Count the messages with gradients."""
        trained = [p for p in params if p.requires_grad]
        tensors = [real(torch.empty_like(p, device="meta")) for p in trained]
        collectives, group = self._in("gradients")
        tensors.append(torch.empty(len(trained), device="meta"))
        collectives.average(tensors, group=group, stage="gradients", count=1).wait()

    def agree(self, words: Tensor) -> Tensor:
        """Count the words of factor ranks and return them."""
        collectives, group = self._in("factors")
        known = torch.zeros(words.shape, dtype=words.dtype) if words.device.type == "meta" else words
        return collectives.words(known, group=group, stage="words")

    def reduce_statistics(self, parcels: Sequence[Parcel]) -> Pending:
        """Count the sums of factor ranks."""
        collectives, group = self._in("factors")
        tensors, flags = contents(parcels)
        collectives.all_reduce(tensors, group=group, stage="statistics", symmetric=flags, exact=True).wait()
        return Pending()

    def share_curvature(self, parcels: Sequence[Parcel]) -> None:
        """Do nothing, since a step shares curvature only during the warm-up."""

    def post_directions(self, parcels: Sequence[Parcel]) -> Pending:
        """Do nothing, since every gradient rank computes all directions."""
        return Pending()

    # ------------------------------------------------------------------ epochs
    def intervals(self) -> list[int]:
        """Return the number of steps in an epoch."""
        return [self.period]

    def key(self, t: int) -> Hashable:
        """Return whether an epoch ends with step t."""
        return ends_epoch(t + 1, self.period)

    def after(self, worker: Any, t: int) -> None:
        """Count the messages between roles if an epoch ends with step t."""
        if not self.key(t):
            return
        roles = self.roles
        self._copy("gradients", [_words(1 + 2 * len(roles.inverse))], stage="words")
        self._copy("parameters", [torch.empty_like(p, device="meta") for p in worker.parameters_now()])
        for j in roles.inverse:
            units = [index for index, owner in enumerate(self.owners) if owner == j]
            if not roles.colocated:
                tensors, flags = contents([worker.live_parcel(index, "estimate") for index in units])
                self._copy(f"estimate {j}", [_words(len(units)), *tensors], [False, *flags])
            tensors, flags = contents([worker.live_parcel(index, "curvature") for index in units])
            self._copy(f"curvature {j}", [_words(2 + len(units)), *tensors], [False, *flags])
            if self._arguments.on_loss == "degrade":
                collectives, group = self._in("gradients")
                collectives.words(torch.zeros(1), group=group, stage="words")

    def _copy(self, name: str, tensors: Sequence[Tensor], flags: Sequence[bool] = (), stage: str = "") -> None:
        ranks, collectives = self._groups[name]
        collectives.broadcast(
            {ranks[0]: tensors},
            group=Imagined(ranks, ranks[0]),
            stage=stage or name.split()[0],
            symmetric={ranks[0]: flags or (False,) * len(tensors)},
            exact=True,
        ).wait()


def _words(count: int) -> Tensor:
    return torch.empty(count, dtype=torch.float64, device="meta")
