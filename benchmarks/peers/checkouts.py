"""Optimizers that are imported from a checkout: K-FAC of kfac-pytorch, Meta's Shampoo, and M-FAC of its authors."""

import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.peers.layers import trained, unheard_layers
from benchmarks.peers.peer import Peer

CHECKOUTS = {
    "kfac_pytorch": ("https://github.com/gpauloski/kfac-pytorch", "kfac/preconditioner.py"),
    "distributed_shampoo": (
        "https://github.com/facebookresearch/optimizers",
        "distributed_shampoo/distributed_shampoo.py",
    ),
    "ist_mfac": ("https://github.com/IST-DASLab/M-FAC", "optim.py"),
}
"""Repositories that the user has to clone, by the name of the peer, each with a file that identifies it."""
PATHS: dict[str, Path] = {}  # the folders of checkouts, by the name of the peer


def set_paths(pairs: Iterable[str]) -> None:
    for pair in pairs:
        name, equals, folder = pair.partition("=")
        if not equals or name not in CHECKOUTS:
            raise ValueError(f"--peer-path must be NAME=DIR with NAME one of {', '.join(CHECKOUTS)}, got {pair!r}")
        path, (repository, file) = Path(folder).expanduser().resolve(), CHECKOUTS[name]
        if not (path / file).is_file():
            raise ValueError(f"--peer-path {name}: {folder} lacks {file}, so it is no checkout of {repository}")
        PATHS[name] = path


def _folder(name: str) -> Path:
    if name not in PATHS:
        raise ValueError(f"{name} needs a checkout of {CHECKOUTS[name][0]}: --peer-path {name}=DIR")
    return PATHS[name]


def version(name: str) -> str:
    """Return the version of a checkout, with a hash of the file of the optimizer."""
    folder = PATHS[name]
    project = folder / "pyproject.toml"
    found = re.search(r'^version = "(.+)"', project.read_text(encoding="utf-8"), re.M) if project.is_file() else None
    digest = hashlib.sha256((folder / CHECKOUTS[name][1]).read_bytes()).hexdigest()[:12]
    return f"{found[1]}, sha256 {digest}" if found else f"sha256 {digest}"


def package(name: str, module: str) -> Any:
    with _in_front(_folder(name)):
        return importlib.import_module(module)


@functools.cache
def _source_file(path: Path) -> ModuleType:
    """Import the file of a checkout that contains the optimizer, under a name that hides no other module."""
    plan = importlib.util.spec_from_file_location(f"benchmarks_peer_{path.stem}", path)
    assert plan is not None
    assert plan.loader is not None
    module = importlib.util.module_from_spec(plan)
    # Scripts of experiments change global settings of torch.
    matmul, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    # Torch's own test utilities freeze these settings for the whole process.
    with torch.backends.__allow_nonbracketed_mutation():
        try:
            plan.loader.exec_module(module)
        finally:
            torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, cudnn
    return module


@contextmanager
def _in_front(folder: Path) -> Iterator[None]:
    """Import from a checkout first, and return a version even for packages that are not installed."""
    known = importlib.metadata.version

    def version(distribution_name: str) -> str:
        try:
            return known(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            return "0"

    sys.path.insert(0, str(folder))
    try:
        with mock.patch.object(importlib.metadata, "version", version):
            yield
    finally:
        sys.path.remove(str(folder))


def kfac_pytorch(
    model: nn.Module,
    lr: float = 0.1,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    clip_root: float = 0.001**0.5,
    **options: Any,
) -> Optimizer:
    """Return SGD behind the preconditioner of kfac-pytorch (KAISA).

    It preconditions linear layers and 2-D convolutions, and all other parameters use plain SGD. If its clipping is
    active, the length of a step is ``√kl_clip`` for any rate. Here, the clip is proportional to the square of the rate,
    so that schedules and searches work as for other optimizers.
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
    shampoo = package("distributed_shampoo", "distributed_shampoo")
    graft = shampoo.AdamPreconditionerConfig(beta2=beta2, epsilon=graft_eps)
    kind = shampoo.DistributedShampoo
    return Peer(kind(trained(model), lr=lr, betas=(beta1, beta2), grafting_config=graft, **options))


def ist_mfac(model: nn.Module, window_size: int = 1024, **options: Any) -> Optimizer:
    """Return the M-FAC of its authors. Every parameter needs a gradient in every step."""
    module = _source_file(_folder("ist_mfac") / CHECKOUTS["ist_mfac"][1])
    parameters = trained(model)
    device = parameters[0].device
    if device.type == "cpu":
        _make_run_on_cpu(module)
    return Peer(module.MFAC(parameters, ngrads=window_size, moddev=device, optdev=device, **options))


def _make_run_on_cpu(module: ModuleType) -> None:
    """Replace the two functions of torch that require a GPU, only inside the module of M-FAC."""
    if isinstance(module.torch, _Patched):
        return
    setattr(module, "torch", _Patched(torch, lu=_lu))  # noqa: B010 - type checkers reject assignments to modules
    parallel = _Patched(nn.parallel, parallel_apply=lambda functions, inputs: list(map(_called, functions, inputs)))
    setattr(module, "nn", _Patched(nn, parallel=parallel))  # noqa: B010


class _Patched:
    """A module with some names replaced."""

    def __init__(self, module: ModuleType, **replaced: Any) -> None:
        self._module = module
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _lu(matrix: Tensor, pivot: bool) -> tuple[Tensor]:
    """Factorize a positive definite matrix into a unit lower and an upper triangle, without pivoting."""
    assert not pivot
    root = torch.linalg.cholesky(matrix)
    scale = root.diagonal()
    return ((root * scale).mT + (root / scale).tril(-1),)


def _called(function: Callable[[Any], Tensor], value: Any) -> Tensor:
    return function(value)
