"""Blocks in checkpoints: the content of their states, and the recovery of what a checkpoint leaves out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from secondorder.curvature.schema import Place, Schema
from secondorder.linalg.dense import full_precision
from secondorder.parameters import Group
from secondorder.preconditioners.base import SavedStates

if TYPE_CHECKING:
    from secondorder.preconditioners.layers import LayerPreconditioner


class LayerCheckpoint:
    """Describes the curvature of blocks in a state, and completes a loaded state.

    Args:
        curvature: The blocks.
    """

    common_keys: ClassVar[frozenset[str]] = frozenset()
    structural_options: ClassVar[tuple[str, ...]] = ()

    def __init__(self, curvature: LayerPreconditioner[Any]) -> None:
        self._curvature, self._plan = curvature, curvature.plan

    def covers(self, p: nn.Parameter) -> bool:
        """Return whether a block covers a parameter."""
        return p in self._plan.block_of

    def schema_of(self, p: nn.Parameter, group: Mapping[str, Any], state: Mapping[str, Any]) -> Schema:
        """Return the curvature that the state of a parameter holds, on all ranks together."""
        return self._plan.schema_of(p, group, state)

    def places_here(self, p: nn.Parameter) -> frozenset[Place]:
        """Return the places of tensors of a parameter's state that this rank has."""
        return self._plan.places_here(p)

    def placed(self) -> Sequence[tuple[int, nn.Parameter]]:
        """Return the indices of all blocks and the parameters that hold their states."""
        return [(b.index, b.owner) for b in self._plan.blocks]

    def is_a_copy(self) -> str:
        """Return what to do with a copy that has no module."""
        return self._curvature.hooks.is_a_copy()

    def settle(self, follow: Callable[[], None]) -> None:
        """Do nothing, since the state of blocks is always up to date."""

    # ------------------------------------------------------------------ load
    def misfits(self, states: SavedStates) -> list[str]:
        """Return an empty list, since keys and shapes are sufficient."""
        return []

    def while_loading(self, states: SavedStates, rebuild: Callable[[], bool]) -> AbstractContextManager[None]:
        """Return the context in which tensors that the owners of blocks will send may be missing."""
        return self._curvature.exchange.holding_back()

    def translated(self, states: SavedStates, group_of: Mapping[nn.Parameter, Group]) -> SavedStates:
        """Return saved states in the form in which this optimizer stores them."""
        return {p: self._translated(p, group_of[p], theirs) for p, theirs in states.items()}

    def _translated(self, p: nn.Parameter, group: Group, theirs: Mapping[str, Any]) -> Mapping[str, Any]:
        block, curvature = self._plan.block_of.get(p), self._curvature
        if block is not None and block.owner is p:
            found: Mapping[str, Any] = block.translated(theirs, group)
            entries = self._plan.table.entries
            used = self._plan.without_unused(entries, group, found)
            return {key: value for key, value in found.items() if key in used or key not in entries}
        known = self._plan.table.entries if block is None else ()
        return curvature.block_type.without_block(theirs, curvature.options, known)

    def expected(self, p: nn.Parameter, schema: Schema, theirs: Mapping[str, Any]) -> Schema:
        """Return the schema with which the saved state of a parameter is compared, which may lack unused curvature."""
        is_used = theirs.get("factor_updates") or theirs.get("refreshes", 1)
        if is_used or any(entry.is_curvature and key in theirs for key, entry in schema.items()):
            return schema
        return {key: entry for key, entry in schema.items() if not entry.is_curvature}

    def loaded(self, rebuild: Callable[[], bool]) -> None:
        """Compute what a checkpoint may leave out, and make a new plan for the loaded options."""
        curvature, plan, hooks = self._curvature, self._plan, self._curvature.hooks
        curvature.refresher.forget_all()
        curvature.runtime.stacks.clear()
        curvature.exchange.learned_at.clear()
        curvature.forget_step()
        before = {b.owner: dict(b.state) for b in plan.blocks}
        with curvature.exchange.holding_back():
            changed = rebuild()
        curvature.exchange.unsent |= {b.name for b in plan.blocks}
        self._find_again(before)
        if hooks.is_hooked:
            if changed:
                hooks.hook()
            hooks.discard()
            hooks.arm()

    def _find_again(self, before: Mapping[nn.Parameter, Mapping[str, Any]]) -> None:
        """Recompute the curvature that a checkpoint left out, with its states ``before`` the new plan."""
        curvature, plan = self._curvature, self._plan
        derived = {key for key, entry in plan.table.entries.items() if entry.derived}
        used = [b for b in plan.blocks if b.owner in before and b.state["factor_updates"] > 0]
        refreshes = {b: before[b.owner].get("refreshes", 0) for b in used}
        renewed = [b for b in used if any(key in derived and key not in before[b.owner] for key in b.state)]
        curvature.refresher.missing.clear()
        if plan.comm.combines:  # with the other ranks, at the next step: loading sends nothing
            for block in used:
                if block.group["checkpoint_curvature"] == "factors" and refreshes[block]:
                    block.state["refreshes"] = refreshes[block]
                    curvature.refresher.missing.add(block.name)
        elif renewed:
            with torch.no_grad(), full_precision(renewed[0].owner.device):
                ok = curvature.refresh(renewed, True, restores=True)
            for block, good in zip(renewed, ok.cpu().numpy(), strict=True):
                block.state["refreshes"] = refreshes[block] if good else 0
