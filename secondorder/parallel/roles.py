"""What layer methods do for ranks of other roles: estimates, and what is found from them, travel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from secondorder.capture.sites import Captured
from secondorder.comm import Parcel
from secondorder.curvature.block import Block
from secondorder.curvature.refresh import Refreshing
from secondorder.curvature.schema import Place, keys
from secondorder.linalg.dense import full_precision

#: Options that a refresh reads, and that a schedule may change where a training loop runs.
_SPOKEN = ("damping", "weight_decay")


class Serving(Refreshing):
    """The verbs that a strategy calls where gradients, estimates and inverses are found by different ranks."""

    def reason_against_roles(self) -> str | None:
        """Why that cannot be; None if it can."""
        return (
            "what preconditions is found from more than running sums over examples, and could not be passed on from "
            "rank to rank. Use KFAC, or comm=MemOpt()"
        )

    # ------------------------------------------------------------------ what travels
    def parameters_now(self) -> list[Tensor]:
        """All parameters, in order."""
        return [p.detach() for group in self.param_groups for p in group["params"]]

    def spoken_options(self) -> dict[str, Any]:
        """Options of the groups that a refresh depends on."""
        return {name: [float(g[name]) for g in self.param_groups] for name in _SPOKEN if name in self.defaults}

    def heed_options(self, spoken: dict[str, Any]) -> None:
        """Take them over."""
        for name, values in spoken.items():
            for group, value in zip(self.param_groups, values, strict=True):
                group[name] = value

    def live_parcel(self, index: int, place: str) -> Parcel:
        """The tensors of the estimate of a block, or of the curvature that is found from it, as they are kept.

        Args:
            index: The block.
            place: ``"estimate"`` or ``"curvature"``; where the estimate preconditions, it is in both.

        Returns:
            The parcel, in the same order on every rank.
        """
        block = self._blocks[index]
        also = place == "curvature" and self._needs_estimate_everywhere(block, block.group)
        return self._parcel_of(block, Place(place), *([Place.ESTIMATE] if also else []))

    def updates_of(self, index: int) -> int:
        """How often something was folded into the estimate of a block."""
        return int(self._state_of(index)["factor_updates"])

    def has_curvature(self, index: int) -> bool:
        """Whether a block preconditions."""
        return bool(self._state_of(index)["refreshes"] > 0)

    def _state_of(self, index: int) -> dict[str, Any]:
        state: dict[str, Any] = self.state[self._blocks[index].owner]
        return state

    # ------------------------------------------------------------------ what arrives
    def heed_estimate(self, index: int, updates: int) -> None:
        """The estimate of a block was overwritten by one that was updated so often."""
        self._state_of(index)["factor_updates"] = updates

    def adopt_curvature(self, index: int, tensors: Sequence[Tensor]) -> None:
        """Precondition a block with these from now on."""
        for kept, new in zip(self.live_parcel(index, "curvature").tensors, tensors, strict=True):
            kept.copy_(new)
        self._state_of(index)["refreshes"] += 1
        self._refreshed_at[self._blocks[index].name] = self._t - 1  # between the last step and the coming one

    def forget_curvature(self, index: int) -> None:
        """Begin anew with a block, as if nothing had ever been known of it."""
        block, state = self._blocks[index], self._state_of(index)
        for key in keys(self.live_schema(block), Place.ESTIMATE):
            if key in state:
                state[key].zero_()
        state["factor_updates"] = state["refreshes"] = 0
        self._failed_at.pop(block.name, None)

    # ------------------------------------------------------------------ work
    @torch.no_grad()
    def invert(self, indices: Sequence[int]) -> list[bool]:
        """Refresh blocks from their estimates.

        Args:
            indices: The blocks.

        Returns:
            Whether each has something new; not where its estimate is empty or could not be factorised.

        Raises:
            RuntimeError: If a block failed ``max_failures`` times in a row.
        """
        todo = [b for b in (self._blocks[i] for i in indices) if self._can_refresh(b)]
        if not todo:
            return [False] * len(indices)
        with full_precision(todo[0].owner.device):
            ok = self.refresh(todo, True).cpu()
        self._judge(todo, ok)
        good = dict(zip((b.index for b in todo), ok.tolist(), strict=True))
        for index, fine in good.items():
            self._state_of(index)["refreshes"] += fine
        return [bool(good.get(index, False)) for index in indices]

    def _can_refresh(self, block: Block) -> bool:
        return self.updates_of(block.index) > 0 and not self._is_empty(block)

    @torch.no_grad()
    def idle(self) -> None:
        """Take a step without data, so that ranks that have some do not wait for this one."""
        self.learn(self._reduce(Captured({}, {})), {}, None)
        self._advance()

    if TYPE_CHECKING:

        def _advance(self) -> None:
            """Count the step: of the optimizer, which comes after this class."""
