"""Values that the parts of one optimizer share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch.profiler import record_function

from secondorder.linalg.dense import Workspace
from secondorder.linalg.stacks import Stacks

_NOTHING = nullcontext()
CallableT = TypeVar("CallableT", bound=Callable[..., Any])


def outside_of_graphs(function: CallableT) -> CallableT:
    """Return a function that the compiler leaves out of its graphs, with a graph break instead."""
    # torch's own optimizers use the first one, which does not import the compiler before a step is taken.
    return cast("CallableT", getattr(torch, "_disable_dynamo", torch.compiler.disable)(function))


class Clock(Protocol):
    """Times the stages of a step."""

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Time what runs inside the ``with`` block."""

    def end_step(self) -> None:
        """Record the end of a step."""

    def last_step(self) -> dict[str, float]:
        """Return the milliseconds of the last step by stage."""
        ...


@dataclass(eq=False)
class Runtime:
    """Values that all parts of an optimizer share.

    Attributes:
        step: Number of steps taken.
        seed_base: The option ``deterministic_seed``, from which every random choice is derived.
        states: State of the optimizer by parameter. The optimizer updates this reference when loading replaces it.
        observed_terms: Number of loss terms that ``observe`` has seen in this step, as a 0-dim tensor.
        workspace: Memory for temporary tensors.
        stacks: Curvature of small blocks that precondition together.
        blocks: Number of blocks of a layer method.
        clock: The clock that times the stages of a step, if the user requested it.
    """

    step: int = 0
    seed_base: int = 0
    states: Mapping[Any, dict[str, Tensor | int]] = field(default_factory=dict)
    observed_terms: Tensor = field(default_factory=lambda: torch.ones((), dtype=torch.float64))
    workspace: Workspace = field(default_factory=Workspace)
    stacks: Stacks = field(default_factory=Stacks)
    blocks: int = 0
    clock: Clock | None = None

    def renew(self, states: Mapping[Any, dict[str, Tensor | int]], groups: Sequence[Mapping[str, Any]]) -> None:
        """Update values that the user or ``load_state_dict`` may have replaced since the last step."""
        self.states = states
        self.seed_base = groups[0].get("deterministic_seed", 0) if groups else 0

    def seed(self, stream: int, number: int | None = None) -> int:
        """Return a reproducible seed that depends on the stream and the number, which is the step by default."""
        mixed = self.seed_base
        for part in (self.step if number is None else number, stream):
            mixed = (mixed * 1_000_003 + part + 1) % (1 << 62)
        return mixed

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Return a context that names a stage of a step for the profiler, and times it if there is a clock."""
        # Entering a range takes longer than several small operators, so it is only done for a profiler.
        if self.clock is None and not torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            return _NOTHING
        return self._named(name)

    @contextmanager
    def _named(self, name: str) -> Iterator[None]:
        with record_function(f"secondorder.{name}"), _NOTHING if self.clock is None else self.clock.stage(name):
            yield


def some_of(names: Sequence[str]) -> str:
    """Return the first few of some names and the number of remaining ones."""
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
