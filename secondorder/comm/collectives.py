"""Collectives on lists of tensors, which are sent in few messages, counted, and in the same order on every rank.

The messages of a call depend only on shapes, dtypes and options, so ranks that make the same calls in the same order
send the same messages. Messages are launched asynchronously and waited for on the current stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from secondorder.comm.buffers import Buffers, Item, buckets, by_dtype, real, shared_buckets, total
from secondorder.comm.counter import Counter
from secondorder.comm.layout import Route
from secondorder.comm.messages import Call, Work

# Number of messages of full capacity that may be in flight in one call. A call with more messages waits for its oldest
# ones first, which keeps staging small compared with the state.
IN_FLIGHT = 4

Roots = Mapping[int, Sequence[Tensor]]


def _items(tensors: Sequence[Tensor], symmetric: Sequence[bool] = (), root: int = 0) -> list[Item]:
    flags = symmetric or (False,) * len(tensors)
    return [Item(real(t), flag, root, i) for i, (t, flag) in enumerate(zip(tensors, flags, strict=True))]


def _stacks(tensors: Sequence[Tensor], size: int) -> list[Tensor]:
    return [tensor.new_empty((size, *tensor.shape)) for tensor in tensors]


class Collectives:
    """Collectives on lists of tensors.

    Tensors of one call may differ in dtype. Symmetric matrices ``[..., n, n]`` are sent as triangles. In a group of one
    rank, nothing is sent or counted.

    Args:
        wire_dtype: Dtype in which float32 tensors are sent. Sums are accumulated in float32 in the order of ranks, and
            every rank receives the same bits. It does not apply to tensors of another dtype or with ``exact=True``.
        bucket_bytes: Capacity of a message in bytes. A larger tensor is sent alone.
        device: Device of the vectors of :meth:`words`.

    Attributes:
        counter: Counter of the messages.
        buffers: Staging buffers, which are kept from call to call.
    """

    def __init__(
        self,
        *,
        wire_dtype: torch.dtype | None = None,
        bucket_bytes: int = 25 * 2**20,
        device: torch.device | str = "cpu",
    ) -> None:
        self.wire_dtype = wire_dtype
        self.bucket_bytes = bucket_bytes
        self.device: torch.device = torch.device(device)
        self.counter: Counter = Counter()
        self.buffers: Buffers = Buffers()

    @property
    def nbytes(self) -> int:
        """Bytes of the staging buffers."""
        return self.buffers.nbytes

    # ------------------------------------------------------------------ sums
    @torch.no_grad()
    def all_reduce(
        self, tensors: Sequence[Tensor], *, group: Any, stage: str, symmetric: Sequence[bool] = (), exact: bool = False
    ) -> Work:
        """Sum tensors over the ranks, in place, to the same bits on every rank.

        Args:
            tensors: Tensors, which have the same shapes and dtypes on every rank.
            group: Group of ranks; None for all ranks.
            stage: Stage under which the messages are counted.
            symmetric: Whether each tensor is a symmetric matrix.
            exact: Whether to ignore the wire dtype.

        Returns:
            The work to wait for.
        """
        return self._sum(tensors, group, stage, symmetric, exact)

    @torch.no_grad()
    def average(self, tensors: Sequence[Tensor], *, group: Any, stage: str, count: float) -> Work:
        """Sum tensors over the ranks and divide by a number, in place and without the wire dtype.

        Args:
            tensors: Tensors, which have the same shapes and dtypes on every rank.
            group: Group of ranks; None for all ranks.
            stage: Stage under which the messages are counted.
            count: The divisor, the same on every rank.

        Returns:
            The work to wait for.
        """
        return self._sum(tensors, group, stage, (), True, count)

    def _sum(
        self,
        tensors: Sequence[Tensor],
        group: Any,
        stage: str,
        symmetric: Sequence[bool],
        exact: bool,
        count: float | None = None,
    ) -> Work:
        call = self._call(group, stage)
        items = _items(tensors, symmetric)
        if call.size == 1:
            if count is not None:
                for tensor in tensors:
                    tensor.div_(count)
            return call.work
        for part in by_dtype(items):
            dtype = self._wire(part, exact)
            for bucket in self._buckets(part, dtype):
                if dtype == part[0].tensor.dtype:
                    call.all_reduce(bucket, count)
                else:
                    call.all_reduce_rounded(bucket, dtype)
        return call.work

    @torch.no_grad()
    def reduce(
        self,
        by_root: Roots,
        *,
        group: Any,
        stage: str,
        symmetric: Mapping[int, Sequence[bool]] | None = None,
        exact: bool = False,
    ) -> Work:
        """Sum lists of tensors, each to its own root, in as few messages as their sizes allow.

        Args:
            by_root: Tensors by the global rank that receives their sum; every rank gives all of them. On their root
                they hold the sum afterwards; on the other ranks they do not change.
            group: Group of ranks; None for all ranks.
            stage: Stage under which the messages are counted.
            symmetric: Whether each tensor is a symmetric matrix.
            exact: Whether to ignore the wire dtype.

        Returns:
            The work to wait for.
        """
        call = self._call(group, stage)
        if call.size == 1:
            return call.work
        for part in by_dtype(call.rooted(by_root, symmetric or {})):
            dtype = self._wire(part, exact)
            for message in self._messages(part, dtype, call.size):
                call.reduce(message, dtype)
        return call.work

    # ------------------------------------------------------------------ copies
    @torch.no_grad()
    def broadcast(
        self,
        by_root: Roots,
        *,
        group: Any,
        stage: str,
        symmetric: Mapping[int, Sequence[bool]] | None = None,
        exact: bool = False,
    ) -> Work:
        """Copy lists of tensors, each from its own root to all other ranks, in place.

        With a wire dtype the sender's own copy is rounded as well, so that all ranks hold the same bits.

        Args:
            by_root: Tensors by the global rank that has them; every rank gives all of them.
            group: Group of ranks; None for all ranks.
            stage: Stage under which the messages are counted.
            symmetric: Whether each tensor is a symmetric matrix.
            exact: Whether to ignore the wire dtype.

        Returns:
            The work to wait for.
        """
        call = self._call(group, stage)
        if call.size == 1:
            return call.work
        for part in by_dtype(call.rooted(by_root, symmetric or {})):
            dtype = self._wire(part, exact)
            for root in sorted({item.root for item in part}):
                for bucket in self._buckets([item for item in part if item.root == root], dtype):
                    call.broadcast(bucket, dtype)
        return call.work

    @torch.no_grad()
    def all_gather(self, tensors: Sequence[Tensor], *, group: Any, stage: str) -> Work:
        """Stack tensors of all ranks on every rank.

        Args:
            tensors: Tensors ``[...]``, which have the same shapes and dtypes on every rank.
            group: Group of ranks; None for all ranks.
            stage: Stage under which the messages are counted.

        Returns:
            The work; its ``wait()`` returns the list of stacks ``[size, ...]``, in the order of ranks.
        """
        call = self._call(group, stage)
        stacks = _stacks(tensors, call.size)
        call.work.result = lambda: stacks
        if call.size == 1:
            for tensor, stack in zip(tensors, stacks, strict=True):
                stack[0].copy_(tensor)
            return call.work
        for part in by_dtype(_items(tensors)):
            # The receive buffer takes most of the memory.
            capacity = max(1, self._capacity(part[0].tensor.dtype) // call.size)
            for positions in buckets([item.numel for item in part], capacity):
                call.all_gather([part[i] for i in positions], stacks)
        return call.work

    @torch.no_grad()
    def gather(self, by_root: Roots, *, group: Any, stage: str) -> Work:
        """Stack lists of tensors of all ranks, each on its own root, in one exchange.

        Args:
            by_root: Tensors ``[...]`` by the global rank that receives them; every rank gives all of them.
            group: Group of ranks; None for all ranks.
            stage: Stage under which the messages are counted.

        Returns:
            The work; its ``wait()`` returns, by root, stacks ``[size, ...]`` in the order of ranks, of this rank only.
        """
        call = self._call(group, stage)
        mine = [root for root in by_root if call.local(root) == call.rank]
        stacks = {root: _stacks(by_root[root], call.size) for root in mine}
        call.work.result = lambda: stacks
        if call.size == 1:
            for root in mine:
                for tensor, stack in zip(by_root[root], stacks[root], strict=True):
                    stack[0].copy_(tensor)
            return call.work
        for part in by_dtype(call.rooted(by_root, {})):
            for message in self._messages(part, part[0].tensor.dtype, call.size, stacked=True):
                call.gather(message, stacks[mine[0]] if mine else [])
        return call.work

    @torch.no_grad()
    def gather_uneven(
        self, shards: Sequence[Tensor], sizes: Sequence[Sequence[int]], *, group: Any, stage: str
    ) -> Work:
        """Assemble complete flat tensors on every rank from the parts of all ranks.

        Args:
            shards: This rank's part of each tensor, flat, possibly empty.
            sizes: Sizes of the parts of each tensor, in the order of ranks.
            group: Group of ranks; None for all ranks.
            stage: Stage under which the messages are counted.

        Returns:
            The work; its ``wait()`` returns the list of complete tensors, flat.
        """
        call = self._call(group, stage)
        wholes = [shard.new_empty(sum(parts)) for shard, parts in zip(shards, sizes, strict=True)]
        call.work.result = lambda: wholes
        if call.size == 1:
            for whole, shard in zip(wholes, shards, strict=True):
                whole.copy_(shard)
            return call.work
        for part in by_dtype(_items(shards)):
            capacity = max(1, self._capacity(part[0].tensor.dtype) // call.size)
            width = [2 if wholes[item.position].is_complex() else 1 for item in part]
            numbers = [[w * n for n in sizes[item.position]] for item, w in zip(part, width, strict=True)]
            call.gather_uneven(part, numbers, [real(whole).view(-1) for whole in wholes], capacity)
        return call.work

    @torch.no_grad()
    def reshard(
        self, tensors: Sequence[Tensor], routes: Sequence[Route], *, group: Any, stage: str, exact: bool = False
    ) -> Work:
        """Convert tensors of one dtype from one sharding to another, in one message.

        Args:
            tensors: This rank's shard of each tensor, flat, possibly empty.
            routes: Route of each tensor, as this rank sees it.
            group: Group of ranks; None for all ranks.
            stage: Stage under which the message is counted.
            exact: Whether to ignore the wire dtype.

        Returns:
            The work; its ``wait()`` returns this rank's new shard of each tensor, flat.
        """
        call = self._call(group, stage)
        wire = self._wire([Item(tensors[0])], exact)
        found = [x.new_empty(way.want[1] - way.want[0]) for x, way in zip(tensors, routes, strict=True)]
        call.work.result = lambda: found
        outgoing: list[list[Tensor]] = [[] for _ in range(call.size)]
        incoming: list[list[Tensor]] = [[] for _ in range(call.size)]
        for x, result, way in zip(tensors, found, routes, strict=True):
            first, start = way.have[0], way.want[0]
            for target, (begin, end) in way.gives:
                outgoing[target].append(x[begin - first : end - first])
            for source, (begin, end) in way.takes:
                incoming[source].append(result[begin - start : end - start])
            begin, end = way.keeps
            if begin < end:  # round them too, so that all ranks that need them have the same bits
                result[begin - start : end - start].copy_(x[begin - first : end - first].to(wire))
        travels = sum(way.travels for way in routes)
        if travels:
            call.exchange(outgoing, incoming, wire, tensors[0], travels)
        return call.work

    @torch.no_grad()
    def words(self, vector: Tensor, *, group: Any, stage: str, op: str = "sum") -> Tensor:
        """Combine a small vector of all ranks and wait for the result.

        Args:
            vector: Vector, which has the same length on every rank.
            group: Group of ranks; None for all ranks.
            stage: Stage under which the message is counted.
            op: ``"sum"``, ``"max"`` or ``"min"``.

        Returns:
            The result in float64, on the CPU.
        """
        call = self._call(group, stage)
        result = vector.detach().to(self.device, torch.float64, copy=True)
        if call.size > 1 and result.numel():
            call.combine(result, op)
        return result.cpu()

    # ------------------------------------------------------------------ what goes into a message
    def _call(self, group: Any, stage: str) -> Call:
        return Call(group, stage, self.counter, self.buffers, IN_FLIGHT * self.bucket_bytes)

    def _wire(self, part: Sequence[Item], exact: bool) -> torch.dtype:
        """Return the dtype in which items of one dtype are sent."""
        dtype = part[0].tensor.dtype
        return self.wire_dtype if self.wire_dtype is not None and dtype == torch.float32 and not exact else dtype

    def _capacity(self, dtype: torch.dtype) -> int:
        return max(1, self.bucket_bytes // dtype.itemsize)

    def _buckets(self, part: Sequence[Item], dtype: torch.dtype) -> Iterable[list[Item]]:
        for positions in buckets([item.numel for item in part], self._capacity(dtype)):
            yield [part[i] for i in positions]

    def _messages(
        self, part: Sequence[Item], dtype: torch.dtype, size: int, stacked: bool = False
    ) -> Iterable[list[list[Item]]]:
        """Cut items by root into messages; with ``stacked``, a root receives the list of every rank."""
        lists: list[list[Item]] = [[] for _ in range(size)]
        for item in part:
            lists[item.root].append(item)
        capacity, largest = self._capacity(dtype), max(map(total, lists))
        if stacked and largest:  # the receive buffer of a root takes most of the memory
            capacity = max(1, capacity * total(part) // (size * largest))
        for message in shared_buckets([[item.numel for item in items] for items in lists], capacity):
            yield [[lists[root][i] for i in positions] for root, positions in enumerate(message)]
