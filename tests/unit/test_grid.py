"""Covering grids cover what they promise, are small, and depend only on their arguments."""

from itertools import combinations, product

from hypothesis import given
from hypothesis import strategies as st

from tests.support import grid

SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=4)


def together(rows: list[tuple[int, ...]], strength: int) -> set[tuple[tuple[int, int], ...]]:
    return {found for row in rows for found in combinations(enumerate(row), min(strength, len(row)))}


@given(SIZES, st.integers(1, 3))
def test_every_combination_of_a_strength_is_covered(sizes: list[int], strength: int) -> None:
    rows = list(product(*map(range, sizes)))
    chosen = grid.covering(rows, strength)
    assert together(chosen, strength) == together(rows, strength)
    assert set(chosen) <= set(rows)
    assert chosen == grid.covering(rows, strength)


def test_a_covering_is_much_smaller_than_the_product() -> None:
    rows = list(product(range(5), repeat=4))
    assert 25 <= len(grid.covering(rows)) <= 40
    assert len(grid.covering(rows, strength=1)) == 5


def test_combinations_that_do_not_exist_are_left_out() -> None:
    parameters = {"a": range(4), "b": range(4)}
    rows = grid.combinations_of(lambda a, b: a <= b, parameters)
    assert len(rows) == 10
    assert set(grid.covering(rows)) == set(rows)  # each pair is a separate case


def test_the_rest_of_a_product_is_slow() -> None:
    mark = grid.sample(a=[1, 2, 3], b={"x": 0, "y": 1}, c=[False, True]).mark
    names, cases = mark.args
    assert names == ("a", "b", "c")
    assert len(cases) == 12
    default = [case for case in cases if not case.marks]
    assert len(default) == 3
    assert len(grid.each(a=[1, 2, 3], b={"x": 0, "y": 1}, c=[False, True]).mark.args[1]) == len(default)
    assert cases[0].id == "1-x-False"
