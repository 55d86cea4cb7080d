"""Training runs: one model, one optimizer, one stream of batches, and a record of every step.

The clock covers what a loop does per step: ``zero_grad``, forward, backward, ``step``, with a closure or without.
Drawing the batch, reading the loss and evaluating stand outside.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from benchmarks.ranks import Ranks
from benchmarks.workloads import Batch, Workload
from secondorder.factored import FactoredOptimizer

WINDOW = 10
"""Steps that a reported loss is the mean of: single batches are noisy."""

MakeOptimizer = Callable[[nn.Module], Optimizer]
MakeScheduler = Callable[[Optimizer], LRScheduler]
Evaluation = tuple[Tensor, Tensor, Tensor]
"""Loss, outputs and targets of one batch."""


@dataclass
class History:
    """What a run did, one entry per step."""

    label: str
    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    processor_seconds: list[float] = field(default_factory=list)
    """The same without the time in which the process did not run; of all its threads together."""

    @property
    def diverged(self) -> bool:
        """Whether the last loss was not finite."""
        return bool(self.losses) and not math.isfinite(self.losses[-1])

    @property
    def seconds(self) -> list[float]:
        """Training seconds up to and including each step."""
        total, sums = 0.0, []
        for value in self.step_seconds:
            total += value
            sums.append(total)
        return sums

    @property
    def smoothed(self) -> list[float]:
        """Mean loss of the last :data:`WINDOW` steps, at each step."""
        return [self.loss_at(step) for step in range(1, len(self.losses) + 1)]

    def loss_at(self, step: int, window: int = WINDOW) -> float:
        """Return the mean loss of the ``window`` steps that end with ``step``, NaN where the run did not get there.

        Args:
            step: Number of steps taken, from 1.
            window: Steps in the mean.

        Returns:
            The mean.
        """
        if not 1 <= step <= len(self.losses):
            return math.nan
        tail = self.losses[max(0, step - window) : step]
        return sum(tail) / len(tail)

    def steps_to(self, target: float) -> int | None:
        """Return the first step at which the smoothed loss of a full window is at most ``target``.

        Args:
            target: The loss to reach.

        Returns:
            Number of steps taken, or None when the run never got there.
        """
        return next((s for s in range(WINDOW, len(self.losses) + 1) if self.loss_at(s) <= target), None)


class Trainer:
    """Takes optimizer steps one at a time, so that several runs can take turns on one machine."""

    def __init__(
        self,
        label: str,
        workload: Workload,
        make_optimizer: MakeOptimizer,
        seed: int = 0,
        make_scheduler: MakeScheduler | None = None,
        closure: bool = False,
        ranks: Ranks = Ranks(),  # noqa: B008 - it cannot be changed
    ) -> None:
        """Build the model and its optimizer.

        Args:
            label: Name of the run.
            workload: What to train.
            make_optimizer: Returns the optimizer of a model.
            seed: Seed of the weights and of the batches.
            make_scheduler: Returns the learning-rate schedule, stepped once per step.
            closure: Give each step a closure, for options that evaluate the loss anew.
            ranks: The processes that train together; each trains on its share of every batch.
        """
        self.workload = workload
        self.model = workload.build_model(seed)
        self.optimizer = make_optimizer(self.model)
        self.history = History(label)
        self._closure = closure
        self._scheduler = make_scheduler(self.optimizer) if make_scheduler else None
        self._ranks = ranks
        self._network = ranks.wrap(self.model, self.optimizer)
        self._batches = (ranks.share(batch, self.optimizer) for batch in workload.batches(seed))

    @property
    def diverged(self) -> bool:
        """Whether the last loss was not finite. One rank of several goes on to the end: the others do, too."""
        return self._ranks.size == 1 and self.history.diverged

    def step(self) -> float:
        """Take one step on the next batch and record it.

        Returns:
            Seconds that the step took.
        """
        batch = next(self._batches)
        start, worked = time.perf_counter(), time.process_time()
        loss = self._train_on(batch)
        seconds, worked = time.perf_counter() - start, time.process_time() - worked
        self.history.losses.append(float(loss.detach()))
        self.history.step_seconds.append(seconds)
        self.history.processor_seconds.append(worked)
        return seconds

    def _train_on(self, batch: Batch) -> Tensor:
        if self._closure:
            # torch's annotation wants a float from a closure; its own optimizers, too, return what it returns.
            closure = cast("Callable[[], float]", partial(self._evaluate, batch))
            loss = cast("Evaluation", self.optimizer.step(closure))[0]
        else:
            loss = self._evaluate(batch)[0]
            self.optimizer.step()
        if self._scheduler is not None:
            self._scheduler.step()
        return loss

    def _evaluate(self, batch: Batch) -> Evaluation:
        """Compute the loss of a batch and its gradient.

        Args:
            batch: The batch.

        Returns:
            Loss, outputs and targets.
        """
        workload = self.workload
        self.optimizer.zero_grad()
        outputs, targets = workload.outputs(self._network, batch), workload.targets(batch)
        if isinstance(self.optimizer, FactoredOptimizer):
            self.optimizer.observe(outputs, workload.likelihood, targets)  # nothing, for the empirical Fisher
        loss = workload.criterion(outputs, targets)
        loss.backward()
        return loss, outputs, targets


def race(trainers: Sequence[Trainer], steps: int, on_step: Callable[[Trainer], None] = lambda _: None) -> None:
    """Train all runs in turns of one step, so that a busy moment of the machine hits all of them alike.

    A run whose loss is no longer finite stays out of the later turns.

    Args:
        trainers: The runs.
        steps: Steps for each.
        on_step: Called after every step.
    """
    for _ in range(steps):
        for trainer in trainers:
            if not trainer.diverged:
                trainer.step()
            on_step(trainer)


def memory_usage(optimizer: Optimizer) -> dict[str, int]:
    """Return the bytes that an optimizer holds beside parameters and gradients, by kind.

    Args:
        optimizer: Any optimizer; one that has ``memory_usage()`` is asked, for its buffers outside ``state``.

    Returns:
        Bytes, with ``"total"``, which is the only entry for an optimizer of torch.
    """
    report = getattr(optimizer, "memory_usage", None)
    if report is not None:
        return dict(report())
    values = (value for state in optimizer.state.values() for value in state.values())
    storages = {value.untyped_storage() for value in values if isinstance(value, Tensor)}
    return {"total": sum(storage.nbytes() for storage in storages)}


def optimizer_bytes(optimizer: Optimizer) -> int:
    """Return the bytes that an optimizer holds beside parameters and gradients.

    Args:
        optimizer: Any optimizer.

    Returns:
        Number of bytes.
    """
    return memory_usage(optimizer)["total"]
