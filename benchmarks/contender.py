"""Optimizers under the clock, taking turns."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.machine import peak_bytes
from benchmarks.runner import Trainer
from benchmarks.timing import MEASURED, REPORTED, Intervals, Row, StepClass

REFERENCE_EVERY = 3


@dataclass
class Contender:
    """One optimizer under the clock."""

    trainer: Trainer
    scheme: str | None = None
    """How it inverts curvature; None for a method whose steps are all alike."""
    measured: Intervals = MEASURED
    """Intervals of the timed run."""
    reported: tuple[Intervals, ...] = REPORTED
    """Intervals to amortise over."""
    row: Row = field(init=False)
    taken: int = 0

    def __post_init__(self) -> None:
        self.row = Row(self.trainer.history.label)

    @property
    def next_class(self) -> StepClass:
        return self.measured.step_class(self.taken) if self.scheme else "plain"

    def step(self, record: bool = True) -> None:
        kind, seconds = self.next_class, self.trainer.step()
        self.taken += 1
        if record:
            self.row.times.setdefault(kind, []).append(seconds)

    def peaks(self) -> dict[StepClass, int]:
        peaks: dict[StepClass, int] = {}
        for _ in range(self.measured.refresh if self.scheme else 1):
            kind = self.next_class
            if kind in peaks:
                self.step(record=False)
            else:
                self.trainer.optimizer.zero_grad()  # gradients of the last step are part of no level at rest
                peaks[kind] = peak_bytes(lambda: self.step(record=False), self.trainer.precision.device)
        return peaks


def measure(
    reference: Contender, contenders: Sequence[Contender], steps: int, on_round: Callable[[], None] = lambda: None
) -> None:
    """Let the contenders take steps in turn, and the reference after every third of them."""
    for contender in (reference, *contenders):
        contender.step(record=False)
    turns = 0
    gc.disable()  # a collection in the middle of a step would be charged to it
    try:
        for _ in range(steps):
            for contender in contenders:
                contender.step()
                turns += 1
                if turns % REFERENCE_EVERY == 0:
                    reference.step()
            on_round()
    finally:
        gc.enable()
