"""``linalg``: the time and accuracy of ways to update eigenbases and inverses after their factor has changed.

A factor with a decaying spectrum and a known basis and damped inverse changes by one update of a running mean:
``X ← (1 − drift) X + drift Y``, where Y is the second moment of rows of another distribution, with the same trace. Then
each method updates the basis or the inverse, and its result is measured in float64.

A basis is updated by ``eigh`` and by QR sweeps. Its errors are the part of ``QᵀXQ`` outside the diagonal, and the
difference between the scale ``diag(QᵀXQ)`` and the eigenvalues, both in ascending order. EK-FAC measures its scale in
any basis, so the first error limits the quality of its curvature. The second one is the error of K-FAC's scale.

An inverse Y of ``Z = X + λI`` is updated by Cholesky, ``eigh`` and Newton-Schulz iterations ``Y ← Y (2I − ZY)``, which
square the residual ``I − ZY`` if its spectral norm is below 1. Its errors are that residual and that of a direction.

The polar factors of two matrices, of full rank and of a sixteenth of it, are computed by Muon's iteration in float32
and bfloat16. The error is the distance from the result of the same iteration in float64.

``kernel`` compares the times of HyLo's kernel and projection with the FLOPs at the rate of large matrix products. The
kernel of R rows takes 2 R² (d_i + d_o) FLOPs, and the projection in every step takes 4 R d_i d_o. A large square
product, which is timed in turns with both, gives the rate.
"""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks import report
from benchmarks.commands.options import Alone, check_ranges
from benchmarks.machine import GEMM_SIDE, timed_in_turns
from benchmarks.report import Table
from secondorder.linalg import dense, eigenbasis, kernel, polar, woodbury
from secondorder.linalg.kernel import Rows

Update = Literal["none", "eigh", "qr", "qr, 2 sweeps"]
Inversion = Literal["none", "cholesky", "eigh", "newton", "newton, 2 rounds"]

_DECADES = 4.0  # range of the eigenvalues
_TURN = 0.5  # scale of the rotation between the old and the new eigenbasis


