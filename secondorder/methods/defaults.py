"""Defaults that depend on other arguments: the size of a step, and the damping that suits it.

An optimizer that gets no learning rate takes the size of its steps from AdamW, at AdamW's own default rate. This trains
any model that AdamW trains. With a learning rate, or with ``graft=None``, a method is the one that was published.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from secondorder import options

#: The value of ``graft`` with which the constructor chooses.
AUTO = "auto"
#: Its other values.
RULES = (None, "sgd", "adam", "adamw")
#: Learning rate of steps that have the size of Adam's; AdamW has the same default.
ADAM_RATE = 1e-3
#: Keys of a parameter group that decide about the size of its steps.
_SIZES = frozenset({"lr", "inner", "weight_decay_mode", "momentum_mode"})


def with_step_size(given: Mapping[str, Any], *, rate: float, own_size: bool) -> dict[str, Any]:
    """Return the arguments of a constructor with ``lr`` and ``graft`` resolved.

    Args:
        given: The arguments by name.
        rate: Learning rate of the published method.
        own_size: Whether other arguments determine the size of a step, so that none can be grafted onto it.

    Returns:
        All arguments. If ``graft`` is ``"auto"``, it is ``"adamw"`` if neither the arguments nor a group gives a
        learning rate, and None otherwise.

    Raises:
        TypeError: If ``graft`` is neither text nor None.
        ValueError: If it is no rule.
    """
    lr, graft = given["lr"], given["graft"]
    options.choice(AUTO, *RULES)("graft", graft)
    if graft == AUTO:
        decided = own_size or lr is not None or options.is_adam(given["inner"]) or _in_groups(given["params"])
        graft = None if decided else "adamw"
    if lr is None:
        lr = _rate(given, graft, rate)
    return {**given, "lr": lr, "graft": graft}


def _rate(given: Mapping[str, Any], graft: Any, rate: float) -> float:
    """Return the learning rate that belongs to the size of the steps."""
    if options.is_adam(graft) or options.is_adam(given["inner"]):
        return ADAM_RATE
    return rate


def _in_groups(params: Any) -> bool:
    """Return whether a parameter group decides about the size of its steps."""
    groups = params if isinstance(params, (list, tuple)) else ()
    return any(isinstance(group, dict) and not _SIZES.isdisjoint(group) for group in groups)


def resolved_damping(given: Mapping[str, Any], *, absolute: float, relative: float) -> dict[str, Any]:
    """Return ``damping`` and ``damping_mode`` of a method whose published damping is a number.

    Args:
        given: The arguments of the constructor by name, with ``graft`` resolved.
        absolute: The published damping.
        relative: The damping relative to the curvature.

    Returns:
        Both options. Without them, the damping is relative to the curvature where ``graft`` or ``inner`` sets the size
        of a step, since only the direction matters there.
    """
    damping, mode = given["damping"], given["damping_mode"]
    if damping is None:
        if mode is None:
            sized = given["graft"] is not None or options.is_adam(given["inner"])
            mode = "relative" if sized else "absolute"
        damping = relative if mode == "relative" else absolute
    return {"damping": damping, "damping_mode": "absolute" if mode is None else mode}
