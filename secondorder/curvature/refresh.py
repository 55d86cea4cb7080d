"""Refreshes of blocks, at once or in the background, and the handling of failures.

::

    step t         copy the factors, begin to factorize the copies    where a refresh is due
    step t + lag   wait for the result, and adopt it                  lag: see ``RefreshSchedule``

In between, the old curvature preconditions. The step of the adoption depends only on the step counter, so it is the
same on every rank and in every run, however long the work takes. The copies are part of the state, so a run that is
resumed in between factorizes the same matrices.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from secondorder.curvature.background import Background, Job
from secondorder.curvature.block import Block, BlockT
from secondorder.curvature.factorization import Found, Task, factorise, joint_ok
from secondorder.curvature.refresh_schedule import Counters, RefreshSchedule
from secondorder.linalg.dense import full_precision, is_on_host

log: logging.Logger = logging.getLogger("secondorder")

Key = tuple[Block, str]
#: Prefixes of the names of the results of a refresh.
_FOUND = ("basis_", "eigenvalues_", "inverse_")
#: Number of entries of the factors that a refresh processes at a time. A single layer may have more.
REFRESH_PORTION = 1 << 24


class Ranks(Protocol):
    """What a refresher asks the communication strategy."""

    @property
    def combines(self) -> bool:
        """Whether several ranks work together."""

    def refreshes(self, index: int) -> bool:
        """Whether this rank refreshes a block."""


class Refresher:
    """Decides which blocks are refreshed, factorizes their factors, and counts refreshes and failures.

    Args:
        schedule: The steps in which blocks are refreshed.
        interval: Name of the option with the number of steps between two refreshes.
        max_failures: Number of consecutive failed refreshes of a block after which an error is raised.
        comm: The communication strategy.

    Attributes:
        failures: Number of consecutive failed refreshes by block.
        failed_at: Number of updates of the estimate at the last failed refresh by block.
        failed: Number of failed refreshes.
        refreshed_at: Step of the last refresh by block. It is not known after loading a checkpoint.
        missing: Names of blocks whose curvature a checkpoint left out, until the ranks have recomputed it.
        jobs: Refreshes in the background by block.
        background: The thread in which they run.
    """

    def __init__(self, schedule: RefreshSchedule, interval: str, max_failures: int, comm: Ranks) -> None:
        self.schedule, self.interval, self.max_failures, self._comm = schedule, interval, max_failures, comm
        self.failures: dict[str, int] = {}
        self.failed_at: dict[str, int] = {}
        self.failed = 0
        self.refreshed_at: dict[str, int] = {}
        self.missing: set[str] = set()
        self.jobs: dict[Block, Job] = {}
        self.background = Background()
        #: Refreshes whose outcome is being copied to the host.
        self._unjudged: list[tuple[Sequence[Block], Tensor, torch.Event]] = []
        #: Blocks that adopt in this step a refresh that was begun earlier.
        self._adopting: set[Block] = set()

    def follow(self, other: Refresher) -> None:
        """Continue from the counters of another refresher, with nothing in the background."""
        self.failures, self.failed_at, self.failed = dict(other.failures), dict(other.failed_at), other.failed
        self.refreshed_at, self.missing = dict(other.refreshed_at), set(other.missing)

    # ------------------------------------------------------------------ when
    def is_due(self, block: Block, count: int) -> bool:
        """Whether this step refreshes a block. ``count`` is the number of blocks."""
        interval, place = block.group[self.interval], (block.index, count)
        return self.schedule.refreshes(block.runtime.step, interval, place, self._counters(block))

    def is_refreshed(self, block: Block) -> bool:
        """Whether the results of a refresh exist."""
        return bool(block.state["refreshes"] > 0) and block.name not in self.missing

    def adopts(self, block: Block) -> bool:
        """Whether this step adopts a refresh that was begun earlier."""
        return self.schedule.adopts(block.runtime.step, block.group[self.interval], self._counters(block))

    def begins(self, block: Block, count: int) -> bool:
        """Whether this step begins a refresh in the background. ``count`` is the number of blocks."""
        interval, place = block.group[self.interval], (block.index, count)
        return self.schedule.begins(block.runtime.step, interval, place, self._counters(block).refreshes)

    def _counters(self, block: Block) -> Counters:
        state = block.state
        updates, refreshes, adopt_at = (state.get(key, 0) for key in ("factor_updates", "refreshes", "adopt_at"))
        return Counters(updates, refreshes, self.failed_at.get(block.name, 0), adopt_at)

    # ------------------------------------------------------------------ by one process
    def with_estimates(self, due: list[BlockT]) -> tuple[list[BlockT], bool]:
        """Return the blocks that have an estimate, and whether the host checks the results of their refresh.

        It does so on the CPU, where this is free, and on a device at the first refresh of a block and after a failure.
        """
        if all(is_on_host(b.owner) for b in due):
            return due, True
        new = [b for b in due if b.state["refreshes"] == 0]
        if new:
            weights = torch.stack([b.state["factor_weight"] for b in new]).cpu().numpy()
            for block, weight in zip(new, weights, strict=True):
                if weight == 0:  # its only batch was not finite
                    block.state["factor_updates"] = 0
                    due = [b for b in due if b is not block]
        return due, bool(new) or any(b.name in self.failures for b in due)

    def run(self, due: list[BlockT], refresh: Callable[[list[BlockT], bool], Tensor], look: bool) -> list[int]:
        """Refresh some blocks.

        Args:
            due: The blocks.
            refresh: Refreshes blocks and returns ``ok [len(blocks)]``; the flag says whether the host checks results.
            look: Whether the host waits for the outcome.

        Returns:
            The indices of the blocks.
        """
        with full_precision(due[0].owner.device):
            ok = refresh(due, look)
        if look:
            self.judge(due, ok.cpu())
        else:
            # Check the outcome at the next refresh. It has arrived by then, so the host need not wait.
            arrived = torch.Event(ok.device)
            outcome = ok.to("cpu", non_blocking=True)
            arrived.record()
            self._unjudged.append((due, outcome, arrived))
        return self.count(due)

    # ------------------------------------------------------------------ outcomes
    def settle(self) -> None:
        """Check refreshes whose outcome was copied to the host."""
        for blocks, outcome, arrived in self._unjudged:
            arrived.synchronize()
            self.judge(blocks, outcome)
        self._unjudged.clear()

    def judge(self, blocks: Sequence[Block], ok: Tensor) -> None:
        """Count the consecutive failures of each block.

        Raises:
            RuntimeError: If a block has failed ``max_failures`` times in a row.
        """
        for block, good in zip(blocks, ok.numpy(), strict=True):
            if good:
                self.failures.pop(block.name, None)
                continue
            count = self.failures[block.name] = self.failures.get(block.name, 0) + 1
            self.failed += 1
            log.warning(
                "refresh of layer %r failed (%d in a row); the last good result is kept. If this continues, raise "
                "damping, lower lr, or leave the layer out with skip_layers",
                block.label,
                count,
            )
            if count >= self.max_failures:
                raise RuntimeError(
                    f"the factors of layer '{block.label}' could not be factorized {count} times in a row, even with "
                    "jitter and in float64. Raise damping, lower lr, or leave the layer out with skip_layers."
                )

    def count(self, blocks: Sequence[Block]) -> list[int]:
        """Count the refreshes of some blocks, or the time of their failure, and return their indices."""
        for block in blocks:
            state = block.state
            if block.name in self.failures:
                self.failed_at[block.name] = state["factor_updates"]
            else:
                state["refreshes"] += 1
                self.refreshed_at[block.name] = block.runtime.step
        return [b.index for b in blocks]

    # ------------------------------------------------------------------ factorizations
    def refresh(self, blocks: Sequence[Block], host_checks: bool, restores: bool = False) -> Tensor:
        """Refresh some blocks in portions, so that temporary memory does not grow with the model.

        Args:
            blocks: The blocks.
            host_checks: Whether the host may check results.
            restores: Whether this only recomputes curvature that a checkpoint left out.

        Returns:
            Whether each refresh succeeded, ``[len(blocks)]``. A block whose refresh fails keeps its last good result.
        """
        return torch.cat([self._refresh(some, host_checks, restores) for some in _portions(blocks)])

    def _refresh(self, blocks: Sequence[Block], host_checks: bool, restores: bool) -> Tensor:
        found = self.find(blocks, host_checks, restores)
        ok = joint_ok(found, blocks)
        for block, good in zip(blocks, ok.unbind(), strict=True):
            adopt = block.restore if restores else block.adopt
            adopt({side: found[block, side][0] for side in "ag" if (block, side) in found}, good)
        return ok

    def find(self, blocks: Sequence[Block], host_checks: bool, restores: bool = False) -> dict[Key, Found]:
        """Return the factorizations of the copies with which a refresh was begun, or else of the current estimates.

        Args:
            blocks: The blocks.
            host_checks: Whether the host may check results.
            restores: Whether this only recomputes curvature that a checkpoint left out.
        """
        found: dict[Key, Found] = {}
        jobs = [self.jobs[b] for b in blocks if b in self._adopting and b in self.jobs]
        for job in dict.fromkeys(jobs):
            if job.is_here:
                found.update(job.result(_tensors_of))
        rest = [b for b in blocks if (b, "a") not in found]
        return found | factorise(self._tasks(rest), host_checks, self._comm.combines)

    def _tasks(self, blocks: Iterable[Block]) -> dict[Key, Task]:
        found = ((b, b.tasks(begun=b in self._adopting)) for b in blocks)
        return {(block, side): task for block, tasks in found for side, task in tasks.items()}

    @contextmanager
    def adopting(self, blocks: Iterable[Block]) -> Iterator[set[Block]]:
        """Make refreshes inside the ``with`` block adopt what was begun for this step."""
        adopted = self._adopting = {b for b in blocks if self.adopts(b)}
        try:
            yield adopted
        except BaseException:
            self.forget_jobs()
            raise
        finally:
            self._adopting = set()
        for block in adopted:
            block.state["adopt_at"] = 0
            self.jobs.pop(block, None)

    def begin(self, blocks: Sequence[Block]) -> None:
        """Copy the matrices that this rank factorizes for a refresh, and start on those that are adopted first."""
        together: dict[tuple[int, torch.device], list[Block]] = {}
        for block in blocks:
            lag = self.schedule.lag(block.group[self.interval])
            block.state["adopt_at"] = block.runtime.step + lag
            if not self._comm.combines or self._comm.refreshes(block.index):
                together.setdefault((lag, block.owner.device), []).append(block)
        for job in {self.jobs.pop(b) for some in together.values() for b in some if b in self.jobs}:
            job.wait()
        for (_, device), some in sorted(together.items(), key=lambda item: item[0][0]):
            try:
                job = self.background.submit(partial(factorise, self._copies(some), True, self._comm.combines), device)
            except (RuntimeError, MemoryError) as error:  # no memory or thread; raised where all ranks hear of it
                job = Job.failed(error, device)
            self.jobs.update(dict.fromkeys(some, job))

    def _copies(self, blocks: Sequence[Block]) -> dict[Key, Task]:
        tasks = self._tasks(blocks)
        return {
            (block, side): task._replace(matrix=block.state[f"begun_{side}"].copy_(task.matrix))
            for (block, side), task in tasks.items()
        }

    def forget(self, blocks: Iterable[Block]) -> None:
        """Cancel the refreshes that were begun for some blocks."""
        for block in blocks if self.schedule.overlap else ():
            block.state["adopt_at"] = 0
            if block in self.jobs:
                self.jobs.pop(block).wait()  # it may read copies that the next refresh writes

    def forget_jobs(self) -> None:
        """Discard refreshes in progress, so that they are computed again from their copies."""
        for job in set(self.jobs.values()):
            job.wait()
        self.jobs.clear()

    def forget_all(self) -> None:
        """Forget the refreshes so far, because other curvature is loaded."""
        self.forget_jobs()
        for known in (self.failures, self.failed_at, self.refreshed_at, self._unjudged):
            known.clear()

    def close(self) -> None:
        """Discard refreshes in progress and end the thread."""
        self.forget_jobs()
        self.background.close()

    @property
    def nbytes(self) -> int:
        """Bytes of refreshes in the background."""
        states = [(block.layer.precision.itemsize, block.state) for block in self.jobs]
        return sum(v.numel() * size for size, state in states for k, v in state.items() if k.startswith(_FOUND))


def _portions(blocks: Sequence[Block]) -> Iterator[Sequence[Block]]:
    start = size = 0
    for i, block in enumerate(blocks):
        own = block.refresh_size
        if size and size + own > REFRESH_PORTION:
            yield blocks[start:i]
            start, size = i, 0
        size += own
    yield blocks[start:]


def _tensors_of(found: Mapping[Key, Found]) -> Iterable[Tensor]:
    for tensors, ok in found.values():
        yield from tensors
        yield ok