@dataclass
class Linalg(Alone):
    """Compare the time and accuracy of ways to update eigenbases and inverses after the factors have changed."""

    sizes: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096)
    """Sizes n of the factors."""
    drift: float = 0.05
    """Share of the factor that is new: 1 - factor_decay for one update."""
    damping: float = 0.1
    """λ of the inverses, relative to the mean eigenvalue."""
    trials: int = 7
    """Number of timed refreshes of each kind, of which the median counts."""

    def run(self) -> int:
        if not 0 <= self.drift <= 1:
            raise ValueError(f"drift must be from 0 to 1, got {self.drift}")
        check_ranges(self, ("damping",))
        torch.set_num_threads(self.threads)
        found: dict[str, list[dict[str, Any]]] = {"results": [], "inverses": [], "polars": []}
        for n in report.tracked("factors", self.sizes):
            before, after = drifted(n, self.drift, self.seed)
            found["results"] += self._bases(n, before, after)
            shift = self.damping * torch.eye(n, dtype=torch.float64)  # the trace is n
            found["inverses"] += self._inverses(n, before + shift, after + shift)
            found["polars"] += self._polars(n)
        data = {"device": self.device, "seed": self.seed, "drift": self.drift, "damping": self.damping}
        report.save(self.out_dir, "linalg", _tables(found, self.drift, self.damping), {**data, **found})
        return 0

    def _bases(self, n: int, before: Tensor, after: Tensor) -> list[dict[str, Any]]:
        _, basis, _ = dense.eigh_psd(before[None].to(self.device, torch.float32), True)
        ways = updates(after[None].to(self.device, torch.float32), basis)
        judged = {name: judge(after, way()[0].cpu().double()) for name, way in ways.items()}
        return self._timed(n, ways, judged, "eigh")

    def _inverses(self, n: int, before: Tensor, after: Tensor) -> list[dict[str, Any]]:
        last = torch.linalg.inv(before).to(self.device, torch.float32)
        ways = inversions(after.to(self.device, torch.float32), last)
        judged = {name: judge_inverse(after, way().cpu().double()) for name, way in ways.items()}
        return self._timed(n, ways, judged, "cholesky")

    def _polars(self, n: int) -> list[dict[str, Any]]:
        generator = torch.Generator().manual_seed(self.seed)
        full = torch.randn(n, n, generator=generator).to(self.device)
        rank = max(1, n // 16)
        low = (torch.randn(n, rank, generator=generator) @ torch.randn(rank, n, generator=generator)).to(self.device)
        dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
        ways = {name: partial(polar.polar, full, dtype=dtype) for name, dtype in dtypes.items()}
        judged = {
            name: {"full": _polar_error(full, dtype), "low": _polar_error(low, dtype)} for name, dtype in dtypes.items()
        }
        return self._timed(n, ways, judged, "float32")

    def _timed(
        self, n: int, ways: Mapping[Any, Callable[[], Tensor]], judged: Mapping[Any, dict[str, float]], reference: str
    ) -> list[dict[str, Any]]:
        """Return the results of every method. The method ``none`` has no time."""
        times = timed_in_turns(ways, self.trials, torch.device(self.device))
        medians = {name: statistics.median(spent) for name, spent in times.items() if name != "none"}
        speeds = {name: medians[reference] / spent for name, spent in medians.items()}
        return [
            {"n": n, "update": name, "times": spent, "seconds": medians.get(name), "speed": speeds.get(name)}
            | judged[name]
            for name, spent in times.items()
        ]


def _polar_error(x: Tensor, dtype: torch.dtype) -> float:
    exact = polar.polar(x.double())
    return float((polar.polar(x, dtype=dtype) - exact).norm() / exact.norm())


def drifted(n: int, drift: float, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values = torch.logspace(-_DECADES, 0, n, dtype=torch.float64)
    basis, _ = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))
    turn, _ = torch.linalg.qr(
        torch.eye(n, dtype=torch.float64) + _TURN / n**0.5 * torch.randn(n, n, generator=generator, dtype=torch.float64)
    )
    old, new = ((q * values) @ q.mT * (n / values.sum()) for q in (basis, basis @ turn))
    return old, (1 - drift) * old + drift * new


def updates(factor: Tensor, basis: Tensor) -> dict[Update, Callable[[], Tensor]]:
    return {
        "none": lambda: basis,
        "eigh": lambda: dense.eigh_psd(factor, True)[1],
        "qr": lambda: eigenbasis.qr_refresh(factor, basis)[1],
        "qr, 2 sweeps": lambda: eigenbasis.qr_refresh(factor, basis, 2)[1],
    }


def judge(factor: Tensor, basis: Tensor) -> dict[str, float]:
    """Return the errors of a basis Q for a matrix X with eigenvalues λ.

    They are ``‖QᵀXQ − diag‖ / ‖X‖`` (off the diagonal), ``‖diag(QᵀXQ) − λ‖ / ‖λ‖`` (scale error), and the median of
    ``|diag(QᵀXQ) / λ − 1|`` (median error), in which small and large eigenvalues have the same weight.
    """
    seen = basis.mT @ factor @ basis
    diagonal, exact = seen.diagonal(), torch.linalg.eigvalsh(factor)
    ordered = diagonal.sort().values
    return {
        "off_diagonal": float(torch.linalg.norm(seen - diagonal.diag()) / torch.linalg.norm(factor)),
        "scale_error": float(torch.linalg.norm(ordered - exact) / torch.linalg.norm(exact)),
        "median_error": float((ordered / exact - 1).abs().median()),
    }  # fmt: skip


def inversions(damped: Tensor, last: Tensor) -> dict[Inversion, Callable[[], Tensor]]:
    def by_eigenvalues() -> Tensor:
        values, basis, _ = dense.eigh_psd(damped[None], True)
        return (basis[0] / values[0]) @ basis[0].mT

    return {
        "none": lambda: last,
        "cholesky": lambda: dense.inverse_pd(damped[None], True)[0][0],
        "eigh": by_eigenvalues,
        "newton": lambda: newton_schulz(damped, last, 1),
        "newton, 2 rounds": lambda: newton_schulz(damped, last, 2),
    }


