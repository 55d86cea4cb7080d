"""One message of each kind: calls of ``torch.distributed``, with the work before and after them.

Functions are looked up when they are called, so a tool that wraps them sees the traffic.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from secondorder.comm.buffers import Buffers, Item, Loan, drain, fill, real, reduce_kind, total
from secondorder.comm.counter import Counter

# Recent versions of torch have these names and deprecate the others.
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
# gloo does not send 16-bit integers, but it does send their bytes.
AS_BYTES = {torch.int16, torch.uint16}
# Dtypes whose sums are accumulated in float32 when the package adds the numbers itself.
SHORT = {torch.bfloat16, torch.float16}


class Work:
    """The launched messages of one call.

    Args:
        limit: Bytes of staging in flight above which the oldest messages are waited for.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.result: Callable[[], Any] = lambda: None
        self._steps: deque[tuple[Any, Callable[[], None], int]] = deque()
        self._staged = 0
        self._done = False
        self._value: Any = None

    def add(self, handle: Any, then: Callable[[], None], staged: int) -> None:
        """Add a launched message. ``then`` is called when it has arrived."""
        self._steps.append((handle, then, staged))
        self._staged += staged
        while self._staged > self.limit and len(self._steps) > 1:
            self._first()

    def _first(self) -> None:
        handle, then, staged = self._steps.popleft()
        if handle is not None:
            handle.wait()
        then()
        self._staged -= staged

    @torch.no_grad()
    def wait(self) -> Any:
        """Wait for the messages and write their contents into the tensors of the call. A second call does nothing.

        Returns:
            The result of the call, if it has one in addition to the tensors that were passed.
        """
        while self._steps:
            self._first()
        if not self._done:
            self._value, self._done = self.result(), True
        return self._value


