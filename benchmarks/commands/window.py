"""``window``: the step time of M-FAC, compared with a lower bound from the memory bandwidth, and its window's bytes.

Optimizers are timed one at a time, with random gradients and full windows (see ``benchmarks/filling.py``). Steps
alternate with a copy of a large tensor and, for dense rows, the two products ``torch.mv(G, g)`` and
``torch.mv(G.T, a)``, so that ratios compare measurements of the same moment. The lower bound of a step, its floor, is
the time to move its bytes at the rate of the copies, plus the m³/3 FLOPs of the Cholesky factorization of the Gram
matrix at the measured rate of float64 products. A step reads the window twice, for the dot products and for the linear
combination. With TopK, it also makes about six passes over vectors of length d.
"""

import gc
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.optim import Optimizer

from benchmarks import report
from benchmarks.commands.options import Alone
from benchmarks.filling import dense_rows, fill_windows
from benchmarks.machine import COPY_BYTES, Rate, copying, gemm_gflops, peak_bytes, timed_in_turns
from benchmarks.recipes.building import from_flat, window_keywords
from benchmarks.recipes.types import Settings
from benchmarks.report import Table, value
from benchmarks.runner import memory_usage
from benchmarks.workloads import WorkloadName, make_workload
from benchmarks.workloads.resnets import BlockName, imagenet_resnet
from secondorder import MFAC, TopK

Shape = tuple[int, ...]
SizeName = Literal["digits", "resnet20", "autoencoder", "large", "resnet50"]


_RESNETS: Mapping[str, tuple[BlockName, Sequence[int]]] = {
    "large": ("basic", (2, 2, 2, 2)),
    "resnet50": ("bottleneck", (3, 4, 6, 3)),
}


def shapes_of(name: SizeName) -> list[Shape]:
    """Return the shapes of the parameters of an ImageNet network, or of a workload whose model needs no data."""
    with torch.device("meta"):
        if name in _RESNETS:
            model = imagenet_resnet(*_RESNETS[name])
        else:
            model = make_workload(cast("WorkloadName", name), Path()).build_model(0)
    return [tuple(p.shape) for p in model.parameters()]


def count(shapes: Sequence[Shape]) -> int:
    return sum(math.prod(shape) for shape in shapes)


StorageName = Literal["dense", "dense-bf16", "topk", "topk-bf16", "topk-bf16-4bit", "lowrank", "topk-triton"]

STORAGES: dict[StorageName, Settings] = {
    "dense": {},
    "dense-bf16": {"window_dtype": "bfloat16"},
    "topk": {"density": 0.01},
    "topk-bf16": {"density": 0.01, "value_dtype": "bfloat16"},
    "topk-bf16-4bit": {"density": 0.01, "value_dtype": "bfloat16", "error_bits": 4},
    "lowrank": {"rank": 4},
    "topk-triton": {"density": 0.01, "kernels": "triton"},
}
"""Settings for each storage of rows, in the format of ``train --set``."""
ANYWHERE: tuple[StorageName, ...] = tuple(name for name, words in STORAGES.items() if words.get("kernels") != "triton")
"""Storages that need no GPU."""

_ROWS = 1024
_DENSE_ROWS: dict[SizeName, int] = {"autoencoder": 512, "large": 128, "resnet50": 128}
"""Rows for models with which 1,024 dense rows exceed the memory of most machines."""

_STATE = ("window", "error", "gram")
_SPARSE_PASSES = 24  # bytes per parameter: six passes in float32


@dataclass
class Window(Alone):
    """Compare the time of a step of M-FAC with the floor of memory bandwidth, and count the bytes of its window."""

    sizes: tuple[SizeName, ...] = ("resnet20", "autoencoder", "large")
    """Models whose parameter shapes are used. large is ResNet-18 and resnet50 is ResNet-50, for ImageNet."""
    storages: tuple[StorageName, ...] = ANYWHERE
    """How rows are stored. topk-triton needs a GPU."""
    window_size: int | None = None
    """Number of rows. Default: 1024, but for dense rows 512 (autoencoder) and 128 (large and resnet50)."""
    steps: int = 20
    """Number of timed steps of each."""

    def run(self) -> int:
        torch.set_num_threads(self.threads)
        cases = [(size, storage) for size in self.sizes for storage in self.storages]
        gemm = gemm_gflops(dtype=torch.float64, device=torch.device(self.device))
        results = [self._measure(*case, gemm) for case in report.tracked("windows", cases)]
        data = {"device": self.device, "seed": self.seed, "gemm_gflops_float64": asdict(gemm), "results": results}
        report.save(self.out_dir, "window", [_time_table(results, gemm), _byte_table(results)], data)
        return 0

    def _measure(self, size: SizeName, storage: StorageName, gemm: Rate) -> dict[str, Any]:
        gc.collect()  # frees the previous window
        shapes, rows = shapes_of(size), self._rows(size, storage)
        figures: dict[str, Any] = {"size": size, "storage": storage, "window_size": rows, "parameters": count(shapes)}
        keywords = window_keywords({**STORAGES[storage], "window_size": rows})
        params = [nn.Parameter(torch.zeros(shape, device=self.device)) for shape in shapes]
        optimizer = MFAC(params, **from_flat(MFAC, keywords))
        draw, device = _drawing(params, self.seed), torch.device(self.device)
        fill_windows(optimizer, self.seed)
        times = _times(optimizer, draw, self.steps, device)
        draw()
        peak = peak_bytes(lambda: optimizer.step(), device)
        memory = memory_usage(optimizer)
        moved = 2 * memory["window"]
        moved += _SPARSE_PASSES * count(shapes) if isinstance(keywords.get("compression"), TopK) else 0
        return {
            **figures, "times": times, **_ratios(times, moved, rows**3 / 3, gemm), "memory": memory,
            "dense_over_state": 4 * rows * count(shapes) / sum(memory.get(kind, 0) for kind in _STATE),
            "peak_bytes": peak,
        }  # fmt: skip

    def _rows(self, size: SizeName, storage: StorageName) -> int:
        if self.window_size is not None:
            return self.window_size
        return _DENSE_ROWS.get(size, _ROWS) if storage.startswith("dense") else _ROWS


