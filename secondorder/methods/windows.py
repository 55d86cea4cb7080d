"""The recipe of the methods that precondition with a window of past gradients, and the options that they share."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from secondorder import options
from secondorder.adaptation.no_trust import NoTrust
from secondorder.checkpoint.windows import WindowCheckpoint
from secondorder.config import FisherOptions, WindowOptions
from secondorder.curvature.schema import Schema
from secondorder.curvature.solvers import WindowSolver
from secondorder.curvature.window.lowrank import LowRank
from secondorder.curvature.window.topk import TopK
from secondorder.parameters import Group, module_of
from secondorder.preconditioners.group_options import GroupRules
from secondorder.preconditioners.parts import Shared
from secondorder.preconditioners.recipe import Recipe
from secondorder.preconditioners.window_plan import CATALOG, WindowStructure
from secondorder.preconditioners.windows import WindowPreconditioner
from secondorder.update import Update


def window_betas(name: str, value: Any) -> None:
    """Check that β₁ is in [0, 1) and β₂ in (0, 1]."""
    if not isinstance(value, (tuple, list)) or len(value) != 2 or not all(options.is_number(b) for b in value):
        raise TypeError(f"{name} must be a pair of numbers, got {value!r}")
    if not 0.0 <= value[0] < 1.0:
        raise ValueError(f"{name}[0] must be in [0, 1), got {value[0]}")
    if not 0.0 < value[1] <= 1.0:
        raise ValueError(f"{name}[1] must be in (0, 1], got {value[1]}")


#: Checks of the options that all window methods have.
WINDOW_CHECKS: dict[str, options.Check] = {
    "window_size": options.whole(1),
    "weight_decay_mode": options.choice("standard", "legacy", "reg", "both"),
    "checkpoint_curvature": options.choice("all", "none"),
}


#: Options of all methods on which the groups of one window must agree.
_SHARED = "window_size", "graft", "weight_decay_mode"


class WindowRules(GroupRules):
    """Rules about the options of a group with windows.

    Args:
        shared: Options of the method on which all groups must agree if they have one window.
        partition: Which parameters share a window.
        exclusions: Functions that reject options that exclude each other.
        mode_by_default: Whether the constructor chooses the mode of the damping.
    """

    def __init__(
        self, shared: Sequence[str], partition: str, *exclusions: Callable[..., None], mode_by_default: bool = False
    ) -> None:
        super().__init__(_exclude, *exclusions, mode_by_default=mode_by_default)
        self.shared = (*_SHARED, *shared) if partition == "global" else ()

    def complete(self, given: dict[str, Any], defaults: Mapping[str, Any], groups: list[Group]) -> dict[str, Any]:
        """Return an added group with the current options of the common window, since a schedule may change them."""
        found = super().complete(given, defaults, groups)
        return {key: groups[0][key] for key in self.shared} | found if groups else found

    def check_saved(self, group: Mapping[str, Any], groups: list[Group]) -> None:
        """Do nothing, since loading replaces the options of all groups of a window."""

    def check(self, group: Mapping[str, Any], groups: list[Group]) -> None:
        """Raise ``ValueError`` if options of a group cannot be combined, or do not agree with the first group."""
        super().check(group, groups)
        for key in self.shared if groups else ():
            if group[key] != groups[0][key]:
                raise ValueError(
                    f"all groups share one window and must agree on {key}, got {groups[0][key]!r} and {group[key]!r}; "
                    "use partition='group' for one window per group"
                )


def _exclude(group: Mapping[str, Any], groups: list[Group]) -> None:
    """Reject options that exclude each other in all window methods."""
    mode, decay = group["weight_decay_mode"], group["decoupled_weight_decay"]
    if mode != "standard" and decay:
        raise ValueError(f"weight_decay_mode={mode!r} and decoupled_weight_decay=True exclude each other")
    if mode != "standard" and options.is_adam(group["graft"] or group["inner"]):
        raise ValueError(f"weight_decay_mode={mode!r} applies to SGD's rule and not to Adam's: drop it")


@dataclass(frozen=True)
class WindowRecipe(Recipe):
    """The recipe of a method with windows of past gradients.

    Attributes:
        solver: The solver of the method.
        rules: Rules about several options of a group.
        windows: The options that are the same in all groups.
        fisher: The Fisher of the gradients that the windows contain.
    """

    solver: WindowSolver
    rules: WindowRules
    windows: WindowStructure
    fisher: FisherOptions = field(default_factory=FisherOptions)

    @property
    def catalog(self) -> Schema:
        """Entries of the states of windows by key."""
        return CATALOG

    @property
    def allocating(self) -> tuple[str, ...]:
        """Options of a group that determine how much state its parameters have."""
        return ("window_size",)

    def find_module(self, method: str, params: Any, module: Any) -> tuple[nn.Module | None, Any]:
        """Return the optional module, which provides names and types of layers, and the parameters to train."""
        return module_of(method, params, module)

    def precondition(self, shared: Shared, kept: Mapping[str, Any] | None) -> WindowPreconditioner:
        """Return a preconditioner without windows."""
        return WindowPreconditioner(self.solver, self.windows, shared.comm, shared.table, shared.runtime, kept)

    def judge(self, preconditioner: WindowPreconditioner, update: Update) -> NoTrust:
        """Return an object that accepts every step."""
        return NoTrust()

    def checkpoint_adapters(self, preconditioner: WindowPreconditioner) -> tuple[WindowCheckpoint, WindowCheckpoint]:
        """Return the adapters that save and load the windows in checkpoints."""
        found = WindowCheckpoint(preconditioner.plan, preconditioner.exchange)
        return found, found

    def worker(self, preconditioner: WindowPreconditioner, advance: weakref.WeakMethod[Callable[[], None]]) -> None:
        """Return None, since only layer methods support ranks of several roles."""

    def copied(self, preconditioner: WindowPreconditioner) -> Recipe:
        """Return the recipe for a copy, which is this recipe."""
        return self


def window_recipe(given: Mapping[str, Any], solver: WindowSolver, rules: WindowRules) -> WindowRecipe:
    """Return the recipe of a window method from the arguments of its constructor, by name.

    Raises:
        ValueError: If an option has an invalid value.
        TypeError: If an option has an invalid type.
    """
    compression, partition = given["compression"], given["partition"]
    window: WindowOptions = given["window"]
    if compression is not None and not isinstance(compression, (TopK, LowRank)):
        raise TypeError(f"compression must be None, TopK(...) or LowRank(...), got {compression!r}")
    if isinstance(compression, TopK) and window.dtype is not None:
        raise ValueError("the dtype of a window is for dense and low-rank rows; TopK has its own value_dtype")
    options.choice("global", "group", "layer")("partition", partition)
    options.whole(0)("deterministic_seed", given["deterministic_seed"])
    skipped = window.skip_norm_layers, window.skip_biases
    windows = WindowStructure(compression, window.dtype, partition, *skipped, given["deterministic_seed"])
    return WindowRecipe(solver, rules, windows)
