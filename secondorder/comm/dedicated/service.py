"""The work of factor and inverse ranks for the gradient ranks; ``ranks`` lists the notices that they exchange."""

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
    """Inverts versions of the units of one rank and delivers them to the gradient ranks.

    Attributes:
        rank: The rank for which it works.
        number: Number of versions that were inverted.
        waiting: Tensors that are inverted but not taken yet, and whether each is symmetric.
    """

    rank: Rank
    number: int = 0
    waiting: tuple[list[Tensor], list[bool]] | None = None

    def invert(self, version: int, step: int) -> None:
        """Refresh all units of this rank from their current estimates."""
        plan, links, worker = self.rank.plan, self.rank.links, self.rank.worker()
        units = plan.units_of(links.rank)
        order = shuffled(units, plan.seed, version)
        fine = dict(zip(order, worker.invert(order), strict=True))
        head = [float(version), float(step), *(float(fine[index]) for index in units)]
        header = torch.tensor(head, dtype=torch.float64, device=links.device)
        tensors, flags = contents([worker.live_parcel(index, "curvature") for index in units])
        if links.roles.colocated:  # the estimate will change here, and it is itself used for preconditioning
            tensors = [t.clone() for t in tensors]
        self.waiting = [header, *tensors], [False, *flags]
        links.board.write(f"done/{links.rank}/{self.number}", version=version)

    @property
    def key(self) -> str:
        """Key of the notice that reports whether the version is taken."""
        return f"take/{self.rank.links.rank}/{self.number}"

    def hand_over(self) -> bool:
        """Wait until the version is requested and send it. Return False at the stop."""
        links = self.rank.links
        notice = links.board.wait(self.key)
        if notice["code"] == LOST:
            log.warning("rank %d took too long to invert: training continues without it", links.rank)
            self.rank.failed = True
        if notice["code"] != GO:
            return False
        tensors, flags = self.waiting or ([], [])
        finish(links.copy(f"curvature {links.rank}", links.rank, tensors, flags))
        self.number, self.waiting = self.number + 1, None
        return True


@dataclass
class InverseRank(Rank):
    """Inverts the estimates that it receives until it is stopped."""

    def serve(self) -> None:
        """Receive estimates, refresh and deliver; return at the stop."""
        inverter = Inverter(self)
        while not self.stopped:
            with self.watched(f"with its version {inverter.number}"):
                self.stopped = not self._one(inverter)

    def _one(self, inverter: Inverter) -> bool:
        links, worker = self.links, self.worker()
        notice = links.board.wait(f"send/{links.rank}/{inverter.number}")
        if notice["code"] == STOP:
            return False
        worker.adopt_options(notice["options"])
        units = self.plan.units_of(links.rank)
        updates = torch.zeros(len(units), dtype=torch.float64, device=links.device)
        tensors, flags = _estimates(worker, units)
        finish(links.copy(f"estimate {links.rank}", links.roles.server, [updates, *tensors], [False, *flags]))
        for index, number in zip(units, updates.tolist(), strict=True):
            worker.note_estimate(index, int(number))
        inverter.invert(notice["version"], notice["step"])
        return inverter.hand_over()

    def close(self) -> None:
        """Serve, unless :meth:`serve` was called before."""
        if not self.stopped and not self.failed:
            self.serve()


def _estimates(worker: Worker, units: Sequence[int]) -> tuple[list[Tensor], list[bool]]:
    return contents([worker.live_parcel(index, "estimate") for index in units])


