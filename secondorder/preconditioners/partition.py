"""Decides which parameters share a window, and which are left to the fallback."""

from __future__ import annotations

import re
from collections.abc import Callable

from torch import nn

from secondorder.parameters import ParameterTable

_NORM_LAYER = re.compile(r"Norm(\d?d)?$")
_MADE_UP_NAME = re.compile(r"group ?\d+(\.| parameter )\d+$")

HasRows = Callable[[nn.Parameter], bool]


class Partition:
    """Divides the parameters of an optimizer among windows.

    Args:
        kind: ``"global"``, ``"group"`` or ``"layer"``.
        skip_norm_layers: Whether the parameters of normalization layers follow the fallback.
        skip_biases: Whether biases follow the fallback.
        excluded: Parameters that were left out before, with the reasons.
    """

    def __init__(
        self, kind: str, skip_norm_layers: bool, skip_biases: bool, excluded: dict[nn.Parameter, str] | None = None
    ) -> None:
        self.kind = kind
        self.excluded: dict[nn.Parameter, str] = excluded or {}
        self._skip_norm_layers, self._skip_biases = skip_norm_layers, skip_biases

    def units(self, table: ParameterTable, has_rows: HasRows) -> dict[str, list[nn.Parameter]]:
        """Covered parameters by their unit."""
        found: dict[str, list[nn.Parameter]] = {}
        for i, group in enumerate(table.groups):
            for p in group["params"]:
                # A parameter that was frozen later stays, with zeros. One frozen from the start is not included.
                if p not in self.excluded and (p.requires_grad or has_rows(p)):
                    found.setdefault(self._unit_name(table.names[p], i), []).append(p)
        return found

    def _unit_name(self, name: str, group_index: int) -> str:
        if self.kind == "global":
            return "all"
        if self.kind == "group":
            return f"group {group_index}"
        return name if _MADE_UP_NAME.match(name) else name.rpartition(".")[0] or "(root)"

    def exclude(self, table: ParameterTable, has_rows: HasRows) -> None:
        """Leave parameters to the fallback according to the options, which is decided once for each parameter."""
        owners = () if table.root is None else table.root.modules()
        layers = {p: m for m in owners for p in m.parameters(recurse=False)}
        for p in table.group_of:
            if "pos" in table.state[p] or has_rows(p):
                continue
            if self._skip_norm_layers and _is_norm(p, layers.get(p)):
                self.excluded[p] = "left out by skip_norm_layers"
            elif self._skip_biases and _is_bias(p, table.names[p], layers.get(p)):
                self.excluded[p] = "left out by skip_biases"

    def reasons(self, table: ParameterTable) -> dict[nn.Parameter, str]:
        """Reasons why parameters have no curvature."""
        return {p: "frozen" for p in table.group_of if not p.requires_grad} | self.excluded


def _is_bias(p: nn.Parameter, name: str, layer: nn.Module | None) -> bool:
    named = layer is not None or not _MADE_UP_NAME.match(name)
    return name.rpartition(".")[2].endswith("bias") if named else p.dim() <= 1


def _is_norm(p: nn.Parameter, layer: nn.Module | None) -> bool:
    if layer is None:
        return p.dim() <= 1
    # Compare names, so that layers of other libraries (LlamaRMSNorm) and their subclasses count too.
    return any(_NORM_LAYER.search(kind.__name__) for kind in type(layer).__mro__)
