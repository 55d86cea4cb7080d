"""The recipe of the methods with Kronecker factors: defaults, checks of combined options, and warnings."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from secondorder import options
from secondorder.adaptation.trust_region import TrustRegion
from secondorder.config import AdaptationOptions, FisherOptions
from secondorder.curvature import factors
from secondorder.curvature.block import Block
from secondorder.frames import depth_of_caller
from secondorder.methods.arguments import expanded
from secondorder.methods.defaults import AUTO, resolved_damping, with_step_size
from secondorder.methods.layers import LayerRecipe, LayerRules, layer_options
from secondorder.parameters import Group
from secondorder.preconditioners.layers import LayerPreconditioner
from secondorder.runtime import some_of
from secondorder.update import Update

#: Default intervals.
INTERVALS = {"factor_update_steps": 10, "inv_update_steps": 100}

Exclusion = Callable[[Mapping[str, Any], list[Group]], None]
_PLAIN = (bool, int, float, str, type(None))


class FactoredRules(LayerRules):
    """Rules about the options of a group with factors.

    Args:
        given: The arguments of the constructor.
        exclusions: Functions that reject options that exclude each other.

    Attributes:
        adaptation: How steps are judged by the loss.
        chooses_bound: Whether the constructor chooses ``max_factor_dim``.
        device_type: Type of the device for which it is chosen.
    """

    def __init__(self, given: Mapping[str, Any], *exclusions: Exclusion) -> None:
        self.adaptation: AdaptationOptions = given["adaptation"]
        by_default = given["damping_mode"] is None
        super().__init__(partial(_exclude, adaptation=self.adaptation), *exclusions, mode_by_default=by_default)
        self.fisher: FisherOptions = given["fisher"]
        self.chooses_bound = given["max_factor_dim"] == AUTO
        self.device_type = _device_type(given)

    def bound(self, group: Mapping[str, Any]) -> int:
        """Return the number that ``max_factor_dim="auto"`` means."""
        way = "leading" if group.get("inverse_rank") is not None else str(group.get("inverse_method", "eigen"))
        return factors.default_bound(self.device_type, way)

    def choose_for(self, device_type: str, groups: Iterable[Group]) -> None:
        """Choose ``max_factor_dim`` of groups for a type of device that is not that of the model."""
        self.device_type = device_type
        for group in groups if self.chooses_bound else ():
            group["max_factor_dim"] = self.bound(group)

    def complete(self, given: dict[str, Any], defaults: Mapping[str, Any], groups: list[Group]) -> dict[str, Any]:
        """Return an added group without options that are None, and with options that depend on others."""
        found = super().complete(given, defaults, groups)
        for name in INTERVALS:
            if name in found and found[name] is None:
                del found[name]
        another_way = self.chooses_bound and not found.keys().isdisjoint(("inverse_method", "inverse_rank"))
        if found.get("max_factor_dim", AUTO if another_way else None) == AUTO:
            found["max_factor_dim"] = self.bound({**defaults, **found})
        return found

    def added(self, groups: list[Group], steps: int) -> None:
        """Add the entries that store the results of judged steps. A group that is added later keeps its damping."""
        if self.adaptation.calibrate_damping:
            groups[-1].setdefault("damping_calibrated", steps > 0)
        if self.adaptation.reject_steps:
            groups[-1].setdefault("rejected_in_a_row", groups[0].get("rejected_in_a_row", 0))

    def facts(self) -> dict[str, list[str]]:
        """Return the settings that must be equal on all ranks in addition to the options of groups, as text."""
        found = {"fisher": self.fisher.kind, "samples": self.fisher.samples, **vars(self.adaptation)}
        words = [f"{k}={v!r}" if isinstance(v, _PLAIN) else f"{k}={type(v).__name__}" for k, v in found.items()]
        return {"Fisher and adaptation": words}


def _exclude(group: Mapping[str, Any], groups: list[Group], adaptation: AdaptationOptions) -> None:
    """Reject options that exclude each other in all methods with factors."""
    if adaptation.quadratic_model:
        clashes = {
            f"graft={group['graft']!r}": group["graft"] is not None,
            f"inner={group['inner']!r}": options.is_adam(group["inner"]),
            "nesterov=True": group["nesterov"],
        }
        options.refuse(clashes, "quadratic_model=True chooses the learning rate and the momentum itself: drop")
    if group["orthogonalize"]:
        judged = {
            "adaptive_damping=True": adaptation.adaptive_damping,
            "calibrate_damping=True": adaptation.calibrate_damping,
            "quadratic_model=True": adaptation.quadratic_model,
        }
        if options.is_adam(group["inner"]):
            raise ValueError(
                f"orthogonalize=True makes all singular values equal, inner={group['inner']!r} undoes it: drop one"
            )
        options.refuse(judged, "orthogonalize=True takes steps that the quadratic model cannot describe: drop")
    if group["approx"] == "reduce" and group["factor_positions"] is not None:
        raise ValueError("approx='reduce' averages over all positions: drop factor_positions, or use approx='expand'")


#: Checks of the options that all methods with factors have.
FACTOR_CHECKS: dict[str, options.Check] = {
    "damping": options.number(0.0, low_open=True),
    "damping_mode": options.choice("absolute", "relative"),
    "factor_decay": options.number(0.0, 1.0),
    "factor_update_steps": options.whole(1),
    "inv_update_steps": options.whole(0),
    "approx": options.choice("expand", "reduce"),
    "loss_reduction": options.choice("mean", "sum"),
    "loss_terms": options.number(0.0, low_open=True),
    "kl_clip": options.number(0.0, low_open=True, optional=True),
    "power": options.number(0.0, 1.0, low_open=True),
    "orthogonalize": options.flag,
    "max_factor_dim": options.optional_whole(1),
    "weighting": options.choice("samples", "update"),
    "burnin_steps": options.whole(0),
    "decay_per_step": options.flag,
    "factor_batch_size": options.optional_whole(1),
    "factor_positions": options.optional_whole(1),
    "weight_decay_in_curvature": options.flag,
    "deterministic_seed": options.whole(0),
}


#: Fields of option objects that no method with factors has.
FACTORED_ABSENT = "batch.size", "fallback.betas", "fallback.eps"


@dataclass(frozen=True)
class FactorRecipe(LayerRecipe):
    """The recipe of a method with factors A and G per layer.

    Attributes:
        rules: Rules about several options of a group.
    """

    rules: FactoredRules

    def defaults(self, given: Mapping[str, Any], checks: Mapping[str, options.Check]) -> Group:
        """Return the default options of groups, with all options that were not set resolved."""
        found = options.from_arguments(given, checks)
        for name, steps in INTERVALS.items():
            found[name] = steps if found[name] is None else found[name]
        if self.rules.chooses_bound:
            found["max_factor_dim"] = self.rules.bound(given)
        return found | resolved_damping(given, absolute=1e-3, relative=10.0, always_relative=True)

    def judge(self, preconditioner: LayerPreconditioner[Any], update: Update) -> TrustRegion:
        """Return the object that judges steps by the loss."""
        return TrustRegion(self.rules.adaptation, preconditioner, update)


def factored_arguments(given: Mapping[str, Any], method: type) -> dict[str, Any]:
    """Return the arguments of a constructor and the fields of objects by key, with the size of its steps resolved."""
    found = expanded(given, method)
    # A quadratic model determines the length of its steps. Momentum before the preconditioner fixes it too.
    judged: bool = found["adaptation"].quadratic_model
    own_size = judged or found.get("momentum_mode") == "pre"
    return with_step_size(found, rate=1.0 if judged else 0.1, own_size=own_size)


def factor_recipe(
    given: Mapping[str, Any], curvature: type[LayerPreconditioner[Any]], rules: FactoredRules
) -> FactorRecipe:
    """Return the recipe of a method with factors from the arguments of its constructor, by name."""
    return FactorRecipe(curvature, rules, layer_options(given, _warms_up(given)), rules.fisher)


def warn_of_options(method: str, groups: Sequence[Group], blocks: Iterable[Block], rules: FactoredRules) -> None:
    """Warn about intervals that do not match and about factors that the default limit has made diagonal."""
    _warn_intervals(groups)
    if rules.chooses_bound:
        _warn_wide(method, blocks, rules)


def _warn_intervals(groups: Sequence[Group]) -> None:
    pairs = dict.fromkeys((g["inv_update_steps"], g["factor_update_steps"]) for g in groups)
    odd = [
        f"inv_update_steps={refresh} is not a multiple of factor_update_steps={update}"
        for refresh, update in pairs
        if refresh % update
    ]
    if odd:
        warnings.warn(
            f"{'; '.join(odd)}: some refreshes will use factors that are a few steps old. Make it a multiple",
            stacklevel=depth_of_caller(),
        )


def _warn_wide(method: str, blocks: Iterable[Block], rules: FactoredRules) -> None:
    """Warn once about the factors that the default limit has made diagonal although they could be dense."""
    bounds = {block: rules.bound(block.group) for block in blocks}
    sides = [
        f"{block.label} ({what}, {side.n})"
        for block, bound in bounds.items()
        if block.group["max_factor_dim"] == bound and block.group["inv_update_steps"]
        for what, side in zip(("inputs", "outputs"), factors.sides(block.adapter, bound), strict=True)
        if side.diagonal and not side.by_nature and side.n <= factors.WIDEST
    ]
    if sides:
        bound = min(bounds.values())
        warnings.warn(
            f"{method}: of factors with more than {bound} rows, only the diagonal is stored, because a refresh of such "
            f"a matrix takes seconds on this device: {some_of(sides)}. Pass "
            f"storage=StorageOptions(max_factor_dim={bound}) to keep the diagonal without this warning, or "
            f"{factors.WIDEST} for dense factors",
            stacklevel=depth_of_caller(),
        )


def _device_type(given: Mapping[str, Any]) -> str:
    """Type of the device of the first parameter of the module."""
    root = given["params"] if given["module"] is None else given["module"]
    parts = [root] if isinstance(root, torch.nn.Module) else root if isinstance(root, (list, tuple)) else []
    modules = (part for part in parts if isinstance(part, torch.nn.Module))
    first = next((p for module in modules for p in module.parameters()), None)
    return "cpu" if first is None else first.device.type


def _warms_up(given: Mapping[str, Any]) -> bool | str:
    """Whether refreshes are frequent at the start: as ``warmup`` says, or else unless an interval was set."""
    asked: bool | str | None = given["refresh"].warmup
    if asked is not None:
        return asked
    return "doubling" if given.get("budget") is not None else all(given[name] is None for name in INTERVALS)
