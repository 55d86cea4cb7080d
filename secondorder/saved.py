"""What a checkpoint brings: compared with what is expected, adopted, and who asks for one or gives it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from secondorder import options
from secondorder.comm.resharding import cut_like, is_cut
from secondorder.lifecycle import RULE_KEYS

Spec = dict[str, "tuple[int, ...] | None"]

#: Where torch collects and distributes the state of optimizers.
_CHECKPOINTS = "torch.distributed.checkpoint.state_dict"
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


def is_saved_in_parts() -> bool:
    """Whether torch's distributed checkpoints ask, into which every rank writes its part."""
    frame = sys._getframe(1).f_back
    while frame is not None:
        if frame.f_globals.get("__name__") == _CHECKPOINTS and "info" in frame.f_locals:
            return getattr(frame.f_locals["info"], "full_state_dict", True) is False
        frame = frame.f_back
    return False


def filled_in_by_torch() -> set[int]:
    """Ids of the tensors that ``set_optimizer_state_dict``, if it calls, has not from the file but from the optimizer.

    With ``full_state_dict=True`` it takes what a file lacks from the state of the optimizer that loads it, and drops
    the mark of a partial state: the file of one rank of several would be taken for whole.

    Returns:
        The ids, none where something else calls.
    """
    frame = sys._getframe(1).f_back
    while frame is not None:
        if frame.f_globals.get("__name__") == _CHECKPOINTS and "flatten_local_osd" in frame.f_locals:
            own = frame.f_locals.get("local_state_dict", {}).get("state", {})
            tensors = [v for state in own.values() for v in state.values() if isinstance(v, Tensor)]
            return {id(v) for v in tensors if not is_cut(v)}  # into those that are cut, it copies the file's
        frame = frame.f_back
    return set()


def by_number(found: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """State by parameter; torch's distributed checkpoints load plain numbers to its number in words instead."""
    texts = {k for k in found if isinstance(k, str) and k.isdecimal() and int(k) in found}
    return {k: {**v, **found.get(str(k), {})} for k, v in found.items() if k not in texts} if texts else found


def copied(value: Any) -> Any:
    """A copy of a tensor, anything else itself."""
    return value.clone() if isinstance(value, Tensor) else value


def _shown(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
