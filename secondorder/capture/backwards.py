"""Backward passes since the last step, and the destinations of their gradients.

``loss.backward()`` accumulates in ``.grad``; ``torch.autograd.grad(loss, parameters)`` returns gradients and leaves
``.grad`` unchanged. A step uses the gradients in ``.grad``, so the statistics have to be of the passes behind them:

* if every pass returned its gradients, the user adds them up, and all passes count;
* if some passes accumulated, these count, as long as ``.grad`` was not reset between them;
* if it was reset, the passes after the last reset count if ``.grad`` still has their gradients. Otherwise, the
  user kept gradients elsewhere, and their passes are unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

REPLACED = (
    "the gradients of a step are not those that its last backward passes left in .grad, so the statistics of some "
    "micro-batches are missing and none are used. Let .grad accumulate until the step; or reset it to zeros between "
    "micro-batches, with model.zero_grad(set_to_none=False); or use torch.autograd.grad for every micro-batch. If you "
    "discard the gradients of a pass, such as that of a generator through a discriminator, run it in pause_capture()"
)

#: Number of entries of a gradient that are kept to recognize it.
_KEPT = 1024
#: Squared distance of two gradients of length 1 that count as equal, since in-place clipping and unscaling round.
_SAME = 1e-4

#: Represents the gradient of a sharded parameter, whose shards get their gradients outside of autograd.
ALWAYS = object()


def accumulates(node: Any) -> bool | None:
    """Whether the running backward pass accumulates the gradient of the parameter behind ``node``.

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
        return False  # torch has no answer for a parameter that was passed to autograd.grad


class Backwards:
    """Determines the backward passes since the last step from which the gradients in ``.grad`` may come.

    Args:
        are_gone: Returns whether gradients were discarded; see :func:`are_gone`.

    Attributes:
        owners: The parameter of each layer whose gradient is checked.
        has_run: Whether any pass has been seen.
        accumulated: Whether a pass has accumulated in ``.grad``.
        returned: Whether a pass has returned its gradients.
        is_unclear: Whether statistics of earlier passes were dropped, so that :meth:`were_replaced` has to check.
    """

    def __init__(self, are_gone: Callable[[Sequence[nn.Parameter], bool], bool]) -> None:
        self._are_gone = are_gone
        self.owners: list[nn.Parameter] = []
        self._nodes: dict[int, Any] = {}
        self.clear()

    def clear(self) -> None:
        """Begin again, after a step."""
        self.has_run = self.accumulated = self.returned = self.is_unclear = self._is_mixed = False
        self._outer = False
        self._left: list[Tensor | None] | None = None
        self._task = -1

    def watch(self, due: Iterable[int]) -> None:
        """Prepare for backward passes that compute the gradients of these owners, by index."""
        self._nodes = {i: _node_of(self.owners[i]) for i in due}

    @property
    def only_returned(self) -> bool:
        """Whether there are gradients, all of them outside ``.grad``."""
        return self.returned and not self.accumulated

    def kind(self, index: int, again: bool) -> bool | None:
        """Whether the pass that is running accumulates the gradient of an owner; see :func:`accumulates`."""
        found = accumulates(self._nodes.get(index))
        if again and found is False:  # a Function recomputed the layer, and returns the gradient to an outer pass
            return self._outer
        if not again and found is not None:
            self._outer = found
        return found

    def note(self, accumulated: bool) -> None:
        """Record a pass whose statistics count."""
        self.accumulated |= accumulated
        self.returned |= not accumulated
        if accumulated and self.is_unclear:
            self._remember_later()

    def note_observed(self) -> None:
        """Record a pass after an observation, which counts regardless of the destination of its gradients."""
        for kind in {accumulates(node) for node in self._nodes.values()} - {None}:
            if self.returned if kind else self.accumulated:
                self.is_unclear = self._is_mixed = True  # the two kinds of passes cannot be separated
            self.note(bool(kind))

    def disregards(self, accumulated: bool) -> bool:
        """Whether a pass does not count, because it returns gradients after others have accumulated them."""
        if accumulated or not self.accumulated:
            return False
        # The returned gradients may have another purpose. The step checks .grad.
        if not self.is_unclear:
            self.is_unclear = True
            self._left = [_part(p) for p in self.owners]
        return True

    def gradients_are_gone(self, reduced: bool) -> bool:
        """Whether accumulated gradients were discarded since. ``reduced`` means that sharded parameters had them."""
        return self.has_run and not self.only_returned and self._are_gone(self.owners, reduced)

    def _remember_later(self) -> None:
        """Store a part of the gradients at the end of the running backward pass."""
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return
        self._task = task
        owners = list(self.owners)

        def remember() -> None:
            self._left = [_part(p) for p in owners]

        queue = torch.autograd.Variable._execution_engine.queue_callback
        # Use two stages, because DistributedDataParallel averages in a callback before the second stage.
        queue(lambda: queue(remember))

    def remember(self) -> None:
        """Store the gradients again, after passes that were not captured."""
        self._left = self._left and [_part(p) for p in self.owners]

    def were_replaced(self) -> bool:
        """Whether the gradients differ from those of the last backward pass, if statistics were dropped.

        Returns:
            Whether they differ; True if it cannot be determined. It waits for the device, but only in rare steps.
        """
        if not self.is_unclear or self._is_mixed or self._left is None:
            return self.is_unclear
        differ = [_differ(before, p) for before, p in zip(self._left, self.owners, strict=True)]
        found = [d for d in differ if isinstance(d, Tensor)]
        return True in differ or bool(found and torch.stack([d.to(found[0].device) for d in found]).any())


def is_cut(parameter: nn.Parameter) -> bool:
    """Whether ``fully_shard`` has sharded a parameter."""
    return hasattr(parameter, "device_mesh")


def are_gone(owners: Sequence[nn.Parameter], reduced: bool) -> bool:
    """Whether no parameter has a gradient. Gradients of sharded parameters are elsewhere until they are reduced."""
    return all(p.grad is None and (reduced or not is_cut(p)) for p in owners)


def _node_of(parameter: nn.Parameter) -> Any:
    if parameter.requires_grad and is_cut(parameter):
        return ALWAYS
    with torch.inference_mode(False):
        return torch.autograd.graph.get_gradient_edge(parameter).node if parameter.requires_grad else None


def _part(p: nn.Parameter) -> Tensor | None:
    """Some entries of a gradient; for a sharded one, some of this rank's shard."""
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
    """Whether a gradient has changed its direction, as a 0-dim bool tensor if it is on a device."""
    now = _part(p)
    if before is None or now is None:
        return before is not now and before is None
    if before.shape != now.shape:
        return True
    first, second = (x / torch.linalg.vector_norm(x).clamp(min=torch.finfo(x.dtype).tiny) for x in (before, now))
    far: Tensor = (first - second).square().sum() > _SAME
    return far
