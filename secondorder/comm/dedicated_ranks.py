"""What gradient, factor and inverse ranks do at the end of their steps: who writes which word, and who waits for it.

::

    word          written by       read by              means
    turn/k        chief            factor ranks         turn k has come: the parameters follow; or stop
    send/j/n      first factor     inverse rank j       its n-th estimate follows; or stop
    done/j/n      inverse rank j   chief, first factor  its n-th version is ready
    take/j/n      chief            inverse rank j       gradient ranks wait for that version; or stop
    want/k        first factor     chief                opportunistic only: factor ranks wait for turn k

Every wait is for one word of one writer, and no message is launched before the word that announces it was written and
read. So stopping is the same as going on with another word, and nobody waits for a message that does not come.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from secondorder.comm.dedicated_links import GO, LOST, STOP, Links, Worker, finish
from secondorder.comm.lockstep import DELAY, ends_epoch, shuffled
from secondorder.comm.words import SilenceError

log = logging.getLogger("secondorder")

#: An entry of a log: ``["turn", step, k]`` or ``["take", step, inverse rank, version]``.
Entry = list[Any]


@dataclass(frozen=True)
class Agenda:
    """What is the same on all ranks.

    Attributes:
        period: T, steps of an epoch.
        lockstep: Whether versions are taken at fixed steps.
        seed: Of the order in which units are inverted.
        max_staleness: Bound on the age of a version in steps.
        degrade: Whether training goes on without an inverse rank that was lost.
        replay: Log of the run that is repeated.
        owners: Inverse rank of each unit.
    """

    period: int
    lockstep: bool
    seed: int
    max_staleness: int | None
    degrade: bool
    replay: tuple[Entry, ...] | None
    owners: tuple[int, ...]

    def units_of(self, rank: int) -> list[int]:
        """Units of an inverse rank."""
        return [index for index, owner in enumerate(self.owners) if owner == rank]


@dataclass
class Rank:
    """Base: one rank of a role.

    Attributes:
        plan: What is the same on all ranks.
        links: To the others.
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
        """A step was taken."""

    def close(self) -> None:
        """Bring what was begun to its end."""

    @contextmanager
    def watched(self, doing: str) -> Iterator[None]:
        """Tell all other ranks of an error.

        Raises:
            RuntimeError: The error.
        """
        try:
            yield
        except Exception as error:
            self.give_up(f"rank {self.links.rank}, {self.links.roles.of(self.links.rank)} worker, {doing}: {error}")
            raise

    def give_up(self, message: str) -> None:
        """Have the other ranks raise as well."""
        self.failed = True
        try:
            self.links.words.abort(message)
        except RuntimeError:
            log.warning("the store of the process group is gone; other ranks wait until their timeout")


