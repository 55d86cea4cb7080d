"""Builds optimizers from options with flat names, so that a table of cases needs no objects."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks.recipes.building import from_flat
from secondorder.preconditioners.keywords import flat_names


def grouped(method: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Convert options with flat names to the keywords of a constructor.

    `factor_storage` may be a word, `switch` is a mode, and `fallback_betas` and `fallback_eps` are aliases of `betas`
    and `eps` unless the method has its own.
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
    """Build an optimizer from a class or a `partial` of one, with flat option names and an optional `grad_scaler`."""
    if isinstance(method, partial):
        args, options, method = (*method.args, *args), {**method.keywords, **options}, method.func
    scaler = options.pop("grad_scaler", None)
    optimizer = method(*args, **grouped(method, options))
    if scaler is not None:
        optimizer.grad_scaler = scaler
    return optimizer
