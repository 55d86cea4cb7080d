"""Arguments of constructors: option objects, their short forms, and the keywords that they replaced."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from functools import wraps
from typing import Any, ParamSpec

from secondorder import options
from secondorder.preconditioners.keywords import OBJECTS, group_keys

_P = ParamSpec("_P")

#: Arguments that also accept the first field of the object alone.
_SHORT = ("budget", "fisher", "inverse_method", "fallback", "clip")
#: Keywords that were removed, and what to do instead.
_REMOVED: Mapping[str, str] = {
    "grad_scaler": "a GradScaler that calls step() is found automatically; for others, set optimizer.grad_scaler",
    "switch": "write mode=policy",
}


def expanded(given: Mapping[str, Any], method: type) -> dict[str, Any]:
    """Return the arguments of a constructor with objects in place of their short forms.

    Args:
        given: The arguments by name.
        method: The method. Its attribute ``absent`` names the fields that it does not have, such as
            ``"refresh.stagger"``.

    Returns:
        The arguments, the fields that are keys of parameter groups by key, and the ``"objects"`` by name.

    Raises:
        TypeError: If an argument is not such an object, or sets a field that the method does not have.
        ValueError: If a field has an invalid value.
    """
    found, objects, absent = dict(given), {}, getattr(method, "absent", ())
    checks = {**options.COMMON, **getattr(method, "checks", {})}
    if isinstance(given["params"], Iterator):  # several functions look at the groups
        found["params"] = list(given["params"])
    for name in OBJECTS.keys() & given.keys():
        value = _object(name, given[name])
        for field in fields(value):
            if f"{name}.{field.name}" in absent and getattr(value, field.name) != field.default:
                raise TypeError(f"{method.__name__} has no {field.name} in {name}, got {value!r}")
        found[name] = objects[name] = value
        for key, field in group_keys(type(value)):
            found[key] = getattr(value, field.name)
            if value is given[name] and key in checks and found[key] != field.default:
                checks[key](f"{type(value).__name__}.{field.name}", found[key])
    return {**found, "objects": objects}


def show_new_spelling(construct: Callable[_P, None]) -> Callable[_P, None]:
    """Decorate a constructor so that a keyword of an earlier version raises ``TypeError`` with its new spelling."""
    known = inspect.signature(construct).parameters
    fields_of = {
        old: new for name in OBJECTS.keys() & known.keys() for old, new in _spellings(name) if old not in known
    }

    @wraps(construct)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> None:
        old = {name: value for name, value in kwargs.items() if name in fields_of}
        advice = [f"{name}: {_REMOVED[name]}" for name in kwargs if name in _REMOVED and name not in {*known, *old}]
        if old or advice:
            written = ", ".join(f"{name}={value!r}" for name, value in old.items())
            calls: dict[str, list[str]] = {}
            for name, value in old.items():
                keyword, field = fields_of[name]
                shown = value == "packed" if name == "factor_storage" else value
                calls.setdefault(keyword, []).append(f"{field}={shown!r}")
            new = ", ".join(f"{name}={OBJECTS[name].__name__}({', '.join(parts)})" for name, parts in calls.items())
            found = [f"instead of {written}, write {new}"] * bool(old) + advice
            raise TypeError(f"{type(args[0]).__name__}: {'; '.join(found)}")
        construct(*args, **kwargs)

    return checked


def _object(name: str, value: Any) -> Any:
    kind = OBJECTS[name]
    if isinstance(value, kind):
        return value
    if name not in _SHORT:
        raise TypeError(f"{name} must be {kind.__name__}(...), got {value!r}")
    return kind(value)


def _spellings(name: str) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield the old keyword of each field of an option object, with the new keyword and the field."""
    for field in fields(OBJECTS[name]):
        yield field.metadata.get("was") or field.name, (name, field.name)
