"""The stages of a step over windows of past gradients.

::

    gradients ─► own parts ─► push ─► dots summed over parts ─► solve ─► combine ─► directions of all windows
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from secondorder import options
from secondorder.comm.layout import local
from secondorder.comm.strategy import CommStrategy, Unit
from secondorder.curvature.solvers import WindowSolver
from secondorder.curvature.window.unit import Source, WindowUnit, real
from secondorder.curvature.window.window import Push
from secondorder.linalg import gram
from secondorder.linalg.dense import full_precision
from secondorder.parallel.windows import WindowExchange
from secondorder.parameters import Directions, ParameterTable
from secondorder.preconditioners.base import Preconditioner, Proposal, Rule
from secondorder.preconditioners.hooks import NoHooks
from secondorder.preconditioners.window_plan import WindowPlan, WindowStructure
from secondorder.preconditioners.window_report import WindowReport
from secondorder.runtime import Runtime

#: Norm of a gradient above which its products overflow, by working precision.
_LARGEST_NORM = {torch.float32: 1e15, torch.float64: 1e150}
#: Entries of the matrices that are factorized in one batch.
_BATCH = 1 << 20


class WindowPreconditioner(Preconditioner):
    """Windows of past gradients, and the stages of a step that use them.

    Args:
        solver: The solver of the method.
        structure: The options that are the same in all groups.
        comm: Communication strategy, which decides which ranks store which windows.
        table: The parameters.
        runtime: The step counter.
        kept: If this is a copy, the return value of ``WindowPlan.kept`` for the original.
    """

    takes_sources = False
    plan: WindowPlan

    def __init__(
        self,
        solver: WindowSolver,
        structure: WindowStructure,
        comm: CommStrategy,
        table: ParameterTable,
        runtime: Runtime,
        kept: Mapping[str, Any] | None = None,
    ) -> None:
        self.solver, self.structure, self.comm, self.table = solver, structure, comm, table
        self.plan = WindowPlan(solver, structure, comm, table, **(kept or {}))
        self.report = WindowReport(self.plan)
        self.exchange = WindowExchange(comm)
        self.runtime, self.hooks = runtime, NoHooks()
        self._norms: dict[nn.Parameter, Tensor] = {}

    def follow(self, place: Callable[[list[Unit]], None]) -> bool:
        """Make a new plan for the current parameters, and return whether there are new windows."""
        table, partition = self.table, self.plan.partition
        for group in table.groups:
            options.whole(1)("window_size", group["window_size"])
        table.name_parameters()
        changed = self.plan.follow(place)
        self.reconnect()
        table.reasons = partition.reasons(table)
        table.skipped_by_user = set(partition.excluded)
        return changed

    def kept(self) -> dict[str, Any]:
        """Return the state that copies and pickles keep in addition to the state and the recipe."""
        return self.plan.kept()

    def reconnect(self) -> None:
        """Let the exchange use the current windows of the plan."""
        self.exchange.follow(self.plan.units, self.table.group_of, self.table.shards.layouts)

    def imagined(self, comm: CommStrategy, *, is_real: bool) -> WindowPreconditioner:
        """Return the windows of the first rank under another strategy, laid out but not allocated.

        Args:
            comm: The strategy.
            is_real: Whether parameters are sharded in the same way as they are now.

        Returns:
            The windows, which support only queries that depend on shapes.
        """
        found = WindowPreconditioner(self.solver, self.structure, comm, self.table, Runtime(), self.plan.kept())
        found.plan.lay_out(self.plan.placed, keep=is_real)
        found.exchange = WindowExchange(comm, torch.device("meta"))
        found.reconnect()
        return found

    def facts(self) -> dict[str, list[str]]:
        """Return the windows whose sums are due, which must be equal on all ranks because they are sent."""
        return {"windows to sum anew": [unit.name for unit in self.plan.units if unit.window.stale]}

    def recover(self) -> None:
        """Do nothing, since a checkpoint always contains complete windows."""

    # ------------------------------------------------------------------ stages 1 to 3: the window
    def collect(self) -> None:
        """Do nothing, since window methods do not capture anything."""

    def drop(self) -> None:
        """Count a batch that is left out."""
        for unit in self.plan.units:
            if unit.is_local:
                unit.window.counters["skipped"].add_(1)

    def acceptable(self, gradients: Directions) -> Tensor:
        """Return whether no product of gradients overflows, as a 0-dim bool tensor."""
        norms = self.table.shards.norms(list(gradients), list(gradients.values()))
        self._norms = dict(zip(gradients, norms.unbind(), strict=True))
        precise = all(self.structure.working(p) == torch.float64 for p in self.plan.unit_of)
        limit = _LARGEST_NORM[torch.float64 if precise else torch.float32]
        small: Tensor = torch.linalg.vector_norm(norms) < limit
        return small

    def learn(self, statistics: Any, gradients: Directions, gate: Tensor | None) -> None:
        """Store the gradients as the newest rows."""
        self.exchange.refresh_stale()
        pushes: dict[WindowUnit, Push] = {}
        betas = {unit: self.plan.momentum_if_wanted(unit) for unit in self.plan.units}
        for unit in self.plan.units:
            self._find_inputs(unit, gradients)
        decays = (
            self.exchange.own([self._decay_in_direction(unit) for unit in self.plan.units])
            if any(map(self.exchange.decays_outside, self.plan.units))
            else None
        )
        for unit, own in zip(
            self.plan.units, self.exchange.own([unit.inputs for unit in self.plan.units]), strict=True
        ):
            decayed = None if decays is None else next(decays)
            if own is None:
                continue
            with full_precision(unit.window.device):
                pushes[unit] = unit.window.push(own, gate, betas[unit])
                unit.decayed = None if decayed is None else self._scaled_decay(unit, decayed)
                unit.decay_dots = None if unit.decayed is None else unit.window.dots(unit.decayed)
        self.exchange.sum_dots(pushes)
        for unit, push in pushes.items():
            unit.window.finish(push)
        self._norms = {}

    def _find_inputs(self, unit: WindowUnit, gradients: Directions) -> None:
        """Find the input of a window and its norm."""
        inputs = [self._input(p, gradients) for p in unit.params]
        unit.inputs = inputs if any(x is not None for x in inputs) else None
        if unit.inputs is not None:
            there = [self._norms[p] for p in unit.params if p in self._norms]
            unit.norm = torch.linalg.vector_norm(torch.stack(there))

    def _input(self, p: nn.Parameter, gradients: Directions) -> Tensor | None:
        """The input of the window, which is the gradient with coupled weight decay."""
        gradient = gradients.get(p)
        if gradient is None:
            return None
        group = self.table.group_of[p]
        rule = self.plan.unit_of[p].group["graft"] or group["inner"]
        coupled = group["weight_decay_mode"] == "standard" and not options.is_decoupled(rule, group)
        if group["weight_decay"] and coupled:
            gradient = gradient.add(local(p), alpha=group["weight_decay"])
        return real(gradient)

    # ------------------------------------------------------------------ stage 4: coefficients
    def refresh_due(self) -> list[int]:
        """Solve for the coefficients of all directions."""
        alike: dict[tuple[object, ...], list[WindowUnit]] = {}
        for unit in self.plan.units:
            if unit.inputs is not None and unit.is_local:
                unit.source = self._source(unit)
                alike.setdefault(self.solver.key(unit, self.runtime.step), []).append(unit)
        for units in _batches(alike.values()):
            parts = [unit.window.lower() for unit in units]
            lower = parts[0][None] if len(parts) == 1 else torch.stack(parts)
            for unit, a in zip(units, self.solver.coefficients(units, lower, self.runtime.step), strict=True):
                unit.a = a
        return []

    def share(self, refreshed: list[int]) -> None:
        """Do nothing, since every rank that stores rows has computed their coefficients."""

    def _source(self, unit: WindowUnit) -> Source:
        window, group, t = unit.window, unit.group, unit.window.filled
        b, q = (torch.arange(t, device=window.device) == window.newest).to(torch.float64), None  # the newest row
        r: list[Tensor | None] | None = None
        if window.outside is not None:
            b, q, r = window.outside.b[:t], window.outside.q[:t], list(window.outside.r)
            if self.solver.corrects_bias(group):
                weight = window.outside.weight
                b, q, r = b / weight, q / weight, [x / weight.to(x.device, x.dtype) for x in window.outside.r]
        elif options.is_adam(group["graft"]):
            # This is Adam's first moment restricted to the rows of the window. Only its direction matters, and older
            # gradients would be multiplied by f(0), which is huge.
            b = gram.decay(self.solver.adam_options(group)[0][0], window.counters["pos"], window.m, t)
            b = b / b.sum()
        decayed, dots = unit.decayed, unit.decay_dots
        if decayed is not None and dots is not None:
            q = dots if q is None else q + dots
            pairs = zip([None] * len(decayed) if r is None else r, decayed, strict=True)
            r = [d if x is None else x if d is None else x + d for x, d in pairs]
        return Source(b, q, r)

    def _decay_in_direction(self, unit: WindowUnit) -> list[Tensor | None] | None:
        """Parameters whose weight decay is preconditioned but does not enter the window (``"reg"``, ``"both"``)."""
        if not self.exchange.decays_outside(unit) or unit.inputs is None:
            return None
        pairs = zip(unit.params, unit.inputs, strict=True)
        found = [real(local(p.detach())) if x is not None and self.exchange.decay_of(p) else None for p, x in pairs]
        return found if any(x is not None for x in found) else None

    def _scaled_decay(self, unit: WindowUnit, own: Sequence[Tensor | None]) -> list[Tensor | None]:
        """``wd·p`` of this rank's part of a window, in its precision."""
        pairs = zip(unit.params, own, strict=True)
        return [None if x is None else x.to(self.structure.working(p)) * self.exchange.decay_of(p) for p, x in pairs]

    # ------------------------------------------------------------------ stages 5 and 6: directions
    def propose(self, gradients: Directions, source: Directions, gate: Tensor | None) -> Proposal:
        """Directions of all windows."""
        directions: Directions = {}
        shared = self.exchange.directions([self._combined(unit) for unit in self.plan.units])
        raw: Directions = {}
        sizes: list[tuple[str | None, list[nn.Parameter]]] = []
        for unit, found in zip(self.plan.units, shared, strict=True):
            if unit.inputs is None or found is None:
                continue
            there = [(p, u, x) for p, u, x in zip(unit.params, found, unit.inputs, strict=True) if x is not None]
            directions |= {p: u for p, u, _ in there}
            raw |= {p: x for p, _, x in there}
            sizes.append((unit.group["graft"], [p for p, _, _ in there]))
            unit.inputs = unit.source = unit.decayed = unit.decay_dots = None
        return Proposal(directions, raw, sizes)

    def _combined(self, unit: WindowUnit) -> list[Tensor] | None:
        """This rank's part of the direction of a unit: ``Gᵀa + c·r``; None without gradients."""
        if unit.inputs is None or unit.a is None or unit.source is None:
            return None
        with full_precision(unit.window.device):
            found = unit.window.combine(unit.a)
        for u, r in zip(found, unit.source.r or [None] * len(found), strict=True):
            if r is not None:
                c = unit.outside  # fill in the number on the device, because a copy from the host would wait
                u.addcmul_(r.to(u.dtype), c.to(u) if isinstance(c, Tensor) else u.new_full((), c))
        return found

    # ------------------------------------------------------------------ the first-order rules
    @property
    def covered(self) -> Mapping[nn.Parameter, WindowUnit]:
        """The window of each covered parameter."""
        return self.plan.unit_of

    def adam_options(self, group: Mapping[str, Any]) -> tuple[tuple[float, float], float]:
        """Return β₁, β₂ and ε of Adam's rule in a group, as the method defines them."""
        return self.solver.adam_options(group)

    def preconditioned(self, gradients: Directions) -> list[nn.Parameter]:
        """Return the covered parameters that have gradients."""
        return [p for p in gradients if p in self.plan.unit_of]

    def rule(self, p: nn.Parameter, group: Mapping[str, Any], rule: Rule) -> Rule:
        """Return the rule without the momentum and the weight decay that the window contains."""
        if rule.kind == "adam":
            return rule if rule.decoupled else rule._replace(weight_decay=0.0)
        mode, decay = group["weight_decay_mode"], group["weight_decay"]
        if mode != "standard" or not rule.decoupled:
            rule = rule._replace(weight_decay=0.0, shrink=decay if mode in ("legacy", "both") else 0.0)
        if rule.kind == "sgd":
            momentum, factor = self.solver.momentum_after(group)
            rule = rule._replace(momentum=momentum, factor=factor)
        return rule


def _batches(alike: Iterable[list[WindowUnit]]) -> Iterator[list[WindowUnit]]:
    """Batches of units of equal size, which are solved together. The batch size limits the temporary memory."""
    for units in alike:
        count = max(1, _BATCH // max(units[0].window.filled, 1) ** 2)
        yield from (units[i : i + count] for i in range(0, len(units), count))
