"""Assigns the roles, gradients, factors and inverses, to processes without communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from secondorder.comm.placement import default_roles

NAMES = ("gradient", "factor", "inverse")


@dataclass(frozen=True)
class Roles:
    """Ranks by role. Each rank has one role, unless the same ranks compute factors and inverses.

    Attributes:
        gradient: Ranks that compute gradients and train; the first one leads.
        factor: Ranks that estimate factors from separate data; the first one sends them.
        inverse: Ranks that factorize.
    """

    gradient: tuple[int, ...]
    factor: tuple[int, ...]
    inverse: tuple[int, ...]

    @property
    def chief(self) -> int:
        """The gradient rank that makes the decisions."""
        return self.gradient[0]

    @property
    def server(self) -> int:
        """The factor rank that sends factors to the inverse ranks."""
        return self.factor[0]

    @property
    def colocated(self) -> bool:
        """Whether the same ranks compute factors and inverses."""
        return self.factor == self.inverse

    @property
    def groups(self) -> dict[str, tuple[int, ...]]:
        """Ranks of each group of messages by name, in the order in which groups are created; see ``links``."""
        estimates = () if self.colocated else self.inverse
        return {
            "gradients": self.gradient,
            "factors": self.factor,
            "parameters": (self.chief, *self.factor),
            **{f"estimate {j}": (self.server, j) for j in estimates},
            **{f"curvature {j}": (j, *self.gradient) for j in self.inverse},
        }

    def of(self, rank: int) -> str:
        """Return the role of a rank. For a rank that computes factors and inverses, it is ``"factor"``."""
        return next(name for name in NAMES if rank in getattr(self, name))

    def peers(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of the same role, in order."""
        found: tuple[int, ...] = getattr(self, self.of(rank))
        return found


def check(given: dict[str, Sequence[int] | None], allow_colocated: bool) -> dict[str, tuple[int, ...] | None]:
    """Return ranks by role, and reject roles that are invalid for every number of ranks.

    Roles that the strategy chooses are None.

    Raises:
        TypeError: If a role is not a list of whole numbers.
        ValueError: If a role is empty, or a rank is named twice or has two roles.
    """
    found = {name: None if given[name] is None else _ranks(name, given[name]) for name in NAMES}
    shared = found["factor"] == found["inverse"] is not None
    if shared and not allow_colocated:
        raise ValueError(
            f"factor={list(found['factor'] or ())} and inverse name the same ranks: give them different ranks, or set "
            "allow_colocated=True"
        )
    taken: dict[int, str] = {}
    for name in NAMES[:2] if shared else NAMES:
        for rank in found[name] or ():
            if rank in taken:
                raise ValueError(f"rank {rank} has two roles, {taken[rank]} and {name}: roles must be disjoint")
            taken[rank] = name
    return found


def _ranks(name: str, ranks: Sequence[int] | None) -> tuple[int, ...]:
    if isinstance(ranks, (str, bytes)) or not isinstance(ranks, Sequence):
        raise TypeError(f"{name} must be a list of ranks, got {ranks!r}")
    for rank in ranks:
        if not isinstance(rank, int) or isinstance(rank, bool):
            raise TypeError(f"{name} must be a list of ranks, got {rank!r} in it")
    if not ranks:
        raise ValueError(f"{name} must name at least one rank, got {list(ranks)}")
    if len(set(ranks)) < len(ranks) or min(ranks) < 0:
        raise ValueError(f"{name} must name different ranks from 0 on, got {list(ranks)}")
    return tuple(ranks)


def resolve(world: int, given: dict[str, tuple[int, ...] | None], allow_colocated: bool = False) -> Roles:
    """Assign a role to every rank of a world.

    If no role is set, a fifth of the ranks computes factors, a fifth computes inverses (the same fifth, if that is
    allowed), and the rest compute gradients. If one role is missing, it consists of the remaining ranks.

    Args:
        world: Number of ranks.
        given: Ranks by role, as :func:`check` returns them.
        allow_colocated: Whether the same ranks may compute factors and inverses.

    Returns:
        The roles.

    Raises:
        ValueError: If the world is too small, or some of its ranks would have no role.
    """
    named = {name: ranks for name, ranks in given.items() if ranks is not None}
    if not named:
        return _default(world, allow_colocated)
    if max(max(ranks) for ranks in named.values()) >= world:
        raise ValueError(f"roles name ranks beyond the world of {world}: {named}")
    if allow_colocated:
        service = named.get("factor") or named.get("inverse") or _rest(world, named)
        named = {"factor": service, "inverse": service} | named
    missing = [name for name in NAMES if name not in named]
    if len(missing) == 1:
        named[missing[0]] = _rest(world, named)
    if len(missing) > 1 or not all(named.values()):
        raise ValueError(f"a world of {world} leaves no choice of ranks for {missing}: name them, or no role at all")
    if rest := _rest(world, named):
        raise ValueError(f"ranks {list(rest)} of a world of {world} have no role: name them too")
    return Roles(named["gradient"], named["factor"], named["inverse"])


def _rest(world: int, named: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Return the ranks that have no role."""
    return tuple(rank for rank in range(world) if not any(rank in ranks for ranks in named.values()))


def _default(world: int, allow_colocated: bool) -> Roles:
    if not allow_colocated:
        return Roles(*(tuple(ranks) for ranks in default_roles(world)))
    if world == 2:
        return Roles((0,), (1,), (1,))
    gradient, factor, inverse = default_roles(world)
    service = (*factor, *inverse)
    return Roles(tuple(gradient), service, service)
