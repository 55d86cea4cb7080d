"""Optimizers from options by flat names, so that a table of cases needs no objects."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks.recipes.building import from_flat
from secondorder.preconditioners.keywords import flat_names


def grouped(method: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of a constructor from options by flat names.

    `factor_storage` is a word here, `switch` is a mode, and Adam's betas and ε may be named as those of GGT are.
    """
    found = dict(options)
    if "switch" in found:
        found["mode"] = found.pop("switch") or found.get("mode", "auto")
    if "factor_storage" in found:
        found["factor_storage"] = {"packed": True, "dense": False}.get(found["factor_storage"], found["factor_storage"])
    for alias, name in {"fallback_betas": "betas", "fallback_eps": "eps"}.items():
        if alias in found and alias not in flat_names(method):
            found[name] = found.pop(alias)
    return from_flat(method, found)


def built(method: Any, *args: Any, **options: Any) -> Any:
    """An optimizer of a class, or of a `partial` of one, with options by flat names and a scaler of the loss."""
    if isinstance(method, partial):
        args, options, method = (*method.args, *args), {**method.keywords, **options}, method.func
    scaler = options.pop("grad_scaler", None)
    optimizer = method(*args, **grouped(method, options))
    if scaler is not None:
        optimizer.grad_scaler = scaler
    return optimizer
