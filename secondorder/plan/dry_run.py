"""Dry runs: steps of an optimizer without data, which show what ranks send, store and compute.

A dry run uses a preconditioner of the optimizer's class with states of ``meta`` tensors. Its strategy counts messages
instead of sending them. Exchanges post their messages but read nothing, because no other rank answers; the values that
the answers would determine are passed in. A plan thus follows the code of a real step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from secondorder.capture.sites import Captured
from secondorder.capture.statistics.measurement import Measured, Reduced
from secondorder.curvature.block import Block
from secondorder.curvature.schema import Place, Schema, likes
from secondorder.curvature.window.unit import WindowUnit
from secondorder.curvature.window.window import LAG, GradientWindow
from secondorder.curvature.work import flops_of_direction, flops_of_products, flops_of_refresh, flops_of_scale
from secondorder.parallel.exchange import Posted, StatisticsExchange
from secondorder.parallel.roles import RoleWorker
from secondorder.plan.plan import Holding, Work
from secondorder.plan.rehearsal import Rehearsal
from secondorder.preconditioners.parts import Setting
from secondorder.preconditioners.window_plan import CATALOG

if TYPE_CHECKING:
    from secondorder.preconditioners.layers import LayerPreconditioner
    from secondorder.preconditioners.windows import WindowPreconditioner


class DryExchange(StatisticsExchange):
    """Posts shapes and reads nothing.

    Args:
        comm: The strategy, which counts the messages.
        rows_seen: See :class:`StatisticsExchange`.
    """

    def __init__(self, comm: Rehearsal, rows_seen: Mapping[str, tuple[float, float | Tensor]]) -> None:
        super().__init__(comm, torch.device("meta"))
        self.rows_seen = dict(rows_seen)

    def read(self, posted: Posted) -> tuple[dict[int, Measured], Tensor]:
        """Return no statistics, because no other rank answers."""
        posted.work.wait()
        return {}, torch.zeros(len(posted.words[-1]))


class LayerDryRun:
    """Dry run of a layer method.

    Args:
        curvature: The blocks of the optimizer, which are not changed.
        comm: The strategy, which counts the messages.
        batch_size: Number of examples per rank and step; None for the number in the last step.

    Attributes:
        layers: The same blocks with states of ``meta`` tensors. All that have curvature are refreshed.
    """

    def __init__(self, curvature: LayerPreconditioner[Any], comm: Rehearsal, batch_size: int | None) -> None:
        self._comm, self._batch_size = comm, batch_size
        states: Any = defaultdict(dict)
        for p, state in curvature.table.state.items():
            states[p] = {k: v.to("meta") if isinstance(v, Tensor) else v for k, v in state.items()}
        table = replace(curvature.table, state=states)
        runtime = replace(curvature.runtime, states=states, clock=None)
        setting = replace(curvature.setting, comm=comm, table=table, runtime=runtime)
        self.layers = self._without_blocks(curvature, setting, DryExchange(comm, curvature.exchange.rows_seen))
        self.layers.refresher.follow(curvature.refresher)
        self.layers.plan.borrow(curvature.plan)
        schemas = self._schemas()
        for block in self.layers.plan.blocks:
            state = block.state
            found = {k: v for k, v in state.items() if k in table.entries} | likes(schemas[block.index])
            least = int(self.layers.plan.is_on(block.group))
            state.update({k: v if isinstance(v, Tensor) else max(least, v) for k, v in found.items()})

    # ------------------------------------------------------------------ parts that a family of methods overrides
    def _without_blocks(
        self, curvature: LayerPreconditioner[Any], setting: Setting, exchange: DryExchange
    ) -> LayerPreconditioner[Any]:
        """Return the preconditioner of the dry run, which has no blocks yet."""
        return type(curvature)(setting, exchange)

    def _schemas(self) -> dict[int, Schema]:
        """Return the schemas of the states of the blocks, by index."""
        return {block.index: self.layers.plan.live_schema(block) for block in self.layers.plan.blocks}

    def _reduced(self) -> Reduced:
        """Return the statistics that the ranks captured in a step. Messages with sums do not depend on them."""
        return Reduced({}, {})

    # ------------------------------------------------------------------ steps
    def _go_to(self, t: int) -> None:
        """Set the step and the refreshes that it adopts in a run that takes every step."""
        layers = self.layers
        schedule, count = layers.options.schedule, len(layers.plan.blocks)
        layers.go_to(t)
        for b in layers.plan.blocks:
            b.state["adopt_at"] = schedule.adoption(t, b.group[layers.refresh_interval], (b.index, count))

    def intervals(self) -> list[int]:
        """Return the intervals of statistics, scales and refreshes."""
        return self.layers.schedule.intervals()

    def key(self, t: int) -> Hashable:
        """Return a key of the work that is due."""
        self._go_to(t)
        blocks = self.layers.plan.blocks
        due = [(i, *blocks[i].sums(own)) for i, own in self.layers.schedule.find_due().items()]
        return self._comm.key(t), tuple(due), tuple(b.index for b in blocks if self.layers.is_due(b))

    def step(self, t: int) -> None:
        """Run the stages of a step."""
        layers = self.layers
        self._go_to(t)
        layers.hooks.due = layers.schedule.find_due()
        self._comm.average_gradients(list(layers.table.group_of))
        layers.reduce(Captured({}, {}))
        layers.learn(self._reduced(), {}, None)
        layers.share(layers.refresh_due())
        layers.propose({}, {}, None)
        self._comm.after(RoleWorker(layers), t)

    # ------------------------------------------------------------------ storage and FLOPs of the ranks
    def notes(self) -> Iterator[str]:
        """Yield a note if the FLOPs of statistics are not known."""
        layers = self.layers
        unseen = sum(b.name not in layers.exchange.rows_seen for b in layers.plan.blocks if self._has_factors(b))
        if unseen:
            known = "one is assumed" if self._batch_size else "pass batch_size=, or the FLOPs of statistics are missing"
            yield f"before a step, it is not known how many rows an example has in {unseen} layers: {known}"

    def holdings(self) -> Iterator[Holding]:
        """Yield estimates and curvature on the ranks where the strategy stores them."""
        layers, table = self.layers, self.layers.table
        for p, block in layers.plan.block_of.items():
            near = {Place.ESTIMATE: "estimate", Place.CURVATURE: "curvature"}
            if not layers.exchange.sends_measured(block):
                near[Place.MEASURED] = "curvature"
            for entry in layers.plan.schema_of(p, table.group_of[p], table.state[p]).values():
                if isinstance(entry.like, Tensor):
                    whose = self._comm.holders(block.index, near[entry.place]) if entry.place in near else None
                    yield Holding(whose, entry.kind, entry.nbytes)

    def work(self) -> Iterator[Work]:
        """Yield the FLOPs of statistics, refreshes and directions."""
        for block in self.layers.plan.blocks:
            interval, holders = block.group[self.layers.refresh_interval], self._comm.holders
            directions = flops_of_direction(block, {})
            if interval:
                schema = self.layers.plan.live_schema(block)
                yield from self._work_of_statistics(block, schema)
                yield Work(holders(block.index, "owner"), "refresh", flops_of_refresh(block, schema) / interval)
                directions = flops_of_direction(block, schema) / block.group.get("precondition_steps", 1)
            yield Work(holders(block.index, "directions"), "precondition", directions)

    def _has_factors(self, block: Block) -> bool:
        """Return whether the block has factors, which are sums over rows."""
        return self.layers.plan.is_on(block.group) and "factor_a" in block.sums()

    def _work_of_statistics(self, block: Block, schema: Schema) -> Iterator[Work]:
        """Yield the FLOPs of the sums behind the factors, and of squares of per-example gradients."""
        seen, group = self.layers.exchange.rows_seen.get(block.name), block.group
        n = self._batch_size or (0 if seen is None else seen[0])
        if not self._has_factors(block) or not n or not group[self.layers.capture_interval]:
            return
        number = None if seen is None else torch.as_tensor(seen[1]).flatten()[0]
        rows = 1.0 if seen is None or number is None or number.is_meta else float(number) / seen[0]
        who, every = self._comm.holders(block.index, "captures"), group[self.layers.capture_interval]
        yield Work(who, "statistics", flops_of_products(block, n, rows) / every)
        if "scale" in schema and group["estimator"] == "intra":
            yield Work(who, "scale", flops_of_scale(block, n, rows) / group["scale_update_steps"])


class WindowDryRun:
    """Dry run of a window method, whose steps are all the same.

    Args:
        windows: The windows of the optimizer, which are not changed.
        comm: The strategy, which counts the messages.
    """

    def __init__(self, windows: WindowPreconditioner, comm: Rehearsal) -> None:
        self._comm, self._windows = comm, windows.imagined(comm, is_real=comm.is_real)

    def notes(self) -> Iterator[str]:
        """Yield nothing."""
        yield from ()

    def intervals(self) -> list[int]:
        """Return an interval of one step."""
        return [1]

    def key(self, t: int) -> Hashable:
        """Return the same key for all steps."""
        return None

    def step(self, t: int) -> None:
        """Send the dot products and directions of a step."""
        self._comm.average_gradients(list(self._windows.table.group_of))
        self._windows.exchange.sum_dots({})
        self._windows.exchange.directions([None] * len(self._windows.plan.units))

    # ------------------------------------------------------------------ storage and FLOPs of the ranks
    def holdings(self) -> Iterator[Holding]:
        """Yield windows or their parts."""
        for index, (unit, whole) in enumerate(zip(self._windows.plan.units, self._windows.plan.wholes, strict=True)):
            whose = None if unit.part is not None else self._comm.holders(index, "curvature")
            yield Holding(whose, "buffers", LAG * torch.float64.itemsize)
            for key, value in whole.shared_state().items():
                yield Holding(whose, CATALOG[key].kind, value.nbytes)
            if unit.part is not None:
                yield from self._parts_of(unit, whole)
            else:
                for i in range(len(unit.params)):
                    for key, value in whole.state(i).items():
                        yield Holding(whose, CATALOG[key].kind, value.nbytes)

    def _parts_of(self, unit: WindowUnit, whole: GradientWindow) -> Iterator[Holding]:
        """Yield the slices of a window by the column that stores them."""
        part = unit.part
        assert part is not None
        for i, bounds in enumerate(part.bounds):
            state = whole.state(i)
            for rank, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
                if start < stop:
                    found = part.cutting.cut_state(state, bounds[-1], (start, stop))
                    for key, value in found.items():
                        yield Holding(self._comm.grid.columns[rank], CATALOG[key].kind, value.nbytes)

    def work(self) -> Iterator[Work]:
        """Yield the FLOPs of the solve, which all parts repeat, and of the passes over the rows."""
        placed = self._windows.plan.placed or []
        for index, (unit, flops) in enumerate(zip(self._windows.plan.units, placed, strict=True)):
            whose = None if unit.part is not None else self._comm.holders(index, "curvature")
            yield Work(whose, "refresh", flops.refresh_flops)
            yield Work(whose, "precondition", flops.step_flops / (1 if unit.part is None else unit.part.size))


#: Steps of an optimizer without data, in a run whose warm-up is over.
DryRun = LayerDryRun | WindowDryRun
