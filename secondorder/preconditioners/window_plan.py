"""Windows over parameters and their state: what window methods add to the life of an optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from secondorder import options
from secondorder.comm import Unit as Portion
from secondorder.curvature.layer import unwrap
from secondorder.curvature.schema import Entry, Schema
from secondorder.curvature.schema import Place as At
from secondorder.curvature.solvers import WindowSolver
from secondorder.curvature.window.form import Form, Place
from secondorder.curvature.window.memory import free_bytes
from secondorder.curvature.window.shards import Bounds, Cutting, Slice, plain
from secondorder.curvature.window.topk import TopK
from secondorder.curvature.window.unit import Unit, real, stored_otherwise
from secondorder.curvature.window.window import LAG, SHARED, SLOT_DIM, GradientWindow
from secondorder.diagnostics.describe import human_bytes
from secondorder.lifecycle import Group
from secondorder.linalg.gram import packed_size
from secondorder.preconditioners.partition import Partitioning

__all__ = ["MOMENTUM_KEYS", "Unit", "Windowing", "real"]

MOMENTUM_KEYS = ("gradient_momentum", "momentum_coefficients", "dots_momentum", "momentum_weight")


class Windowing(Partitioning):
    """Plans the units of a partition, allocates their windows and lets the state of each parameter show its part."""

    catalog: ClassVar[Schema] = {
        key: Entry(0, kind, At.CURVATURE)
        for kind, keys in {
            "window": ("window", "window_idx", "window_val", "tail_idx", "tail_val", "window_p", "window_q"),
            "error": ("error", "error_range", "tail_error", "tail_error_range"),
            "buffers": ("q_prev", "pos", "count", "skipped", "solve_failures", "amplification", *MOMENTUM_KEYS[1:]),
            "gram": ("gram",),
            "momentum": ("gradient_momentum",),
        }.items()
        for key in keys
    }
    #: The mathematics of the method.
    solver: ClassVar[WindowSolver]
    _structural = ("window_size",)
    #: Options on which the groups of one window must agree.
    shared_options: ClassVar[tuple[str, ...]] = ("window_size", "graft", "weight_decay_mode")

    def _begin_windows(
        self,
        structure: tuple[Any, ...],
        excluded: dict[nn.Parameter, str],
        bounds: dict[nn.Parameter, Bounds] | None = None,
        covered: Iterable[nn.Parameter] = (),
    ) -> None:
        self._begin_partition(structure, excluded, covered)
        self._units: list[Unit] = []
        self._unit_of: dict[nn.Parameter, Unit] = {}
        self._gradient_norms: dict[nn.Parameter, Tensor] = {}
        #: What was placed; None before the first time.
        self._portions: list[Portion] | None = None
        #: How parameters were cut: it stays as long as they are covered, so that no row ever travels.
        self._bounds = bounds or {}

    # ------------------------------------------------------------------ units
    def _connect(self, root: nn.Module | None) -> None:
        self._root = None if root is None else unwrap(root)
        if not self._unit_of.keys() <= {p for group in self.param_groups for p in group["params"]}:
            self._units, self._unit_of = [], {}  # other parameters took their place, with their state
        self._closed = False
        self._rebuild()

    def _plan(self) -> bool:
        for group in self.param_groups:
            self.checks["window_size"]("window_size", group["window_size"])
        self._name_parameters()
        self._exclude()
        before = {unit.signature: unit for unit in self._units}
        units, named = [], self._partitioned()
        wholes = [self._whole_window(params) for params in named.values()]
        self._place_windows(named, wholes)
        for i, (name, params) in enumerate(named.items()):
            unit = self._new_unit(i, name, params, wholes[i])
            kept = before.get(unit.signature)
            if kept is not None:
                kept.group = unit.group
            units.append(kept or unit)
        fresh = [unit for unit in units if unit.signature not in before]
        self._require_memory(fresh)
        sources = {p: unit for unit in self._units for p in unit.params}
        for unit in fresh:
            self._fill(unit, sources)
        self._units = units
        self._unit_of = {p: unit for unit in units for p in unit.params}
        parts = [(unit.params, unit.part.bounds) for unit in units if unit.part is not None]
        self._bounds = {p: own for params, bounds in parts for p, own in zip(params, bounds, strict=True)}
        self._copied = set()
        for p in sources.keys() - self._unit_of.keys():  # it left; its columns must not keep the old rows alive
            self.state[p] = {k: v for k, v in self.state[p].items() if plain(k) not in self.catalog}
        return bool(fresh)

    def _place_windows(self, named: Mapping[str, list[nn.Parameter]], wholes: Sequence[GradientWindow]) -> None:
        """Let the strategy decide who holds what."""
        portions = []
        for name, window in zip(named, wholes, strict=True):
            rows = ", ".join(f"{tuple(place.shape)} {place.working}" for place in window.places)
            flops = self.solver.flops(window.m)
            divisible = self._partition != "layer"
            portions.append(
                Portion(name, f"{window.form} of {rows}", flops, window.flops, window.nbytes, divisible=divisible)
            )
        if portions != self._portions:
            self._place(portions)
            self._portions = portions

    def _whole_window(self, params: list[nn.Parameter]) -> GradientWindow:
        """The window of some parameters, laid out but not allocated."""
        group = self._group[params[0]]
        least, free = 8 * packed_size(group["window_size"]), free_bytes(params[0].device)
        if free is not None and least > free:  # before sizes overflow
            raise RuntimeError(
                f"window_size={group['window_size']}: the Gram matrix alone needs {human_bytes(least)} and "
                f"{human_bytes(free)} are free on {params[0].device}; use a smaller window_size"
            )
        form = Form(group["window_size"], self._compression, self._window_dtype, self._seed)
        return self._meta_window(params, form, self.solver.momentum_of_gradients(group) > 0)

    def _new_unit(self, index: int, name: str, params: list[nn.Parameter], whole: GradientWindow) -> Unit:
        """A unit whose window, or this rank's part of it, is laid out but not allocated."""
        rank, size = self.comm.shard(index) if self._partition != "layer" else (0, 1)
        window, part = whole, None
        if size > 1:
            shapes, cutting = [place.shape for place in whole.places], whole.form.cutting
            sizes, costs = [math.prod(shape) for shape in shapes], [whole.form.cost(shape) for shape in shapes]
            kept = [self._bounds.get(p) for p in params]
            if any(b is not None and (len(b) != size + 1 or b[-1] != n) for b, n in zip(kept, sizes, strict=True)):
                kept = [None] * len(params)  # another world
            kept = [b or self._wished_bounds(index, p, cutting) for b, p in zip(kept, params, strict=True)]
            part = Slice(rank, size, cutting.bounds(sizes, costs, size, kept), cutting)
            window = self._meta_window(params, whole.form, whole.outside is not None, part)
        dtypes = [
            {key: value.dtype for key, value in whole.state(i).items() if key in SLOT_DIM} for i in range(len(params))
        ]
        held = size > 1 or self.comm.preconditions(index)
        return Unit(name, params, window, self._group[params[0]], held=held, part=part, dtypes=dtypes)

    def _wished_bounds(self, index: int, p: nn.Parameter, cutting: Cutting) -> Bounds | None:
        """Where a parameter of a window had best be cut; None for no preference."""
        return None

    def _places(
        self, params: Sequence[nn.Parameter], part: Slice | None, device: torch.device | None = None
    ) -> list[Place]:
        shapes = [real(p).shape for p in params]
        if part is None:
            return [Place(s, self._working(p), device or p.device) for s, p in zip(shapes, params, strict=True)]
        return [
            Place(part.shape(i, s), self._working(p), device or p.device, s)
            for i, (s, p) in enumerate(zip(shapes, params, strict=True))
        ]

    def _meta_window(
        self, params: Sequence[nn.Parameter], form: Form, momentum: bool, part: Slice | None = None
    ) -> GradientWindow:
        return GradientWindow(self._places(params, part, torch.device("meta")), form, momentum)

    def _working(self, p: nn.Parameter) -> torch.dtype:
        """Precision of products: the parameter's, or float64 where rows are kept in it."""
        return torch.float64 if self._window_dtype == torch.float64 else self._precision(p)

    def _window(self, unit: Unit, form: Form, momentum: bool) -> GradientWindow:
        return GradientWindow(self._places(unit.params, unit.part), form, momentum)

    def _fill(self, unit: Unit, sources: Mapping[nn.Parameter, Unit]) -> None:
        """Allocate the window of a new unit and take over what its parameters had in those of before."""
        states: list[dict[str, Tensor]] = [self._own_state(unit, i, self.state[p]) for i, p in enumerate(unit.params)]
        old = list(dict.fromkeys(sources[p] for p in unit.params if p in sources))
        rounded = stored_otherwise(unit, old)
        if any(not u.held for u in old):  # rows of another rank
            states, shared, old = [{} for _ in states], {}, []
        elif old:
            shared = {**old[0].window.shared_state(), "amplification": old[0].lagged}
            places = {tuple(int(u.window.counters[k]) for k in ("pos", "count")) + (u.window.m,) for u in old}
            if len(places) > 1:  # windows that were not filled together have no common rows
                states, shared = [{} for _ in states], {}
        else:  # a copy, or a new optimizer
            shared = next((state for state in states if "gram" in state), {})
        for p in unit.params:
            for key in [k for k in self.state[p] if plain(k) in self.catalog]:
                del self.state[p][key]
        if not unit.held:
            return
        momentum = unit.window.outside is not None or "momentum_weight" in shared
        unit.window = self._window(unit, unit.window.form, momentum)
        unit.lagged = torch.zeros(LAG, dtype=torch.float64, pin_memory=unit.params[0].device.type == "cuda")
        self._take_over(unit, states, shared, rounded)
        if old and (len(old) > 1 or not set(old[0].params) <= set(unit.params)):
            unit.window.recompute_gram()  # columns left, or came with rows of their own
        self._expose(unit)

    def _own_state(self, unit: Unit, i: int, state: Mapping[str, Any]) -> dict[str, Tensor]:
        """Curvature in the state of a unit's parameter, as far as this rank's part of the window goes."""
        found = {plain(k): v for k, v in state.items() if plain(k) in self.catalog}
        if unit.part is None or any("@" in key for key in state):
            return found
        whole = {k: v for k, v in found.items() if k not in SHARED}
        return {
            **{k: v for k, v in found.items() if k in SHARED},
            **unit.part.cutting.cut_state(whole, unit.part.bounds[i][-1], unit.part.span(i)),
        }

    def _take_over(
        self, unit: Unit, states: Sequence[Mapping[str, Tensor]], shared: Mapping[str, Tensor], rounded: bool = False
    ) -> None:
        """Fill a window from the state of one that may have another number of slots; without state it is empty."""
        window = unit.window
        if "amplification" in shared:
            unit.lagged.copy_(shared["amplification"])
        else:
            unit.lagged.zero_()
        if "momentum_weight" in shared:
            window.keep_outside()
        m = round(((8 * shared["gram"].numel() + 1) ** 0.5 - 1) / 2) if "gram" in shared else window.m
        if m == window.m:
            window.adopt(states, shared, rounded)
            return
        form = Form(m, self._compression, self._window_dtype, self._seed)
        old = self._window(unit, form, "momentum_weight" in shared)
        old.adopt(states, shared, rounded)
        window.adopt([{} for _ in states], {})
        window.adopt_resized(old)

    def _expose(self, unit: Unit) -> None:
        """Let the state of each parameter show its part of the window; slices under names of their own."""
        for i, p in enumerate(unit.params):
            found = unit.window.state(i)
            if unit.part is not None:
                found = {f"{key}{unit.part.suffix}": value for key, value in found.items() if value.numel()}
            self.state[p].update(found)
        self.state[unit.params[0]].update(unit.window.shared_state(), amplification=unit.lagged)

    def _momentum_if_wanted(self, unit: Unit) -> float:
        """β of a unit's momentum on gradients; its state is made when a schedule first turns it on."""
        beta = self.solver.momentum_of_gradients(unit.group)
        if beta > 0 and unit.window.outside is None:
            unit.window.keep_outside()
            if unit.held:
                self._expose(unit)
        return beta

    def _require_memory(self, units: Sequence[Unit]) -> None:
        """Refuse windows that cannot fit, before anything is allocated."""
        needed: dict[torch.device, int] = {}
        units = [unit for unit in units if unit.held]
        for unit in units:
            device = unit.params[0].device
            needed[device] = needed.get(device, 0) + unit.window.nbytes
        for device, nbytes in needed.items():
            free = free_bytes(device)
            if free is not None and nbytes > free:
                first, entries = units[0], sum(math.prod(p.shape) for unit in units for p in unit.window.places)
                m, sparse = first.window.m, Form(first.window.m, TopK())
                fits = max(1, int(m * free / nbytes * 0.9))
                less = sum(self._meta_window(unit.params, sparse, False, unit.part).nbytes for unit in units)
                raise RuntimeError(
                    f"the gradient window needs {human_bytes(nbytes)} (window_size={m}, {entries:,} parameters, "
                    f"{first.window.form.describe(self._working(first.params[0]))}) and {human_bytes(free)} are free "
                    f"on {device}. Use compression=TopK() ({human_bytes(less)}), or a window_size of at most {fits}."
                )

    # ------------------------------------------------------------------ life
    def _covers(self, p: nn.Parameter) -> bool:
        return p in self._unit_of

    def _options(self, p: nn.Parameter) -> Group:
        return self._unit_of[p].group

    def _allocate(self, p: nn.Parameter) -> None:
        """Done by :meth:`_plan`, for all parameters of a window at once."""

    def _layout(self) -> list[tuple[object, ...]]:
        sizes = [(group["window_size"],) for group in self.param_groups]
        return [*super()._layout(), *sizes]

    def _check_group(self, group: Group) -> None:
        mode, decay = group["weight_decay_mode"], group["decoupled_weight_decay"]
        if mode != "standard" and decay:
            raise ValueError(f"weight_decay_mode={mode!r} and decoupled_weight_decay=True exclude each other")
        if mode != "standard" and options.is_adam(group["graft"] or group["inner"]):
            raise ValueError(f"weight_decay_mode={mode!r} is for SGD's rule and not for Adam's: drop it")
        self._require_agreement(group)

    def _require_agreement(self, group: Group) -> None:
        """Refuse a group that differs from the first in what defines their common window."""
        if self._partition != "global" or not self.param_groups:
            return
        first = self.param_groups[0]
        for key in self.shared_options:
            if group[key] != first[key]:
                raise ValueError(
                    f"all groups share one window and must agree on {key}, got {first[key]!r} and {group[key]!r}; "
                    "use partition='group' for one window per group"
                )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; their columns are zero in the rows that are there.

        Raises:
            RuntimeError: If the larger window does not fit into free memory; the group is not added then.
        """
        count = len(self.param_groups)
        if self._partition == "global" and self._group and isinstance(param_group, dict):
            # What defines the common window may have been scheduled since: the new group takes it as it is now.
            param_group = {key: self.param_groups[0][key] for key in self.shared_options} | param_group
        try:
            super().add_param_group(param_group)
        except RuntimeError:
            if self._group and len(self.param_groups) > count:
                for p in self.param_groups.pop()["params"]:
                    self._skipped_by_user.discard(p)
                    for known in (self._names, self.state, self._excluded, self._reasons):
                        known.pop(p, None)
                self._group = {p: g for g in self.param_groups for p in g["params"]}
            raise

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles keep; each parameter gets its own part of the window, not a view of all of it."""
        kept = super().__getstate__()
        kept["state"] = type(self.state)(dict)
        for p, found in self.state.items():
            kept["state"][p] = {k: v.clone() if plain(k) in self.catalog else v for k, v in found.items()}
        return kept

    def _kept_by_copies(self) -> dict[str, Any]:
        own = {"structure": self._structure, "excluded": dict(self._excluded)}
        return {**super()._kept_by_copies(), **own, "bounds": dict(self._bounds), "covered": list(self._unit_of)}

    def _restore(self, kept: dict[str, Any]) -> None:
        super()._restore(kept)
        self._begin_windows(kept["structure"], kept["excluded"], kept.get("bounds"), kept.get("covered", ()))
        self._rebuild()

    def _repoint(self, theirs: dict[str, nn.Parameter]) -> None:
        before = [p for group in self.param_groups for p in group["params"]]
        super()._repoint(theirs)
        after = dict(zip(before, (p for group in self.param_groups for p in group["params"]), strict=True))
        self._bounds = {after[p]: bounds for p, bounds in self._bounds.items() if p in after}
        self._copied = {after[p] for p in (*self._unit_of, *self._copied) if p in after}

    def _rule_keys(self, p: nn.Parameter, group: Mapping[str, Any]) -> tuple[str, ...]:
        keys = super()._rule_keys(p, group)
        return (
            ()
            if keys == ("momentum_buffer",) and self._covers(p) and not self.solver.momentum_after(group)[0]
            else keys
        )
