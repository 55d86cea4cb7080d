"""The optimizers whose code comes from a checkout: K-FAC of kfac-pytorch, Meta's Shampoo, and M-FAC of its authors."""

import re
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.peers.by_path import package, source_file
from benchmarks.peers.layers import unheard_layers
from benchmarks.peers.peer import Peer


def kfac_pytorch(
    model: nn.Module,
    lr: float = 0.1,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    clip_root: float = 0.001**0.5,
    **options: Any,
) -> Optimizer:
    """Return SGD behind the preconditioner of kfac-pytorch (KAISA).

    It takes linear layers and 2-D convolutions; all else follows SGD alone. Where its clip bounds the step, its length
    is ``√kl_clip`` whatever the rate: here the clip follows the square of the rate, so that a schedule, and a search,
    do what they do to others.
    """
    kind = package("kfac_pytorch", "kfac.preconditioner").KFACPreconditioner
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, weight_decay=weight_decay)
    skipped = [f"^{re.escape(name)}$" for name in unheard_layers(model)]

    def rate(_: int) -> float:
        return float(optimizer.param_groups[0]["lr"])

    def clip(step: int) -> float:
        return (clip_root * rate(step) / lr) ** 2

    preconditioner = kind(model, lr=rate, kl_clip=clip, skip_layers=skipped, **options)
    return Peer(optimizer, before=preconditioner.step, beside=[preconditioner])


def distributed_shampoo(
    model: nn.Module,
    lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.999,
    graft_eps: float = 1e-8,
    **options: Any,
) -> Optimizer:
    """Return Meta's Shampoo, the length of its steps taken from Adam."""
    shampoo = package("distributed_shampoo", "distributed_shampoo")
    graft = shampoo.AdamPreconditionerConfig(beta2=beta2, epsilon=graft_eps)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return Peer(shampoo.DistributedShampoo(parameters, lr=lr, betas=(beta1, beta2), grafting_config=graft, **options))


def ist_mfac(model: nn.Module, window_size: int = 1024, **options: Any) -> Optimizer:
    """Return M-FAC by its authors. Every parameter has to have a gradient in every step."""
    module = source_file("ist_mfac")
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    device = parameters[0].device
    if device.type == "cpu":
        _make_run_on_cpu(module)
    return Peer(module.MFAC(parameters, ngrads=window_size, moddev=device, optdev=device, **options))


def _make_run_on_cpu(module: ModuleType) -> None:
    """Put stand-ins for the two functions of torch that ask for a GPU into what the code of M-FAC sees of torch."""
    if isinstance(module.torch, _StandIn):
        return
    setattr(module, "torch", _StandIn(torch, lu=_lu))  # noqa: B010 - to a type checker modules are fixed
    parallel = _StandIn(nn.parallel, parallel_apply=_one_by_one)
    setattr(module, "nn", _StandIn(nn, parallel=parallel))  # noqa: B010


class _StandIn:
    """A module with some names replaced."""

    def __init__(self, module: ModuleType, **replaced: Any) -> None:
        self._module = module
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _lu(matrix: Tensor, pivot: bool) -> tuple[Tensor]:
    """Factorise a positive definite matrix as a unit lower triangle times an upper one, without pivots."""
    assert not pivot
    root = torch.linalg.cholesky(matrix)
    scale = root.diagonal()
    return ((root * scale).mT + (root / scale).tril(-1),)


def _one_by_one(functions: Sequence[Callable[[Any], Tensor]], inputs: Sequence[Any]) -> list[Tensor]:
    return [function(value) for function, value in zip(functions, inputs, strict=True)]
