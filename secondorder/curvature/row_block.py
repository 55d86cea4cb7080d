"""Blocks with rows of examples, or with K-FAC's factors where those are cheaper.

A layer with d_i inputs and d_o outputs keeps R rows of S positions each if ``R S (d_i + d_o) < d_i² + d_o²`` and
``R³ < d_i³ + d_o³``. Otherwise, it gets factors that are computed from the same rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from secondorder.capture.sites import Statistic
from secondorder.capture.statistics import averages
from secondorder.capture.statistics.examples import ExampleRows
from secondorder.capture.statistics.measurement import Measured
from secondorder.curvature.block import ESTIMATE_ALONE, Block, Due
from secondorder.curvature.example_rows import Fresh, Kept, Raw, all_finite
from secondorder.curvature.extremes import Extremes
from secondorder.curvature.factorization import Task
from secondorder.curvature.row_forms import FactorForm, RowForm, factors_are_cheaper
from secondorder.curvature.schema import Schema
from secondorder.linalg.kernel import scaled


class RowBlock(Block):
    """Rows of examples and their kernel, or the factors that replace them.

    Attributes:
        fresh: The rows of this step, until its end; None if nothing was captured.
        union: The rows that all ranks have chosen in this step, until its end; None if they are not gathered.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.with_rows, self.with_factors = RowForm(self.layer), FactorForm(self.layer)
        self.fresh: Fresh | None = None
        self.union: Kept | None = None

    @property
    def is_factored(self) -> bool:
        """Whether the block has factors instead of rows."""
        return "rows_instead" in self.state

    @property
    def form(self) -> RowForm | FactorForm:
        """The form of the curvature in the state."""
        return self.with_factors if self.is_factored else self.with_rows

    @property
    def captured(self) -> Fresh:
        """The rows of this step if they exist."""
        assert self.fresh is not None
        return self.fresh

    # ------------------------------------------------------------------ what the state holds
    def schema(
        self, group: Mapping[str, Any], state: Mapping[str, Any], planned: int = 0, known: bool = False
    ) -> Schema:
        """Return entries for rows and their kernel, or for factors, depending on the content of a state.

        Args:
            group: The options.
            state: The state, which may be a loaded one.
            planned: Number of rows if it is known before the first batch, else 0.
            known: Whether every rank that stores the rows has combined them itself.
        """
        found = self.factor_schema(group, state, planned)
        return found or self.with_rows.schema(self.with_rows.sizes_in(state, group, planned), known=known)

    def factor_schema(self, group: Mapping[str, Any], state: Mapping[str, Any], planned: int) -> Schema | None:
        """The entries for a block with factors; None if it has rows."""
        if not state.keys().isdisjoint(("factor_a", "factor_g", "rows_instead")):
            sizes = (state.get(key) for key in ("rows_instead", "positions_instead"))
            return self.with_factors.schema(*(n if isinstance(n, int) else 0 for n in sizes))
        undecided = planned and group["approx"] == "reduce" and "refreshes" not in state
        if undecided and factors_are_cheaper(self.adapter, group, planned, 1):
            return self.with_factors.schema(planned, 1)
        return None

    @property
    def is_undecided(self) -> bool:
        """Whether the next refresh may give the block factors instead of rows."""
        return self.group["kfac_when_cheaper"] and self.state["refreshes"] == 0 and not self.is_factored

    @property
    def is_empty(self) -> bool:
        """Whether the block has no estimate. It always has one, since factors are made in the refresh itself."""
        return False

    @property
    def has_estimate(self) -> bool:
        """Whether rows or factors exist."""
        return bool(self.state["refreshes"] > 0)

    def is_finite(self, measured: Measured) -> Tensor:
        """Whether the rows are finite, if ranks agree on them."""
        return torch.tensor(True) if measured.rest is None else measured.rest.finite

    # ------------------------------------------------------------------ statistics
    def statistic(self, due: Due = ESTIMATE_ALONE) -> ExampleRows:
        """An empty statistic, which collects pairs of rows if factors may be computed from them."""
        group = self.group
        found = ExampleRows(self.adapter, group["approx"], self.layer.precision, conv_scale=group["conv_scale"])
        found.as_pairs = self.is_undecided or self.is_factored
        return found

    def sums(self, due: Due = ESTIMATE_ALONE) -> Schema:
        """No entries, since rows are not summed."""
        return {}

    def measure(self, statistic: Statistic, examples: int) -> Measured:
        """The captured rows of this rank's batch."""
        pending = cast(ExampleRows, statistic)
        return Measured({}, examples, Raw(pending.finish(), pending.real) if pending.nbytes else None)

    def fold(self, measured: Measured, gate: Tensor | None) -> Tensor:
        """Scale rows per datum, keep them for the refresh of this step, and return whether they were finite."""
        if measured.rest is None:
            return torch.ones((), dtype=torch.bool, device=self.owner.device)
        raw, examples = cast(Raw, measured.rest), measured.examples
        rows = scaled(raw.rows, self.gradient_scale(examples) ** 0.5)
        finite = all_finite(rows)
        if finite.device.type != "cpu" or finite.numpy():
            self.fresh = Fresh(rows, examples, raw.real, finite if gate is None else finite & gate)
        return finite

    # ------------------------------------------------------------------ refresh
    def damping_of(self, trace: Tensor, rows: int) -> Tensor:
        """λ ``[(Γ)]``, float64, from the trace of the kernel over so many rows."""
        mean = self.adapter.damping_reference(trace.double() / max(rows, 1), self.group["approx"])
        return averages.effective_damping(self.group["damping"], self.group["damping_mode"], mean)

    def damping(self, trace: Tensor) -> Tensor:
        """λ of the rows of this step from the trace of their kernel, unless other ranks have rows too."""
        fresh = self.captured
        return self.damping_of(trace, fresh.examples) if fresh.damping is None else fresh.damping

    def tasks(self, begun: bool = False) -> dict[str, Task]:
        """The factors to decompose, by side."""
        return self.with_factors.tasks(self.state)

    def adopt(self, found: Mapping[str, Sequence[Tensor]], good: Tensor) -> None:
        """Store the eigenvalues and bases from a refresh of the factors if they are good."""
        self.with_factors.eigen.adopt(self.state, found, good)

    # ------------------------------------------------------------------ use
    def precondition(self, gradient: Tensor) -> Tensor:
        """``(F̂ + λI)⁻¹ vec(∇)``."""
        return self.form.precondition(self.state, self.group, gradient, self.runtime.workspace)

    def product(self, matrix: Tensor) -> Tensor:
        """Apply the undamped curvature to a matrix ``[(Γ,) n_g, n_a]``."""
        return self.form.product(self.state, matrix)

    def dense(self) -> Tensor:
        """The undamped curvature as a dense matrix; block-diagonal over groups."""
        return self.form.dense(self.state)

    def extremes(self) -> Extremes | None:
        """λ and the extreme eigenvalues of the damped curvature; None if it is on other ranks."""
        return self.form.extremes(self.state)

    def bounds(self) -> Extremes | None:
        """λ, and upper bounds of the largest eigenvalues; never waits for the device."""
        return self.form.bounds(self.state)

    def described(self) -> tuple[str, str]:
        """The text that ``describe()`` adds to the treatment of the layer, and the sizes of its curvature."""
        return self.form.described(self.state)
