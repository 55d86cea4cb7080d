"""The layers of a model that get a block, and the reasons why other parameters have none."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from secondorder.capture.layers.adapter import Adapter, Tap
from secondorder.capture.layers.parts import WeightUse, inner_modules, parts_of
from secondorder.curvature.layer import Layer, LayerOptions, SkipRule
from secondorder.curvature.wrappers import clean_name, find_name, unwrap


@dataclass
class Plan:
    """Layers of a model that get a block and, for every other parameter, the reason as text."""

    layers: list[Layer]
    reasons: dict[nn.Parameter, str]
    skipped_by_user: set[nn.Parameter]


class _Use(NamedTuple):
    """One layer that applies a weight."""

    module: str
    part: WeightUse
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    @property
    def owner(self) -> nn.Parameter | None:
        return self.weight if self.weight is not None else self.bias

    @property
    def name(self) -> str:
        return ".".join(word for word in (self.module, self.part.suffix) if word)

    def adapter(self) -> Adapter:
        return self.part.make(self.weight is not None, self.bias is not None)

    def taps(self) -> list[Tap]:
        adapter = self.adapter()
        return [Tap(module, part, adapter) for module, part in self.part.taps]


def plan_layers(root: nn.Module, trained: Iterable[nn.Parameter], options: LayerOptions) -> Plan:
    """Return the layers of a model that get a block, in the order of ``named_modules()``, and reasons for the rest.

    Raises:
        ValueError: If a rule of ``skip`` matches nothing.
        TypeError: If a rule is of the wrong type.
    """
    wanted = set(trained)
    skipped = _skipped_modules(root, options.skip)
    reasons: dict[nn.Parameter, str] = {}
    by_user: set[nn.Parameter] = set()
    uses: dict[nn.Parameter, list[_Use]] = {}
    inner = inner_modules(root)
    for name, module in root.named_modules():
        own = [p for p in module.parameters(recurse=not inner.isdisjoint(module.children())) if p in wanted]
        if not own or module in inner:
            continue
        parts, reason = parts_of(module, options.statistics.norm_curvature)
        if any(part.holder in skipped for part in parts) or module in skipped:
            parts, reason = [p for p in parts if p.holder not in skipped], "left out by skip_layers"
            by_user.update(own)
        for part in parts:
            use = _Use(clean_name(name), part, _trained(part.weight, wanted), _trained(part.bias, wanted))
            if use.owner is not None:
                uses.setdefault(use.owner, []).append(use)
        covered = {p for part in parts for p in (part.weight, part.bias)}
        for p in own:
            if p not in covered:
                reasons.setdefault(p, reason)
    return Plan(list(_layers(uses, reasons, options)), reasons, by_user)


def _layers(
    uses: dict[nn.Parameter, list[_Use]], reasons: dict[nn.Parameter, str], options: LayerOptions
) -> Iterator[Layer]:
    """Return one layer per distinct weight. Tied weights share one if their layers agree, or else have none."""
    for owner, found in uses.items():
        chosen, conflict = _agreeing(found, options.statistics.tied)
        if not owner.numel():
            conflict = "it has no elements"
        if owner in reasons:
            conflict = f"tied to a parameter with another use ({reasons[owner]})"
        if conflict:
            for use in found:
                reasons.update({p: conflict for p in (use.weight, use.bias) if p is not None})
            continue
        first = chosen[0]
        for use in found:
            if use.bias is not None and use.bias is not first.bias:
                reasons[use.bias] = "its weight is tied, and another use of the weight has the block"
        taps = tuple(tap for use in chosen for tap in use.taps())
        kind = first.part.suffix or _kind_of(first.part.taps[0][0])
        others = tuple(use.name for use in found if use not in chosen)
        yield Layer(first.name, kind, taps, first.adapter(), first.weight, first.bias, other_uses=others)


def _kind_of(module: nn.Module) -> str:
    """Type of a module as text. ``fully_shard`` replaces the type by a subclass."""
    return next(k.__name__ for k in type(module).__mro__ if not k.__module__.startswith("torch.distributed.fsdp"))


def _agreeing(found: list[_Use], tied: str | None) -> tuple[list[_Use], str]:
    """The uses of a weight that can share a block, or the reason why there are none."""
    names = ", ".join(use.name for use in found)
    if _differ(found) and tied is not None:
        found = [use for use in found if use.adapter().one_hot == (tied == "embedding")]
    if found and not _differ(found):
        return found, ""
    hint = "" if tied is not None else "; statistics=StatisticsOptions(tied='embedding') or tied='head' chooses one"
    return [], f"tied across layers that differ ({names}{hint})"


def _differ(uses: list[_Use]) -> bool:
    kinds = {(type(use.adapter()), use.adapter().factor_shapes(), use.bias) for use in uses}
    return len(kinds) > 1


def _trained(parameter: nn.Parameter | None, wanted: set[nn.Parameter]) -> nn.Parameter | None:
    return parameter if parameter is not None and parameter in wanted else None


def _skipped_modules(root: nn.Module, skip: Sequence[SkipRule]) -> set[nn.Module]:
    names = {clean_name(name): module for name, module in root.named_modules()}
    skipped: set[nn.Module] = set()
    for rule in skip:
        if isinstance(rule, str):
            exact = find_name(rule, names)
            hits = [names[exact]] if exact is not None else []
            hits += [m for n, m in names.items() if fnmatch.fnmatchcase(n, rule)]
        elif isinstance(rule, type) and issubclass(rule, nn.Module):
            hits = [m for m in names.values() if isinstance(m, rule)]
        elif isinstance(rule, nn.Module):
            inner = unwrap(rule)
            hits = [m for m in names.values() if m is inner]
        else:
            raise TypeError(f"skip_layers takes names, patterns, module types or modules, got {rule!r}")
        if not hits:
            raise ValueError(f"skip_layers: {rule!r} matches no layer of the module")
        for hit in hits:
            skipped.update(hit.modules())
    return skipped