# ---------------------------------------------------------------------------------------------------------------------
# Gradient ranks
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class GradientRank(Rank):
    """Trains; the chief among them decides what happens at the end of an epoch, and all of them do it.

    Attributes:
        taken: Versions that were taken, or given up, by inverse rank.
        lost: Inverse ranks that are gone.
        since: Step of the parameters behind the curvature of a unit.
        log: What happened when, on every gradient rank the same.
    """

    taken: dict[int, int] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    since: dict[int, int] = field(default_factory=dict)
    log: list[Entry] = field(default_factory=list)
    _turn: int = 0
    _publication: Any = None
    _quiet: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Nothing was taken yet."""
        self.taken = dict.fromkeys(self.links.roles.inverse, 0)

    @property
    def is_chief(self) -> bool:
        """Whether this rank decides."""
        return self.links.rank == self.links.roles.chief

    def end_step(self) -> None:
        """At the end of an epoch, publish parameters and take versions; at every step, give up those too old."""
        self.steps += 1
        if ends_epoch(self.steps, self.plan.period):
            with self.watched(f"after step {self.steps}"):
                for j in self._orders():
                    self._take(j)
        self._expire()

    # ------------------------------------------------------------------ decisions of the chief
    def _orders(self) -> list[int]:
        """Inverse ranks whose version is taken now, by the chief's word."""
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
            self.links.words.raise_aborted()
            raise RuntimeError("the first gradient rank has given up")
        n = len(inverse)
        self.lost |= {j for j, gone in zip(inverse, rest[n:], strict=True) if gone}
        return [j for j, ready in zip(inverse, rest[:n], strict=True) if ready]

    def _spread(self, orders: Sequence[float]) -> list[float]:
        return self.links.tell("gradients", self.links.roles.chief, orders)

    def _publish(self) -> None:
        """Announce the next turn, and send the parameters of now to the factor ranks."""
        if not self._is_wanted():
            return
        finish(self._publication)
        self._turn += 1
        options = self.worker().spoken_options()
        self.links.words.write(f"turn/{self._turn}", code=GO, step=self.steps, lost=sorted(self.lost), options=options)
        now = [p.detach().clone() for p in self.worker().parameters_now()]
        self._publication = self.links.copy("parameters", self.links.rank, now)
        self.log.append(["turn", self.steps, self._turn])

    def _is_wanted(self) -> bool:
        if self.plan.lockstep:
            return True
        if self.plan.replay is not None:
            return ["turn", self.steps, self._turn + 1] in self.plan.replay
        want = f"want/{self._turn + 1}"
        return self._is_there(want, "the factor ranks")

    def _is_there(self, key: str, who: str) -> bool:
        """Whether a word was written; an error if it has been missing for too long."""
        self.links.words.raise_aborted()
        if self.links.words.look(key) is not None:
            self._quiet.pop(key, None)
            return True
        first = self._quiet.setdefault(key, time.monotonic())
        if time.monotonic() - first > self.links.patience:
            raise SilenceError(f"nothing was heard of {who} within {self.links.patience:g} s")
        return False

    def _ready(self) -> set[int]:
        """Inverse ranks whose next version is there; they are told that it is taken."""
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
            self.links.words.write(f"take/{j}/{self.taken[j]}", code=GO)
        return ready

    def _is_ready(self, j: int) -> bool:
        n, words = self.taken[j], self.links.words
        done = f"done/{j}/{n}"
        if self.plan.lockstep:
            if self._turn < DELAY:
                return False
            words.wait(done, self.links.patience)
            return True
        if self.plan.replay is not None:
            if not any(e[:3] == ["take", self.steps, j] for e in self.plan.replay):
                return False
            words.wait(done, self.links.patience)
            return True
        if self.links.roles.colocated:
            return words.look(done) is not None
        return words.look(f"send/{j}/{n}") is not None and self._is_there(done, f"inverse rank {j}")

    def _lose(self, j: int, reason: str) -> None:
        """Go on without an inverse rank, or not at all."""
        if not self.plan.degrade or self.links.roles.colocated:
            raise RuntimeError(f"inverse rank {j} is lost: {reason}")
        log.warning("inverse rank %d is lost (%s): its layers keep their last curvature", j, reason)
        self.lost.add(j)
        if self.is_chief:  # should it live
            self.links.words.write(f"take/{j}/{self.taken[j]}", code=LOST)

    # ------------------------------------------------------------------ versions
    def _take(self, j: int) -> None:
        """Receive a version, and precondition with all of it from the next step on."""
        units = self.plan.units_of(j)
        parcels = [self.worker().live_parcel(index, "curvature") for index in units]
        room = [[torch.empty_like(t) for t in p.tensors] for p in parcels]
        header = torch.zeros(2 + len(units), dtype=torch.float64, device=self.links.device)
        try:
            finish(self.links.copy(f"curvature {j}", j, [header, *(t for r in room for t in r)]))
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
        """Steps from the parameters behind the curvature of a unit to the coming step; None without any."""
        return self.steps - self.since[index] if index in self.since else None

    def note(self, indices: Sequence[int]) -> None:
        """The gradient ranks have refreshed these themselves, in the step that is being taken."""
        self.since.update(dict.fromkeys(indices, self.steps))

    def _expire(self) -> None:
        if self.plan.max_staleness is None:
            return
        for index in list(self.since):
            if self.steps - self.since[index] > self.plan.max_staleness:
                del self.since[index]
                self.worker().forget_curvature(index)

    # ------------------------------------------------------------------ the end
    def close(self) -> None:
        """Write the last words, and wait for the parameters to be received."""
        if self.stopped:
            return
        self.stopped = True
        if not self.is_chief:
            return
        with self.watched("while closing"):
            words = self.links.words
            words.write(f"turn/{self._turn + 1}", code=STOP)
            for j in self.links.roles.inverse:
                words.write(f"take/{j}/{self.taken[j]}", code=STOP)
            words.write("end", lost=sorted(self.lost))
            finish(self._publication)


