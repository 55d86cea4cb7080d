"""What ``step()`` asks of the curvature behind it, whatever that curvature is.

::

    collect ─► learn ─► refresh_due ─► share ─► propose
    statistics estimates inverses      to ranks directions
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from secondorder.comm.layout import Layout
from secondorder.curvature.damping_watch import Damped

Group = dict[str, Any]
Directions = dict[nn.Parameter, Tensor]


@dataclass
class ParameterTable:
    """Parameters, their options and their state, as the optimizer has them.

    torch and trainers replace these objects; the optimizer puts the new ones in here before anybody reads them.

    Attributes:
        groups: The parameter groups.
        state: State by parameter.
        names: By parameter.
        group_of: Group of each parameter.
        root: The module, if there is one.
        layouts: How parameters are cut over ranks; empty if they are not.
    """

    groups: list[Group] = field(default_factory=list)
    state: MutableMapping[nn.Parameter, dict[str, Any]] = field(default_factory=dict)
    names: Mapping[nn.Parameter, str] = field(default_factory=dict)
    group_of: Mapping[nn.Parameter, Group] = field(default_factory=dict)
    root: nn.Module | None = None
    layouts: Mapping[nn.Parameter, Layout] = field(default_factory=dict)


class Proposal(NamedTuple):
    """Preconditioned directions, before grafting and clipping.

    Attributes:
        directions: By parameter, shaped as it; complex ones may be pairs of real numbers.
        raw: What each was found from: the size of an SGD step.
        sets: Parameters that are grafted together, and the rule whose size they take; None for no grafting.
    """

    directions: Directions
    raw: Directions
    sets: Sequence[tuple[str | None, Sequence[nn.Parameter]]]


class Preconditioner(Protocol):
    """The stages of a step over all curvature that an optimizer has."""

    def check_gradients(self) -> None:
        """Look whether the gradients of this rank are those that something was captured of."""

    def collect(self) -> Any:
        """Take what was captured since the last step, combined over the ranks."""

    def discard(self) -> None:
        """Forget what was captured since the last step."""

    def drop(self) -> None:
        """Count a batch that is left out because its gradients cannot be used."""

    def learn(self, statistics: Any, gradients: Directions, gate: Tensor | None) -> None:
        """Update the running estimates.

        Args:
            statistics: What ``collect`` has returned.
            gradients: Of this step, by parameter.
            gate: None, or a 0-dim bool tensor: where it is False nothing changes.
        """

    def refresh_due(self) -> list[int]:
        """Factorise what is due; returns the indices of what was."""
        ...

    def share(self, refreshed: list[int]) -> None:
        """Bring what was refreshed to the ranks that precondition with it."""

    def propose(self, gradients: Directions, gate: Tensor | None) -> Proposal:
        """Preconditioned directions of the covered parameters."""
        ...

    def damped(self) -> list[Damped] | None:
        """What is to be compared with its damping in this step; None before there is enough to go by."""
