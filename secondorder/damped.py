"""Damping of layer methods: a number is λ itself, and what nobody gave is relative to the curvature."""

from __future__ import annotations

from typing import Any, ClassVar

from secondorder.lifecycle import Lifecycle


class Damped(Lifecycle):
    """Resolves ``damping`` and ``damping_mode``, of the optimizer and of groups that are added."""

    #: Damping when none is given: a multiple of the mean eigenvalue, and λ where the mode is given as absolute.
    default_damping: ClassVar[tuple[float, float]]
    #: Whether `damping_mode` was left to the constructor.
    _mode_by_default = False

    def _resolve_damping(self, damping: float | None, mode: str | None) -> tuple[float, str]:
        """Number and mode from what was given; to be called before the groups are added."""
        self._mode_by_default = mode is None
        if damping is not None:
            return damping, "absolute" if mode is None else mode
        relative, absolute = self.default_damping
        return (absolute, mode) if mode == "absolute" else (relative, "relative" if mode is None else mode)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; see the base class.

        Raises:
            ValueError: If options of the group exclude each other.
        """
        if isinstance(param_group, dict):
            param_group = dict(param_group)
            for name in ("damping", "damping_mode"):
                if name in param_group and param_group[name] is None:
                    del param_group[name]
            if self._mode_by_default and "damping" in param_group:
                # A number given as damping is λ itself unless a mode is given with it.
                param_group.setdefault("damping_mode", "absolute")
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        """What copies keep."""
        return {**super().__getstate__(), "_mode_by_default": self._mode_by_default}
