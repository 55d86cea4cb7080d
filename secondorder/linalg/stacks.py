"""Stacks of small matrices of one size, which are processed together and separated again."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from operator import is_not
from typing import Any, TypeVar

import torch
from torch import Tensor

ItemT = TypeVar("ItemT")
TensorT = TypeVar("TensorT", bound=Tensor)

#: Largest number of entries of a stack.
LIMIT = 1 << 24
#: Entries that a CPU updates together, which stay in its cache.
_CACHED = 2**15


class Stacks:
    """Stacks of tensors that are kept until one of the tensors changes."""

    def __init__(self) -> None:
        #: The tensors with their versions, and the stack, by name.
        self._kept: dict[Hashable, tuple[Sequence[Tensor], tuple[Hashable, ...], Tensor]] = {}
        #: The parts of a stack that replaced the tensors, and the stack, by name.
        self._shared: dict[Hashable, tuple[Sequence[Tensor], Tensor | None]] = {}
        #: All of these parts, by identity.
        self._parts: dict[int, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes held, without those of stacks that share their memory with the tensors."""
        return sum(stack.nbytes for *_, stack in self._kept.values())

    def clear(self) -> None:
        """Release all stacks."""
        for kept in (self._kept, self._shared, self._parts):
            kept.clear()

    def of(self, name: Hashable, tensors: Sequence[Tensor], *stamp: Hashable) -> Tensor:
        """Return tensors of equal shape as one tensor ``[k, ...]``.

        Args:
            name: Name of the stack, which replaces an earlier one of this name.
            tensors: The tensors.
            stamp: Values that change whenever the tensors do. Torch counts changes in place, but not by messages.
        """
        versions = (*(t._version for t in tensors), *stamp)
        kept = self._kept.get(name)
        if kept is None or kept[1] != versions or any(map(is_not, kept[0], tensors)):
            kept = self._kept[name] = tensors, versions, torch.stack(list(tensors))
        return kept[2]

    def shared(self, name: Hashable, key: str, states: Sequence[dict[str, Any]]) -> Tensor:
        """Return one entry of several states as a tensor ``[k, ...]`` that shares its memory with the states.

        The entries become views of the stack, so changes in place need no new stack. If some of them are views of
        another stack, because the same states are stacked in other combinations, the result is a copy.

        Args:
            name: Name of the stack, which determines the states.
            key: Key of the entry in the states, of equal shape and dtype.
            states: The states.
        """
        entries = [state[key] for state in states]
        parts, stack = self._shared.get(name, ((), None))
        if stack is not None and not any(map(is_not, parts, entries)):
            return stack
        stack, known = torch.stack(entries), set(map(id, parts))
        if any(self._parts.get(id(entry)) is entry and id(entry) not in known for entry in entries):
            return stack
        for part in parts:
            del self._parts[id(part)]
        found = [stack[i] for i in range(len(states))]
        for state, part in zip(states, found, strict=True):
            state[key] = part
        self._shared[name] = found, stack
        self._parts.update((id(part), part) for part in found)
        return stack

    def write_back(self, name: Hashable, key: str, states: Sequence[dict[str, Any]], stack: Tensor) -> None:
        """Copy a result of :meth:`shared` that was changed in place into the states, unless it shares their memory."""
        if self._shared.get(name, ((), None))[1] is not stack:
            torch._foreach_copy_([state[key] for state in states], list(stack.unbind()))


def bounded(items: Iterable[ItemT], numbers: Callable[[ItemT], int], limit: int | None = None) -> Iterator[list[ItemT]]:
    """Yield items in stacks of a bounded size; ``numbers`` returns the size of each item."""
    stack, size, limit = list[ItemT](), 0, LIMIT if limit is None else limit
    for item in items:
        if stack and size + numbers(item) > limit:
            yield stack
            stack, size = [], 0
        stack.append(item)
        size += numbers(item)
    if stack:
        yield stack


def joined(parts: Sequence[Tensor], trailing: int) -> Tensor:
    """Join tensors ``[(Γ,) …]`` of equal trailing sizes into one ``[k, …]``."""
    flat = [part.reshape(-1, *part.shape[part.dim() - trailing :]) for part in parts]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def parted(joined: Tensor, leads: Sequence[torch.Size]) -> list[Tensor]:
    """Split a joined tensor again into one tensor for each of the leading shapes."""
    parts = joined.split([lead.numel() for lead in leads])
    return [part.reshape((*lead, *joined.shape[1:])) for part, lead in zip(parts, leads, strict=True)]


def foreach_parts(tensors: Sequence[TensorT], foreach: bool | None) -> Iterator[list[TensorT]]:
    """Yield tensors of one device and dtype to update in one call; on a CPU, as many as fit into its cache."""
    if foreach is False:
        yield from ([t] for t in tensors)
        return
    kinds: dict[tuple[torch.device, torch.dtype], list[TensorT]] = {}
    for t in tensors:
        kinds.setdefault((t.device, t.dtype), []).append(t)
    for (device, _), alike in kinds.items():
        if foreach is None and device.type == "cpu":
            yield from bounded(alike, Tensor.numel, _CACHED)
        else:
            yield alike
