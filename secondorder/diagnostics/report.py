"""Reports of an optimizer about itself: coverage, bytes, and options that differ from their defaults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from secondorder.comm.layout import local
from secondorder.curvature.schema import kinds, known
from secondorder.diagnostics.describe import Row, human_bytes, render
from secondorder.parameters import RULE_KEYS
from secondorder.preconditioners import keywords
from secondorder.runtime import Runtime

if TYPE_CHECKING:
    from secondorder.preconditioners.base import Preconditioner


@dataclass(frozen=True)
class Report:
    """Reports on the state of an optimizer without changing it.

    Attributes:
        curvature: The curvature of the parameters.
        runtime: Temporary memory.
    """

    curvature: Preconditioner
    runtime: Runtime

    def describe(self) -> str:
        """Return a table with one row per parameter."""
        usage = {k: v for k, v in self.memory_usage().items() if v}
        footer = ["state: " + ", ".join(f"{k} {human_bytes(v)}" for k, v in usage.items())]
        comm = self.curvature.comm
        if comm.combines:
            footer.append(f"ranks: this is {comm.rank} of {comm.world}, comm={comm!r}")
        title = f"{self.curvature.table.method} · {self.curvature.report.summary()}"
        return render(title, self.curvature.report.sizes_are, list(self._rows()), footer)

    def _rows(self) -> Iterator[Row]:
        table = self.curvature.table
        for p, group in table.group_of.items():
            treatment, sizes, owner = self.curvature.report.coverage(p)
            if not treatment:
                treatment = table.reasons.get(p, "not covered")
                if p.requires_grad:
                    treatment = f"{group['fallback']} fallback: {treatment}"
            nbytes = sum(local(v).nbytes for v in table.state[p].values() if isinstance(v, Tensor))
            yield Row(table.names[p], tuple(p.shape), treatment, sizes, owner, nbytes)

    def memory_usage(self) -> dict[str, int]:
        """Return the bytes that the optimizer holds on this rank, by kind and with a ``"total"``."""
        table, kept = self.curvature.table, ("momentum", "fallback", "pending", "workspace", "buffers")
        usage = dict.fromkeys((*kinds(table.entries), *kept), 0)
        for p in table.group_of:
            for key, value in table.state[p].items():
                if isinstance(value, Tensor):
                    usage[self.kind(p, key)] += local(value).nbytes
        usage["pending"] = self.curvature.report.pending_bytes
        usage["workspace"] = self.runtime.workspace.nbytes + self.runtime.stacks.nbytes
        usage["buffers"] += self.curvature.comm.nbytes + self.curvature.report.nbytes
        usage["total"] = sum(usage.values())
        return usage

    def kind(self, p: nn.Parameter, key: str) -> str:
        """Return the kind of an entry of a parameter's state."""
        if (entry := known(self.curvature.table.entries, key)) is not None:
            return entry.kind
        if key in RULE_KEYS:
            return "fallback" if key != "momentum_buffer" and p not in self.curvature.covered else "momentum"
        return "buffers"


def representation(
    method: type,
    groups: Sequence[Mapping[str, Any]],
    defaults: Mapping[str, Any],
    betas: object,
    chosen: Mapping[str, Any],
) -> str:
    """Return the representation of an optimizer as in ``torch.optim``, with equal groups shown once.

    Args:
        method: Class of the optimizer.
        groups: The groups.
        defaults: The default options of the groups.
        betas: The default of ``betas``, which ``defaults`` contains only if a scheduler may cycle them.
        chosen: The options that apply to all groups, by keyword.

    Returns:
        Learning rate, weight decay, and all options whose value is not the one in the constructor's signature, with
        related options as objects.
    """
    shown = [_unusual(method, group, defaults, betas, chosen) for group in groups]
    lines, i = [f"{method.__name__} ("], 0
    for options, equal in groupby(shown):
        last = i + len(list(equal)) - 1
        lines.append(f"Parameter Group {i}" if i == last else f"Parameter Groups {i} to {last}")
        lines += [f"    {name}: {value}" for name, value in options.items()]
        i = last + 1
    return "\n".join([*lines, "    other options: defaults, see param_groups", ")"])


def _unusual(
    method: type, group: Mapping[str, Any], defaults: Mapping[str, Any], betas: object, chosen: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the options that differ from the constructor's defaults, with objects in their short forms."""
    hidden = {"params", "param_names", "fallback_base_lr"}
    always = {"lr", "weight_decay", min(defaults)}  # torch's tests of optimizers look for the first one
    usual = {"betas": betas, **defaults, **keywords.usual(method)}
    found = keywords.gathered(chosen, {k: v for k, v in group.items() if k not in hidden}, {"betas": betas, **defaults})
    return {k: found[k] for k in sorted(found) if k in always or k not in usual or found[k] != usual[k]}
