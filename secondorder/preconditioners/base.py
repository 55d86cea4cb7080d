"""The interface between ``step()`` and the curvature that it uses.

::

    collect ─► learn ─► refresh_due ─► share ─► propose
    statistics estimates inverses      to ranks directions
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from secondorder.curvature.damping_watch import Damped
from secondorder.parameters import Directions


class Proposal(NamedTuple):
    """Preconditioned directions, before grafting and clipping.

    Attributes:
        directions: By parameter, in its shape. Complex directions may be pairs of real numbers.
        raw: The gradient from which each direction was computed. It sets the size of a grafted SGD step.
        sets: Sets of parameters that are grafted together, each with the rule of its size or None for no grafting.
    """

    directions: Directions
    raw: Directions
    sets: Sequence[tuple[str | None, Sequence[nn.Parameter]]]


class Preconditioner(Protocol):
    """The stages of a step over all curvature of an optimizer."""

    def facts(self) -> dict[str, list[str]]:
        """Return what must be equal on all ranks, in words."""
        ...

    def recover(self) -> None:
        """Find the curvature that a checkpoint has left out, once the ranks have met."""

    def check_gradients(self) -> None:
        """Check that the gradients of this rank belong to the captured statistics."""

    def collect(self) -> Any:
        """Return the statistics captured since the last step, combined over the ranks."""

    def discard(self) -> None:
        """Discard what was captured since the last step."""

    def drop(self) -> None:
        """Count a batch that is left out because its gradients cannot be used."""

    def learn(self, statistics: Any, gradients: Directions, gate: Tensor | None) -> None:
        """Update the running estimates.

        Args:
            statistics: The return value of ``collect``.
            gradients: Gradients of this step by parameter.
            gate: None, or a 0-dim bool tensor: where it is False nothing changes.
        """

    def refresh_due(self) -> list[int]:
        """Refresh the curvature that is due, and return the indices of what was refreshed."""
        ...

    def share(self, refreshed: list[int]) -> None:
        """Send the refreshed curvature to the ranks that precondition with it."""

    def propose(self, gradients: Directions, source: Directions, gate: Tensor | None) -> Proposal:
        """Return the preconditioned directions of the covered parameters.

        Args:
            gradients: Gradients of this step by parameter.
            source: What is preconditioned: gradients, or means of them. Windows contain it already.
            gate: None, or a 0-dim bool tensor that is False if the step is not to be taken.

        Returns:
            The directions.
        """
        ...

    def damped(self) -> list[Damped] | None:
        """Return the curvature to compare with its damping in this step; None while there is not enough data."""
