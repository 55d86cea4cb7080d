"""``kernel``: the times of HyLo's kernel and projection, compared with the FLOPs at the rate of large matrix products.

The kernel of R rows takes 2 R² (d_i + d_o) FLOPs, and the projection in every step takes 4 R d_i d_o. A large square
product, which is timed in turns with both, gives the rate.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table

from benchmarks import report
from benchmarks.commands.options import Alone
from benchmarks.machine import GEMM_SIDE, timed_in_turns
from benchmarks.report import value
from secondorder.linalg import kernel, woodbury
from secondorder.linalg.kernel import Rows


@dataclass
class Kernel(Alone):
    """Compare the times of HyLo's kernel and projection with those of their FLOPs."""

    ranks: tuple[int, ...] = (32, 128, 256, 512, 1024)
    """Numbers of rows R."""
    layers: tuple[tuple[int, int], ...] = ((1000, 500), (1152, 256), (2048, 2048))
    """Numbers of inputs and outputs of layers, d_i and d_o."""
    trials: int = 9
    """Number of timed runs of each, of which the median counts."""

    def run(self) -> int:
        torch.set_num_threads(self.threads)
        cases = [(rank, d_i, d_o) for d_i, d_o in self.layers for rank in self.ranks]
        results = [self._measure(*case) for case in report.tracked("kernels", cases)]
        data = {"device": self.device, "seed": self.seed, "threads": self.threads, "results": results}
        report.save(self.out_dir, "kernel", [_table(results)], data)
        return 0

    def _measure(self, rank: int, d_i: int, d_o: int) -> dict[str, Any]:
        device, generator = torch.device(self.device), torch.Generator().manual_seed(self.seed)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(device)

        rows, gradient = Rows(random(rank, 1, d_i), random(rank, 1, d_o)), random(d_o, d_i)
        damping = torch.ones((), dtype=torch.float64, device=device)
        inverse, _ = woodbury.damped_inverse(kernel.gram(rows).double(), damping)
        square = random(GEMM_SIDE, GEMM_SIDE)
        work = {"kernel": 2 * rank**2 * (d_i + d_o), "projection": 4 * rank * d_i * d_o}
        ways: dict[str, Callable[[], object]] = {
            "kernel": lambda: kernel.gram(rows),
            "projection": lambda: woodbury.apply(rows, inverse, damping, gradient),
            "product": lambda: square @ square,
        }
        times = timed_in_turns(ways, self.trials, device, 0.02)
        middle = {name: statistics.median(own) for name, own in times.items()}
        rate = 2 * GEMM_SIDE**3 / middle["product"]
        figures: dict[str, Any] = {"rank": rank, "d_i": d_i, "d_o": d_o, "gflops": rate / 1e9}
        for name, flops in work.items():
            figures[f"{name}_seconds"], figures[f"{name}_ratio"] = middle[name], middle[name] * rate / flops
        return figures


def _table(results: list[dict[str, Any]]) -> Table:
    columns = {
        "R": value("rank"),
        "layer": lambda row: f"{row['d_i']} × {row['d_o']}",
        "kernel ms": value("kernel_seconds", ".2f", 1e3),
        "kernel / floor": value("kernel_ratio", ".2f"),
        "projection ms": value("projection_seconds", ".2f", 1e3),
        "projection / floor": value("projection_ratio", ".2f"),
        "GFLOP/s of a product": value("gflops", ".0f"),
    }
    caption = (
        "The ratios compare each time with that of its FLOPs: 2 R² (d_i + d_o) for the kernel and 4 R d_i d_o for the "
        f"projection, at the rate of matrix products of size {GEMM_SIDE} that were timed in turns with them. "
        f"Threads: {torch.get_num_threads()}."
    )
    return report.table_of("HyLo's kernel and projection", results, columns, caption)
