"""The plan of the windows: their parameters, their ranks, and the views in the state of each parameter."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from secondorder.comm.strategy import CommStrategy, Unit
from secondorder.curvature.schema import Entry, Schema
from secondorder.curvature.schema import Place as At
from secondorder.curvature.window.form import Compression, Form, Place
from secondorder.curvature.window.memory import free_bytes
from secondorder.curvature.window.shards import Bounds, Slice, base_key
from secondorder.curvature.window.topk import TopK
from secondorder.curvature.window.unit import WindowUnit, real, stored_otherwise
from secondorder.curvature.window.window import LAG, SHARED, SLOT_DIM, GradientWindow
from secondorder.diagnostics.describe import human_bytes
from secondorder.linalg.dense import precision_of
from secondorder.linalg.gram import packed_size
from secondorder.parallel.window_layout import wished_bounds
from secondorder.parameters import ParameterTable
from secondorder.preconditioners.base import CurvaturePlan
from secondorder.preconditioners.partition import Partition

if TYPE_CHECKING:
    from secondorder.curvature.solvers import WindowSolver

MOMENTUM_KEYS = ("gradient_momentum", "momentum_coefficients", "dots_momentum", "momentum_weight")
#: Keys of windows in the state of a parameter.
CATALOG: Schema = {
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


@dataclass(frozen=True)
class WindowStructure:
    """The options of a window method that are the same in all groups.

    Attributes:
        compression: Compression of the rows.
        dtype: Precision of dense rows and low-rank factors; None means the default.
        partition: Which parameters share a window.
        skip_norm_layers: Whether the parameters of normalization layers follow the fallback.
        skip_biases: Whether biases follow the fallback.
        seed: Seed of the random bases from which low-rank rows start.
    """

    compression: Compression
    dtype: torch.dtype | None
    partition: str
    skip_norm_layers: bool
    skip_biases: bool
    seed: int

    def form(self, m: int) -> Form:
        """Return the form in which m rows are stored."""
        return Form(m, self.compression, self.dtype, self.seed)

    def working(self, p: nn.Parameter) -> torch.dtype:
        """Return the precision of products: that of the parameter, or float64 if rows are stored in float64."""
        return torch.float64 if self.dtype == torch.float64 else precision_of(p)


class WindowPlan(CurvaturePlan):
    """Plans the units of a partition, allocates their windows, and stores views of them in the states of parameters.

    Args:
        solver: The solver of the method.
        options: The options that are the same in all groups.
        comm: Communication strategy, which decides which ranks store which windows.
        table: The parameters.
        excluded: Parameters that were left out before, with the reasons.
        bounds: How parameters are already divided. This does not change while they are covered, so rows never move.
        covered: Parameters that the original of a copy covered. Their rows may be on other ranks.
    """

    def __init__(
        self,
        solver: WindowSolver,
        options: WindowStructure,
        comm: CommStrategy,
        table: ParameterTable,
        excluded: dict[nn.Parameter, str] | None = None,
        bounds: dict[nn.Parameter, Bounds] | None = None,
        covered: Iterable[nn.Parameter] = (),
    ) -> None:
        self.solver, self.options, self.comm, self.table = solver, options, comm, table
        self.partition = Partition(options.partition, options.skip_norm_layers, options.skip_biases, excluded)
        self.units: list[WindowUnit] = []
        self.unit_of: dict[nn.Parameter, WindowUnit] = {}
        self.bounds: dict[nn.Parameter, Bounds] = bounds or {}
        self.copied: set[nn.Parameter] = set(covered)
        #: The units that were placed; None before the first placement.
        self.placed: list[Unit] | None = None
        #: Complete windows before they are divided, if they are only laid out.
        self.wholes: list[GradientWindow] = []

    # ------------------------------------------------------------------ units
    def follow(self, place: Callable[[list[Unit]], None]) -> bool:
        """Make a new plan for the current parameters, and keep the windows that still fit.

        Args:
            place: Function with which the strategy assigns units to ranks.

        Returns:
            Whether there are new windows.
        """
        self.partition.exclude(self.table, self.has_rows)
        # Windows whose state was removed begin again.
        self.units = [u for u in self.units if not u.is_local or all(map(self.table.state.get, u.params))]
        before = {unit.signature: unit for unit in self.units}
        units, named = [], self.named()
        wholes = [self.whole_window(params) for params in named.values()]
        self._place_windows(named, wholes, place)
        for i, (name, params) in enumerate(named.items()):
            unit = self.new_unit(i, name, params, wholes[i])
            kept = before.get(unit.signature)
            if kept is not None:
                kept.group = unit.group
            units.append(kept or unit)
        fresh = [unit for unit in units if unit.signature not in before]
        self._require_memory(fresh)
        sources = {p: unit for unit in self.units for p in unit.params}
        for unit in fresh:
            self._fill(unit, sources)
        self.units = units
        self.unit_of = {p: unit for unit in units for p in unit.params}
        parts = [(unit.params, unit.part.bounds) for unit in units if unit.part is not None]
        self.bounds = {p: own for params, bounds in parts for p, own in zip(params, bounds, strict=True)}
        self.copied = set()
        for p in sources.keys() - self.unit_of.keys():  # a removed parameter must not keep the old rows alive
            self.table.state[p] = {k: v for k, v in self.table.state[p].items() if base_key(k) not in CATALOG}
        return bool(fresh)

    @property
    def by_name(self) -> dict[str, WindowUnit]:
        """The windows by name."""
        return {unit.name: unit for unit in self.units}

    def reported(self) -> Iterator[tuple[str, Sequence[nn.Parameter]]]:
        """Return the name and the parameters of each window on this rank."""
        return ((unit.name, unit.params) for unit in self.units if unit.is_local)

    def clear(self, params: Collection[nn.Parameter]) -> None:
        """Discard the windows and their state if other parameters have replaced theirs."""
        if not self.unit_of.keys() <= set(params):
            self.units, self.unit_of = [], {}

    def state_of_copies(self, state: Mapping[nn.Parameter, dict[str, Any]]) -> Mapping[nn.Parameter, dict[str, Any]]:
        """Return the state in which each parameter has its part of the window instead of a view."""
        found = defaultdict[nn.Parameter, dict[str, Any]](dict)
        for p, own in state.items():
            found[p] = {k: v.clone() if base_key(k) in CATALOG else v for k, v in own.items()}
        return found

    def has_rows(self, p: nn.Parameter) -> bool:
        """Whether a parameter is in a window, or, for a copy, was in a window of the original."""
        return p in self.unit_of or p in self.copied or any(base_key(key) in SLOT_DIM for key in self.table.state[p])

    def named(self) -> dict[str, list[nn.Parameter]]:
        """Covered parameters by the name of their unit."""
        return self.partition.units(self.table, self.has_rows)

    def _place_windows(
        self,
        named: Mapping[str, list[nn.Parameter]],
        wholes: Sequence[GradientWindow],
        place: Callable[[list[Unit]], None],
    ) -> None:
        placed = []
        for name, window in zip(named, wholes, strict=True):
            rows = ", ".join(f"{tuple(own.shape)} {own.working}" for own in window.places)
            flops = self.solver.flops(window.m)
            divisible = self.options.partition != "layer"
            placed.append(
                Unit(name, f"{window.form} of {rows}", flops, window.flops, window.nbytes, divisible=divisible)
            )
        if placed != self.placed:
            place(placed)
            self.placed = placed

    def whole_window(self, params: list[nn.Parameter]) -> GradientWindow:
        """The window of some parameters, laid out but not allocated."""
        group = self.table.group_of[params[0]]
        least, free = 8 * packed_size(group["window_size"]), free_bytes(params[0].device)
        if free is not None and least > free:  # checked before sizes overflow
            raise RuntimeError(
                f"window_size={group['window_size']}: the Gram matrix alone needs {human_bytes(least)} and "
                f"{human_bytes(free)} are free on {params[0].device}; use a smaller window_size"
            )
        form = self.options.form(group["window_size"])
        return self.meta_window(params, form, self.solver.momentum_of_gradients(group) > 0)

    def new_unit(self, index: int, name: str, params: list[nn.Parameter], whole: GradientWindow) -> WindowUnit:
        """A unit whose window, or this rank's part of it, is laid out but not allocated."""
        rank, size = self.comm.shard(index) if self.options.partition != "layer" else (0, 1)
        window, part = whole, None
        if size > 1:
            shapes, cutting = [place.shape for place in whole.places], whole.form.cutting
            sizes, costs = [math.prod(shape) for shape in shapes], [whole.form.cost(shape) for shape in shapes]
            kept = [self.bounds.get(p) for p in params]
            if any(b is not None and (len(b) != size + 1 or b[-1] != n) for b, n in zip(kept, sizes, strict=True)):
                kept = [None] * len(params)  # the number of ranks has changed
            kept = [
                b or wished_bounds(p, self.table.shards.layouts.get(p), self.comm.shards(index), cutting)
                for b, p in zip(kept, params, strict=True)
            ]
            part = Slice(rank, size, cutting.bounds(sizes, costs, size, kept), cutting)
            window = self.meta_window(params, whole.form, whole.outside is not None, part)
        dtypes = [
            {key: value.dtype for key, value in whole.state(i).items() if key in SLOT_DIM} for i in range(len(params))
        ]
        group, is_local = self.table.group_of[params[0]], size > 1 or self.comm.preconditions(index)
        return WindowUnit(name, params, window, group, is_local=is_local, part=part, dtypes=dtypes)

    def _places(
        self, params: Sequence[nn.Parameter], part: Slice | None, device: torch.device | None = None
    ) -> list[Place]:
        shapes = [real(p).shape for p in params]
        if part is None:
            return [Place(s, self.options.working(p), device or p.device) for s, p in zip(shapes, params, strict=True)]
        return [
            Place(part.shape(i, s), self.options.working(p), device or p.device, s)
            for i, (s, p) in enumerate(zip(shapes, params, strict=True))
        ]

    def meta_window(
        self, params: Sequence[nn.Parameter], form: Form, momentum: bool, part: Slice | None = None
    ) -> GradientWindow:
        return GradientWindow(self._places(params, part, torch.device("meta")), form, momentum)

    def _window(self, unit: WindowUnit, form: Form, momentum: bool) -> GradientWindow:
        return GradientWindow(self._places(unit.params, unit.part), form, momentum)

    def _fill(self, unit: WindowUnit, sources: Mapping[nn.Parameter, WindowUnit]) -> None:
        """Allocate the window of a new unit, and copy the rows of its parameters from earlier windows."""
        states: list[dict[str, Tensor]] = [
            self.own_state(unit, i, self.table.state[p]) for i, p in enumerate(unit.params)
        ]
        old = list(dict.fromkeys(sources[p] for p in unit.params if p in sources))
        rounded = stored_otherwise(unit, old)
        if any(not u.is_local for u in old):  # the rows are on another rank
            states, shared, old = [{} for _ in states], {}, []
        elif old:
            shared = {**old[0].window.shared_state(), "amplification": old[0].lagged}
            places = {tuple(int(u.window.counters[k]) for k in ("pos", "count")) + (u.window.m,) for u in old}
            if len(places) > 1:  # windows that were not filled together have no common rows
                states, shared = [{} for _ in states], {}
        else:  # a copy, or a new optimizer
            shared = next((state for state in states if "gram" in state), {})
        for p in unit.params:
            for key in [k for k in self.table.state[p] if base_key(k) in CATALOG]:
                del self.table.state[p][key]
        if not unit.is_local:
            return
        momentum = unit.window.outside is not None or "momentum_weight" in shared
        unit.window = self._window(unit, unit.window.form, momentum)
        unit.lagged = torch.zeros(LAG, dtype=torch.float64, pin_memory=unit.params[0].device.type == "cuda")
        self.take_over(unit, states, shared, rounded)
        if old and (len(old) > 1 or not set(old[0].params) <= set(unit.params)):
            unit.window.recompute_gram()  # columns were removed, or added with existing rows
        self.expose(unit)

    def own_state(self, unit: WindowUnit, i: int, state: Mapping[str, Any]) -> dict[str, Tensor]:
        """The curvature in the state of a parameter of a unit, limited to the part of the window on this rank."""
        found = {base_key(k): v for k, v in state.items() if base_key(k) in CATALOG}
        if unit.part is None or any("@" in key for key in state):
            return found
        whole = {k: v for k, v in found.items() if k not in SHARED}
        return {
            **{k: v for k, v in found.items() if k in SHARED},
            **unit.part.cutting.cut_state(whole, unit.part.bounds[i][-1], unit.part.span(i)),
        }

    def take_over(
        self, unit: WindowUnit, states: Sequence[Mapping[str, Tensor]], shared: Mapping[str, Tensor], rounded: bool
    ) -> None:
        """Fill a window from a state, which may have another number of slots. Without a state, it stays empty."""
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
        form = self.options.form(m)
        old = self._window(unit, form, "momentum_weight" in shared)
        old.adopt(states, shared, rounded)
        window.adopt([{} for _ in states], {})
        window.adopt_resized(old)

    def expose(self, unit: WindowUnit) -> None:
        """Store a view of its part of the window in the state of each parameter. Slices have separate keys."""
        for i, p in enumerate(unit.params):
            found = unit.window.state(i)
            if unit.part is not None:
                found = {f"{key}{unit.part.suffix}": value for key, value in found.items() if value.numel()}
            self.table.state[p].update(found)
        self.table.state[unit.params[0]].update(unit.window.shared_state(), amplification=unit.lagged)

    def momentum_if_wanted(self, unit: WindowUnit) -> float:
        """Return β of the momentum on gradients, and create its state when a schedule first turns it on."""
        beta = self.solver.momentum_of_gradients(unit.group)
        if beta > 0 and unit.window.outside is None:
            unit.window.keep_outside()
            if unit.is_local:
                self.expose(unit)
        return beta

    def _require_memory(self, units: Sequence[WindowUnit]) -> None:
        """Raise an error if the windows do not fit into memory, before anything is allocated."""
        needed: dict[torch.device, int] = {}
        units = [unit for unit in units if unit.is_local]
        for unit in units:
            device = unit.params[0].device
            needed[device] = needed.get(device, 0) + unit.window.nbytes
        for device, nbytes in needed.items():
            free = free_bytes(device)
            if free is not None and nbytes > free:
                first, entries = units[0], sum(math.prod(p.shape) for unit in units for p in unit.window.places)
                m, sparse = first.window.m, Form(first.window.m, TopK())
                fits = max(1, int(m * free / nbytes * 0.9))
                less = sum(self.meta_window(unit.params, sparse, False, unit.part).nbytes for unit in units)
                form = first.window.form.describe(self.options.working(first.params[0]))
                raise RuntimeError(
                    f"the gradient window needs {human_bytes(nbytes)} (window_size={m}, {entries:,} parameters, "
                    f"{form}) and {human_bytes(free)} are free on {device}. Use compression=TopK() "
                    f"({human_bytes(less)}), or a window_size of at most {fits}."
                )

    def lay_out(self, placed: list[Unit] | None, *, keep: bool) -> None:
        """Create units without memory, for a strategy that has already placed them.

        Args:
            placed: The units that the strategy has placed.
            keep: Whether parameters stay divided in the same way.
        """
        self.placed = placed
        if not keep:
            self.bounds = {}
        named = self.named()
        self.wholes = [self.whole_window(params) for params in named.values()]
        pairs = zip(named.items(), self.wholes, strict=True)
        self.units = [self.new_unit(i, name, params, whole) for i, ((name, params), whole) in enumerate(pairs)]
        self.unit_of = {p: unit for unit in self.units for p in unit.params}

    # ------------------------------------------------------------------ life
    def retreat(
        self, units: list[WindowUnit], bounds: dict[nn.Parameter, Bounds], joined: Iterable[nn.Parameter]
    ) -> None:
        """Return to earlier units, without the parameters that have joined since."""
        self.units, self.bounds = units, bounds
        self.unit_of = {p: unit for unit in units for p in unit.params}
        for p in joined:
            self.table.state[p] = {k: v for k, v in self.table.state[p].items() if base_key(k) not in CATALOG}
        self.copied = set()

    def take_back(self, group: dict[str, Any]) -> None:
        """Remove the last group, whose columns do not fit into the windows."""
        if self.table.groups[-1] is group:
            dropped = self.table.groups.pop()["params"]
            for p in dropped:
                self.partition.excluded.pop(p, None)
            self.table.forget(dropped)

    def replace(self, after: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Replace the parameters by those that ``after`` maps them to."""
        self.bounds = {after[p]: bounds for p, bounds in self.bounds.items() if p in after}
        self.copied = {after[p] for p in (*self.unit_of, *self.copied) if p in after}

    def kept(self) -> dict[str, Any]:
        """Return the values from which the plan of a copy is constructed."""
        return {"excluded": dict(self.partition.excluded), "bounds": dict(self.bounds), "covered": list(self.unit_of)}
