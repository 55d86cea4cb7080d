"""The parameters of an optimizer, with their names and groups, and the detection of replaced parameters."""

from __future__ import annotations

import warnings
from collections.abc import Container, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from secondorder.comm.layout import is_cut, local
from secondorder.comm.strategy import CommStrategy
from secondorder.curvature.schema import Schema
from secondorder.curvature.wrappers import as_root, clean_name
from secondorder.frames import depth_of_caller
from secondorder.parallel.shards import Shards, WholeParameters, find_shards
from secondorder.runtime import some_of

Group = dict[str, Any]
Directions = dict[nn.Parameter, Tensor]
#: State of the first-order rules, shaped like the parameter.
RULE_KEYS = ("momentum_buffer", "exp_avg", "exp_avg_sq")


@dataclass(eq=False)
class ParameterTable:
    """The current parameters of an optimizer, with their options and their state.

    torch and the user may replace the groups and the state. The optimizer updates both before they are read.

    Attributes:
        method: Name of the optimizer's class, for messages.
        allocating: Options that determine how much state there is.
        interval: Option with the number of steps between two refreshes, which is 0 in groups without curvature.
        groups: The parameter groups.
        state: State by parameter.
        names: Names by parameter.
        group_of: Group of each parameter.
        first: The first parameter, or None if there are no parameters.
        root: The module, or None if the optimizer has none.
        is_followed: Whether the optimizer follows the module.
        shards: How parameters are sharded over ranks.
        entries: The planned entries of the states.
        reasons: Why parameters have no curvature.
        skipped_by_user: Parameters that the user excluded from curvature.
        signature: The layout for which the current plan was made.
    """

    method: str = ""
    allocating: tuple[str, ...] = ()
    interval: str = ""
    groups: list[Group] = field(default_factory=list)
    state: MutableMapping[nn.Parameter, dict[str, Any]] = field(default_factory=dict)
    names: dict[nn.Parameter, str] = field(default_factory=dict)
    group_of: dict[nn.Parameter, Group] = field(default_factory=dict)
    first: nn.Parameter | None = None
    root: nn.Module | None = None
    is_followed: bool = True
    shards: Shards = field(default_factory=WholeParameters)
    entries: Schema = field(default_factory=dict)
    reasons: dict[nn.Parameter, str] = field(default_factory=dict)
    skipped_by_user: set[nn.Parameter] = field(default_factory=set)
    signature: list[tuple[object, ...]] = field(default_factory=list)

    @property
    def module(self) -> nn.Module | None:
        """The module that the optimizer follows, or None."""
        return self.root if self.is_followed else None

    # ------------------------------------------------------------------ groups and names
    def regroup(self) -> None:
        """Find the group of every parameter."""
        self.group_of = {p: group for group in self.groups for p in group["params"]}
        self.first = next(iter(self.group_of), None)

    def find_shards(self, comm: CommStrategy) -> None:
        """Find how the parameters are sharded over ranks."""
        known = {**self.names, **self.inside()}
        self.shards = find_shards({p: known.get(p, f"of shape {tuple(p.shape)}") for p in self.group_of}, comm)

    def inside(self) -> dict[nn.Parameter, str]:
        """Return the names of the module's parameters; an empty dict without a module."""
        return {} if self.root is None else {p: clean_name(name) for name, p in self.root.named_parameters()}

    def name_parameters(self) -> None:
        """Name every parameter, by its group, or else by the module, or else by its position."""
        inside = self.inside()
        for i, group in enumerate(self.groups):
            given = group.get("param_names")
            for j, p in enumerate(group["params"]):
                known = inside.get(p, self.names.get(p, f"group {i} parameter {j}"))
                if given and j == len(given):  # the user appended to the list of parameters
                    given.append(known)
                self.names[p] = given[j] if given else known
                if not p.requires_grad:
                    self.reasons.setdefault(p, "frozen")

    def names_of_groups(self) -> list[list[str] | None]:
        """Return the names of each group, from the group or the module, or None if they are not known."""
        inside = self.inside()
        found: list[list[str] | None] = []
        for group in self.groups:
            names = group.get("param_names") or [inside.get(p, "") for p in group["params"]]
            found.append(list(names) if all(names) else None)
        return found

    def named_like_the_others(self, group: Group) -> Group:
        """Name the parameters of a late group if those of the others have names, since torch requires all or none."""
        params = group["params"]
        if isinstance(params, set):
            return group  # torch rejects it with its own message
        params = [params] if isinstance(params, Tensor) else list(params)
        named = bool(self.groups) and "param_names" in self.groups[0]
        if not named or any(isinstance(p, tuple) for p in params):
            return {**group, "params": params}
        inside, i = self.inside(), len(self.groups)
        return {**group, "params": [(inside.get(p, f"group{i}.{j}"), p) for j, p in enumerate(params)]}

    def forget(self, params: Iterable[nn.Parameter]) -> None:
        """Drop parameters whose group could not be added."""
        for p in params:
            self.skipped_by_user.discard(p)
            self.names.pop(p, None)
            self.reasons.pop(p, None)
            self.state.pop(p, None)
        self.regroup()

    # ------------------------------------------------------------------ what was moved or replaced
    def layout(self) -> list[tuple[object, ...]]:
        """Return everything that a plan and its state depend on and that a user may change between steps."""
        members = [(group, p) for group in self.groups for p in group["params"]]
        found: list[tuple[object, ...]] = [(id(g), id(p), p.requires_grad, p.dtype, p.device) for g, p in members]
        found += [tuple(group.get(name) for name in self.allocating) for group in self.groups]
        return found + [(group.get(self.interval) == 0,) for group in self.groups]

    @property
    def has_changed(self) -> bool:
        """Whether parameters were replaced, or curvature was turned on or off, since the plan was made."""
        is_switched = self.layout()[-len(self.groups) :] != self.signature[-len(self.groups) :]
        is_replaced = any(p not in self.group_of for group in self.groups for p in group["params"])
        return bool(self.signature) and (is_switched or is_replaced)

    def is_gathered(self) -> bool:
        """Whether the module has complete parameters now instead of those that ``fully_shard`` has sharded."""
        if not self.shards.is_sharded or self.layout() == self.signature:
            return False
        inside = self.inside()
        return any(is_cut(p) and p not in inside for p in self.group_of)

    def forget_replaced(self, steps: int) -> None:
        """Drop the state of replaced parameters, with a warning after the first step."""
        names = {self.names[p] for p in self.group_of}
        replaced = {p: name for p, name in self.names.items() if p not in self.group_of and name in names}
        for p in replaced:
            del self.names[p]
            self.state.pop(p, None)
        if replaced and steps:
            warnings.warn(
                f"{self.method}: after {steps} steps, other parameters have come in the place of "
                f"{some_of(list(replaced.values()))}; their curvature and momentum start again. Replace parameters "
                "before training, or transfer the state with state_dict() and load_state_dict()",
                stacklevel=depth_of_caller(),
            )

    def require_live(self) -> None:
        """Check that the parameters of the module were not replaced, since the old ones would never get gradients.

        Raises:
            RuntimeError: If parameters were replaced.
        """
        inside = {name: p for p, name in self.inside().items()}
        replaced = [n for p, name in self.names.items() if (n := clean_name(name)) in inside and inside[n] is not p]
        if replaced:
            raise RuntimeError(
                f"{self.method}: no parameter has a gradient, and the module has another '{replaced[0]}' than when the "
                "optimizer was made: make it after fully_shard(), to_empty() and other calls that replace parameters"
            )

    def repoint(self, theirs: Mapping[str, nn.Parameter]) -> dict[nn.Parameter, nn.Parameter]:
        """Return the new parameter for each old one, after replacing the current parameters by those of a module.

        Raises:
            ValueError: If the module has no matching parameter. Nothing is changed then.
        """
        found = {}
        for group in self.groups:
            for p in group["params"]:
                name = clean_name(self.names.get(p, ""))
                if name not in theirs or theirs[name].shape != p.shape:
                    raise ValueError(f"attach: the module has no parameter '{name}' of shape {tuple(p.shape)}")
                found[p] = theirs[name]
        for group in self.groups:
            for p in group["params"]:
                self.state[found[p]] = self.state.pop(p)
            group["params"] = [found[p] for p in group["params"]]
        return found

    # ------------------------------------------------------------------ what a step needs
    def gradients(self) -> Directions:
        """Return dense gradients. Sharded ones are local, and those of groups that maximize are negated."""
        found: Directions = {}
        for group in self.groups:
            for p in group["params"]:
                if p.grad is not None:
                    grad = local(p.grad) if self.shards.is_sharded else p.grad
                    grad = grad.to_dense() if grad.layout != torch.strided else grad.resolve_conj()
                    found[p] = -grad if group["maximize"] else grad
        return found

    # ------------------------------------------------------------------ warnings
    def warn_uncovered(self, covered: Container[nn.Parameter]) -> None:
        """Warn once about the parameters without curvature that the user has not excluded, grouped by reason."""
        by_reason: dict[str, list[str]] = {}
        for p, name in self.names.items():
            if p not in covered and p not in self.skipped_by_user and p.requires_grad:
                by_reason.setdefault(self.reasons.get(p, "not covered"), []).append(name)
        if not by_reason:
            return
        text = "; ".join(f"{reason}: {some_of(names)}" for reason, names in by_reason.items())
        if any(p in covered for p in self.names):
            found = f"some parameters get no curvature and follow the fallback rule ({text})"
        else:
            rules = " or ".join(sorted({repr(group["fallback"]) for group in self.groups}))
            found = f"nothing is covered. All parameters get no curvature and follow the fallback rule {rules} ({text})"
        warnings.warn(
            f"{self.method}: {found}. describe() lists all parameters. Name them in skip_layers to silence this.",
            stacklevel=depth_of_caller(),
        )


def module_of(method: str, params: Any, module: nn.Module | Sequence[nn.Module] | None) -> tuple[nn.Module | None, Any]:
    """Return the module and the parameters to train from the first two arguments. Several parts form one module."""
    is_list = isinstance(params, (list, tuple)) and params and all(isinstance(p, nn.Module) for p in params)
    if isinstance(params, nn.Module) or is_list:
        if module is not None and module is not params:
            raise ValueError(f"{method}: give the module once, first or as module=")
        module = params
        root = as_root(params)
        params = list(root.named_parameters())
        if not params:
            raise ValueError(f"{method}: the module {type(root).__name__} has no parameters")
        if lazy := [name for name, p in params if isinstance(p, nn.UninitializedParameter)]:
            raise ValueError(
                f"{method}: '{lazy[0]}' has no shape yet; run a forward pass before you build the optimizer"
            )
        return root, params
    return None if module is None else as_root(module), params
