"""Groups and messages between gradient, factor and inverse ranks.

Each group sends in one direction and has at most one outstanding message::

    gradients     among the gradient ranks                     gradients, decisions of the chief
    factors       among the factor ranks                       sums of statistics
    parameters    chief ─► factor ranks                        once per epoch
    estimate j    first factor rank ─► inverse rank j          once per version
    curvature j   inverse rank j ─► gradient ranks             once per version
    control       all ranks                                    at the start and at the end
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from secondorder.comm.collectives import Collectives
from secondorder.comm.dedicated.board import Board
from secondorder.comm.dedicated.roles import Roles
from secondorder.comm.messages import Work
from secondorder.comm.strategy import Parcel

#: The least number of seconds that ranks have to find each other, since short timeouts are meant for training.
_MEETING = 30.0
GO, STOP, LOST = "go", "stop", "lost"


class Worker(Protocol):
    """The methods of an optimizer that the roles need."""

    def parameters_now(self) -> list[Tensor]:
        """Return all parameters, in order."""

    def sent_options(self) -> dict[str, Any]:
        """Return the options of the groups that a refresh depends on, in a form that JSON supports."""

    def adopt_options(self, sent: dict[str, Any]) -> None:
        """Adopt the options that another rank has sent."""

    def live_parcel(self, index: int, place: str) -> Parcel:
        """Return the stored tensors of the ``"estimate"`` or of the ``"curvature"`` of a unit."""

    def updates_of(self, index: int) -> int:
        """Return the number of updates of the estimate of a unit."""

    def note_estimate(self, index: int, updates: int) -> None:
        """Record that the estimate of a unit was overwritten by one with this number of updates."""

    def has_curvature(self, index: int) -> bool:
        """Whether a unit preconditions."""

    def adopt_curvature(self, index: int, tensors: Sequence[Tensor]) -> None:
        """Precondition a unit with these tensors from now on."""

    def forget_curvature(self, index: int) -> None:
        """Reset a unit to its state without any curvature."""

    def invert(self, indices: Sequence[int]) -> list[bool]:
        """Refresh units from their estimates, and return for each whether it has a new result."""

    def idle(self) -> None:
        """Take a step without data."""


@dataclass
class Links:
    """The groups and the message board that connect this rank to the others.

    Attributes:
        roles: Roles of all ranks.
        rank: This rank.
        collectives: Sends and counts messages.
        board: Notices in the store.
        timeout: Seconds after which a missing message is an error.
        patience: Seconds to wait for an inverse rank; less than the timeout, since other ranks wait for this one
            meanwhile.
        device: Device of small messages.
    """

    roles: Roles
    rank: int
    collectives: Collectives
    board: Board
    timeout: float
    patience: float
    device: torch.device
    control: Any
    groups: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Create the groups, in the same order on all ranks."""
        for name, ranks in self.roles.groups.items():
            if len(ranks) > 1:
                timeout = self.patience if name.startswith("curvature") else self.timeout
                made = new_group(ranks, timeout)
                if self.rank in ranks:
                    self.groups[name] = made
                    set_timeout(made, timeout)

    def copy(
        self, name: str, source: int, tensors: Sequence[Tensor], symmetric: Sequence[bool] = (), stage: str = ""
    ) -> Work | None:
        """Launch a copy of tensors from one rank to the others of a group; return None if it has no others."""
        group = self.groups.get(name)
        if group is None:
            return None
        flags = {source: symmetric or (False,) * len(tensors)}
        return self.collectives.broadcast(
            {source: tensors}, group=group, stage=stage or name.split()[0], symmetric=flags, exact=True
        )

    def broadcast(self, name: str, source: int, numbers: Sequence[float]) -> list[float]:
        """Broadcast a few numbers from one rank to a group."""
        vector = torch.tensor(list(numbers), dtype=torch.float64, device=self.device)
        finish(self.copy(name, source, [vector], stage="words"))
        return [float(number) for number in vector.tolist()]

    def sum(self, values: Tensor) -> Tensor:
        """Sum a small vector over the ranks of this role."""
        group = self.group_of_role
        return values.cpu() if group is None else self.collectives.words(values, group=group, stage="words")

    @property
    def group_of_role(self) -> Any:
        """Group of the ranks that step together with this one; None if it is alone."""
        names = {"gradient": "gradients", "factor": "factors"}
        return self.groups.get(names.get(self.roles.of(self.rank), ""))

    def leave(self, together: bool) -> None:
        """Destroy the groups. With ``together``, first wait until all ranks have called this."""
        if not dist.is_initialized():
            return
        for group in self.groups.values():
            dist.destroy_process_group(group)
        self.groups.clear()
        if together:
            dist.monitored_barrier(self.control, timedelta(seconds=self.timeout))
        dist.destroy_process_group(self.control)


def new_group(ranks: Sequence[int], timeout: float, **options: Any) -> Any:
    """Create a group of these ranks, which may need more time to find each other than for a message."""
    return dist.new_group(list(ranks), timeout=timedelta(seconds=max(timeout, _MEETING)), **options)


def set_timeout(group: Any, seconds: float) -> None:
    """Set the timeout of a group's messages from now on."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def contents(parcels: Sequence[Parcel]) -> tuple[list[Tensor], list[bool]]:
    """Return the tensors of parcels, and whether each is symmetric."""
    return [t for p in parcels for t in p.tensors], [flag for p in parcels for flag in p.symmetric]


def finish(work: Work | None) -> None:
    """Wait for a message, if there is one."""
    if work is not None:
        work.wait()
