"""Which parameters share a window, and which are left to the fallback."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from torch import nn

from secondorder.checkpoint.checkpoint import Checkpointing
from secondorder.curvature.window.shards import plain
from secondorder.curvature.window.window import SLOT_DIM

_NORM_LAYER = re.compile(r"Norm(\d?d)?$")
_MADE_UP_NAME = re.compile(r"group ?\d+(\.| parameter )\d+$")


class Partitioning(Checkpointing):
    """Parts the parameters of an optimizer among windows."""

    def _begin_partition(
        self, structure: tuple[Any, ...], excluded: dict[nn.Parameter, str], covered: Iterable[nn.Parameter]
    ) -> None:
        self._structure = structure
        self._compression, self._window_dtype, self._partition, *flags, self._seed = structure
        self._skip_norm_layers, self._skip_biases = flags
        self._excluded = excluded
        #: What was covered before this was copied: its rows may be on other ranks.
        self._copied = set(covered)

    def _partitioned(self) -> dict[str, list[nn.Parameter]]:
        """Covered parameters by the unit they belong to."""
        found: dict[str, list[nn.Parameter]] = {}
        for i, group in enumerate(self.param_groups):
            for p in group["params"]:
                # One that was frozen later stays, with zeros; one that was frozen from the start costs nothing.
                if p not in self._excluded and (p.requires_grad or self._has_rows(p)):
                    found.setdefault(self._unit_name(p, i), []).append(p)
        return found

    def _unit_name(self, p: nn.Parameter, group_index: int) -> str:
        if self._partition == "global":
            return "all"
        if self._partition == "group":
            return f"group {group_index}"
        name = self._names[p]
        return name if _MADE_UP_NAME.match(name) else name.rpartition(".")[0] or "(root)"

    def _exclude(self) -> None:
        """Parameters that the user leaves to the fallback; decided once for each."""
        owners = () if self._root is None else self._root.modules()
        layers = {p: m for m in owners for p in m.parameters(recurse=False)}
        for p in self._group:
            if "pos" in self.state[p] or self._has_rows(p):
                continue
            if self._skip_norm_layers and _is_norm(p, layers.get(p)):
                self._excluded[p] = "left out by skip_norm_layers"
            elif self._skip_biases and self._is_bias(p, layers.get(p)):
                self._excluded[p] = "left out by skip_biases"
        self._reasons = {p: "frozen" for p in self._group if not p.requires_grad} | self._excluded
        self._skipped_by_user = set(self._excluded)

    def _has_rows(self, p: nn.Parameter) -> bool:
        """Whether a parameter is in a window, or was before this was copied."""
        return self._covers(p) or p in self._copied or any(plain(key) in SLOT_DIM for key in self.state[p])

    def _is_bias(self, p: nn.Parameter, layer: nn.Module | None) -> bool:
        named = layer is not None or not _MADE_UP_NAME.match(self._names[p])
        return self._names[p].rpartition(".")[2].endswith("bias") if named else p.dim() <= 1


def _is_norm(p: nn.Parameter, layer: nn.Module | None) -> bool:
    if layer is None:
        return p.dim() <= 1
    # By name, so that those of other libraries count too (LlamaRMSNorm), with what is derived from them.
    return any(_NORM_LAYER.search(kind.__name__) for kind in type(layer).__mro__)
