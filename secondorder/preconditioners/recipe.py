"""The recipe of a method, which contains its curvature and the rules about its options."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from secondorder import options
from secondorder.config import FisherOptions
from secondorder.curvature.schema import Schema
from secondorder.parameters import Group
from secondorder.preconditioners.base import CurvatureState, DividedState, Preconditioner
from secondorder.preconditioners.group_options import GroupRules
from secondorder.preconditioners.parts import Shared

if TYPE_CHECKING:
    from secondorder.adaptation.no_trust import NoTrust
    from secondorder.adaptation.trust_region import TrustRegion
    from secondorder.parallel.roles import RoleWorker
    from secondorder.update import Update


class Recipe(Protocol):
    """Creates the parts of an optimizer that differ between methods. Copies and pickles keep the recipe.

    Attributes:
        rules: Rules about several options of a group.
        fisher: The Fisher estimate.
    """

    rules: GroupRules
    fisher: FisherOptions

    @property
    def catalog(self) -> Schema:
        """Entries of the states of curvature, by key, as far as they are the same in every state."""
        ...

    @property
    def allocating(self) -> tuple[str, ...]:
        """Options of a group that determine how much state its parameters have."""
        ...

    def defaults(self, given: Mapping[str, Any], checks: Mapping[str, options.Check]) -> Group:
        """Return the default options of groups.

        Args:
            given: The arguments of the constructor by name.
            checks: Checks of the options that only this method has.

        Returns:
            The options.
        """
        return options.from_arguments(given, checks)

    @abstractmethod
    def find_module(self, method: str, params: Any, module: Any) -> tuple[nn.Module | None, Any]:
        """Return the module to follow and the parameters to train, from the arguments of the constructor."""
        ...

    @abstractmethod
    def precondition(self, shared: Shared, kept: Mapping[str, Any] | None) -> Preconditioner:
        """Return a preconditioner. For a copy, ``kept`` is the result of ``Preconditioner.kept`` for the original."""
        ...

    @abstractmethod
    def judge(self, preconditioner: Any, update: Update) -> NoTrust | TrustRegion:
        """Return the object that judges steps by the loss."""
        ...

    @abstractmethod
    def checkpoint_adapters(self, preconditioner: Any) -> tuple[CurvatureState, DividedState | None]:
        """Return the curvature for checkpoints, and a second adapter if its tensors may be divided between ranks."""
        ...

    @abstractmethod
    def worker(self, preconditioner: Any, advance: weakref.WeakMethod[Callable[[], None]]) -> RoleWorker | None:
        """Return the worker for ranks of several roles; None if they cannot run the method."""
        ...

    @abstractmethod
    def copied(self, preconditioner: Any) -> Recipe:
        """Return the recipe for a copy, which does not refer to the module."""
        ...
