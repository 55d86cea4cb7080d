"""Blocks with rows of examples in checkpoints, and the state of the policy that chooses their mode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from secondorder.curvature.mode import SWITCH
from secondorder.curvature.schema import Schema, shaped
from secondorder.preconditioners.base import SavedStates
from secondorder.preconditioners.layer_checkpoint import LayerCheckpoint

if TYPE_CHECKING:
    from secondorder.preconditioners.row_plan import RowPlan


class RowCheckpoint(LayerCheckpoint):
    """Describes rows and the switching policy in a state. The state of the first parameter contains the policy's."""

    common_keys: ClassVar[frozenset[str]] = frozenset(SWITCH)
    _plan: RowPlan

    def settle(self, follow: Callable[[], None]) -> None:
        """Bring the state of the policy up to date if the state of the first parameter contains it."""
        table = self._plan.table
        if table.first is not None and "switch_state" in table.state[table.first]:
            table.state[table.first]["switch_state"] = self._plan.modes.vector()

    def expected(self, p: nn.Parameter, schema: Schema, theirs: Mapping[str, Any]) -> Schema:
        """Return the schema with the state of the policy if the saved state of the first parameter contains it."""
        if p is self._plan.table.first and "switch_state" in theirs:
            return schema | shaped(SWITCH, {"switch_state": self._plan.modes.vector()})
        return schema

    def misfits(self, states: SavedStates) -> list[str]:
        """Return an error if the saved state belongs to another policy."""
        table, modes = self._plan.table, self._plan.modes
        if table.first is None or modes.accepts(states.get(table.first, {}).get("switch_state")):
            return []
        todo = "build the optimizer with the same policy as mode=, or delete that key to start the policy again"
        name = table.names[table.first]
        return [f"parameter '{name}': switch_state belongs to another policy than {modes.policy!r}: {todo}"]

    def loaded(self, rebuild: Callable[[], bool]) -> None:
        """Follow the loaded state of the policy, and compute what a checkpoint may leave out."""
        table, plan = self._plan.table, self._plan
        saved = None if table.first is None else table.state[table.first].get("switch_state")
        plan.modes.load(saved, plan.runtime.step)
        for block in plan.blocks:  # only the loaded state determines whether a block has rows or factors
            plan.shapes.pop(block.owner, None)
        super().loaded(rebuild)
