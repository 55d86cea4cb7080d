"""Schedule-free AdamW: averaged weights in place of a falling rate.

Defazio et al., "The road less scheduled" (2024), by the authors' package. Gradients are taken at one point, the model
is evaluated at another: :func:`evaluating` goes there and back.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from benchmarks.peers.libraries import library
from benchmarks.peers.peer import Peer
from benchmarks.workloads import Workload

SETTLING = 50
"""Batches that norms see anew before an evaluation, as the package's documentation advises."""


@runtime_checkable
class Averaging(Protocol):
    """An optimizer that keeps an average of the weights to evaluate with."""

    def train(self) -> None:
        """Put the weights of training into the model."""

    def eval(self) -> None:
        """Put the averaged weights into the model."""


def schedule_free(model: nn.Module, beta1: float = 0.9, beta2: float = 0.999, **settings: Any) -> Optimizer:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    kind = library("schedulefree").AdamWScheduleFree
    return _ScheduleFree(kind(parameters, betas=(beta1, beta2), **settings))


class _ScheduleFree(Peer):
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for part in self.parts:
            if isinstance(part, Averaging):
                part.train()
        return super().step(closure)


@contextmanager
def evaluating(optimizer: Optimizer, model: nn.Module, workload: Workload, seed: int = 0) -> Iterator[None]:
    """Run the body with the weights that an optimizer wants to be judged by.

    Statistics of batch norms belong to the weights they were taken with, so they are taken anew, and put back at the
    end. For every optimizer that keeps no average this does nothing.
    """
    averaging = [part for part in getattr(optimizer, "parts", ()) if isinstance(part, Averaging)]
    if not averaging:
        yield
        return
    norms = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for part in averaging:
        part.eval()
    try:
        _settle(model, workload, seed)
        yield
    finally:
        for part in averaging:
            part.train()
        for name, buffer in model.named_buffers():
            buffer.copy_(norms[name])


def _settle(model: nn.Module, workload: Workload, seed: int) -> None:
    if not any(isinstance(module, _BatchNorm) for module in model.modules()):
        return
    training = model.training
    model.train()
    with torch.no_grad():
        for batch in islice(workload.batches(seed), SETTLING):
            workload.outputs(model, batch)
    model.train(training)
