r"""M-FAC: preconditioning with the inverse of a Fisher estimate from the last m gradients.

.. math::
    F = λI + \frac1n \sum_{i} g_i g_i^\top, \qquad
    u = F^{-1} x = G^\top (λI + S/n)^{-1} e_j \quad\text{for the newest row } x = G^\top e_j, \; S = G G^\top .

==================  =====================================================================
``damping``         λ
``window_size``     m, rows of G
``scale``           n: rows that are filled (``"count"``) or m (``"window"``)
``compression``     of the rows: None, ``TopK`` with error feedback, ``LowRank``
==================  =====================================================================

Frantar, Kurtic & Alistarh 2021 (arXiv 2107.03356); sparse and low-rank windows with error feedback: Modoranu et al.
2023 (EFCP, 2306.06098). The solve by "push-through" instead of their recursion is explained in
``secondorder/linalg/gram.py``.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.linalg import LinAlgError  # type: ignore[attr-defined]
from torch.optim.optimizer import ParamsT

from secondorder import options
from secondorder.comm import CommStrategy
from secondorder.curvature.damping_watch import Damped
from secondorder.curvature.extremes import Extremes
from secondorder.curvature.window.form import Compression
from secondorder.curvature.window.topk import TopK
from secondorder.curvature.window.window import LAG
from secondorder.lifecycle import Group
from secondorder.linalg import gram
from secondorder.linalg.dense import all_true_on_cpu, anywhere
from secondorder.methods import documentation
from secondorder.preconditioners.units import Unit
from secondorder.preconditioners.windows import WINDOW_CHECKS, WindowOptimizer

#: Error of the direction above which ``solver="auto"`` filters the spectrum: the error of a dot times the amplification
#: squared, since the dots are wrong too.
_LARGEST_ERROR = 2e-2


@options.complete_docstring(documentation.OPTIMIZER, documentation.WINDOW)
class MFAC(WindowOptimizer):
    """M-FAC on any parameters, with or without a module.

    Args:
        momentum: Coefficient μ of the momentum that ``momentum_mode`` selects.
        window_size: m, the number of gradients in the window.
        damping: Damping λ, in units of the squared norm of the gradient, or a multiple as ``damping_mode`` says.
        damping_mode: ``"absolute"``, or ``"relative"`` to tr(S)/n, the mean squared norm of the rows.
        scale: What the sum over rows is divided by: the number of rows that are filled (``"count"``), or m
            (``"window"``). The published code uses m, with which updates are up to m times larger at first.
        solver: ``"cholesky"``, ``"eigh"``, which leaves out directions that consist of rounding errors, or ``"auto"``,
            which uses Cholesky, and ``eigh`` where nearly dependent rows would leave less than 2 digits (on a GPU, ten
            steps later).
        momentum_mode: ``"heavy_ball"`` (v ← μv + u), ``"ema"`` (v ← μv + (1−μ)u) or ``"pre"`` (v ← μv + (1−μ)g is
            preconditioned).
        nesterov: Whether to use Nesterov momentum, with ``momentum_mode="heavy_ball"``.

    Raises:
        ValueError: For a value out of range, for groups of one window that do not agree, or for ranks that differ.
        TypeError: For a value of a wrong kind.
        RuntimeError: If the window does not fit into free memory.

    Example:
        >>> import torch, secondorder
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = secondorder.MFAC(model.parameters(), lr=1e-3, graft="adam", window_size=32)
        >>> model(torch.randn(8, 4)).square().mean().backward()
        >>> optimizer.step()
    """

    checks: ClassVar[dict[str, options.Check]] = {
        **WINDOW_CHECKS,
        "damping": options.number(0.0, low_open=True),
        "damping_mode": options.choice("absolute", "relative"),
        "scale": options.choice("count", "window"),
        "solver": options.choice("auto", "cholesky", "eigh"),
        "momentum_mode": options.choice("heavy_ball", "ema", "pre"),
    }
    shared_options = (
        *WindowOptimizer.shared_options,
        "damping",
        "damping_mode",
        "scale",
        "solver",
        "momentum_mode",
    )

    def __init__(
        self,
        params: ParamsT | nn.Module | Sequence[nn.Module],
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        *,
        module: nn.Module | Sequence[nn.Module] | None = None,
        comm: CommStrategy | None = None,
        window_size: int = 1024,
        damping: float = 1e-5,
        damping_mode: str = "absolute",
        scale: str = "count",
        partition: str = "global",
        compression: Compression = None,
        window_dtype: torch.dtype | None = None,
        solver: str = "auto",
        momentum_mode: str = "heavy_ball",
        nesterov: bool = False,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        weight_decay_mode: str = "standard",
        skip_norm_layers: bool = False,
        skip_biases: bool = False,
        maximize: bool = False,
        foreach: bool | None = None,
        fallback: str | None = None,
        fallback_lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        fallback_betas: tuple[float, float] | None = None,
        fallback_eps: float | None = None,
        inner: str = "sgd",
        graft: str | None = None,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        grad_scaler: Any = None,
        deterministic_seed: int = 0,
        checkpoint_curvature: str = "all",
    ) -> None:
        given = locals()
        super().__init__(
            params,
            options.from_arguments(given, MFAC.checks),
            module=module,
            comm=comm,
            compression=compression,
            window_dtype=window_dtype,
            partition=partition,
            skip_norm_layers=skip_norm_layers,
            skip_biases=skip_biases,
            grad_scaler=grad_scaler,
            seed=deterministic_seed,
        )

    # ------------------------------------------------------------------ the verbs
    def momentum_of_gradients(self, group: Mapping[str, Any]) -> float:
        """μ in mode ``"pre"``."""
        return float(group["momentum"]) if group["momentum_mode"] == "pre" else 0.0

    def coefficients(self, units: Sequence[Unit], lower: Tensor) -> Tensor:
        """``(λI + S/n)⁻¹ (b − q/(nλ))``."""
        n = torch.stack([self._rows_counted(unit) for unit in units])
        squares = lower.diagonal(dim1=-2, dim2=-1).clone()
        damping = torch.cat([
            gram.mfac_damping(part[None], unit.group["damping"], unit.group["damping_mode"], own[None])
            for unit, part, own in zip(units, squares, n, strict=True)
        ])  # fmt: skip
        b, q = _stacked(units)
        rhs = gram.mfac_right_side(b, q, damping, n)
        a, ok = gram.mfac_cholesky_(lower, rhs, damping, n)
        amplification = torch.where(ok, gram.mfac_amplification(squares, a, rhs, damping, n), torch.inf)
        wanted = self._filtering(units, amplification)
        if wanted is not None:
            filtered = self._filtered(units, (b, q, damping, n))
            a = torch.where(wanted[:, None], filtered, a)
            ok = torch.where(wanted, torch.isfinite(filtered).all(-1), ok)
        # The last resort takes each row by itself: for the newest one, the answer of a window of one row.
        alone = rhs / (damping[:, None] + squares / n[:, None])
        for unit, good, size, own in zip(units, ok, amplification, damping, strict=True):
            unit.window.counters["solve_failures"].add_((~good).to(torch.int64))
            unit.outside = 1 / own
            self._note(unit, size)
        return torch.where(ok[:, None], a, alone)

    def curvature_of_rows(self, unit: Unit, rows: Tensor) -> Tensor:
        """``GᵀG/n``."""
        return rows.mT @ rows / self._rows_counted(unit)

    def extremes(self, unit: Unit) -> tuple[Tensor, Tensor]:
        """λ, and the largest eigenvalue of ``GᵀG/n``."""
        lower, n = unit.window.lower(), self._rows_counted(unit)
        squares = lower.diagonal()[None]
        damping = gram.mfac_damping(squares, unit.group["damping"], unit.group["damping_mode"], n[None])
        return damping[0], anywhere(torch.linalg.eigvalsh, lower)[-1].clamp(min=0) / n

    def bounds(self, unit: Unit) -> Damped:
        """λ of a window, and upper bounds of the largest eigenvalue of ``GᵀG/n``."""
        lower, n = unit.window.lower(), self._rows_counted(unit)
        group = unit.group
        damping = gram.mfac_damping(lower.diagonal()[None], group["damping"], group["damping_mode"], n[None])[0]
        largest = gram.largest_bound(gram.symmetric(lower)) / n
        return Damped(unit.name, group, "damping", Extremes(damping, largest=largest + damping, undamped=largest))

    # ------------------------------------------------------------------ the solve in detail
    def _rows_counted(self, unit: Unit) -> Tensor:
        """n, 0-dim float64."""
        count = unit.window.counters["count"].clamp(1, unit.window.m).to(torch.float64)
        return torch.full_like(count, unit.window.m) if unit.group["scale"] == "window" else count

    def _filtered(self, units: Sequence[Unit], problem: tuple[Tensor, Tensor | None, Tensor, Tensor]) -> Tensor:
        """Coefficients without the directions that are rounding; not finite if they cannot be found."""
        lower = torch.stack([unit.window.lower() for unit in units])
        try:
            return gram.mfac_filtered(lower, *problem, noise=units[0].window.noise)
        except LinAlgError:
            return torch.full_like(problem[0], torch.nan)

    def _filtering(self, units: Sequence[Unit], amplification: Tensor) -> Tensor | None:
        """Which units take the answer without the directions that are rounding.

        A CPU looks at the amplification of this very step, a device at that of some steps ago.

        Returns:
            Flags ``[k]``; None for none of them.
        """
        solver, on_cpu = units[0].group["solver"], amplification.device.type == "cpu"
        if solver == "eigh":
            return torch.ones_like(amplification, dtype=torch.bool)
        if not on_cpu:
            return torch.ones_like(amplification, dtype=torch.bool) if self._filters(units[0]) else None
        limit = (_LARGEST_ERROR / units[0].window.noise) ** 0.5
        fine = amplification <= limit if solver == "auto" else torch.isfinite(amplification)
        return None if all_true_on_cpu(fine) else ~fine

    def _filters(self, unit: Unit) -> bool:
        """On a device, for ``"auto"``: whether a unit filters, from what was measured some steps ago."""
        if unit.window.device.type == "cpu" or unit.group["solver"] != "auto":
            return False
        arrival = unit.arrivals.pop(self._t % LAG, None)
        if arrival is not None:
            arrival.synchronize()
        few = unit.window.filled <= LAG  # nothing was measured yet, and the eigenvalues of few rows cost little
        return few or bool(unit.lagged.numpy()[self._t % LAG] ** 2 * unit.window.noise > _LARGEST_ERROR)

    def _note(self, unit: Unit, amplification: Tensor) -> None:
        """Send the amplification of this step to the host, which looks at it some steps later."""
        i = self._t % LAG
        unit.lagged[i].copy_(amplification, non_blocking=True)
        if amplification.device.type != "cpu":
            unit.arrivals[i] = torch.Event(amplification.device)
            unit.arrivals[i].record()

    def _solve_key(self, unit: Unit) -> tuple[object, ...]:
        return *super()._solve_key(unit), unit.group["solver"], self._filters(unit), unit.window.noise

    def momentum_after(self, group: Mapping[str, Any]) -> tuple[float, float]:
        """μ, and 1 − μ in mode ``"ema"``; nothing follows in mode ``"pre"``."""
        momentum = 0.0 if group["momentum_mode"] == "pre" else group["momentum"]
        return momentum, 1 - momentum if group["momentum_mode"] == "ema" else 1.0

    def _check_group(self, group: Group) -> None:
        super()._check_group(group)
        if group["nesterov"] and group["momentum_mode"] != "heavy_ball":
            raise ValueError(f"nesterov needs momentum_mode='heavy_ball', got {group['momentum_mode']!r}")
        if group["momentum_mode"] == "pre" and group["momentum"] >= 1:
            raise ValueError(f"momentum_mode='pre' needs momentum < 1, got {group['momentum']}")
        shared = self._partition == "global" and group["momentum_mode"] == "pre" and self.param_groups
        if shared and group["momentum"] != self.param_groups[0]["momentum"]:
            raise ValueError(
                f"groups of one window must agree on momentum in mode 'pre', got {self.param_groups[0]['momentum']} "
                f"and {group['momentum']}"
            )


@options.complete_docstring(MFAC.__doc__)
class SparseMFAC(MFAC):
    """M-FAC with a sparse window and error feedback: about 64 times smaller than a dense one.

    As :class:`MFAC`, with ``compression=TopK()`` by default: of each block of 4096 gradient entries the 40 largest
    enter the window, and the rest is added to the next gradient.

    Args:
        compression: Compression of the rows: ``TopK(...)``, or another one that :class:`MFAC` accepts.

    Example:
        >>> import torch, secondorder
        >>> model = torch.nn.Linear(400, 20)
        >>> optimizer = secondorder.SparseMFAC(model.parameters(), lr=1e-3, graft="adam", window_size=32)
        >>> model(torch.randn(8, 400)).square().mean().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: ParamsT | nn.Module | Sequence[nn.Module],
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        *,
        module: nn.Module | Sequence[nn.Module] | None = None,
        comm: CommStrategy | None = None,
        window_size: int = 1024,
        damping: float = 1e-5,
        damping_mode: str = "absolute",
        scale: str = "count",
        partition: str = "global",
        compression: Compression = TopK(),  # noqa: B008 - it cannot be changed
        window_dtype: torch.dtype | None = None,
        solver: str = "auto",
        momentum_mode: str = "heavy_ball",
        nesterov: bool = False,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        weight_decay_mode: str = "standard",
        skip_norm_layers: bool = False,
        skip_biases: bool = False,
        maximize: bool = False,
        foreach: bool | None = None,
        fallback: str | None = None,
        fallback_lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        fallback_betas: tuple[float, float] | None = None,
        fallback_eps: float | None = None,
        inner: str = "sgd",
        graft: str | None = None,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        grad_scaler: Any = None,
        deterministic_seed: int = 0,
        checkpoint_curvature: str = "all",
    ) -> None:
        given = locals()
        super().__init__(**{name: given[name] for name in inspect.signature(MFAC).parameters})


def _stacked(units: Sequence[Unit]) -> tuple[Tensor, Tensor | None]:
    sources = [unit.source for unit in units if unit.source is not None]
    dots = [source.q for source in sources if source.q is not None]
    return torch.stack([source.b for source in sources]), torch.stack(dots) if dots else None
