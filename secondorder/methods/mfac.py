r"""M-FAC: preconditions with the inverse of a Fisher estimate from the last m gradients.

.. math::
    F = λI + \frac1n \sum_{i} g_i g_i^\top, \qquad
    u = F^{-1} x = G^\top (λI + S/n)^{-1} e_j \quad\text{for the newest row } x = G^\top e_j, \; S = G G^\top .

==================  =====================================================================
``damping``         λ
``window_size``     m, rows of G
``scale``           n: the number of filled rows (``"count"``) or m (``"window"``)
``compression``     of the rows: None, ``TopK`` with error feedback, ``LowRank``
==================  =====================================================================

Frantar, Kurtic & Alistarh 2021 (arXiv 2107.03356); sparse and low-rank windows with error feedback: Modoranu et al.
2023 (EFCP, 2306.06098). ``secondorder/linalg/gram.py`` explains the "push-through" identity that replaces their
recursion.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from secondorder import options
from secondorder.comm.strategy import CommStrategy
from secondorder.config import ClipOptions, FallbackOptions, WindowOptions
from secondorder.curvature.solvers import MFACSolver
from secondorder.curvature.window.form import Compression
from secondorder.curvature.window.topk import TopK
from secondorder.methods import documentation
from secondorder.methods.arguments import expanded, show_new_spelling
from secondorder.methods.defaults import resolved_damping, with_step_size
from secondorder.methods.windows import WINDOW_CHECKS, WindowRules, window_recipe
from secondorder.optimizer import SecondOrderOptimizer
from secondorder.parameters import Group

#: Default numbers of rows of a window.
PUBLISHED_ROWS, GRAFTED_ROWS = 1024, 64
#: Options on which the groups of one window must agree.
_SHARED = "damping", "damping_mode", "scale", "solver", "momentum_mode"


@options.complete_docstring(
    documentation.OPTIMIZER, documentation.WINDOW, usual=documentation.USUAL, expert=documentation.EXPERT
)
class MFAC(SecondOrderOptimizer):
    """Implements M-FAC for any parameters, with or without a module.

    With default options, it was at least as good as AdamW on five of eight workloads (``docs/evidence.md``, Defaults).

    Args:
        momentum: Coefficient μ of the momentum that ``momentum_mode`` selects.
        window_size: m, the number of gradients in the window. If None, it is 1024 as published, except for dense
            windows with ``graft``, where it is 64.
        damping: Damping λ in units of the squared norm of the gradient, or a multiple according to ``damping_mode``. If
            None, it is 0.1 (relative) if ``graft`` or ``inner`` sets the size of the steps, and 1e-5 otherwise.
        damping_mode: ``"absolute"``, or ``"relative"`` to tr(S)/n, the mean squared norm of the rows. If None, it is
            ``"absolute"`` if ``damping`` is set.
        window: The contents and the solver of the window, see :class:`WindowOptions`: the data type of its rows,
            whether normalization layers and biases are left to the fallback, the divisor of the sum over rows, and the
            solver.
        momentum_mode: ``"heavy_ball"`` (v ← μv + u), ``"ema"`` (v ← μv + (1−μ)u) or ``"pre"`` (v ← μv + (1−μ)g is
            preconditioned).
        nesterov: Whether to use Nesterov momentum, with ``momentum_mode="heavy_ball"``.

    Raises:
        ValueError: If a value is out of range, groups with a common window have different options, or ranks differ.
        TypeError: If a value has the wrong type.
        RuntimeError: If the window does not fit into free memory.

    Example:
        >>> import torch, secondorder
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = secondorder.MFAC(model.parameters(), lr=1e-3, graft="adamw", window_size=32)
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

    #: Fields of option objects that this method does not have.
    absent: ClassVar[tuple[str, ...]] = "fallback.betas", "fallback.eps"

    @show_new_spelling
    def __init__(
        self,
        params: ParamsT | nn.Module | Sequence[nn.Module],
        lr: float | Tensor | None = None,
        momentum: float = 0.0,
        *,
        module: nn.Module | Sequence[nn.Module] | None = None,
        comm: CommStrategy | None = None,
        window_size: int | None = None,
        damping: float | None = None,
        damping_mode: str | None = None,
        graft: str | None = "auto",
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        partition: str = "global",
        compression: Compression = None,
        momentum_mode: str = "heavy_ball",
        weight_decay_mode: str = "standard",
        nesterov: bool = False,
        maximize: bool = False,
        foreach: bool | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        fallback: str | FallbackOptions | None = None,
        clip: float | ClipOptions | None = None,
        checkpoint_curvature: str = "all",
        window: WindowOptions = WindowOptions(),
        inner: str = "sgd",
        deterministic_seed: int = 0,
    ) -> None:
        given = expanded(locals(), type(self))
        given = with_step_size(given, rate=1e-3, own_size=weight_decay_mode != "standard")
        given |= resolved_damping(given, absolute=1e-5, relative=0.1)
        if window_size is None:
            given["window_size"] = PUBLISHED_ROWS if given["graft"] is None or compression is not None else GRAFTED_ROWS
        exclude, by_default = partial(_exclude, shares=partition == "global"), damping_mode is None
        rules = WindowRules(_SHARED, partition, exclude, mode_by_default=by_default)
        super().__init__(given, window_recipe(given, MFACSolver(), rules))


