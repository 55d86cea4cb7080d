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
        self._shared: dict[Hashable, tuple[Sequence[Tensor], Tensor]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes held, without those of stacks that share their memory with the tensors."""
        return sum(stack.nbytes for *_, stack in self._kept.values())

    def clear(self) -> None:
        """Release all stacks."""
        self._kept.clear()
        self._shared.clear()

    def of(self, name: Hashable, tensors: Sequence[Tensor], *stamp: Hashable) -> Tensor:
        """Return tensors of equal shape as one tensor ``[k, ...]``.

        Args:
            name: Name of the stack, which replaces an earlier one of this name.
            tensors: The tensors.
            stamp: Values that change whenever the tensors do. Torch counts changes in place as well, but not those by
                messages.
        """
        versions = (*(t._version for t in tensors), *stamp)
        kept = self._kept.get(name)
        if kept is None or kept[1] != versions or any(map(is_not, kept[0], tensors)):
            kept = self._kept[name] = tensors, versions, torch.stack(list(tensors))
        return kept[2]

    def shared(self, name: Hashable, key: str, states: Sequence[dict[str, Any]]) -> Tensor:
        """Return one entry of several states as a tensor ``[k, ...]`` that shares its memory with the states.

        The entries become views of the stack, so changes in place need no new stack.

        Args:
            name: Name of the stack, which replaces an earlier one of this name.
            key: Key of the entry in the states, of equal shape and dtype.
            states: The states, whose entries are replaced if they are not views of the stack yet.
        """
        kept = self._shared.get(name)
        if kept is None or len(kept[0]) != len(states) or any(map(is_not, kept[0], (s[key] for s in states))):
            stack = torch.stack([state[key] for state in states])
            parts = [stack[i] for i in range(len(states))]
            for state, part in zip(states, parts, strict=True):
                state[key] = part
            kept = self._shared[name] = parts, stack
        return kept[1]


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