def newton_schulz(x: Tensor, y: Tensor, rounds: int) -> Tensor:
    for _ in range(rounds):
        y = torch.addmm(y, y, x @ y, beta=2, alpha=-1)
    return y


def judge_inverse(x: Tensor, y: Tensor) -> dict[str, float]:
    """Return ``‖I − XY‖ / √n``, the spectral norm of ``I − XY``, and the error of ``Yg`` for random g.

    If the spectral norm is below 1, a Newton-Schulz iteration squares it.
    """
    rest = torch.eye(len(x), dtype=x.dtype) - x @ y
    g = torch.randn(len(x), generator=torch.Generator().manual_seed(0), dtype=x.dtype)
    exact = torch.linalg.solve(x, g)
    return {
        "residual": float(rest.norm() / len(x) ** 0.5),
        "norm": float(torch.linalg.matrix_norm(rest, 2)),
        "direction_error": float((y @ g - exact).norm() / exact.norm()),
    }


def _tables(found: Mapping[str, list[dict[str, Any]]], drift: float, damping: float) -> list[Table]:
    common = "n; update; ms = seconds .2f ms; {} / this = speed .2f; "
    bases = common.format("eigh") + (
        "off the diagonal = off_diagonal .2e; scale error = scale_error .2e; scale error, median = median_error .2e"
    )
    inverses = common.format("cholesky") + (
        "residual = residual .2e; spectral norm = norm .2e; error of a direction = direction_error .2e"
    )
    polars = common.format("float32") + "error at full rank = full .2e; error at rank n/16 = low .2e"
    return [
        report.table_of(
            "Updating a basis after its factor has changed", found["results"], report.columns(bases),
            f"One float32 factor of size n × n whose eigenvalues span {_DECADES:g} decades and of which {drift:.0%} is "
            "new. Off the diagonal: ‖QᵀXQ − diag‖ / ‖X‖. Scale error: the difference between diag(QᵀXQ) and the "
            "eigenvalues, in norm, and the median of their relative differences. none: the basis is not updated. "
            f"Threads: {torch.get_num_threads()}.",
        ),
        report.table_of(
            "Updating an inverse after its factor has changed", found["inverses"], report.columns(inverses),
            f"The same factors, with λ = {damping:g} of their mean eigenvalue, {drift:.0%} of them new. Residual: "
            "‖I − XY‖ / √n. Spectral norm: that of I − XY; Newton–Schulz iterations converge if it is below 1. Error "
            "of a direction: that of Y g for random g. none: the inverse is not updated.",
        ),
        report.table_of(
            "Polar factor", found["polars"], report.columns(polars),
            "Five iterations on a random float32 matrix of size n × n. The error is relative to the same iterations in "
            "float64. Matrices of fewer than 128 rows stay in float32.",
        ),
    ]  # fmt: skip


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
        report.save(self.out_dir, "kernel", [_kernel_table(results)], data)
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


def _kernel_table(results: list[dict[str, Any]]) -> Table:
    columns = {
        **report.columns("R = rank"),
        "layer": lambda row: f"{row['d_i']} × {row['d_o']}",
        **report.columns(
            "kernel ms = kernel_seconds .2f ms; kernel / floor = kernel_ratio .2f; projection ms = projection_seconds "
            ".2f ms; projection / floor = projection_ratio .2f; GFLOP/s of a product = gflops .0f"
        ),
    }
    caption = (
        "The ratios compare each time with that of its FLOPs: 2 R² (d_i + d_o) for the kernel and 4 R d_i d_o for the "
        f"projection, at the rate of matrix products of size {GEMM_SIDE} that were timed in turns with them. "
        f"Threads: {torch.get_num_threads()}."
    )
    return report.table_of("HyLo's kernel and projection", results, columns, caption)
