"""Grids and owners agree with tables by hand, and loads are close to the optimum."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from secondorder.comm.placement import Grid, Load, assign, divisors, workers_of


# ---------------------------------------------------------------------- grid
def test_rows_are_runs_of_ranks() -> None:
    for workers, rows, columns in [
        (1, [tuple(range(8))], [(rank,) for rank in range(8)]),
        (2, [(0, 1, 2, 3), (4, 5, 6, 7)], [(0, 4), (1, 5), (2, 6), (3, 7)]),
        (4, [(0, 1), (2, 3), (4, 5), (6, 7)], [(0, 2, 4, 6), (1, 3, 5, 7)]),
    ]:
        grid = Grid(8, workers)
        assert (grid.rows, grid.columns, grid.width) == (rows, columns, 8 // workers)
        for rank in range(8):
            assert grid.row_of(rank) in rows
            assert grid.column_of(rank) in columns
            assert set(grid.row_of(rank)) & set(grid.column_of(rank)) == {rank}


def test_workers_must_divide() -> None:
    for world, workers in [(8, 3), (8, 0), (8, 16), (3, 2), (1, 2)]:
        with pytest.raises(ValueError, match=f"{workers} gradient workers do not divide {world} ranks"):
            Grid(world, workers)
    for world, fraction, workers in [
        (1, 1, 1), (4, 1, 4), (4, 1.0, 4), (4, 0.5, 2), (4, 0.25, 1), (3, 1 / 3, 1), (3, 0.333333, 1), (49, 1 / 49, 1)
    ]:  # fmt: skip
        assert workers_of(world, fraction) == workers


def test_fractions_named_in_the_error_work() -> None:
    for fraction in [0, 0.1, -0.5, 2, 0.75, 0.26]:
        with pytest.raises(ValueError, match=r"divides 4; fractions that work: 0.25, 0.5, 1$"):
            workers_of(4, fraction)
    for world in [1, 2, 6, 48, 1024, 4096]:
        with pytest.raises(ValueError, match="fractions that work") as error:
            workers_of(world, 0.29)
        named = str(error.value).rsplit(": ", 1)[1].split(", ")
        assert [workers_of(world, float(word)) for word in named] == divisors(world)


# ---------------------------------------------------------------------- owners
def loads(*costs: float) -> list[Load]:
    return [Load(float(cost), int(cost)) for cost in costs]


TEN, FIVE = (10, 9, 8, 7, 6, 5, 4, 3, 2, 1), (5, 5, 5, 5, 5)


def test_owners_by_hand() -> None:
    """From costs, the numbers of ranks and of gradient workers, and options."""
    for costs, grid, options, owners in [
        (TEN, (8, 1), {}, [0, 1, 2, 3, 4, 5, 6, 7, 7, 6]),
        (TEN, (8, 2), {}, [0, 1, 2, 3, 7, 6, 5, 4, 4, 5]),
        (TEN, (8, 4), {}, [0, 1, 3, 2, 4, 5, 7, 6, 6, 7]),
        (TEN, (8, 8), {}, [0, 1, 2, 3, 4, 5, 6, 7, 7, 6]),
        # ties go to the lower index, and the order of units does not matter
        (FIVE, (4, 1), {}, [0, 1, 2, 3, 0]),
        (FIVE, (4, 2), {}, [0, 1, 2, 3, 0]),
        ((0, 0, 0), (2, 1), {}, [0, 1, 0]),  # unknown loads
        ((1, 8, 3), (2, 1), {}, [1, 0, 1]),
        ((4, 4, 4), (2, 1), {"kept": [1]}, [1, 0, 0]),
        ((9, 4, 4, 4), (2, 1), {"kept": [None, 0, 0, None]}, [1, 0, 0, 0]),
        ((1, 2), (2, 1), {"kept": [1, 1, 0]}, [1, 1]),
        ((3, 2, 1), (4, 1), {"only": [3, 1]}, [1, 3, 3]),
        ((3, 2, 1), (4, 2), {"only": [1, 2]}, [2, 1, 1]),
        ((3, 2, 1), (4, 1), {"kept": [0], "only": [1]}, [0, 1, 1]),
    ]:
        assert assign(loads(*costs), Grid(*grid), **options) == owners, (costs, grid, options)
    for options in ({"kept": [4]}, {"only": []}, {"only": [4]}):
        with pytest.raises(ValueError, match="among 4 ranks"):
            assign(loads(1), Grid(4, 1), **options)


def test_neither_time_nor_memory_is_balanced_at_the_expense_of_the_other() -> None:
    """Of two units that take time and two that take memory, each rank gets one of each kind."""
    units = [Load(10, 0), Load(0, 10), Load(10, 0), Load(0, 10)]
    owners = assign(units, Grid(2, 1))
    for rank in range(2):
        assert sum((unit for unit, owner in zip(units, owners, strict=True) if owner == rank), ()).count(10) == 2


def most(costs: list[int], owners: list[int], world: int) -> int:
    return max(sum(c for c, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(world))


@given(costs=st.lists(st.integers(1, 30), min_size=1, max_size=7), world=st.integers(1, 3), one_column=st.booleans())
def test_largest_load_against_the_optimum(costs: list[int], world: int, one_column: bool) -> None:
    owners = assign(loads(*costs), Grid(world, world if one_column else 1))
    optimum = min(most(costs, list(other), world) for other in product(range(world), repeat=len(costs)))
    assert most(costs, owners, world) <= (4 / 3 - 1 / (3 * world)) * optimum + 1e-9


@given(costs=st.lists(st.integers(1, 30), min_size=1, max_size=6))
def test_largest_load_on_a_grid(costs: list[int]) -> None:
    """With two columns of two ranks, a load exceeds the mean by at most the largest unit in each choice."""
    owners = assign(loads(*costs), Grid(4, 2))
    assert most(costs, owners, 4) <= sum(costs) / 4 + 1.5 * max(costs)
