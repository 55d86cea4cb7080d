"""Validation and documentation of the options of constructors.

Every value is checked once, when a group is added, and error messages contain the value. Descriptions that several
classes share are written once and inserted into their docstrings.
"""

from __future__ import annotations

import inspect
import math
import numbers
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import is_
from typing import Any, TypeVar

import torch

Check = Callable[[str, Any], None]
_Class = TypeVar("_Class", bound=type)

_SECTION = re.compile(r"^Args:.*\n((?: .*\n)+)", re.M)
_DESCRIPTION = re.compile(r"^    (\w+): .*\n(?:     .*\n)*", re.M)


def is_number(value: Any) -> bool:
    """Whether ``value`` is a real number of Python or NumPy. A ``bool`` is not a number here."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def number(low: float, high: float = math.inf, *, low_open: bool = False, optional: bool = False) -> Check:
    """A check for a finite real number in ``[low, high]`` (or ``(low, high]``). ``optional`` also allows None."""

    def check(name: str, value: Any) -> None:
        if value is None and optional:
            return
        if not is_number(value):
            raise TypeError(f"{name} must be a number, got {value!r}")
        if not (math.isfinite(value) and value <= high and (value > low if low_open else value >= low)):
            bound = f"> {low}" if low_open else f">= {low}"
            above = "" if high == math.inf else f" and <= {high}"
            raise ValueError(f"{name} must be finite, {bound}{above}, got {value}")

    return check


def whole(low: int) -> Check:
    """A check for an integer of at least ``low``."""

    def check(name: str, value: Any) -> None:
        if not isinstance(value, numbers.Integral) or isinstance(value, bool):
            raise TypeError(f"{name} must be an integer, got {value!r}")
        if value < low:
            raise ValueError(f"{name} must be >= {low}, got {value}")

    return check


def optional_whole(low: int) -> Check:
    """A check for None or an integer of at least ``low``."""

    def check(name: str, value: Any) -> None:
        if value is not None:
            whole(low)(name, value)

    return check


def choice(*allowed: str | None) -> Check:
    """A check for one of some strings (or None)."""

    def check(name: str, value: Any) -> None:
        if value is not None and not isinstance(value, str):
            raise TypeError(f"{name} must be one of {allowed}, got {value!r}")
        if value not in allowed:
            raise ValueError(f"{name} must be one of {allowed}, got {value!r}")

    return check


def flag(name: str, value: Any) -> None:
    """A check for a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def optional_flag(name: str, value: Any, *words: str) -> None:
    """A check for a bool, None or one of some words."""
    if value is None or isinstance(value, bool) or (isinstance(value, str) and value in words):
        return
    allowed = " or ".join(["True", "False", *map(repr, words)])
    raise TypeError(f"{name} must be {allowed}, got {value!r}")


