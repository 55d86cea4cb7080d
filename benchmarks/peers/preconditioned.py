"""SOAP, Shampoo and PSGD-Kron by the package pytorch-optimizer."""

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from benchmarks.peers.libraries import library
from benchmarks.peers.peer import Peer

GRAFTS = {"none": 0, "sgd": 1, "adagrad": 2, "rmsprop": 3}
"""What gives a layer's step its length, by the package's numbers."""


def soap(model: nn.Module, beta1: float = 0.95, beta2: float = 0.95, **settings: Any) -> Optimizer:
    """Return SOAP: Adam in the eigenbasis of Shampoo. Its first step only gathers statistics."""
    return Peer(library("pytorch_optimizer").SOAP(_trained(model), betas=(beta1, beta2), **settings))


def shampoo(
    model: nn.Module, beta1: float = 0.9, beta2: float = 0.999, graft: str = "rmsprop", every: int = 10, **settings: Any
) -> Optimizer:
    """Return Shampoo in blocks, the length of each layer's step taken from a simpler method."""
    if graft not in GRAFTS:
        raise ValueError(f"graft must be one of {', '.join(GRAFTS)}, got {graft!r}")
    kind = library("pytorch_optimizer").ScalableShampoo
    keywords = {
        "start_preconditioning_step": every,
        "preconditioning_compute_steps": every,
        "moving_average_for_momentum": True,
        "nesterov": False,
        **settings,
    }
    return Peer(kind(_trained(model), betas=(beta1, beta2), graft_type=GRAFTS[graft], **keywords))


def psgd_kron(model: nn.Module, seed: int | None = None, **settings: Any) -> Optimizer:
    kron = library("pytorch_optimizer").Kron(_trained(model), **settings)
    return _Seeded(kron, seed=_seed_of(model) if seed is None else seed)


def _seed_of(model: nn.Module) -> int:
    """Return a number that is the same for equal weights; vectors often begin as zeros or ones, whatever the seed."""
    weights = next((p for p in _trained(model) if p.dim() > 1), _trained(model)[0])
    return zlib.crc32(weights.detach().cpu().float().numpy().tobytes())


class _Seeded(Peer):
    """Draws from generators of its own: a run is then the same whatever ran before, and the model's draws are too."""

    def __init__(self, *parts: Optimizer, seed: int) -> None:
        super().__init__(*parts)
        self._seed, self._taken = seed, 0

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
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


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
