"""What the parts of one optimizer share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from secondorder.linalg.dense import Workspace


@dataclass(eq=False)
class Runtime:
    """Facts of a run that all parts of an optimizer may read, and that the optimizer alone writes.

    Attributes:
        step: Steps taken.
        seed_base: ``deterministic_seed``, which every random choice is derived from.
        states: State of the optimizer by parameter. Loading replaces it, and the optimizer then renews it here.
        observed_terms: Loss terms that ``observe`` has seen in this step, 0-dim.
        workspace: Memory for temporaries.
    """

    step: int = 0
    seed_base: int = 0
    states: Mapping[Any, dict[str, Tensor | int]] = field(default_factory=dict)
    observed_terms: Tensor = field(default_factory=lambda: torch.ones((), dtype=torch.float64))
    workspace: Workspace = field(default_factory=Workspace)

    def renew(self, states: Mapping[Any, dict[str, Tensor | int]], groups: Sequence[Mapping[str, Any]]) -> None:
        """Take over what a user, or a load, may have replaced since the last step."""
        self.states = states
        self.seed_base = groups[0].get("deterministic_seed", 0) if groups else 0

    def seed(self, stream: int, number: int | None = None) -> int:
        """Seed of a random choice: the same after a resume, different in every stream and by number (or step)."""
        mixed = self.seed_base
        for part in (self.step if number is None else number, stream):
            mixed = (mixed * 1_000_003 + part + 1) % (1 << 62)
        return mixed
