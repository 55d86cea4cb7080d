"""The interface between ``step()`` and the curvature that it uses.

::

    collect ─► learn ─► refresh_due ─► share ─► propose
    statistics estimates inverses      to ranks directions
"""

# ruff: noqa: B027 - methods that a kind of curvature does not need do nothing
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from secondorder.capture.statistics.averages import all_finite
from secondorder.comm.strategy import CommStrategy, Unit
from secondorder.curvature.damping_watch import Damped
from secondorder.curvature.schema import Place, Schema
from secondorder.parameters import Directions, Group, ParameterTable
from secondorder.preconditioners.hooks import NoHooks

if TYPE_CHECKING:
    from secondorder.preconditioners.layer_capture import LayerCapture

#: State by parameter, as in a checkpoint.
SavedStates = Mapping[nn.Parameter, Mapping[str, Any]]


class Proposal(NamedTuple):
    """Preconditioned directions, before grafting and clipping.

    Attributes:
        directions: By parameter, in its shape. Complex directions may be pairs of real numbers.
        raw: The gradient from which each direction was computed. It sets the size of a grafted SGD step.
        sets: Sets of parameters that are grafted together, each with the rule of its size or None for no grafting.
        products: ``⟨direction, source⟩`` by the first parameter of each set whose directions are known to be finite.
    """

    directions: Directions
    raw: Directions
    sets: Sequence[tuple[str | None, Sequence[nn.Parameter]]]
    products: Directions = {}


class Rule(NamedTuple):
    """The first-order rule of a parameter in a step. Parameters of a group with equal rules are updated together.

    Attributes:
        kind: ``"sgd"``; ``"plain"``, which is SGD without momentum; ``"adam"``; or ``"model"``, whose rate and momentum
            come from the quadratic model.
        momentum: μ.
        weight_decay: Weight decay.
        decoupled: Whether weight decay is decoupled, which makes Adam's rule AdamW.
        factor: Factor of the direction.
        shrink: 1 minus the factor of the parameter, which does not depend on the learning rate.
        is_fallback: Whether Adam's rule uses the learning rate of the fallback.
        may_fuse: Whether Adam's rule may use a fused kernel, which rounds differently from ``torch.optim``.
    """

    kind: str
    momentum: float
    weight_decay: float
    decoupled: bool
    factor: float = 1.0
    shrink: float = 0.0
    is_fallback: bool = False
    may_fuse: bool = False


