"""Covering grids: few cases in which every two values of different parameters still occur together.

A test with four parameters of five values has 625 cases in its full product, but 25 or so of them contain every pair of
values. Faults that only three values together reveal are rare (Kuhn, Wallace & Gallo, "Software fault interactions and
implications for software testing", IEEE TSE 30(6), 2004), so a default run takes the pairs.

::

    @pairs(method=METHODS, rule=RULES, dtype=[torch.float32, torch.float64])   # every pair, and no other cases
    @each(method=METHODS, rule=RULES)                                          # every value once
    @sample(method=METHODS, rule=RULES)                                        # the same, and the rest under `slow`
    @only("kfac-exact", method=METHODS, rule=RULES)                            # by id, and the rest under `slow`
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any, TypeVar

import pytest

Row = tuple[int, ...]  # the index of the value of every parameter
Case = TypeVar("Case", bound=Hashable)


def pairs(where: Callable[..., bool] | None = None, /, **parameters: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test so that every two values of different parameters occur together in at least one case.

    Args:
        where: Called with the values of all parameters by name; combinations for which it is false are left out.
        **parameters: Values of each parameter. The keys of a mapping become the ids of its values.
    """
    return _covered(where, parameters, strength=2, rest=False)


def each(where: Callable[..., bool] | None = None, /, **parameters: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test so that every value of every parameter occurs in at least one case."""
    return _covered(where, parameters, strength=1, rest=False)


def sample(where: Callable[..., bool] | None = None, /, **parameters: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test with every combination; those that :func:`each` would leave out are marked ``slow``."""
    return _covered(where, parameters, strength=1, rest=True)


def _covered(
    where: Callable[..., bool] | None, parameters: Mapping[str, Iterable[Any]], *, strength: int, rest: bool
) -> pytest.MarkDecorator:
    rows = combinations_of(where, parameters)
    return _parametrized(parameters, rows, set(covering(rows, strength)), rest=rest)


def only(*chosen: str, **parameters: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test with every combination; those whose id is not given are marked ``slow``."""
    ids = [ids_of(given) for given in parameters.values()]
    rows = combinations_of(None, parameters)
    found = {"-".join(values_at(ids, row)): row for row in rows}
    return _parametrized(parameters, rows, {found[name] for name in chosen}, rest=True)


def covering(rows: Sequence[Row], strength: int = 2) -> list[Row]:
    """Choose rows such that every combination of ``strength`` values that occurs in some row occurs in a chosen one.

    The choice is greedy: the row that covers most of what is still uncovered, and the first of several such rows, so
    that the choice depends only on the order of the values.
    """
    return cover({row: _tuples(row, min(strength, len(row))) for row in rows})


def cover(wanted: Mapping[Case, frozenset[Hashable]]) -> list[Case]:
    """Choose cases greedily, such that the chosen ones together cover everything that any case covers."""
    missing = set().union(*wanted.values()) if wanted else set()
    chosen: list[Case] = []
    candidates = list(wanted)
    while missing:
        best = max(candidates, key=lambda case: len(wanted[case] & missing))
        chosen.append(best)
        missing -= wanted[best]
        candidates = [case for case in candidates if wanted[case] & missing]
    return chosen


def combinations_of(where: Callable[..., bool] | None, parameters: Mapping[str, Iterable[Any]]) -> list[Row]:
    """Return the indices of every combination for which ``where`` is true."""
    values = [values_of(given) for given in parameters.values()]
    rows = list(product(*(range(len(of)) for of in values)))
    if where is None:
        return rows
    return [row for row in rows if where(**dict(zip(parameters, values_at(values, row), strict=True)))]


def _tuples(row: Row, strength: int) -> frozenset[Hashable]:
    return frozenset(combinations(enumerate(row), strength))


def _parametrized(
    axes: Mapping[str, Iterable[Any]], rows: Sequence[Row], default: set[Row], *, rest: bool
) -> pytest.MarkDecorator:
    values = [values_of(given) for given in axes.values()]
    ids = [ids_of(given) for given in axes.values()]
    taken = [row for row in rows if rest or row in default]
    cases = [parameters(values_at(values, row), values_at(ids, row), slow=row not in default) for row in taken]
    return pytest.mark.parametrize(tuple(axes), cases)


def parameters(values: Iterable[Any], ids: Iterable[str], *, slow: bool) -> Any:
    """Return the parameters of one case."""
    return pytest.param(*values, id="-".join(ids), marks=pytest.mark.slow if slow else ())


def values_at(values: Iterable[Sequence[Any]], row: Row) -> list[Any]:
    """Return the value with the index of the row, of every parameter."""
    return [of[index] for of, index in zip(values, row, strict=True)]


def values_of(given: Iterable[Any]) -> list[Any]:
    """Return the values, in their order."""
    return list(given.values()) if isinstance(given, Mapping) else list(given)


def ids_of(given: Iterable[Any]) -> list[str]:
    """Return a short name of each value."""
    if isinstance(given, Mapping):
        return [str(key) for key in given]
    return [str(getattr(value, "name", None) or getattr(value, "__name__", None) or value) for value in given]
