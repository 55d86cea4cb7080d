"""Refreshes that training does not wait for.

::

    step t         copy the factors, begin to factorise the copies    where a refresh is due
    step t + lag   wait for that, and adopt it                        lag: see ``RefreshSchedule``

In between the old curvature preconditions. The step of the adoption follows from the step counter alone, so it is the
same on every rank and in every run, however long the work takes. The copies belong to the state: a run that was resumed
in between factorises the same matrices.
"""

# bridge: verbs that take blocks with factors
# mypy: disable-error-code="override"

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from secondorder.capture.fisher.fisher import Observing
from secondorder.curvature.background import Background, Job
from secondorder.curvature.factorization import Found, Task, factorise
from secondorder.curvature.factors import FACTORS, form_of
from secondorder.curvature.kronecker import FactoredBlock
from secondorder.curvature.schema import Schema
from secondorder.linalg.dense import precision_of
from secondorder.preconditioners.base import Group
from secondorder.preconditioners.blocks import Setting

_Key = tuple[FactoredBlock, str]
#: State of what was begun.
_BEGUN = ("begun_a", "begun_g", "adopt_at")
#: What a refresh finds, by how its names begin.
_FOUND = ("basis_", "eigenvalues_", "inverse_")


class OverlappingRefreshes(Observing):
    """Methods that factorise factors, at once or beside training."""

    catalog: ClassVar[Schema] = FACTORS
    _blocks: list[FactoredBlock]  # type: ignore[assignment]
    _block_of: dict[nn.Parameter, FactoredBlock]  # type: ignore[assignment]

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        #: Blocks whose refresh of this step was begun earlier.
        self._adopting: set[FactoredBlock] = set()
        self._jobs: dict[FactoredBlock, Job] = {}
        self._background = Background()

    @property
    def _overlaps(self) -> bool:
        return self._layer_options.overlap

    # ------------------------------------------------------------------ when
    def _ends(self, block: FactoredBlock) -> bool:
        """Whether what was begun is adopted in this step."""
        interval = block.group[self.refresh_interval]
        return self._layer_options.schedule.adopts(self._t, interval, self._counters(block))

    def _begins(self, block: FactoredBlock) -> bool:
        """Whether this step begins a refresh."""
        if not self.comm.renews(block.index):
            return False
        interval, place = block.group[self.refresh_interval], (block.index, len(self._blocks))
        return self._layer_options.schedule.begins(self._t, interval, place, self._counters(block).refreshes)

    def refresh_due(self) -> list[int]:
        """As in the base class; with ``overlap`` it adopts what was begun and begins what is due."""
        if not self._overlaps:
            return super().refresh_due()
        self._adopting = {b for b in self._blocks if self._ends(b)}
        try:
            refreshed = set(super().refresh_due())
        except BaseException:
            self._forget_jobs()
            raise
        finally:
            adopted, self._adopting = self._adopting, set()
        for block in adopted:
            self.state[block.owner]["adopt_at"] = 0
            self._jobs.pop(block, None)
        at_once = {b for b in self._blocks if b.index in refreshed and b not in adopted}
        self._forget(at_once)
        self._begin([b for b in self._blocks if self._begins(b) and b not in at_once])
        return sorted(refreshed)

    def renew(self, blocks: list[FactoredBlock]) -> Tensor:
        """Refresh and share some blocks outside of their schedule."""
        ok = super().renew(list(blocks))
        self._forget(blocks)  # what was begun is older
        return ok

    def _renew_loaded(self, blocks: list[FactoredBlock]) -> Tensor:
        return super().renew(list(blocks))  # what was begun is newer

    def _forget(self, blocks: Iterable[FactoredBlock]) -> None:
        """Adopt nothing of what was begun for some blocks."""
        for block in blocks if self._overlaps else ():
            self.state[block.owner]["adopt_at"] = 0
            if block in self._jobs:
                self._jobs.pop(block).wait()  # it may read copies that the next one writes

    # ------------------------------------------------------------------ what
    def factorised(self, blocks: Sequence[FactoredBlock], host_checks: bool) -> dict[_Key, Found]:
        """What a refresh of some blocks finds: of the matrices that it was begun with, else of those of now."""
        found: dict[_Key, Found] = {}
        jobs = [self._jobs[b] for b in blocks if b in self._adopting and b in self._jobs]
        for job in dict.fromkeys(jobs):
            if job.is_here:
                found.update(job.result(_tensors_of))
        rest = [b for b in blocks if (b, "a") not in found]
        return found | factorise(self._tasks(rest), host_checks, self.comm.combines)

    def _tasks(self, blocks: Iterable[FactoredBlock]) -> dict[_Key, Task]:
        found = ((b, b.tasks(begun=b in self._adopting)) for b in blocks)
        return {(block, side): task for block, tasks in found for side, task in tasks.items()}

    def _begin(self, blocks: Sequence[FactoredBlock]) -> None:
        """Copy what a refresh of some blocks factorises, and start on the copies: on what is wanted first, first."""
        together: dict[tuple[int, torch.device], list[FactoredBlock]] = {}
        for block in blocks:
            lag = self._layer_options.schedule.lag(block.group[self.refresh_interval])
            self.state[block.owner]["adopt_at"] = self._t + lag
            if not self.comm.combines or self.comm.refreshes(block.index):
                together.setdefault((lag, block.owner.device), []).append(block)
        for job in {self._jobs.pop(b) for some in together.values() for b in some if b in self._jobs}:
            job.wait()
        for (_, device), some in sorted(together.items(), key=lambda item: item[0][0]):
            try:
                job = self._background.submit(partial(factorise, self._copies(some), True, self.comm.combines), device)
            except (RuntimeError, MemoryError) as error:  # no memory, or no thread: raised where ranks hear of it
                job = Job.failed(error, device)
            self._jobs.update(dict.fromkeys(some, job))

    def _copies(self, blocks: Sequence[FactoredBlock]) -> dict[_Key, Task]:
        tasks: dict[_Key, Task] = {}
        for (block, side), task in self._tasks(blocks).items():
            copy = self.state[block.owner][f"begun_{side}"].copy_(task.matrix)
            tasks[block, side] = task._replace(matrix=copy)
        return tasks

    # ------------------------------------------------------------------ checkpoints and ends
    def translated(self, p: Any, group: Group, theirs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the state of a parameter in a checkpoint in the form in which this optimizer keeps it."""
        found = dict(self._with_own_factors(p, group, theirs))
        if not self._overlaps:
            return {k: v for k, v in found.items() if k not in _BEGUN}
        block = self._block_of.get(p)
        if block is not None and block.owner is p and "factor_updates" in found and found.keys().isdisjoint(_BEGUN):
            likes = {k: entry.like for k, entry in block.factors.begun(group).items()}
            found |= {k: torch.zeros_like(v, device=p.device) if isinstance(v, Tensor) else v for k, v in likes.items()}
        return found

    def _with_own_factors(self, p: Any, group: Group, theirs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Loaded factors in the form in which this optimizer keeps them."""
        block = self._block_of.get(p)
        if block is None:  # frozen: what is kept in the other form begins anew when it is unfrozen
            other = "dense" if self._layer_options.factor_storage == "packed" else "packed"
            in_other_form = other in {form_of(k, v) for k, v in theirs.items()}
            return {k: v for k, v in theirs.items() if k not in self.entries} if in_other_form else theirs
        return block.factors.in_own_form(theirs, group) if block.owner is p else theirs

    def _forget_jobs(self) -> None:
        """Leave what was begun to be found again from its copies."""
        for job in set(self._jobs.values()):
            job.wait()
        self._jobs.clear()

    def rebuilt(self) -> None:
        """Act on a new plan, whose state has been allocated."""
        self._forget_jobs()  # parameters may have moved, or be of another dtype

    def loaded(self, rebuild: Callable[[], bool]) -> None:
        """Complete what a checkpoint may leave out; see the base class."""
        self._forget_jobs()
        super().loaded(rebuild)

    def detach(self) -> None:
        """See the base class."""
        try:
            super().detach()
        finally:
            self._forget_jobs()
            self._background.close()

    def pending_bytes(self) -> int:
        """Return the bytes of statistics, and of refreshes in progress, that wait for a coming step."""
        states = [(precision_of(block.owner), self.state[block.owner]) for block in self._jobs]
        found: list[int] = []
        for dtype, state in states:
            found += [v.numel() * dtype.itemsize for k, v in state.items() if k.startswith(_FOUND)]
        return super().pending_bytes() + sum(found)


def _tensors_of(found: Mapping[_Key, Found]) -> Iterable[Tensor]:
    for tensors, ok in found.values():
        yield from tensors
        yield ok
