"""The optimizers that the benchmarks compare, and the recipe of each on each workload.

A method joins every command by adding one entry to :data:`METHODS`. A recipe is a set of constructor keywords that was
tuned for its workload at equal steps and constant learning rate; ``python -m benchmarks train --set ...`` is how. An
optimizer may have further entries, :data:`VARIANTS`, where two ways to use it are to be compared.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from benchmarks.workloads import WORKLOADS, WorkloadName
from secondorder import LowRank, TopK, create
from secondorder.factory import ALIASES, resolve

Setting = float | int | bool | str | None
Settings = Mapping[str, Setting]
MethodName = Literal[
    "sgd",
    "adamw",
    "kfac",
    "ekfac",
    "hylo",
    "mfac",
    "sparse_mfac",
    "ggt",
    "ekfac_natural",
    "ekfac_whiten",
    "kfac_adaptive",
    "ekfac_adaptive",
]
AliasName = Literal[
    "eigen", "inverse", "eigen_dp", "inverse_dp", "dp_kfac", "kgmfac", "lrmfac", "r1mfac", "ksggt", "kdggt",
    "kid", "kis", "sngd",
]  # fmt: skip
"""Names of :data:`secondorder.factory.ALIASES`."""
VARIANTS: tuple[MethodName, ...] = ("ekfac_natural", "ekfac_whiten", "kfac_adaptive", "ekfac_adaptive")
"""Further recipes of optimizers that have an entry: EKFAC with either exponent, and damping that watches the loss."""
WINDOW_METHODS: tuple[MethodName, ...] = ("mfac", "sparse_mfac", "ggt")
"""Methods that keep a window of past gradients."""


@dataclass(frozen=True)
class Method:
    """One optimizer: how it is built, and its keywords on each workload."""

    label: str
    """Its name in tables and plots."""
    construct: Callable[..., Optimizer]
    """Takes the model and the keywords of a recipe."""
    recipes: Mapping[WorkloadName, Settings]

    def settings(self, workload: WorkloadName | None, changes: Settings | None = None) -> Settings:
        """Return the keywords of a recipe.

        Args:
            workload: Whose recipe; None starts from the constructor's defaults.
            changes: Keywords that replace the recipe's.

        Returns:
            The keywords.

        Raises:
            ValueError: When there is no recipe for that workload.
        """
        if workload and workload not in self.recipes:
            known = ", ".join(self.recipes)
            raise ValueError(f"{self.label} has no recipe for {workload}, only for {known}: take --no-recipe --set ...")
        recipe = self.recipes[workload] if workload else {}
        return {**recipe, **(changes or {})}

    def needs_closure(self, workload: WorkloadName | None = None, changes: Settings | None = None) -> bool:
        """Return whether a recipe evaluates the loss within a step.

        Args:
            workload: Whose recipe; None starts from the constructor's defaults.
            changes: Keywords that replace the recipe's.

        Returns:
            Whether ``step`` has to be given a closure.
        """
        settings = self.settings(workload, changes)
        return any(settings.get(key) for key in _WITH_CLOSURE)

    def build(
        self, model: nn.Module, workload: WorkloadName | None = None, changes: Settings | None = None
    ) -> Optimizer:
        """Return a new optimizer of ``model`` with the recipe of a workload.

        Args:
            model: The model to train.
            workload: Whose recipe; None starts from the constructor's defaults.
            changes: Keywords that replace the recipe's.

        Returns:
            The optimizer.
        """
        return self.construct(model, **self.settings(workload, changes))


def _sgd(model: nn.Module, **settings: Any) -> Optimizer:
    return torch.optim.SGD(model.parameters(), **settings)


def _adamw(model: nn.Module, **settings: Any) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), **settings)


def _build(name: str, model: nn.Module, **settings: Any) -> Optimizer:
    """Return a method of this package.

    Args:
        name: Any name that ``secondorder.create`` takes.
        model: The model to train.
        **settings: Keywords of a recipe or of a command line.

    Returns:
        The optimizer.
    """
    method = resolve(name).method
    keywords = window_keywords(settings) if method in WINDOW_METHODS else layer_keywords(settings)
    if "kid_residual" in keywords:
        keywords["kid_residual"] = keywords["kid_residual"] or "none"  # a word here, nothing on a command line
    return create(name, model, **keywords)


# The last one judges no step, but takes the curvature of the loss from the outputs that a closure returns.
_WITH_CLOSURE = ("adaptive_damping", "reject_steps", "calibrate_damping", "quadratic_model")


def layer_keywords(settings: Settings) -> dict[str, Any]:
    """Turn the plain values of a recipe or a command line into the keywords of a layer method.

    Args:
        settings: Keywords of the constructor. ``skip_layers`` may be several rules with commas between them, and the
            name of a class of ``torch.nn`` stands for it: ``skip_layers=LayerNorm,Embedding,head``.

    Returns:
        Keywords of the constructor.
    """
    keywords: dict[str, Any] = dict(settings)
    if isinstance(keywords.get("skip_layers"), str):
        rules = [rule.strip() for rule in keywords["skip_layers"].split(",")]
        keywords["skip_layers"] = [_layer_type(rule) or rule for rule in rules if rule]
    return keywords


def _layer_type(name: str) -> type[nn.Module] | None:
    found = getattr(nn, name, None)
    return found if isinstance(found, type) and issubclass(found, nn.Module) else None


_TOP_K = tuple(field.name for field in fields(TopK))
_DTYPES = ("window_dtype", "value_dtype")
_BETAS = {"beta1": 0.0, "beta2": 1.0}  # GGT's own defaults


def window_keywords(settings: Settings) -> dict[str, Any]:
    """Turn the plain values of a recipe or a command line into the keywords of a window method.

    Args:
        settings: Keywords of the constructor, and among them: those of ``TopK`` (``density=0.01``,
            ``block_size=4096``, ``value_dtype=bfloat16``, ``error_bits=4``, ...), which ask for it; ``rank=4``, which
            asks for ``LowRank``; ``beta1`` and ``beta2`` for ``betas``. A dtype is given by its name.

    Returns:
        Keywords of the constructor.

    Raises:
        ValueError: When both compressions are asked for, or a dtype is not one of torch.
    """
    keywords: dict[str, Any] = {key: _dtype(key, value) if key in _DTYPES else value for key, value in settings.items()}
    top_k = {key: keywords.pop(key) for key in _TOP_K if key in keywords}
    rank = keywords.pop("rank", None)
    if top_k and rank is not None:
        raise ValueError(f"rank={rank} asks for LowRank and {', '.join(top_k)} for TopK: give one of them")
    if top_k:
        keywords["compression"] = TopK(**top_k)
    elif rank is not None:
        keywords["compression"] = LowRank(rank)
    betas = {key: keywords.pop(key, default) for key, default in _BETAS.items()}
    if not betas.keys().isdisjoint(settings):
        keywords["betas"] = (betas["beta1"], betas["beta2"])
    return keywords


def _dtype(key: str, value: Setting) -> torch.dtype | None:
    found = getattr(torch, value, None) if isinstance(value, str) else None
    if value is not None and not isinstance(found, torch.dtype):
        raise ValueError(f"{key} must be the name of a dtype, such as bfloat16, got {value!r}")
    return found


# Absolute damping would have to follow the gradients, which shrink by orders of magnitude during a run.
_DAMPED: Settings = {"damping": 1.0, "damping_mode": "relative"}

_DECAYED: Settings = {"weight_decay": 1e-2, "decoupled_weight_decay": True}

# Adam in the eigenbasis of the Fisher, refreshed often because a stale basis mixes what the scale tells apart.
_WHITENING: Settings = {
    "estimator": "running",
    "power": 0.5,
    "momentum_mode": "pre",
    "momentum": 0.9,
    "scale_decay": 0.95,
    "kl_clip": None,
    "factor_update_steps": 2,
    "inv_update_steps": 10,
    "fallback": "adamw",
}
_WHITEN: dict[WorkloadName, Settings] = {
    "digits": {"lr": 1e-2, "fallback_lr": 1e-2, **_WHITENING},
    "autoencoder": {"lr": 1e-3, "fallback_lr": 1e-3, **_WHITENING},
    "resnet20": {"lr": 1e-2, "fallback_lr": 3e-3, **_WHITENING},
    "chargpt": {"lr": 3e-3, "fallback_lr": 3e-3, **_WHITENING},
    "logistic": {"lr": 1e-3, "fallback_lr": 1e-3, **_WHITENING},
    "multi30k": {"lr": 3e-3, "fallback_lr": 3e-3, **_WHITENING},
    "unet": {"lr": 3e-3, "fallback_lr": 3e-3, **_WHITENING},
}
_NATURAL: dict[WorkloadName, Settings] = {
    "digits": {"lr": 0.02, "graft": "adam", "factor_update_steps": 5, "inv_update_steps": 10},
    "autoencoder": {"lr": 1e-3, "graft": "adam"},
    "resnet20": {"lr": 3e-3, "graft": "adam", **_DECAYED},
    "chargpt": {"lr": 3e-3, "graft": "adam", **_DECAYED},
    "logistic": {"lr": 1e-3, "graft": "adam"},
    "multi30k": {"lr": 1e-3, "graft": "adam"},
    "unet": {"lr": 3e-3, "graft": "adam"},
}

# Rate and momentum from the quadratic model of the loss, damping from how well it predicts.
_WATCHFUL: Settings = {
    "lr": 1.0,
    "quadratic_model": True,
    "adaptive_damping": True,
    "damping_interval": 5,
    "kl_clip": None,
    "factor_update_steps": 1,
    "inv_update_steps": 5,
}

_KFAC_ADAPTIVE: dict[WorkloadName, Settings] = {
    "digits": {**_WATCHFUL, "likelihood": "categorical", "damping": 0.01},
    "autoencoder": {**_WATCHFUL, "likelihood": "bernoulli", "damping": 0.1},
}
_EKFAC_ADAPTIVE: dict[WorkloadName, Settings] = {
    "digits": {**_WATCHFUL, "likelihood": "categorical", "damping": 0.01},
    "autoencoder": {**_WATCHFUL, "likelihood": "bernoulli", "damping": 1.0, "scale_decay": 0.8},
}

# A tenth of a batch of 128 on one rank is little; on many ranks the rows of all of them count.
_HALF: Settings = {"rank_fraction": 0.5, "damping": 1e-3}

METHODS: dict[MethodName, Method] = {
    "sgd": Method(
        "SGD",
        _sgd,
        {
            "digits": {"lr": 0.1, "momentum": 0.9},
            "autoencoder": {"lr": 3e-3, "momentum": 0.9},
            "resnet20": {"lr": 0.1, "momentum": 0.9},
            "chargpt": {"lr": 0.3, "momentum": 0.9},
            "logistic": {"lr": 0.01, "momentum": 0.9},
            "multi30k": {"lr": 0.1, "momentum": 0.9},
            "unet": {"lr": 0.1, "momentum": 0.9},
        },
    ),
    "adamw": Method(
        "AdamW",
        _adamw,
        {
            "digits": {"lr": 1e-2},
            "autoencoder": {"lr": 1e-3},
            "resnet20": {"lr": 3e-3},
            "chargpt": {"lr": 3e-3},
            "logistic": {"lr": 1e-3},
            "multi30k": {"lr": 1e-3},
            "unet": {"lr": 3e-3},
        },
    ),
    "kfac": Method(
        "KFAC",
        partial(_build, "kfac"),
        {
            "digits": {
                "lr": 0.02,
                "graft": "adam",
                "inverse_method": "cholesky",
                "factor_update_steps": 5,
                "inv_update_steps": 10,
            },
            "autoencoder": {"lr": 1e-3, "graft": "adam"},
            "resnet20": {"lr": 3e-3, "graft": "adam", **_DECAYED},
            "chargpt": {"lr": 3e-3, "graft": "adam", **_DECAYED},
            "logistic": {"lr": 1e-3, "graft": "adam"},
            "multi30k": {"lr": 1e-3, "graft": "adam"},
            "unet": {"lr": 3e-3, "graft": "adam"},
        },
    ),
    "ekfac": Method(
        "EKFAC",
        partial(_build, "ekfac"),
        # The exponent belongs to the problem: 1/2 where the noise of the gradient rules.
        {name: (_WHITEN if name in {"resnet20", "chargpt", "multi30k"} else _NATURAL)[name] for name in WORKLOADS},
    ),
    "hylo": Method(
        "HyLo",
        partial(_build, "hylo"),
        {
            "digits": {"lr": 0.02, "graft": "adam", "damping": 1e-2},
            # The curvature of its layers differs a thousandfold: one λ cannot fit them all.
            "autoencoder": {"lr": 1e-3, "graft": "adam", "damping": 1.0, "damping_mode": "relative"},
            "resnet20": {"lr": 3e-3, "graft": "adam", **_HALF, **_DECAYED},
            "chargpt": {"lr": 3e-3, "graft": "adam", **_HALF, **_DECAYED},
            "logistic": {"lr": 1e-3, "graft": "adam"},
            "multi30k": {"lr": 1e-3, "graft": "adam", **_HALF, **_DAMPED},
            # Eight examples a step are few enough to keep them all.
            "unet": {"lr": 0.1, "damping": 0.1, "rank_fraction": 1.0},
        },
    ),
    "mfac": Method(
        "M-FAC",
        partial(_build, "mfac"),
        {
            "digits": {"lr": 0.3, "momentum": 0.9, "graft": "sgd", "window_size": 32, **_DAMPED},
            "autoencoder": {"lr": 1e-3, "graft": "adam", "window_size": 128, **_DAMPED},
            "resnet20": {"lr": 3e-3, "graft": "adam", "window_size": 256, **_DAMPED},
            "chargpt": {"lr": 3e-3, "graft": "adam", "window_size": 128, **_DAMPED},
            "logistic": {"lr": 1e-3, "graft": "adam", "window_size": 100, **_DAMPED},
            "multi30k": {"lr": 1e-3, "graft": "adam", "window_size": 32, **_DAMPED},
            "unet": {"lr": 3e-3, "graft": "adam", "window_size": 100, **_DAMPED},
        },
    ),
    "sparse_mfac": Method(
        "sparse M-FAC",
        partial(_build, "sparse_mfac"),
        {
            "digits": {"lr": 1e-2, "graft": "adam", "window_size": 32, **_DAMPED},
            "autoencoder": {"lr": 1e-3, "graft": "adam", "window_size": 128, **_DAMPED},
            "resnet20": {"lr": 3e-3, "graft": "adam", "window_size": 256, **_DAMPED},
            "chargpt": {"lr": 3e-3, "graft": "adam", "window_size": 128, **_DAMPED},
            "logistic": {"lr": 1e-3, "graft": "adam", "window_size": 100, **_DAMPED},
            "multi30k": {"lr": 1e-3, "graft": "adam", "window_size": 32, **_DAMPED},
            "unet": {"lr": 3e-3, "graft": "adam", "window_size": 100, **_DAMPED},
        },
    ),
    "ggt": Method(
        "GGT",
        partial(_build, "ggt"),
        {
            "digits": {"lr": 1e-2, "graft": "adam", "window_size": 128},
            "autoencoder": {"lr": 1e-3, "graft": "adam", "window_size": 100},
            "resnet20": {"lr": 3e-3, "graft": "adam", "window_size": 100},
            "chargpt": {"lr": 3e-3, "graft": "adam", "window_size": 100},
            "logistic": {"lr": 1.0, "eps": 1e-5, "window_size": 100},
            "multi30k": {"lr": 1e-3, "graft": "adam", "window_size": 32},
            "unet": {"lr": 3e-3, "graft": "adam", "window_size": 100},
        },
    ),
    "ekfac_natural": Method("EKFAC, power 1", partial(_build, "ekfac"), _NATURAL),
    "ekfac_whiten": Method("EKFAC, power 1/2", partial(_build, "ekfac"), _WHITEN),
    "kfac_adaptive": Method("KFAC, adaptive", partial(_build, "kfac"), _KFAC_ADAPTIVE),
    "ekfac_adaptive": Method("EKFAC, adaptive", partial(_build, "ekfac"), _EKFAC_ADAPTIVE),
}


def find_method(name: MethodName | AliasName) -> Method:
    """Return a method by any of its names.

    Args:
        name: Key of :data:`METHODS`, or another name that ``secondorder.create`` takes, which then stands for its
            options in place of the recipe's.

    Returns:
        The method.
    """
    if name in METHODS:
        return METHODS[name]
    alias = ALIASES[name]
    known = next(method for key, method in METHODS.items() if key == alias.method)
    kept = {
        workload: {key: value for key, value in recipe.items() if key not in alias.options}
        for workload, recipe in known.recipes.items()
    }
    return Method(f"{known.label} ({name})", partial(_build, name), kept)
