"""The end of a step on gradient ranks, and the notices that ranks of all roles write for each other.

::

    notice        written by       read by              means
    turn/k        chief            factor ranks         turn k has come: the parameters follow; or stop
    send/j/n      first factor     inverse rank j       its n-th estimate follows; or stop
    done/j/n      inverse rank j   chief, first factor  its n-th version is ready
    take/j/n      chief            inverse rank j       gradient ranks wait for that version; or stop
    want/k        first factor     chief                opportunistic only: factor ranks wait for turn k

A rank always waits for one notice of one writer, and no message is launched before the notice that announces it was
written and read. A stop is just another content of a notice, so no rank waits for a message that is never sent.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from secondorder.comm.dedicated.arguments import Entry
from secondorder.comm.dedicated.board import SilenceError
from secondorder.comm.dedicated.links import GO, LOST, STOP, Links, Worker, contents, finish
from secondorder.comm.dedicated.lockstep import DELAY, ends_epoch

log: logging.Logger = logging.getLogger("secondorder")


@dataclass(frozen=True)
class Agenda:
    """Settings that are the same on all ranks.

    Attributes:
        period: T, the number of steps of an epoch.
        owners: Inverse rank of each unit.
        lockstep: Whether versions are taken at fixed steps.
        seed: Seed of the order in which units are inverted.
        max_staleness: Largest age of a version in steps.
        degrade: Whether training continues without an inverse rank that was lost.
        replay: Log of the run to repeat.
    """

    period: int
    owners: tuple[int, ...]
    lockstep: bool = True
    seed: int = 0
    max_staleness: int | None = None
    degrade: bool = False
    replay: tuple[Entry, ...] | None = None

    def units_of(self, rank: int) -> list[int]:
        """Return the units of an inverse rank."""
        return [index for index, owner in enumerate(self.owners) if owner == rank]

    def repeats(self, *entry: Any) -> bool:
        """Whether the log of the repeated run has an entry. None matches anything."""
        assert self.replay is not None
        return any(
            len(e) == len(entry) and all(a is None or a == b for a, b in zip(entry, e, strict=True))
            for e in self.replay
        )


@dataclass
class Rank:
    """Base class: one rank of a role.

    Attributes:
        plan: Settings that are the same on all ranks.
        links: Connections to the other ranks.
        worker: The optimizer.
        steps: Steps taken.
        stopped: Whether there is nothing left to do.
    """

    plan: Agenda
    links: Links
    worker: Callable[[], Worker]
    steps: int = 0
    stopped: bool = False
    failed: bool = False

    def end_step(self) -> None:
        """Act at the end of a step."""

    def close(self) -> None:
        """Finish all work that was started."""

    @contextmanager
    def watched(self, doing: str) -> Iterator[None]:
        """Report an error to all other ranks.

        Raises:
            RuntimeError: The error.
        """
        try:
            yield
        except Exception as error:
            message = f"rank {self.links.rank}, {self.links.roles.of(self.links.rank)} worker, {doing}: {error}"
            first = self.give_up(message)
            if first != message:  # this message is dropped because another rank failed before
                raise RuntimeError(first) from error
            raise

    def give_up(self, message: str) -> str:
        """Make the other ranks raise an error as well.

        Returns:
            The message of the first rank that failed.
        """
        self.failed = True
        try:
            return self.links.board.abort(message)
        except RuntimeError:
            log.warning("the store of the process group is gone; other ranks wait until their timeout")
            return message


@dataclass
class GradientRank(Rank):
    """A rank that trains. The first gradient rank, the chief, makes the decisions at the end of an epoch for all.

    Attributes:
        taken: Versions that were taken or dropped, by inverse rank.
        lost: Inverse ranks that were lost.
        since: For each unit, the step of the parameters behind its curvature.
        log: Events by step, which are the same on every gradient rank.
    """

    taken: dict[int, int] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    since: dict[int, int] = field(default_factory=dict)
    log: list[Entry] = field(default_factory=list)
    _turn: int = 0
    _publication: Any = None
    _quiet: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Create the records, which are empty."""
        self.taken = dict.fromkeys(self.links.roles.inverse, 0)

    @property
    def is_chief(self) -> bool:
        """Whether this rank decides."""
        return self.links.rank == self.links.roles.chief

    def end_step(self) -> None:
        """Publish parameters and take versions at the end of an epoch, and drop versions that are too old."""
        self.steps += 1
        if ends_epoch(self.steps, self.plan.period):
            with self.watched(f"after step {self.steps}"):
                for j in self._orders():
                    self._take(j)
        self._expire()

    # ------------------------------------------------------------------ decisions of the chief
    def _orders(self) -> list[int]:
        """Return the inverse ranks whose version is taken now, as the chief decides."""
        inverse = self.links.roles.inverse
        orders = [0.0] * (1 + 2 * len(inverse))
        if self.is_chief:
            try:
                self._publish()
                ready = self._ready()
                orders = [0.0, *(float(j in ready) for j in inverse), *(float(j in self.lost) for j in inverse)]
            except Exception as error:
                self.give_up(f"rank {self.links.rank}, the first gradient worker, after step {self.steps}: {error}")
                orders[0] = 1.0
                self._spread(orders)
                raise
        aborted, *rest = self._spread(orders)
        if aborted:
            self.links.board.raise_aborted()
            raise RuntimeError("the first gradient rank has failed")
        n = len(inverse)
        self.lost |= {j for j, gone in zip(inverse, rest[n:], strict=True) if gone}
        return [j for j, ready in zip(inverse, rest[:n], strict=True) if ready]

    def _spread(self, orders: Sequence[float]) -> list[float]:
        return self.links.broadcast("gradients", self.links.roles.chief, orders)

    def _publish(self) -> None:
        """Announce the next turn and send the current parameters to the factor ranks."""
        if not self._is_wanted():
            return
        finish(self._publication)
        self._turn += 1
        options = self.worker().sent_options()
        self.links.board.write(f"turn/{self._turn}", code=GO, step=self.steps, lost=sorted(self.lost), options=options)
        now = [p.detach().clone() for p in self.worker().parameters_now()]
        self._publication = self.links.copy("parameters", self.links.rank, now)
        self.log.append(["turn", self.steps, self._turn])

    def _is_wanted(self) -> bool:
        if self.plan.lockstep:
            return True
        if self.plan.replay is not None:
            return self.plan.repeats("turn", self.steps, self._turn + 1)
        want = f"want/{self._turn + 1}"
        return self._is_there(want, "the factor ranks")

    def _is_there(self, key: str, who: str) -> bool:
        """Whether a notice was written. An error is raised if it has been missing for too long."""
        self.links.board.raise_aborted()
        if self.links.board.look(key) is not None:
            self._quiet.pop(key, None)
            return True
        first = self._quiet.setdefault(key, time.monotonic())
        if time.monotonic() - first > self.links.patience:
            raise SilenceError(f"{who} did not respond within {self.links.patience:g} s")
        return False

    def _ready(self) -> set[int]:
        """Return the inverse ranks whose next version is ready, after notifying them that it is taken."""
        ready = set()
        for j in self.links.roles.inverse:
            if j in self.lost:
                continue
            try:
                if self._is_ready(j):
                    ready.add(j)
            except SilenceError as silence:
                self._lose(j, str(silence))
        for j in ready:
            self.links.board.write(f"take/{j}/{self.taken[j]}", code=GO)
        return ready

    def _is_ready(self, j: int) -> bool:
        n, board = self.taken[j], self.links.board
        done = f"done/{j}/{n}"
        if self.plan.lockstep:
            if self._turn < DELAY:
                return False
            board.wait(done, self.links.patience)
            return True
        if self.plan.replay is not None:
            if not self.plan.repeats("take", self.steps, j, None):
                return False
            board.wait(done, self.links.patience)
            return True
        if self.links.roles.colocated:
            return board.look(done) is not None
        return board.look(f"send/{j}/{n}") is not None and self._is_there(done, f"inverse rank {j}")

    def _lose(self, j: int, reason: str) -> None:
        """Continue without an inverse rank, or raise an error."""
        if not self.plan.degrade or self.links.roles.colocated:
            raise RuntimeError(f"inverse rank {j} is lost: {reason}")
        log.warning("inverse rank %d is lost (%s): its layers keep their last curvature", j, reason)
        self.lost.add(j)
        if self.is_chief:  # in case it is still alive
            self.links.board.write(f"take/{j}/{self.taken[j]}", code=LOST)

    # ------------------------------------------------------------------ versions
    def _take(self, j: int) -> None:
        """Receive a version and use it completely from the next step on."""
        units = self.plan.units_of(j)
        parcels = [self.worker().live_parcel(index, "curvature") for index in units]
        room = [[torch.empty_like(t) for t in p.tensors] for p in parcels]
        header = torch.zeros(2 + len(units), dtype=torch.float64, device=self.links.device)
        try:
            _, flags = contents(parcels)
            finish(self.links.copy(f"curvature {j}", j, [header, *(t for r in room for t in r)], [False, *flags]))
            arrived = True
        except RuntimeError as error:
            if not self.plan.degrade:
                raise RuntimeError(f"inverse rank {j} is lost: {error}") from error
            arrived = False
        self.taken[j] += 1
        if self.plan.degrade and float(self.links.sum(torch.tensor([float(not arrived)], dtype=torch.float64))):
            self._lose(j, "its version did not arrive")
            return
        version, step, *fine = header.tolist()
        for index, tensors, good in zip(units, room, fine, strict=True):
            if good:
                self.worker().adopt_curvature(index, tensors)
                self.since[index] = int(step)
        self.log.append(["take", self.steps, j, int(version)])

    def age(self, index: int) -> int | None:
        """Return the steps since the parameters behind the curvature of a unit; None if it has no curvature."""
        return self.steps - self.since[index] if index in self.since else None

    def note(self, indices: Sequence[int]) -> None:
        """Record that the gradient ranks have refreshed these units themselves, in the current step."""
        self.since.update(dict.fromkeys(indices, self.steps))

    def _expire(self) -> None:
        """Drop curvature that is too old for the next step. Loaded curvature counts as new at its first use."""
        if self.plan.max_staleness is None:
            return
        worker = self.worker()
        for index in range(len(self.plan.owners)):
            if not worker.has_curvature(index):
                self.since.pop(index, None)
            elif self.steps - self.since.setdefault(index, self.steps) > self.plan.max_staleness:
                del self.since[index]
                worker.forget_curvature(index)

    # ------------------------------------------------------------------ the end
    def close(self) -> None:
        """Write the final notices, and wait until the parameters are received."""
        if self.stopped:
            return
        self.stopped = True
        if not self.is_chief:
            return
        with self.watched("while closing"):
            board = self.links.board
            board.write(f"turn/{self._turn + 1}", code=STOP)
            for j in self.links.roles.inverse:
                board.write(f"take/{j}/{self.taken[j]}", code=STOP)
            board.write("end", lost=sorted(self.lost))
            finish(self._publication)