class CurvaturePlan(ABC):
    """The blocks or windows that cover the current parameters."""

    @property
    @abstractmethod
    def by_name(self) -> Mapping[str, Any]:
        """The blocks or windows, by name."""

    @abstractmethod
    def reported(self) -> Iterable[tuple[str, Sequence[nn.Parameter]]]:
        """Return the name and the parameters of each block, or of each window on this rank."""

    @abstractmethod
    def clear(self, params: Collection[nn.Parameter]) -> None:
        """Discard the plan for another module, or for other parameters than the current ones."""

    def take_back(self, group: Group) -> None:
        """Remove the last group, if that is possible, since its curvature could not be planned."""

    def replace(self, after: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Replace the parameters by those that ``after`` maps them to."""

    def allocate(self, p: nn.Parameter) -> None:
        """Allocate the curvature in the state of a parameter. Existing tensors that still fit are kept."""

    def state_of_copies(self, state: Mapping[nn.Parameter, dict[str, Any]]) -> Mapping[nn.Parameter, dict[str, Any]]:
        """Return the state for copies and pickles."""
        return state


class CurvatureReport(ABC):
    """Interface of the reports of curvature."""

    #: Heading of the column with the sizes of the curvature.
    sizes_are: ClassVar[str]

    @abstractmethod
    def summary(self) -> str:
        """Return the number of blocks or windows as text."""

    @abstractmethod
    def coverage(self, p: nn.Parameter) -> tuple[str, str, str]:
        """Return what covers a parameter, its size, and its owner; all are empty strings if nothing covers it."""

    @abstractmethod
    def damped(self, step: int) -> list[Damped] | None:
        """Return the curvature to compare with its damping in this step; None while there is too little of it.

        Args:
            step: Number of steps taken before this one.

        Returns:
            The curvature with its damping.
        """

    @abstractmethod
    def dense(self, name: str) -> Tensor:
        """Return the undamped curvature of a layer as a dense matrix ``[n, n]``; see ``dense_curvature``."""

    @abstractmethod
    def diagnostics(self) -> dict[str, Any]:
        """Return counters and factors as plain numbers; reading them may wait for the device."""

    @property
    def nbytes(self) -> int:
        """Bytes that are neither in the state nor pending."""
        return 0

    @property
    @abstractmethod
    def pending_bytes(self) -> int:
        """Bytes of statistics that wait for the next step."""


class Covering(Protocol):
    """A block or a window, as the first-order update sees it."""

    @property
    def group(self) -> Group:
        """The group whose options it follows."""
        ...

    @property
    def sets_length(self) -> bool:
        """Whether its directions have a length that kl-clip does not change."""
        ...


class Preconditioner(ABC):
    """The stages of a step over all curvature of an optimizer."""

    #: Whether ``propose`` preconditions its argument ``source``. Windows precondition what they contain.
    takes_sources: ClassVar[bool] = True
    #: Option with the number of steps between two refreshes; empty if there is none. 0 switches curvature off.
    refresh_interval: ClassVar[str] = ""
    #: Whether there is curvature only for the layers of a module, so that a copy waits for one.
    needs_module: ClassVar[bool] = False

    comm: CommStrategy
    table: ParameterTable
    #: The hooks that capture statistics in forward and backward passes.
    hooks: NoHooks | LayerCapture
    plan: CurvaturePlan
    report: CurvatureReport

    @abstractmethod
    def follow(self, place: Callable[[Sequence[Unit]], None]) -> bool:
        """Make a new plan for the current parameters.

        Args:
            place: Function with which the strategy assigns units to ranks.

        Returns:
            Whether the plan changed.
        """

    def rebuilt(self) -> None:
        """Act on a new plan whose state has been allocated."""

    def detach(self) -> None:
        """Remove all hooks and end all work in the background. Idempotent."""

    # ------------------------------------------------------------------ copies
    @abstractmethod
    def kept(self) -> dict[str, Any]:
        """Return what copies and pickles keep in addition to the state and the recipe."""

    # ------------------------------------------------------------------ the stages of a step
    def acceptable(self, gradients: Directions) -> Tensor:
        """Return whether a step can use the gradients, as a 0-dim bool tensor."""
        found = [torch.view_as_real(g) if g.is_complex() else g for g in gradients.values()]
        return self.table.shards.everywhere(all_finite(found))

    def inspected(self, gradients: Directions) -> None:
        """Record the gradients of a step after they have been checked."""

    def end_step(self) -> None:
        """Prepare for the next step."""

    @abstractmethod
    def facts(self) -> dict[str, list[str]]:
        """Return the settings that must be equal on all ranks, as text."""

    @abstractmethod
    def recover(self) -> None:
        """Recompute the curvature that a checkpoint left out, after the ranks have connected."""

    @abstractmethod
    def collect(self) -> Any:
        """Return the statistics captured since the last step, combined over the ranks."""

    def drop(self) -> None:
        """Count a batch that is left out because its gradients cannot be used."""

    @abstractmethod
    def learn(self, statistics: Any, gradients: Directions, gate: Tensor | None) -> None:
        """Update the running estimates.

        Args:
            statistics: The return value of ``collect``.
            gradients: Gradients of this step by parameter.
            gate: None, or a 0-dim bool tensor. If it is False, nothing changes.
        """

    @abstractmethod
    def refresh_due(self) -> list[int]:
        """Refresh the curvature that is due, and return the indices of refreshed units."""

    @abstractmethod
    def share(self, refreshed: list[int]) -> None:
        """Send the refreshed curvature to the ranks that precondition with it."""

    @abstractmethod
    def propose(self, gradients: Directions, source: Directions, gate: Tensor | None) -> Proposal:
        """Return the preconditioned directions of the covered parameters.

        Args:
            gradients: Gradients of this step by parameter.
            source: The tensors to precondition: gradients, or means of them. Windows contain them already.
            gate: None, or a 0-dim bool tensor that is False if the step is not to be taken.

        Returns:
            The directions.
        """

    # ------------------------------------------------------------------ what the first-order update asks
    @property
    @abstractmethod
    def covered(self) -> Mapping[nn.Parameter, Covering]:
        """The block or window of each covered parameter."""

    def adam_options(self, group: Mapping[str, Any]) -> tuple[tuple[float, float], float]:
        """Return β₁, β₂ and ε of Adam's rule in a group."""
        return group["betas"], group["eps"]

    @abstractmethod
    def preconditioned(self, gradients: Directions) -> list[nn.Parameter]:
        """Return the parameters for which a step with these gradients proposes directions."""

    def change_sources(self, source: Directions, gradients: Directions, gate: Tensor | None) -> None:
        """Change in place the tensors to precondition, if the method preconditions something else.

        Args:
            source: The gradient of each parameter, or Adam's first moment.
            gradients: Gradients of this step by parameter.
            gate: None, or a 0-dim bool tensor. If it is False, nothing changes.
        """
        return

    def rule(self, p: nn.Parameter, group: Mapping[str, Any], rule: Rule) -> Rule:
        """Return the first-order rule of a preconditioned parameter.

        Args:
            p: The parameter.
            group: The options of the parameter.
            rule: The rule that the options select.

        Returns:
            The rule, which the method may have changed.
        """
        return rule


class CurvatureState(Protocol):
    """Interface between curvature in the state of an optimizer and checkpoints.

    ::

        misfits ─► while_loading( translated ─► expected ) ─► loaded
                   nothing is changed                         the state is that of the checkpoint
    """

    #: Keys of the values that the state of one parameter also holds for other parameters.
    common_keys: ClassVar[frozenset[str]]
    #: Options that determine how much is allocated. A checkpoint does not change them.
    structural_options: ClassVar[tuple[str, ...]]

    def schema_of(self, p: nn.Parameter, group: Mapping[str, Any], state: Mapping[str, Any]) -> Schema:
        """Return the curvature that the state of a parameter holds, on all ranks together.

        Args:
            p: The parameter.
            group: Its options.
            state: Its current state, or its state in a checkpoint, for sizes that depend on the data.

        Returns:
            The schema.
        """
        ...

    def covers(self, p: nn.Parameter) -> bool:
        """Whether there is curvature for a parameter."""
        ...

    def places_here(self, p: nn.Parameter) -> frozenset[Place]:
        """Return the places of tensors of a parameter's state that this rank has."""
        ...

    def placed(self) -> Sequence[tuple[int, nn.Parameter]] | None:
        """Return the indices of all blocks and the parameters that hold their states; None if blocks may be divided."""

    def is_a_copy(self) -> str:
        """Return what to do with a copy that has no module and cannot judge a state; empty if it can."""
        ...

    def settle(self, follow: Callable[[], None]) -> None:
        """Update the state before it is saved. ``follow`` makes a new plan if necessary."""

    def misfits(self, states: SavedStates) -> list[str]:
        """Return why saved states do not fit, apart from keys and shapes."""
        ...

    def while_loading(self, states: SavedStates, rebuild: Callable[[], bool]) -> AbstractContextManager[None]:
        """Return the context in which saved states are compared. ``rebuild`` makes a new plan and allocates state."""
        ...

    def translated(self, states: SavedStates, group_of: Mapping[nn.Parameter, Group]) -> SavedStates:
        """Return saved states in the form in which this optimizer stores them, given their saved groups.

        Raises:
            RuntimeError: If they lack tensors that only another rank has saved.
        """
        ...

    def expected(self, p: nn.Parameter, schema: Schema, theirs: Mapping[str, Any]) -> Schema:
        """Return the schema with which the saved state of a parameter is compared, given the complete schema."""
        ...

    def loaded(self, rebuild: Callable[[], bool]) -> None:
        """Compute what a checkpoint may leave out, and make a new plan for the loaded options."""


class DividedState(Protocol):
    """Interface of curvature whose tensors may be divided between ranks and are copied from a checkpoint specially."""

    #: Keys of these tensors.
    keys: ClassVar[frozenset[str]]

    def bad_values(self, p: nn.Parameter, theirs: Mapping[str, Any]) -> list[str]:
        """Return one line for each saved tensor of a parameter whose values cannot be loaded."""
        ...

    def install(self, loaded: Mapping[nn.Parameter, dict[str, Any]]) -> None:
        """Replace the state by checked values, copying those of these tensors."""

    def gather(self, asks: bool) -> dict[nn.Parameter, dict[str, Tensor]]:
        """Return the tensors that this rank lacks, on the CPU, if it requests them. All ranks must call this."""
        ...
