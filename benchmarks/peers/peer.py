"""A wrapper for third-party optimizers with the interface that schedules and byte counts expect."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def evaluated(closure: Callable[[], Any] | None) -> Any:
    """Call the closure of a step with gradients enabled, and return its result; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class Peer(Optimizer):
    """Combines optimizers that each train a part of one model.

    Its parameter groups *are* those of the parts, so a schedule for it also controls the parts.
    """

    def __init__(
        self, *parts: Optimizer, before: Callable[[], object] | None = None, beside: Iterable[Any] = ()
    ) -> None:
        """Combine parts that share no parameters.

        Each step calls ``before`` when all gradients are there, before it calls the parts. Objects in ``beside`` are
        included in the memory usage and in the ``state_dict``.
        """
        self.parts = parts
        self._before, self._beside = before, tuple(beside)
        super().__init__(_groups(parts), {})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = evaluated(closure)
        if self._before is not None:
            self._before()
        for part in self.parts:
            part.step()
        return loss

    def memory_usage(self) -> dict[str, int]:
        """Return the bytes of all tensors of the parts, except for parameters and gradients.

        Returns:
            Bytes, as ``"total"``.
        """
        own = [tensor for group in self.param_groups for p in group["params"] for tensor in (p, p.grad)]
        return {"total": held_bytes([self.parts, self._before, self._beside], leave_out=own)}

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in (*self.parts, *self._beside)]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        for part, state in zip((*self.parts, *self._beside), state_dict["parts"], strict=True):
            part.load_state_dict(copy.deepcopy(state))  # some optimizers modify or keep what they are given
        self.param_groups = _groups(self.parts)


def _groups(parts: Iterable[Optimizer]) -> list[dict[str, Any]]:
    return [group for part in parts for group in part.param_groups]


def held_bytes(roots: object, leave_out: Iterable[Tensor | None] = ()) -> int:
    """Return the bytes of all tensors that are reachable from objects, not through modules. Storages count once."""
    storages = {tensor.untyped_storage() for tensor in _tensors(roots, set())}
    known = {tensor.untyped_storage() for tensor in leave_out if tensor is not None}
    return sum(storage.nbytes() for storage in storages - known)


def _tensors(value: object, seen: set[int]) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
        return
    if id(value) in seen or isinstance(value, nn.Module | ModuleType | type | str | bytes | int | float):
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        inside: Iterable[object] = value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        inside = value
    else:  # a bound method leads to its object
        inside = [*getattr(value, "__dict__", {}).values(), getattr(value, "__self__", None)]
    for item in inside:
        yield from _tensors(item, seen)