def learning_rate(name: str, value: Any) -> None:
    """A check for a non-negative number or a tensor of one element."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise ValueError(f"Tensor {name} must be 1-element, got shape {tuple(value.shape)}")
        return  # its value is not checked, because the host would have to wait for the device
    number(0.0)(name, value)


def betas(name: str, value: Any) -> None:
    """A check for two numbers in [0, 1)."""
    if not isinstance(value, (tuple, list)) or len(value) != 2 or not all(is_number(b) for b in value):
        raise TypeError(f"{name} must be a pair of numbers, got {value!r}")
    for i, beta in enumerate(value):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"{name}[{i}] must be in [0, 1), got {beta}")


def stored_dtype(name: str, value: Any) -> None:
    """A check for a data type in which curvature can be stored or products can be computed."""
    if not isinstance(value, torch.dtype):
        raise TypeError(f"{name} must be torch.float32 or torch.bfloat16, got {value!r}")
    if value not in (torch.float32, torch.bfloat16):
        raise ValueError(f"{name} must be torch.float32 or torch.bfloat16, got {value}")


def to_python(value: Any) -> Any:
    """Convert a NumPy number to a Python number, since ``torch.load(weights_only=True)`` loads only the latter."""
    if isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    return tuple(map(to_python, value)) if isinstance(value, (tuple, list)) else value


def bare_name(name: str) -> str:
    """Return a name without case, hyphens and underscores, which do not distinguish names."""
    return name.strip().lower().replace("-", "").replace("_", "")


#: Options that every method has.
COMMON: dict[str, Check] = {
    "lr": learning_rate,
    "momentum": number(0.0),
    "nesterov": flag,
    "weight_decay": number(0.0),
    "decoupled_weight_decay": flag,
    "maximize": flag,
    "foreach": optional_flag,
    "fallback": choice("sgd", "adam", "adamw"),
    "fallback_lr": number(0.0, optional=True),
    "betas": betas,
    "eps": number(0.0),
    "inner": choice("sgd", "adam", "adamw"),
    "graft": choice(None, "sgd", "adam", "adamw"),
    "clip_norm": number(0.0, low_open=True, optional=True),
    "clip_value": number(0.0, low_open=True, optional=True),
    "checkpoint_curvature": choice("all", "factors", "none"),
}

#: Their defaults, unless a method has other ones. Each method has its own default of ``lr``.
DEFAULTS: dict[str, Any] = {
    "momentum": 0.0,
    "nesterov": False,
    "weight_decay": 0.0,
    "decoupled_weight_decay": False,
    "maximize": False,
    "foreach": None,
    "fallback": None,
    "fallback_lr": None,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "inner": "sgd",
    "graft": None,
    "clip_norm": None,
    "clip_value": None,
    "checkpoint_curvature": "all",
}


def validate(group: Mapping[str, Any], checks: Mapping[str, Check]) -> None:
    """Check every known option of a group.

    Raises:
        TypeError: If a value has the wrong type.
        ValueError: If a value is out of range, or options exclude each other.
    """
    for name, check in checks.items():
        if name in group:
            check(name, group[name])
    if group["nesterov"] and group["momentum"] <= 0:
        raise ValueError(f"nesterov needs momentum > 0, got {group['momentum']}")
    if group["graft"] is not None and is_adam(group["inner"]):
        raise ValueError(
            f"graft={group['graft']!r} and inner={group['inner']!r} both set the step size: drop one of them "
            "(graft='adam' uses the size of Adam's step, inner='adam' passes the preconditioned gradient to Adam)"
        )


def check_changes(
    groups: Sequence[Mapping[str, Any]], seen: Sequence[Mapping[str, Any]], checks: Mapping[str, Check]
) -> list[dict[str, Any]] | None:
    """Return the options of all groups after checking those that changed since the last call; None if none changed.

    Raises:
        TypeError: If a value has the wrong type.
        ValueError: If a value is out of range, or options exclude each other.
    """
    found = [{name: group[name] for name in checks if name in group} for group in groups]
    if len(found) == len(seen) and all(map(_are_equal, found, seen)):
        return None
    for i, group in enumerate(found):
        before = seen[i] if i < len(seen) else {}
        validate(group, {n: checks[n] for n, v in group.items() if n not in before or before[n] is not v})
    return found


def _are_equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    values = one.values(), other.values()
    return one.keys() == other.keys() and (all(map(is_, *values)) or all(map(_is_equal, *values)))


def _is_equal(one: Any, other: Any) -> bool:
    """Whether two values of an option are equal, without reading the elements of a tensor from a device."""
    return one is other or type(one) is type(other) and not isinstance(one, torch.Tensor) and bool(one == other)


def without_effect(group: Mapping[str, Any], usual: Mapping[str, Any]) -> str:
    """Describe the options of a group that differ from their defaults but have no effect; an empty string if none."""
    rules = [is_adam(group["graft"] or group["inner"]), is_adam(group["fallback"])]
    own = "fallback_betas" if "fallback_betas" in usual and "fallback_betas" in group else "betas"
    if all(rules) and group.get("momentum_mode") != "pre":
        found = [f"{key}={group[key]}" for key in ("momentum", "nesterov") if group[key] not in (0, usual.get(key))]
        if found:
            has = "has" if len(found) == 1 else "have"
            return f"{' and '.join(found)} {has} no effect, because Adam's rule sets every step: use {own} instead"
    if not any(rules) and own in usual and group[own] != (usual[own] or DEFAULTS["betas"]):
        return f"{own}={group[own]} has no effect, because only Adam's rule reads it: set graft='adamw', or drop it"
    return ""


def refuse(clashes: Mapping[str, bool], reason: str) -> None:
    """Reject the options that clash. Their names follow the reason in the message.

    Raises:
        ValueError: If any option clashes.
    """
    if found := ", ".join(name for name, clash in clashes.items() if clash):
        raise ValueError(f"{reason} {found}")


def resolve_fallback(fallback: str | None, graft: str | None) -> str:
    """The fallback rule: the one that is set, or else the grafted rule, or else SGD."""
    if fallback is None:
        return "sgd" if graft is None or not is_adam(graft) else graft
    return fallback


#: Keys of the betas and the ε of Adam's rule in the groups of a method, by the former names of these keys.
RENAMED: dict[str, str] = {"fallback_betas": "betas", "fallback_eps": "eps"}


def is_adam(rule: str | None) -> bool:
    """Whether a rule is Adam or AdamW."""
    return rule in ("adam", "adamw")


def is_decoupled(rule: str | None, group: Mapping[str, Any]) -> bool:
    """Whether a rule of a group decouples weight decay. AdamW always does; for other rules, the option decides."""
    return rule == "adamw" or bool(group["decoupled_weight_decay"])


def from_arguments(given: Mapping[str, Any], checks: Mapping[str, Check]) -> dict[str, Any]:
    """Return the options of groups from the arguments of a constructor.

    ``checks`` are the checks of the options that only this method has. Common options may be missing.
    """
    given = {**DEFAULTS, **given}
    return {name: given[name] for name in (*COMMON, *checks)}


def renamed(group: Mapping[str, Any], checks: Mapping[str, Check]) -> dict[str, Any]:
    """Return options from a user or a checkpoint under their current names; ``betas`` and ``eps`` were ``fallback_…``.

    Raises:
        ValueError: If an option is set under both of its names, with different values.
    """
    found = dict(group)
    for old, name in RENAMED.items():
        if old in found and old not in checks:
            value = found.pop(old)
            if not callable(value) and not isinstance(value, Mapping):  # a schedule
                COMMON[name](old, value)
            if found.setdefault(name, value) != value:
                raise ValueError(f"{name} and {old} are the same option: set it once, got {found[name]} and {value}")
    return found


def complete_docstring(
    *shared: str | None, usual: Collection[str] = (), expert: Collection[str] = ()
) -> Callable[[_Class], _Class]:
    """Decorate a class so that its docstring describes all arguments of the constructor.

    The arguments that the class does not describe itself are added. They appear in the order of the signature, in one
    section or, with ``usual``, in three: those that most scripts set, the less common ones, and those for experts.

    Args:
        shared: The other descriptions, as docstrings with such sections or as texts of the same form. They are None if
            Python runs without docstrings.
        usual: Arguments that most scripts set.
        expert: Arguments for experts.

    Returns:
        The decorator.
    """

    def complete(cls: _Class) -> _Class:
        if cls.__doc__ is None:
            return cls
        own = inspect.cleandoc(cls.__doc__) + "\n"
        found = {name: text for part in (*shared, own) for name, text in _descriptions(part or "").items()}
        names = list(inspect.signature(cls).parameters)
        sections = {
            "Args:": [name for name in names if not usual or name in usual],
            "Args: Less common": [name for name in names if usual and name not in usual and name not in expert],
            "Args: For experts": [name for name in names if name in expert],
        }
        written = [f"{title}\n" + "".join(found[name] for name in part) for title, part in sections.items() if part]
        start, end = next(_SECTION.finditer(own)).span()
        cls.__doc__ = own[:start] + "\n".join(written) + own[end:]
        return cls

    return complete


def _descriptions(text: str) -> dict[str, str]:
    """The description of each argument in a docstring, or in a text that contains nothing else."""
    sections = _SECTION.findall(inspect.cleandoc(text) + "\n") or [text]
    return {match[1]: match[0] for section in sections for match in _DESCRIPTION.finditer(section)}
