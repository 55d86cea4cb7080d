"""Flat buffers for tensors: symmetric matrices as triangles, lists cut into messages, and buffers that are reused.

:mod:`secondorder.linalg.triangles` has the triangles. The functions that cut lists into messages take only sizes, so a
plan can use them to compute what a step will send.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from secondorder.linalg.triangles import pack, triangle, unpack

# Above this share of padding, a reduce-scatter, whose parts are all as large as the largest, sends too many zeros.
MOST_PADDING = 0.10
# Above this multiple of the payload, the receive buffer of an all-to-all takes too much memory.
MOST_RECEIVED = 2.0


def packed_numel(shape: Sequence[int], symmetric: bool) -> int:
    """Return the number of elements that are sent for a tensor.

    Args:
        shape: Shape of the tensor.
        symmetric: Whether it is a symmetric matrix, or a batch of them ``[..., n, n]``.

    Returns:
        The number of elements.
    """
    return prod(shape[:-2]) * triangle(shape[-1]) if symmetric else prod(shape)


# ---------------------------------------------------------------------- lists in buffers
class Item(NamedTuple):
    """A tensor of a call.

    Attributes:
        tensor: The tensor, into which its result is written.
        symmetric: Whether it is sent as a triangle.
        root: Rank within the group that receives or has the tensor.
        position: Position of the tensor in the caller's list.
    """

    tensor: Tensor
    symmetric: bool = False
    root: int = 0
    position: int = 0

    @property
    def numel(self) -> int:
        """Number of elements that are sent."""
        return packed_numel(self.tensor.shape, self.symmetric)


def real(tensor: Tensor) -> Tensor:
    """Return a tensor without its graph, sharing its memory. A complex tensor becomes pairs ``[..., 2]``."""
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()


def total(items: Sequence[Item]) -> int:
    """Return the number of elements that are sent for a list."""
    return sum(item.numel for item in items)


def by_dtype(items: Sequence[Item]) -> list[list[Item]]:
    """Group items by dtype and device; groups and items keep the order in which they first appear."""
    parts: dict[Hashable, list[Item]] = {}
    for item in items:
        parts.setdefault((item.tensor.dtype, item.tensor.device), []).append(item)
    return list(parts.values())


def _parts(buffer: Tensor, items: Sequence[Item]) -> list[tuple[Item, Tensor]]:
    """Yield each item with its part of a flat buffer, in which the items follow one another."""
    sizes = [item.numel for item in items]
    return list(zip(items, buffer[: sum(sizes)].split(sizes), strict=True)) if items else []


def fill(buffer: Tensor, items: Sequence[Item]) -> None:
    """Copy tensors to a flat buffer, one after the other, converted to its dtype."""
    plain = [(item.tensor, part.view(item.tensor.shape)) for item, part in _parts(buffer, items) if not item.symmetric]
    if plain:
        torch._foreach_copy_([part for _, part in plain], [tensor for tensor, _ in plain])
    for item, part in _parts(buffer, items):
        if item.symmetric:
            pack(item.tensor, part)


def drain(buffer: Tensor, items: Sequence[Item]) -> None:
    """Copy a flat buffer to tensors, converted to their dtype."""
    plain = [(item.tensor, part.view(item.tensor.shape)) for item, part in _parts(buffer, items) if not item.symmetric]
    if plain:
        torch._foreach_copy_([tensor for tensor, _ in plain], [part for _, part in plain])
    for item, part in _parts(buffer, items):
        if item.symmetric:
            unpack(part, item.tensor)


# ---------------------------------------------------------------------- lists cut into messages
def buckets(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Cut a list into messages.

    Args:
        sizes: Elements of each tensor on the wire.
        capacity: Elements of a message. A larger tensor is sent alone.

    Returns:
        Positions in each message, in order. Empty tensors are left out.
    """
    messages: list[list[int]] = []
    current: list[int] = []
    room = -1  # Room in the message that is being filled, which is the last one without a large tensor.
    for i, size in enumerate(sizes):
        if size > capacity:
            messages.append([i])
        elif size and size <= room:
            current.append(i)
            room -= size
        elif size:
            current = [i]
            messages.append(current)
            room = capacity - size
    return messages


