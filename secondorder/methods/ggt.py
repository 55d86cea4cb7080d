r"""GGT: full-matrix adaptive preconditioning with the last m gradients.

.. math::
    H = (G_w^\top G_w)^{1/2} + εI, \qquad G_w = \operatorname{diag}(β_2^{\text{age}})\, G, \qquad u = H^{-1} v,
    \qquad v ← β_1 v + (1-β_1) g .

====================  ==============================================================
``window_size``       m, rows of G
``betas``             β₁ of the momentum on gradients, β₂ of the decay of the rows
``eps``               ε
``sgd_weight``        c, factor of the complement of the span (default 1/ε)
====================  ==============================================================

Agarwal et al. 2018 (arXiv 1806.02958); sparse windows with error feedback: Modoranu et al. 2023 (EFCP, 2306.06098).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from secondorder import options
from secondorder.comm.strategy import CommStrategy
from secondorder.config import ClipOptions, FallbackOptions, WindowOptions
from secondorder.curvature.solvers import GGTSolver
from secondorder.curvature.window.form import Compression
from secondorder.methods import documentation
from secondorder.methods.arguments import expanded, show_new_spelling
from secondorder.methods.defaults import with_step_size
from secondorder.methods.windows import WINDOW_CHECKS, WindowRules, window_betas, window_recipe
from secondorder.optimizer import SecondOrderOptimizer

#: Options on which the groups of one window must agree.
_SHARED = "betas", "eps", "sgd_weight", "bias_correction"


class GGTRules(WindowRules):
    """Rules about the options of a group of GGT, whose ``betas`` are those of its momentum and its decay."""

    def cycles_betas(self, defaults: Mapping[str, Any]) -> bool:
        """Return whether a scheduler that cycles the momentum acts on β₁ instead of ``momentum``."""
        return defaults["graft"] is None or options.is_adam(defaults["graft"]) or defaults["betas"][0] > 0


@options.complete_docstring(
    documentation.OPTIMIZER, documentation.WINDOW, usual=documentation.USUAL, expert=documentation.EXPERT
)
class GGT(SecondOrderOptimizer):
    """Implements GGT for any parameters, with or without a module.

    With default options, it was at least as good as AdamW on six of eight workloads (``docs/evidence.md``, Defaults).

    Args:
        window_size: m, the number of gradients in the window. Each step needs an eigendecomposition of a matrix ``[m,
            m]``, which makes 256 a sensible limit.
        betas: β₁ in [0, 1) of the momentum on gradients, and β₂ in (0, 1] of the decay of older rows.
        eps: ε, which must be positive.
        sgd_weight: c, the factor of the part of the gradient outside the span of the window. If None, it is 1/ε, which
            gives the exact inverse. It has no effect if the newest row itself is preconditioned.
        fallback: Rule for parameters that are not preconditioned: ``"sgd"``, ``"adam"``, ``"adamw"`` or
            :class:`FallbackOptions`, which also sets its learning rate, and β₁, β₂ and ε of Adam's rule wherever
            ``graft``, ``inner`` or ``fallback`` names it. With ``graft="adam"``, a positive β₁ of ``betas`` is used
            instead, so that schedulers act on both. If None, it is the rule of ``graft`` if that is set, and SGD
            otherwise.
        window: The contents of the window, see :class:`WindowOptions`: the data type of its rows, and whether
            normalization layers and biases are left to the fallback.
        bias_correction: Whether to divide v by 1 − β₁ᵗ.

    Raises:
        ValueError: If a value is out of range, groups with a common window have different options, or ranks differ.
        TypeError: If a value has the wrong type.
        RuntimeError: If the window does not fit into free memory.

    Example:
        >>> import torch, secondorder
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = secondorder.GGT(model.parameters(), lr=1e-3, graft="adamw", window_size=20)
        >>> model(torch.randn(8, 4)).square().mean().backward()
        >>> optimizer.step()
    """

    checks: ClassVar[dict[str, options.Check]] = {
        **WINDOW_CHECKS,
        "betas": window_betas,
        "eps": options.number(0.0, low_open=True),
        "sgd_weight": options.number(0.0, optional=True),
        "bias_correction": options.flag,
        "fallback_betas": options.betas,
        "fallback_eps": options.number(0.0),
    }

    #: Fields of option objects that this method does not have.
    absent: ClassVar[tuple[str, ...]] = "window.divisor", "window.solver"

    @show_new_spelling
    def __init__(
        self,
        params: ParamsT | nn.Module | Sequence[nn.Module],
        lr: float | Tensor | None = None,
        momentum: float = 0.0,
        *,
        module: nn.Module | Sequence[nn.Module] | None = None,
        comm: CommStrategy | None = None,
        window_size: int = 100,
        graft: str | None = "auto",
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        betas: tuple[float, float] = (0.0, 1.0),
        eps: float = 1e-4,
        partition: str = "global",
        compression: Compression = None,
        sgd_weight: float | None = None,
        bias_correction: bool = False,
        weight_decay_mode: str = "standard",
        nesterov: bool = False,
        maximize: bool = False,
        foreach: bool | None = None,
        fallback: str | FallbackOptions | None = None,
        clip: float | ClipOptions | None = None,
        checkpoint_curvature: str = "all",
        window: WindowOptions = WindowOptions(),
        inner: str = "sgd",
        deterministic_seed: int = 0,
    ) -> None:
        given = expanded(locals(), type(self))
        given = with_step_size(given, rate=1e-3, own_size=weight_decay_mode != "standard")
        for old, name in options.RENAMED.items():
            given[old] = options.DEFAULTS[name] if given[old] is None else given[old]
        super().__init__(given, window_recipe(given, GGTSolver(), GGTRules(_SHARED, partition)))
