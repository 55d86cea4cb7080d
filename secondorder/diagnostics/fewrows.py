"""Rank of the curvature and error of few rows, as events of the layers of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from secondorder.capture.statistics import averages
from secondorder.capture.statistics.examples import as_rows_matrix
from secondorder.curvature.block import Block
from secondorder.diagnostics import approximation
from secondorder.diagnostics.approximation import Kept, Sums, System
from secondorder.linalg import kernel, selection
from secondorder.linalg.kernel import Rows

Event = dict[str, Any]
#: The name of a tool, and one of its events.
Line = tuple[str, Event]

#: The values that are computed from the eigenvalues of a layer.
SPECTRUM = "rank90", "eff_rank", "sigma_max", "sigma_sum", "damping_over_sigma1"


class Look(NamedTuple):
    """A layer in a step.

    Attributes:
        block: The layer.
        rows: The captured rows of its examples.
        m: Number of examples of the step.
        gradients: Gradients of its parameters, as the optimizer gets them.
    """

    block: Block
    rows: Rows
    m: int
    gradients: Sequence[Tensor]


@dataclass(frozen=True)
class FewRows:
    """Measures rank and error of layers.

    Attributes:
        tools: ``"rank"``, ``"error"`` or both.
        rank_fraction: ρ.
        max_rank: Largest number of rows to keep.
        damping: λ, or None to use the options of each layer.
        damps_kernel: Whether a relative λ refers to the kernel, as in the optimizer.
        samplings: Ways to draw rows.
        seed: Seed of the draws.
    """

    tools: Sequence[str]
    rank_fraction: float
    max_rank: int
    damping: float | None
    damps_kernel: bool
    samplings: Sequence[str]
    seed: int

    def lines(self, looks: Iterable[Look], step: int) -> Iterator[Line]:
        """Yield the events of all layers of a step, followed by those of all layers together."""
        totals: dict[str, Sums] = {}
        ranks: set[int] = set()
        for look in looks:
            system = self._system(look)
            if "rank" in self.tools:
                yield "rank", _rank_event(look, system)
            if "error" in self.tools:
                yield from self._errors(look.block, system, step, totals)
                ranks.add(self._rank(look.rows.n))
        rank = next(iter(ranks)) if len(ranks) == 1 else None
        for mode, sums in totals.items():
            yield "error", _error_event("all", mode, rank, sums.measures())

    def _rank(self, n: int) -> int:
        return selection.planned_rank(n, self.rank_fraction, self.max_rank)

    def _system(self, look: Look) -> System | None:
        """Return the layer's system of equations, or None if a number in it is not finite."""
        group, adapter = look.block.group, look.block.adapter
        scale = averages.gradient_scale(look.m, group["loss_reduction"], group["loss_terms"])
        rows = kernel.scaled(approximation.in_float64(look.rows), scale**0.5)
        found = kernel.gram(rows)
        matrix = as_rows_matrix(rows, look.block.layer.matrix([g.double() for g in look.gradients]))
        mean = found.diagonal(dim1=-2, dim2=-1).mean(-1)
        if self.damping is None:
            if not self.damps_kernel:  # relative to the mean eigenvalue of F, not of the kernel
                mean = mean * (look.rows.n / (adapter.n_a * adapter.n_g))
            mean = adapter.damping_reference(mean, group["approx"])
            damping = averages.effective_damping(group["damping"], group["damping_mode"], mean)
        else:
            damping = torch.full_like(mean, self.damping)
        finite = torch.isfinite(found.sum() + matrix.sum())
        return System(rows, found, damping, matrix) if bool(finite) else None

    def _errors(self, block: Block, system: System | None, step: int, totals: dict[str, Sums]) -> Iterator[Line]:
        """Yield one event for each way to keep few rows, and add its sums to the totals of this way."""
        reference = None if system is None else approximation.exact(system)
        for mode, keep in self._ways(block.index, step):
            if system is None or reference is None:
                yield "error", _error_event(block.name, mode, None, {})
                continue
            rank = self._rank(system.rows.n)
            kept = keep(system, rank)
            sums = approximation.compare(kept.update, reference)
            totals[mode] = totals.get(mode, Sums()).plus(sums)
            yield "error", _error_event(block.name, mode, rank, sums.measures() | dict([kept.measure]))

    def _ways(self, layer: int, step: int) -> Iterator[tuple[str, Callable[[System, int], Kept]]]:
        """Yield ways to keep few rows by name. The draws of each step, layer and way are the same in every run."""
        yield "kid", approximation.interpolated
        for sampling in self.samplings:
            mode = "kis" if sampling == "systematic" else f"{sampling} KIS"
            seed = _mixed(self.seed, step, layer, selection.SAMPLINGS.index(sampling))
            generator = torch.Generator().manual_seed(seed)
            yield mode, partial(approximation.sampled, sampling=sampling, generator=generator)


def _rank_event(look: Look, system: System | None) -> Event:
    adapter, found = look.block.adapter, dict[str, Any]()
    if system is not None:
        with suppress(LinAlgError):  # if it does not converge, an observer must not end the training
            found = approximation.spectrum(system.kernel, system.damping)
    known = {"layer": look.block.name, "m": look.m, "d_i": adapter.n_a, "d_o": adapter.row_width}
    return known | dict.fromkeys(SPECTRUM) | found


def _error_event(layer: str, mode: str, r: int | None, found: Mapping[str, float]) -> Event:
    measures = dict.fromkeys(("rel_error", "cos", "kid_energy", "kis_ess"))
    return {"layer": layer, "mode": mode, "r": r, **measures, **found}


def _mixed(*numbers: int) -> int:
    """Combine several numbers into one seed."""
    mixed = 0
    for number in numbers:
        mixed = (mixed * 1_000_003 + number + 1) % (1 << 62)
    return mixed
