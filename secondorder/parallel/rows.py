"""Rows of examples in messages: the numbers by which ranks agree on sizes, and parcels of equal sizes.

Every rank sends the same number of rows, padded with zeros, which are removed when the rows are combined.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from secondorder.capture.statistics.examples import keeps_indices
from secondorder.comm.strategy import CommStrategy
from secondorder.curvature.example_rows import Kept, Raw, Sizes, inputs_of
from secondorder.curvature.schema import tensors
from secondorder.linalg import woodbury
from secondorder.linalg.kernel import Rows

if TYPE_CHECKING:
    from secondorder.curvature.row_block import RowBlock

log: logging.Logger = logging.getLogger("secondorder")

#: Number of values of each rank about a block: examples, rows and positions.
_BY_RANK = 3


class Census(NamedTuple):
    """The sizes that the ranks captured for a block. They are the same on every rank.

    Attributes:
        examples: Number of examples of each rank.
        rows: Number of rows of each rank. Not every example passes the layer, and not every rank uses it.
        positions: S, the largest number of positions of a row.
        whole: Whether any rank has per-example gradients. Others may have pairs of rows.
        trace: Trace of the kernel of all rows, scaled per datum ``[(Γ)]``, float64 on the CPU.
        real: Number of rows that are not padding ``[Γ or 1]``, float64 on the CPU.
    """

    examples: list[int]
    rows: list[int]
    positions: int
    whole: bool
    trace: Tensor
    real: Tensor

    @property
    def total(self) -> int:
        """N, the number of examples of all ranks."""
        return sum(self.examples)

    def sizes(self, block: RowBlock, rows: int) -> Sizes:
        """Return the sizes of rows of a block in messages."""
        adapter = block.adapter
        wide = adapter.row_width
        if adapter.constant_input:
            return Sizes(rows, self.positions, 0, wide)
        if self.whole:
            return Sizes(rows, 1, 0, wide * adapter.n_a)
        return Sizes(rows, self.positions, adapter.n_a, wide, keeps_indices(adapter, block.group["approx"]))


def _groups(block: RowBlock) -> int:
    """Return Γ, or 1 for a layer without groups."""
    lead = block.with_rows.lead
    return lead[0] if lead else 1


def count_words(block: RowBlock, world: int) -> int:
    """Return the length of :func:`words_of` for a number of ranks."""
    return _BY_RANK * world + 1 + 2 * _groups(block)


def words_of(
    block: RowBlock, raw: Raw | None, traces: Tensor | None, examples: int, *, rank: int, world: int
) -> Tensor:
    """Return the contribution of a rank to the census of a block, as numbers that are summed over the ranks.

    They are ``[examples, rows, positions]`` at the positions of this rank, whether rows are per-example gradients,
    the traces ``[Γ or 1]`` of the kernel of the captured rows, and numbers of real rows.
    """
    by_rank = torch.zeros(_BY_RANK, world, dtype=torch.float64)
    tail = torch.zeros(count_words(block, world) - by_rank.numel(), dtype=torch.float64)
    by_rank[0, rank] = examples
    if raw is not None and traces is not None:
        by_rank[1:, rank] = torch.tensor([raw.rows.n, raw.rows.g.shape[-2]], dtype=torch.float64)
        tail[0] = float(raw.rows.a is None and not block.adapter.constant_input)
        tail[1 : 1 + len(traces)] = traces * (examples * float(block.gradient_scale(examples)))
        tail[1 + len(traces) :] = torch.as_tensor(raw.real, dtype=torch.float64).cpu()
    return torch.cat([by_rank.flatten(), tail])


def census_of(block: RowBlock, words: Tensor, world: int) -> Census | None:
    """Return the census of a block, given the sum of the words of all ranks; None if no rank has rows."""
    by_rank, tail = words.split([_BY_RANK * world, len(words) - _BY_RANK * world])
    examples, rows, positions = by_rank.view(_BY_RANK, world).long().tolist()
    whole, trace, real = tail.split([1, _groups(block), _groups(block)])
    if not any(rows):
        return None
    trace = trace.reshape(block.with_rows.lead) / sum(examples)
    return Census(examples, rows, max(positions), bool(whole), trace, real)


def filled_up(
    block: RowBlock, sizes: Sizes, kept: Kept | None, *, interpolates: bool, device: torch.device
) -> list[Tensor]:
    """Return the rows a (if the layer has any) and g of a rank, padded with zeros to the sizes of a message.

    With ``interpolates``, the core of the interpolation follows. A rank without rows sends only zeros.
    """
    likes, sent = tensors(block.with_rows.schema(sizes)), []
    parts = {} if kept is None else {"rows_a": inputs_of(kept.rows), "rows_g": kept.rows.g}
    for key in ("rows_a", "rows_g"):
        room = torch.zeros_like(likes[key], device=device)
        if key in parts:
            room[tuple(slice(size) for size in parts[key].shape)] = parts[key]
        if room.numel():
            sent.append(room)
    if interpolates:
        core = torch.eye(sizes.rows, dtype=torch.float64, device=device).repeat(*block.with_rows.lead, 1, 1)
        if kept is not None and kept.core is not None:
            r = kept.core.shape[-1]
            core[..., :r, :] = 0
            core[..., :r, :r] = kept.core
        sent.append(core)
    return sent


def put_together(
    block: RowBlock,
    sizes: Sizes,
    stacks: Sequence[Tensor],
    counts: Sequence[int],
    damping: Tensor,
    *,
    interpolates: bool,
) -> Kept:
    """Return the rows of all ranks in order, without padding.

    Args:
        block: The block.
        sizes: Sizes of the rows.
        stacks: The results of :func:`filled_up` on all ranks, stacked over the ranks.
        counts: Number of rows of each rank.
        damping: λ ``[(Γ)]``.
        interpolates: Whether cores were sent.
    """
    core = None
    if interpolates:
        *stacks, cores = stacks
        core = woodbury.block_diagonal([c[..., :n, :n] for c, n in zip(cores, counts, strict=True) if n])
    parts = [
        torch.cat([part.narrow(-dims, 0, n) for part, n in zip(stack, counts, strict=True)], -dims)
        for stack, dims in zip(stacks, [2 if sizes.by_index else 3, 3][-len(stacks) :], strict=True)
    ]
    a = parts[0] if len(parts) == 2 else None
    return Kept(Rows(a, parts[-1], columns=block.adapter.d_in if sizes.by_index else 0), damping, core)


def sum_together(comm: CommStrategy, what: str, shape: Sequence[int], attempt: Callable[[], Tensor]) -> Tensor:
    """Return the sums of the words that some work returns on every rank, float64 on the CPU.

    Errors describe the work as ``what``.

    Raises:
        RuntimeError: On every rank, if a rank failed.
    """
    words, error = torch.zeros(*shape, dtype=torch.float64), None
    try:
        words = attempt()
    except Exception as found:  # the other ranks wait for this rank and must be notified
        error = f"rank {comm.rank}: {what} failed: {type(found).__name__}: {found}"
        log.exception("%s failed", what)
    flag = torch.tensor([float(error is not None)], dtype=torch.float64)
    agreed = comm.agree(torch.cat([words.cpu().flatten(), flag]))
    comm.fail_together(error, bool(agreed[-1]))
    return agreed[:-1].view(*shape)
