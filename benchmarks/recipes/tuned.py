"""Recipes that were tuned here, for the sizes ``smoke`` and ``cpu``: equal steps, constant rate, two cores.

``python -m benchmarks train --set ...`` is how; what they reached stands in ``docs/recipes.md`` and
``docs/evidence.md``.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from benchmarks.recipes.building import adamw, second_order, sgd
from benchmarks.recipes.further import FURTHER
from benchmarks.recipes.shared import DAMPED, DECAYED, HALF, OFTEN, SPECTRAL, WATCHFUL, WHITENING
from benchmarks.recipes.types import Method, MethodName, Recipe, Rule, Settings

TUNED = "tuned here"
"""Source of these recipes: keywords of each method were tuned workload by workload."""
_BOTH = ("lr", "fallback_lr")


def tuned(
    tables: Mapping[str, Settings], rule: Rule = "sqrt", searched: tuple[str, ...] = ("lr",), source: str = TUNED
) -> dict[str, Recipe]:
    return {name: Recipe(dict(table), source, rule=rule, searched=searched) for name, table in tables.items()}


_WHITEN: dict[str, Settings] = {
    "digits": {"lr": 1e-2, "fallback_lr": 1e-2, **WHITENING},
    "autoencoder": {"lr": 1e-3, "fallback_lr": 1e-3, **WHITENING},
    "resnet20": {"lr": 1e-2, "fallback_lr": 3e-3, **WHITENING, "factor_batch_size": 32},
    "chargpt": {"lr": 3e-3, "fallback_lr": 3e-3, **WHITENING, "factor_positions": 32},
    "logistic": {"lr": 1e-3, "fallback_lr": 1e-3, **WHITENING},
    "multi30k": {"lr": 3e-3, "fallback_lr": 3e-3, **WHITENING, "factor_batch_size": 32},
    "unet": {"lr": 3e-3, "fallback_lr": 3e-3, **WHITENING, "factor_batch_size": 2},
}
_NATURAL: dict[str, Settings] = {
    "digits": {"lr": 0.02, "graft": "adam", "factor_update_steps": 5, "inv_update_steps": 10},
    "autoencoder": {"lr": 1e-3, "graft": "adam"},
    "resnet20": {"lr": 3e-3, "graft": "adam", **DECAYED},
    "chargpt": {"lr": 3e-3, "graft": "adam", **DECAYED},
    "logistic": {"lr": 1e-3, "graft": "adam"},
    "multi30k": {"lr": 1e-3, "graft": "adam"},
    "unet": {"lr": 3e-3, "graft": "adam"},
}

_KFAC_ADAPTIVE: dict[str, Settings] = {
    "digits": {**WATCHFUL, "likelihood": "categorical", "damping": 0.01},
    # Damping that follows the curvature needs no watching here, and a step less of the model. Sixty steps change the
    # curvature so much that a mean over twenty of them is late.
    "autoencoder": {
        **WATCHFUL,
        "likelihood": "bernoulli",
        "adaptive_damping": False,
        "damping": 0.3,
        "damping_mode": "relative",
        "factor_decay": 0.8,
    },
}
_EKFAC_ADAPTIVE: dict[str, Settings] = {
    "digits": {**WATCHFUL, "likelihood": "categorical", "damping": 0.01},
    "autoencoder": {**WATCHFUL, "likelihood": "bernoulli", "damping": 1.0, "scale_decay": 0.8},
}

# As published for 164 epochs, with half the rows: ahead of a graft onto Adam in the first hundreds of steps, too.
_PUBLISHED_WINDOW: Settings = {
    "lr": 1e-3, "damping": 1e-4, "weight_decay": 1e-4, "window_size": 512, "scale": "window",
}  # fmt: skip

_NO_MATRICES = "Embedding,LayerNorm,head"
_ORTHOGONAL: dict[str, Settings] = {
    "digits": {"lr": 0.03, "fallback_lr": 0.01, **SPECTRAL, "plain_layers": "7", "plain_lr": 0.01},
    "resnet20": {
        "lr": 0.03,
        "fallback_lr": 0.01,
        **SPECTRAL,
        "plain_layers": "BatchNorm2d,Linear",
        "plain_lr": 0.01,
        "factor_batch_size": 16,
    },
    "chargpt": {
        "lr": 0.06,
        "fallback_lr": 0.02,
        **SPECTRAL,
        "inv_update_steps": 16,
        "plain_layers": _NO_MATRICES,
        "plain_lr": 0.02,
        "factor_positions": 32,
    },
    "multi30k": {
        "lr": 0.02,
        "fallback_lr": 0.01,
        **SPECTRAL,
        "orthogonal_dtype": "bfloat16",
        "factor_update_steps": 4,
        "inv_update_steps": 20,
        "plain_layers": _NO_MATRICES,
        "plain_lr": 0.01,
        "factor_batch_size": 32,
    },
    "unet": {
        "lr": 0.02,
        "fallback_lr": 0.01,
        **SPECTRAL,
        "orthogonal_dtype": "bfloat16",
        "plain_layers": "BatchNorm2d",
        "plain_lr": 0.01,
        "factor_batch_size": 2,
    },
}

_FIRST: dict[MethodName, Method] = {
    "sgd": Method(
        "SGD",
        sgd,
        tuned(
            {
                "digits": {"lr": 0.1, "momentum": 0.9},
                "autoencoder": {"lr": 3e-3, "momentum": 0.9},
                "resnet20": {"lr": 0.1, "momentum": 0.9},
                "chargpt": {"lr": 0.3, "momentum": 0.9},
                "logistic": {"lr": 0.01, "momentum": 0.9},
                "multi30k": {"lr": 0.1, "momentum": 0.9},
                "unet": {"lr": 0.1, "momentum": 0.9},
            },
            "linear",
        ),
        order="first",
        ours=False,
    ),
    "adamw": Method(
        "AdamW",
        adamw,
        tuned(
            {
                "digits": {"lr": 1e-2},
                "autoencoder": {"lr": 1e-3},
                "resnet20": {"lr": 3e-3},
                "chargpt": {"lr": 3e-3},
                "logistic": {"lr": 1e-3},
                "multi30k": {"lr": 1e-3},
                "unet": {"lr": 3e-3},
            }
        ),
        order="first",
        ours=False,
    ),
    "kfac": Method(
        "KFAC",
        partial(second_order, "kfac"),
        tuned(
            {
                "digits": {
                    "lr": 0.02,
                    "graft": "adam",
                    "inverse_method": "cholesky",
                    "factor_update_steps": 5,
                    "inv_update_steps": 10,
                },
                "autoencoder": {"lr": 1e-3, "graft": "adam"},
                "resnet20": {"lr": 3e-3, "graft": "adam", **DECAYED, **OFTEN},
                "chargpt": {"lr": 3e-3, "graft": "adam", **DECAYED, **OFTEN, "factor_positions": 32},
                "logistic": {"lr": 1e-3, "graft": "adam"},
                "multi30k": {"lr": 1e-3, "graft": "adam", **OFTEN, "factor_batch_size": 32},
                "unet": {"lr": 3e-3, "graft": "adam", **OFTEN, "factor_batch_size": 2},
            }
        ),
    ),
    "ekfac": Method(
        "EKFAC",
        partial(second_order, "ekfac"),
        # The exponent belongs to the problem: 1/2 where the noise of the gradient rules.
        tuned(
            {**_NATURAL, **{name: _WHITEN[name] for name in ("resnet20", "chargpt", "multi30k", "unet")}},
            searched=_BOTH,
        ),
    ),
    "hylo": Method(
        "HyLo",
        partial(second_order, "hylo"),
        tuned(
            {
                "digits": {"lr": 0.02, "graft": "adam", "damping": 1e-2},
                # The curvature of its layers differs a thousandfold: one λ cannot fit them all.
                "autoencoder": {"lr": 1e-3, "graft": "adam", "damping": 1.0, "damping_mode": "relative"},
                "resnet20": {"lr": 3e-3, "graft": "adam", **HALF, **DECAYED},
                "chargpt": {"lr": 3e-3, "graft": "adam", **HALF, **DECAYED},
                "logistic": {"lr": 1e-3, "graft": "adam"},
                "multi30k": {"lr": 1e-3, "graft": "adam", **HALF, **DAMPED},
                # Eight examples a step are few enough to keep them all.
                "unet": {"lr": 0.1, "damping": 0.1, "rank_fraction": 1.0},
            }
        ),
    ),
    "mfac": Method(
        "M-FAC",
        partial(second_order, "mfac"),
        tuned(
            {
                "digits": {"lr": 0.3, "momentum": 0.9, "graft": "sgd", "window_size": 32, **DAMPED},
                "autoencoder": {"lr": 1e-3, "graft": "adam", "window_size": 128, **DAMPED},
                "resnet20": _PUBLISHED_WINDOW,
                "chargpt": {"lr": 3e-3, "graft": "adam", "window_size": 128, **DAMPED},
                "logistic": {"lr": 1e-3, "graft": "adam", "window_size": 100, **DAMPED},
                "multi30k": {"lr": 1e-3, "graft": "adam", "window_size": 32, **DAMPED},
                "unet": {"lr": 3e-3, "graft": "adam", "window_size": 100, **DAMPED},
            }
        ),
    ),
    "sparse_mfac": Method(
        "sparse M-FAC",
        partial(second_order, "sparse_mfac"),
        tuned(
            {
                "digits": {"lr": 1e-2, "graft": "adam", "window_size": 32, **DAMPED},
                "autoencoder": {"lr": 1e-3, "graft": "adam", "window_size": 128, **DAMPED},
                "resnet20": _PUBLISHED_WINDOW,
                "chargpt": {"lr": 3e-3, "graft": "adam", "window_size": 128, **DAMPED},
                "logistic": {"lr": 1e-3, "graft": "adam", "window_size": 100, **DAMPED},
                "multi30k": {"lr": 1e-3, "graft": "adam", "window_size": 32, **DAMPED},
                "unet": {"lr": 3e-3, "graft": "adam", "window_size": 100, **DAMPED},
            }
        ),
    ),
    "ggt": Method(
        "GGT",
        partial(second_order, "ggt"),
        tuned(
            {
                "digits": {"lr": 1e-2, "graft": "adam", "window_size": 128},
                "autoencoder": {"lr": 1e-3, "graft": "adam", "window_size": 100},
                "resnet20": {"lr": 3e-3, "graft": "adam", "window_size": 100},
                "chargpt": {"lr": 3e-3, "graft": "adam", "window_size": 100},
                "logistic": {"lr": 1.0, "eps": 1e-5, "window_size": 100},
                "multi30k": {"lr": 1e-3, "graft": "adam", "window_size": 32},
                "unet": {"lr": 3e-3, "graft": "adam", "window_size": 100},
            }
        ),
    ),
    "ekfac_natural": Method("EKFAC, power 1", partial(second_order, "ekfac"), tuned(_NATURAL, searched=_BOTH)),
    "ekfac_whiten": Method("EKFAC, power 1/2", partial(second_order, "ekfac"), tuned(_WHITEN, searched=_BOTH)),
    "kfac_adaptive": Method(
        "KFAC, quadratic model", partial(second_order, "kfac"), tuned(_KFAC_ADAPTIVE, "constant", ("damping",))
    ),
    "ekfac_adaptive": Method(
        "EKFAC, quadratic model", partial(second_order, "ekfac"), tuned(_EKFAC_ADAPTIVE, "constant", ("damping",))
    ),
    "ekfac_orthogonal": Method(
        "EKFAC, orthogonal",
        partial(second_order, "ekfac"),
        tuned(_ORTHOGONAL, searched=("lr", "fallback_lr", "plain_lr")),
    ),
}


def _with_further(name: MethodName, method: Method) -> Method:
    known = next(iter(method.recipes.values()))
    more = tuned(FURTHER.get(name, {}), known.rule, known.searched)
    return replace(method, recipes={**method.recipes, **more})


OURS: dict[MethodName, Method] = {name: _with_further(name, method) for name, method in _FIRST.items()}
