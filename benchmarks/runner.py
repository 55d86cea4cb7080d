"""Training runs: one model, one optimizer, one stream of batches, and a record of every step.

The measured time covers ``zero_grad``, forward, backward and ``step``, with or without a closure. Drawing the batch,
reading the loss and evaluating are not included.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from inspect import signature
from itertools import accumulate, islice
from statistics import fmean
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from benchmarks.peers import evaluating
from benchmarks.precision import Amp, Precision, answering_cpu, moved
from benchmarks.ranks import Ranks
from benchmarks.recipes.types import Method, Settings
from benchmarks.workloads import Batch, Workload
from secondorder import SecondOrderOptimizer

WINDOW = 10  # number of steps that a reported loss averages over, because the losses of single batches are noisy
FAILURES = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError,
    ValueError,
)  # fmt: skip
"""Errors of optimizers from a dozen projects, which are recorded as a failure of the run, as a divergence is. Torch's
own errors, such as those of linear algebra and out-of-memory errors, are subclasses of ``RuntimeError``."""

_RISEN = 2.0  # a run has diverged if its mean loss exceeds the first loss by this factor

MakeOptimizer = Callable[[nn.Module], Optimizer]
MakeScheduler = Callable[[Optimizer], LRScheduler]
Evaluation = tuple[Tensor, Tensor, Tensor]  # loss, outputs and targets of one batch


@dataclass
class History:
    """The record of a run, with one entry per step."""

    label: str
    losses: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    processor_seconds: list[float] = field(default_factory=list)
    """Processor time of all threads, which excludes the time in which the process did not run."""
    evaluations: list[tuple[int, float]] = field(default_factory=list)  # steps of evaluations, with the held-out metric

    @property
    def diverged(self) -> bool:
        """Whether the last loss was not finite."""
        return bool(self.losses) and not math.isfinite(self.losses[-1])

    @property
    def risen(self) -> bool:
        """Whether the mean of the last :data:`WINDOW` losses is above twice the first loss."""
        taken = len(self.losses)
        return taken >= WINDOW and self.loss_at(taken) > _RISEN * abs(self.losses[0])

    @property
    def seconds(self) -> list[float]:
        return list(accumulate(self.step_seconds))

    @property
    def smoothed(self) -> list[float]:
        """For each step, the mean loss of the last :data:`WINDOW` steps."""
        return [self.loss_at(step) for step in range(1, len(self.losses) + 1)]

    def loss_at(self, step: int, window: int = WINDOW) -> float:
        """Return the mean loss of the ``window`` steps that end with ``step``, or NaN if there is no such step."""
        if not 1 <= step <= len(self.losses):
            return math.nan
        tail = self.losses[max(0, step - window) : step]
        return sum(tail) / len(tail)

    def steps_to(self, target: float) -> int | None:
        """Return the first step at which the smoothed loss of a full window is at most ``target``."""
        return next((s for s in range(WINDOW, len(self.losses) + 1) if self.loss_at(s) <= target), None)


def mean_history(label: str, histories: Sequence[History]) -> History:
    losses = [fmean(column) for column in zip(*(h.losses for h in histories if h.losses), strict=True)]
    return History(label, losses, list(histories[0].step_seconds), list(histories[0].processor_seconds))


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
        ranks: Ranks = Ranks(),  # noqa: B008 - it is immutable
        device: str | torch.device = "cpu",
        amp: Amp | None = None,
    ) -> None:
        self.workload = workload
        self.precision = Precision(device, amp)
        self.model = workload.build_model(seed).to(self.precision.device)
        self.optimizer = make_optimizer(self.model)
        self.history = History(label)
        self._closure = closure
        self.precision.prepare(self.optimizer, closure)
        self._scheduler = make_scheduler(self.optimizer) if make_scheduler else None
        self._ranks = ranks
        self._network = ranks.wrap(self.model, self.optimizer)
        self._seed, self._drawn = seed, 0
        self._stream = self._batches()

    @property
    def diverged(self) -> bool:
        """Whether the last loss was not finite. With several ranks, this is False: all of them train to the end."""
        return self._ranks.size == 1 and self.history.diverged

    def step(self) -> float:
        batch = next(self._stream)
        self._drawn += 1
        start, worked = self.precision.now()
        loss = self._train_on(batch)
        end, done = self.precision.now()
        self.history.losses.append(float(loss.detach()))
        self.history.step_seconds.append(end - start)
        self.history.processor_seconds.append(done - worked)
        return end - start

    def evaluate(self, everything: bool = False, quality: bool = False) -> dict[str, float]:
        """Measure the model on held-out data, without an effect on the training that follows."""
        workload, device = self.workload, self.precision.device
        states = self.precision.random_state()
        with answering_cpu(self.model, device), evaluating(self.optimizer, self.model, workload):
            found = {workload.metric: workload.evaluate(self.model, everything)}
            further: Callable[[nn.Module], dict[str, float]] | None = getattr(workload, "quality", None)
            found |= further(self.model) if quality and further else {}
        self.precision.restore_random_state(states)
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a run. All ranks have to call this method, and rank 0 gets the complete state."""
        optimizer: Any = self.optimizer
        if self._ranks.size > 1 and isinstance(optimizer, SecondOrderOptimizer):
            optimizer.consolidate_state_dict(to=0)
        scaler, scheduler = self.precision.scaler, self._scheduler
        mine = {"history": asdict(self.history), "random": self.precision.random_state()}
        return {
            "model": self.model.state_dict(),
            "optimizer": optimizer.state_dict() if self._ranks.first else {},
            "scheduler": None if scheduler is None else scheduler.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "drawn": self._drawn,
            "ranks": self._ranks.collect(mine),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue another run.

        If the number of ranks differs, each rank continues with the mean of the losses and its own random numbers.
        """
        for name, own in (("scheduler", self._scheduler), ("scaler", self.precision.scaler)):
            if (own is None) != (state[name] is None):
                raise ValueError(f"the checkpoint has {'no' if state[name] is None else 'a'} {name}, unlike this run")
            if own is not None:
                own.load_state_dict(state[name])
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._set_rates()
        self._drawn, self._stream = state["drawn"], self._batches(state["drawn"])
        label, saved = self.history.label, state["ranks"]
        if len(saved) == self._ranks.size:
            mine = saved[self._ranks.rank]
            self.history = History(**{**mine["history"], "label": label})
            self.precision.restore_random_state(mine["random"])
        else:
            self.history = mean_history(label, [History(**entry["history"]) for entry in saved])

    def _set_rates(self) -> None:
        """Set rates by the schedule of this run, which may be longer than the saved one."""
        scheduler = self._scheduler
        if isinstance(scheduler, LambdaLR):
            courses = zip(self.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
            for group, rate, course in courses:
                group["lr"] = rate * course(scheduler.last_epoch)

    def _batches(self, skip: int = 0) -> Iterator[Batch]:
        draw: Callable[..., Iterator[Batch]] = self.workload.batches
        if "skip" in signature(draw).parameters:  # this workload decodes only the batches that it needs
            rank, ranks = self._ranks.readers(self.optimizer)
            own = draw(self._seed, skip=skip, rank=rank, ranks=ranks)
        else:
            whole = islice(draw(self._seed), skip, None)
            own = (self._ranks.share(batch, self.optimizer) for batch in whole)
        for batch in own:
            yield cast("Batch", moved(batch, self.precision.device))

    def _train_on(self, batch: Batch) -> Tensor:
        if self._closure:
            # Torch annotates closures as returning a float, but its optimizers return any result of a closure.
            closure = cast("Callable[[], float]", partial(self._evaluate, batch))
            loss = cast("Evaluation", self.optimizer.step(closure))[0]
        else:
            loss = self._evaluate(batch)[0]
            self.precision.step(self.optimizer)
        if self._scheduler is not None:
            self._scheduler.step()
        return loss

    def _evaluate(self, batch: Batch) -> Evaluation:
        workload = self.workload
        self.optimizer.zero_grad()
        with self.precision.autocast():
            outputs, targets = workload.outputs(self._network, batch), workload.targets(batch)
            loss = workload.criterion(outputs, targets)
        if isinstance(self.optimizer, SecondOrderOptimizer):
            self.optimizer.observe(outputs, workload.likelihood, targets)  # does nothing for the empirical Fisher
        self.precision.backward(loss)
        return loss, outputs, targets


def trainer_of(
    method: Method, workload: Workload, settings: Settings, seed: int = 0, label: str | None = None, **options: Any
) -> Trainer:
    """Return a run of an optimizer. The options are those of :class:`Trainer`."""
    make, closure = partial(method.construct, **settings), method.needs_closure(None, settings)
    return Trainer(label or method.label, workload, make, seed, closure=closure, **options)


def race(trainers: Sequence[Trainer], steps: int, on_step: Callable[[Trainer], None] = lambda _: None) -> None:
    """Train all runs in turns of one step, so that other load on the machine affects all of them equally.

    A run takes no further steps when its loss is no longer finite.
    """
    for _ in range(steps):
        for trainer in trainers:
            if not trainer.diverged:
                trainer.step()
            on_step(trainer)


def memory_usage(optimizer: Optimizer) -> dict[str, int]:
    """Return the bytes that an optimizer stores in addition to parameters and gradients, by kind.

    Args:
        optimizer: Any optimizer. Its ``memory_usage()`` is called if it exists, for buffers that are not in ``state``.

    Returns:
        Bytes, with ``"total"``, which is the only entry for the optimizers of torch.
    """
    report = getattr(optimizer, "memory_usage", None)
    if report is not None:
        return dict(report())
    values = (value for state in optimizer.state.values() for value in state.values())
    storages = {value.untyped_storage() for value in values if isinstance(value, Tensor)}
    return {"total": sum(storage.nbytes() for storage in storages)}


def optimizer_bytes(optimizer: Optimizer) -> int:
    return memory_usage(optimizer)["total"]
