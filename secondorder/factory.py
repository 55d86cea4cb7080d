"""Builds and estimates methods and presets by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from secondorder.comm.names import from_name
from secondorder.comm.strategy import CommStrategy
from secondorder.methods.names import METHODS, Alias, resolve
from secondorder.methods.presets import PRESETS
from secondorder.optimizer import SecondOrderOptimizer
from secondorder.options import bare_name
from secondorder.plan.estimate import Builder, Estimate, estimate_methods, made_on_meta
from secondorder.plan.rates import MachineRates


def create(
    name: str, model: ParamsT | nn.Module | Sequence[nn.Module], lr: float | Tensor | None = None, **overrides: Any
) -> SecondOrderOptimizer:
    """Build an optimizer from the name of a preset or a method.

    The case of the name is ignored, and so are ``-`` and ``_``. Some trainers need a factory ``(model, **keywords)``;
    pass them ``functools.partial(secondorder.create, "from_adamw")``.

    | name | builds |
    |---|---|
    | `from_adamw`, `from_adam`, `from_sgd`, `from_muon` | the preset for users of that optimizer |
    | `orthogonal_momentum` | the preset for a variant of Muon, which has no curvature |
    | `large_batch`, `least_squares`, `physics_informed`, `low_memory` | the preset for that kind of problem |
    | `kfac`, `ekfac`, `hylo`, `mfac`, `sparse_mfac`, `ggt` | `KFAC`, `EKFAC`, `HyLo`, `MFAC`, `SparseMFAC`, `GGT` |
    | `eigen`, `inverse` | `KFAC(inverse_method="eigen")`, `KFAC(inverse_method="cholesky")` |
    | `eigen_dp`, `inverse_dp` | the same with `comm=LocalFactors()`; `dp_kfac` is `eigen_dp` |
    | `kgmfac` | `SparseMFAC` |
    | `lrmfac`, `r1mfac` | `MFAC(compression=LowRank())`, `MFAC(compression=LowRank(1))` |
    | `ksggt`, `kdggt` | `GGT(compression=TopK())` |
    | `kid`, `kis`, `sngd` | `HyLo(mode="kid")`, `HyLo(mode="kis")`, `HyLo(mode="sngd")` |

    :func:`presets` shows the constructor calls of the presets.

    Args:
        name: Name of the preset or of the method.
        model: First argument of the constructor: the model, a list of its parts, or any argument that ``torch.optim``
            accepts. A preset accepts only the model.
        lr: Learning rate. If None, it is the default of the preset or of the constructor.
        **overrides: Keywords of the constructor, which replace those that the name implies. ``comm`` may also be the
            name of a strategy, see :func:`secondorder.comm.from_name`.

    Returns:
        The optimizer.

    Raises:
        ValueError: If no preset or method has this name. The message lists all names.
        TypeError: If the name is not a string.

    Example:
        >>> import torch, secondorder
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = secondorder.create("from_adamw", model, lr=3e-4)
    """
    preset = _PRESETS.get(bare_name(name)) if isinstance(name, str) else None
    method, options = Alias("", {}) if preset else resolve(name, PRESETS)
    chosen = {**options, **overrides}
    if isinstance(chosen.get("comm"), str):
        chosen["comm"] = from_name(chosen["comm"])
    if preset:
        return preset.build(cast("nn.Module", model), lr, **chosen)
    return METHODS[method](model, lr=lr, **chosen)


# ---------------------------------------------------------------------- what methods will cost
def estimate(
    model_or_maker: nn.Module | Callable[[], Any],
    inputs: Any = None,
    batch_size: int | None = None,
    world_size: int | None = None,
    comm: CommStrategy | str | None = None,
    methods: Sequence[str] | Mapping[str, Builder] | None = None,
    rates: MachineRates | None = None,
    device: torch.device | str | None = None,
) -> Estimate:
    """Estimate the cost of every method on a model of any size before you train it.

    Steps are taken on the ``meta`` device with the same code as in training. This computes nothing and needs no memory,
    so memory and FLOPs are exact even for large models. The time of a step is computed from its operators and from the
    rates of this machine, which are measured in a few seconds, or from the rates of another machine.

    Args:
        model_or_maker: The model on any device, which is neither changed nor run; or a function without arguments that
            returns the model or ``(model, inputs)``. The function is called with ``meta`` as the default device.
        inputs: Arguments of the model: a tensor ``[N, ...]``, or a tuple or dict of arguments. Only their shapes and
            data types are used. They are optional if the model begins with a linear layer.
        batch_size: N, the number of examples per rank and step; None for the number in the inputs.
        world_size: Number of ranks; None for one.
        comm: Strategy or its name, see :func:`secondorder.comm.from_name`; None for ``CommOpt()``.
        methods: Names that :func:`create` accepts, ``"sgd"`` or ``"adamw"``, or a dict of functions that return the
            optimizer of a model; None for SGD, AdamW, all methods, and the presets for a plain training loop.
        rates: Rates of a machine; None to measure the rates of this machine.
        device: The device to train on, which determines some defaults. None is the device of the model, or the
            accelerator or the CPU if the model is on ``meta``.

    Returns:
        The estimate. ``print`` shows it as a table.

    Raises:
        ValueError: If a method or the inputs are unknown, a number is out of range, or no parameter is trained.
        TypeError: If an argument has the wrong type.
        RuntimeError: If the model does not run on the ``meta`` device with these inputs.

    Example:
        >>> import torch, secondorder
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
        >>> found = secondorder.estimate(model, batch_size=128, methods=["sgd", "kfac"])
        >>> found.methods["KFAC"].memory["total"]
        72740
    """
    builders = methods if isinstance(methods, Mapping) else _builders(methods)
    made = model_or_maker
    model, given = (made, None) if isinstance(made, nn.Module) else made_on_meta(made)
    strategy = from_name(comm) if isinstance(comm, str) else comm
    return estimate_methods(
        model,
        given if inputs is None else inputs,
        builders,
        FIRST_ORDER["SGD"],
        batch_size=batch_size,
        world_size=world_size,
        comm=strategy,
        rates=rates,
        device=device,
    )


#: Optimizers to compare with, by name.
FIRST_ORDER: Mapping[str, Builder] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
}


def _builders(names: Sequence[str] | None) -> dict[str, Builder]:
    """Return functions that build optimizers, by name. The default includes presets that need only a plain loop."""
    if names is None:
        names = [*FIRST_ORDER, *METHODS, *(name for name, preset in PRESETS.items() if not preset.needs)]
    if isinstance(names, str):
        raise TypeError(f"methods must be a list of names, got {names!r}")
    found: dict[str, Builder] = {}
    known = {bare_name(name): name for name in FIRST_ORDER}
    for name in names:
        if isinstance(name, str) and bare_name(name) in known:
            found[known[bare_name(name)]] = FIRST_ORDER[known[bare_name(name)]]
        elif isinstance(name, str) and bare_name(name) in _PRESETS:
            found[_PRESETS[bare_name(name)].name] = partial(create, name)
        else:
            method, options = resolve(name, PRESETS)
            shown = getattr(METHODS[method], "__name__", method) if not options else name
            found[shown] = partial(create, name)
    return found


_PRESETS = {bare_name(name): preset for name, preset in PRESETS.items()}
