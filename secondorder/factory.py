"""All methods and presets by name, including the names in the programs that published them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from secondorder.comm.names import from_name
from secondorder.curvature.window.lowrank import LowRank
from secondorder.curvature.window.topk import TopK
from secondorder.methods.ekfac import EKFAC
from secondorder.methods.ggt import GGT
from secondorder.methods.hylo import HyLo
from secondorder.methods.kfac import KFAC
from secondorder.methods.mfac import MFAC, SparseMFAC
from secondorder.methods.presets import PRESETS
from secondorder.optimizer import SecondOrderOptimizer

#: The methods by the names that this package gives them.
METHODS: Mapping[str, Callable[..., SecondOrderOptimizer]] = {
    "kfac": KFAC,
    "ekfac": EKFAC,
    "hylo": HyLo,
    "mfac": MFAC,
    "sparse_mfac": SparseMFAC,
    "ggt": GGT,
}


class Alias(NamedTuple):
    """Another name of a method.

    Attributes:
        method: Key of :data:`METHODS`.
        options: Keywords that the name stands for.
    """

    method: str
    options: Mapping[str, Any]


#: The names by which other programs know the methods, and their meaning.
ALIASES: Mapping[str, Alias] = {
    # lzhangbv/kfac_pytorch, --kfac-name: form of the inverse; *_dp: factors from the owner's own data
    "eigen": Alias("kfac", {"inverse_method": "eigen"}),
    "inverse": Alias("kfac", {"inverse_method": "cholesky"}),
    "eigen_dp": Alias("kfac", {"inverse_method": "eigen", "comm": "local_factors"}),
    "inverse_dp": Alias("kfac", {"inverse_method": "cholesky", "comm": "local_factors"}),
    "dp_kfac": Alias("kfac", {"inverse_method": "eigen", "comm": "local_factors"}),
    # IST-DASLab/EFCP, --optim: k for the largest entries, lr for low rank, r1 for rank one; its two sparse GGT differ
    # in how they store the same window
    "kgmfac": Alias("sparse_mfac", {"compression": TopK()}),
    "lrmfac": Alias("mfac", {"compression": LowRank()}),
    "r1mfac": Alias("mfac", {"compression": LowRank(1)}),
    "ksggt": Alias("ggt", {"compression": TopK()}),
    "kdggt": Alias("ggt", {"compression": TopK()}),
    # hylo-dso/hylo: --enable-id, --enable-is, --sngd
    "kid": Alias("hylo", {"mode": "kid"}),
    "kis": Alias("hylo", {"mode": "kis"}),
    "sngd": Alias("hylo", {"mode": "sngd"}),
}


def create(
    name: str,
    model: ParamsT | nn.Module | Sequence[nn.Module],
    lr: float | Tensor | None = None,
    **overrides: Any,
) -> SecondOrderOptimizer:
    """Build a preset or a method by its name, in any case, with ``-``, ``_`` or neither.

    ``functools.partial(secondorder.create, "from_adamw")`` is a factory ``(model, **keywords)``, which some trainers
    need.

    | name | builds |
    |---|---|
    | `from_adamw`, `from_adam`, `from_sgd`, `from_muon` | the preset for users of that optimizer |
    | `large_batch`, `least_squares`, `physics_informed`, `low_memory` | the preset for that kind of problem |
    | `kfac`, `ekfac`, `hylo`, `mfac`, `sparse_mfac`, `ggt` | `KFAC`, `EKFAC`, `HyLo`, `MFAC`, `SparseMFAC`, `GGT` |
    | `eigen`, `inverse` | `KFAC(inverse_method="eigen")`, `KFAC(inverse_method="cholesky")` |
    | `eigen_dp`, `inverse_dp` | the same with `comm=LocalFactors()`; `dp_kfac` is `eigen_dp` |
    | `kgmfac` | `SparseMFAC` |
    | `lrmfac`, `r1mfac` | `MFAC(compression=LowRank())`, `MFAC(compression=LowRank(1))` |
    | `ksggt`, `kdggt` | `GGT(compression=TopK())` |
    | `kid`, `kis`, `sngd` | `HyLo(mode="kid")`, `HyLo(mode="kis")`, `HyLo(mode="sngd")` |

    :func:`presets` shows the calls that the presets stand for.

    Args:
        name: Name of the preset or of the method.
        model: First argument of the constructor: the model, a list of its parts, or any argument that ``torch.optim``
            takes. A preset takes the model only.
        lr: Learning rate. If None, it is the one of the preset or of the constructor.
        **overrides: Keywords of the constructor. They replace those that the name stands for. ``comm`` may also be the
            name of a strategy, see :func:`secondorder.comm.from_name`.

    Returns:
        The optimizer.

    Raises:
        ValueError: If nothing has this name; the message lists all names.
        TypeError: If the name is not a string.

    Example:
        >>> import torch, secondorder
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = secondorder.create("from_adamw", model, lr=3e-4)
    """
    preset = _PRESETS.get(_plain(name)) if isinstance(name, str) else None
    method, options = Alias("", {}) if preset else resolve(name)
    chosen = {**options, **overrides}
    if isinstance(chosen.get("comm"), str):
        chosen["comm"] = from_name(chosen["comm"])
    if preset:
        return preset.build(cast("nn.Module", model), lr, **chosen)
    return METHODS[method](model, lr=lr, **chosen)


def resolve(name: str) -> Alias:
    """Return the method that a name stands for, and its keywords.

    Args:
        name: Any name that :func:`create` takes.

    Returns:
        Key of :data:`METHODS` and keywords, none for a method's own name.

    Raises:
        ValueError: If no method has this name; the message lists all names.
        TypeError: If the name is not a string.
    """
    if not isinstance(name, str):
        raise TypeError(f"the name of a method must be text, got {name!r}")
    known = {_plain(method): Alias(method, {}) for method in METHODS}
    known.update({_plain(alias): meaning for alias, meaning in ALIASES.items()})
    if _plain(name) not in known:
        raise ValueError(
            f"unknown method {name!r}: choose a preset from {', '.join(PRESETS)}, a method from {', '.join(METHODS)}, "
            f"or {', '.join(ALIASES)}"
        )
    return known[_plain(name)]


def _plain(name: str) -> str:
    return name.strip().lower().replace("-", "").replace("_", "")


_PRESETS = {_plain(name): preset for name, preset in PRESETS.items()}
