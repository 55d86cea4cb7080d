"""The blocks of a module: which layers they cover, their hooks, and their state."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from secondorder.capture.capture import Capture
from secondorder.capture.layers.parts import watched_attention
from secondorder.capture.loss_scale import LossScale
from secondorder.capture.sites import Site, Statistic
from secondorder.comm import CommStrategy, Unit
from secondorder.comm.layout import is_cut
from secondorder.curvature.block import Block
from secondorder.curvature.layer import (
    Layer,
    LayerOptions,
    clean_name,
    forwarded,
    plan_layers,
    unwrap,
)
from secondorder.curvature.refresh import Refresher
from secondorder.curvature.schema import Place, Schema, held, nbytes, shape_of
from secondorder.options import FisherOptions
from secondorder.parallel.exchange import StatisticsExchange
from secondorder.parameters import Group, ParameterTable
from secondorder.preconditioners.base import Preconditioner, StateForm
from secondorder.runtime import Clock, Runtime


@dataclass(frozen=True)
class Setting:
    """What the preconditioner of a layer method shares with the optimizer that owns it.

    Attributes:
        method: Name of the optimizer's class, for messages.
        comm: Communication strategy.
        table: The parameters.
        runtime: Step counter, seeds and temporary memory.
        loss_scale: The loss scale of float16 training.
        layers: What is chosen for all layers.
        fisher: Which Fisher is estimated.
        before_forward: Called before each forward pass of the module, if the optimizer still exists.
    """

    method: str
    comm: CommStrategy
    table: ParameterTable
    runtime: Runtime
    loss_scale: LossScale
    layers: LayerOptions
    fisher: FisherOptions
    before_forward: weakref.WeakMethod[Callable[[], None]]


class Capturing(Preconditioner):
    """Plans blocks over the layers of a module, and has captured what the coming step will use.

    Args:
        setting: What it shares with the optimizer.
    """

    form: ClassVar[StateForm] = StateForm()
    #: Entries of the states of blocks, by key, as far as they are the same in every state.
    catalog: ClassVar[Schema] = {}
    #: Options that decide what the state of a block holds.
    allocating: ClassVar[tuple[str, ...]] = ()
    sizes_are = "factors A, G"
    #: Options that say how many steps lie between two updates of the estimates, and between two refreshes.
    capture_interval: ClassVar[str] = "factor_update_steps"
    refresh_interval: ClassVar[str] = "inv_update_steps"

    # ------------------------------------------------------------------ what a method supplies
    @abstractmethod
    def schema(self, block: Block, group: Mapping[str, Any], held: Mapping[str, Any]) -> Schema:
        """What the state of a block holds.

        Args:
            block: The block.
            group: Its options.
            held: Its state as it is, or as a checkpoint has it, for sizes that only data decide.

        Returns:
            By key the first value of a number, or a ``meta`` tensor for what is allocated as zeros; its kind and place.
        """

    @abstractmethod
    def new_statistic(self, block: Block, group: Group) -> Statistic:
        """An empty pending statistic of a block."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.comm, self.table = setting, setting.comm, setting.table
        self._fisher = setting.fisher
        self.loss_scale, self._runtime, self._layer_options = setting.loss_scale, setting.runtime, setting.layers
        #: Whether hooks were removed.
        self.is_closed = False
        self._capture: Capture | None = None
        self._blocks: list[Block] = []
        self._block_of: dict[nn.Parameter, Block] = {}
        self.exchange = StatisticsExchange(setting.comm)
        self.refresher = Refresher(setting.layers.schedule, self.refresh_interval, setting.layers.max_failures)
        self._warned: set[str] = set()
        #: The gradient of the first layer in the last step, and its version: the same again means no backward pass.
        self._last_gradient: tuple[weakref.ref[Tensor] | None, int] = (None, 0)
        #: Step of the last statistics, by block; not known of what a checkpoint brought.
        self._learned_at: dict[str, int] = {}
        self._armed_for: list[tuple[Any, ...]] = []
        #: Shapes of the whole curvature of each parameter, wherever it is.
        self._shapes: dict[nn.Parameter, dict[str, tuple[int, ...] | None]] = {}
        #: Blocks whose curvature a checkpoint left out, until the ranks have found it anew.
        self._to_renew: set[str] = set()
        #: Blocks whose statistics the coming step uses, on any rank.
        self._due: set[int] = set()

    # ------------------------------------------------------------------ what the optimizer shares
    @property
    def state(self) -> Mapping[nn.Parameter, dict[str, Any]]:
        """State of the optimizer by parameter."""
        return self.table.state

    @property
    def param_groups(self) -> list[Group]:
        """The groups of the optimizer."""
        return self.table.groups

    @property
    def entries(self) -> Schema:
        """Entries of the states that were planned so far, by key."""
        return self.table.entries

    @property
    def _t(self) -> int:
        return self._runtime.step

    @property
    def _is_cut(self) -> bool:
        return self.table.shards.is_sharded

    def _stage(self, name: str) -> AbstractContextManager[None]:
        return self._runtime.stage(name)

    # ------------------------------------------------------------------ hooks
    def is_a_copy(self) -> str:
        """Return what to do where a copy has no module."""
        return f"this {self.setting.method} is a copy and has no module to capture from: call attach(module) first"

    @property
    def is_hooked(self) -> bool:
        """Whether the layers of the module are hooked."""
        return self._capture is not None

    def hook(self) -> None:
        """Hook the layers of the blocks."""
        root = self.table.root
        assert root is not None
        if self._capture is None:
            chosen = self._layer_options
            self._capture = Capture(forwarded(root), chosen.batch_dim, chosen.batch_input, self.loss_scale)
            self._capture.before_forward = self.setting.before_forward
            self._capture.owner = weakref.ref(self)
            self._capture.clock = self._runtime.clock
        sites = [self._site(b) for b in self._blocks]
        self._capture.set_sites(
            sites, watched_attention(root, {tap.module for b in self._blocks for tap in b.layer.taps})
        )
        self.is_closed = False
        self.arm()

    def _site(self, block: Block) -> Site:
        reference = weakref.ref(self)  # the hooks must not keep blocks and their state alive

        def new_statistic() -> Statistic:
            own = reference()
            assert own is not None
            return own.new_statistic(block, block.group)

        return Site(block.label, block.layer.taps, block.owner, new_statistic)

    # ------------------------------------------------------------------ blocks
    def follow(self, place: Callable[[Sequence[Unit]], None]) -> bool:
        """Find the blocks for the current parameters.

        Hooks of equal blocks stay, because a compiled model would not see new ones.

        Args:
            place: Called with what the strategy has to place, if the blocks have changed.

        Returns:
            Whether the blocks changed.
        """
        root, group_of = self.table.root, self.table.group_of
        assert root is not None
        plan = plan_layers(root, [p for p in group_of if p.requires_grad], self._layer_options.choices)
        _refuse_tensor_parallel(root, plan.layers)
        changed = [layer.signature for layer in plan.layers] != [b.layer.signature for b in self._blocks]
        if changed:
            self._blocks = [self.new_block(layer, i, group_of[layer.owner]) for i, layer in enumerate(plan.layers)]
            self._block_of = {p: b for b in self._blocks for p in b.params}
        for block in self._blocks:
            block.group = group_of[block.owner]
        if changed:
            place([self._unit(block) for block in self._blocks])
        inside = set(root.parameters())
        reasons = plan.reasons | {p: "frozen" for p in group_of if not p.requires_grad}
        reasons |= {p: "not a parameter of the hooked module" for p in group_of if p not in inside}
        self.table.reasons, self.table.skipped_by_user = reasons, plan.skipped_by_user
        return changed

    def forget_blocks(self) -> None:
        """Have the next plan make all blocks anew."""
        self._blocks = []

    def new_block(self, layer: Layer, index: int, group: Group) -> Block:
        """The block of a layer."""
        return Block(layer, index, group, self._runtime)  # type: ignore[abstract]

    def _unit(self, block: Block) -> Unit:
        """What a strategy needs to know of a block."""
        adapter, group = block.adapter, block.group
        a, g, blocks = adapter.n_a, adapter.n_g, adapter.groups
        schema = self.live_schema(block)
        flat = [a if adapter.one_hot else a**3, g**3]
        return Unit(
            block.name,
            f"{blocks}×{g}×{a} {block.layer.kind} " + ", ".join(f"{k} {entry.shape}" for k, entry in schema.items()),
            refresh_flops=float(blocks * sum(flat)),
            step_flops=2.0 * blocks * (a * a * g * (not adapter.one_hot) + a * g * g) + self.shaping_flops(block),
            nbytes=sum(nbytes(schema).values()),
            interval=max(1, int(group[self.refresh_interval])),
            everywhere=self.needs_estimate_everywhere(block, group),
        )

    def shaping_flops(self, block: Block) -> float:
        """FLOPs of what a method does to a direction that is preconditioned."""
        return 0.0

    def needs_estimate_everywhere(self, block: Block, group: Mapping[str, Any]) -> bool:
        """Whether preconditioning uses the running estimate itself."""
        return False

    def rebuilt(self) -> None:
        """Act on a new plan, whose state has been allocated."""

    def covers(self, p: nn.Parameter) -> bool:
        """Whether a block covers a parameter."""
        return p in self._block_of

    def options_of(self, p: nn.Parameter) -> Group:
        """Return the group whose options the block of a covered parameter follows."""
        return self._block_of[p].group

    def live_schema(self, block: Block) -> Schema:
        """What the state of a block holds now."""
        return self.schema(block, block.group, self.state.get(block.owner, {}))

    def zeros(self, block: Block, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """A ``meta`` tensor in the precision of a block's curvature."""
        return block.layer.empty(shape, dtype)

    def schema_of(self, p: nn.Parameter, group: Mapping[str, Any], held: Mapping[str, Any]) -> Schema:
        """Return what the state of a parameter holds of curvature, as ``CurvatureState`` describes it."""
        block = self._block_of.get(p)
        return self.schema(block, group, held) if block is not None and block.owner is p else {}

    def allocate(self, p: nn.Parameter) -> None:
        """Allocate the curvature in the state of a parameter; what is there and still fits is kept."""
        state, before = self.state[p], self._shapes.get(p, {})
        schema = self.schema_of(p, self.table.group_of[p], state)
        wanted = held(schema, self.places_here(p))
        self._shapes[p] = {k: entry.shape for k, entry in schema.items()}
        self.entries.update({k: entry._replace(like=0) for k, entry in schema.items() if k not in self.entries})
        stale = any(k in state and shape_of(state[k]) != entry.shape for k, entry in wanted.items())
        # What another rank holds may have changed too: what is counted of it must not differ from rank to rank.
        stale |= any(k in before and k not in wanted and before[k] != shape for k, shape in self._shapes[p].items())
        for key in [k for k in state if k in self.entries and (k not in wanted or stale)]:
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
                    state["refreshes"] = 0  # nothing to precondition with until the next refresh, which is due
            else:  # the model was moved or cast
                state[key] = state[key].to(p.device, value.dtype)

    @property
    def all_blocks(self) -> Sequence[Block]:
        """All blocks, in the order of their indices."""
        return self._blocks

    @property
    def blocks(self) -> dict[str, Block]:
        """Blocks by module name."""
        return {b.name: b for b in self._blocks}

    def places_here(self, p: nn.Parameter) -> frozenset[Place]:
        """Return where this rank is, of the places at which tensors of a parameter's state are."""
        return self.exchange.places_here(self._block_of.get(p))

    def facts(self) -> dict[str, list[str]]:
        """Return what must be equal on all ranks, in words."""
        chosen = {f.name: getattr(self._layer_options, f.name) for f in fields(LayerOptions) if f.name != "skip_layers"}
        if callable(chosen["batch_input"]):
            chosen["batch_input"] = "a function"  # its representation has an address
        return {"options of all layers": [f"{k}={v!r}" for k, v in chosen.items()]}

    # ------------------------------------------------------------------ capture
    def arm(self) -> None:
        """Have captured what the coming step will use."""
        capture = self._capture
        if capture is not None:
            self._armed_for = self._schedule()
            self._due = {b.index for b in self._blocks if self._capture_is_due(b) and self.comm.learns(b.index)}
            capture.arm(i for i in self._due if self.comm.captures(i))

    def _schedule(self) -> list[tuple[Any, ...]]:
        names = (self.refresh_interval, self.capture_interval, "scale_update_steps", "estimator")
        return [tuple(g.get(name) for name in names) for g in self.param_groups]

    def follow_schedule(self) -> None:
        """Let intervals that changed since the last step act on the forward that begins."""
        if self._schedule() != self._armed_for:
            self.arm()

    def _capture_is_due(self, block: Block) -> bool:
        every, interval = block.group[self.capture_interval], block.group[self.refresh_interval]
        updates = self.state[block.owner].get("factor_updates", 0)
        return self._layer_options.schedule.captures(self._t, every, interval, updates)

    def time_stages(self, clock: Clock | None) -> None:
        """Have a clock time what is captured, or none."""
        if self._capture is not None:
            self._capture.clock = clock

    def detach(self) -> None:
        """Remove all hooks. Idempotent."""
        if self._capture is not None:
            self._capture.close()
            self._capture = None
            self.is_closed = True

    @contextmanager
    def pause_capture(self) -> Iterator[None]:
        """Capture nothing of the forwards that run inside the ``with`` block."""
        capture = self._capture
        if capture is None:
            yield
            return
        with capture.paused():
            yield

    @contextmanager
    def mask(self, keep: Tensor | None) -> Iterator[None]:
        """Keep padding out of the statistics of the forwards that run inside the ``with`` block.

        Rows of layers whose input has the leading dimensions of the mask (or its transpose, or both in one) are left
        out where it is False; other layers, such as those after pooling, are not touched.

        Args:
            keep: ``[N, S]``, True (or 1, as attention masks have it) for real positions; None for no mask.

        Raises:
            TypeError: If it is no tensor of bools or integers; a mask of floats is one to be added to scores.
            ValueError: If its shape is another.
        """
        if keep is not None and (not isinstance(keep, Tensor) or keep.is_floating_point() or keep.is_complex()):
            kind = keep.dtype if isinstance(keep, Tensor) else type(keep).__name__
            raise TypeError(f"mask takes a bool or integer tensor keep of shape [N, S], got {kind}")
        if keep is not None and keep.dim() != 2:
            raise ValueError(f"mask takes a tensor keep of shape [N, S], got shape {tuple(keep.shape)}")
        if self._capture is None:
            yield
            return
        with self._capture.masked(None if keep is None else keep.bool()):
            yield

    # ------------------------------------------------------------------ copies
    def kept(self) -> dict[str, Any]:
        """Return what copies and pickles keep, apart from the state."""
        rules = [
            _name_of(self.table.root, r) if isinstance(r, nn.Module) else r for r in self._layer_options.choices.skip
        ]
        return {
            "own": {},
            "layer_options": replace(self._layer_options, skip_layers=rules),
            "to_renew": set(self._to_renew),
            "refreshed_at": dict(self.refresher.refreshed_at),
            "learned_at": dict(self._learned_at),
        }

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Take what :meth:`kept` returned for the original."""
        self._to_renew = set(kept["to_renew"])
        self.refresher.refreshed_at.update(kept["refreshed_at"])
        self._learned_at = dict(kept["learned_at"])


def _name_of(root: nn.Module | None, module: nn.Module) -> str:
    assert root is not None
    return next(clean_name(name) for name, m in root.named_modules() if m is unwrap(module))


def _refuse_tensor_parallel(root: nn.Module, layers: Sequence[Layer]) -> None:
    """Refuse layers of which every rank applies a part: what their hooks see is no row of the layer.

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
            f"layers {', '.join(found)} are tensor-parallel: each rank sees a part of their rows, from which the "
            "curvature of the layer cannot be had. Leave them out with skip_layers=[...], or use a window method, "
            "such as MFAC"
        )


def _is_fully_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was applied to a module; by name, since not every build of torch has it."""
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)
