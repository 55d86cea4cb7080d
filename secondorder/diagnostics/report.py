"""What every optimizer tells about itself: coverage, bytes, curvature and counters."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch import Tensor, nn

from secondorder.checkpoint import RULE_KEYS
from secondorder.curvature.block import Block, find_name
from secondorder.diagnostics.describe import Row, human_bytes, render
from secondorder.lifecycle import Lifecycle


class Reporting(Lifecycle):
    """Read-only views of an optimizer; none of them changes a step."""

    @abstractmethod
    def block_curvature(self, block: Block) -> Tensor:
        """The undamped curvature of a block as a dense matrix."""

    def describe(self) -> str:
        """A table with one row per parameter: the block that covers it or the fallback and why, sizes, owner, bytes."""
        rows = [self._row(p) for p in self._group]
        usage = {k: v for k, v in self.memory_usage().items() if v}
        footer = ["state: " + ", ".join(f"{k} {human_bytes(v)}" for k, v in usage.items())]
        return render(f"{type(self).__name__} · {len(self._blocks)} blocks", rows, footer)

    def _row(self, p: nn.Parameter) -> Row:
        block = self._block_of.get(p)
        factors = owner = ""
        if block is None:
            treatment = self._reasons.get(p, "not covered")
            if p.requires_grad:
                treatment = f"{self._group[p]['fallback']} fallback: {treatment}"
        else:
            refused = self._capture.refused.get(block.index) if self._capture is not None else None
            treatment = f"block '{block.name}' ({type(block.modules[0]).__name__})"
            if refused and self.state[p].get("refreshes", 0) == 0:
                treatment = f"{self._group[p]['fallback']} fallback: {refused}"
            lead = f"{block.adapter.groups}×" if block.adapter.groups > 1 else ""
            factors, owner = f"{lead}{block.adapter.n_a}, {block.adapter.n_g}", f"rank {self.comm.owner(block.index)}"
        nbytes = sum(v.nbytes for v in self.state[p].values() if isinstance(v, Tensor))
        return Row(self._names[p], tuple(p.shape), treatment, factors, owner, nbytes)

    def memory_usage(self) -> dict[str, int]:
        """Bytes that the optimizer holds on this rank, by kind, with ``"total"``."""
        usage = dict.fromkeys(
            (*dict.fromkeys(self.kinds.values()), "momentum", "fallback", "pending", "workspace", "buffers"), 0
        )
        for p in self._group:
            for key, value in self.state[p].items():
                if isinstance(value, Tensor):
                    usage[self._kind(p, key)] += value.nbytes
        if self._capture is not None:
            usage["pending"] = sum(int(getattr(s, "nbytes", 0)) for s in self._capture.pending.values())
        usage["workspace"] = self._workspace.nbytes
        usage["total"] = sum(usage.values())
        return usage

    def _kind(self, p: nn.Parameter, key: str) -> str:
        if key in self.kinds:
            return self.kinds[key]
        if key in RULE_KEYS:
            return "fallback" if key != "momentum_buffer" and p not in self._block_of else "momentum"
        return "buffers"

    def dense_curvature(self, name: str) -> Tensor:
        """The undamped curvature of a block as a dense ``[n, n]`` matrix over row-major ``vec([W | b])``.

        Args:
            name: Module name as in ``named_modules()``; wrapper prefixes may be left out.

        Returns:
            The matrix, ``n`` being the number of parameters of the layer.

        Raises:
            ValueError: If no block has this name.
            RuntimeError: If nothing was captured for it yet.
        """
        found = find_name(name, self.blocks)
        if found is None:
            raise ValueError(f"no block is named '{name}'; there are: {', '.join(self.blocks) or 'none'}")
        block = self.blocks[found]
        if self.state[block.owner]["factor_updates"] == 0:
            raise RuntimeError(f"nothing was captured for layer '{name}' yet: take a step first")
        return self.block_curvature(block)

    def diagnostics(self) -> dict[str, Any]:
        """Counters and factors as plain numbers; reading them may wait for the device."""
        return {
            "step": self._t,
            "skipped_steps": self._skipped_steps + int(self._skipped_on_device),
            "skipped_statistics": sum(int(n) for n in self._skipped_statistics.values()),
            "skipped_statistics_by_layer": {name: int(n) for name, n in self._skipped_statistics.items()},
            "refresh_failures": self._failed_refreshes,
            "kl_clip_factor": None if self._kl_factor is None else float(self._kl_factor),
        }
