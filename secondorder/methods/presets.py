"""Presets: the best known settings by name, for users of other optimizers and for several kinds of problems."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from secondorder.config import AdaptationOptions, FallbackOptions, RefreshOptions, RowOptions, ScaleOptions
from secondorder.methods.ekfac import EKFAC
from secondorder.methods.groups import matrix_groups
from secondorder.methods.hylo import HyLo
from secondorder.methods.kfac import KFAC
from secondorder.optimizer import SecondOrderOptimizer

#: Keywords of :func:`matrix_groups` that a preset with such groups accepts.
_OF_GROUPS = tuple(name for name in inspect.signature(matrix_groups).parameters if name not in ("model", "lr"))
_MATRICES: Mapping[str, Any] = {
    "momentum": 0.8,
    "nesterov": True,
    "momentum_mode": "pre",
    "kl_clip": None,
    "betas": (0.9, 0.95),
}
_QUADRATIC: Mapping[str, Any] = {
    "adaptation": AdaptationOptions(quadratic_model=True, likelihood="categorical"),
    "kl_clip": None,
    "factor_update_steps": 1,
    "inv_update_steps": 5,
}


@dataclass(frozen=True)
class Preset:
    """A named constructor call. ``str(preset)`` returns the call.

    Attributes:
        name: The name to pass to :func:`secondorder.create`.
        summary: One sentence on when to use the preset.
        method: The class that the preset builds.
        lr: The default learning rate.
        options: The other keywords of the constructor.
        needs: What the training loop has to do beyond ``loss.backward()`` and ``step()``; empty if nothing.
        measured: Page and section of the documentation with measurements.
        splits_matrices: Whether the preset uses the parameter groups of :func:`secondorder.matrix_groups`.
        others: Further options of the group of other parameters, to which those of the caller are added.
    """

    name: str
    summary: str
    method: type[SecondOrderOptimizer]
    lr: float
    options: Mapping[str, Any] = field(default_factory=dict)
    needs: str = ""
    measured: str = "docs/choose-a-method.md, Cost and result of each choice"
    splits_matrices: bool = False
    others: Mapping[str, Any] = field(default_factory=dict)

    def build(self, model: nn.Module, lr: float | Tensor | None = None, **overrides: Any) -> SecondOrderOptimizer:
        """Build the optimizer.

        Args:
            model: The model.
            lr: Learning rate. If None, it is that of the preset.
            **overrides: Keywords of the constructor, which replace those of the preset. The presets for users of Muon
                also accept the keywords of :func:`secondorder.matrix_groups`.

        Returns:
            The optimizer, equal to the one that the printed call builds.

        Raises:
            TypeError: If the constructor does not have a keyword, or ``model`` is not a module.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"the preset {self.name!r} needs the model itself, got {type(model).__name__}; to use your own "
                f"parameter groups, call the constructor: {self}"
            )
        of_groups, keywords = self._arguments(lr, overrides)
        construct: Callable[..., SecondOrderOptimizer] = self.method
        if not self.splits_matrices:
            return construct(model, **keywords)
        return construct(matrix_groups(model, **of_groups), module=model, **keywords)

    def call(self, lr: float | Tensor | None = None, **overrides: Any) -> str:
        """Return the call that :meth:`build` makes, as Python code with the variable ``model``."""
        of_groups, keywords = self._arguments(lr, overrides)
        model = f"matrix_groups(model, {_written(of_groups)}), module=model" if self.splits_matrices else "model"
        return f"{self.method.__name__}({model}, {_written(keywords)})"

    def __str__(self) -> str:
        return self.call()

    def _arguments(self, lr: float | Tensor | None, overrides: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
        """Return the keywords of the groups and the keywords of the constructor."""
        rate = self.lr if lr is None else lr
        if not self.splits_matrices:
            return {}, {"lr": rate, **self.options, **overrides}
        of_groups = {"lr": rate, **{key: overrides[key] for key in _OF_GROUPS if key in overrides}}
        if of_groups.get("others_lr") is None:
            of_groups["others_lr"] = 0.5 * rate
        others = of_groups["others_lr"]
        of_groups |= {"others": {**self.others, **(overrides.get("others") or {})}} if self.others else {}
        rest = {key: value for key, value in overrides.items() if key not in _OF_GROUPS}
        return of_groups, {"lr": rate, **self.options, "fallback": FallbackOptions("adamw", lr=float(others)), **rest}


class Presets(dict[str, Preset]):
    """All presets by name. ``print`` describes each of them."""

    def __str__(self) -> str:
        return "\n\n".join(_described(preset) for preset in self.values())


def _described(preset: Preset) -> str:
    lines = [preset.name, f"    {preset.summary}", f"    {preset}"]
    if preset.needs:
        lines.append(f"    The training loop {preset.needs}.")
    return "\n".join([*lines, f"    Measured: {preset.measured}"])


def _written(keywords: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in keywords.items())


_ALL = (
    Preset(
        "from_adamw",
        "For a script that was tuned for AdamW: its learning rate, weight decay and schedule carry over.",
        KFAC,
        1e-3,
        {"weight_decay": 1e-2, "graft": "adamw", "budget": 2.0},
        measured="docs/evidence.md, One changed line",
    ),
    Preset(
        "from_adam",
        "For a script that was tuned for Adam, whose weight decay is part of the gradient.",
        KFAC,
        1e-3,
        {"graft": "adam", "budget": 2.0},
    ),
    Preset(
        "from_sgd",
        "For a script that was tuned for SGD with momentum: its learning rate, weight decay and schedule carry over.",
        KFAC,
        0.1,
        {"momentum": 0.9, "graft": "sgd", "budget": 2.0},
        measured="docs/evidence.md, One changed line",
    ),
    Preset(
        "from_muon",
        "For transformers and convolutional networks that you would train with Muon, if steps matter more than time.",
        EKFAC,
        0.02,
        {
            **_MATRICES,
            "estimator": "running",
            "power": 0.5,
            "scale": ScaleOptions(decay=0.95),
            "factor_update_steps": 10,
            "inv_update_steps": 50,
            "refresh": RefreshOptions(warmup="doubling"),
        },
        splits_matrices=True,
    ),
    Preset(
        "orthogonal_momentum",
        "For the networks of from_muon, if time or memory matters more than steps: a variant of Muon, and AdamW.",
        EKFAC,
        0.02,
        {**_MATRICES, "inv_update_steps": 0},
        splits_matrices=True,
        others={"graft": "adamw", "momentum_mode": "post", "nesterov": False},
    ),
    Preset(
        "large_batch",
        "For large batches and losses that are ill-conditioned rather than noisy; there is no learning rate to tune. "
        "Losses other than the cross entropy need another likelihood.",
        KFAC,
        1.0,
        {**_QUADRATIC, "damping": 0.3, "damping_mode": "relative", "factor_decay": 0.8},
        needs="calls step(closure), with a closure that returns the loss and the outputs",
    ),
    Preset(
        "least_squares",
        "For regression with a squared error on the same data at every step; there is no learning rate to tune.",
        EKFAC,
        1.0,
        {
            **_QUADRATIC,
            "adaptation": AdaptationOptions(adaptive_damping=True, quadratic_model=True, likelihood="gaussian"),
            "damping": 0.03,
            "fisher": "exact",
            "scale": ScaleOptions(decay=0.8),
        },
        needs="calls step(closure) with a closure that calls observe(outputs, 'gaussian') before backward() and "
        "returns the loss and the outputs",
    ),
    Preset(
        "physics_informed",
        "For physics-informed networks and other squared errors with one output per point.",
        HyLo,
        0.3,
        {
            "momentum": 0.0,
            "damping": 0.01,
            "kl_clip": 0.3,
            "update_steps": 1,
            "mode": "kis",
            "rows": RowOptions(sampling="uniform"),
            "rank_fraction": 0.25,
            "approx": "expand",
            "fisher": "exact",
        },
        needs='calls observe(outputs, "gaussian") between the forward and backward pass, and decays the learning rate',
        measured="docs/evidence.md, A physics-informed network",
    ),
    Preset(
        "low_memory",
        "For a model that nearly fills the memory with AdamW; its state is little larger than AdamW's on most models.",
        HyLo,
        1e-3,
        {"weight_decay": 1e-2, "graft": "adamw"},
    ),
)

#: The presets by name.
PRESETS: Mapping[str, Preset] = MappingProxyType({preset.name: preset for preset in _ALL})


def presets() -> Presets:
    """Return the presets by name, each with its constructor call.

    ``print(secondorder.presets())`` shows all of them, and ``secondorder.create(name, model, lr=...)`` builds one.

    Returns:
        The presets, in a new dictionary that you may change.

    Example:
        >>> import secondorder
        >>> print(secondorder.presets()["from_adamw"])
        KFAC(model, lr=0.001, weight_decay=0.01, graft='adamw', budget=2.0)
    """
    return Presets(PRESETS)
