"""Recipes: the keywords of one optimizer on one workload, with their source and their rule for other batch sizes."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

Setting = float | int | bool | str | None
Settings = Mapping[str, Setting]
Variant = Literal["from_adamw", "ekfac_natural", "ekfac_whiten", "kfac_adaptive", "ekfac_adaptive", "ekfac_orthogonal"]
Own = Literal["sgd", "adamw", "kfac", "ekfac", "hylo", "mfac", "sparse_mfac", "ggt"]
MethodName = Literal[Own, Variant]
Shape = Literal["constant", "cosine", "linear", "steps", "trapezoid"]
"""Shape of the learning rate after its warm-up. A trapezoid is constant and falls to 0 at the end."""
_FALL = 0.3  # share of a run in which the rate of a trapezoid falls
Rule = Literal["constant", "sqrt", "linear"]
"""How the learning rate depends on the batch size: not at all, by its square root, or linearly."""

_EXPONENTS: dict[Rule, float] = {"constant": 0.0, "sqrt": 0.5, "linear": 1.0}

_WITH_CLOSURE = ("adaptive_damping", "reject_steps", "calibrate_damping", "quadratic_model")
"""Options that evaluate the loss again, or compute its curvature from the outputs that a closure returns."""


@dataclass(frozen=True)
class Schedule:
    """Learning rate during a run, as a multiple of the recipe's rate."""

    shape: Shape = "constant"
    warmup: float = 0.0  # share of the run in which the rate rises linearly from 0
    milestones: tuple[float, ...] = ()
    """For ``"steps"``: shares of the run after which the rate is multiplied by ``gamma``."""
    gamma: float = 0.1


CONSTANT = Schedule()
COSINE = Schedule("cosine", 0.05)
"""Schedule of ``compare`` for every optimizer: a warm-up over a twentieth of the run, then a cosine to 0."""


@dataclass(frozen=True)
class Recipe:
    settings: Settings
    source: str  # where the settings come from
    schedule: Schedule = CONSTANT
    batch_size: int | None = None
    """Batch size per rank that the settings are for. The default is that of the workload."""
    world: int = 1  # number of ranks that the settings are for
    epochs: float | None = None
    """Number of epochs. The default is the number of steps of the workload."""
    rule: Rule = "sqrt"  # how the learning rate depends on the batch size
    searched: tuple[str, ...] = ("lr",)
    """Keywords that a search multiplies by the same factor. The first one identifies the trial."""
    workload: Settings = field(default_factory=dict)
    """Fields of the workload that are part of the recipe, such as label smoothing."""
    own_schedule: bool = False
    """Whether :attr:`schedule` is part of the optimizer, as for schedule-free methods. Comparisons then keep it."""
    note: str = ""  # additional information for the readers of a comparison

    def at(self, world: int, batch_size: int, own_batch_size: int) -> "Recipe":
        growth = world * batch_size / (self.world * (self.batch_size or own_batch_size))
        return replace(self.times(growth ** _EXPONENTS[self.rule], RATES), world=world, batch_size=batch_size)

    def times(self, factor: float, keywords: tuple[str, ...] | None = None) -> "Recipe":
        chosen = self.searched if keywords is None else keywords
        scaled = {key: _scaled(value, factor) for key, value in self.settings.items() if key in chosen}
        return replace(self, settings={**self.settings, **scaled})


RATES = ("lr", "fallback_lr", "adamw_lr", "plain_lr")  # keywords that are learning rates


def _scaled(value: Setting, factor: float) -> Setting:
    """Return a value times a factor. A value that is not a number, such as None, does not change."""
    return value if isinstance(value, bool | str | None) else float(f"{value * factor:.6g}")


@dataclass(frozen=True)
class Method:
    label: str  # its name in tables and plots
    construct: Callable[..., Optimizer]  # takes the model and the keywords of a recipe
    recipes: Mapping[str, Recipe]  # recipes by workload for the sizes `smoke` and `cpu`
    published: Mapping[str, Recipe] = field(default_factory=dict)  # recipes by workload for the size `paper`
    order: Literal["first", "second"] = "second"
    """``"second"`` if it uses curvature. Methods in between, such as Muon, Shampoo and SOAP, count as ``"first"``."""
    ours: bool = True  # whether it is part of this package
    closure: bool = False  # whether its steps need a closure with any settings

    def recipe(self, workload: str, size: str = "cpu") -> Recipe:
        if size == "paper" and workload in self.published:
            return self.published[workload]
        if workload not in self.recipes:
            known = ", ".join(self.recipes)
            raise ValueError(f"{self.label} has no recipe for {workload}, only for {known}: take --no-recipe --set ...")
        return self.recipes[workload]

    def settings(self, workload: str | None, changes: Settings | None = None, size: str = "cpu") -> Settings:
        settings = self.recipe(workload, size).settings if workload else {}
        return {**settings, **(changes or {})}

    def needs_closure(self, workload: str | None = None, changes: Settings | None = None) -> bool:
        settings = self.settings(workload, changes)
        return self.closure or any(settings.get(key) for key in _WITH_CLOSURE)

    def build(self, model: nn.Module, workload: str | None = None, changes: Settings | None = None) -> Optimizer:
        return self.construct(model, **self.settings(workload, changes))


def factor(schedule: Schedule, step: int, steps: int) -> float:
    warmup = math.ceil(schedule.warmup * steps)
    if step < warmup:
        return (step + 1) / warmup
    share = (step - warmup) / max(1, steps - warmup)
    if schedule.shape == "cosine":
        return 0.5 + 0.5 * math.cos(math.pi * share)
    if schedule.shape == "linear":
        return 1 - share
    if schedule.shape == "trapezoid":
        return min(1.0, (steps - step) / (_FALL * steps))
    if schedule.shape == "steps":
        return float(schedule.gamma ** sum(step >= milestone * steps for milestone in schedule.milestones))
    return 1.0


def make_schedule(schedule: Schedule, steps: int, optimizer: Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: factor(schedule, min(step, steps), steps))
