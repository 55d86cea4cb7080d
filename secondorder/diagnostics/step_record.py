"""Counts and records of the steps of an optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from secondorder.curvature.damping_watch import DampingWatch
from secondorder.frames import depth_of_caller
from secondorder.linalg.dense import all_true_on_cpu

if TYPE_CHECKING:
    from secondorder.preconditioners.base import CurvatureReport


class StepRecord:
    """Counts the batches that are left out, keeps directions for inspection, and checks the damping.

    Attributes:
        kept: The open dicts of directions, the innermost last.
    """

    def __init__(self) -> None:
        self._skipped = 0
        self._skipped_on_device: Tensor | int = 0
        self.kept: list[dict[str, Tensor]] = []
        self._watch = DampingWatch()

    @property
    def skipped(self) -> int:
        """Number of batches that were left out. Reading it may wait for the device."""
        return self._skipped + int(self._skipped_on_device)

    def gate(self, finite: Tensor) -> tuple[bool, Tensor | None]:
        """Decide whether a step is taken, on the CPU at once, and otherwise with a gate on the device.

        Args:
            finite: Whether the gradients can be used, as a 0-dim bool tensor.

        Returns:
            Whether to continue, and the gate, or None if there is none.
        """
        if finite.device.type == "cpu":
            good = all_true_on_cpu(finite)
            self._skipped += not good
            return good, None
        self._skipped_on_device = self._skipped_on_device + (~finite).to(torch.int64)
        return True, finite

    @contextmanager
    def directions(self) -> Iterator[dict[str, Tensor]]:
        """Yield a dict that each step inside the ``with`` block fills."""
        kept = dict[str, Tensor]()
        self.kept.append(kept)
        try:
            yield kept
        finally:
            self.kept = [other for other in self.kept if other is not kept]

    def keep(self, directions: Mapping[nn.Parameter, Tensor], names: Mapping[nn.Parameter, str]) -> None:
        """Fill the open dicts with copies of the directions of a step."""
        if self.kept:
            found = {names[p]: d.clone() for p, d in directions.items()}
            for kept in self.kept:
                kept.update(found)

    def watch_damping(self, report: CurvatureReport, method: str, step: int) -> None:
        """Warn once, early in training, if the damping dominates all curvature.

        Args:
            report: Report that provides the curvature to compare with.
            method: Name of the optimizer's class.
            step: Number of steps taken before this one.
        """
        if not self._watch.has_measured and (damped := report.damped(step)) is not None:
            self._watch.measure(damped)
        if (text := self._watch.verdict(method)) is not None:
            warnings.warn(text, stacklevel=depth_of_caller())
