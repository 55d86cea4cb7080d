"""Implements ``plan()``, which predicts what a run stores, sends and computes on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from copy import copy
from typing import Any

import torch
from torch import nn

from secondorder import options
from secondorder.comm.comm_opt import CommOpt
from secondorder.comm.dedicated.workers import DedicatedWorkers
from secondorder.comm.layout import is_cut
from secondorder.comm.rank_grid import RankGrid
from secondorder.comm.strategy import CommStrategy, Local, Unit
from secondorder.curvature.schema import kinds
from secondorder.parameters import Group, ParameterTable
from secondorder.plan.dry_run import DryRun, LayerDryRun, WindowDryRun
from secondorder.plan.dry_run_rows import RowDryRun
from secondorder.plan.plan import Holding, Means, Plan, RankPlan, Sum, Traffic, Work, means, spread
from secondorder.plan.rehearsal import Rehearsal
from secondorder.plan.roles import RoleRehearsal
from secondorder.preconditioners.base import Preconditioner
from secondorder.preconditioners.rows import RowPreconditioner
from secondorder.preconditioners.windows import WindowPreconditioner

#: The largest number of steps to run. It applies if the intervals of groups have no small common multiple.
_LONGEST = 10_000


def dry_run(
    curvature: Preconditioner,
    others: Iterable[Holding],
    reason_against_roles: Callable[[], str | None] | None,
    world_size: int | None,
    comm: CommStrategy | None,
    batch_size: int | None,
) -> Plan:
    """Return the plan of an optimizer for some number of ranks, from a dry run of its steps.

    Args:
        curvature: The curvature of the optimizer.
        others: The state other than curvature, which every rank keeps.
        reason_against_roles: Returns why ranks of several roles cannot run the optimizer; None if it has no factors.
        world_size: Number of ranks; None for the size of the process group.
        comm: Strategy; None for the strategy of the curvature.
        batch_size: Number of examples per rank and step; None for the number in the last refresh.

    Returns:
        The plan.

    Raises:
        TypeError: If a value has the wrong type.
        ValueError: If a value is out of range.
        NotImplementedError: If the strategy has no plan, or cannot run this optimizer.
    """
    table = curvature.table
    options.optional_whole(1)("batch_size", batch_size)
    if any(is_cut(p) for p in table.group_of):
        raise NotImplementedError(
            "plan() needs parameters that every rank holds: call it on an optimizer of the model before fully_shard"
        )
    world, strategy, name = _supposed_world(curvature.comm, world_size, comm)
    is_real = world == curvature.comm.world and comm in (None, curvature.comm)
    if isinstance(strategy, DedicatedWorkers):
        ask = reason_against_roles or (lambda: "it has no factors of layers. Use comm=MemOpt()")
        if reason := ask():
            raise NotImplementedError(f"{table.method} under DedicatedWorkers: {reason}")
    homes = strategy.homes if isinstance(strategy, RankGrid) and is_real and strategy is curvature.comm else None
    rehearsal = _rehearsal_of(strategy, _units_of(curvature, batch_size), world, homes, is_real)
    run = _dry_run_of(curvature, rehearsal, batch_size)
    holdings, work = [*run.holdings(), *others], list(run.work())  # evaluate both before steps change the states
    traffic, padding = _rehearse(run, rehearsal)
    return Plan(
        _by_rank(holdings, work, means(traffic, rehearsal.grid.width), world, kinds(table.entries)),
        world,
        table.method,
        name,
        rehearsal.groups,
        padding,
        [*_notes(rehearsal), *_note_of_period(run, rehearsal), *run.notes()],
    )


def holdings_of_rules(
    table: ParameterTable,
    keys_of: Callable[[nn.Parameter, Group], Iterable[str]],
    kind_of: Callable[[nn.Parameter, str], str],
) -> Iterator[Holding]:
    """Yield the state other than curvature, which every rank keeps.

    Args:
        table: The parameters.
        keys_of: Returns the state keys of the first-order rule that a parameter of a group follows.
        kind_of: Returns the kind of an entry of a parameter's state.

    Yields:
        One holding per entry.
    """
    for p, group in table.group_of.items():
        yield Holding(None, "buffers", torch.float32.itemsize)  # the number of steps
        for key in keys_of(p, group) if p.requires_grad else ():
            yield Holding(None, kind_of(p, key), p.numel() * p.element_size())


def _rehearsal_of(strategy: CommStrategy, units: Sequence[Unit], world: int, homes: Any, is_real: bool) -> Rehearsal:
    """Return a strategy that counts the messages of another strategy for some number of ranks.

    Raises:
        NotImplementedError: If the strategy has no plan.
    """
    if isinstance(strategy, DedicatedWorkers):
        return RoleRehearsal(strategy, units, world, is_real)
    if not isinstance(strategy, RankGrid):
        raise NotImplementedError(f"plan() does not support {type(strategy).__name__}: pass another strategy as comm=")
    return Rehearsal(strategy, units, world, homes, is_real)


def _supposed_world(
    own: CommStrategy, world_size: int | None, comm: CommStrategy | None
) -> tuple[int, CommStrategy, str]:
    """Return the number of ranks, the strategy, and its name."""
    if world_size is None:
        world_size = own.world
    options.whole(1)("world_size", world_size)
    if comm is not None and not isinstance(comm, CommStrategy):
        raise TypeError(f"comm must be a CommStrategy, got {comm!r}")
    chosen = own if comm is None else comm
    if isinstance(chosen, Local):
        if comm is not None and world_size > 1:
            raise ValueError(f"comm=Local() is for one process, not {world_size}")
        chosen = CommOpt()  # comm=None means this strategy when there are several processes
        return world_size, chosen, repr(chosen) if world_size > 1 else "Local()"
    return world_size, chosen, repr(chosen)


def _units_of(curvature: Any, batch_size: int | None) -> Sequence[Unit]:
    """Return the units that a strategy places."""
    if isinstance(curvature, WindowPreconditioner):
        return curvature.plan.placed or []
    plan = curvature.plan
    if isinstance(curvature, RowPreconditioner):
        plan = copy(plan)
        plan.batch_size = batch_size or plan.batch_size
    found: Sequence[Unit] = plan.units()
    return found


def _dry_run_of(curvature: Any, rehearsal: Rehearsal, batch_size: int | None) -> DryRun:
    if isinstance(curvature, WindowPreconditioner):
        return WindowDryRun(curvature, rehearsal)
    return (RowDryRun if isinstance(curvature, RowPreconditioner) else LayerDryRun)(curvature, rehearsal, batch_size)


def _period(run: DryRun, rehearsal: Rehearsal) -> int:
    """Return the number of steps after which everything repeats."""
    return math.lcm(1, *run.intervals(), *rehearsal.intervals())


def _note_of_period(run: DryRun, rehearsal: Rehearsal) -> list[str]:
    period = _period(run, rehearsal)
    if period <= _LONGEST:
        return []
    return [f"all intervals coincide only every {period:,} steps: means and worst steps cover only {_LONGEST:,} steps"]


def _rehearse(run: DryRun, rehearsal: Rehearsal) -> tuple[list[Traffic], float]:
    """Return the traffic of each kind of step in an interval, and the padding of statistics relative to the rest."""
    if not rehearsal.combines:
        return [], 0.0
    alike: dict[Hashable, list[int]] = {}
    period = min(_period(run, rehearsal), _LONGEST)
    for t in range(period, 2 * period):  # the warm-up is over
        alike.setdefault(run.key(t), []).append(t)
    found, padded, wanted = [], 0, 0
    for steps in alike.values():
        run.step(steps[0])
        traffic, padding = rehearsal.traffic(len(steps))
        found.append(traffic)
        padded += padding * len(steps)
        wanted += (traffic.common.get("statistics", Sum()).nbytes - padding) * len(steps)
    return found, padded / wanted if wanted else 0.0


def _by_rank(
    holdings: list[Holding], work: list[Work], sent: list[Means], world: int, of_curvature: list[str]
) -> list[RankPlan]:
    stored = spread(holdings, dict.fromkeys((*of_curvature, "momentum", "fallback", "buffers")), world)
    flops = spread(work, dict.fromkeys(own.stage for own in work), world)
    return [
        RankPlan(
            stored[rank], dict(found.sent), dict(found.worst_sent), flops[rank], dict(found.wire), dict(found.messages)
        )
        for rank, found in ((rank, sent[rank % len(sent)]) for rank in range(world))
    ]


def _notes(rehearsal: Rehearsal) -> Iterator[str]:
    world, owned = rehearsal.grid.world, rehearsal.owned
    idle = world - len(set(owned))
    if idle and owned:
        yield f"{idle} of {world} ranks own none of the {len(owned)} blocks and refresh nothing"
