"""Stacks of small matrices of one size, which are processed together and separated again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

ItemT = TypeVar("ItemT")

#: Largest number of entries of a stack.
LIMIT = 1 << 24


def bounded(items: Sequence[ItemT], numbers: Callable[[ItemT], int]) -> Iterator[list[ItemT]]:
    """Yield items in stacks of a bounded size; ``numbers`` returns the size of each item."""
    stack, size = list[ItemT](), 0
    for item in items:
        if stack and size + numbers(item) > LIMIT:
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
