"""Compares the content of a checkpoint with the expected content, and adopts it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from secondorder import options
from secondorder.comm.layout import cut_like, is_cut
from secondorder.curvature.schema import Place, Schema
from secondorder.curvature.wrappers import clean_name
from secondorder.parameters import RULE_KEYS, Group

Spec = dict[str, "tuple[int, ...] | None"]

#: Momentum that is kept with curvature, shaped like the parameter.
CUT_KEYS = ("gradient_momentum",)
#: Places whose tensors are on the same ranks: of what estimates, and of what preconditions.
_TOGETHER = ({Place.ESTIMATE}, {Place.CURVATURE, Place.MEASURED})


def compare_states(found: Mapping[str, Any], expected: Spec, shape: tuple[int, ...], label: str) -> list[str]:
    """Return a line for each difference between one parameter's loaded state and what the optimizer expects.

    Args:
        found: Loaded state of the parameter.
        expected: Required keys with the shape of their tensor, None for a plain number.
        shape: Shape of the parameter, which the state of a first-order rule must have.
        label: Name of the parameter in messages.
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


def absent(theirs: Mapping[str, Any], required: Schema) -> list[str]:
    """Keys of the tensors that a rank without them left out: all of a sort, while the numbers are there."""
    curvature = {k: entry for k, entry in required.items() if not entry.always}
    numbers = [k for k, entry in curvature.items() if not isinstance(entry.like, Tensor)]
    if not numbers or any(k not in theirs for k in numbers):
        return []
    large = {k: entry.place for k, entry in curvature.items() if k not in numbers and entry.kind != "buffers"}
    sorts = [[k for k, place in large.items() if place in places] for places in _TOGETHER]
    found = [key for keys in sorts if theirs.keys().isdisjoint(keys) for key in keys]
    if not found:
        return []
    return [k for k, entry in curvature.items() if k not in theirs and (k in found or entry.kind == "buffers")]


def was_never_trained(theirs: Mapping[str, Any], common_keys: frozenset[str]) -> bool:
    """Whether a saved state is that of a parameter that was frozen from the beginning.

    Args:
        theirs: The saved state.
        common_keys: Keys of the values that the state of one parameter holds for others, too.

    Returns:
        The answer.
    """
    step = theirs.get("step")
    is_zero = isinstance(step, (int, float, Tensor)) and not bool(torch.as_tensor(step).any())
    return is_zero and theirs.keys() <= {"step", "global_step", *common_keys}


def matched_by_name(state_dict: dict[str, Any], ours: Sequence[list[str] | None]) -> dict[str, Any]:
    """Return a state whose groups list their parameters in the order of an optimizer, where both sides have names.

    It stays as it is where names, given as ``ours`` by group, are not known, are the same, or do not fit.
    """
    given: list[Group] = state_dict["param_groups"]
    theirs = [group.get("param_names") for group in given]
    if None in ours or None in theirs or len(ours) != len(given):
        return state_dict
    by_names = {frozenset(map(clean_name, cast("list[str]", names))): g for names, g in zip(theirs, given, strict=True)}
    wanted = [list(map(clean_name, cast("list[str]", names))) for names in ours]
    if any(frozenset(names) not in by_names for names in wanted) or len(by_names) != len(given):
        return state_dict  # it is rejected, with a list of what differs
    groups = []
    for live, names in zip(ours, wanted, strict=True):
        group = by_names[frozenset(names)]
        numbers = dict(zip(map(clean_name, group["param_names"]), group["params"], strict=True))
        groups.append({**group, "params": [numbers[name] for name in names], "param_names": live})
    before, after = ([i for g in some for i in g["params"]] for some in (given, groups))
    state = dict(state_dict["state"])
    if before and before[0] != after[0] and before[0] in state and after[0] in state:
        common = {k: v for k, v in state[before[0]].items() if k in ("global_step", "switch_state")}
        state[before[0]] = {k: v for k, v in state[before[0]].items() if k not in common}
        state[after[0]] = {**state[after[0]], **common}
    return {**state_dict, "state": state, "param_groups": groups}


def adopt_value(key: str, value: Any, live: Any, parameter: Tensor) -> Any:
    """Return a private copy of a loaded value, on the right device and in the right dtype.

    Curvature keeps its own precision whatever the parameter's dtype; ``step`` is a float32 CPU tensor as in torch.
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
    """State by parameter; torch's distributed checkpoints load plain numbers to its number as text instead."""
    texts = {k for k in found if isinstance(k, str) and k.isdecimal() and int(k) in found}
    return {k: {**v, **found.get(str(k), {})} for k, v in found.items() if k not in texts} if texts else found


def copied(value: Any) -> Any:
    """A copy of a tensor, anything else itself."""
    return value.clone() if isinstance(value, Tensor) else value


def _shown(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
