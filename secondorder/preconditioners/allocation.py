"""Allocation of the state of all parameters, which follows the groups and the module."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from secondorder.comm.strategy import Unit
from secondorder.parameters import RULE_KEYS, ParameterTable
from secondorder.preconditioners.base import Preconditioner
from secondorder.runtime import Runtime
from secondorder.update import Update


class Allocator:
    """Plans the curvature for the current parameters and allocates the state of each.

    Args:
        table: The parameters.
        runtime: The step counter.
        preconditioner: The curvature.
        update: The first-order rules.
        place: Function with which the strategy assigns units to ranks.
    """

    def __init__(
        self,
        table: ParameterTable,
        runtime: Runtime,
        preconditioner: Preconditioner,
        update: Update,
        place: Callable[[Sequence[Unit]], None],
    ) -> None:
        self._table, self._runtime, self._place = table, runtime, place
        self._preconditioner, self._update = preconditioner, update

    def rebuild(self) -> bool:
        """Make a new plan and allocate missing state. State that still fits is kept.

        Returns:
            Whether the plan changed.
        """
        table, step = self._table, self._runtime.step
        if table.root is None and self._preconditioner.needs_module:  # a copy, which waits for attach()
            return False
        table.regroup()
        table.find_shards(self._preconditioner.comm)
        changed = self._preconditioner.follow(self._place) if table.group_of else False
        table.name_parameters()
        table.signature = table.layout()
        table.forget_replaced(step)
        for p in table.group_of:
            self._init(p)
        if table.first is not None:
            table.state[table.first].setdefault("global_step", step)
        self._preconditioner.rebuilt()
        return changed

    def _init(self, p: nn.Parameter) -> None:
        state = self._table.state[p]
        state.setdefault("step", torch.zeros((), dtype=torch.float32))
        if not p.requires_grad:
            return  # a frozen layer keeps its estimate until it is unfrozen
        self._preconditioner.plan.allocate(p)
        self._update.allocate(p, self._table.group_of[p])
        for key in set(state) & set(RULE_KEYS):
            state[key] = state[key].to(p.device, p.dtype)

    def synchronize(self) -> None:
        """Follow parameters that were added, frozen, unfrozen, moved, cast, or whose state was removed."""
        is_whole = all(map(self._table.state.get, self._table.group_of))
        if not is_whole or self._table.layout() != self._table.signature:
            self._preconditioner.hooks.replanned(self.rebuild())

    def follow_changed(self) -> None:
        """Follow parameters that a trainer has replaced, and curvature that was turned on, since the last step."""
        if self._table.has_changed:
            self.synchronize()

    def allocate_rules(self) -> None:
        """Allocate the state of the first-order rules, which may depend on options that have changed."""
        if self._table.signature:  # a copy without its module does not know its rules
            for p, group in self._table.group_of.items():
                if p.requires_grad:
                    self._update.allocate(p, group)
