"""Recipes that were tuned here for the sizes ``smoke`` and ``cpu``: equal steps, constant rate, two cores.

They were tuned with ``python -m benchmarks train --set ...``. The results are in ``docs/recipes.md`` and
``docs/evidence.md``.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from benchmarks.recipes.building import adamw, second_order, settings_of, sgd
from benchmarks.recipes.further import DAMPED, DECAYED, FURTHER, HALF, OFTEN, SPECTRAL, WATCHFUL, WHITENING
from benchmarks.recipes.types import Method, MethodName, Recipe, Rule, Settings

TUNED = "tuned here"  # source of these recipes, whose keywords were tuned for each method on each workload
_BOTH = ("lr", "fallback_lr")


def tuned(
    tables: Mapping[str, Settings], rule: Rule = "sqrt", searched: tuple[str, ...] = ("lr",), source: str = TUNED
) -> dict[str, Recipe]:
    return {name: Recipe(dict(table), source, rule=rule, searched=searched) for name, table in tables.items()}


_SGD = {
    "digits": 0.1, "autoencoder": 3e-3, "resnet20": 0.1, "chargpt": 0.3, "logistic": 0.01, "multi30k": 0.1, "unet": 0.1,
}  # fmt: skip
_ADAMW = {
    "digits": 1e-2, "autoencoder": 1e-3, "resnet20": 3e-3, "chargpt": 3e-3, "logistic": 1e-3, "multi30k": 1e-3,
    "unet": 3e-3,
}  # fmt: skip
"""Learning rates. Methods with AdamW as their graft use the same rates as AdamW."""


def _grafted(further: Mapping[str, Settings], common: Settings | None = None) -> dict[str, Settings]:
    """Return recipes with AdamW's step size, and with its rate unless ``further`` has another one."""
    return {name: {"lr": _ADAMW[name], "graft": "adam", **own, **(common or {})} for name, own in further.items()}


_WHITENED: dict[str, Settings] = {
    "digits": {},
    "autoencoder": {},
    "resnet20": {"lr": 1e-2, "factor_batch_size": 32},
    "chargpt": {"factor_positions": 32},
    "logistic": {},
    "multi30k": {"lr": 3e-3, "fallback_lr": 3e-3, "factor_batch_size": 32},
    "unet": {"factor_batch_size": 2},
}
_WHITEN: dict[str, Settings] = {
    name: {"lr": _ADAMW[name], "fallback_lr": _ADAMW[name], **WHITENING, **own} for name, own in _WHITENED.items()
}
_NATURAL = _grafted({
    "digits": {"lr": 0.02, "factor_update_steps": 5, "inv_update_steps": 10},
    "autoencoder": {},
    "resnet20": DECAYED,
    "chargpt": DECAYED,
    "logistic": {},
    "multi30k": {},
    "unet": {},
})  # fmt: skip
# The best exponent depends on the problem. It is 1/2 if the noise of the gradient dominates.
_EKFAC = {**_NATURAL, **{name: _WHITEN[name] for name in ("resnet20", "chargpt", "multi30k", "unet")}}
_STEADY: dict[str, Settings] = {name: {"lr": rate, "momentum": 0.9} for name, rate in _SGD.items()}
# The preset is meant for the rate of AdamW.
_FROM_ADAMW: dict[str, Settings] = {name: {"lr": rate} for name, rate in _ADAMW.items()}
_KFAC = _grafted({
    "digits": {"lr": 0.02, "inverse_method": "cholesky", "factor_update_steps": 5, "inv_update_steps": 10},
    "autoencoder": {},
    "resnet20": {**DECAYED, **OFTEN},
    "chargpt": {**DECAYED, **OFTEN, "factor_positions": 32},
    "logistic": {},
    "multi30k": {**OFTEN, "factor_batch_size": 32},
    "unet": {**OFTEN, "factor_batch_size": 2},
})  # fmt: skip
_HYLO = _grafted({
    "digits": {"lr": 0.02, "damping": 1e-2},
    # The curvature of its layers differs by a factor of 1000, so no single λ suits all of them.
    "autoencoder": {"damping": 1.0, "damping_mode": "relative"},
    "resnet20": {**HALF, **DECAYED},
    "chargpt": {**HALF, **DECAYED},
    "logistic": {},
    "multi30k": {**HALF, **DAMPED},
})  # fmt: skip
# With a batch size of eight, all rows can be kept.
_HYLO["unet"] = {"lr": 0.1, "damping": 0.1, "rank_fraction": 1.0}

_RELATIVE = settings_of(
    "likelihood=bernoulli adaptive_damping=false damping=0.3 damping_mode=relative factor_decay=0.8"
)
_KFAC_ADAPTIVE: dict[str, Settings] = {
    "digits": {**WATCHFUL, "likelihood": "categorical", "damping": 0.01},
    # Damping relative to the curvature needs no adaptation here. Within sixty steps, the curvature changes too much for
    # a running mean over twenty steps.
    "autoencoder": {**WATCHFUL, **_RELATIVE},
}
_EKFAC_ADAPTIVE: dict[str, Settings] = {
    "digits": {**WATCHFUL, "likelihood": "categorical", "damping": 0.01},
    "autoencoder": {**WATCHFUL, "likelihood": "bernoulli", "damping": 1.0, "scale_decay": 0.8},
}

