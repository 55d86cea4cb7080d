"""What a checkpoint brings: compared with what is expected, and adopted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from secondorder import options
from secondorder.comm.layout import cut_like, is_cut
from secondorder.parameters import RULE_KEYS

Spec = dict[str, "tuple[int, ...] | None"]

#: Momentum that is kept with curvature, shaped like the parameter.
CUT_KEYS = ("gradient_momentum",)


def compare_states(found: Mapping[str, Any], expected: Spec, shape: tuple[int, ...], label: str) -> list[str]:
    """Differences between one parameter's loaded state and what the optimizer expects.

    Args:
        found: Loaded state of the parameter.
        expected: Required keys with the shape of their tensor, None for a plain number.
        shape: Shape of the parameter, which the state of a first-order rule must have.
        label: What to call the parameter.

    Returns:
        One line per difference.
    """
    lines = [f"{label}: {key} is missing" for key in expected if key not in found]
    for key, value in found.items():
        wanted: tuple[int, ...] | None
        if key in expected:
            wanted = expected[key]
        elif key in RULE_KEYS:
            wanted = shape
        else:
            lines.append(f"{label}: {key} is unknown to this optimizer")
            continue
        if wanted is None or key == "step":
            single = value.numel() == 1 if isinstance(value, Tensor) else options.is_number(value)
            if not single:
                lines.append(f"{label}: {key} is {_shown(value)}, expected a number")
        elif not isinstance(value, Tensor) or tuple(value.shape) != tuple(wanted):
            lines.append(f"{label}: {key} is {_shown(value)}, expected a tensor of shape {tuple(wanted)}")
    return lines


def compare_groups(found: list[dict[str, Any]], live: list[dict[str, Any]]) -> list[str]:
    """Differences in the number and sizes of groups, and in names where both sides have them."""
    if len(found) != len(live):
        return [f"{len(found)} parameter groups, expected {len(live)}"]
    lines = []
    for i, (theirs, ours) in enumerate(zip(found, live, strict=True)):
        if len(theirs["params"]) != len(ours["params"]):
            lines.append(f"group {i} has {len(theirs['params'])} parameters, expected {len(ours['params'])}")
        elif "param_names" in theirs and "param_names" in ours:
            pairs = zip(theirs["param_names"], ours["param_names"], strict=True)
            lines += [f"group {i}: parameter '{a}', expected '{b}'" for a, b in pairs if a != b]
    return lines


def adopt_value(key: str, value: Any, live: Any, parameter: Tensor) -> Any:
    """A private copy of a loaded value, on the right device and in the right dtype.

    Curvature keeps its own precision whatever the parameter's dtype; ``step`` is a float32 CPU tensor as in torch.

    Returns:
        The copy.
    """
    if key == "step":
        return torch.as_tensor(value, dtype=torch.float32, device="cpu").detach().reshape(()).clone()
    if isinstance(live, int) and not isinstance(live, bool):
        return int(value)
    if isinstance(value, Tensor):
        like = live if isinstance(live, Tensor) else parameter
        found = value.detach().to(device=parameter.device, dtype=like.dtype, copy=True)
        shaped = key in RULE_KEYS or key in CUT_KEYS
        return cut_like(found, parameter) if shaped and is_cut(parameter) and not is_cut(found) else found
    return value


def by_number(found: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """State by parameter; torch's distributed checkpoints load plain numbers to its number in words instead."""
    texts = {k for k in found if isinstance(k, str) and k.isdecimal() and int(k) in found}
    return {k: {**v, **found.get(str(k), {})} for k, v in found.items() if k not in texts} if texts else found


def copied(value: Any) -> Any:
    """A copy of a tensor, anything else itself."""
    return value.clone() if isinstance(value, Tensor) else value


def _shown(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
