"""The plan of the blocks: the layers that they cover, their ranks, and the content of their states."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic

import torch
from torch import Tensor, nn

from secondorder.comm.layout import is_cut
from secondorder.comm.strategy import Unit
from secondorder.curvature.block import BlockT
from secondorder.curvature.layer import Layer, LayerOptions
from secondorder.curvature.layer_plan import plan_layers
from secondorder.curvature.schema import Place, Schema, nbytes, shape_of, stored_at
from secondorder.curvature.work import flops_of_direction
from secondorder.curvature.wrappers import clean_name, unwrap
from secondorder.preconditioners.base import CurvaturePlan

if TYPE_CHECKING:
    from secondorder.parallel.exchange import StatisticsExchange
    from secondorder.preconditioners.parts import Setting


class BlockPlan(CurvaturePlan, Generic[BlockT]):
    """Plans blocks over the layers of a module and allocates their state.

    Args:
        setting: The parts of the optimizer that the blocks use.
        block_type: The class of the blocks.
        interval: Name of the option with the number of steps between two refreshes.
        exchange: The exchange of the blocks with other ranks.

    Attributes:
        blocks: The blocks, in the order of their indices.
        block_of: The block of each covered parameter.
        shapes: Shapes of the complete curvature of each parameter, on whichever rank it is.
    """

    def __init__(self, setting: Setting, block_type: type[BlockT], interval: str, exchange: StatisticsExchange) -> None:
        self.options, self.comm, self.table, self.runtime = setting.layers, setting.comm, setting.table, setting.runtime
        self.interval, self._exchange = interval, exchange
        self._new_block = partial(block_type, runtime=setting.runtime, options=setting.layers, fisher=setting.fisher)
        self.blocks: list[BlockT] = []
        self.block_of: dict[nn.Parameter, BlockT] = {}
        self.shapes: dict[nn.Parameter, dict[str, tuple[int, ...] | None]] = {}

    # ------------------------------------------------------------------ blocks
    def follow(self, place: Callable[[Sequence[Unit]], None]) -> bool:
        """Find the blocks for the current parameters.

        Hooks of equal blocks are kept, because a compiled model would not see new ones.

        Args:
            place: Function with which the strategy assigns units to ranks, called if the blocks have changed.

        Returns:
            Whether the blocks changed.
        """
        root, group_of = self.table.root, self.table.group_of
        assert root is not None
        plan = plan_layers(root, [p for p in group_of if p.requires_grad], self.options)
        _refuse_tensor_parallel(root, plan.layers)
        changed = [layer.signature for layer in plan.layers] != [b.layer.signature for b in self.blocks]
        if changed:
            self.blocks = [self._new_block(layer, i, group_of[layer.owner]) for i, layer in enumerate(plan.layers)]
            self.block_of = {p: b for b in self.blocks for p in b.params}
        for block in self.blocks:
            block.group = group_of[block.owner]
        if changed:
            place(self.units())
        self.runtime.blocks = len(self.blocks)
        self.shapes = {p: shapes for p, shapes in self.shapes.items() if p in group_of}
        inside = set(root.parameters())
        reasons = plan.reasons | {p: "frozen" for p in group_of if not p.requires_grad}
        reasons |= {p: "not a parameter of the hooked module" for p in group_of if p not in inside}
        self.table.reasons, self.table.skipped_by_user = reasons, plan.skipped_by_user
        return changed

    @property
    def by_name(self) -> dict[str, BlockT]:
        """Blocks by module name."""
        return {b.name: b for b in self.blocks}

    def reported(self) -> Iterator[tuple[str, Sequence[nn.Parameter]]]:
        """Return the name and the parameters of each block."""
        return ((b.name, b.params) for b in self.blocks)

    def clear(self, params: Collection[nn.Parameter]) -> None:
        """Discard the blocks of another module."""
        self.blocks = []

    def units(self) -> list[Unit]:
        """Return the units of all blocks for a strategy."""
        return [self.unit(block) for block in self.blocks]

    def unit(self, block: BlockT) -> Unit:
        """Return the unit of a block for a strategy."""
        adapter, schema = block.adapter, self.live_schema(block)
        a, g, blocks = adapter.n_a, adapter.n_g, adapter.groups
        flat = [a if adapter.one_hot else a**3, g**3]
        products = 2.0 * blocks * (a * a * g * (not adapter.one_hot) + a * g * g)
        return Unit(
            block.name,
            f"{blocks}×{g}×{a} {block.layer.kind} " + ", ".join(f"{k} {entry.shape}" for k, entry in schema.items()),
            refresh_flops=float(blocks * sum(flat)),
            step_flops=self.is_on(block.group) * products + flops_of_direction(block, {}),
            nbytes=sum(nbytes(schema).values()),
            interval=int(block.group[self.interval]) or 100,  # curvature that is off may be turned on later
            everywhere=block.uses_estimate,
        )

    # ------------------------------------------------------------------ what the states hold
    def is_on(self, group: Mapping[str, Any]) -> bool:
        """Whether the blocks of a group have an interval of refreshes, and precondition."""
        return bool(group[self.interval])

    def schema(self, block: BlockT, group: Mapping[str, Any], state: Mapping[str, Any]) -> Schema:
        """Return the schema of the state of a block, which may be a loaded one."""
        return self.without_unused(block.schema(group, state), group, state)

    def without_unused(self, entries: Schema, group: Mapping[str, Any], state: Mapping[str, Any]) -> Schema:
        """Return entries without the curvature of a block that has been off from the beginning and needs none."""
        # This depends only on options and counters, which are the same on all ranks.
        if self.is_on(group) or state.get("factor_updates") or state.get("refreshes"):
            return entries
        return {key: entry for key, entry in entries.items() if not entry.is_curvature}

    def live_schema(self, block: BlockT) -> Schema:
        """Return the schema of the current state of a block."""
        return self.schema(block, block.group, self.table.state.get(block.owner, {}))

    def schema_of(self, p: nn.Parameter, group: Mapping[str, Any], state: Mapping[str, Any]) -> Schema:
        """Return the schema of the curvature in the state of a parameter with a group and a state."""
        block = self.block_of.get(p)
        if block is None:
            return {}
        found = self.schema(block, group, state) if block.owner is p else {}
        return {**found, **block.momentum_schema(p, group)}

    def places_here(self, p: nn.Parameter) -> frozenset[Place]:
        """Return the places of tensors of a parameter's state that this rank has."""
        return self._exchange.places_here(self.block_of.get(p))

    def allocate(self, p: nn.Parameter) -> None:
        """Allocate the curvature in the state of a parameter. Existing tensors that still fit are kept."""
        state, before, entries = self.table.state[p], self.shapes.get(p, {}), self.table.entries
        schema = self.schema_of(p, self.table.group_of[p], state)
        wanted = stored_at(schema, self.places_here(p))
        self.shapes[p] = {k: entry.shape for k, entry in schema.items()}
        entries.update({k: entry._replace(like=0) for k, entry in schema.items() if k not in entries})
        stale = any(k in state and shape_of(state[k]) != entry.shape for k, entry in wanted.items())
        # What another rank holds may have changed too: what is counted of it must not differ from rank to rank.
        stale |= any(k in before and k not in wanted and before[k] != shape for k, shape in self.shapes[p].items())
        for key in [k for k in state if k in entries and (k not in wanted or stale)]:
            del state[key]
        for key, entry in schema.items():
            value = entry.like
            if key not in wanted:
                if before and key not in before and entry.derived:
                    state["refreshes"] = 0
            elif not isinstance(value, Tensor):
                state.setdefault(key, value)
            elif key not in state:
                like = p if is_cut(p) and entry.kind == "momentum" else value
                state[key] = torch.zeros_like(like, dtype=value.dtype, device=p.device, requires_grad=False)
                if entry.derived:
                    state["refreshes"] = 0  # it does not precondition until the next refresh, which is due
            else:  # the model was moved or cast
                state[key] = state[key].to(p.device, value.dtype)

    def allocate_common(self) -> None:
        """Allocate the state that belongs to no single block."""

    # ------------------------------------------------------------------ facts and copies
    def borrow(self, other: BlockPlan[BlockT]) -> None:
        """Plan the blocks of another plan, with states of this one."""
        self.blocks = [copy(block) for block in other.blocks]
        for block in self.blocks:
            block.runtime = self.runtime
        self.block_of = {p: block for block in self.blocks for p in block.params}

    def facts(self) -> dict[str, list[str]]:
        """Return the settings that must be equal on all ranks, as text."""
        chosen = {f.name: getattr(self.options, f.name) for f in fields(LayerOptions) if f.name != "skip_layers"}
        if callable(self.options.batch.input):
            chosen["batch"] = replace(self.options.batch, input="a function")  # its representation has an address
        return {"options of all layers": [f"{k}={v!r}" for k, v in chosen.items()]}

    def portable_rules(self) -> list[Any]:
        """Return the rules for layers to skip, with names instead of modules."""
        found: list[Any] = list(self.options.skip)
        for i, rule in enumerate(found):
            if isinstance(rule, nn.Module):
                assert self.table.root is not None
                named = self.table.root.named_modules()
                found[i] = next(clean_name(name) for name, m in named if m is unwrap(rule))
        return found


def _refuse_tensor_parallel(root: nn.Module, layers: Sequence[Layer]) -> None:
    """Reject tensor-parallel layers, since their hooks see only parts of the rows of the layer.

    Raises:
        NotImplementedError: Naming them.
    """
    cut = {p for layer in layers for p in layer.params if is_cut(p)}
    if not cut:
        return
    sharded = {p for m in root.modules() if _is_fully_sharded(m) for p in m.parameters()}
    found = [
        layer.label
        for layer in layers
        if any(getattr(tap.module, "_distribute_module_applied", False) for tap in layer.taps)
        or any(p in cut and p not in sharded for p in layer.params)
    ]
    if found:
        raise NotImplementedError(
            f"layers {', '.join(found)} are tensor-parallel: each rank sees only a part of their rows, from which the "
            "curvature of the layer cannot be computed. Leave them out with skip_layers=[...], or use a window method, "
            "such as MFAC"
        )


def _is_fully_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was applied to a module. Compare names, since not every build of torch has it."""
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)
