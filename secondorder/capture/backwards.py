"""Backward passes since the last step, and where their gradients went.

``loss.backward()`` accumulates in ``.grad``; ``torch.autograd.grad(loss, parameters)`` returns gradients and leaves
``.grad`` alone. What a step uses is in ``.grad`` when it is taken, so the statistics have to be those of the backward
passes behind it:

* where every pass returned its gradients, the user adds them up, and all passes count;
* where some accumulated, those count, as long as ``.grad`` was not reset between them;
* where it was reset, the passes after the last reset count, if ``.grad`` still points where they left it. Otherwise the
  user kept gradients elsewhere, and nobody can tell of which passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

REPLACED = (
    "the gradients of a step are not those that its last backward passes left in .grad, so the statistics of some "
    "micro-batches are missing and none are used. Let .grad accumulate until the step; or reset it to zeros between "
    "micro-batches, with model.zero_grad(set_to_none=False); or use torch.autograd.grad for every micro-batch"
)

#: Entries of a gradient that are kept to recognize it.
_KEPT = 1024
#: Squared distance of two gradients of length 1 that count as the same: in-place clipping and unscaling round.
_SAME = 1e-4

#: Stands for the gradient of a parameter that is cut over ranks: its pieces get theirs behind autograd's back.
ALWAYS = object()


def accumulates(node: Any) -> bool | None:
    """Whether the backward that is running accumulates the gradient of the parameter behind ``node``.

    Returns:
        True if it does, False if it returns the gradient instead, None if it does not compute it, as ``autograd.grad``
        with respect to inputs, or without a node.
    """
    if node is None or node is ALWAYS:
        return True if node is ALWAYS else None
    will_execute = getattr(torch._C, "_will_engine_execute_node", None)
    if will_execute is None:
        return True
    try:
        return True if will_execute(node) else None
    except RuntimeError:
        return False  # torch does not answer for a parameter that autograd.grad was asked for


class Backwards:
    """Which of the backward passes since the last step the gradients in ``.grad`` may come from.

    Args:
        are_gone: Tells whether gradients were discarded; see :func:`are_gone`.

    Attributes:
        owners: The parameter of each layer whose gradient decides.
        has_run: Whether any pass has been seen.
        accumulated: Whether a pass has accumulated in ``.grad``.
        returned: Whether a pass has returned its gradients.
        is_unclear: Whether statistics of earlier passes were dropped, so that :meth:`were_replaced` has to look.
    """

    def __init__(self, are_gone: Callable[[Sequence[nn.Parameter], bool], bool]) -> None:
        self._are_gone = are_gone
        self.owners: list[nn.Parameter] = []
        self._nodes: dict[int, Any] = {}
        self.clear()

    def clear(self) -> None:
        """Begin again, after a step."""
        self.has_run = self.accumulated = self.returned = self.is_unclear = self._is_mixed = False
        self._left: list[Tensor | None] | None = None
        self._task = -1

    def watch(self, due: Iterable[int]) -> None:
        """Prepare for backward passes that compute the gradients of these owners, by index."""
        self._nodes = {i: _node_of(self.owners[i]) for i in due}

    @property
    def only_returned(self) -> bool:
        """Whether there are gradients, all of them outside ``.grad``."""
        return self.returned and not self.accumulated

    def kind(self, index: int) -> bool | None:
        """Whether the pass that is running accumulates the gradient of an owner; see :func:`accumulates`."""
        return accumulates(self._nodes.get(index))

    def note(self, accumulated: bool) -> None:
        """Note a pass whose statistics count."""
        self.accumulated |= accumulated
        self.returned |= not accumulated
        if accumulated and self.is_unclear:
            self._remember_later()

    def note_observed(self) -> None:
        """Note a pass after an observation, which counts whatever the pass does with its gradients."""
        for kind in {accumulates(node) for node in self._nodes.values()} - {None}:
            if self.returned if kind else self.accumulated:
                self.is_unclear = self._is_mixed = True  # nobody can take the two kinds of passes apart
            self.note(bool(kind))

    def disregards(self, accumulated: bool) -> bool:
        """Whether a pass does not count: one that returns gradients after others that have accumulated them."""
        if accumulated or not self.accumulated:
            return False
        # What this one returns may be for another purpose: .grad will tell at the step.
        if not self.is_unclear:
            self.is_unclear = True
            self._left = [_part(p) for p in self.owners]
        return True

    def gradients_are_gone(self, reduced: bool) -> bool:
        """Whether accumulated gradients were discarded since; ``reduced`` if those of cut parameters had come."""
        return self.has_run and not self.only_returned and self._are_gone(self.owners, reduced)

    def _remember_later(self) -> None:
        """Keep a part of the gradients as they are when the backward pass that is running is over."""
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return
        self._task = task
        owners = list(self.owners)

        def remember() -> None:
            self._left = [_part(p) for p in owners]

        queue = torch.autograd.Variable._execution_engine.queue_callback
        # In two stages: DistributedDataParallel averages in a callback, which the second stage comes after.
        queue(lambda: queue(remember))

    def were_replaced(self) -> bool:
        """Whether the gradients point elsewhere than the last backward pass left them, if statistics were dropped.

        Returns:
            That; True where nothing tells. It waits for the device, and only in the rare steps that have to look.
        """
        if not self.is_unclear or self._is_mixed or self._left is None:
            return self.is_unclear
        differ = [_differ(before, p) for before, p in zip(self._left, self.owners, strict=True)]
        found = [d for d in differ if isinstance(d, Tensor)]
        return True in differ or bool(found and torch.stack([d.to(found[0].device) for d in found]).any())


def is_cut(parameter: nn.Parameter) -> bool:
    """Whether ``fully_shard`` has cut a parameter over ranks."""
    return hasattr(parameter, "device_mesh")


def are_gone(owners: Sequence[nn.Parameter], reduced: bool) -> bool:
    """Whether no parameter has a gradient; those that ``fully_shard`` cuts are elsewhere until they are reduced."""
    return all(p.grad is None and (reduced or not is_cut(p)) for p in owners)


def _node_of(parameter: nn.Parameter) -> Any:
    if parameter.requires_grad and is_cut(parameter):
        return ALWAYS
    return torch.autograd.graph.get_gradient_edge(parameter).node if parameter.requires_grad else None


def _part(p: nn.Parameter) -> Tensor | None:
    """Some entries of a gradient, of those that are cut over ranks some of this rank's piece."""
    grad: Any = p.grad
    if grad is None:
        return None
    grad = grad.detach()
    grad = grad.to_local() if hasattr(grad, "to_local") else grad
    grad = grad.coalesce().values() if grad.layout != torch.strided else grad
    grad = torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad
    flat = grad.reshape(-1)
    part: Tensor = flat[:: max(1, len(flat) // _KEPT)].to(torch.float32 if p.device.type == "mps" else torch.float64)
    return part.clone() if part.data_ptr() == flat.data_ptr() else part


def _differ(before: Tensor | None, p: nn.Parameter) -> Tensor | bool:
    """Whether a gradient points elsewhere than it did, 0-dim bool where that is a question for the device."""
    now = _part(p)
    if before is None or now is None:
        return before is not now and before is None
    if before.shape != now.shape:
        return True
    first, second = (x / torch.linalg.vector_norm(x).clamp(min=torch.finfo(x.dtype).tiny) for x in (before, now))
    far: Tensor = (first - second).square().sum() > _SAME
    return far
