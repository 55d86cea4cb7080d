"""Windows that are filled with random rows, so that a benchmark with full windows needs no steps to fill them.

Rows are independent normal vectors of norm about 1. TopK has one entry in each of k equal parts of a block, and LowRank
has two normal factors. The Gram matrix is set to the identity, from which the true one differs by about 1/√d per entry;
step times do not depend on it. Later steps overwrite the random rows and their dot products.
"""

import math

import torch
from torch import Tensor
from torch.optim import Optimizer

from secondorder import GGT, MFAC, TopK
from secondorder.curvature.window.window import GradientWindow


def fill_windows(optimizer: Optimizer, seed: int = 0) -> int:
    windows = windows_of(optimizer)
    if not windows:
        raise ValueError(f"{type(optimizer).__name__} has no window of gradients")
    for index, window in enumerate(windows):
        _fill(window, torch.Generator(window.device).manual_seed(seed + index))
    return max(window.m for window in windows)


def windows_of(optimizer: Optimizer) -> list[GradientWindow]:
    return [unit.window for unit in optimizer.blocks.values()] if isinstance(optimizer, MFAC | GGT) else []


def dense_rows(optimizer: Optimizer) -> Tensor | None:
    windows = windows_of(optimizer)
    parts = [window.state(i).get("window") for window in windows for i in range(len(window.places))]
    rows = [part for part in parts if part is not None]
    if len(windows) != 1 or len(rows) < len(parts) or len({part.untyped_storage().data_ptr() for part in rows}) > 1:
        return None
    m, entries = windows[0].m, sum(part.numel() for part in rows)
    if rows[0].untyped_storage().nbytes() != entries * rows[0].itemsize:
        return None
    return rows[0].as_strided((m, entries // m), (entries // m, 1), 0)


def _fill(window: GradientWindow, generator: torch.Generator) -> None:
    sizes = [math.prod(place.shape) for place in window.places]
    for i, size in enumerate(sizes):
        _fill_tensor(window, i, size, sum(sizes) ** -0.5, generator)
    each = torch.arange(window.m, device=window.device)
    window.gram.zero_()[each * (each + 3) // 2] = 1  # entry (i, i) of the lower triangle, packed row by row
    window.counters["pos"].zero_()
    window.counters["count"].fill_(window.m)
    window.recount()


def _fill_tensor(window: GradientWindow, i: int, size: int, std: float, generator: torch.Generator) -> None:
    state, rule = window.state(i), window.form.compression
    if "window" in state:
        state["window"].normal_(0, std, generator=generator)
    if "window_p" in state:
        state["window_p"].normal_(generator=generator)
        state["window_q"].normal_(0, std * state["window_p"].shape[1] ** -0.5, generator=generator)
    if not isinstance(rule, TopK):
        return
    values = [state[key] for key in ("window_val", "tail_val") if key in state]
    kept = sum(part.numel() // window.m for part in values)
    for part in values:
        part.normal_(0, std * (size / kept) ** 0.5, generator=generator)
    for key, length in (("window_idx", rule.block_size), ("tail_idx", size % rule.block_size)):
        if key in state:
            _fill_offsets(state[key], length, generator)


def _fill_offsets(offsets: Tensor, length: int, generator: torch.Generator) -> None:
    """Draw ascending offsets, one from each of k equal parts of a block."""
    k = offsets.shape[-1]
    starts = torch.arange(k, device=offsets.device) * length // k
    offsets.random_(length // k, generator=generator).add_(starts.to(offsets.dtype))
