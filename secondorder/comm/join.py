"""Uneven inputs: what a rank does whose data ended while others still train (``torch.distributed.algorithms.join``).

::

    live      DDP averages gradients │ [1 if live, by rank] summed │ lowest live rank ─► gradients, options │ the stages
    joined    zeros to DDP's average │ the same                    │ takes them over                        │ the stages

A rank that has joined keeps the last gradient that it had, and may own layers: it would precondition that old gradient
for everybody. So it takes over the gradients of a live rank, adds nothing to the statistics, and goes through every
stage like the others. Outside of an active ``Join`` no message is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook, _JoinConfig

from secondorder.comm.strategy import CommStrategy

if TYPE_CHECKING:
    from secondorder.preconditioners.base import Preconditioner

Group = dict[str, Any]


class JoiningOptimizer(Joinable):
    """Makes an optimizer one of the objects that ``Join`` takes, after the model in its list."""

    # Of the class too, as copies are made without the constructor.
    _join_config = _JoinConfig.construct_disabled_join_config()
    #: Whether this rank has no data left, while it takes the steps of the others inside ``Join``.
    has_joined = False

    if TYPE_CHECKING:
        comm: CommStrategy
        param_groups: list[Group]
        defaults: dict[str, Any]

        def step(self) -> None: ...
        @property
        def preconditioner(self) -> Preconditioner: ...
        def _follow_schedule(self) -> None: ...

    def _why_not_joinable(self) -> str | None:
        """Why a rank without data cannot take the steps of the others, if it cannot."""
        if self.comm.data_world < self.comm.world:
            return f"under {self.comm!r} some ranks never have data; give the others equally many batches"
        return None

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What ``Join`` calls on a rank that has no data left.

        Args:
            **kwargs: Those of ``Join``; none is used.

        Returns:
            The hook.

        Raises:
            NotImplementedError: If such a rank cannot take the steps of the others.
        """
        reason = self._why_not_joinable()
        if reason is not None:
            raise NotImplementedError(f"{type(self).__name__} cannot take part in Join: {reason}")
        return _Shadow(self)

    @property
    def join_device(self) -> torch.device:
        """Device of the messages of ``Join``."""
        device: torch.device = next(p.device for group in self.param_groups for p in group["params"])
        return device

    @property
    def join_process_group(self) -> Any:
        """Group of the messages of ``Join``: the default one, as of ``DistributedDataParallel``."""
        return dist.group.WORLD

    # ------------------------------------------------------------------ the part of a step
    def _average_gradients(self, params: Sequence[nn.Parameter]) -> None:
        """Bring gradients to their mean, where the strategy does that, and inside of ``Join`` to ranks without data."""
        joins = self._join_config.enable
        if joins and not self.has_joined:
            Join.notify_join_context(self)
        self.comm.average_gradients(params)
        if joins and self.comm.combines and (source := _source(self)) is not None:
            _copy_gradients(self, source)
            if self.has_joined and hasattr(self, "_follow_schedule"):
                self._follow_schedule()  # as the others did in their forward


class _Shadow(JoinHook):
    """Takes the steps of the others on a rank without data."""

    def __init__(self, optimizer: JoiningOptimizer) -> None:
        self._optimizer = optimizer

    def main_hook(self) -> None:
        """Take one step without data."""
        optimizer = self._optimizer
        optimizer.has_joined = True
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = None  # of the last batch
        optimizer.preconditioner.discard()
        optimizer.step()

    def post_hook(self, is_last_joiner: bool) -> None:
        """End: the steps to come are ordinary ones again, under the options of a rank that had data to the end."""
        optimizer = self._optimizer
        optimizer.has_joined = not is_last_joiner
        if optimizer.comm.combines:
            _share_options(optimizer)
        optimizer.has_joined = False
        optimizer._join_config = _JoinConfig.construct_disabled_join_config()


# ---------------------------------------------------------------------- messages between ranks with and without data
def _share_options(optimizer: JoiningOptimizer) -> None:
    """Give ranks that joined early the options of one that had data to the end."""
    if (source := _source(optimizer)) is not None:
        own = _numbers(optimizer)
        header = torch.tensor([value for _, _, value in own], dtype=torch.float64, device=optimizer.join_device)
        optimizer.comm.copy_from(source, [header])
        _follow_options(optimizer, header.tolist())


def _source(optimizer: JoiningOptimizer) -> int | None:
    """Lowest rank that has data; None if all have."""
    present = torch.zeros(dist.get_world_size(), dtype=torch.float64)
    present[optimizer.comm.rank] = float(not optimizer.has_joined)
    live = optimizer.comm.agree(present.to(optimizer.join_device)) > 0
    return None if live.all() else int(live.to(torch.uint8).argmax())


def _copy_gradients(optimizer: JoiningOptimizer, source: int) -> None:
    """Copy gradients and the numbers among the options from one rank to those that have joined."""
    comm, device = optimizer.comm, optimizer.join_device
    params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    words = [float(p.grad is not None) for p in params] + [value for _, _, value in _numbers(optimizer)]
    header = torch.tensor(words, dtype=torch.float64, device=device)
    comm.copy_from(source, [header])
    flags, numbers = header.cpu().split([len(params), len(words) - len(params)])
    sent = [p for p, flag in zip(params, flags.tolist(), strict=True) if flag]
    if comm.rank == source:
        found = [_dense(cast(Tensor, p.grad)) for p in sent]
    else:
        found = [torch.empty(p.shape, dtype=p.dtype, device=p.device) for p in sent]
    comm.copy_from(source, [torch.view_as_real(x) if x.is_complex() else x for x in found])
    if optimizer.has_joined:
        for p, gradient in zip(sent, found, strict=True):
            p.grad = gradient
        _follow_options(optimizer, numbers.tolist())


def _numbers(optimizer: JoiningOptimizer) -> list[tuple[Group, str, float]]:
    """The numbers among the options of every group, those of tuples one by one, NaN for what is none now."""
    return [
        (group, key, number)
        for group in optimizer.param_groups
        for key in sorted(optimizer.defaults)
        for number in _numbers_of(group[key])
    ]


def _follow_options(optimizer: JoiningOptimizer, numbers: Sequence[float]) -> None:
    """Take over what a scheduler has changed, which runs where there is data."""
    if not optimizer.has_joined:
        return
    theirs = iter(numbers)
    for group in optimizer.param_groups:
        for key in sorted(optimizer.defaults):
            value = group[key]
            own = _numbers_of(value)
            new = [next(theirs) for _ in own]
            if own == new or any(x != x for x in (*own, *new)):
                continue
            if isinstance(value, Tensor):
                value.fill_(new[0])
            else:
                group[key] = tuple(new) if isinstance(value, (tuple, list)) else type(value)(new[0])


def _numbers_of(value: Any) -> list[float]:
    """A number, or the numbers of a tuple, as floats."""
    if isinstance(value, (tuple, list)):
        return [x for part in value for x in _numbers_of(part)]
    single = isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
    return [float(value) if single else float("nan")]


def _dense(gradient: Tensor) -> Tensor:
    """A gradient as one contiguous piece of memory."""
    dense = gradient.to_dense() if gradient.layout != torch.strided else gradient.resolve_conj()
    return dense.contiguous()
