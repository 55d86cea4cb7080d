"""Understudies: optimizers that play their own steps without data, to tell what ranks send, keep and compute.

An understudy has the class of the optimizer, with a few verbs replaced, all its attributes, a state of ``meta``
tensors, and a strategy that counts messages instead of sending them. What a plan says of a step is what the code of the
step does; only what needs data is left out.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from secondorder.capture.sites import Captured
from secondorder.capture.statistics.measurement import Measured
from secondorder.comm.strategy import Unit
from secondorder.curvature.block import Block
from secondorder.curvature.schema import Place, Schema, likes, tensors
from secondorder.curvature.window.unit import Unit as Window
from secondorder.curvature.window.window import LAG, GradientWindow
from secondorder.linalg.dense import precision_of
from secondorder.parallel.exchange import Posted, StatisticsExchange
from secondorder.parallel.roles import RoleWorker
from secondorder.parameters import Directions
from secondorder.plan.plan import Holding, Work
from secondorder.plan.rehearsal import Rehearsal
from secondorder.preconditioners.layer_capture import LayerCapture
from secondorder.preconditioners.layers import LayerPreconditioner
from secondorder.preconditioners.window_plan import CATALOG
from secondorder.preconditioners.windows import WindowPreconditioner

#: FLOPs of factorising [n, n] over n³: an eigendecomposition, a Cholesky factorisation with the inverse.
_EIGEN, _CHOLESKY = 9.0, 1.0


class Understudy:
    """What all understudies have."""

    comm: Rehearsal

    def suppose(self, batch_size: int | None) -> None:
        """Suppose that steps have so many examples per rank."""

    def notes(self) -> Iterator[str]:
        """What a user should know."""
        yield from ()

    # ------------------------------------------------------------------ what a family supplies
    @abstractmethod
    def units(self) -> Sequence[Unit]:
        """What a strategy places."""

    def begin(self, comm: Rehearsal) -> None:
        """Take a strategy, and the state of a run that has long begun."""
        self.comm = comm

    @abstractmethod
    def intervals(self) -> list[int]:
        """Numbers of steps after which something comes again."""

    @abstractmethod
    def key(self, t: int) -> Hashable:
        """Steps with equal keys send the same messages."""

    @abstractmethod
    def rehearse(self, t: int) -> None:
        """Play step t."""

    @abstractmethod
    def holdings(self) -> Iterator[Holding]:
        """Curvature that ranks keep."""

    @abstractmethod
    def work(self) -> Iterator[Work]:
        """FLOPs per step."""


class DryExchange(StatisticsExchange):
    """Sends shapes alone, to which nobody answers."""

    def __init__(self, comm: Rehearsal, like: StatisticsExchange) -> None:
        super().__init__(comm, torch.device("meta"))
        self.rows_seen = like.rows_seen

    def read(self, posted: Posted) -> tuple[dict[int, Measured], Tensor]:
        """Return nothing: no answers are known."""
        posted.work.wait()
        return {}, torch.zeros(len(posted.words[-1]))


class RehearsedLayers(Understudy, LayerPreconditioner):  # type: ignore[misc]  # a narrower kind of strategy
    """A layer method."""

    _batch_size_supposed: int | None = None

    @classmethod
    def of(cls, curvature: LayerPreconditioner) -> Any:
        """Return the blocks of an optimizer for a dry run, which have no strategy yet."""
        made = type(f"Rehearsed{type(curvature).__name__}", (cls, type(curvature)), {})
        own: Any = object.__new__(made)
        kept = {k: v.copy() if type(v) in (dict, list, set) else v for k, v in vars(curvature).items()}
        states: Any = defaultdict(dict)
        runtime = replace(curvature.runtime, states=states, clock=None)
        table = replace(curvature.table, state=states)
        plan = curvature.plan.imagined_on(table, runtime)
        own.__dict__.update(kept, table=table, runtime=runtime, plan=plan, refresher=curvature.refresher.copy())
        own.hooks = LayerCapture(replace(curvature.setting, table=table, runtime=runtime), plan)
        for p, state in curvature.table.state.items():
            states[p] = {k: v.to("meta") if isinstance(v, Tensor) else v for k, v in state.items()}
        return own

    def suppose(self, batch_size: int | None) -> None:
        """Suppose that steps have so many examples per rank."""
        self._batch_size_supposed = batch_size

    def notes(self) -> Iterator[str]:
        """What a user should know."""
        unseen = sum(b.name not in self.exchange.rows_seen for b in self.plan.blocks if self._has_factors(b))
        if unseen:
            known = "taken as one" if self._batch_size_supposed else "pass batch_size= too, or FLOPs of statistics lack"
            yield f"how many rows an example has in {unseen} layers is not known before a step: {known}"

    def units(self) -> Sequence[Unit]:
        """Blocks."""
        return self.plan.units()

    def begin(self, comm: Rehearsal) -> None:
        """Every block is here, has statistics and was refreshed."""
        super().begin(comm)
        self.exchange = DryExchange(comm, self.exchange)
        self.plan.comm, self.plan.imagined = comm, {}  # which are empty until all of them are known
        schemas = {block.index: self.imagined_schema(block) for block in self.plan.blocks}
        self.plan.imagined = schemas
        for block in self.plan.blocks:
            state = block.state
            found = {k: v for k, v in state.items() if k in self.table.entries} | likes(schemas[block.index])
            state.update({k: v if isinstance(v, Tensor) else max(1, v) for k, v in found.items()})

    def imagined_schema(self, block: Any) -> Schema:
        """Return what the state of a block would hold."""
        return self.plan.live_schema(block)

    # ------------------------------------------------------------------ steps
    def _go_to(self, t: int) -> None:
        """Come to a step; what overlaps is adopted by the schedule, as nothing was begun."""
        self.runtime.step, schedule, count = t, self.options.schedule, len(self.plan.blocks)
        for b in self.plan.blocks:
            adopt_at = schedule.adoption(t, b.group[self.refresh_interval], (b.index, count))
            self.table.state[b.owner]["adopt_at"] = adopt_at

    def intervals(self) -> list[int]:
        """Of statistics, scales and refreshes."""
        return [n for found in self.chosen_intervals() for n in found if isinstance(n, int) and n > 0]

    def key(self, t: int) -> Hashable:
        """What is due."""
        self._go_to(t)
        due = [(i, *self.plan.blocks[i].sums(own)) for i, own in self.find_due().items()]
        return self.comm.key(t), tuple(due), tuple(b.index for b in self.plan.blocks if self.is_due(b))

    def rehearse(self, t: int) -> None:
        """The stages of a step, of a batch of which nothing is known."""
        me = cast(Any, self)
        self._go_to(t)
        self.hooks.due = self.find_due()
        self.comm.average_gradients(list(self.table.group_of))
        me.learn(self.reduce(Captured({}, {})), {}, None)
        self.share(me.refresh_due())
        me.propose({}, {}, None)
        self.comm.after(RoleWorker(self), t)

    def fold(self, captured: Captured, gate: Tensor | None) -> None:
        """There are none."""

    def directions_of(self, block: Block, source: Directions) -> list[Tensor]:
        """Room for directions."""
        return [torch.empty(p.shape, dtype=precision_of(p), device="meta") for p in block.params]

    # ------------------------------------------------------------------ what ranks keep and compute
    def holdings(self) -> Iterator[Holding]:
        """Estimates and curvature, where the strategy has them."""
        for p in self.plan.block_of:
            index, near = self.plan.block_of[p].index, {Place.ESTIMATE: "estimate", Place.CURVATURE: "curvature"}
            if not self.exchange.sends_measured(self.plan.block_of[p]):
                near[Place.MEASURED] = "curvature"
            for entry in self.plan.schema_of(p, self.table.group_of[p], self.table.state[p]).values():
                if isinstance(entry.like, Tensor):
                    whose = self.comm.holders(index, near[entry.place]) if entry.place in near else None
                    yield Holding(whose, entry.kind, entry.nbytes)

    def work(self) -> Iterator[Work]:
        """Of refreshes and of directions."""
        for block in self.plan.blocks:
            interval = block.group[self.refresh_interval]
            if interval:
                yield from self._work_of_statistics(block)
                refresh, direction = self._flops_of(block)
                yield Work(self.comm.holders(block.index, "owner"), "refresh", refresh / interval)
                yield Work(self.comm.holders(block.index, "directions"), "precondition", direction)

    def _has_factors(self, block: Block) -> bool:
        """Whether factors are sums over rows."""
        schema = self.plan.live_schema(block)
        return "factor_weight" in schema and "rows_instead" not in schema

    def _work_of_statistics(self, block: Block) -> Iterator[Work]:
        """Of the sums behind the factors, and of those of squares of per-example gradients."""
        seen = self.exchange.rows_seen.get(block.name)
        n = self._batch_size_supposed or (0 if seen is None else seen[0])
        if not self._has_factors(block) or not n or not block.group[self.capture_interval]:
            return
        per_example = 1.0 if seen is None else float(torch.as_tensor(seen[1]).flatten()[0]) / seen[0]
        sizes, group = (block.adapter.n_a, block.adapter.n_g), block.group
        schema = self.plan.live_schema(block)
        dense = [f"packed_{s}" in schema or schema[f"factor_{s}"].symmetric for s in "ag"]
        squares = sum(size**2 if full else size for size, full in zip(sizes, dense, strict=True))
        who, lead = self.comm.holders(block.index, "captures"), block.adapter.groups
        yield Work(who, "statistics", 2.0 * lead * n * per_example * squares / group[self.capture_interval])
        if "scale" in schema and group["estimator"] == "intra":
            flops = lead * n * _flops_of_squares(per_example, *sizes)
            yield Work(who, "scale", flops / group["scale_update_steps"])

    def _flops_of(self, block: Block) -> tuple[float, float]:
        """FLOPs of a refresh and of a direction."""
        found = tensors(self.plan.live_schema(block))
        n_a, n_g, groups = block.adapter.n_a, block.adapter.n_g, block.adapter.groups
        refresh = direction = 0.0
        for side, n in zip("ag", (n_a, n_g), strict=True):
            for key, factorise, products in ((f"basis_{side}", _EIGEN, 2), (f"inverse_{side}", _CHOLESKY, 1)):
                if key in found and found[key].dim() > 1 + (groups > 1):  # not diagonal
                    refresh += factorise * groups * n**3
                    direction += 2.0 * products * groups * n * n_a * n_g
                    if "scale" in found:  # brought into the new basis
                        refresh += 2.0 * groups * (n**3 + n * n_a * n_g)
        if "rows_g" in found:
            refresh, direction = _flops_of_rows(found["rows_g"], found["rows_a"], n_a, n_g)
        return refresh, direction + block.shaping_flops


def _flops_of_squares(rows: float, n_a: int, n_g: int) -> float:
    """FLOPs of the squared gradient of an example of so many rows in the eigenbases, the least of the exact ways."""
    rows_a, rows_g, product = 2.0 * rows * n_a**2, 2.0 * rows * n_g**2, 2.0 * rows * n_a * n_g
    gradient = min(rows_a, 2.0 * n_g * n_a**2) + min(rows_g, 2.0 * n_g**2 * n_a) + product
    return min(gradient, rows_a + rows_g + product * (rows + 1) / 2)


def _flops_of_rows(g: Tensor, a: Any, n_a: int, n_g: int) -> tuple[float, float]:
    """FLOPs of a kernel of rows and its inverse, and of a direction by it."""
    (r, positions, d_g), groups = g.shape[-3:], g.shape[:-3].numel()
    d_a = a.shape[-1] if a.is_floating_point() else 0
    kernel = 2.0 * r**2 * positions**2 * (d_a + d_g) + r**3
    direction = 4.0 * r * positions * (n_a * n_g if d_a else d_g) + 2.0 * r**2
    return groups * kernel, groups * direction


class RehearsedWindows(Understudy):
    """A window method.

    Args:
        windows: The windows of the optimizer.
    """

    def __init__(self, windows: WindowPreconditioner) -> None:
        self._windows = windows

    def units(self) -> Sequence[Unit]:
        """Windows."""
        return self._windows.plan.portions or []

    def begin(self, comm: Rehearsal) -> None:
        """Windows as the first rank has them."""
        super().begin(comm)
        self._windows = self._windows.imagined(comm, is_real=comm.is_real)

    def intervals(self) -> list[int]:
        """Every step does the same."""
        return [1]

    def key(self, t: int) -> Hashable:
        """Every step does the same."""
        return None

    def rehearse(self, t: int) -> None:
        """Dots and directions of a step."""
        self.comm.average_gradients(list(self._windows.table.group_of))
        self._windows.exchange.sum_dots({})
        self._windows.exchange.directions([None] * len(self._windows.units))

    # ------------------------------------------------------------------ what ranks keep and compute
    def holdings(self) -> Iterator[Holding]:
        """Windows, or their parts."""
        for index, (unit, whole) in enumerate(zip(self._windows.units, self._windows.plan.wholes, strict=True)):
            whose = None if unit.part is not None else self.comm.holders(index, "curvature")
            yield Holding(whose, "buffers", LAG * torch.float64.itemsize)
            for key, value in whole.shared_state().items():
                yield Holding(whose, CATALOG[key].kind, value.nbytes)
            if unit.part is not None:
                yield from self._parts_of(unit, whole)
            else:
                for i in range(len(unit.params)):
                    for key, value in whole.state(i).items():
                        yield Holding(whose, CATALOG[key].kind, value.nbytes)

    def _parts_of(self, unit: Window, whole: GradientWindow) -> Iterator[Holding]:
        """Slices, by the column that has them."""
        part = unit.part
        assert part is not None
        for i, bounds in enumerate(part.bounds):
            state = whole.state(i)
            for rank, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
                if start < stop:
                    found = part.cutting.cut_state(state, bounds[-1], (start, stop))
                    for key, value in found.items():
                        yield Holding(self.comm.grid.columns[rank], CATALOG[key].kind, value.nbytes)

    def work(self) -> Iterator[Work]:
        """Of the solve, which all parts repeat, and of the passes over the rows."""
        for index, (unit, portion) in enumerate(zip(self._windows.units, self.units(), strict=True)):
            whose = None if unit.part is not None else self.comm.holders(index, "curvature")
            yield Work(whose, "refresh", portion.refresh_flops)
            yield Work(whose, "precondition", portion.step_flops / (1 if unit.part is None else unit.part.size))
