r"""EK-FAC: eigenvalue-corrected Kronecker factorization.

K-FAC's factors give bases ``Q_A`` and ``Q_G``. K-FAC uses the products of their eigenvalues as the curvature along each
pair of eigenvectors. EK-FAC measures this curvature as the second moment of per-example gradients:

.. math::
    s = \tfrac1N \sum_n (Q_G^\top \nabla_n Q_A)^{\circ 2}, \qquad
    V = Q_G \left[ (Q_G^\top \nabla Q_A) \oslash (s + \lambda)^p \right] Q_A^\top .

Among all curvatures that are diagonal in this basis, it is the closest to the exact block, and it has its trace.

=======================  =======================================================
``damping``              λ
``power``                p: 1 is the natural gradient, 1/2 whitens as Adam does
``scale_decay``          β of s, the weight of the old value
``momentum``             with ``momentum_mode="pre"``: β₁ of the gradient's mean
=======================  =======================================================

With ``estimator="running"``, ``power=0.5`` and ``momentum_mode="pre"``, it is Adam in the eigenbasis of the Fisher.
SOAP (Vyas et al. 2024, arXiv 2409.11321) is Adam in the eigenbasis of gradient products::

    m ← β₁ m + (1 − β₁) ∇        v ← β v + (1 − β)(Q_Gᵀ ∇ Q_A)²        V = Q_G [(Q_Gᵀ m̂ Q_A) ⊘ (√v̂ + ε)] Q_Aᵀ

George et al. 2018 (arXiv 1806.03884); positions of an example: Eschenhagen et al. 2023 (2311.00636).
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
    ClipOptions,
    FallbackOptions,
    FisherOptions,
    RefreshOptions,
    ScaleOptions,
    StatisticsOptions,
    StorageOptions,
)
from secondorder.curvature.eigenbasis import is_adam
from secondorder.curvature.layer import SkipRule
from secondorder.methods import documentation, kronecker
from secondorder.methods.arguments import show_new_spelling
from secondorder.optimizer import SecondOrderOptimizer
from secondorder.parameters import Group
from secondorder.preconditioners.scale import ScalePreconditioner


@options.complete_docstring(
    documentation.OPTIMIZER,
    documentation.LAYERS,
    documentation.FACTORS,
    usual=documentation.USUAL,
    expert=documentation.EXPERT,
)
class EKFAC(SecondOrderOptimizer):
    """Implements EK-FAC for every supported layer type. The fallback rule updates all other parameters.

    The bases and the scale use the same Fisher. ``fisher="forward_only"`` is rejected, because it provides no gradients
    for the scale. The scale is exact for both values of ``approx``. With ``estimator="intra"``, every rank that has
    examples of a layer stores its bases, whether or not it preconditions the layer.

    Args:
        momentum: Coefficient of the momentum that ``momentum_mode`` selects.
        estimator: Estimator of the scale: ``"intra"`` squares the gradients of single examples; ``"running"`` squares
            the mean gradient, which costs nothing but has a bias that grows with the batch size.
        scale: How the scale is measured, see :class:`ScaleOptions`: its decay, the steps between updates, random
            samples of the examples, and how it is transferred to a new basis.
        refresh: When and how bases are computed again, see :class:`RefreshOptions`: spread over the interval
            (``stagger=True``), more often at the start (``warmup``), and by orthogonal iteration
            (``RefreshOptions(basis_update="qr")``).
        momentum_mode: ``"post"`` applies heavy-ball momentum to the preconditioned gradient; ``"pre"`` preconditions
            the running mean of the gradients. With ``"pre"`` and ``estimator="running"``, the scale is that of the mean
            gradient. If also ``power=0.5``, steps are as long as Adam's, and ``eps`` replaces ``damping``.
        nesterov: Whether to use Nesterov momentum. With ``momentum_mode="pre"``, the mean of the gradient and the
            running mean, weighted by the momentum, is preconditioned.

    Raises:
        ValueError: If a value is out of range, a pattern matches nothing, options exclude each other, the module is
            missing, or the options differ between ranks.
        TypeError: If a value has the wrong type.
        RuntimeError: If not all ranks of a process group construct the optimizer.

    Example:
        >>> import torch, secondorder
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = secondorder.EKFAC(model, lr=0.1)
        >>> model(torch.randn(8, 4)).square().mean().backward()
        >>> optimizer.step()
    """

    checks: ClassVar[dict[str, options.Check]] = {
        **kronecker.FACTOR_CHECKS,
        "basis_update": options.choice("eigh", "qr"),
        "full_every": options.whole(1),
        "estimator": options.choice("intra", "running"),
        "scale_decay": options.number(0.0, 1.0, optional=True),
        "scale_update_steps": options.whole(1),
        "scale_batch_size": options.optional_whole(1),
        "token_is_example": options.flag,
        "transport": options.choice("project", "kfac", "none", "recompute"),
        "momentum_mode": options.choice("post", "pre"),
    }

    #: Fields of option objects that this method does not have.
    absent: ClassVar[tuple[str, ...]] = (*kronecker.FACTORED_ABSENT, "refresh.precondition_steps")

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
        skip_layers: Sequence[SkipRule] | SkipRule = (),
        graft: str | None = "auto",
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        estimator: str = "intra",
        scale: ScaleOptions = ScaleOptions(),
        momentum_mode: str = "post",
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
        given = kronecker.factored_arguments(locals(), type(self))
        exclude = partial(_exclude, fisher=given["fisher"].kind, overlap=overlap, adaptation=given["adaptation"])
        rules = kronecker.FactoredRules(given, exclude)
        super().__init__(given, kronecker.factor_recipe(given, ScalePreconditioner, rules))
        kronecker.warn_of_options(type(self).__name__, self.param_groups, self.blocks.values(), rules)


def _exclude(
    group: Mapping[str, Any], groups: list[Group], fisher: str, overlap: bool, adaptation: AdaptationOptions
) -> None:
    """Reject options that exclude each other."""
    if overlap and group["basis_update"] == "qr":
        raise ValueError(
            "overlap=True computes a basis from scratch, but basis_update='qr' improves the current basis: drop one"
        )
    if fisher == "forward_only":
        raise ValueError("fisher='forward_only' measures no gradients, which EKFAC needs for its scale: use KFAC")
    if group["estimator"] == "running":
        _exclude_examples(group, fisher)
    if is_adam(group):
        clashes = {
            "adaptive_damping=True": adaptation.adaptive_damping,
            "calibrate_damping=True": adaptation.calibrate_damping,
            "weight_decay_in_curvature=True": group["weight_decay_in_curvature"],
        }
        made = "estimator='running', momentum_mode='pre' and power=0.5 make Adam in an eigenbasis"
        options.refuse(clashes, f"{made}, which uses eps instead of damping: drop")
    if group["momentum_mode"] == "pre":
        clashes = {
            f"graft={group['graft']!r}": group["graft"] is not None,
            f"inner={group['inner']!r}": options.is_adam(group["inner"]),
            "quadratic_model=True": adaptation.quadratic_model,
            f"momentum={group['momentum']}": group["momentum"] >= 1,
        }
        options.refuse(clashes, "momentum_mode='pre' cannot be combined with")


def _exclude_examples(group: Mapping[str, Any], fisher: str) -> None:
    """Reject options that need the gradients of single examples."""
    unused = {
        "transport='recompute'": group["transport"] == "recompute",
        "token_is_example=True": group["token_is_example"],
        f"scale_batch_size={group['scale_batch_size']}": group["scale_batch_size"] is not None,
    }
    options.refuse(unused, "estimator='running' does not use single examples: drop")
    if fisher != "empirical":
        raise ValueError(
            f"estimator='running' squares the gradient of the loss, which is not a sample of fisher={fisher!r}: "
            "use estimator='intra'"
        )
