"""What a recipe is: the keywords of one optimizer on one workload, where they come from, and how they scale."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

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
    "from_adamw",
    "ekfac_natural",
    "ekfac_whiten",
    "kfac_adaptive",
    "ekfac_adaptive",
    "ekfac_orthogonal",
]
Shape = Literal["constant", "cosine", "linear", "steps", "trapezoid"]
"""Course of the learning rate after its warm-up; a trapezoid is constant and falls to nothing at the end."""
_FALL = 0.3
"""Share of a run in which the rate of a trapezoid falls."""
Rule = Literal["constant", "sqrt", "linear"]
"""How the learning rate follows the examples of a step: not at all, with their square root, or in proportion."""

_EXPONENTS: dict[Rule, float] = {"constant": 0.0, "sqrt": 0.5, "linear": 1.0}

_WITH_CLOSURE = ("adaptive_damping", "reject_steps", "calibrate_damping", "quadratic_model")
"""Options that evaluate the loss anew, or take the curvature of the loss from the outputs that a closure returns."""


@dataclass(frozen=True)
class Schedule:
    """Learning rate over a run, as factors of the recipe's own."""

    shape: Shape = "constant"
    warmup: float = 0.0
    """Share of the run in which the rate rises linearly from nothing."""
    milestones: tuple[float, ...] = ()
    """Of ``"steps"``: shares of the run after which the rate is multiplied by ``gamma``."""
    gamma: float = 0.1


CONSTANT = Schedule()
COSINE = Schedule("cosine", 0.05)
"""What ``compare`` gives every optimizer: warm-up over a twentieth of the run, then down to nothing."""


@dataclass(frozen=True)
class Recipe:
    """Keywords of one optimizer on one workload."""

    settings: Settings
    source: str
    """Who found them, and where they are written down."""
    schedule: Schedule = CONSTANT
    batch_size: int | None = None
    """Examples per rank that they hold for; unset: the workload's own number."""
    world: int = 1
    """Ranks that they hold for."""
    epochs: float | None = None
    """Passes over the data; unset: the workload's own number of steps."""
    rule: Rule = "sqrt"
    """How the learning rate follows the examples of a step."""
    searched: tuple[str, ...] = ("lr",)
    """Keywords that a search multiplies, all by the same factor; the first one names the trial."""
    workload: Settings = field(default_factory=dict)
    """Fields of the workload that belong to the recipe, such as label smoothing."""
    own_schedule: bool = False
    """Whether :attr:`schedule` belongs to the optimizer, as with schedule-free methods: a comparison keeps it then."""
    note: str = ""
    """What a reader of a comparison should know."""

    def at(self, world: int, batch_size: int, own_batch_size: int) -> "Recipe":
        growth = world * batch_size / (self.world * (self.batch_size or own_batch_size))
        return replace(self.times(growth ** _EXPONENTS[self.rule], RATES), world=world, batch_size=batch_size)

    def times(self, factor: float, keywords: tuple[str, ...] | None = None) -> "Recipe":
        chosen = self.searched if keywords is None else keywords
        scaled = {key: _scaled(value, factor) for key, value in self.settings.items() if key in chosen}
        return replace(self, settings={**self.settings, **scaled})


RATES = ("lr", "fallback_lr", "adamw_lr", "plain_lr")
"""Keywords that are learning rates."""


def _scaled(value: Setting, factor: float) -> Setting:
    """Return a keyword times a factor; what is no number, such as a rate that is left to the optimizer, stays."""
    return value if isinstance(value, bool | str | None) else float(f"{value * factor:.6g}")


@dataclass(frozen=True)
class Method:
    """One optimizer: how it is built, and its recipe on each workload."""

    label: str
    """Its name in tables and plots."""
    construct: Callable[..., Optimizer]
    """Takes the model and the keywords of a recipe."""
    recipes: Mapping[str, Recipe]
    """By workload, for the sizes ``smoke`` and ``cpu``."""
    published: Mapping[str, Recipe] = field(default_factory=dict)
    """By workload, for the size ``paper``."""
    order: Literal["first", "second"] = "second"
    """Whether it uses curvature; what lies between, such as Muon, Shampoo and SOAP, counts as first."""
    ours: bool = True
    """Whether this package has it."""
    closure: bool = False
    """Whether each of its steps needs a closure, whatever the settings are."""

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

    def needs_closure(self, workload: str | None = None, changes: Settings | None = None, size: str = "cpu") -> bool:
        settings = self.settings(workload, changes, size)
        return self.closure or any(settings.get(key) for key in _WITH_CLOSURE)

    def build(
        self, model: nn.Module, workload: str | None = None, changes: Settings | None = None, size: str = "cpu"
    ) -> Optimizer:
        """Return a new optimizer of ``model`` with the recipe of a workload."""
        return self.construct(model, **self.settings(workload, changes, size))


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
