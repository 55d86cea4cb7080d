"""Modes that a policy switches during training: what it hears of each step, and what a checkpoint keeps of it."""

from __future__ import annotations

import copy
import logging
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from secondorder import options
from secondorder.curvature.block import Block
from secondorder.curvature.schema import Entry, Place, Schema, shaped
from secondorder.lifecycle import Directions, Group
from secondorder.plan.dry_run_rows import RehearsedRows
from secondorder.preconditioners.rows import GatheringOptimizer
from secondorder.switching import MODES, Always, SwitchPolicy

log: logging.Logger = logging.getLogger("secondorder")

_ANSWERS = ("auto", *MODES)


class SwitchedOptimizer(GatheringOptimizer):
    """Base of the methods with a mode per group, ``"auto"`` being what :attr:`switch` says."""

    understudy = RehearsedRows
    catalog: ClassVar[Schema] = {
        **GatheringOptimizer.catalog,
        "switch_state": Entry(0, "buffers", Place.OWN, always=True),
    }
    allocating = ("mode",)
    _common: ClassVar[frozenset[str]] = GatheringOptimizer._common | {"switch_state"}

    def _begin_switch(self, policy: SwitchPolicy) -> None:
        self.switch, self._untold = policy, copy.deepcopy(policy)
        #: What "auto" means now, and when that changed.
        self._auto_mode: str | None = None
        self._switches: list[tuple[int, str]] = []

    def _facts(self) -> dict[str, list[str]]:
        return {**super()._facts(), "batch size and switch": [str(self._batch_size), type(self.switch).__name__]}

    # ------------------------------------------------------------------ which mode
    def _is_auto(self) -> bool:
        return any(group["mode"] == "auto" for group in self.param_groups)

    def _mode_in(self, group: Mapping[str, Any]) -> str:
        """The mode that a group has now, or will probably have."""
        mode: str = group["mode"]
        if mode != "auto":
            return mode
        return self._auto_mode or (self.switch.mode if isinstance(self.switch, Always) else "kid")

    def _decide(self) -> None:
        """Ask the policy for the mode of this refresh."""
        found = self.switch.decide(self._t)
        options.choice(*MODES)(f"the answer of {self.switch!r}", found)
        if found != self._auto_mode:
            if not self._switches or self._switches[-1][1] != found:
                self._switches.append((self._t, found))
            level = logging.DEBUG if self._auto_mode is None else logging.INFO  # to begin with one is no news
            log.log(
                level,
                "%s: step %d: %s from now on (%s)",
                type(self).__name__,
                self._t,
                found.upper(),
                self.switch.reason,
            )
            self._auto_mode = found

    def begin_rows(self, blocks: Sequence[Block]) -> None:
        """Ask the policy, if a block does what it says."""
        if any(block.group["mode"] == "auto" for block in blocks):
            self._decide()

    def interpolates(self, block: Block) -> bool:
        """Whether the mode of a block is KID."""
        return self._mode_in(block.group) == "kid"

    # ------------------------------------------------------------------ what the policy hears
    def hear_probe(self, error: Tensor) -> None:
        """Tell the policy how far KIS is from the exact direction."""
        self.switch.probe(error)

    def _inspect(self, gradients: Directions) -> tuple[bool, Tensor | None]:
        ok, gate = super()._inspect(gradients)
        if self._is_auto():
            lrs = [_number(g["lr"]) for g in self.param_groups] if self.switch.needs_rates else []
            self.switch.observe(self._t, lrs, self._norm(gradients) if self.switch.needs_gradient_norm else None)
        return ok, gate

    def _norm(self, gradients: Directions) -> Tensor | None:
        """Norm of the gradient of all covered parameters."""
        covered = [g for p, g in gradients.items() if self._covers(p)]
        if not covered:
            return None
        double = any(g.dtype in (torch.float64, torch.complex128) for g in covered)
        dtype = torch.float64 if double else torch.float32  # a norm in half precision may overflow
        norms = torch._foreach_norm([torch.view_as_real(g) if g.is_complex() else g for g in covered], 2, dtype)
        total: Tensor = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]))
        return total

    # ------------------------------------------------------------------ state
    def _told(self) -> Tensor:
        """What the switching policy remembers, the mode that it chose, and a number for its class."""
        numbers = [*self.switch.state_dict().values(), float(_ANSWERS.index(self._auto_mode or "auto"))]
        return torch.tensor([*numbers, _kind_of(self.switch)], dtype=torch.float64)

    def _rebuild(self) -> bool:
        changed = super()._rebuild()
        if self._first is not None:
            self.state[self._first].pop("switch_state", None)
            if self._is_auto() or self._auto_mode is not None:
                self.state[self._first]["switch_state"] = self._told()
        return changed

    def state_dict(self) -> dict[str, Any]:
        """See the base class; with the state of the first parameter goes what the switching policy remembers."""
        if self._first is not None and "switch_state" in self.state[self._first]:
            self.state[self._first]["switch_state"] = self._told()
        return super().state_dict()

    def _checked_state(self, found: Mapping[Any, Any], groups: list[Group]) -> dict[nn.Parameter, dict[str, Any]]:
        first = next((i for group in groups for i in group["params"]), None)
        told = found.get(first, {}).get("switch_state")
        if isinstance(told, Tensor) and told.numel() and float(told.flatten()[-1]) != _kind_of(self.switch):
            name = self._names[self._first] if self._first is not None else ""
            mend = "build the optimizer with the same switch=, or delete that key, and the policy starts anew"
            self._refuse([f"parameter '{name}': switch_state is of another policy than {self.switch!r}: {mend}"])
        return super()._checked_state(found, groups)

    def _expected_state(self, p: nn.Parameter, group: Group, theirs: Mapping[str, Any]) -> Schema:
        expected = super()._expected_state(p, group, theirs)
        if p is self._first and "switch_state" in theirs:
            expected |= shaped(self.catalog, {"switch_state": self._told()})
        return expected

    def _finish_load(self) -> None:
        told = self.state[self._first].get("switch_state") if self._first is not None else None
        self.switch, self._auto_mode = copy.deepcopy(self._untold), None
        self._switches = [(step, mode) for step, mode in self._switches if step < self._t]
        if told is not None:
            numbers = told.tolist()
            self.switch.load_state_dict(dict(zip(self.switch.state_dict(), numbers, strict=False)))
            mode = dict(enumerate(_ANSWERS)).get(int(numbers[-2]), "auto")
            self._auto_mode = None if mode == "auto" else mode
        super()._finish_load()

    # ------------------------------------------------------------------ copies, and what it tells
    def _kept_by_copies(self) -> dict[str, Any]:
        kept = {"switch": self.switch, "untold": self._untold, "auto_mode": self._auto_mode, "switches": self._switches}
        return {**super()._kept_by_copies(), **kept}

    def _restore(self, kept: dict[str, Any]) -> None:
        super()._restore(kept)
        self.switch, self._untold = kept["switch"], kept["untold"]
        self._auto_mode, self._switches = kept["auto_mode"], list(kept["switches"])

    def memory_usage(self) -> dict[str, int]:
        """Bytes that the optimizer holds on this rank, by kind, with ``"total"``."""
        usage = super().memory_usage()
        usage["buffers"] += self.switch.nbytes
        usage["total"] += self.switch.nbytes
        return usage


def _number(lr: Any) -> float:
    """A learning rate as a number; one on a device is waited for."""
    return float(lr.cpu().numpy()) if isinstance(lr, Tensor) else float(lr)


def _kind_of(policy: SwitchPolicy) -> float:
    """A number that tells policies of different classes apart."""
    return 1.0 * zlib.crc32(f"{type(policy).__module__}.{type(policy).__qualname__}".encode())