# ---------------------------------------------------------------------------------------------------------------------
# Inverse ranks
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Inverter:
    """Inverts versions of the units of one rank, and hands them to the gradient ranks.

    Attributes:
        rank: The base.
        number: Versions that were inverted.
        waiting: What was inverted and not taken yet.
    """

    rank: Rank
    number: int = 0
    waiting: list[Tensor] | None = None

    def invert(self, version: int, step: int) -> None:
        """Refresh all units of this rank from their estimates as they are."""
        plan, links, worker = self.rank.plan, self.rank.links, self.rank.worker()
        units = plan.units_of(links.rank)
        order = shuffled(units, plan.seed, version)
        fine = dict(zip(order, worker.invert(order), strict=True))
        head = [float(version), float(step), *(float(fine[index]) for index in units)]
        header = torch.tensor(head, dtype=torch.float64, device=links.device)
        self.waiting = [header, *(t for index in units for t in worker.live_parcel(index, "curvature").tensors)]
        links.words.write(f"done/{links.rank}/{self.number}", version=version)

    @property
    def key(self) -> str:
        """Word that says whether the version is taken."""
        return f"take/{self.rank.links.rank}/{self.number}"

    def hand_over(self) -> bool:
        """Wait until the version is wanted, and send it; returns False at the stop."""
        links = self.rank.links
        word = links.words.wait(self.key)
        if word["code"] == LOST:
            log.warning("rank %d took too long to invert: training goes on without it", links.rank)
            self.rank.failed = True
        if word["code"] != GO:
            return False
        finish(links.copy(f"curvature {links.rank}", links.rank, self.waiting or []))
        self.number, self.waiting = self.number + 1, None
        return True


@dataclass
class InverseRank(Rank):
    """Inverts what it is sent until it is told to stop."""

    def serve(self) -> None:
        """Receive estimates, refresh, hand over; returns at the stop."""
        inverter = Inverter(self)
        while not self.stopped:
            with self.watched(f"with its version {inverter.number}"):
                self.stopped = not self._one(inverter)

    def _one(self, inverter: Inverter) -> bool:
        links, worker = self.links, self.worker()
        word = links.words.wait(f"send/{links.rank}/{inverter.number}")
        if word["code"] == STOP:
            return False
        worker.heed_options(word["options"])
        units = self.plan.units_of(links.rank)
        updates = torch.zeros(len(units), dtype=torch.float64, device=links.device)
        tensors, flags = _estimates(worker, units)
        finish(links.copy(f"estimate {links.rank}", links.roles.server, [updates, *tensors], [False, *flags]))
        for index, number in zip(units, updates.tolist(), strict=True):
            worker.heed_estimate(index, int(number))
        inverter.invert(word["version"], word["step"])
        return inverter.hand_over()

    def close(self) -> None:
        """Serve, if nobody did."""
        if not self.stopped and not self.failed:
            self.serve()


def _estimates(worker: Worker, units: Sequence[int]) -> tuple[list[Tensor], list[bool]]:
    parcels = [worker.live_parcel(index, "estimate") for index in units]
    return [t for p in parcels for t in p.tensors], [flag for p in parcels for flag in p.symmetric]


