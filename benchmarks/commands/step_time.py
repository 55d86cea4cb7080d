"""``step-time``: what a step costs beside SGD's, class by class, against the floor that its FLOPs set.

All optimizers take turns in one process, each on a model of its own, and after every third step stands one of SGD with
momentum, the reference. Ratios are taken between medians, and between minima as a second reading that other load on
the machine hardly touches.
"""

import gc
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks import flops, report
from benchmarks.commands.options import Common
from benchmarks.flops import InverseMethod, LayerShape
from benchmarks.machine import Rate, copy_gbytes, gemm_gflops, peak_bytes
from benchmarks.recipes import METHODS, MethodName, Settings
from benchmarks.runner import Trainer, optimizer_bytes
from benchmarks.timing import MEASURED, REPORTED, Row, StepClass, Work
from benchmarks.workloads import Workload, WorkloadName, make_workload

REFERENCE_EVERY = 3


@dataclass
class Contender:
    """One optimizer under the clock."""

    trainer: Trainer
    inverse: InverseMethod | None = None
    """How it inverts; None for a first-order method."""
    row: Row = field(init=False)
    taken: int = 0

    def __post_init__(self) -> None:
        self.row = Row(self.trainer.history.label)

    @property
    def next_class(self) -> StepClass:
        """Class of the next step."""
        return MEASURED.step_class(self.taken) if self.inverse else "plain"

    def step(self, record: bool = True) -> None:
        """Take one step.

        Args:
            record: Keep its time.
        """
        kind, seconds = self.next_class, self.trainer.step()
        self.taken += 1
        if record:
            self.row.times.setdefault(kind, []).append(seconds)

    def peaks(self) -> dict[StepClass, int]:
        """Take one refresh interval of further steps.

        Returns:
            Bytes above the level at rest, at the peak of a step of each class.
        """
        peaks: dict[StepClass, int] = {}
        for _ in range(MEASURED.refresh if self.inverse else 1):
            kind = self.next_class
            if kind in peaks:
                self.step(record=False)
            else:
                self.trainer.optimizer.zero_grad()  # gradients of the last step are part of no level at rest
                peaks[kind] = peak_bytes(lambda: self.step(record=False))
        return peaks


@dataclass
class StepTime(Common):
    """Time KFAC's steps against SGD's and AdamW's, and against the floor that their FLOPs set."""

    workload: WorkloadName = "autoencoder"
    """What to train."""
    inverse_method: Literal["both", "cholesky", "eigen"] = "both"
    """How KFAC inverts its factors."""
    steps: int = 40
    """Timed steps of each optimizer; 10 show every class of KFAC's steps."""
    batch_size: int | None = None
    """Examples per step; unset: the workload's own number."""
    memory: bool = True
    """Measure the peak memory of a step, too."""
    out_dir: Path = Path("bench-output")
    """Folder for the table and the results."""

    def run(self) -> int:
        """Run the command.

        Returns:
            0.

        Raises:
            ValueError: When the steps do not show every class.
        """
        if self.steps < MEASURED.refresh:
            raise ValueError(f"steps must be at least {MEASURED.refresh}, got {self.steps}")
        torch.set_num_threads(self.threads)
        workload = make_workload(self.workload, self.data_dir, batch_size=self.batch_size)
        reference, contenders = self._contenders(workload)
        rates = {"gemm_gflops": gemm_gflops(), "copy_gbytes": copy_gbytes()}
        with report.progress_bar() as progress:
            task = progress.add_task(f"{self.workload}, batch {workload.batch_size}", total=self.steps)
            measure(reference, contenders, self.steps, lambda: progress.advance(task))
        shapes, training = workload_flops(workload, self.seed)
        results = [figures(c, reference, shapes, training, rates["gemm_gflops"]) for c in (reference, *contenders)]
        if self.memory:
            for result, contender in zip(results, (reference, *contenders), strict=True):
                result["peak_bytes"] = contender.peaks()
        self._report(workload, results, rates, shapes, training)
        return 0

    def _contenders(self, workload: Workload) -> tuple[Contender, list[Contender]]:
        """Build the reference and the optimizers to time.

        Args:
            workload: What to train.

        Returns:
            The reference, and all others.
        """

        def contender(label: str, name: MethodName, inverse: InverseMethod | None, changes: Settings) -> Contender:
            make = lambda model: METHODS[name].build(model, self.workload, changes)  # noqa: E731 - binds what it needs
            return Contender(Trainer(label, workload, make, self.seed), inverse)

        intervals = {"factor_update_steps": MEASURED.factor, "inv_update_steps": MEASURED.refresh}
        both: tuple[InverseMethod, ...] = ("cholesky", "eigen")
        methods = both if self.inverse_method == "both" else (self.inverse_method,)
        kfacs = [contender(f"KFAC {m}", "kfac", m, {**intervals, "inverse_method": m}) for m in methods]
        return contender("SGD", "sgd", None, {}), [contender("AdamW", "adamw", None, {}), *kfacs]
