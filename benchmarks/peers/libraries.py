"""Optimizers of third-party packages, which are imported only when an optimizer is built.

SOAP, Shampoo and PSGD-Kron are those of pytorch-optimizer. SINGD is K-FAC without inverses and with structured factors
(Lin et al., "Structured inverse-free natural gradient", 2024), from the authors' package. Schedule-free AdamW averages
weights instead of decreasing the rate (Defazio et al., "The road less scheduled", 2024), from the authors' package. It
computes gradients and evaluates the model at different points, between which :func:`evaluating` switches.
"""

import importlib.util
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from benchmarks.peers.layers import adamw_for_others, heard_layers, trained
from benchmarks.peers.peer import Peer, evaluated
from benchmarks.workloads import Workload
from benchmarks.workloads.base import optional_package

library = partial(optional_package, extra="peers")


def has_library(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # sys.modules contains None for it
        return False


def singd(
    model: nn.Module,
    lr: float = 1e-3,
    adamw_lr: float = 1e-3,
    weight_decay: float = 0.0,
    structure: str = "dense",
    largest: int = 4096,
    **options: Any,
) -> Optimizer:
    layers = heard_layers(model).values()
    small = [x for x in layers if max(len(x.weight), x.weight[0].numel() + (x.bias is not None)) <= largest]
    taken = list({id(p): p for layer in small for p in layer.parameters()}.values())
    kind = library("singd.optim.optimizer").SINGD
    parts: list[Optimizer] = []
    if taken:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about structures with a naive implementation
            parts.append(
                kind(model, taken, lr=lr, weight_decay=weight_decay, structures=(structure, structure), **options)
            )
    return Peer(*parts, *adamw_for_others(model, taken, lr=adamw_lr, weight_decay=weight_decay))


GRAFTS = {"none": 0, "sgd": 1, "adagrad": 2, "rmsprop": 3}
"""Methods that determine the step size of a layer, with the package's numbers."""


def soap(model: nn.Module, beta1: float = 0.95, beta2: float = 0.95, **settings: Any) -> Optimizer:
    """Return SOAP, which is Adam in the eigenbasis of Shampoo. Its first step only gathers statistics."""
    return Peer(library("pytorch_optimizer").SOAP(trained(model), betas=(beta1, beta2), **settings))


def shampoo(
    model: nn.Module, beta1: float = 0.9, beta2: float = 0.999, graft: str = "rmsprop", every: int = 10, **settings: Any
) -> Optimizer:
    """Return blocked Shampoo, in which a simpler method determines the step size of each layer."""
    if graft not in GRAFTS:
        raise ValueError(f"graft must be one of {', '.join(GRAFTS)}, got {graft!r}")
    kind = library("pytorch_optimizer").ScalableShampoo
    keywords = dict.fromkeys(("start_preconditioning_step", "preconditioning_compute_steps"), every)
    keywords |= {"moving_average_for_momentum": True, "nesterov": False, **settings}
    return Peer(kind(trained(model), betas=(beta1, beta2), graft_type=GRAFTS[graft], **keywords))


def psgd_kron(model: nn.Module, seed: int | None = None, **settings: Any) -> Optimizer:
    kron = library("pytorch_optimizer").Kron(trained(model), **settings)
    return _Seeded(kron, seed=_seed_of(model) if seed is None else seed)


def _seed_of(model: nn.Module) -> int:
    """Return a seed that depends on the weights. Vectors are ignored, because many are initialized to constants."""
    weights = next((p for p in trained(model) if p.dim() > 1), trained(model)[0])
    return zlib.crc32(weights.detach().cpu().float().numpy().tobytes())


class _Seeded(Peer):
    """Seeds the global generators in each step and restores them, so that runs are reproducible and independent."""

    def __init__(self, *parts: Optimizer, seed: int) -> None:
        super().__init__(*parts)
        self._seed, self._taken = seed, 0

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = evaluated(closure)
        known = np.random.get_state()
        devices = {p.device for group in self.param_groups for p in group["params"] if p.is_cuda}
        with torch.random.fork_rng(devices=sorted(device.index for device in devices)):
            torch.manual_seed(hash((self._seed, self._taken)))
            np.random.seed((self._seed + self._taken) % 2**32)
            super().step()
        np.random.set_state(known)
        self._taken += 1
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "seed": self._seed, "taken": self._taken}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._seed, self._taken = state_dict["seed"], state_dict["taken"]


SETTLING = 50
"""Number of batches for new norm statistics before an evaluation, as the package's documentation recommends."""


def schedule_free(model: nn.Module, beta1: float = 0.9, beta2: float = 0.999, **settings: Any) -> Optimizer:
    kind = library("schedulefree").AdamWScheduleFree
    return _ScheduleFree(kind(trained(model), betas=(beta1, beta2), **settings))


class _ScheduleFree(Peer):
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self.averaging.train()
        return super().step(closure)

    @property
    def averaging(self) -> Any:
        """The optimizer of the package, whose ``eval`` loads the averaged weights into the model."""
        return self.parts[0]


@contextmanager
def evaluating(optimizer: Optimizer, model: nn.Module, workload: Workload, seed: int = 0) -> Iterator[None]:
    """Switch to the weights at which the model of an optimizer should be evaluated, for a ``with`` block.

    The statistics of batch norms depend on the weights, so they are computed again and restored at the end. For
    optimizers that do not average weights, this does nothing.
    """
    if not isinstance(optimizer, _ScheduleFree):
        yield
        return
    norms = {name: buffer.clone() for name, buffer in model.named_buffers()}
    optimizer.averaging.eval()
    try:
        _settle(model, workload, seed)
        yield
    finally:
        optimizer.averaging.train()
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
