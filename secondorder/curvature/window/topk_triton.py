"""Products with a sparse window as Triton kernels; :mod:`secondorder.curvature.window.topk` defines their results.

::

    dots      a program: some blocks × a tile of rows; partial sums of its rows, which are added up in a fixed order
    combine   a program: one block, row after row; offsets of a row differ, so that no addition needs to be atomic

Both are deterministic. This module imports triton, so it is imported only when the kernels are requested.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from secondorder.curvature.window.rows import split
from secondorder.curvature.window.topk import Panel, TopKRows

#: Number of blocks whose sums one program adds up, and of entries that it holds at a time.
_BLOCKS, _ENTRIES = 8, 1024


@triton.jit  # type: ignore[untyped-decorator]
def _dots(  # type: ignore[no-untyped-def]
    idx, val, x, partial, n, m, k, t, length,
    BLOCKS: tl.constexpr, ROWS: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    group, tile = tl.program_id(0), tl.program_id(1)
    rows = tile * ROWS + tl.arange(0, ROWS)
    total = tl.zeros((ROWS,), x.dtype.element_ty)
    for b in range(BLOCKS):
        block = (group * BLOCKS + b).to(tl.int64)
        for start in range(0, k, K):
            entries = start + tl.arange(0, K)
            inside = (rows[:, None] < t) & (entries[None, :] < k) & (block < n)
            at = (block * m + rows[:, None]) * k + entries[None, :]
            where = tl.load(idx + at, mask=inside, other=0).to(tl.int64)
            value = tl.load(val + at, mask=inside, other=0).to(x.dtype.element_ty)
            total += tl.sum(value * tl.load(x + block * length + where, mask=inside, other=0), axis=1)
    tl.store(partial + group * t + rows, total, mask=rows < t)


@triton.jit  # type: ignore[untyped-decorator]
def _combine(  # type: ignore[no-untyped-def]
    idx, val, a, out, starts, m, k, t,
    K: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    region = out + tl.load(starts + block)
    for row in range(t):
        weight = tl.load(a + row)
        for start in range(0, k, K):
            entries = start + tl.arange(0, K)
            inside = entries < k
            at = (block * m + row) * k + entries
            where = tl.load(idx + at, mask=inside, other=0).to(tl.int64)
            value = tl.load(val + at, mask=inside, other=0).to(out.dtype.element_ty)
            before = tl.load(region + where, mask=inside, other=0)
            tl.store(region + where, before + weight * value, mask=inside)
        tl.debug_barrier()  # the next row may have the same offsets


class TritonTopKRows(TopKRows):
    """Rows that consist of the largest entries per block, with products computed by kernels."""

    @cached_property
    def _starts(self) -> list[Tensor]:
        """By panel, the first entry of each of its blocks among the entries of all tensors."""
        first = [0, *accumulate(map(torch.Size.numel, self.shapes))]
        return [
            torch.cat([torch.arange(n) * panel.length + first[i] + start for i, start, _, n in panel.members]).to(
                self.device
            )
            for panel in self.panels
        ]

    def _add_dots(self, total: Tensor, panel: Panel, x: Tensor) -> None:
        n, t, k = len(panel.idx), len(total), panel.k
        wide = min(triton.next_power_of_2(k), _ENTRIES)
        rows = max(1, _ENTRIES // wide)
        partial = torch.empty(-(-n // _BLOCKS), t, dtype=self.working, device=self.device)
        _launch(
            _dots, (len(partial), -(-t // rows)), panel.idx, panel.val, x, partial, n, self.m, k, t, panel.length,
            BLOCKS=_BLOCKS, ROWS=rows, K=wide,
        )  # fmt: skip
        total += partial.sum(0, dtype=torch.float64)

    def combine(self, a: Tensor) -> list[Tensor]:
        """Return ``Σ a_i row_i`` of the first ``len(a)`` rows, as tensors of the shapes of this window."""
        a = a.to(self.working)
        flat = torch.zeros(sum(map(torch.Size.numel, self.shapes)), dtype=self.working, device=self.device)
        for panel, starts in zip(self.panels, self._starts, strict=True):
            wide = min(triton.next_power_of_2(panel.k), _ENTRIES)
            _launch(_combine, (len(panel.idx),), panel.idx, panel.val, a, flat, starts, self.m, panel.k, len(a), K=wide)
        return split(flat, self.shapes)


def require_device(device: torch.device) -> None:
    """Reject a device that Triton does not compile for.

    Raises:
        ValueError: If it is such a device.
    """
    if device.type not in ("cuda", "meta") and not triton.knobs.runtime.interpret:
        raise ValueError(f"TopK(kernels='triton') needs a GPU and these parameters are on {device}: use 'torch'")


def _launch(kernel: Any, grid: tuple[int, ...], first: Tensor, *args: Any, **sizes: Any) -> None:
    if 0 in grid:
        return
    with torch.cuda.device(first.device) if first.device.type == "cuda" else nullcontext():
        kernel[grid](first, *args, **sizes)
