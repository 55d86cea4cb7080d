"""Reports of windows: coverage, the dense matrix, and metrics of the last directions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from secondorder.curvature.damping_watch import Damped
from secondorder.curvature.window.unit import WindowUnit, real
from secondorder.linalg import gram
from secondorder.preconditioners.base import CurvatureReport

if TYPE_CHECKING:
    from secondorder.preconditioners.window_plan import WindowPlan

#: Number of steps after which the damping is compared with the curvature.
_STEPS_BEFORE_WATCH = 20


class WindowReport(CurvatureReport):
    """Reports on windows without changing them."""

    sizes_are = "rows × entries"

    def __init__(self, plan: WindowPlan) -> None:
        self._plan = plan

    def summary(self) -> str:
        """Return the number of windows as text."""
        return f"{len(self._plan.units)} window{'s' if len(self._plan.units) != 1 else ''}"

    @property
    def pending_bytes(self) -> int:
        """0, since gradients enter the windows in the step itself."""
        return 0

    def coverage(self, p: nn.Parameter) -> tuple[str, str, str]:
        """Return what covers a parameter, its size, and its owner; all are empty strings if nothing covers it."""
        unit = self._plan.unit_of.get(p)
        if unit is None:
            return "", "", ""
        form = unit.window.form.describe(self._plan.options.working(p))
        part = unit.part
        owner = (
            f"rank {self._plan.comm.owner(self._plan.units.index(unit))}" if part is None else f"in {part.size} parts"
        )
        return f"window '{unit.name}' ({form})", f"{unit.window.m} × {real(p).numel()}", owner

    def dense(self, name: str) -> Tensor:
        """Return the undamped curvature of a layer or a parameter ``[n, n]``, float64; see ``dense_curvature``."""
        chosen = self._named(name)
        unit = self._plan.unit_of[chosen[0]]
        if unit.part is not None or not unit.is_local:
            raise RuntimeError(
                f"the rows of '{name}' are not all on rank {self._plan.comm.rank}: use comm=CommOpt(), or load the "
                "state that consolidate_state_dict() has gathered into an optimizer of one process"
            )
        if not unit.window.filled:
            raise RuntimeError(f"the window of '{name}' is empty: take a step first")
        places = [next(i for i, p in enumerate(unit.params) if p is q) for q in chosen]
        rows = []
        for slot in range(unit.window.filled):
            out = [torch.zeros(p.shape, dtype=p.working, device=p.device) for p in unit.window.places]
            unit.window.add_row(out, torch.tensor([slot], device=unit.window.device), torch.ones(()))
            parts = [out[i].double() for i in places]
            if len(parts) > 1:  # [W | b]
                parts = [torch.cat([part.flatten(1) if part.dim() > 1 else part[:, None] for part in parts], 1)]
            rows.append(parts[0].flatten())
        return self._plan.solver.curvature_of_rows(unit, torch.stack(rows))

    def _named(self, name: str) -> list[nn.Parameter]:
        """The covered parameters of one window that a module or parameter name refers to."""
        by_name = {self._plan.table.names[p]: p for p in self._plan.unit_of}
        while True:
            wanted = [name] if name in by_name else [f"{name}.{own}" if name else own for own in ("weight", "bias")]
            found = [by_name[own] for own in wanted if own in by_name]
            if found:
                return [p for p in found if self._plan.unit_of[p] is self._plan.unit_of[found[0]]]
            if not name.startswith("module."):
                raise ValueError(
                    f"no parameter in a window is named '{name}'; there are: {', '.join(by_name) or 'none'}"
                )
            name = name.removeprefix("module.")

    def damped(self, step: int) -> list[Damped] | None:
        """Return the damping of all windows on this rank, in the one step that compares it."""
        if step + 1 != _STEPS_BEFORE_WATCH:
            return None
        local = (unit for unit in self._plan.units if unit.is_local and unit.part is None and unit.a is not None)
        return [found for unit in local if (found := self._plan.solver.bounds(unit)) is not None]

    def diagnostics(self) -> dict[str, Any]:
        """Return counters as plain numbers and, for each window, the relation of its last direction to the gradient.

        Everything is computed from the Gram matrix, with one eigendecomposition ``[m, m]`` per window and no pass over
        the parameters. It waits for the device, but never for another rank. Windows that are only on other ranks, and
        values of divided windows that ranks do not exchange, are left out.

        Returns:
            ``skipped_steps``, ``damping``, ``solve_failures``, and ``units``, which has a dict for each window by name
            with ``rows``, ``count`` (rows ever stored) and, after a step, ``damping``, ``condition_number``, the
            entries of :func:`secondorder.linalg.gram.metrics` (cosine, angle in degrees, norm ratio, amplification,
            effective rank, ...) and, for compressed rows, ``sent_energy``, ``residual_norm`` and ``residual_ratio`` (to
            the norm of the gradient).
        """
        local = [unit for unit in self._plan.units if unit.is_local]
        # These are counted in the state, so that copies and checkpoints keep them.
        skipped = {"skipped_steps": max(int(unit.window.counters["skipped"]) for unit in local)} if local else {}
        return {
            **skipped,
            "solve_failures": sum(int(unit.window.counters["solve_failures"]) for unit in local),
            "damping": [g.get("damping", g.get("eps")) for g in self._plan.table.groups],
            "units": {unit.name: dict(self.metrics(unit)) for unit in local},
        }

    def metrics(self, unit: WindowUnit) -> Iterator[tuple[str, float | int]]:
        """Metrics of the last direction of a window, by name."""
        window = unit.window
        yield "rows", window.filled
        yield "count", int(window.counters["count"])
        if unit.a is None:
            return
        if (known := self._plan.solver.extremes(unit)) is not None:
            damping, largest = map(float, known)
            yield "damping", damping
            yield "condition_number", (largest + damping) / damping
        numbers = gram.metrics(window.lower(), unit.a, window.newest)
        square = window.residual_square() if unit.part is None else None
        if square is not None:
            sent = numbers["gradient_norm"] ** 2
            numbers["sent_energy"] = sent / (sent + square).clamp(min=torch.finfo(torch.float64).tiny)
            numbers["residual_norm"] = square.sqrt()
            numbers["residual_ratio"] = square.sqrt() / unit.norm
        yield from ((key, float(value)) for key, value in numbers.items())