def _drawing(params: Sequence[nn.Parameter], seed: int) -> Callable[[], None]:
    """Return a function that replaces the gradients by new random numbers of norm about 1."""
    generator = torch.Generator(params[0].device).manual_seed(seed)
    std = sum(p.numel() for p in params) ** -0.5

    def draw() -> None:
        for p in params:
            p.grad = torch.empty_like(p) if p.grad is None else p.grad
            p.grad.normal_(0, std, generator=generator)

    return draw


def _times(optimizer: Optimizer, draw: Callable[[], None], steps: int, device: torch.device) -> dict[str, list[float]]:
    works: dict[str, Callable[[], object]] = {"step": lambda: optimizer.step(), "copy": copying(COPY_BYTES, device)}
    rows = dense_rows(optimizer)
    if rows is not None:
        vector = torch.ones_like(rows[0])
        works["pair"] = lambda: torch.mv(rows.T, torch.mv(rows, vector))
    return timed_in_turns(works, steps, device, before=draw)


def _ratios(times: dict[str, list[float]], moved: int, flops: float, gemm: Rate) -> dict[str, Any]:
    figures: dict[str, Any] = {"moved_bytes": moved}
    for suffix, pick, rate in (("", statistics.median, gemm.median), ("_of_minima", min, gemm.best)):
        step, copy = pick(times["step"]), 2 * COPY_BYTES / pick(times["copy"])
        floor = moved / copy + flops / (1e9 * rate)
        figures |= {f"step{suffix}": step, f"floor{suffix}": floor, f"ratio{suffix}": step / floor}
        figures[f"copy_gbytes{suffix}"] = copy / 1e9
        if "pair" in times:
            figures[f"pair{suffix}"] = pick(times["pair"])
            figures[f"step_over_pair{suffix}"] = step / pick(times["pair"])
    return figures


_CASE: Mapping[str, report.Column] = {
    "parameters": lambda row: f"{row['size']} {row['parameters'] / 1e6:.2f}M",
    **report.columns("rows = storage; m = window_size"),
}


def _time_table(results: Sequence[dict[str, Any]], gemm: Rate) -> Table:
    def both(key: str) -> report.Column:
        return lambda row: f"{row[key]:.2f} ({row[f'{key}_of_minima']:.2f})" if key in row else "-"

    columns = {
        **_CASE,
        **report.columns("step ms = step .1f ms; floor ms = floor .1f ms"),
        "ratio": both("ratio"),
        "mv pair ms": value("pair", ".1f", 1e3),
        "step / pair": both("step_over_pair"),
        "copy GB/s": value("copy_gbytes", ".1f"),
    }
    caption = (
        "Medians (ratios of minima in parentheses). Floor: the time to move the bytes of a step at the rate of copying "
        f"that was measured between steps, plus m³/3 FLOPs at {gemm.median:.0f} GFLOP/s in float64. "
        f"Threads: {torch.get_num_threads()}."
    )
    return report.table_of("Step time of M-FAC with a full window", results, columns, caption)


def _byte_table(results: Sequence[dict[str, Any]]) -> Table:
    rows = [{**row, **row["memory"]} for row in results]
    columns = {
        **_CASE,
        **report.columns(
            "window = window .2f MB; error = error .2f MB; gram = gram .2f MB; total = total .2f MB; "
            "dense / this = dense_over_state .1f; peak of a step = peak_bytes .2f MB"
        ),
    }
    caption = (
        "All columns are in MB. Dense / this: 4 m d bytes of dense float32 rows, divided by the bytes of window, error "
        "and Gram matrix. Total: everything that memory_usage() counts. Peak: memory that torch allocates in a step, "
        "above the level between steps."
    )
    return report.table_of("Memory", rows, columns, caption)
