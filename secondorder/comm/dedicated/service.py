"""What factor and inverse ranks do for the gradient ranks; the words they exchange are in ``ranks``."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from secondorder.comm.dedicated.links import GO, LOST, STOP, Worker, contents, finish
from secondorder.comm.dedicated.lockstep import ends_epoch, shuffled
from secondorder.comm.dedicated.ranks import Rank

log: logging.Logger = logging.getLogger("secondorder")


@dataclass
class Inverter:
    """Inverts versions of the units of one rank, and hands them to the gradient ranks.

    Attributes:
        rank: The base.
        number: Versions that were inverted.
        waiting: What was inverted and not taken yet, and whether each tensor is symmetric.
    """

    rank: Rank
    number: int = 0
    waiting: tuple[list[Tensor], list[bool]] | None = None

    def invert(self, version: int, step: int) -> None:
        """Refresh all units of this rank from their estimates as they are."""
        plan, links, worker = self.rank.plan, self.rank.links, self.rank.worker()
        units = plan.units_of(links.rank)
        order = shuffled(units, plan.seed, version)
        fine = dict(zip(order, worker.invert(order), strict=True))
        head = [float(version), float(step), *(float(fine[index]) for index in units)]
        header = torch.tensor(head, dtype=torch.float64, device=links.device)
        tensors, flags = contents([worker.live_parcel(index, "curvature") for index in units])
        if links.roles.colocated:  # where an estimate preconditions as it is, it is going to change here
            tensors = [t.clone() for t in tensors]
        self.waiting = [header, *tensors], [False, *flags]
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
        tensors, flags = self.waiting or ([], [])
        finish(links.copy(f"curvature {links.rank}", links.rank, tensors, flags))
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
        worker.adopt_options(word["options"])
        units = self.plan.units_of(links.rank)
        updates = torch.zeros(len(units), dtype=torch.float64, device=links.device)
        tensors, flags = _estimates(worker, units)
        finish(links.copy(f"estimate {links.rank}", links.roles.server, [updates, *tensors], [False, *flags]))
        for index, number in zip(units, updates.tolist(), strict=True):
            worker.note_estimate(index, int(number))
        inverter.invert(word["version"], word["step"])
        return inverter.hand_over()

    def close(self) -> None:
        """Serve, if nobody did."""
        if not self.stopped and not self.failed:
            self.serve()


def _estimates(worker: Worker, units: Sequence[int]) -> tuple[list[Tensor], list[bool]]:
    return contents([worker.live_parcel(index, "estimate") for index in units])


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
            self.worker().adopt_options(word["options"])
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
            if not self.plan.repeats("take", None, j, version):
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
        return self.plan.repeats("take", None, self.links.rank, version)

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
