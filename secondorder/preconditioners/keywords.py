"""Keywords of constructors that accept option objects, and the keys of parameter groups that these objects set."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, fields, replace
from typing import Any

from secondorder import config

#: The class of the object that each keyword takes.
OBJECTS: Mapping[str, type] = {
    "fisher": config.FisherOptions,
    "inverse_method": config.InverseOptions,
    "fallback": config.FallbackOptions,
    "clip": config.ClipOptions,
    "budget": config.BudgetOptions,
    "refresh": config.RefreshOptions,
    "storage": config.StorageOptions,
    "statistics": config.StatisticsOptions,
    "batch": config.BatchOptions,
    "scale": config.ScaleOptions,
    "rows": config.RowOptions,
    "window": config.WindowOptions,
    "adaptation": config.AdaptationOptions,
}


def group_keys(kind: type) -> Iterator[tuple[str, Field[Any]]]:
    """Yield the fields of a class that are keys of parameter groups, each with its key."""
    for found in fields(kind):
        if key := found.metadata.get("key"):
            yield key, found


def parameters_of(method: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a constructor, and those of its base class if it passes keywords on."""
    found = inspect.signature(method).parameters
    if isinstance(method, type) and any(p.kind is p.VAR_KEYWORD for p in found.values()):
        return {**parameters_of(method.__mro__[1]), **found}
    return found


def usual(method: type) -> dict[str, Any]:
    """Return the defaults of a constructor by name, with those of the objects by key of parameter groups."""
    given = {name: parameter.default for name, parameter in parameters_of(method).items()}
    kinds = [OBJECTS[name] for name in OBJECTS.keys() & given.keys()]
    keys = {key: found.default for kind in kinds for key, found in group_keys(kind)}
    return {name: OBJECTS[name]() if name in OBJECTS else value for name, value in given.items()} | {
        key: value for key, value in keys.items() if key not in given
    }


def gathered(chosen: Mapping[str, Any], group: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group, with related options as objects.

    Args:
        chosen: The constructor's arguments for all groups by keyword: objects, and options that no group has.
        group: The options of a group, by key.
        defaults: The default options of a group.

    Returns:
        The options by keyword. A key that differs from the default replaces the field of its object.
    """
    found = dict(group)
    objects = {name: value for name, value in chosen.items() if name in OBJECTS}
    for name, value in objects.items():
        keys = {key: field.name for key, field in group_keys(OBJECTS[name]) if key in found}
        values = {key: found.pop(key) for key in keys}
        own = {keys[key]: value for key, value in values.items() if value != defaults.get(key, value)}
        objects[name] = replace(value, **own)
    return found | {**chosen, **objects}


def flat_names(method: Callable[..., Any]) -> dict[str, tuple[str, Field[Any]]]:
    """Return the fields of the objects that a constructor accepts, by key of parameter groups or by former keyword.

    Args:
        method: The method, whose attribute ``absent`` names the fields that it does not have.

    Returns:
        Keyword and field of each.
    """
    known, absent = parameters_of(method), getattr(method, "absent", ())
    return {
        found.metadata.get("was") or found.metadata.get("key") or found.name: (name, found)
        for name in OBJECTS.keys() & known.keys()
        for found in fields(OBJECTS[name])
        if f"{name}.{found.name}" not in absent
    }
