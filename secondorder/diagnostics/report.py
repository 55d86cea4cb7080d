"""What every optimizer tells about itself: coverage, bytes, curvature and counters."""

from __future__ import annotations

from abc import abstractmethod
from inspect import signature
from itertools import groupby
from typing import Any

from torch import Tensor, nn

from secondorder.comm.layout import local
from secondorder.curvature.schema import kinds, known
from secondorder.diagnostics.describe import Row, human_bytes, render
from secondorder.lifecycle import Lifecycle
from secondorder.parameters import RULE_KEYS, Group
from secondorder.runtime import Clock


class Reporting(Lifecycle):
    """Read-only views of an optimizer; none of them changes a step."""

    #: Heading of the column with the sizes of the curvature.
    _sizes_are = "curvature"

    @abstractmethod
    def dense_curvature(self, name: str) -> Tensor:
        """Curvature of a layer as a dense matrix."""

    @abstractmethod
    def _coverage(self, p: nn.Parameter) -> tuple[str, str, str]:
        """What covers a parameter, the sizes of that curvature, and its owner; the first empty if nothing does."""

    @abstractmethod
    def _summary(self) -> str:
        """Number of blocks or windows, in words."""

    def _pending_bytes(self) -> int:
        """Bytes of statistics that wait for the next step."""
        return 0

    @property
    def steps(self) -> int:
        """Number of steps taken, with those before a checkpoint that was loaded. Without gradients none is taken."""
        return self._t

    @property
    def module(self) -> nn.Module | None:
        """The module that the optimizer follows; None without one, as in a copy or after ``detach``."""
        return self._table.module

    @property
    def stage_clock(self) -> Clock | None:
        """The clock that ``time_stages`` was given; None if the stages are not timed."""
        return self._runtime.clock

    def parameter_name(self, p: nn.Parameter) -> str:
        """Name of a parameter of the groups, as ``describe`` shows it and ``keep_directions`` uses it."""
        return self._table.names[p]

    def describe(self) -> str:
        """A table with one row per parameter: the block that covers it or the fallback and why, sizes, owner, bytes."""
        rows = [self._row(p) for p in self._table.group_of]
        usage = {k: v for k, v in self.memory_usage().items() if v}
        footer = ["state: " + ", ".join(f"{k} {human_bytes(v)}" for k, v in usage.items())]
        if self.comm.combines:
            footer.append(f"ranks: this is {self.comm.rank} of {self.comm.world}, comm={self.comm!r}")
        return render(f"{type(self).__name__} · {self._summary()}", self._sizes_are, rows, footer)

    def _row(self, p: nn.Parameter) -> Row:
        treatment, sizes, owner = self._coverage(p)
        if not treatment:
            treatment = self._table.reasons.get(p, "not covered")
            if p.requires_grad:
                treatment = f"{self._table.group_of[p]['fallback']} fallback: {treatment}"
        nbytes = sum(local(v).nbytes for v in self.state[p].values() if isinstance(v, Tensor))
        return Row(self._table.names[p], tuple(p.shape), treatment, sizes, owner, nbytes)

    def __repr__(self) -> str:
        """As in ``torch.optim``, without the options that have the constructor's default; equal groups stand once."""
        shown = [self._unusual(group) for group in self.param_groups]
        lines, i = [f"{type(self).__name__} ("], 0
        for options, equal in groupby(shown):
            last = i + len(list(equal)) - 1
            lines.append(f"Parameter Group {i}" if i == last else f"Parameter Groups {i} to {last}")
            lines += [f"    {name}: {value}" for name, value in options.items()]
            i = last + 1
        return "\n".join([*lines, "    other options: as by default, see param_groups", ")"])

    def _unusual(self, group: Group) -> Group:
        """Learning rate, weight decay, and the options of a group that do not have the constructor's default."""
        given = signature(type(self)).parameters
        usual = {
            name: given[name].default if name in given else value
            for name, value in ({"betas": self._default_betas} | self.defaults).items()
        }
        hidden = {"params", "param_names", "fallback_base_lr"}
        always = {"lr", "weight_decay", min(self.defaults)}  # torch's own test of optimizers looks for the first one
        names = [k for k, v in group.items() if k in always or (k not in hidden and (k not in usual or v != usual[k]))]
        return {name: group[name] for name in sorted(names)}

    def memory_usage(self) -> dict[str, int]:
        """Bytes that the optimizer holds on this rank, by kind, with ``"total"``."""
        usage = dict.fromkeys((*kinds(self.entries), "momentum", "fallback", "pending", "workspace", "buffers"), 0)
        for p in self._table.group_of:
            for key, value in self.state[p].items():
                if isinstance(value, Tensor):
                    usage[self._kind(p, key)] += local(value).nbytes
        usage["pending"] = self._pending_bytes()
        usage["workspace"] = self._runtime.workspace.nbytes
        usage["buffers"] += self.comm.nbytes
        usage["total"] = sum(usage.values())
        return usage

    def _kind(self, p: nn.Parameter, key: str) -> str:
        if (entry := known(self.entries, key)) is not None:
            return entry.kind
        if key in RULE_KEYS:
            return "fallback" if key != "momentum_buffer" and not self._covers(p) else "momentum"
        return "buffers"

    def diagnostics(self) -> dict[str, Any]:
        """Counters and factors as plain numbers; reading them may wait for the device."""
        return {
            "step": self._t,
            "skipped_steps": self._skipped_steps + int(self._skipped_on_device),
            "stage_ms": {} if self._runtime.clock is None else self._runtime.clock.last_step(),
        }
