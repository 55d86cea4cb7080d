"""Defaults that depend on other arguments: the size of a step, and a suitable damping.

An optimizer without a learning rate takes the size of its steps from AdamW at AdamW's default learning rate, or at a
smaller one with sparse rows. With a learning rate, or with ``graft=None``, a method is as published.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from secondorder import options
from secondorder.curvature.window.topk import TopK

#: The value of ``graft`` with which the constructor chooses the rule.
AUTO = "auto"
#: The other values of ``graft``.
RULES = (None, "sgd", "adam", "adamw")
#: Learning rates of steps of Adam's size: AdamW's default, and one for sparse rows, where most entries arrive late.
ADAM_RATE, SPARSE_RATE = 1e-3, 3e-4
#: Keys of a parameter group that determine the size of its steps.
_SIZES = frozenset({"lr", "inner", "weight_decay_mode", "momentum_mode"})


def with_step_size(given: Mapping[str, Any], *, rate: float, own_size: bool) -> dict[str, Any]:
    """Return the arguments of a constructor with ``lr`` and ``graft`` resolved.

    Args:
        given: The arguments by name.
        rate: Learning rate of the published method.
        own_size: Whether other arguments already determine the size of a step, which excludes grafting.

    Returns:
        All arguments. The value ``"auto"`` of ``graft`` becomes ``"adamw"`` if neither the arguments nor a group sets a
        learning rate, and None otherwise.

    Raises:
        TypeError: If ``graft`` is neither a string nor None.
        ValueError: If ``graft`` is not the name of a rule.
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
    """Return the default learning rate for the size of the steps."""
    if options.is_adam(graft) or options.is_adam(given["inner"]):
        return SPARSE_RATE if isinstance(given.get("compression"), TopK) else ADAM_RATE
    return rate


def _in_groups(params: Any) -> bool:
    """Return whether a parameter group determines the size of its steps."""
    groups = params if isinstance(params, (list, tuple)) else ()
    return any(isinstance(group, dict) and not _SIZES.isdisjoint(group) for group in groups)


def resolved_damping(
    given: Mapping[str, Any], *, absolute: float, relative: float, always_relative: bool = False
) -> dict[str, Any]:
    """Return ``damping`` and ``damping_mode`` for a method whose published damping is a number.

    Args:
        given: The arguments of the constructor by name, with ``graft`` resolved.
        absolute: The published damping.
        relative: The damping relative to the curvature.
        always_relative: Whether the damping is relative for steps of every size if nothing is set.

    Returns:
        Both options. If they are not set, the damping is relative to the curvature when ``graft`` or ``inner`` sets the
        size of a step, since only the direction matters then.
    """
    damping, mode = given["damping"], given["damping_mode"]
    if damping is None:
        if mode is None:
            sized = always_relative or given["graft"] is not None or options.is_adam(given["inner"])
            mode = "relative" if sized else "absolute"
        damping = relative if mode == "relative" else absolute
    return {"damping": damping, "damping_mode": "absolute" if mode is None else mode}
