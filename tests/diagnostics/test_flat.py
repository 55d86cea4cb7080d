"""`flat`: diagnostics as one table of numbers."""

import math

import pytest

from secondorder.diagnostics import flat


def test_inner_keys_are_joined_by_slashes_and_lists_by_position() -> None:
    found = flat({"step": 3, "damping": [0.1, 0.2], "rank": {"a.b": 4}, "units": {"all": {"rows": 2, "angle": 1.5}}})
    assert found == {"step": 3.0, "damping/0": 0.1, "damping/1": 0.2, "rank/a.b": 4.0, "units/all/rows": 2.0,
                     "units/all/angle": 1.5}  # fmt: skip
    assert all(type(value) is float for value in found.values())


def test_what_is_no_finite_number_is_left_out() -> None:
    found = flat({"none": None, "nan": math.nan, "inf": [math.inf, -math.inf], "mode": "kid", "on": True, "off": False})
    assert found == {"on": 1.0, "off": 0.0}


def test_something_else_than_a_mapping_is_refused() -> None:
    with pytest.raises(TypeError, match=r"flat takes what diagnostics\(\) returned"):
        flat([1.0])  # type: ignore[arg-type]