# As published for 164 epochs, with half the rows. Even in a few hundred steps, this is better than Adam as graft.
_PUBLISHED_WINDOW = settings_of("lr=1e-3 damping=1e-4 weight_decay=1e-4 window_size=512 scale=window")
_ROWS = {"digits": 32, "autoencoder": 128, "chargpt": 128, "logistic": 100, "multi30k": 32, "unet": 100}
_SPARSE = _grafted({name: {"window_size": rows} for name, rows in _ROWS.items()}, DAMPED)
_SPARSE["resnet20"] = _PUBLISHED_WINDOW
_MFAC = {**_SPARSE, "digits": {"lr": 0.3, "momentum": 0.9, "graft": "sgd", "window_size": 32, **DAMPED}}
_GGT_ROWS = {"digits": 128, "autoencoder": 100, "resnet20": 100, "chargpt": 100, "multi30k": 32, "unet": 100}
_GGT = _grafted({name: {"window_size": rows} for name, rows in _GGT_ROWS.items()})
_GGT["logistic"] = {"lr": 1.0, "eps": 1e-5, "window_size": 100}

_NO_MATRICES = "plain_layers=Embedding,LayerNorm,head"
_BFLOAT16 = "orthogonal_dtype=bfloat16"


def _orthogonal(lr: float, plain_lr: float, layers: str, more: str) -> Settings:
    rates = {"lr": lr, "fallback_lr": plain_lr}
    return {**rates, **SPECTRAL, **settings_of(layers), "plain_lr": plain_lr, **settings_of(more)}


_ORTHOGONAL: dict[str, Settings] = {
    "digits": {"lr": 0.03, "fallback_lr": 0.01, **SPECTRAL, "plain_layers": "7", "plain_lr": 0.01},
    "resnet20": _orthogonal(0.03, 0.01, "plain_layers=BatchNorm2d,Linear", "factor_batch_size=16"),
    "chargpt": _orthogonal(0.06, 0.02, f"inv_update_steps=16 {_NO_MATRICES}", "factor_positions=32"),
    "multi30k": _orthogonal(
        0.02, 0.01, f"{_BFLOAT16} factor_update_steps=4 inv_update_steps=20 {_NO_MATRICES}", "factor_batch_size=32"
    ),
    "unet": _orthogonal(0.02, 0.01, f"{_BFLOAT16} plain_layers=BatchNorm2d", "factor_batch_size=2"),
}


def _method(
    label: str, name: str, tables: Mapping[str, Settings], rule: Rule = "sqrt", searched: tuple[str, ...] = ("lr",)
) -> Method:
    return Method(label, partial(second_order, name), tuned(tables, rule, searched))


_FIRST: dict[MethodName, Method] = {
    "sgd": Method("SGD", sgd, tuned(_STEADY, "linear"), order="first", ours=False),
    "adamw": Method("AdamW", adamw, tuned(_FROM_ADAMW), order="first", ours=False),
    "kfac": _method("KFAC", "kfac", _KFAC),
    "ekfac": _method("EKFAC", "ekfac", _EKFAC, searched=_BOTH),
    "hylo": _method("HyLo", "hylo", _HYLO),
    "mfac": _method("M-FAC", "mfac", _MFAC),
    "sparse_mfac": _method("sparse M-FAC", "sparse_mfac", _SPARSE),
    "ggt": _method("GGT", "ggt", _GGT),
    "from_adamw": _method("KFAC (from_adamw)", "from_adamw", _FROM_ADAMW),
    "ekfac_natural": _method("EKFAC, power 1", "ekfac", _NATURAL, searched=_BOTH),
    "ekfac_whiten": _method("EKFAC, power 1/2", "ekfac", _WHITEN, searched=_BOTH),
    "kfac_adaptive": _method("KFAC, quadratic model", "kfac", _KFAC_ADAPTIVE, "constant", ("damping",)),
    "ekfac_adaptive": _method("EKFAC, quadratic model", "ekfac", _EKFAC_ADAPTIVE, "constant", ("damping",)),
    "ekfac_orthogonal": _method("EKFAC, orthogonal", "ekfac", _ORTHOGONAL, searched=(*_BOTH, "plain_lr")),
}


def _with_further(name: MethodName, method: Method) -> Method:
    known = next(iter(method.recipes.values()))
    more = tuned(FURTHER.get(name, {}), known.rule, known.searched)
    return replace(method, recipes={**method.recipes, **more})


OURS: dict[MethodName, Method] = {name: _with_further(name, method) for name, method in _FIRST.items()}
