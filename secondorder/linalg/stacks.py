"""Stacks of small matrices of one size, worked on together and taken apart again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

ItemT = TypeVar("ItemT")

#: Numbers of a stack that are worked on together.
LIMIT = 1 << 24


def bounded(items: Sequence[ItemT], numbers: Callable[[ItemT], int]) -> Iterator[list[ItemT]]:
    """Items in stacks of a bounded size, ``numbers`` being that of each."""
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
    """Tensors ``[(Γ,) …]`` of equal trailing sizes as one ``[k, …]``."""
    flat = [part.reshape(-1, *part.shape[part.dim() - trailing :]) for part in parts]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def parted(joined: Tensor, leads: Sequence[torch.Size]) -> list[Tensor]:
    """The inverse: one tensor for each of the leading shapes."""
    parts = joined.split([lead.numel() for lead in leads])
    return [part.reshape((*lead, *joined.shape[1:])) for part, lead in zip(parts, leads, strict=True)]
