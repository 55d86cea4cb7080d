"""Checkpoints of second-order optimizers: what a state must hold, checked whole before anything is changed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from secondorder import options
from secondorder.lifecycle import RULE_KEYS, Group, Lifecycle, State, shape_of

Spec = dict[str, "tuple[int, ...] | None"]


class Checkpointing(Lifecycle):
    """``state_dict`` and ``load_state_dict``: by parameter, in full precision, all or nothing."""

    #: Options that decide how much is allocated: those of the optimizer stay, whatever a checkpoint says.
    _structural: ClassVar[tuple[str, ...]] = ()

    def _require_loadable(self) -> None:
        """Refuse to load into an optimizer that cannot judge a state yet."""

    @abstractmethod
    def _finish_load(self) -> None:
        """Complete what a checkpoint may leave out, and follow the loaded options."""

    def state_dict(self) -> dict[str, Any]:
        """State by parameter and group options, as ``torch.optim``; curvature as ``checkpoint_curvature`` says."""
        for p, group in self._group.items():
            if p.requires_grad and self._signature:  # a copy without its module does not know its rules
                self._init_rule(p, group)
        packed = super().state_dict()
        for group in packed["param_groups"]:
            if group["checkpoint_curvature"] != "all":
                for i in group["params"]:
                    found = packed["state"].get(i, {})
                    packed["state"][i] = {k: v for k, v in found.items() if not self._may_lack(k, group)}
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; everything is checked before anything is changed, and every tensor is copied.

        Raises:
            ValueError: If the dict does not fit, with the list of what differs.
            RuntimeError: If this is a copy of a layer method that was not attached to a module yet.
        """
        self._require_loadable()
        state_dict = dict(state_dict)
        for pre in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre(self, state_dict)
            if replaced is not None:
                state_dict = replaced
        groups = [{**self._group_defaults(live), **given} for live, given in self._paired(state_dict)]
        loaded = self._checked_state(state_dict["state"], groups)
        for live, given in zip(self.param_groups, groups, strict=True):
            kept = {"params": live["params"], **{key: live[key] for key in self._structural}}
            if "param_names" in live:
                kept["param_names"] = live["param_names"]
            live.clear()
            live.update({k: _copied(v) for k, v in given.items() if k != "param_names"}, **kept)
        self._install(loaded)
        self._t = 0 if self._first is None else int(self.state[self._first].get("global_step", 0))
        self._finish_load()
        for post in self._optimizer_load_state_dict_post_hooks.values():
            post(self)

    def _paired(self, state_dict: dict[str, Any]) -> Iterator[tuple[Group, Group]]:
        if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= set(state_dict):
            raise ValueError("not an optimizer state_dict: it needs 'state' and 'param_groups'")
        self._refuse(compare_groups(state_dict["param_groups"], self.param_groups))
        return zip(self.param_groups, state_dict["param_groups"], strict=True)

    def _group_defaults(self, live: Group) -> Group:
        return {**self.defaults, "fallback_base_lr": live["fallback_base_lr"]}

    def _checked_state(self, found: Mapping[Any, Any], groups: list[Group]) -> dict[nn.Parameter, dict[str, Any]]:
        """The loaded state by parameter, copied; nothing of the optimizer is touched."""
        for group in groups:
            options.validate(group, {**options.COMMON, **self.checks})
        lines: list[str] = []
        loaded: dict[nn.Parameter, dict[str, Any]] = {}
        for live, given in zip(self.param_groups, groups, strict=True):
            for p, i in zip(live["params"], given["params"], strict=True):
                # torch's flattened checkpoints put an empty dict where a key was left out.
                theirs = {k: v for k, v in found.get(i, {}).items() if not (isinstance(v, dict) and not v)}
                spec = self._expected_state(p, given, theirs)
                required = {k: v for k, v in spec.items() if not self._may_lack(k, given)}
                shapes = {k: shape_of(v) for k, v in required.items()}
                shapes.update({k: shape_of(v) for k, v in spec.items() if k in theirs})
                lines += compare_states(theirs, shapes, tuple(p.shape), f"parameter '{self._names[p]}'")
                if not lines:
                    loaded[p] = self._private(p, theirs, spec)
        self._refuse(lines)
        return loaded

    def _private(self, p: nn.Parameter, theirs: Mapping[str, Any], spec: State) -> dict[str, Any]:
        """Copies of one parameter's loaded values."""
        return {k: adopt_value(k, v, spec.get(k), p) for k, v in theirs.items()}

    def _install(self, loaded: Mapping[nn.Parameter, dict[str, Any]]) -> None:
        """Make checked values the state."""
        for p, found in loaded.items():
            self.state[p] = found

    def _expected_state(self, p: nn.Parameter, group: Group, theirs: Mapping[str, Any]) -> State:
        """What the state of a parameter should be; ``theirs`` is what a checkpoint has for it."""
        expected: State = {"step": torch.zeros(())}
        if p is self._first:
            expected["global_step"] = 0
        expected.update(self._curvature_state(p, group))
        if p.requires_grad:
            expected.update(dict.fromkeys(self._rule_keys(p, group), p))
        else:
            expected.update({k: v for k, v in self.state[p].items() if k in self.kinds})
        return expected

    def _may_lack(self, key: str, group: Mapping[str, Any]) -> bool:
        kind, kept = self.kinds.get(key), group["checkpoint_curvature"]
        return kind is not None and (kept == "none" or (kept == "factors" and kind == "second_order"))

    def _refuse(self, lines: list[str]) -> None:
        if lines:
            shown = "\n  ".join(lines[:20])
            more = f"\n  … and {len(lines) - 20} more" if len(lines) > 20 else ""
            raise ValueError(f"this state_dict does not fit the optimizer; nothing was loaded:\n  {shown}{more}")


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
        return value.detach().to(device=parameter.device, dtype=like.dtype, copy=True)
    return value


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _shown(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