# ---------------------------------------------------------------------------------------------------------------------
# Factor ranks
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class FactorRank(Rank):
    """Estimates from the parameters of the last turn; the first of them sends the estimates to the inverse ranks.

    Attributes:
        sent: Estimates sent, by inverse rank.
        inverter: Of a rank that inverts as well.
    """

    sent: dict[int, int] = field(default_factory=dict)
    inverter: Inverter | None = None
    _works: dict[int, Any] = field(default_factory=dict)
    _since: int = 0

    def __post_init__(self) -> None:
        """Nothing was sent yet."""
        self.sent = dict.fromkeys(self.links.roles.inverse, 0)
        if self.links.roles.colocated:
            self.inverter = Inverter(self)

    @property
    def is_server(self) -> bool:
        """Whether this rank talks for the others."""
        return self.links.rank == self.links.roles.server

    def end_step(self) -> None:
        """At the end of an epoch, pass the estimates on and take new parameters."""
        self.steps += 1
        with self.watched(f"after step {self.steps}"):
            if not self.plan.lockstep:
                self._deliver()
            if ends_epoch(self.steps, self.plan.period):
                self._end_epoch(self.steps // self.plan.period)

    def _end_epoch(self, turn: int) -> None:
        version, words = turn - 1, self.links.words
        if self.is_server and not self.plan.lockstep:
            words.write(f"want/{turn}")
        word = words.wait(f"turn/{turn}", meanwhile=None if self.plan.lockstep else self._deliver)
        if word["code"] == STOP:
            self._stop()
            return
        if self.plan.lockstep and self.inverter is not None and self.inverter.waiting is not None:
            self.inverter.hand_over()
        if self.is_server and self.inverter is None:
            self._send_all(version, word)
        finish(self.links.copy("parameters", self.links.roles.chief, self.worker().parameters_now()))
        if self.inverter is not None and self._inverts(version):
            self.worker().heed_options(word["options"])
            self.inverter.invert(version, self._since)
        self._since = word["step"]

    # ------------------------------------------------------------------ to inverse ranks
    def _send_all(self, version: int, word: dict[str, Any]) -> None:
        for j in self.links.roles.inverse:
            if j in word["lost"]:
                self._works.pop(j, None)  # never to be waited for
            elif self._is_free(j, version):
                self._send(j, version, word["options"])

    def _is_free(self, j: int, version: int) -> bool:
        """Whether this version goes to an inverse rank: always in lockstep, else if it has done the one before."""
        if self.plan.lockstep:
            return True
        if self.plan.replay is not None:
            if not any(e[0] == "take" and e[2:] == [j, version] for e in self.plan.replay):
                return False
            if self.sent[j]:
                self.links.words.wait(f"done/{j}/{self.sent[j] - 1}")
            return True
        return not self.sent[j] or self.links.words.look(f"done/{j}/{self.sent[j] - 1}") is not None

    def _send(self, j: int, version: int, options: dict[str, Any]) -> None:
        units, worker = self.plan.units_of(j), self.worker()
        counts = [float(worker.updates_of(index)) for index in units]
        updates = torch.tensor(counts, dtype=torch.float64, device=self.links.device)
        tensors, flags = _estimates(worker, units)
        try:
            finish(self._works.pop(j, None))
            key = f"send/{j}/{self.sent[j]}"
            self.links.words.write(key, code=GO, version=version, step=self._since, options=options)
            copies = [updates, *(t.clone() for t in tensors)]
            self._works[j] = self.links.copy(f"estimate {j}", self.links.rank, copies, [False, *flags])
        except RuntimeError as error:
            if not self.plan.degrade:
                raise RuntimeError(f"inverse rank {j} is lost: {error}") from error
            log.warning("inverse rank %d does not take its estimate: %s", j, error)
        self.sent[j] += 1

    # ------------------------------------------------------------------ a rank that inverts as well
    def _inverts(self, version: int) -> bool:
        """Whether this version is inverted here: unless the one before was not taken yet."""
        assert self.inverter is not None
        if self.plan.replay is None:
            return self.inverter.waiting is None
        return any(e[0] == "take" and e[2:] == [self.links.rank, version] for e in self.plan.replay)

    def _deliver(self) -> None:
        """Hand a version over if the gradient ranks wait for it."""
        inverter = self.inverter
        if inverter is not None and inverter.waiting is not None:
            word = self.links.words.look(inverter.key)
            if word is not None and word["code"] == GO:
                inverter.hand_over()

    # ------------------------------------------------------------------ the end
    def _stop(self) -> None:
        self.stopped = True
        if self.is_server and self.inverter is None:
            for j in self.links.roles.inverse:
                self.links.words.write(f"send/{j}/{self.sent[j]}", code=STOP)

    def close(self) -> None:
        """Take steps without data until the gradient ranks stop."""
        while not self.stopped and not self.failed:
            self.worker().idle()