def _exclude(group: Mapping[str, Any], groups: list[Group], shares: bool) -> None:
    """Reject options that exclude each other."""
    if group["nesterov"] and group["momentum_mode"] != "heavy_ball":
        raise ValueError(f"nesterov needs momentum_mode='heavy_ball', got {group['momentum_mode']!r}")
    if group["momentum_mode"] == "pre" and group["momentum"] >= 1:
        raise ValueError(f"momentum_mode='pre' needs momentum < 1, got {group['momentum']}")
    if shares and groups and group["momentum_mode"] == "pre" and group["momentum"] != groups[0]["momentum"]:
        raise ValueError(
            f"groups of one window must agree on momentum with momentum_mode='pre', got {groups[0]['momentum']} "
            f"and {group['momentum']}"
        )


@options.complete_docstring(MFAC.__doc__, usual=documentation.USUAL, expert=documentation.EXPERT)
class SparseMFAC(MFAC):
    """Implements M-FAC with a sparse window and error feedback, about 64 times smaller than a dense window.

    It is :class:`MFAC` with ``compression=TopK()`` as the default. The 40 largest of each block of 4096 gradient
    entries enter the window, and the rest is added to the next gradient. With default options, its final loss was above
    that of AdamW on all eight workloads (``docs/evidence.md``, Defaults).

    Args:
        compression: Compression of the rows: ``TopK(...)``, or another value that :class:`MFAC` accepts.

    Example:
        >>> import torch, secondorder
        >>> model = torch.nn.Linear(400, 20)
        >>> optimizer = secondorder.SparseMFAC(model.parameters(), lr=3e-4, graft="adamw", window_size=32)
        >>> model(torch.randn(8, 400)).square().mean().backward()
        >>> optimizer.step()
    """

    @show_new_spelling
    def __init__(
        self,
        params: ParamsT | nn.Module | Sequence[nn.Module],
        lr: float | Tensor | None = None,
        momentum: float = 0.0,
        *,
        module: nn.Module | Sequence[nn.Module] | None = None,
        comm: CommStrategy | None = None,
        window_size: int | None = None,
        damping: float | None = None,
        damping_mode: str | None = None,
        graft: str | None = "auto",
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        partition: str = "global",
        compression: Compression = TopK(),
        momentum_mode: str = "heavy_ball",
        weight_decay_mode: str = "standard",
        nesterov: bool = False,
        maximize: bool = False,
        foreach: bool | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        fallback: str | FallbackOptions | None = None,
        clip: float | ClipOptions | None = None,
        checkpoint_curvature: str = "all",
        window: WindowOptions = WindowOptions(),
        inner: str = "sgd",
        deterministic_seed: int = 0,
    ) -> None:
        given = locals()
        super().__init__(**{name: given[name] for name in inspect.signature(MFAC).parameters})