def shared_buckets(sizes: Sequence[Sequence[int]], capacity: int) -> list[list[list[int]]]:
    """Cut lists with several roots into messages that contain about the same share of the list of every root.

    Args:
        sizes: Elements that are sent for each tensor, by rank in the group.
        capacity: Elements of a message. A larger tensor is sent alone.

    Returns:
        For each message and each rank, the positions in the list of that rank.
    """
    ranks = range(len(sizes))
    alone = [(rank, i) for rank in ranks for i, size in enumerate(sizes[rank]) if size > capacity]
    messages = [[[i] if rank == root else [] for rank in ranks] for root, i in alone]
    shares = [sum(size for size in of if size <= capacity) for of in sizes]
    count = -(-sum(shares) // capacity)
    shared: list[list[list[int]]] = [[[] for _ in ranks] for _ in range(count)]
    for rank, of in enumerate(sizes):
        before = 0
        for i, size in enumerate(of):
            if 0 < size <= capacity:  # the message that contains its middle sends it
                shared[(2 * before + size) * count // (2 * shares[rank])][rank].append(i)
                before += size
    return messages + [message for message in shared if any(message)]


def reduce_kind(shares: Sequence[int], rounded: bool = False) -> str:
    """Choose the collective that sums a message to several roots. It depends only on sizes, so all ranks agree.

    Args:
        shares: Elements that each rank of the group receives.
        rounded: Whether elements are sent in a smaller dtype than that of the sum.

    Returns:
        ``"reduce_scatter"`` if padding every share to the largest adds at most 10 %; otherwise ``"all_to_all"`` if the
        largest receive buffer is at most twice the payload; otherwise ``"reduce"``, root by root, or, if rounded,
        ``"twice"``, which is an all-to-all with equal parts and a second one that sends the sums to their roots.
    """
    padded, payload = len(shares) * max(shares), sum(shares)
    if rounded:
        return "all_to_all" if padded <= MOST_RECEIVED * payload else "twice"
    if padded <= (1 + MOST_PADDING) * payload:
        return "reduce_scatter"
    several = sum(share > 0 for share in shares) > 1
    return "all_to_all" if several and padded <= MOST_RECEIVED * payload else "reduce"


# ---------------------------------------------------------------------- buffers
class Loan(NamedTuple):
    """A part of a buffer that a message uses until it is done."""

    view: Tensor
    whole: Tensor
    key: Hashable


class Buffers:
    """Flat buffers that are kept and reused, but never by two messages at once.

    They are kept by group, dtype and device. Groups are compared by identity, not by size.
    """

    def __init__(self) -> None:
        self._free: dict[Hashable, list[Tensor]] = {}
        self._lent: dict[int, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, including those in use."""
        free = (buffer for buffers in self._free.values() for buffer in buffers)
        return sum(buffer.nbytes for buffer in (*free, *self._lent.values()))

    def take(self, group: object, numel: int, dtype: torch.dtype, device: torch.device) -> Loan:
        """Return the smallest free buffer ``[numel]`` that is large enough. Its content is undefined."""
        key = (id(group), dtype, device)
        free = self._free.setdefault(key, [])
        fitting = [i for i, buffer in enumerate(free) if buffer.numel() >= numel]
        if fitting:
            whole = free.pop(min(fitting, key=lambda i: free[i].numel()))
        else:
            if free:  # replace the largest one, so that the number of buffers does not grow
                free.pop(max(range(len(free)), key=lambda i: free[i].numel()))
            whole = torch.empty(numel, dtype=dtype, device=device)
        self._lent[id(whole)] = whole
        return Loan(whole[:numel], whole, key)

    def give(self, loan: Loan) -> None:
        """Take a buffer back."""
        del self._lent[id(loan.whole)]
        self._free.setdefault(loan.key, []).append(loan.whole)

    def clear(self) -> None:
        """Release the buffers that no message uses."""
        self._free.clear()
