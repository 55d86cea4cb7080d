"""Diagnostics of an optimizer as one flat table of numbers for loggers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from numbers import Real
from typing import Any


def flat(diagnostics: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of nested diagnostics under keys such as ``"damping_by_layer/encoder.0"``.

    Args:
        diagnostics: The result of ``diagnostics()`` of an optimizer, or any nested mapping with numbers in it.

    Returns:
        Finite numbers by key. The key is ``outer/inner`` for an inner mapping and contains the position for entries of
        a list or tuple. Bools become 0 and 1. None, strings, infinities and NaN are left out.

    Raises:
        TypeError: If ``diagnostics`` is not a mapping.

    Example:
        >>> flat({"step": 3, "damping_by_layer": {"0": 0.5}, "kl_clip_factor": None, "damping": [0.1]})
        {'step': 3.0, 'damping_by_layer/0': 0.5, 'damping/0': 0.1}
    """
    if not isinstance(diagnostics, Mapping):
        raise TypeError(f"flat takes the mapping that diagnostics() returned, got {type(diagnostics).__name__}")
    return dict(_numbers("", diagnostics))


def _numbers(key: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, Real):
        if math.isfinite(value):
            yield key, float(value)
        return
    inner: Iterator[tuple[Any, Any]] = iter(())
    if isinstance(value, Mapping):
        inner = iter(value.items())
    elif isinstance(value, (list, tuple)):
        inner = iter(enumerate(value))
    for name, entry in inner:
        yield from _numbers(f"{key}/{name}" if key else str(name), entry)
