"""``basis``: bringing an eigenbasis up to date after its factor has drifted, by ``eigh`` and by sweeps of QR.

A factor of decaying spectrum, its basis known, moves as one update of a running mean moves it: ``X ← (1 − drift) X +
drift Y``, Y being the second moment of rows of another distribution, of the same trace. Then the basis is brought up to
date in every way, and judged in float64: by what is left off the diagonal of ``QᵀXQ``, and by the scale along its
vectors, ``diag(QᵀXQ)`` against the eigenvalues, both in ascending order. EK-FAC measures its scale in whatever basis
there is, so the first figure says how good its curvature can be, and the second how far K-FAC's would be off.
"""

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.table import Table
from torch import Tensor

from benchmarks import report
from benchmarks.machine import seconds
from secondorder import linalg
from secondorder.curvature import scale

Update = Literal["none", "eigh", "qr", "qr, 2 sweeps"]

COLUMNS = ("n", "update", "ms", "eigh / this", "off the diagonal", "scale error", "scale error, median")
_DECADES = 4.0  # over which the eigenvalues are spread
_TURN = 0.5  # between the eigenbases of the old part and of the new one


@dataclass
class Basis:
    """Compare eigh with sweeps of QR from the last basis: time, and accuracy after a drift of the factor."""

    sizes: tuple[int, ...] = (128, 512, 1024)
    """Sides n of the factors."""
    drift: float = 0.05
    """Share of the factor that is new: 1 - factor_decay for one update."""
    trials: int = 7
    """Timed refreshes of each kind; the median counts."""
    device: str = "cpu"
    """Where to run."""
    seed: int = 0
    """Seed of the factors."""
    threads: int = 2
    """Threads that torch computes with."""
    out_dir: Path = Path("bench-output")
    """Folder for the table and the results."""

    def run(self) -> int:
        """Run the command.

        Returns:
            0.

        Raises:
            ValueError: When the drift is no share.
        """
        if not 0 <= self.drift <= 1:
            raise ValueError(f"drift must be from 0 to 1, got {self.drift}")
        torch.set_num_threads(self.threads)
        results = []
        with report.progress_bar() as progress:
            task = progress.add_task("bases", total=len(self.sizes))
            for n in self.sizes:
                results += self._measure(n)
                progress.advance(task)
        data = {"device": self.device, "seed": self.seed, "drift": self.drift, "results": results}
        report.save(self.out_dir, "basis", [_table(results, self.drift)], data)
        return 0

    def _measure(self, n: int) -> list[dict[str, Any]]:
        """Bring one basis up to date in every way.

        Args:
            n: Side of the factor.

        Returns:
            Figures of each way.
        """
        device = torch.device(self.device)
        before, after = drifted(n, self.drift, self.seed)
        _, basis, _ = linalg.eigh_psd(before[None].to(device, torch.float32), True)
        factor = after[None].to(device, torch.float32)
        ways = updates(factor, basis)
        bases = {name: way() for name, way in ways.items()}
        times: dict[Update, list[float]] = {name: [] for name in ways}
        for _ in range(self.trials):
            for name, way in ways.items():  # in turns, so that a busy moment of the machine hits all of them
                times[name].append(seconds(way, device))
        eigh = statistics.median(times["eigh"])
        return [
            {
                "n": n,
                "update": name,
                "times": times[name],
                "seconds": statistics.median(times[name]),
                "speed": eigh / statistics.median(times[name]) if name != "none" else None,
                **asdict(judge(after, bases[name][0].cpu().double())),
            }
            for name in ways
        ]


@dataclass(frozen=True)
class Quality:
    """How good a basis is."""

    off_diagonal: float
    """``‖QᵀXQ − diag‖ / ‖X‖``."""
    scale_error: float
    """``‖diag(QᵀXQ) − λ‖ / ‖λ‖``."""
    median_error: float
    """Median of ``|diag(QᵀXQ) / λ − 1|``, in which small eigenvalues count as much as large ones."""


def drifted(n: int, drift: float, seed: int) -> tuple[Tensor, Tensor]:
    """Return a factor before and after it has moved.

    Args:
        n: Its side.
        drift: Share of it that is new.
        seed: Seed of both.

    Returns:
        Two symmetric positive definite matrices ``[n, n]`` in float64, of trace n.
    """
    generator = torch.Generator().manual_seed(seed)
    values = torch.logspace(-_DECADES, 0, n, dtype=torch.float64)
    basis, _ = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))
    turn, _ = torch.linalg.qr(
        torch.eye(n, dtype=torch.float64) + _TURN / n**0.5 * torch.randn(n, n, generator=generator, dtype=torch.float64)
    )
    old, new = ((q * values) @ q.mT * (n / values.sum()) for q in (basis, basis @ turn))
    return old, (1 - drift) * old + drift * new


def updates(factor: Tensor, basis: Tensor) -> dict[Update, Callable[[], Tensor]]:
    """Return every way to a new basis.

    Args:
        factor: The matrix ``[1, n, n]``.
        basis: The basis that it had before ``[1, n, n]``.

    Returns:
        Functions that return the new one ``[1, n, n]``.
    """
    return {
        "none": lambda: basis,
        "eigh": lambda: linalg.eigh_psd(factor, True)[1],
        "qr": lambda: scale.qr_refresh(factor, basis)[1],
        "qr, 2 sweeps": lambda: scale.qr_refresh(factor, basis, 2)[1],
    }


def judge(factor: Tensor, basis: Tensor) -> Quality:
    """Measure a basis against a matrix.

    Args:
        factor: X ``[n, n]``, float64.
        basis: Q ``[n, n]``, float64.

    Returns:
        The figures.
    """
    seen = basis.mT @ factor @ basis
    diagonal, exact = seen.diagonal(), torch.linalg.eigvalsh(factor)
    ordered = diagonal.sort().values
    return Quality(
        float(torch.linalg.norm(seen - diagonal.diag()) / torch.linalg.norm(factor)),
        float(torch.linalg.norm(ordered - exact) / torch.linalg.norm(exact)),
        float((ordered / exact - 1).abs().median()),
    )


def _table(results: list[dict[str, Any]], drift: float) -> Table:
    rows = [
        (
            str(r["n"]),
            r["update"],
            "-" if r["speed"] is None else f"{1e3 * r['seconds']:.2f}",
            "-" if r["speed"] is None else f"{r['speed']:.2f}",
            *(f"{r[key]:.2e}" for key in ("off_diagonal", "scale_error", "median_error")),
        )
        for r in results
    ]
    caption = (
        f"One float32 factor of side n whose eigenvalues span {_DECADES:g} decades, {drift:.0%} of it new. Off the "
        "diagonal: ‖QᵀXQ − diag‖ / ‖X‖. Scale error: diag(QᵀXQ) against the eigenvalues, in norm, and the median of "
        f"their relative differences. none: the basis stays. Threads: {torch.get_num_threads()}."
    )
    return report.make_table("A basis after a drift of its factor", COLUMNS, rows, caption)
