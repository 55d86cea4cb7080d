r"""K-FAC: Kronecker-factored approximate curvature.

For a layer with weight ``[W | b]``, input ``a`` (with 1 appended for the bias) and gradient ``g`` at its output, K-FAC
approximates the block of the Fisher by ``F = G ⊗ A`` with ``A = E[a aᵀ]`` and ``G = E[g gᵀ]``. It replaces the gradient
matrix ∇ by

.. math::
    V = Q_G \left[ (Q_G^\top \nabla Q_A) \oslash (s_G s_A^\top + \lambda) \right] Q_A^\top
    \qquad\text{or}\qquad V = (G + \tfrac{\sqrt\lambda}{\pi} I)^{-1} \nabla (A + \pi\sqrt\lambda I)^{-1}.

=====================  ==========================================
``damping``            λ
``factor_decay``       β of the running factors, weight of old ones
``kl_clip``            κ of ``ν = min(1, √(κ / |Σ η² ⟨V, ∇⟩|))``
=====================  ==========================================

Martens & Grosse 2015 (arXiv 1503.05671); convolutions: Grosse & Martens 2016 (1602.01407); positions shared within an
example: Eschenhagen et al. 2023 (2311.00636); ``ν``: Pauloski et al. 2020 (2007.00784).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from secondorder import options
from secondorder.comm.strategy import CommStrategy
from secondorder.config import (
    AdaptationOptions,
    BatchOptions,
    BudgetOptions,
    ClipOptions,
    FallbackOptions,
    FisherOptions,
    InverseOptions,
    RefreshOptions,
    StatisticsOptions,
    StorageOptions,
)
from secondorder.curvature.layer import SkipRule
from secondorder.methods import documentation, kronecker
from secondorder.methods.arguments import show_new_spelling
from secondorder.optimizer import SecondOrderOptimizer
from secondorder.parameters import Group
from secondorder.preconditioners.kronecker import KroneckerPreconditioner


@options.complete_docstring(
    documentation.OPTIMIZER,
    documentation.LAYERS,
    documentation.FACTORS,
    usual=documentation.USUAL,
    expert=documentation.EXPERT,
)
class KFAC(SecondOrderOptimizer):
    """Implements K-FAC for every supported layer type. The fallback rule updates all other parameters.

    Args:
        inverse_method: ``"eigen"`` or ``"cholesky"``. With ``"eigen"``, a change of λ takes effect at once; with
            ``"cholesky"``, it takes effect at the next refresh. ``"cholesky"`` needs half the work per step, and its
            refreshes are several times cheaper. :class:`InverseOptions` also sets how λ is split between the two
            factors. If None, it is ``"eigen"``, or ``InverseOptions(rank=16)`` with a budget.
        budget: Largest mean cost of a step, in units of a step of the same model with AdamW, such as 1.3. It chooses
            the intervals and how many steps are preconditioned, from the sizes of the layers and of the first batch.
            ``describe()`` shows the choice. See :class:`BudgetOptions`.
        refresh: When inverses are computed again, see :class:`RefreshOptions`: spread over the interval
            (``stagger=True``), and more often at the start (``warmup``).

    Raises:
        ValueError: If a value is out of range, a pattern matches nothing, the module is missing, or the options differ
            between ranks.
        TypeError: If a value has the wrong type.
        RuntimeError: If not all ranks of a process group construct the optimizer.

    Example:
        >>> import torch, secondorder
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = secondorder.KFAC(model, lr=0.1)
        >>> model(torch.randn(8, 4)).square().mean().backward()
        >>> optimizer.step()
    """

    checks: ClassVar[dict[str, options.Check]] = {
        **kronecker.FACTOR_CHECKS,
        "damping_split": options.choice(None, "exact", "pi"),
        "inverse_method": options.choice("eigen", "cholesky"),
        "inverse_rank": options.optional_whole(1),
        "precondition_steps": options.whole(1),
        "budget": options.number(1.05, optional=True),
    }

    #: Fields of option objects that this method does not have.
    absent: ClassVar[tuple[str, ...]] = (*kronecker.FACTORED_ABSENT, "refresh.basis_update", "refresh.full_every")

    #: The class of the preconditioner, whose blocks decide how factors are stored and inverted.
    preconditioner_type: ClassVar[type[KroneckerPreconditioner]] = KroneckerPreconditioner

    @show_new_spelling
    def __init__(
        self,
        params: ParamsT | nn.Module | Sequence[nn.Module],
        lr: float | Tensor | None = None,
        momentum: float = 0.9,
        *,
        module: nn.Module | Sequence[nn.Module] | None = None,
        comm: CommStrategy | None = None,
        damping: float | None = None,
        damping_mode: str | None = None,
        kl_clip: float | None = 1e-3,
        factor_update_steps: int | None = None,
        inv_update_steps: int | None = None,
        budget: float | BudgetOptions | None = None,
        skip_layers: Sequence[SkipRule] | SkipRule = (),
        graft: str | None = "auto",
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        inverse_method: str | InverseOptions | None = None,
        approx: str = "expand",
        fisher: str | FisherOptions = "empirical",
        loss_reduction: str = "mean",
        batch: BatchOptions = BatchOptions(),
        factor_decay: float = 0.95,
        overlap: bool = False,
        storage: StorageOptions = StorageOptions(),
        adaptation: AdaptationOptions = AdaptationOptions(),
        power: float = 1.0,
        orthogonalize: bool = False,
        nesterov: bool = False,
        maximize: bool = False,
        foreach: bool | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        fallback: str | FallbackOptions | None = None,
        clip: float | ClipOptions | None = None,
        checkpoint_curvature: str = "all",
        refresh: RefreshOptions = RefreshOptions(),
        statistics: StatisticsOptions = StatisticsOptions(),
        inner: str = "sgd",
        deterministic_seed: int = 0,
    ) -> None:
        given = kronecker.factored_arguments(_within_budget(locals()), type(self))
        rules = KFACRules(given, _exclude, partial(_exclude_judged, adaptation=given["adaptation"]))
        super().__init__(given, kronecker.factor_recipe(given, self.preconditioner_type, rules))
        kronecker.warn_of_options(type(self).__name__, self.param_groups, self.blocks.values(), rules)


class KFACRules(kronecker.FactoredRules):
    """Rules about the options of a group of KFAC, whose factors and inverses other ranks may compute.

    Args:
        given: The arguments of the constructor.
        exclusions: Functions that reject options that exclude each other.
    """

    def __init__(self, given: Mapping[str, Any], *exclusions: kronecker.Exclusion) -> None:
        super().__init__(given, *exclusions)
        self._overlap = given["overlap"]

    def reason_against_roles(self, groups: Sequence[Mapping[str, Any]]) -> str | None:
        """Return why ranks of several roles cannot run the method, for example because steps are judged by the loss."""
        if self._overlap:
            return "inverses are computed in parallel with training there anyway. Drop overlap=True"
        if any(group["budget"] is not None for group in groups):
            return "a budget counts the work of ranks that all do the same. Drop budget="
        if any(group["precondition_steps"] > 1 for group in groups):
            return "every step of the workers is preconditioned. Drop precondition_steps="
        chosen = self.adaptation
        options_on = [*chosen.needing_loss, *(["quadratic_model"] if chosen.quadratic_model else [])]
        if options_on:
            return (
                f"{', '.join(options_on)} judge a step by a quadratic model at the current parameters, but the "
                "curvature is that of the parameters two periods ago. Drop them, or use comm=MemOpt()"
            )
        if any(group["checkpoint_curvature"] == "factors" for group in groups):
            return "checkpoint_curvature='factors' needs factors and inverses on one rank. Use 'all' or 'none'"
        return None


#: The inverse of a budget, whose cost does not grow with the width of a layer.
_CHEAP = InverseOptions(rank=16)


def _within_budget(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments of the constructor with an inverse, which is a cheap one if there is a budget.

    Raises:
        ValueError: If an option was given that the budget chooses.
    """
    budget, refresh, chosen = given["budget"], given["refresh"], given["inverse_method"]
    if budget is None or getattr(budget, "limit", budget) is None:
        return given if chosen is not None else {**given, "inverse_method": "eigen"}
    clashes = {
        **{f"{name}={given[name]!r}": given[name] is not None for name in kronecker.INTERVALS},
        "refresh.warmup=True": getattr(refresh, "warmup", None) is True,
        "refresh.precondition_steps": getattr(refresh, "precondition_steps", 1) != 1,
    }
    options.refuse(clashes, f"budget={budget!r} chooses the intervals itself: drop")
    return given if chosen is not None else {**given, "inverse_method": _CHEAP}


def _exclude_judged(group: Mapping[str, Any], groups: list[Group], adaptation: AdaptationOptions) -> None:
    """Reject steps without curvature where a quadratic model judges each step."""
    found = {
        f"budget={group['budget']}": group["budget"] is not None,
        f"precondition_steps={group['precondition_steps']}": group["precondition_steps"] > 1,
    }
    if adaptation.judging:
        judging = ", ".join(adaptation.judging)
        options.refuse(found, f"{judging} judges every step by its curvature, which some steps lack then: drop")


def _exclude(group: Mapping[str, Any], groups: list[Group]) -> None:
    """Reject options that exclude each other."""
    if group["precondition_steps"] > 1 and group["graft"] is None:
        raise ValueError(
            f"precondition_steps={group['precondition_steps']} needs graft=, whose rule takes the other steps"
        )
    if group["inverse_method"] != "cholesky":
        return
    if group["damping_split"] == "exact":
        raise ValueError(
            "damping_split='exact' needs the eigenvalues: use inverse_method='eigen', or damping_split='pi' with "
            "inverse_method='cholesky'"
        )
    if group["power"] != 1.0:
        raise ValueError(f"power={group['power']} needs the eigenvalues: use inverse_method='eigen'")