class Call:
    """The messages of one call, in the order in which they are launched.

    Args:
        group: A process group, or None for the default one.
        stage: Stage under which messages are counted.
        counter: Counter of messages.
        buffers: Staging buffers.
        limit: Bytes of staging that may be in flight.

    Attributes:
        work: The launched messages.
        rank: This rank within the group.
        size: Number of ranks in the group; 1 if there is no process group.
    """

    def __init__(self, group: Any, stage: str, counter: Counter, buffers: Buffers, limit: int) -> None:
        self.group = group
        self.stage = stage
        self.counter = counter
        self.buffers = buffers
        self.work: Work = Work(limit)
        there = dist.is_available() and dist.is_initialized()
        self.size: int = dist.get_world_size(group) if there else 1
        self.rank: int = dist.get_rank(group) if there else 0

    # ------------------------------------------------------------------ ranks, staging, counting
    def local(self, rank: int) -> int:
        """Return the rank within the group of a global rank."""
        if self.size == 1:
            return 0
        return rank if self.group is None else dist.get_group_rank(self.group, rank)

    def _global(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def rooted(self, by_root: Mapping[int, Sequence[Tensor]], symmetric: Mapping[int, Sequence[bool]]) -> list[Item]:
        """Return the items of lists with a root each, in the order of roots."""
        return [
            Item(real(tensor), flag, self.local(root), i)
            for root in sorted(by_root)
            for i, (tensor, flag) in enumerate(
                zip(by_root[root], symmetric.get(root) or (False,) * len(by_root[root]), strict=True)
            )
        ]

    def count(self, kind: str, numel: int, dtype: torch.dtype) -> None:
        """Count a message."""
        self.counter.add(self.stage, kind, self.size, numel, dtype)

    def _take(self, numel: int, like: Item, dtype: torch.dtype | None = None) -> Loan:
        return self.buffers.take(self.group, numel, dtype or like.tensor.dtype, like.tensor.device)

    def _launched(self, handle: Any, then: Callable[[], None], *loans: Loan | None) -> None:
        """Register a message that was launched, and return the loans once it has arrived."""
        used = [loan for loan in loans if loan is not None]

        def finish() -> None:
            then()
            for loan in used:
                self.buffers.give(loan)

        self.work.add(handle, finish, sum(loan.view.nbytes for loan in used))

    def _staging(self, items: Sequence[Item], dtype: torch.dtype, filled: bool = True) -> tuple[Tensor, Loan | None]:
        """Return a flat view of the only tensor of a message if possible, and otherwise a buffer of all tensors."""
        only = items[0].tensor
        if len(items) == 1 and not items[0].symmetric and only.dtype == dtype and only.is_contiguous():
            return only.view(-1), None
        loan = self._take(total(items), items[0], dtype)
        if filled:
            fill(loan.view, items)
        return loan.view, loan

    # ------------------------------------------------------------------ sums
    def all_reduce(self, items: Sequence[Item], count: float | None) -> None:
        """Sum to all ranks in place, and divide by ``count`` if it is given."""
        buffer, loan = self._staging(items, items[0].tensor.dtype)
        self.count("all_reduce", buffer.numel(), buffer.dtype)
        if count is not None and buffer.dtype == torch.float16:  # the sum may overflow although the mean does not
            buffer.div_(count)
            count = None
        handle = dist.all_reduce(buffer, group=self.group, async_op=True)

        def then() -> None:
            if count is not None:
                buffer.div_(count)
            if loan is not None:
                drain(buffer, items)

        self._launched(handle, then, loan)

    def all_reduce_rounded(self, items: Sequence[Item], wire: torch.dtype) -> None:
        """Sum to all ranks. Every rank sums one part in the dtype of the items, and the rounded parts are gathered."""
        send, recv, summed = self._scattered_sum(items, wire)
        mine = send.view[: summed.numel()].copy_(summed)
        self._launched(self._all_gather(recv.view, mine), lambda: drain(recv.view, items), send, recv)

    def _scattered_sum(self, items: Sequence[Item], wire: torch.dtype) -> tuple[Loan, Loan, Tensor]:
        """Sum this rank's part of a list that is cut into equal parts and padded with zeros at the end."""
        numel = total(items)
        part = -(-numel // self.size)
        send, recv = (self._take(part * self.size, items[0], wire) for _ in range(2))
        fill(send.view, items)
        send.view[numel:].zero_()
        handle = self._all_to_all(recv.view, send.view, [part] * self.size, [part] * self.size)
        # Wait for this message here. A second one follows, and its place in the order of launches must not depend on
        # when the caller waits.
        handle.wait()
        return send, recv, _sum_rows(recv.view.view(self.size, part))

    def reduce(self, message: Sequence[Sequence[Item]], wire: torch.dtype) -> None:
        """Sum lists of items, one list for each rank, to these ranks."""
        shares = [total(items) for items in message]
        kind = reduce_kind(shares, rounded=wire != _any(message).tensor.dtype)
        if kind == "reduce_scatter":
            self._reduce_scatter(message, max(shares))
        elif kind == "all_to_all":
            handle, send, recv, rows = self._exchange(message, shares, wire)
            self._launched(handle, lambda: drain(_sum_rows(rows), message[self.rank]), send, recv)
        elif kind == "twice":
            self._exchange_twice(message, shares, wire)
        else:
            for root, items in enumerate(message):
                if items:
                    self._reduce(root, items)

    def _reduce(self, root: int, items: Sequence[Item]) -> None:
        if self.rank == root:
            buffer, loan = self._staging(items, items[0].tensor.dtype)
        else:  # some backends leave partial sums in the buffers of these ranks, which must not be copied to tensors
            loan = self._take(total(items), items[0])
            buffer = loan.view
            fill(buffer, items)
        self.count("reduce", buffer.numel(), buffer.dtype)
        handle = dist.reduce(buffer, dst=self._global(root), group=self.group, async_op=True)
        takes = self.rank == root and loan is not None
        self._launched(handle, lambda: drain(buffer, items) if takes else None, loan)

    def _reduce_scatter(self, message: Sequence[Sequence[Item]], part: int) -> None:
        like = _any(message)
        send, recv = self._take(part * self.size, like), self._take(part, like)
        for items, share in zip(message, send.view.view(self.size, part), strict=True):
            fill(share, items)
            share[total(items) :].zero_()
        self.count("reduce_scatter", send.view.numel(), send.view.dtype)
        handle = getattr(dist, REDUCE_SCATTER)(recv.view, send.view, group=self.group, async_op=True)
        self._launched(handle, lambda: drain(recv.view, message[self.rank]), send, recv)

    def _exchange(self, message: Sequence[Sequence[Item]], shares: Sequence[int], wire: torch.dtype) -> Any:
        """Send each rank its list, and return the received rows, one for each rank."""
        like, mine = _any(message), shares[self.rank]
        send, recv = self._take(sum(shares), like, wire), self._take(mine * self.size, like, wire)
        fill(send.view, [item for items in message for item in items])
        handle = self._all_to_all(recv.view, send.view, [mine] * self.size, shares)
        return handle, send, recv, recv.view.view(self.size, mine)

    def _exchange_twice(self, message: Sequence[Sequence[Item]], shares: Sequence[int], wire: torch.dtype) -> None:
        """Sum to few roots. Every rank sums an equal part and sends the sums, which are not rounded, to their roots."""
        items = [item for items in message for item in items]
        send, recv, summed = self._scattered_sum(items, wire)
        part, ends = summed.numel(), list(accumulate(shares))

        def overlap(rank: int, root: int) -> int:
            first, last = max(rank * part, ends[root] - shares[root]), min((rank + 1) * part, ends[root])
            return max(0, last - first)

        outgoing = [overlap(self.rank, root) for root in range(self.size)]
        incoming = [overlap(rank, self.rank) for rank in range(self.size)]
        parts, sums = self._take(part, items[0]), self._take(sum(incoming), items[0])
        parts.view.copy_(summed)
        handle = self._all_to_all(sums.view, parts.view[: sum(outgoing)], incoming, outgoing, part)
        self._launched(handle, lambda: drain(sums.view, message[self.rank]), send, recv, parts, sums)

    # ------------------------------------------------------------------ copies
    def broadcast(self, items: Sequence[Item], wire: torch.dtype) -> None:
        """Copy from the root of the items to all ranks."""
        root = items[0].root
        buffer, loan = self._staging(items, wire, filled=self.rank == root)
        self.count("broadcast", buffer.numel(), buffer.dtype)
        handle = dist.broadcast(_bytes(buffer), src=self._global(root), group=self.group, async_op=True)
        # If numbers were rounded, or only one triangle was sent, the root reads them back to have the same bits.
        changed = wire != items[0].tensor.dtype or any(item.symmetric for item in items)
        takes = loan is not None and (self.rank != root or changed)
        self._launched(handle, lambda: drain(buffer, items) if takes else None, loan)

    def all_gather(self, items: Sequence[Item], stacks: Sequence[Tensor]) -> None:
        """Stack items of all ranks ``[size, ...]``."""
        send, loan = self._staging(items, items[0].tensor.dtype)
        if len(items) == 1:
            handle = self._all_gather(real(stacks[items[0].position]).view(-1), send)
            self._launched(handle, lambda: None, loan)
            return
        recv = self._take(send.numel() * self.size, items[0])
        handle = self._all_gather(recv.view, send)
        self._launched(handle, lambda: _unstack(recv.view.view(self.size, -1), items, stacks), loan, recv)

    def gather(self, message: Sequence[Sequence[Item]], stacks: Sequence[Tensor]) -> None:
        """Stack lists of items of all ranks on their roots."""
        handle, send, recv, rows = self._exchange(message, [total(i) for i in message], _any(message).tensor.dtype)
        self._launched(handle, lambda: _unstack(rows, message[self.rank], stacks), send, recv)

    def gather_uneven(
        self, items: Sequence[Item], sizes: Sequence[Sequence[int]], wholes: Sequence[Tensor], capacity: int
    ) -> None:
        """Assemble complete flat tensors from parts padded to the largest, ``capacity`` elements at a time."""
        shares = [sum(of[rank] for of in sizes) for rank in range(self.size)]
        if not max(shares):
            return
        send = self._take(max(shares), items[0])
        fill(send.view, items)
        send.view[shares[self.rank] :].zero_()
        places = _places(items, sizes, self.size, capacity)
        for start in range(0, max(shares), capacity):
            part = send.view[start : start + capacity]
            recv = self._take(part.numel() * self.size, items[0])
            handle = self._all_gather(recv.view, part)
            then = partial(_place, recv.view.view(self.size, -1), places[start // capacity], wholes)
            self._launched(handle, then, recv, send if start + capacity >= max(shares) else None)

    def exchange(
        self,
        outgoing: Sequence[Sequence[Tensor]],
        incoming: Sequence[Sequence[Tensor]],
        wire: torch.dtype,
        like: Tensor,
        travels: int,
    ) -> None:
        """Send flat tensors to each rank and fill flat tensors from each. In total, ``travels`` elements are sent."""
        sends, takes = [x for to in outgoing for x in to], [x for of in incoming for x in of]
        sizes, wanted = ([sum(x.numel() for x in part) for part in parts] for parts in (outgoing, incoming))
        send, recv = (self.buffers.take(self.group, sum(n), wire, like.device) for n in (sizes, wanted))
        if sends:
            torch._foreach_copy_(list(send.view.split([x.numel() for x in sends])), sends)
        # The message is counted as if it had parts of equal size, whose bytes are the mean over the ranks.
        handle = self._all_to_all(recv.view, send.view, wanted, sizes, -(-travels // (self.size - 1)))

        def then() -> None:
            if takes:
                torch._foreach_copy_(takes, list(recv.view.split([x.numel() for x in takes])))

        self._launched(handle, then, send, recv)

    # ------------------------------------------------------------------ small vectors
    def combine(self, vector: Tensor, op: str) -> None:
        """Combine a vector in place by ``"sum"``, ``"max"`` or ``"min"``, and wait for it."""
        self.count("all_reduce", vector.numel(), vector.dtype)
        dist.all_reduce(vector, op=getattr(dist.ReduceOp, op.upper()), group=self.group)

    # ------------------------------------------------------------------ with both buffers
    def _all_gather(self, recv: Tensor, send: Tensor) -> Any:
        self.count("all_gather", recv.numel(), recv.dtype)
        return getattr(dist, ALL_GATHER)(_bytes(recv), _bytes(send), group=self.group, async_op=True)

    def _all_to_all(
        self, recv: Tensor, send: Tensor, incoming: Sequence[int], outgoing: Sequence[int], numel: int | None = None
    ) -> Any:
        self.count("all_to_all", send.numel() if numel is None else numel, send.dtype)
        width = send.itemsize if send.dtype in AS_BYTES else 1
        incoming, outgoing = ([width * n for n in sizes] for sizes in (incoming, outgoing))
        return dist.all_to_all_single(_bytes(recv), _bytes(send), incoming, outgoing, group=self.group, async_op=True)


def _any(message: Sequence[Sequence[Item]]) -> Item:
    """Return some item of a message; all its items have one dtype and device."""
    return next(items[0] for items in message if items)


def _bytes(buffer: Tensor) -> Tensor:
    """Return a buffer as bytes if some backends cannot send its dtype."""
    return buffer.view(torch.uint8) if buffer.dtype in AS_BYTES else buffer


def _sum_rows(rows: Tensor) -> Tensor:
    """Return the sum ``[n]`` of rows ``[size, n]`` in their order."""
    result = rows[0].to(torch.float32 if rows.dtype in SHORT else rows.dtype, copy=True)
    for row in rows[1:]:
        result += row
    return result


def _unstack(rows: Tensor, items: Sequence[Item], stacks: Sequence[Tensor]) -> None:
    """Copy rows ``[size, total]`` of items to their stacks ``[size, ...]``."""
    for item, columns in zip(items, rows.split([item.numel for item in items], dim=1), strict=True):
        stack = real(stacks[item.position])
        stack.view(len(rows), -1).copy_(columns) if item.numel else None


class _Place(NamedTuple):
    """The destination of a run of elements of a message."""

    rank: int  # the rank that sends the run
    column: int  # the first column of the run in the message
    length: int
    position: int  # the position of the tensor
    start: int  # the first entry of the run in the tensor


def _places(
    items: Sequence[Item], sizes: Sequence[Sequence[int]], ranks: int, capacity: int
) -> dict[int, list[_Place]]:
    """Find the destinations of the columns ``[size, capacity]`` of each message if every rank sends parts in order."""
    places: dict[int, list[_Place]] = defaultdict(list)
    starts = [0] * len(items)
    for rank in range(ranks):
        sent = 0
        for i, of in enumerate(sizes):
            left = of[rank]
            while left:
                message, column = divmod(sent, capacity)
                length = min(left, capacity - column)
                places[message].append(_Place(rank, column, length, items[i].position, starts[i]))
                sent += length
                starts[i] += length
                left -= length
    return places


def _place(rows: Tensor, places: Sequence[_Place], wholes: Sequence[Tensor]) -> None:
    """Copy the received rows ``[size, n]`` to the complete tensors."""
    torch._foreach_copy_(
        [wholes[position][start : start + length] for _, _, length, position, start in places],
        [rows[rank, column : column + length] for rank, column, length, _, _ in places],
    )
