"""The options of parameter groups: defaults, checks, and rules about several of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from secondorder import options
from secondorder.frames import depth_of_caller
from secondorder.parameters import Group
from secondorder.preconditioners import keywords


class GroupRules:
    """Rules about several options of a parameter group.

    Args:
        exclusions: Functions that raise ``ValueError`` if options exclude each other, in a group or between groups.
        mode_by_default: Whether the constructor chooses the mode of the damping.

    Attributes:
        mode_by_default: The argument.
    """

    def __init__(
        self, *exclusions: Callable[[Mapping[str, Any], list[Group]], None], mode_by_default: bool = False
    ) -> None:
        self.exclusions, self.mode_by_default = exclusions, mode_by_default

    def complete(self, given: Group, defaults: Mapping[str, Any], groups: list[Group]) -> Group:
        """Return an added group without a damping that is None, and with the options that depend on other options."""
        found = {k: v for k, v in given.items() if v is not None or k not in ("damping", "damping_mode")}
        if self.mode_by_default and "damping" in found:
            # A number for damping is λ itself unless damping_mode is set too.
            found.setdefault("damping_mode", "absolute")
        return found

    def check(self, group: Mapping[str, Any], groups: list[Group]) -> None:
        """Raise ``ValueError`` if options of a group cannot be combined."""
        for refuse in self.exclusions:
            refuse(group, groups)

    def check_saved(self, group: Mapping[str, Any], groups: list[Group]) -> None:
        """Raise ``ValueError`` if options of a saved group cannot be combined."""
        self.check(group, groups)

    def added(self, groups: list[Group], steps: int) -> None:
        """Complete the last group, which was added after a number of steps, 0 in the constructor."""

    def cycles_betas(self, defaults: Mapping[str, Any]) -> bool:
        """Return whether a scheduler that cycles the momentum acts on β₁, as with AdamW, instead of ``momentum``."""
        return options.is_adam(defaults["graft"] or defaults["inner"])

    def facts(self) -> dict[str, list[str]]:
        """Return the settings that must be equal on all ranks in addition to the options of groups, as text."""
        return {}

    def reason_against_roles(self, groups: Sequence[Mapping[str, Any]]) -> str | None:
        """Return why ranks of several roles cannot run the method, or None if they can."""
        return "it has no factors of layers. Use comm=MemOpt()"


class GroupOptions:
    """The options of the groups of one optimizer.

    Args:
        method: Class of the optimizer. Its attribute ``checks`` has the checks of its specific options.
        rules: Rules about several options of a group.

    Attributes:
        checks: Checks of all options.
        betas: The default of β₁ and β₂. The defaults of the optimizer contain them only if schedulers should cycle
            them; otherwise, schedulers would cycle them instead of the momentum.
        chosen: The constructor's arguments for all groups by keyword: objects, and options that no group has.
    """

    def __init__(self, method: Any, rules: GroupRules) -> None:
        self._method, self.rules = method, rules
        self.checks: dict[str, options.Check] = {**options.COMMON, **method.checks}
        self.betas: tuple[float, float] = options.DEFAULTS["betas"]
        self.chosen: Mapping[str, Any] = {}
        self._seen: list[Group] = []

    def defaults(self, given: Mapping[str, Any]) -> Group:
        """Return the checked default options, without ``betas`` if schedulers should not act on them."""
        found = {key: options.to_python(value) for key, value in given.items()}
        found["fallback"] = options.resolve_fallback(found["fallback"], found["graft"])
        options.validate(found, self.checks)
        self.betas = found["betas"]
        if not self.rules.cycles_betas(found):
            del found["betas"]
        return found

    def completed(self, given: Group, defaults: Mapping[str, Any], groups: list[Group], is_late: bool) -> Group:
        """Return an added group after checking it, with the options that depend on other options.

        Args:
            given: The group.
            defaults: Default options.
            groups: The other groups.
            is_late: Whether it is added after the construction of the optimizer.

        Returns:
            The group.
        """
        found = self.rules.complete(given, defaults, groups if is_late else [])
        found = {k: v if k == "params" else options.to_python(v) for k, v in found.items()}
        found = {"betas": self.betas, **options.renamed(found, self._method.checks)}
        _check_keys(self._method, found, self.checks)
        merged = {**defaults, **found}
        if found.get("fallback") is None and ("graft" in found or "fallback" in found):
            merged["fallback"] = found["fallback"] = options.resolve_fallback(None, merged["graft"])
        options.validate(merged, self.checks)
        self.rules.check(merged, groups)
        return found

    def fill(self, groups: Iterable[Group], defaults: Mapping[str, Any]) -> None:
        """Add the options that the groups of a copy lack."""
        for group in groups:
            group.update(betas=group.get("betas", options.DEFAULTS["betas"]))
            for key in self.checks:
                if key in defaults:
                    group.setdefault(key, defaults[key])
            group.setdefault("fallback_base_lr", float(group["lr"]))

    def check_changes(self, groups: list[Group]) -> None:
        """Reject values that were written into groups since the last call, before they have an effect.

        Raises:
            TypeError: If a value has the wrong type.
            ValueError: If a value is out of range, or options exclude each other.
        """
        found = options.check_changes(groups, self._seen, self.checks)
        if found is not None:
            for group in groups:
                self.rules.check(group, groups)
            self._seen = found

    def warn_without_effect(self, groups: Iterable[Group]) -> None:
        """Warn once about options that are set although no rule of their group reads them."""
        usual = keywords.usual(self._method)
        for text in dict.fromkeys(options.without_effect(group, usual) for group in groups):
            if text:
                warnings.warn(f"{self._method.__name__}: {text}", stacklevel=depth_of_caller())


def _check_keys(method: type, param_group: Group, known: Collection[str]) -> None:
    """Check the keys of a group that is added, and warn about those that look misspelled.

    Raises:
        ValueError: If a key is an argument that only the constructor accepts.
    """
    fixed = {*keywords.parameters_of(method), *keywords.flat_names(method)} - {*known, "params", *options.RENAMED}
    for name in sorted(keywords.OBJECTS.keys() & fixed & param_group.keys()):
        if keys := [key for key, _ in keywords.group_keys(keywords.OBJECTS[name])]:
            raise ValueError(
                f"{name} is an argument of the constructor of {method.__name__}; groups have the keys {', '.join(keys)}"
            )
    if found := sorted(fixed & param_group.keys()):
        raise ValueError(
            f"{', '.join(found)}: set once for all groups; pass it to the constructor of {method.__name__}, "
            "not to a parameter group"
        )
    for key in param_group.keys() - set(known):
        if close := get_close_matches(key, {*known, *fixed}, n=1, cutoff=0.85):
            place = ", which only the constructor accepts" if close[0] in fixed else ""
            warnings.warn(
                f"{method.__name__}: the key {key!r} of a parameter group has no effect; did you mean "
                f"{close[0]!r}{place}?",
                stacklevel=depth_of_caller(),
            )
