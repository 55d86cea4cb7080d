"""Reports of blocks with rows of examples: modes, ranks, and the bytes of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from secondorder.preconditioners.layer_report import LayerReport

if TYPE_CHECKING:
    from secondorder.preconditioners.row_plan import RowPlan


class RowReport(LayerReport):
    """Reports on blocks with rows of examples without changing them."""

    sizes_are = "rows × (a + g)"
    _plan: RowPlan

    @property
    def nbytes(self) -> int:
        """Bytes of the switching policy."""
        return self._plan.modes.policy.nbytes

    @property
    def pending_bytes(self) -> int:
        """Bytes of statistics and of rows that wait for a later step."""
        rows = (found.rows for b in self._plan.blocks for found in (b.fresh, b.union) if found is not None)
        nbytes: int = sum(found.nbytes for found in rows)
        return super().pending_bytes + nbytes

    def diagnostics(self) -> dict[str, Any]:
        """Return counters, modes and ranks as plain numbers; reading them may wait for the device."""
        blocks, groups, modes = self._plan.blocks, self._plan.table.groups, self._plan.modes
        factored = bool(blocks) and all(b.is_factored for b in blocks)
        usual = ["kfac" if factored else modes.mode] * len(groups)
        chosen = [g["mode"] if g["mode"] != "auto" else mode for g, mode in zip(groups, usual, strict=True)]
        return super().diagnostics() | {
            "damping": [group["damping"] for group in groups],
            "mode": chosen[0],
            "modes": chosen,
            "mode_by_layer": {b.name: "kfac" if b.is_factored else modes.mode_in(b.group) for b in blocks},
            "switches": [list(switch) for switch in modes.history],
            "rank": {b.name: b.with_rows.rows_in(b.state).n for b in blocks if "rows_g" in b.state},
        }
