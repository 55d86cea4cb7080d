"""Uneven inputs: the steps of a rank that has no data left while others train (``torch.distributed.algorithms.join``).

::

    live      DDP averages gradients │ [1 if live, by rank] summed │ lowest live rank ─► gradients, options │ the stages
    joined    zeros to DDP's average │ the same                    │ takes them over                        │ the stages

A rank that has joined keeps its last gradient, and may own layers, for which it would precondition this old gradient
for all ranks. It therefore takes over the gradients of a live rank, adds nothing to the statistics, and runs every
stage like the others. Outside of an active ``Join``, no message is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook, _JoinConfig

from secondorder.comm.strategy import CommStrategy

if TYPE_CHECKING:
    from secondorder.optimizer import SecondOrderOptimizer
    from secondorder.parameters import ParameterTable

__all__ = ["JOIN_DISABLED", "JoinHook", "Joinable", "UnevenInputs", "joining_group"]

Group = dict[str, Any]
#: State of an optimizer outside of ``Join``.
JOIN_DISABLED = _JoinConfig.construct_disabled_join_config()


def joining_group() -> Any:
    """Return the group of the messages of ``Join``, which is the default group, as for ``DistributedDataParallel``."""
    return dist.group.WORLD


class UnevenInputs:
    """Exchanges gradients and options, which have these names, with the other ranks inside ``Join``."""

    def __init__(self, comm: CommStrategy, table: ParameterTable, options: Iterable[str]) -> None:
        self._comm, self._table, self._options = comm, table, sorted(options)
        #: Whether this rank has no data left and takes part in the steps of the others inside ``Join``.
        self.has_joined = False

    @property
    def device(self) -> torch.device:
        """Device of the messages of ``Join``."""
        device: torch.device = next(p.device for group in self._table.groups for p in group["params"])
        return device

    def why_not_joinable(self, is_scaled: bool) -> str | None:
        """Return why a rank without data cannot take part in the steps of the others, or None if it can.

        Args:
            is_scaled: Whether gradients are scaled, as under a loss scaler.

        Returns:
            The reason, or None.
        """
        comm = self._comm
        if not comm.takes_joiners:
            return f"{type(comm).__name__} has ranks without data; give all ranks with data equally many steps"
        if self._table.shards.is_sharded:
            return "a forward pass under fully_shard needs all ranks; give them equally many batches"
        if is_scaled:
            return "its grad_scaler may skip steps on ranks with data; train in bfloat16, which needs no scaler"
        if comm.data_world < comm.world:
            return f"under {comm!r} some ranks never have data; give the others equally many batches"
        return None

    def hook(self, optimizer: SecondOrderOptimizer) -> JoinHook:
        """Return the hook that ``Join`` calls on a rank that has no data left."""
        return _Shadow(optimizer, self)

    # ------------------------------------------------------------------ the part of a step
    def average_gradients(self, optimizer: Joinable) -> bool:
        """Average gradients if the strategy does so, and copy them to the ranks without data inside of ``Join``.

        Args:
            optimizer: The optimizer; ``Join`` is notified of its step.

        Returns:
            Whether this rank has no data and follows the options of another rank.
        """
        joins = optimizer._join_config.enable
        if joins and not self.has_joined:
            Join.notify_join_context(optimizer)
        self._comm.average_gradients(list(self._table.group_of))
        if joins and self._comm.combines and (source := self._source()) is not None:
            self._copy_gradients(source)
            return self.has_joined
        return False

    def forget_gradients(self) -> None:
        """Drop the gradients of the last batch."""
        for group in self._table.groups:
            for p in group["params"]:
                p.grad = None

    def end(self, is_last_joiner: bool) -> None:
        """Adopt the options of a rank that had data to the end, and resume ordinary steps."""
        self.has_joined = not is_last_joiner
        if self._comm.combines and (source := self._source()) is not None:
            header = torch.tensor([value for _, _, value in self._numbers()], dtype=torch.float64, device=self.device)
            self._comm.copy_from(source, [header])
            self._follow_options(header.tolist())
        self.has_joined = False

    # ------------------------------------------------------------------ messages between ranks with and without data
    def _source(self) -> int | None:
        """Return the lowest rank that has data, or None if all have."""
        present = torch.zeros(dist.get_world_size(), dtype=torch.float64)
        present[self._comm.rank] = float(not self.has_joined)
        live = self._comm.agree(present.to(self.device)) > 0
        return None if live.all() else int(live.to(torch.uint8).argmax())

    def _copy_gradients(self, source: int) -> None:
        """Copy gradients and the numbers among the options from one rank to those that have joined."""
        comm, device = self._comm, self.device
        params = [p for group in self._table.groups for p in group["params"] if p.requires_grad]
        words = [float(p.grad is not None) for p in params] + [value for _, _, value in self._numbers()]
        header = torch.tensor(words, dtype=torch.float64, device=device)
        comm.copy_from(source, [header])
        flags, numbers = header.cpu().split([len(params), len(words) - len(params)])
        sent: list[nn.Parameter] = [p for p, flag in zip(params, flags.tolist(), strict=True) if flag]
        if comm.rank == source:
            found = [_dense(cast(Tensor, p.grad)) for p in sent]
        else:
            found = [torch.empty(p.shape, dtype=p.dtype, device=p.device) for p in sent]
        comm.copy_from(source, [torch.view_as_real(x) if x.is_complex() else x for x in found])
        if self.has_joined:
            for p, gradient in zip(sent, found, strict=True):
                p.grad = gradient
            self._follow_options(numbers.tolist())

    def _numbers(self) -> list[tuple[Group, str, float]]:
        """Return the numbers among the options of every group, with tuples flattened; NaN for anything else."""
        return [
            (group, key, number)
            for group in self._table.groups
            for key in self._options
            for number in _numbers_of(group[key])
        ]

    def _follow_options(self, numbers: Sequence[float]) -> None:
        """Adopt the options that a scheduler has changed, since schedulers run only on ranks with data."""
        if not self.has_joined:
            return
        theirs = iter(numbers)
        for group in self._table.groups:
            for key in self._options:
                value = group[key]
                own = _numbers_of(value)
                new = [next(theirs) for _ in own]
                if own == new or any(x != x for x in (*own, *new)):
                    continue
                if isinstance(value, Tensor):
                    value.fill_(new[0])
                else:
                    group[key] = tuple(new) if isinstance(value, (tuple, list)) else type(value)(new[0])


class _Shadow(JoinHook):
    """Takes part in the steps of the others on a rank without data."""

    def __init__(self, optimizer: SecondOrderOptimizer, inputs: UnevenInputs) -> None:
        self._optimizer, self._inputs = optimizer, inputs

    def main_hook(self) -> None:
        """Take one step without data."""
        self._inputs.has_joined = True
        self._inputs.forget_gradients()
        self._optimizer.preconditioner.hooks.discard()
        self._optimizer.step()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Resume ordinary steps with the options of a rank that had data to the end."""
        self._inputs.end(is_last_joiner)
        self._optimizer._join_config = JOIN_DISABLED


def _numbers_of(value: Any) -> list[float]:
    """Return a number, or the numbers of a tuple, as floats."""
    if isinstance(value, (tuple, list)):
        return [x for part in value for x in _numbers_of(part)]
    single = isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
    return [float(value) if single else float("nan")]


def _dense(gradient: Tensor) -> Tensor:
    """Return a gradient as one contiguous block of memory."""
    dense = gradient.to_dense() if gradient.layout != torch.strided else gradient.resolve_conj()
    return dense.contiguous()
