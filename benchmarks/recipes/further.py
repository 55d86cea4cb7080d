"""Recipes of workloads that were tuned by a few short runs at most, based on the usual rates of AdamW.

The keywords at the beginning are also those of other recipes.
"""

from collections.abc import Mapping

from benchmarks.recipes.building import settings_of
from benchmarks.recipes.types import MethodName, Settings
from secondorder.methods.presets import PRESETS

# Absolute damping would have to adapt to the gradients, which shrink by orders of magnitude during a run.
DAMPED: Settings = {"damping": 1.0, "damping_mode": "relative"}

DECAYED: Settings = {"weight_decay": 1e-2, "decoupled_weight_decay": True}

# Runs of a few hundred steps need recent factors. For a convolution, a part of the batch is sufficient.
OFTEN: Settings = {"factor_update_steps": 5, "inv_update_steps": 10, "refresh_warmup": False, "factor_batch_size": 32}

# Adam in the eigenbasis of the Fisher, which is refreshed often because a stale basis mixes directions.
WHITENING: Settings = settings_of(
    "estimator=running power=0.5 momentum_mode=pre momentum=0.9 scale_decay=0.95 kl_clip=none "
    "factor_update_steps=2 inv_update_steps=10 fallback=adamw"
)
# Whitened steps with a uniform spectrum. The running means are short because the runs are short.
SPECTRAL: Settings = {
    **WHITENING,
    **settings_of("nesterov=true momentum=0.8 plain_momentum=0.9 refresh_warmup=true fallback_beta2=0.95"),
}
# The quadratic model of the loss determines rate and momentum, and the error of its predictions the damping.
WATCHFUL: Settings = settings_of(
    "lr=1.0 quadratic_model=true adaptive_damping=true damping_interval=5 kl_clip=none factor_update_steps=1 "
    "inv_update_steps=5"
)

# The default of a tenth is few rows for a batch of 128 on one rank. With many ranks, the rows of all of them count.
HALF: Settings = {"rank_fraction": 0.5, "damping": 1e-3}


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
        "sgd": {"lr": sgd, "momentum": 0.9}, "adamw": {"lr": rate}, "kfac": natural,
        "ekfac": whitening if whitened else natural, "ekfac_natural": natural, "ekfac_whiten": whitening,
        "hylo": {**natural, **hylo}, "mfac": {**grafted, "window_size": window, **DAMPED},
        "sparse_mfac": {**grafted, "window_size": window, **DAMPED}, "ggt": ggt or {**grafted, "window_size": window},
    }  # fmt: skip


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
