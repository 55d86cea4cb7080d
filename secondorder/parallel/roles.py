"""The interface through which ranks of other roles read and write the factors and inverses of a layer method."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from secondorder.capture.sites import Captured
from secondorder.comm.strategy import Parcel
from secondorder.curvature.block import Block
from secondorder.curvature.schema import Place, keys
from secondorder.linalg.dense import full_precision
from secondorder.parallel.exchange import parcel_of

if TYPE_CHECKING:
    from secondorder.preconditioners.layers import LayerPreconditioner

#: Options that a refresh reads, and that a schedule may change where a training loop runs.
_SENT_OPTIONS = ("damping", "weight_decay")


class RoleWorker:
    """Serves a strategy by which gradients, estimates and inverses are found on different ranks.

    Args:
        curvature: The blocks.
        advance: Ends a step of the optimizer. A plan has none.
    """

    def __init__(
        self, curvature: LayerPreconditioner[Any], advance: weakref.WeakMethod[Callable[[], None]] | None = None
    ) -> None:
        self._curvature, self._table, self._advance = curvature, curvature.table, advance

    # ------------------------------------------------------------------ what travels
    def parameters_now(self) -> list[Tensor]:
        """Return all parameters, in order."""
        return [p.detach() for group in self._table.groups for p in group["params"]]

    def sent_options(self) -> dict[str, Any]:
        """Return the options of the groups that a refresh depends on."""
        groups = self._table.groups
        return {name: [float(g[name]) for g in groups] for name in _SENT_OPTIONS if all(name in g for g in groups)}

    def adopt_options(self, sent: dict[str, Any]) -> None:
        """Use the options of another rank."""
        for name, values in sent.items():
            for group, value in zip(self._table.groups, values, strict=True):
                group[name] = value

    def live_parcel(self, index: int, place: str) -> Parcel:
        """Return the tensors of the estimate of a block, or of the curvature that is found from it, without copies.

        Their order is the same on every rank. Where the estimate preconditions, it is in both places.
        """
        block = self._block(index)
        also = place == "curvature" and block.uses_estimate
        return parcel_of(
            block, self._curvature.plan.live_schema(block), Place(place), *([Place.ESTIMATE] if also else [])
        )

    def updates_of(self, index: int) -> int:
        """Return how often something was folded into the estimate of a block."""
        return int(self._block(index).state["factor_updates"])

    def has_curvature(self, index: int) -> bool:
        """Whether a block preconditions."""
        return bool(self._block(index).state["refreshes"] > 0)

    def _block(self, index: int) -> Block:
        block: Block = self._curvature.plan.blocks[index]
        return block

    # ------------------------------------------------------------------ what arrives
    def note_estimate(self, index: int, updates: int) -> None:
        """Note that the estimate of a block was overwritten by one that was updated this many times."""
        self._block(index).state["factor_updates"] = updates

    def adopt_curvature(self, index: int, tensors: Sequence[Tensor]) -> None:
        """Precondition a block with some tensors from now on."""
        for kept, new in zip(self.live_parcel(index, "curvature").tensors, tensors, strict=True):
            kept.copy_(new)
        self._block(index).state["refreshes"] += 1
        # Between the last step and the coming one.
        self._curvature.refresher.refreshed_at[self._block(index).name] = self._block(index).runtime.step - 1

    def forget_curvature(self, index: int) -> None:
        """Reset the curvature of a block."""
        block, state = self._block(index), self._block(index).state
        for key in keys(self._curvature.plan.live_schema(block), Place.ESTIMATE):
            if key in state:
                state[key].zero_()
        state["factor_updates"] = state["refreshes"] = 0
        self._curvature.refresher.failed_at.pop(block.name, None)

    # ------------------------------------------------------------------ work
    @torch.no_grad()
    def invert(self, indices: Sequence[int]) -> list[bool]:
        """Return for each block whether its refresh succeeded, which it does not without an estimate or an inverse.

        Raises:
            RuntimeError: If a block failed ``max_failures`` times in a row.
        """
        todo = [b for b in map(self._block, indices) if self.updates_of(b.index) > 0 and not b.is_empty]
        if not todo:
            return [False] * len(indices)
        with full_precision(todo[0].owner.device):
            ok = self._curvature.refresh(todo, True).cpu()
        self._curvature.refresher.judge(todo, ok)
        good = dict(zip((b.index for b in todo), ok.tolist(), strict=True))
        for index, fine in good.items():
            self._block(index).state["refreshes"] += fine
        return [bool(good.get(index, False)) for index in indices]

    @torch.no_grad()
    def idle(self) -> None:
        """Take a step without data, so that ranks that have some do not wait for this one."""
        self._curvature.learn(self._curvature.reduce(Captured({}, {})), {}, None)
        if self._advance is not None and (advance := self._advance()) is not None:
            advance()
