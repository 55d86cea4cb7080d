"""Third-party optimizers to compare with those of this package, each with a small function that builds it.

Most come from packages (``pip install secondorder[peers]``), which are imported when an optimizer is built. Projects
without a package are imported from a checkout, see :mod:`benchmarks.peers.checkouts`.
"""

from functools import partial
from importlib import metadata

import torch

from benchmarks.peers import checkouts, deterministic, muon, orthogonal, recipes
from benchmarks.peers import libraries as packaged
from benchmarks.peers.checkouts import CHECKOUTS, PATHS, set_paths, version
from benchmarks.peers.libraries import evaluating, has_library
from benchmarks.peers.peer import Peer
from benchmarks.recipes.types import Method

__all__ = ["PEERS", "Peer", "available", "evaluating", "set_paths", "versions"]

_first = partial(Method, order="first", ours=False)
_second = partial(Method, order="second", ours=False)

PEERS: dict[str, Method] = {
    "muon": _first(muon.label(), muon.muon, recipes.MUON),
    "muon_short": _first(f"{muon.label()}, momentum 0.85", muon.muon, recipes.MUON_SHORT),
    "orthogonal": _first("orthogonal momentum", orthogonal.orthogonal_momentum, recipes.ORTHOGONAL),
    "soap": _first("SOAP", packaged.soap, recipes.SOAP),
    "shampoo": _first("Shampoo", packaged.shampoo, recipes.SHAMPOO),
    "psgd_kron": _first("PSGD-Kron", packaged.psgd_kron, recipes.PSGD_KRON),
    "schedule_free": _first("schedule-free AdamW", packaged.schedule_free, recipes.SCHEDULE_FREE),
    "lbfgs": _second("L-BFGS", deterministic.lbfgs, recipes.LBFGS, closure=True),
    "gauss_newton": _second("Gauss-Newton", deterministic.GaussNewton, recipes.GAUSS_NEWTON, closure=True),
    "distributed_shampoo": _first("Shampoo (Meta)", checkouts.distributed_shampoo, recipes.DISTRIBUTED_SHAMPOO),
    "singd": _second("SINGD", packaged.singd, recipes.SINGD),
    "kfac_pytorch": _second("K-FAC (kfac-pytorch)", checkouts.kfac_pytorch, recipes.KFAC_PYTORCH),
    "ist_mfac": _second("M-FAC (its authors')", checkouts.ist_mfac, recipes.IST_MFAC),
}

_LIBRARIES = {
    "soap": "pytorch_optimizer", "shampoo": "pytorch_optimizer", "psgd_kron": "pytorch_optimizer",
    "schedule_free": "schedulefree", "singd": "singd",
}  # fmt: skip
"""Modules of packages."""


def available() -> list[str]:
    """Return the peers that can be built, because torch has them, or their package or checkout is there."""
    lacking = {name for name, package in _LIBRARIES.items() if not has_library(package)}
    lacking |= {name for name in CHECKOUTS if name not in PATHS}
    lacking |= set() if hasattr(torch.optim, "Muon") else {"muon", "muon_short"}
    return [name for name in PEERS if name not in lacking]


def versions(name: str) -> dict[str, str]:
    """Return the version of the package or of the checkout that an optimizer comes from, if there is one."""
    if name in PATHS:
        return {name: version(name)}
    library = _LIBRARIES.get(name)
    if library is None or not has_library(library):
        return {}
    package = library.replace("_", "-")
    return {package: metadata.version(package)}
