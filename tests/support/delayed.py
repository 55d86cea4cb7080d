"""One process that delays inverses by the schedule of dedicated workers, without any of their code.

Three optimizers without a process group play the three roles. With epochs of T steps:

* gradients: ``learner`` takes every step; it only estimates in its first step, and only if ``warmup`` is ``"sync"``;
* factors: ``estimator`` has the parameters that the learner had at the start of the epoch, and never moves;
* inverses: the factors of the estimator at the end of epoch k are inverted with the damping of the learner's last
  step in that epoch, and precondition the learner from step (k + 2) T on.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from secondorder.comm import Local

Batch = tuple[Tensor, Tensor]
NEVER = 6 * 10**8  # a multiple of every interval of the tests


class Alone(Local):
    """One process that uses the arithmetic of several: it adds sums and counts, and divides at the end."""

    @property
    def combines(self) -> bool:
        return True


class Delayed:
    """The delayed run of a method with these options, whose intervals are those of the factor ranks.

    ``build`` returns a new network, always with the same parameters. Batches are given by rank and step, where the
    factor ranks count their own steps. ``damping`` gives the damping by step, if it changes.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        method: type[Any],
        options: dict[str, Any],
        loss: Callable[[Tensor, Tensor], Tensor],
        gradient_batches: Callable[[int, int], Batch],
        factor_batches: Callable[[int, int], Batch],
        *,
        gradient_ranks: int,
        factor_ranks: int = 1,
        period: int,
        warmup: str = "sync",
        damping: Callable[[int], float] | None = None,
    ) -> None:
        self.loss, self.period, self.warmup, self.damping = loss, period, warmup, damping
        self.gradient_batches, self.factor_batches = gradient_batches, factor_batches
        self.gradient_ranks, self.factor_ranks = gradient_ranks, factor_ranks
        self.learner, self.estimator = build(), build()
        rare = {"factor_update_steps": NEVER, "inv_update_steps": NEVER}
        self.learning = method(self.learner, comm=Alone(), **{**options, **rare})
        self.estimating = method(self.estimator, comm=Alone(), **{**options, "lr": 0.0, "inv_update_steps": NEVER})
        self.inverting = method(build(), comm=Alone(), **{**options, **rare})
        self.versions: dict[int, list[dict[str, Tensor]]] = {}

    def run(self, steps: int) -> list[Tensor]:
        """All parameters after each step, flat."""
        return [self._step(t) for t in range(steps)]

    def _step(self, t: int) -> Tensor:
        epoch, first = divmod(t, self.period)
        self._set_damping(self.learning, t)
        if first == 0:
            self.estimator.load_state_dict(self.learner.state_dict())
            if epoch >= 1:
                self.versions[epoch - 1] = self._inverted(t)
            if epoch >= 2:
                self._activate(self.versions.pop(epoch - 2))
        self._estimate(t)
        self._learn(t)
        return torch.cat([p.detach().flatten() for p in self.learner.parameters()])

    def _set_damping(self, optimizer: Any, t: int) -> None:
        if self.damping is not None:
            for group in optimizer.param_groups:
                group["damping"] = self.damping(t)

    # ------------------------------------------------------------------ factors
    def _estimate(self, t: int) -> None:
        x, y = _joined([self.factor_batches(rank, t) for rank in range(self.factor_ranks)])
        self.estimating.zero_grad()
        self.loss(self.estimator(x), y).backward()
        self.estimating.step()

    # ------------------------------------------------------------------ inverses
    def _inverted(self, t: int) -> list[dict[str, Tensor]]:
        self._set_damping(self.inverting, t - 1)
        self.estimating.state_dict()  # folds in the statistics of the last step
        pairs = list(zip(self._states(self.estimating), self._states(self.inverting), strict=True))
        for source, target in pairs:
            for key, value in source.items():
                if key.startswith("factor"):
                    target[key] = value.clone() if isinstance(value, Tensor) else value
        with torch.no_grad():
            ok = self.inverting.preconditioner.refresh(list(self.inverting.blocks.values()), True)
        assert ok.all()
        return [{k: target[k].clone() for k in _preconditions(target)} for _, target in pairs]

    def _activate(self, version: list[dict[str, Tensor]]) -> None:
        for state, found in zip(self._states(self.learning), version, strict=True):
            state.update(found)
            state["refreshes"] = 1

    @staticmethod
    def _states(optimizer: Any) -> list[dict[str, Any]]:
        return [optimizer.state[block.owner] for block in optimizer.blocks.values()]

    # ------------------------------------------------------------------ gradients
    def _learn(self, t: int) -> None:
        batches = [self.gradient_batches(rank, t) for rank in range(self.gradient_ranks)]
        with self.learning.pause_capture():
            gradients = [self._gradients(*batch) for batch in batches]
        means = [torch.stack(list(parts)).sum(0) / self.gradient_ranks for parts in zip(*gradients, strict=True)]
        own = t == 0 and self.warmup == "sync"
        with nullcontext() if own else self.learning.pause_capture():
            self._gradients(*_joined(batches))
            for p, mean in zip(self.learner.parameters(), means, strict=True):
                p.grad = mean
            self.learning.step()

    def _gradients(self, x: Tensor, y: Tensor) -> list[Tensor]:
        self.learning.zero_grad()
        self.loss(self.learner(x), y).backward()
        return [p.grad.clone() for p in self.learner.parameters() if p.grad is not None]


def _joined(batches: Sequence[Batch]) -> Batch:
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


def _preconditions(state: dict[str, Any]) -> list[str]:
    """State keys that precondition: the results of a refresh, or the factors if a refresh has no results."""
    found = [k for k in state if k.startswith(("basis", "eigenvalues", "inverse"))]
    return found or ["factor_a", "factor_g"]
