"""Sparse rows: the largest entries of each block of a gradient are kept, and the rest is fed back into the next one.

Blocks start again at each tensor. Blocks of one length form a *panel*: there is one for all full blocks, and one for
each length of the remainders of tensors, so that nothing is padded::

    idx [n, m, k]   offsets inside the block, ascending (int16 where they fit)
    val [n, m, k]   values
    error           residual [n, L], or packed to 4 or 8 bits with a range per 128 entries

EFCP: Modoranu et al. 2023 (arXiv 2306.06098); quantized residual: Modoranu et al. 2024 (MicroAdam, 2405.15593).
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from secondorder import options
from secondorder.curvature.window.rows import Parts, Rows, store

#: Number of entries that share one range of a quantized residual.
_RANGE = 128
#: Blocks are selected and products are formed in tiles of this many entries, which stay in a core's cache.
_SELECT, _PRODUCT = 1 << 18, 1 << 19
_INT16_LIMIT = 32768


@dataclass(frozen=True)
class TopK:
    """Compression that keeps the largest entries of each block of a gradient and feeds the rest back.

    Args:
        density: Share of the entries that are kept; 1 keeps dense rows.
        block_size: Length of a block. Blocks start again at each parameter.
        value_dtype: Dtype of the kept values. float32 means the working precision, which is float64 for float64
            parameters.
        error_feedback: Whether the entries that are not kept are added to the next gradient.
        error_bits: Number of bits per entry of this residual, 4 or 8. If None, it has the working precision.
        kernels: Implementation of the products with the window: ``"torch"``, or ``"triton"`` on a GPU, which adds the
            same terms in another order.

    Raises:
        ValueError: If a value is out of range.
        ImportError: If ``kernels="triton"`` and triton is not installed.
        TypeError: If a value has the wrong type.
    """

    density: float = 0.01
    block_size: int = 4096
    value_dtype: torch.dtype = torch.float32
    error_feedback: bool = True
    error_bits: int | None = None
    kernels: str = "torch"

    def __post_init__(self) -> None:
        """Check the values."""
        options.number(0.0, 1.0, low_open=True)("density", self.density)
        options.whole(1)("block_size", self.block_size)
        options.number(1, 2**31 - 1)("block_size", self.block_size)
        if not isinstance(self.value_dtype, torch.dtype):
            raise TypeError(f"value_dtype must be a torch.dtype, got {self.value_dtype!r}")
        if self.value_dtype not in (torch.float32, torch.bfloat16, torch.float64):
            raise ValueError(f"value_dtype must be float32, bfloat16 or float64, got {self.value_dtype}")
        options.flag("error_feedback", self.error_feedback)
        if self.error_bits not in (None, 4, 8):
            raise ValueError(f"error_bits must be None, 4 or 8, got {self.error_bits!r}")
        if self.error_bits is not None and not self.error_feedback:
            raise ValueError(f"error_bits={self.error_bits} needs error_feedback=True")
        if self.error_bits is not None and self.density == 1:
            raise ValueError(f"error_bits={self.error_bits} needs density < 1: dense rows have no residual to pack")
        options.choice("torch", "triton")("kernels", self.kernels)
        if self.kernels == "triton" and self.density == 1:
            raise ValueError("kernels='triton' needs density < 1: dense rows use matrix products instead")
        if self.kernels == "triton" and importlib.util.find_spec("triton") is None:
            raise ImportError("TopK(kernels='triton') needs triton: pip install triton")

    def kept(self, length: int) -> int:
        """Return the number of entries kept of a block: a multiple of 8 for a full one, so that rows are aligned."""
        if length == self.block_size >= 64:
            return min(length, max(8, 8 * round(self.density * length / 8)))
        return max(1, math.ceil(self.density * length))


@dataclass
class Panel:
    """Blocks of one length.

    Attributes:
        length: Length of a block.
        k: Number of entries kept of each block.
        members: For each tensor, its index, its first entry, its first block and its number of blocks.
        idx: Offsets ``[n, m, k]``.
        val: Values ``[n, m, k]``.
        error: Residual ``[n, length]`` or packed, None without feedback.
        error_range: Ranges of a packed residual ``[n, ranges, 2]``.
    """

    length: int
    k: int
    members: list[tuple[int, int, int, int]]
    idx: Tensor
    val: Tensor
    error: Tensor | None
    error_range: Tensor | None


class TopKRows(Rows):
    """Rows that consist of the largest entries per block.

    Args:
        shapes: Shapes of the tensors.
        m: Number of slots.
        working: Precision of products.
        device: Device of the rows.
        rule: Rule by which entries are kept.
    """

    def __init__(
        self, shapes: Sequence[torch.Size], m: int, working: torch.dtype, device: torch.device, rule: TopK
    ) -> None:
        super().__init__(shapes, m, working, device)
        self.rule = rule
        # float64 gradients keep float64 values: rows are exact there.
        self.value_dtype: torch.dtype = working if rule.value_dtype == torch.float32 else rule.value_dtype
        members: dict[int, list[tuple[int, int, int, int]]] = {}
        count: dict[int, int] = {}
        for i, shape in enumerate(shapes):
            for length, start, n in _cut(math.prod(shape), rule.block_size):
                members.setdefault(length, []).append((i, start, count.get(length, 0), n))
                count[length] = count.get(length, 0) + n
        self.panels: list[Panel] = [
            self._panel(length, count[length], members[length]) for length in sorted(members, reverse=True)
        ]

    def _panel(self, length: int, n: int, members: list[tuple[int, int, int, int]]) -> Panel:
        k, bits = self.rule.kept(length), self.rule.error_bits
        index = torch.int16 if self.rule.block_size <= _INT16_LIMIT else torch.int32
        error = ranges = None
        if self.rule.error_feedback and bits is None:
            error = torch.zeros(n, length, dtype=self.working, device=self.device)
        elif self.rule.error_feedback:
            assert bits is not None
            error = torch.zeros(n, -(-length * bits // 8), dtype=torch.uint8, device=self.device)
            ranges = torch.zeros(n, -(-length // _RANGE), 2, dtype=torch.bfloat16, device=self.device)
        idx = torch.zeros(n, self.m, k, dtype=index, device=self.device)
        val = torch.zeros(n, self.m, k, dtype=self.value_dtype, device=self.device)
        return Panel(length, k, members, idx, val, error, ranges)

    def state(self, i: int) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for panel in self.panels:
            for tensor, _, first, n in panel.members:
                if tensor == i:
                    tail = panel.length < self.rule.block_size
                    blocks = slice(first, first + n)
                    parts = {"idx": panel.idx, "val": panel.val, "error": panel.error, "range": panel.error_range}
                    keys = _TAIL_KEYS if tail else _FULL_KEYS
                    found |= {keys[name]: part[blocks] for name, part in parts.items() if part is not None}
        return found

    @property
    def flops(self) -> float:
        return 4.0 * sum(panel.val.numel() for panel in self.panels)

    # ------------------------------------------------------------------ writing
    def write(self, x: Parts, slot: Tensor, gate: Tensor | None) -> None:
        if gate is not None:
            x = [None if part is None else torch.where(gate, part, 0) for part in x]
        for panel in self.panels:
            direct = panel.error is not None and panel.error_range is None
            if direct and all(x[tensor] is not None for tensor, *_ in panel.members):
                assert panel.error is not None
                self._add(panel, panel.error, x)
                self._select(panel, panel.error, 0, slot, gate)
                continue
            for tensor, start, first, n in panel.members:
                part = x[tensor]
                if part is None:  # the slice counts as zeros, and its residual waits
                    for rows in (panel.idx, panel.val):
                        blocks = rows[first : first + n]
                        store(blocks, 1, slot, torch.zeros_like(blocks[:, :1]), gate)
                else:
                    flat = part.reshape(-1)[start : start + n * panel.length].view(n, panel.length)
                    self._write_in_tiles(panel, flat, first, slot, gate)

    def _add(self, panel: Panel, target: Tensor, x: Parts) -> None:
        """Add a gradient to entries ``[n, length]`` of the panel's blocks."""
        for tensor, start, first, n in panel.members:
            part = x[tensor]
            if part is not None:
                target[first : first + n].view(-1).add_(part.reshape(-1)[start : start + n * panel.length])

    def _write_in_tiles(self, panel: Panel, x: Tensor, first: int, slot: Tensor, gate: Tensor | None) -> None:
        """Store blocks ``[n, length]``; a packed residual is unpacked tile by tile."""
        per_tile, bits = max(1, _tile(_SELECT, x) // panel.length), self.rule.error_bits
        for b in range(0, len(x), per_tile):
            tile = x[b : b + per_tile].to(self.working, copy=True)
            blocks = slice(first + b, first + b + len(tile))
            error, ranges = panel.error, panel.error_range
            if error is not None and ranges is not None and bits is not None:
                tile += unpack(error[blocks], ranges[blocks], panel.length, bits)
                self._select(panel, tile, first + b, slot, gate)
                for target, value in zip((error[blocks], ranges[blocks]), pack(tile, bits), strict=True):
                    target.copy_(value if gate is None else torch.where(gate, value, target))
                continue
            if error is not None:
                tile += error[blocks]
            self._select(panel, tile, first + b, slot, gate)
            if error is not None:
                error[blocks] = tile

    def _select(self, panel: Panel, entries: Tensor, first: int, slot: Tensor, gate: Tensor | None) -> None:
        """Store the largest of ``entries [n, length]`` as the row of blocks from ``first`` on, and remove them."""
        per_tile = max(1, _tile(_SELECT, entries) // panel.length)
        for b in range(0, len(entries), per_tile):
            tile = entries[b : b + per_tile]
            where = torch.topk(tile.abs(), panel.k, dim=1, sorted=False).indices.sort(1).values
            found = tile.gather(1, where)
            kept = found.to(self.value_dtype)
            rest = found - kept.to(found.dtype)
            tile.scatter_(1, where, rest if gate is None else torch.where(gate, rest, found))
            blocks = slice(first + b, first + b + len(tile))
            store(panel.idx[blocks], 1, slot, where[:, None], gate)
            store(panel.val[blocks], 1, slot, kept[:, None], gate)

    # ------------------------------------------------------------------ products
    def newest_dots(self, slot: Tensor, t: int) -> Tensor:
        total = torch.zeros(t, dtype=torch.float64, device=self.device)
        for panel in self.panels:
            dense = torch.zeros(len(panel.idx), panel.length, dtype=self.working, device=self.device)
            idx, val = (part.index_select(1, slot)[:, 0] for part in (panel.idx, panel.val))
            self._add_dots(total, panel, dense.scatter_(1, idx.long(), val.to(self.working)))
        return total

    def dots(self, x: Parts, t: int) -> Tensor:
        total = torch.zeros(t, dtype=torch.float64, device=self.device)
        for panel in self.panels:
            dense = torch.zeros(len(panel.idx), panel.length, dtype=self.working, device=self.device)
            self._add(panel, dense, x)
            self._add_dots(total, panel, dense)
        return total

    def _add_dots(self, total: Tensor, panel: Panel, x: Tensor) -> None:
        """Add the dots of ``x [n, length]`` with the rows of a panel to ``total [t]``."""
        for blocks, rows, where, scratch in self._tiles(panel, len(total)):
            torch.gather(x[blocks], 1, where, out=scratch.view(where.shape))
            total[rows] += scratch.mul_(panel.val[blocks, rows]).sum(-1).sum(0, dtype=torch.float64)

    def combine(self, a: Tensor) -> list[Tensor]:
        t, a = len(a), a.to(self.working)
        found = [torch.zeros(shape, dtype=self.working, device=self.device) for shape in self.shapes]
        for panel in self.panels:
            for blocks, rows, where, scratch in self._tiles(panel, t):
                torch.mul(panel.val[blocks, rows], a[rows, None], out=scratch)
                terms = scratch.flatten(1)
                for target, part in self._shares(panel, blocks, found):
                    target.scatter_add_(1, where[part], terms[part])
        return found

    def _shares(self, panel: Panel, blocks: slice, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, slice]]:
        """Yield views ``[b, length]`` of the tensors that contain blocks of a tile, and a slice of these blocks."""
        for tensor, start, first, n in panel.members:
            begin, end = max(first, blocks.start), min(first + n, blocks.stop)
            if begin < end:
                entry = start + (begin - first) * panel.length
                flat = tensors[tensor].view(-1)[entry : entry + (end - begin) * panel.length]
                yield flat.view(end - begin, panel.length), slice(begin - blocks.start, end - blocks.start)

    def _tiles(self, panel: Panel, t: int) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
        """Yield tiles of blocks and rows, with offsets ``[b, rows·k]`` int64, and scratch memory ``[b, rows, k]``."""
        n, k, tile = len(panel.idx), panel.k, _tile(_PRODUCT, panel.idx)
        high = min(t, max(1, tile // k))
        wide = min(n, max(1, tile // (high * k)))
        offsets = torch.empty(wide * high * k, dtype=torch.int64, device=self.device)
        scratch = torch.empty(wide * high * k, dtype=self.working, device=self.device)
        for b in range(0, n, wide):
            blocks = slice(b, min(b + wide, n))
            for i in range(0, t, high):
                rows = slice(i, min(i + high, t))
                shape = (blocks.stop - b, rows.stop - i, k)
                where, free = (buffer[: math.prod(shape)].view(shape) for buffer in (offsets, scratch))
                where.copy_(panel.idx[blocks, rows])
                yield blocks, rows, where.flatten(1), free

    def add_row(self, out: Sequence[Tensor], slot: Tensor, scale: Tensor) -> None:
        for panel in self.panels:
            idx, val = (part.index_select(1, slot)[:, 0] for part in (panel.idx, panel.val))
            val = val.to(self.working) * scale.to(self.working)
            for tensor, start, first, n in panel.members:
                blocks = out[tensor].view(-1)[start : start + n * panel.length].view(n, panel.length)
                blocks.scatter_add_(1, idx[first : first + n].long(), val[first : first + n])

    def residual_square(self) -> Tensor | None:
        if not self.rule.error_feedback:
            return None
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for panel in self.panels:
            assert panel.error is not None
            error = panel.error
            if panel.error_range is not None and self.rule.error_bits is not None:
                error = unpack(panel.error, panel.error_range, panel.length, self.rule.error_bits)
            total += error.square().sum(dtype=torch.float64)
        return total


_FULL_KEYS = {"idx": "window_idx", "val": "window_val", "error": "error", "range": "error_range"}
_TAIL_KEYS = {"idx": "tail_idx", "val": "tail_val", "error": "tail_error", "range": "tail_error_range"}


def _cut(size: int, block: int) -> Iterator[tuple[int, int, int]]:
    """Yield length, first entry and number of a tensor's full blocks, and of the remainder."""
    whole, rest = divmod(size, block)
    if whole:
        yield block, 0, whole
    if rest:
        yield rest, whole * block, 1


def pack(entries: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Round entries ``[n, length]`` to evenly spaced levels between the least and the largest of each 128.

    Args:
        entries: The entries to pack.
        bits: 4 (two entries per byte) or 8.

    Returns:
        Bytes ``[n, ⌈length·bits/8⌉]`` and ranges ``[n, ⌈length/128⌉, 2]`` in bfloat16, rounded outwards.
    """
    n, length = entries.shape
    groups = -(-length // _RANGE)
    padded = torch.cat([entries, entries[:, -1:].expand(n, groups * _RANGE - length)], 1).view(n, groups, _RANGE)
    low, high = _outwards(padded.amin(-1), -1), _outwards(padded.amax(-1), 1)
    width = (high.to(padded.dtype) - low.to(padded.dtype))[..., None]
    levels = 2**bits - 1
    steps = (padded - low.to(padded.dtype)[..., None]) / torch.where(width > 0, width, 1.0) * levels
    codes = steps.round().clamp(0, levels).to(torch.uint8).view(n, -1)[:, :length]
    if bits == 4:
        codes = F.pad(codes, (0, length % 2))
        codes = codes[:, 0::2] | (codes[:, 1::2] << 4)
    return codes, torch.stack([low, high], -1)


def unpack(packed: Tensor, ranges: Tensor, length: int, bits: int) -> Tensor:
    """Return the entries ``[n, length]`` from :func:`pack`, in float32."""
    codes = packed if bits == 8 else torch.stack([packed & 15, packed >> 4], -1).flatten(1)[:, :length]
    low, high = ranges.float().unbind(-1)
    step = (high - low) / (2**bits - 1)
    low, step = (part.repeat_interleave(_RANGE, 1)[:, :length] for part in (low, step))
    return torch.addcmul(low, codes.float(), step)


def _outwards(x: Tensor, sign: int) -> Tensor:
    """Return ``x`` in bfloat16, rounded in one direction: at most x for sign -1, at least x for sign 1."""
    nearest = x.to(torch.bfloat16)
    wrong = (nearest.to(x.dtype) - x) * sign < 0
    return torch.where(wrong, (x + sign * x.abs() * 2**-7).to(torch.bfloat16), nearest)


def _tile(entries: int, whole: Tensor) -> int:
    """Return the number of entries of a tile, which is a 64th of all entries on ``meta``, since it has no cache."""
    return max(entries, whole.numel() // 64) if whole.is_meta else entries
