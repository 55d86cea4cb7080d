"""The methods by name, including the names that other programs use for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from secondorder.curvature.window.lowrank import LowRank
from secondorder.curvature.window.topk import TopK
from secondorder.methods.ekfac import EKFAC
from secondorder.methods.ggt import GGT
from secondorder.methods.hylo import HyLo
from secondorder.methods.kfac import KFAC
from secondorder.methods.mfac import MFAC, SparseMFAC
from secondorder.optimizer import SecondOrderOptimizer
from secondorder.options import bare_name

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
        options: Keywords that the name implies.
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
    # IST-DASLab/EFCP, --optim: k for the largest entries, lr for low rank, r1 for rank one; its two sparse variants of
    # GGT differ only in how they store the window
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


def resolve(name: str, presets: Iterable[str] = ()) -> Alias:
    """Return the method and the keywords that a name implies.

    Args:
        name: Any name of a method that :func:`secondorder.create` accepts.
        presets: Names of presets, which the error message lists, too.

    Returns:
        Key of :data:`METHODS`, and keywords. There are no keywords if it is the name of a method.

    Raises:
        ValueError: If no method has this name. The message lists all names.
        TypeError: If the name is not a string.
    """
    if not isinstance(name, str):
        raise TypeError(f"the name of a method must be a string, got {name!r}")
    known = {bare_name(method): Alias(method, {}) for method in METHODS}
    known.update({bare_name(alias): meaning for alias, meaning in ALIASES.items()})
    if bare_name(name) not in known:
        of_presets = f"a preset from {found}, " if (found := ", ".join(presets)) else ""
        raise ValueError(
            f"unknown method {name!r}: choose {of_presets}a method from {', '.join(METHODS)}, or {', '.join(ALIASES)}"
        )
    return known[bare_name(name)]
