"""Methods with factors whose refreshes may run in the background; see :mod:`secondorder.curvature.refresh`."""

# bridge: blocks with factors
# mypy: disable-error-code="override"

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, cast

from torch import Tensor, nn

from secondorder.capture.fisher.fisher import Observing
from secondorder.curvature import factors
from secondorder.curvature.block import Block
from secondorder.curvature.factorization import Found
from secondorder.curvature.factors import FACTORS
from secondorder.curvature.kronecker import FactoredBlock
from secondorder.curvature.schema import Schema
from secondorder.preconditioners.base import Group

_Key = tuple[FactoredBlock, str]


class OverlappingRefreshes(Observing):
    """Methods that factorize factors, at once or in the background."""

    catalog: ClassVar[Schema] = FACTORS
    _blocks: list[FactoredBlock]  # type: ignore[assignment]
    _block_of: dict[nn.Parameter, FactoredBlock]  # type: ignore[assignment]

    def refresh_due(self) -> list[int]:
        """As in the base class; with ``overlap`` it adopts what was begun and begins what is due."""
        if not self._layer_options.overlap:
            return super().refresh_due()
        with self.refresher.adopting(self._blocks) as adopted:
            refreshed = set(super().refresh_due())
        count, renews = len(self._blocks), self.comm.renews
        at_once = {b for b in self._blocks if b.index in refreshed and b not in adopted}
        self.refresher.forget(at_once)
        begun = [b for b in self._blocks if renews(b.index) and self.refresher.begins(b, count) and b not in at_once]
        self.refresher.begin(begun, self._factorizes, self.comm.combines)
        return sorted(refreshed)

    def _factorizes(self, block: Block) -> bool:
        return not self.comm.combines or self.comm.refreshes(block.index)

    def renew(self, blocks: list[FactoredBlock]) -> Tensor:
        """Refresh and share some blocks outside of their schedule."""
        ok = super().renew(list(blocks))
        self.refresher.forget(blocks)  # what was begun is older
        return ok

    def _renew_loaded(self, blocks: list[FactoredBlock]) -> Tensor:
        return super().renew(list(blocks))  # what was begun is newer

    def factorised(self, blocks: Sequence[FactoredBlock], host_checks: bool) -> dict[_Key, Found]:
        """What a refresh of some blocks finds: of the matrices that it was begun with, else of those of now."""
        return cast("dict[_Key, Found]", self.refresher.find(blocks, host_checks, self.comm.combines))

    # ------------------------------------------------------------------ checkpoints and ends
    def translated(self, p: Any, group: Group, theirs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the state of a parameter in a checkpoint in the form in which this optimizer keeps it."""
        block = self._block_of.get(p)
        if block is not None and block.owner is p:
            return block.factors.in_own_form(theirs, group)
        return factors.without_block(theirs, self._layer_options, self.entries if block is None else ())

    def rebuilt(self) -> None:
        """Act on a new plan, whose state has been allocated."""
        self.refresher.forget_jobs()  # parameters may have moved, or be of another dtype

    def loaded(self, rebuild: Callable[[], bool]) -> None:
        """Complete what a checkpoint may leave out; see the base class."""
        self.refresher.forget_jobs()
        super().loaded(rebuild)

    def detach(self) -> None:
        """See the base class."""
        try:
            super().detach()
        finally:
            self.refresher.close()

    def pending_bytes(self) -> int:
        """Return the bytes of statistics, and of refreshes in progress, that wait for a coming step."""
        return super().pending_bytes() + self.refresher.nbytes
