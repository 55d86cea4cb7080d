"""Ownership of units: the grid of ranks, and the assignment of loads to it by arithmetic that is equal on all ranks.

``world`` ranks fill a grid of ``workers`` rows and ``world // workers`` columns row by row::

    world=8, workers=2      column 0  1  2  3      a unit owned by rank 5 is preconditioned by column 1 = {1, 5};
                  row 0            0  1  2  3      rank 1 sends its direction to 0, 2, 3
                  row 1            4  5  6  7      rank 5 sends its direction to 4, 6, 7

A row consists of consecutive ranks, so the traffic of every step stays inside a node if a row fits into a node.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# Tolerance for fractions that are written with six digits, such as 0.333333.
RELATIVE_ERROR = 1e-5


class Grid:
    """The grid of ranks.

    Args:
        world: Number of ranks.
        workers: Number of ranks that precondition the same unit, which is the number of rows.

    Attributes:
        world: Number of ranks.
        workers: Number of rows, which is the number of ranks in a column.
        width: Number of columns, which is the number of ranks in a row.
        rows: The ranks of each row.
        columns: The ranks of each column.

    Raises:
        ValueError: If ``workers`` does not divide ``world``.
    """

    def __init__(self, world: int, workers: int) -> None:
        if workers < 1 or world % workers:
            raise ValueError(f"{workers} gradient workers do not divide {world} ranks; possible are {_words(world, 1)}")
        self.world = world
        self.workers = workers
        self.width: int = world // workers
        self.rows: list[tuple[int, ...]] = [tuple(range(i * self.width, (i + 1) * self.width)) for i in range(workers)]
        self.columns: list[tuple[int, ...]] = [tuple(range(i, world, self.width)) for i in range(self.width)]

    def row_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that share directions with this rank, including itself."""
        return self.rows[rank // self.width]

    def column_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that precondition the units of this rank, including itself."""
        return self.columns[rank % self.width]


def divisors(world: int) -> list[int]:
    """Return the possible numbers of gradient workers in ascending order."""
    return [m for m in range(1, world + 1) if world % m == 0]


def _words(world: int, of: int) -> str:
    """Format the possible numbers of workers, divided by ``of``."""
    return ", ".join(f"{m / of:.6g}" for m in divisors(world))


def workers_of(world: int, fraction: float) -> int:
    """Return the number of gradient workers, of whom ``fraction`` within ``(0, 1]`` is the share of all ranks.

    Raises:
        ValueError: If the fraction gives no whole number of workers that divides ``world``; it lists those that do.
    """
    exact = world * fraction
    workers = round(exact)
    if not 1 <= workers <= world or abs(exact - workers) > RELATIVE_ERROR * workers or world % workers:
        raise ValueError(
            f"fraction={fraction} of {world} ranks is {exact:.6g} gradient workers, which must be a whole number of at "
            f"least 1 that divides {world}; fractions that work: {_words(world, world)}"
        )
    return workers


class Load(NamedTuple):
    """The cost of a unit for its owner.

    Attributes:
        flops: Computation time, in a measure that is the same for all units.
        nbytes: Memory in bytes.
    """

    flops: float
    nbytes: int


class _Loads:
    """The loads of ranks so far, compared by the larger of their shares of all time and of all memory."""

    def __init__(self, loads: Sequence[Load], world: int) -> None:
        # The sums are divided only when they are compared. Whole numbers thus stay exact, and equal loads are ties.
        self.flops = [0.0] * world
        self.nbytes = [0] * world
        self.all_flops = sum(load.flops for load in loads)
        self.all_bytes = sum(load.nbytes for load in loads)

    def add(self, rank: int, load: Load) -> None:
        self.flops[rank] += load.flops
        self.nbytes[rank] += load.nbytes

    def share(self, flops: float, nbytes: float) -> float:
        return max(
            flops / self.all_flops if self.all_flops else 0.0, nbytes / self.all_bytes if self.all_bytes else 0.0
        )

    def after(self, ranks: Sequence[int], load: Load) -> float:
        """Return the average share of these ranks after one of them gets the load."""
        flops = sum(self.flops[rank] for rank in ranks) + load.flops
        nbytes = sum(self.nbytes[rank] for rank in ranks) + load.nbytes
        return self.share(flops / len(ranks), nbytes / len(ranks))


def assign(
    loads: Sequence[Load], grid: Grid, kept: Sequence[int | None] = (), only: Sequence[int] | None = None
) -> list[int]:
    """Assign owners, the largest unit first, each to the least-loaded rank in the least-loaded column.

    A load is the larger of two shares, that of all time and that of all memory, so neither is balanced at the expense
    of the other. Ties go to the lower index.

    Args:
        loads: Load of each unit.
        grid: The grid of ranks.
        kept: Previous owners of the units, which do not change. New units have None or are missing at the end.
        only: The ranks that may own new units; all ranks by default.

    Returns:
        The owner of each unit, a global rank.

    Raises:
        ValueError: If a kept owner or a rank of ``only`` is not in the grid, or ``only`` is empty.
    """
    allowed = set(range(grid.world) if only is None else only)
    owners: list[int | None] = [*kept[: len(loads)], *[None] * (len(loads) - len(kept))]
    strangers = {rank for rank in (*allowed, *owners) if rank is not None and not 0 <= rank < grid.world}
    if strangers or not allowed:
        raise ValueError(f"owners must be among {grid.world} ranks, got {sorted(strangers)}")
    if not any(load.flops or load.nbytes for load in loads):  # without any loads, all units count equally
        loads = [Load(1.0, 0)] * len(loads)
    so_far = _Loads(loads, grid.world)
    for owner, load in zip(owners, loads, strict=True):
        if owner is not None:
            so_far.add(owner, load)
    columns = [ranks for column in grid.columns if (ranks := tuple(r for r in column if r in allowed))]
    new = [i for i, owner in enumerate(owners) if owner is None]
    # sorted() and min() keep the first of equal items, which breaks ties by index.
    for i in sorted(new, key=lambda i: -so_far.share(*loads[i])):
        column = min(columns, key=lambda ranks: so_far.after(ranks, loads[i]))
        rank = min(column, key=lambda rank: so_far.after((rank,), loads[i]))
        so_far.add(rank, loads[i])
        owners[i] = rank
    return [owner for owner in owners if owner is not None]


def default_roles(n: int) -> tuple[list[int], list[int], list[int]]:
    """Return those of n ranks that compute gradients, factors and inverses if the three are different processes.

    One fifth of the ranks (rounded, at least one) computes factors, as many inverses, and the rest gradients.

    Raises:
        ValueError: If there are fewer than three ranks.
    """
    if n < 3:
        raise ValueError(f"gradients, factors and inverses on separate ranks need at least 3 ranks, got {n}")
    service = max(1, round(0.2 * n))
    ranks = list(range(n))
    return ranks[: n - 2 * service], ranks[n - 2 * service : n - service], ranks[n - service :]
