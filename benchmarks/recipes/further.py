"""Recipes of workloads that were tuned by a few short runs at most, based on the usual rates of AdamW."""

from collections.abc import Mapping

from benchmarks.recipes.shared import DAMPED, DECAYED, HALF, WATCHFUL, WHITENING
from benchmarks.recipes.types import MethodName, Settings
from secondorder.methods.presets import PRESETS


def _table(
    sgd: float,
    rate: float,
    window: int,
    *,
    hylo: Settings,
    decayed: Settings | None = None,
    whitened: bool = True,
    white: float | None = None,
    layers: Settings | None = None,
    ggt: Settings | None = None,
) -> dict[MethodName, Settings]:
    grafted: Settings = {"lr": rate, "graft": "adam"}
    natural: Settings = {**grafted, **(layers or {}), **(decayed or {})}
    whitening: Settings = {"lr": white or rate, "fallback_lr": rate, **(layers or {}), **WHITENING}
    return {
        "sgd": {"lr": sgd, "momentum": 0.9},
        "adamw": {"lr": rate},
        "kfac": natural,
        "ekfac": whitening if whitened else natural,
        "ekfac_natural": natural,
        "ekfac_whiten": whitening,
        "hylo": {**natural, **hylo},
        "mfac": {**grafted, "window_size": window, **DAMPED},
        "sparse_mfac": {**grafted, "window_size": window, **DAMPED},
        "ggt": ggt or {**grafted, "window_size": window},
    }


def _residual(sgd: float, window: int, rows: int) -> dict[MethodName, Settings]:
    """Return the recipes of a convolutional classifier, which are those of ResNet-20."""
    own: Settings = {"lr": 3e-3, "graft": "adam", "window_size": rows}
    return _table(sgd, 3e-3, window, hylo=HALF, decayed=DECAYED, white=1e-2, ggt=own)


_PHYSICS = PRESETS["physics_informed"]
# Every step uses all points, so there is no noise, but rows from the gradients of the loss vanish with the residuals.
_POISSON: dict[MethodName, Settings] = {
    **_table(1e-3, 1e-2, 128, hylo={}, whitened=False, layers={"fisher": "exact", **DAMPED}),
    "hylo": {"lr": _PHYSICS.lr, **_PHYSICS.options},
    "ekfac_whiten": {"lr": 0.03, "fallback_lr": 0.03, **WHITENING},  # its scale is the squared gradient of the loss
    "kfac_adaptive": {**WATCHFUL, "likelihood": "gaussian", "fisher": "exact", "damping": 1.0},
    "ekfac_adaptive": {**WATCHFUL, "likelihood": "gaussian", "fisher": "exact", "damping": 1.0, "scale_decay": 0.8},
}
_BERT = _table(0.03, 3e-4, 128, hylo={**HALF, **DAMPED})
_TABLES: Mapping[str, dict[MethodName, Settings]] = {
    "poisson": _POISSON,
    "resnet32": _residual(0.1, 256, 100),
    "resnet110": _residual(0.1, 64, 50),
    "vgg16": _residual(0.1, 128, 100),
    "resnet18": _residual(0.03, 32, 32),
    "resnet50": _residual(0.03, 64, 50),
    "convnet": _table(
        0.03, 3e-3, 128, hylo={"damping": 1e-2}, whitened=False, ggt={"lr": 3e-3, "graft": "adam", "window_size": 100}
    ),
    # A tied weight, as at the size of the paper, has its block at the head.
    "gpt2_small": _table(0.3, 1e-3, 32, hylo=HALF, decayed=DECAYED, layers={"tied": "head"}),
    "bert_qa": _BERT,
    "glue": _BERT,
}
_METHODS: tuple[MethodName, ...] = tuple(dict.fromkeys(name for table in _TABLES.values() for name in table))

FURTHER: dict[MethodName, dict[str, Settings]] = {
    name: {workload: table[name] for workload, table in _TABLES.items() if name in table} for name in _METHODS
}
"""Recipes by method and workload."""
