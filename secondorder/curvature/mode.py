"""The mode of groups with ``mode="auto"``, which a policy switches during training."""

from __future__ import annotations

import copy
import logging
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from secondorder import options
from secondorder.curvature.schema import Entry, Place, Schema
from secondorder.switching import MODES, Always, SwitchPolicy

log: logging.Logger = logging.getLogger("secondorder")

#: Keys of the policy in the state of the first parameter.
SWITCH: Schema = {"switch_state": Entry(0, "buffers", Place.OWN, always=True)}
_ANSWERS = ("auto", *MODES)


class ModeSwitch:
    """A policy, the mode that it has chosen, and the history of its choices.

    Args:
        policy: The policy, which is copied.
        method: Name of the method in log messages.

    Attributes:
        mode: The last mode that the policy chose; None before its first choice.
        history: The step of each change, and the mode since then.
    """

    def __init__(self, policy: SwitchPolicy, method: str) -> None:
        # A policy counts the steps of one optimizer, so each optimizer has its own.
        self.policy, self._at_start = copy.deepcopy(policy), copy.deepcopy(policy)
        self.method = method
        self.mode: str | None = None
        self.history: tuple[tuple[int, str], ...] = ()

    def mode_in(self, group: Mapping[str, Any]) -> str:
        """The mode that a group has now, or the mode that it will probably have."""
        mode: str = group["mode"]
        if mode != "auto":
            return mode
        return self.mode or (self.policy.mode if isinstance(self.policy, Always) else "kid")

    def fixed(self) -> ModeSwitch:
        """Return a switch that stays in the current mode."""
        found = ModeSwitch(Always(self.mode_in({"mode": "auto"})), self.method)
        found.mode = found.mode_in({"mode": "auto"})
        return found

    def decide(self, step: int) -> None:
        """Ask the policy for the mode of a refresh."""
        found = self.policy.decide(step)
        options.choice(*MODES)(f"the answer of {self.policy!r}", found)
        if found == self.mode:
            return
        if not self.history or self.history[-1][1] != found:
            self.history = (*self.history, (step, found))
        level = logging.DEBUG if self.mode is None else logging.INFO  # the first mode is not a change
        log.log(level, "%s: step %d: %s from now on (%s)", self.method, step, found.upper(), self.policy.reason)
        self.mode = found

    # ------------------------------------------------------------------ state
    def vector(self) -> Tensor:
        """The state of the policy, the mode that it has chosen, and a number for its class."""
        numbers = [*self.policy.state_dict().values(), float(_ANSWERS.index(self.mode or "auto"))]
        return torch.tensor([*numbers, _kind_of(self.policy)], dtype=torch.float64)

    def accepts(self, vector: Any) -> bool:
        """Whether a loaded value may be the state of a policy of this class."""
        return not (isinstance(vector, Tensor) and vector.numel()) or float(vector.flatten()[-1]) == _kind_of(
            self.policy
        )

    def load(self, vector: Tensor | None, step: int) -> None:
        """Continue from a loaded state at some step; with None, start again."""
        self.policy, self.mode = copy.deepcopy(self._at_start), None
        self.history = tuple((at, mode) for at, mode in self.history if at < step)
        if vector is not None:
            numbers = vector.tolist()
            self.policy.load_state_dict(dict(zip(self.policy.state_dict(), numbers, strict=False)))
            mode = dict(enumerate(_ANSWERS)).get(int(numbers[-2]), "auto")
            self.mode = None if mode == "auto" else mode


def _kind_of(policy: SwitchPolicy) -> float:
    """A number that distinguishes policies of different classes."""
    return 1.0 * zlib.crc32(f"{type(policy).__module__}.{type(policy).__qualname__}".encode())