@dataclass
class FactorRank(Rank):
    """Estimates with the parameters of the last turn; the first such rank sends the estimates to inverse ranks.

    Attributes:
        sent: Number of estimates that were sent, by inverse rank.
        inverter: The inverter, on a rank that inverts as well.
    """

    sent: dict[int, int] = field(default_factory=dict)
    inverter: Inverter | None = None
    _works: dict[int, Any] = field(default_factory=dict)
    _since: int = 0

    def __post_init__(self) -> None:
        """Start without anything sent."""
        self.sent = dict.fromkeys(self.links.roles.inverse, 0)
        if self.links.roles.colocated:
            self.inverter = Inverter(self)

    @property
    def is_server(self) -> bool:
        """Whether this rank sends for all factor ranks."""
        return self.links.rank == self.links.roles.server

    def end_step(self) -> None:
        """Pass the estimates on and receive new parameters at the end of an epoch."""
        self.steps += 1
        with self.watched(f"after step {self.steps}"):
            if not self.plan.lockstep:
                self._deliver()
            if ends_epoch(self.steps, self.plan.period):
                self._end_epoch(self.steps // self.plan.period)

    def _end_epoch(self, turn: int) -> None:
        version, board = turn - 1, self.links.board
        if self.is_server and not self.plan.lockstep:
            board.write(f"want/{turn}")
        notice = board.wait(f"turn/{turn}", meanwhile=None if self.plan.lockstep else self._deliver)
        if notice["code"] == STOP:
            self._stop()
            return
        if self.plan.lockstep and self.inverter is not None and self.inverter.waiting is not None:
            self.inverter.hand_over()
        if self.is_server and self.inverter is None:
            self._send_all(version, notice)
        finish(self.links.copy("parameters", self.links.roles.chief, self.worker().parameters_now()))
        if self.inverter is not None and self._inverts(version):
            self.worker().adopt_options(notice["options"])
            self.inverter.invert(version, self._since)
        self._since = notice["step"]

    # ------------------------------------------------------------------ to inverse ranks
    def _send_all(self, version: int, notice: dict[str, Any]) -> None:
        for j in self.links.roles.inverse:
            if j in notice["lost"]:
                self._works.pop(j, None)  # no rank will receive it
            elif self._is_free(j, version):
                self._send(j, version, notice["options"])

    def _is_free(self, j: int, version: int) -> bool:
        """Whether this version is sent to an inverse rank, which must be free unless the mode is lockstep."""
        if self.plan.lockstep:
            return True
        if self.plan.replay is not None:
            if not self.plan.repeats("take", None, j, version):
                return False
            if self.sent[j]:
                self.links.board.wait(f"done/{j}/{self.sent[j] - 1}")
            return True
        return not self.sent[j] or self.links.board.look(f"done/{j}/{self.sent[j] - 1}") is not None

    def _send(self, j: int, version: int, options: dict[str, Any]) -> None:
        units, worker = self.plan.units_of(j), self.worker()
        counts = [float(worker.updates_of(index)) for index in units]
        updates = torch.tensor(counts, dtype=torch.float64, device=self.links.device)
        tensors, flags = _estimates(worker, units)
        try:
            finish(self._works.pop(j, None))
            key = f"send/{j}/{self.sent[j]}"
            self.links.board.write(key, code=GO, version=version, step=self._since, options=options)
            copies = [updates, *(t.clone() for t in tensors)]
            self._works[j] = self.links.copy(f"estimate {j}", self.links.rank, copies, [False, *flags])
        except RuntimeError as error:
            if not self.plan.degrade:
                raise RuntimeError(f"inverse rank {j} is lost: {error}") from error
            log.warning("inverse rank %d does not take its estimate: %s", j, error)
        self.sent[j] += 1

    # ------------------------------------------------------------------ a rank that inverts as well
    def _inverts(self, version: int) -> bool:
        """Whether this version is inverted here, which is the case if the previous version was taken."""
        assert self.inverter is not None
        if self.plan.replay is None:
            return self.inverter.waiting is None
        return self.plan.repeats("take", None, self.links.rank, version)

    def _deliver(self) -> None:
        """Deliver a version if the gradient ranks wait for it."""
        inverter = self.inverter
        if inverter is not None and inverter.waiting is not None:
            notice = self.links.board.look(inverter.key)
            if notice is not None and notice["code"] == GO:
                inverter.hand_over()

    # ------------------------------------------------------------------ the end
    def _stop(self) -> None:
        self.stopped = True
        if self.is_server and self.inverter is None:
            for j in self.links.roles.inverse:
                self.links.board.write(f"send/{j}/{self.sent[j]}", code=STOP)

    def close(self) -> None:
        """Take steps without data until the gradient ranks stop."""
        while not self.stopped and not self.failed:
            self.worker().idle()
