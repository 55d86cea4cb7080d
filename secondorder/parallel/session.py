"""The comparison of ranks before they train together: their method and options, and their starting values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from secondorder.comm.layout import is_cut
from secondorder.comm.strategy import CommStrategy, Unit
from secondorder.runtime import Runtime

if TYPE_CHECKING:
    from secondorder.parameters import ParameterTable

_WAYS = "wrap the model in DistributedDataParallel, or use average_gradients=True"


class RankSession:
    """The connection of one optimizer to its counterparts on the other ranks."""

    def __init__(self, comm: CommStrategy, table: ParameterTable, runtime: Runtime) -> None:
        self._comm, self._table, self._runtime = comm, table, runtime
        #: Whether the ranks have connected since units were last placed.
        self.is_connected = False
        #: Whether the ranks have compared the starting values.
        self.has_compared = False

    def place(self, units: Sequence[Unit]) -> None:
        """Let the strategy assign units to ranks.

        This needs no communication, so loading a checkpoint needs no message. The ranks connect later.
        """
        self.is_connected = False
        self._comm.place(units)

    def connect(self, facts: Mapping[str, list[str]]) -> None:
        """Connect to the other ranks, after construction or when the units have changed. All ranks do this together.

        Args:
            facts: Other settings that must be equal on all ranks, as text.
        """
        if self._table.first is not None:
            self._comm.connect({**self._facts(), **facts}, self._table.first.device)
            self.is_connected = True

    def close(self) -> None:
        """Make the ranks connect again before the next step."""
        self.is_connected = False

    def compare_start(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        """Compare, at the first step after construction or loading, whether the ranks start from the same values.

        Args:
            gradients: Gradients of this step by parameter.
        """
        if self.has_compared or not self._comm.combines:
            return
        self.has_compared = True
        names = self._table.names
        values = [f"{names[p]}: {_sum_of(p)}" for p in self._table.group_of if not is_cut(p)]
        found = [f"{names[p]}: {_sum_of(g)}" for p, g in gradients.items() if not is_cut(p)]
        self._comm.compare(
            {
                "steps taken, before this one": [str(self._runtime.step)],
                f"values of the parameters, before the first step ({_WAYS} and one seed)": values,
                f"gradients of the first step ({_WAYS})": found,
            }
        )

    def _facts(self) -> dict[str, list[str]]:
        """Return the settings that must be equal on all ranks for every method, as text."""
        table = self._table
        return {
            "the method": [table.method],
            "parameters": [f"{table.names[p]} {tuple(p.shape)} {p.dtype}" for p in table.group_of],
            "options of the groups": words_of_options(table.groups),
            "steps taken": [str(self._runtime.step)],
        }


def words_of_options(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the options of some groups as text, for a comparison between ranks."""
    options_of = ({k: v for k, v in g.items() if k not in ("params", "param_names")} for g in groups)
    plain = ({k: float(v) if isinstance(v, Tensor) else v for k, v in found.items()} for found in options_of)
    return [f"{k}={v!r}" for found in plain for k, v in found.items()]


def _sum_of(x: Tensor) -> str:
    """Return the sum of a tensor as text, which distinguishes most pairs of different tensors."""
    real = torch.view_as_real(x.detach()) if x.is_complex() else x.detach()
    return repr(float(real.sum(dtype=torch.float64)))
