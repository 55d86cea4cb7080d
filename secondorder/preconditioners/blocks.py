"""Blocks of a module, their hooks and their state: what the layer methods add to the life of an optimizer."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from secondorder.capture.capture import Capture
from secondorder.capture.layers.parts import watched_attention
from secondorder.capture.sites import Site, Statistic
from secondorder.comm import Unit
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
from secondorder.curvature.schema import Schema, held, nbytes
from secondorder.lifecycle import Group, Lifecycle, shape_of
from secondorder.runtime import Clock


class Capturing(Lifecycle):
    """Plans blocks over the layers of a module, and has captured what the coming step will use."""

    #: Options that decide what the state of a block holds.
    allocating: ClassVar[tuple[str, ...]] = ()
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

    # ------------------------------------------------------------------ birth
    def _begin_capture(self, layer_options: LayerOptions) -> None:
        self._layer_options = layer_options
        self._capture: Capture | None = None
        self._blocks: list[Block] = []
        self._block_of: dict[nn.Parameter, Block] = {}
        self._failures: dict[str, int] = {}
        self._unjudged: list[tuple[list[Block], Tensor, torch.Event]] = []
        self._failed_at: dict[str, int] = {}
        self._failed_refreshes = 0
        self._skipped_statistics: dict[str, int | Tensor] = {}
        self._kl_factor: Tensor | None = None
        self._warned: set[str] = set()
        #: The gradient of the first layer in the last step, and its version: the same again means no backward pass.
        self._last_gradient: tuple[weakref.ref[Tensor] | None, int] = (None, 0)
        #: Step of the last refresh and of the last statistics, by block; not known of what a checkpoint brought.
        self._refreshed_at: dict[str, int] = {}
        self._learned_at: dict[str, int] = {}
        self._armed_for: list[tuple[Any, ...]] = []
        #: Shapes of the whole curvature of each parameter, wherever it is.
        self._shapes: dict[nn.Parameter, dict[str, tuple[int, ...] | None]] = {}
        #: Examples of a rank in the last batch, and rows that the statistics of a block had of them: for plans.
        self._rows_seen: dict[str, tuple[float, float | Tensor]] = {}
        #: Blocks whose curvature a checkpoint left out, until the ranks have found it anew.
        self._to_renew: set[str] = set()
        #: Blocks whose statistics the coming step uses, on any rank.
        self._due: set[int] = set()

    def _connect(self, root: nn.Module | None) -> None:
        """Plan the blocks of a module and hook them."""
        assert root is not None
        self._root = unwrap(root)
        self._blocks = []
        self._rebuild()
        self._hook()

    def _hook(self) -> None:
        assert self._root is not None
        if self._capture is None:
            chosen = self._layer_options
            self._capture = Capture(forwarded(self._root), chosen.batch_dim, chosen.batch_input, self.loss_scale)
            self._capture.before_forward = weakref.WeakMethod(self._follow_schedule)
            self._capture.owner = weakref.ref(self)
            self._capture.clock = self._runtime.clock
        sites = [self._site(b) for b in self._blocks]
        self._capture.set_sites(
            sites, watched_attention(self._root, {tap.module for b in self._blocks for tap in b.layer.taps})
        )
        self._closed = False
        self._arm()

    def _site(self, block: Block) -> Site:
        reference = weakref.ref(self)  # the hooks must not keep the optimizer alive

        def new_statistic() -> Statistic:
            optimizer = reference()
            assert optimizer is not None
            return optimizer.new_statistic(block, block.group)

        return Site(block.label, block.layer.taps, block.owner, new_statistic)

    # ------------------------------------------------------------------ blocks
    def _plan(self) -> bool:
        """Find the blocks. Hooks of equal blocks stay: a compiled model would not see new ones.

        Returns:
            Whether the blocks changed.
        """
        assert self._root is not None
        plan = plan_layers(self._root, [p for p in self._group if p.requires_grad], self._layer_options.choices)
        _refuse_tensor_parallel(self._root, plan.layers)
        changed = [layer.signature for layer in plan.layers] != [b.layer.signature for b in self._blocks]
        if changed:
            self._blocks = [self.new_block(layer, i, self._group[layer.owner]) for i, layer in enumerate(plan.layers)]
            self._block_of = {p: b for b in self._blocks for p in b.params}
        for block in self._blocks:
            block.group = self._group[block.owner]
        if changed:
            self._place([self._unit(block) for block in self._blocks])
        inside = self._inside()
        self._reasons, self._skipped_by_user = plan.reasons, plan.skipped_by_user
        self._reasons |= {p: "frozen" for p in self._group if not p.requires_grad}
        self._reasons |= {p: "not a parameter of the hooked module" for p in self._group if p not in inside}
        return changed

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
            everywhere=self._needs_estimate_everywhere(block, group),
        )

    def shaping_flops(self, block: Block) -> float:
        """FLOPs of what a method does to a direction that is preconditioned."""
        return 0.0

    def _needs_estimate_everywhere(self, block: Block, group: Mapping[str, Any]) -> bool:
        """Whether preconditioning uses the running estimate itself."""
        return False

    def _rebuild(self) -> bool:
        """As in the base class; a copy without its module waits for :meth:`attach`."""
        return self._root is not None and super()._rebuild()

    def _follow(self, replanned: bool) -> None:
        if replanned and self._capture is not None:
            self._hook()
        self._arm()

    def _covers(self, p: nn.Parameter) -> bool:
        return p in self._block_of

    def _options(self, p: nn.Parameter) -> Group:
        return self._block_of[p].group

    def live_schema(self, block: Block) -> Schema:
        """What the state of a block holds now."""
        return self.schema(block, block.group, self.state.get(block.owner, {}))

    def zeros(self, block: Block, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """A ``meta`` tensor in the precision of a block's curvature."""
        return block.layer.empty(shape, dtype)

    def _curvature_schema(self, p: nn.Parameter, group: Mapping[str, Any], held: Mapping[str, Any]) -> Schema:
        block = self._block_of.get(p)
        return self.schema(block, group, held) if block is not None and block.owner is p else {}

    def _allocate(self, p: nn.Parameter) -> None:
        state, before = self.state[p], self._shapes.get(p, {})
        schema = self._curvature_schema(p, self._group[p], state)
        wanted = held(schema, self._places_here(p))
        self._shapes[p] = {k: entry.shape for k, entry in schema.items()}
        self.entries |= {k: entry._replace(like=0) for k, entry in schema.items() if k not in self.entries}
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
    def blocks(self) -> dict[str, Block]:
        """Blocks by module name."""
        return {b.name: b for b in self._blocks}

    def _facts(self) -> dict[str, list[str]]:
        chosen = {f.name: getattr(self._layer_options, f.name) for f in fields(LayerOptions) if f.name != "skip_layers"}
        if callable(chosen["batch_input"]):
            chosen["batch_input"] = "a function"  # its representation has an address
        return {**super()._facts(), "options of all layers": [f"{k}={v!r}" for k, v in chosen.items()]}

    # ------------------------------------------------------------------ capture
    def _require_loadable(self) -> None:
        if self._root is None:
            raise RuntimeError(self._is_a_copy())

    def _is_a_copy(self) -> str:
        return f"this {type(self).__name__} is a copy and has no module to capture from: call attach(module) first"

    def _arm(self) -> None:
        """Have captured what the coming step will use."""
        capture = self._capture
        if capture is not None:
            self._armed_for = self._schedule()
            self._due = {b.index for b in self._blocks if self._capture_is_due(b) and self.comm.learns(b.index)}
            capture.arm(i for i in self._due if self.comm.captures(i))

    def _schedule(self) -> list[tuple[Any, ...]]:
        names = (self.refresh_interval, self.capture_interval, "scale_update_steps", "estimator")
        return [tuple(g.get(name) for name in names) for g in self.param_groups]

    def _follow_schedule(self) -> None:
        """Let intervals and frozen layers that changed since the last step act on the forward that begins."""
        self._check_changed_options()
        self._runtime.renew(self.state, self.param_groups)
        if not self._is_gathered():
            self._synchronize()
        if self._schedule() != self._armed_for:
            self._arm()

    def _is_gathered(self) -> bool:
        """Whether the module has whole parameters now, in the place of those that ``fully_shard`` has cut."""
        if not self._is_cut or self._layout() == self._signature:
            return False
        inside = self._inside()
        return any(is_cut(p) and p not in inside for p in self._group)

    def _capture_is_due(self, block: Block) -> bool:
        every, interval = block.group[self.capture_interval], block.group[self.refresh_interval]
        updates = self.state[block.owner].get("factor_updates", 0)
        return self._layer_options.schedule.captures(self._t, every, interval, updates)

    def time_stages(self, clock: Clock | None) -> None:
        super().time_stages(clock)
        if self._capture is not None:
            self._capture.clock = clock

    def detach(self) -> None:
        """Remove every hook of this optimizer; another one on the same module keeps its own. Idempotent."""
        if self._capture is not None:
            self._capture.close()
            self._capture = None
            self._closed = True

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

    # ------------------------------------------------------------------ what may change between steps
    def _layout(self) -> list[tuple[object, ...]]:
        chosen = [tuple(g.get(name) for name in self.allocating) for g in self.param_groups]
        return [*super()._layout(), *chosen]

    # ------------------------------------------------------------------ copies
    def _kept_by_copies(self) -> dict[str, Any]:
        rules = [self._name_of(r) if isinstance(r, nn.Module) else r for r in self._layer_options.choices.skip]
        kept = {
            "layer_options": replace(self._layer_options, skip_layers=rules),
            "to_renew": set(self._to_renew),
            "refreshed_at": dict(self._refreshed_at),
            "learned_at": dict(self._learned_at),
        }
        return {**super()._kept_by_copies(), **kept}

    def _restore(self, kept: dict[str, Any]) -> None:
        super()._restore(kept)
        self._begin_capture(kept["layer_options"])
        self._to_renew = set(kept["to_renew"])
        self._refreshed_at, self._learned_at = dict(kept["refreshed_at"]), dict(kept["learned_at"])

    def _name_of(self, module: nn.Module) -> str:
        assert self._root is not None
        return next(clean_name(name) for name, m in self._root.named_modules() if m is unwrap(module))


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
