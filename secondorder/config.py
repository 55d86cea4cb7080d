"""Groups of related options that are passed to constructors.

Every field has a default, so you only set the fields that should differ, as in
``KFAC(model, storage=StorageOptions(packed=True))``. ``repr`` shows only the fields that differ from their defaults.
Some fields set a key of the parameter groups, which may differ between groups, and which can be scheduled unless it
determines what a layer stores. The key is given in parentheses at the end of the field's description. All other fields
are fixed when the optimizer is built.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from secondorder import options

if TYPE_CHECKING:
    from secondorder.capture.fisher.likelihood import Likelihood
    from secondorder.plan.rates import MachineRates

_T = TypeVar("_T")


def _option(default: _T, *, key: str | None = None, was: str | None = None) -> _T:
    """Declare a field with the key of parameter groups that it sets, and with the keyword that it replaced."""
    found: Any = field(default=default, metadata={"key": key, "was": was or key})
    return found  # type: ignore[no-any-return]


def representation(self: Any) -> str:
    """Return the call that makes an object, without the fields that have their defaults."""
    changed = (f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default)
    return f"{type(self).__name__}({', '.join(changed)})"


@dataclass(frozen=True, repr=False)
class FisherOptions:
    """Choice of the Fisher estimate. ``fisher="mc"`` is short for ``fisher=FisherOptions("mc")``.

    Args:
        kind: The estimate: ``"empirical"``, ``"mc"``, ``"exact"``, ``"curvature_prop"`` or ``"forward_only"``.
        samples: Number of draws per example for ``"mc"`` and ``"curvature_prop"``.
    """

    kind: str = _option("empirical", was="fisher")
    samples: int = _option(1, was="fisher_samples")
    __repr__ = representation

    def __post_init__(self) -> None:
        options.choice("empirical", "mc", "exact", "curvature_prop", "forward_only")("fisher", self.kind)
        options.whole(1)("samples", self.samples)
        if self.samples > 1 and self.kind not in ("mc", "curvature_prop"):
            raise ValueError(f"samples={self.samples} needs fisher='mc' or 'curvature_prop', got {self.kind!r}")

    @property
    def is_observed(self) -> bool:
        """Whether ``observe`` supplies the statistics."""
        return self.kind in ("mc", "exact", "curvature_prop")


@dataclass(frozen=True, repr=False)
class RefreshOptions:
    """Options for the refresh of bases and inverses.

    Args:
        stagger: Whether to spread the refreshes of the blocks over the interval.
        warmup: Whether to update the factors at every step of the first interval and to refresh at its steps 0, 1, 2,
            4, 8, … The curvature of a new network changes a thousandfold in its first hundred steps. With
            ``"doubling"``, only the steps that refresh update the factors, which costs far less. If None, the warm-up
            is on unless you set an interval, which is then kept exactly; with a budget, it is ``"doubling"``.
        max_failures: Number of consecutive failed refreshes of a layer after which an error is raised.
        basis_update: For EKFAC: ``"eigh"`` computes each basis from scratch, and ``"qr"`` uses orthogonal iteration
            from the last basis (``basis_update``).
        full_every: For EKFAC with ``"qr"``: number of refreshes between two that use ``eigh`` (``full_every``).
        precondition_steps: For KFAC with ``graft``: number of steps between two that are preconditioned. The other
            steps are those of the rule that ``graft`` names, and cost as much (``precondition_steps``).
    """

    stagger: bool = False
    warmup: bool | str | None = _option(None, was="refresh_warmup")
    max_failures: int = 10
    basis_update: str = _option("eigh", key="basis_update")
    full_every: int = _option(20, key="full_every")
    precondition_steps: int = _option(1, key="precondition_steps")
    __repr__ = representation

    def __post_init__(self) -> None:
        options.flag("stagger", self.stagger)
        options.optional_flag("warmup", self.warmup, "doubling")
        options.whole(1)("max_failures", self.max_failures)


@dataclass(frozen=True, repr=False)
class BudgetOptions:
    """A limit on the mean cost of a step. ``budget=1.3`` is short for ``budget=BudgetOptions(1.3)``.

    Args:
        limit: Largest mean cost of a step in a long run, in units of a step of the same model with AdamW. It is at
            least 1.05. The additional refreshes at the steps 1, 2, 4, 8, … of the first interval are not part of it
            (``budget``).
        rates: The speed of the machine: the ``rates`` of a :func:`secondorder.estimate`, which measures it once, or
            ``secondorder.MachineRates.load(path)``. If None, nominal numbers for the type of the device are used. The
            same rates give the same choices in every run.
    """

    limit: float | None = _option(None, key="budget")
    rates: MachineRates | None = None
    __repr__ = representation

    def __post_init__(self) -> None:
        if self.limit is not None:
            options.number(1.05)("budget", self.limit)
        if self.rates is not None and not hasattr(self.rates, "relative"):
            raise TypeError(f"the rates of a budget must be a MachineRates, got {self.rates!r}")


@dataclass(frozen=True, repr=False)
class StorageOptions:
    """Options for the storage of factors, bases and inverses.

    Args:
        factor_dtype: Precision in which the factors A and G are stored. ``torch.float32`` stores the factors of float64
            parameters in float64. ``torch.bfloat16`` takes half the memory, but eigenvalues below 1/256 of the largest
            eigenvalue are lost to rounding.
        inv_dtype: Precision in which bases and inverses are stored, with the same choices as ``factor_dtype``. Products
            with bfloat16 bases or inverses are still computed in float32.
        packed: Whether to store A and G as triangles. This takes half the memory; the full matrices exist only while a
            refresh needs them.
        max_factor_dim: Largest number of rows of a factor that is stored as a matrix. For a larger factor, only the
            diagonal is stored. None sets no limit. ``"auto"`` is 8192, except on a CPU, where it is 4096 for KFAC with
            a rank or ``inverse_method="cholesky"``, and 2048 otherwise (``max_factor_dim``).
        orthogonal_dtype: Precision of the matrix products with which ``orthogonalize`` computes the polar factor.
            ``torch.bfloat16``, the precision that Muon uses, applies to matrices with at least 128 rows and columns. It
            is faster on hardware that supports it, and adds noise in directions in which the gradient is close to zero.
    """

    factor_dtype: torch.dtype = torch.float32
    inv_dtype: torch.dtype = torch.float32
    packed: bool = _option(False, was="factor_storage")
    max_factor_dim: int | str | None = _option("auto", key="max_factor_dim")
    orthogonal_dtype: torch.dtype = torch.float32
    __repr__ = representation

    def __post_init__(self) -> None:
        options.flag("packed", self.packed)
        for name in ("factor_dtype", "inv_dtype", "orthogonal_dtype"):
            options.stored_dtype(name, getattr(self, name))


@dataclass(frozen=True, repr=False)
class StatisticsOptions:
    """Options for the statistics behind the factors: which examples and positions count, and with which weight.

    Args:
        batch_size: Number of examples of each micro-batch, drawn at random, that contribute to the factors. If None,
            all of them do, as in a layer under ``mask()`` (``factor_batch_size``).
        positions: Number of positions of each example (pixels or tokens), drawn at random, that contribute to the
            factors. If None, all of them do (``factor_positions``).
        weighting: Weight of a batch in the running means: ``"samples"`` weights it by its number of examples, and
            ``"update"`` gives every batch the weight 1 (``weighting``).
        burnin_steps: Number of updates at the start that all have the same weight in the running means, with β = 1
            (``burnin_steps``).
        decay_per_step: Whether β is the decay per step, which raises it to the power of the interval
            (``decay_per_step``).
        weight_decay: Whether to count ``weight_decay`` as curvature, which adds it to λ
            (``weight_decay_in_curvature``).
        norm_curvature: Blocks of normalization layers: ``"unit"`` preconditions the scale and the shift of a unit
            together, and ``"diagonal"`` preconditions each entry separately.
        tied: For a weight that is both the embedding and the output head: the use that provides the statistics of its
            block, ``"head"`` or ``"embedding"``. If None, the fallback updates the weight.
    """

    batch_size: int | None = _option(None, key="factor_batch_size")
    positions: int | None = _option(None, key="factor_positions")
    weighting: str = _option("samples", key="weighting")
    burnin_steps: int = _option(0, key="burnin_steps")
    decay_per_step: bool = _option(False, key="decay_per_step")
    weight_decay: bool = _option(False, key="weight_decay_in_curvature")
    norm_curvature: str = "unit"
    tied: str | None = "head"
    __repr__ = representation

    def __post_init__(self) -> None:
        options.choice("head", "embedding", None)("tied", self.tied)
        options.choice("unit", "diagonal")("norm_curvature", self.norm_curvature)


@dataclass(frozen=True, repr=False)
class BatchOptions:
    """Options for counting the examples of a batch.

    Args:
        dim: Dimension of the model's input that indexes the examples.
        input: Name of the argument of the model's ``forward`` whose dimension ``dim`` indexes the examples, or a
            function that takes the arguments of ``forward`` and returns the number of examples. If None, the first
            tensor is used, unless the outputs and the layers of the model agree on another number.
        loss_terms: Number of scalar terms that the loss of one example averages, such as its tokens or the outputs of
            a squared error. The curvature is multiplied by this number, which makes it that of the mean loss of single
            terms. Leave it at 1 for tokens with ``ScaleOptions(token_is_example=True)``, which counts them, and with
            ``observe()``, which counts the terms itself (``loss_terms``).
        size: For HyLo: number of examples per step and rank. If it is set, the rows of ``approx="reduce"`` are
            allocated at construction, which is necessary to load a distributed checkpoint before the first step. If
            None, they are allocated at the first refresh.
    """

    dim: int = _option(0, was="batch_dim")
    input: str | Callable[..., int] | None = _option(None, was="batch_input")
    loss_terms: float = _option(1, key="loss_terms")
    size: int | None = _option(None, was="batch_size")
    __repr__ = representation

    def __post_init__(self) -> None:
        options.whole(0)("batch dim", self.dim)
        options.optional_whole(1)("batch size", self.size)
        if not (self.input is None or isinstance(self.input, str) or callable(self.input)):
            raise TypeError(f"batch input must be the name of an argument of forward or a function, got {self.input!r}")


@dataclass(frozen=True, repr=False)
class InverseOptions:
    """Options for the inverse of a block. ``inverse_method="cholesky"`` is short for ``InverseOptions("cholesky")``.

    Args:
        method: Factorization that is used, ``"eigen"`` or ``"cholesky"`` (``inverse_method``).
        damping_split: ``"exact"`` adds λ to the eigenvalues of ``G ⊗ A``, and ``"pi"`` splits λ between the two factors
            (Martens & Grosse 2015, section 6.3). If None, it is ``"exact"`` for ``"eigen"`` and ``"pi"`` for
            ``"cholesky"`` (``damping_split``).
        rank: Number of leading eigenvectors that are computed for a factor with more than twice as many rows. The other
            eigenvalues are replaced by their mean. This makes directions and refreshes of wide layers many times
            cheaper, and takes less memory. Layers in which both factors are narrower use ``method``. If None, all
            layers do (``inverse_rank``).
    """

    method: str = _option("eigen", key="inverse_method")
    damping_split: str | None = _option(None, key="damping_split")
    rank: int | None = _option(None, key="inverse_rank")
    __repr__ = representation


@dataclass(frozen=True, repr=False)
class ScaleOptions:
    """Options for the scale that EKFAC measures in its eigenbasis.

    Args:
        decay: β of the running mean of the scale. If None, it is ``factor_decay`` (``scale_decay``).
        update_steps: Number of steps between updates of the scale (``scale_update_steps``).
        batch_size: Number of examples of each micro-batch, drawn at random, that contribute to the scale. If None, all
            of them do (``scale_batch_size``).
        token_is_example: Whether to treat each position of linear layers, attention, recurrent layers and embeddings
            as a separate example (``token_is_example``).
        transport: How the scale is transferred to a new basis: ``"project"`` keeps the operator, ``"kfac"`` starts
            again from the products of eigenvalues, ``"recompute"`` starts again from the batch of the step, and
            ``"none"`` keeps the scale by index (``transport``).
    """

    decay: float | None = _option(None, key="scale_decay")
    update_steps: int = _option(1, key="scale_update_steps")
    batch_size: int | None = _option(None, key="scale_batch_size")
    token_is_example: bool = _option(False, key="token_is_example")
    transport: str = _option("project", key="transport")
    __repr__ = representation


@dataclass(frozen=True, repr=False)
class RowOptions:
    """Options for the rows that HyLo keeps.

    Args:
        max_rank: Largest number of rows that all ranks keep together; each rank keeps at least one. It does not
            limit ``mode="sngd"`` (``max_rank``).
        energy: Fraction of the trace of a layer's kernel that the kept rows must reach. If it is set, it determines the
            number of rows per layer instead of ``rank_fraction`` (``rank_energy``).
        sampling: How KIS draws rows: ``"systematic"`` (unbiased, draws no row twice), ``"replacement"`` (unbiased),
            ``"unweighted"`` (the published draw, biased) or ``"uniform"`` (``kis_sampling``).
        pivoting: How KID chooses rows: ``"cholesky"`` uses the remainder of the kernel's diagonal, ``"qr"`` uses the
            kernel's columns, and ``"score"`` takes the largest rows (``kid_pivoting``).
        residual: How KID represents the part of the kernel that it does not interpolate: by its diagonal (``"diag"``),
            by the full matrix (``"full"``) or not at all (``"none"``) (``kid_residual``).
        conv_scale: ``"exact"``, or ``"hylo"`` to divide the summed gradients of convolutions by the number of
            positions, which reproduces the published recipes (``conv_scale``).
        normalize_damping: Whether to multiply the direction by λ. The direction then does not grow when λ falls, and
            equals the gradient where λ is large (``normalize_damping``).
        kfac_when_cheaper: Whether to use K-FAC's factors for a layer where R rows would take more memory or time. HyLo
            decides this at the first refresh, and ``describe()`` reports it (``kfac_when_cheaper``).
        factor_decay: β, the weight of the old factors in the running mean, in layers with K-FAC's (``factor_decay``).
    """

    max_rank: int = _option(1024, key="max_rank")
    energy: float | None = _option(None, key="rank_energy")
    sampling: str = _option("systematic", key="kis_sampling")
    pivoting: str = _option("cholesky", key="kid_pivoting")
    residual: str = _option("diag", key="kid_residual")
    conv_scale: str = _option("exact", key="conv_scale")
    normalize_damping: bool = _option(False, key="normalize_damping")
    kfac_when_cheaper: bool = _option(False, key="kfac_when_cheaper")
    factor_decay: float = _option(0.95, key="factor_decay")
    __repr__ = representation


@dataclass(frozen=True, repr=False)
class WindowOptions:
    """Options for the window of past gradients: its contents, its storage and its solver.

    Args:
        dtype: Precision of dense rows and of low-rank factors. If None, it is float32, and float64 for float64
            parameters.
        skip_norm_layers: Whether to leave the parameters of normalization layers to the fallback. Without a module,
            this applies to all vectors.
        skip_biases: Whether to leave biases to the fallback. Without names, this applies to all vectors.
        divisor: For M-FAC: divisor of the sum over rows, either the number of filled rows (``"count"``) or m
            (``"window"``). The published code uses m, which makes updates up to m times larger at first (``scale``).
        solver: For M-FAC: ``"cholesky"``; ``"eigh"``, which leaves out directions that consist of rounding errors; or
            ``"auto"``, which uses Cholesky and switches to ``eigh`` where nearly dependent rows would leave less than 2
            digits (on a GPU, it switches ten steps later) (``solver``).
    """

    dtype: torch.dtype | None = _option(None, was="window_dtype")
    skip_norm_layers: bool = False
    skip_biases: bool = False
    divisor: str = _option("count", key="scale")
    solver: str = _option("auto", key="solver")
    __repr__ = representation

    def __post_init__(self) -> None:
        if self.dtype not in (None, torch.float32, torch.float64, torch.bfloat16):
            kind = ValueError if isinstance(self.dtype, torch.dtype) else TypeError
            raise kind(f"the dtype of a window must be None, float32, float64 or bfloat16, got {self.dtype!r}")
        for name in ("skip_norm_layers", "skip_biases"):
            options.flag(name, getattr(self, name))


@dataclass(frozen=True, repr=False)
class FallbackOptions:
    """Options of the fallback, which updates the parameters that are not preconditioned.

    ``fallback="adamw"`` is short for ``fallback=FallbackOptions("adamw")``.

    Args:
        rule: ``"sgd"``, ``"adam"`` or ``"adamw"``. If None, it is the rule of ``graft`` if that is set, and SGD
            otherwise (``fallback``).
        lr: Learning rate if the rule is Adam's. It follows the schedule of the optimizer's ``lr`` in proportion. If
            None, it equals ``lr`` when grafting and 1e-3 otherwise (``fallback_lr``).
        betas: For GGT: β₁ and β₂ of Adam's rule, wherever ``graft``, ``inner`` or ``fallback`` names it. If None, they
            are 0.9 and 0.999. GGT's own ``betas`` apply to its momentum and its window, while the other methods use
            one option ``betas`` for everything (``fallback_betas``).
        eps: For GGT: ε of Adam's rule. If None, it is 1e-8 (``fallback_eps``).
    """

    rule: str | None = _option(None, key="fallback")
    lr: float | None = _option(None, key="fallback_lr")
    betas: tuple[float, float] | None = _option(None, key="fallback_betas")
    eps: float | None = _option(None, key="fallback_eps")
    __repr__ = representation


@dataclass(frozen=True, repr=False)
class ClipOptions:
    """Options for clipping the direction of a step. ``clip=1.0`` is short for ``clip=ClipOptions(norm=1.0)``.

    Args:
        norm: Upper bound on the norm of the direction over all blocks or windows; None for no bound (``clip_norm``).
        value: Upper bound on the absolute value of each entry of the direction; None for no bound (``clip_value``).
    """

    norm: float | None = _option(None, key="clip_norm")
    value: float | None = _option(None, key="clip_value")
    __repr__ = representation


@dataclass(frozen=True, repr=False)
class AdaptationOptions:
    """Options that adapt the step to the loss.

    All of them need ``step(closure)``, except ``quadratic_model`` without a ``likelihood``. The adapted damping is the
    key ``damping`` of the parameter groups. To schedule it, use milestones, as in ``ParamScheduler(optimizer,
    damping={0: 1.0, 1000: 0.1})``. The adaptation starts again from each milestone.

    Args:
        adaptive_damping: Whether to adjust λ every ``damping_interval`` steps by how well the quadratic model predicted
            the change of the loss. This evaluates the closure once more at those steps.
        damping_interval: T, the number of steps between two adjustments of λ.
        min_damping: Lower bound of the adapted λ.
        max_damping: Upper bound of the adapted λ.
        include_damping_in_model: Whether the quadratic model that judges λ includes the term ``½ λ ‖δ‖²``.
        reject_steps: Whether to undo a step that increased the loss or made it non-finite, and to increase λ. This
            evaluates the closure once more at every step.
        quadratic_model: Whether to take the learning rate and the momentum of each step from the quadratic model. The
            resulting step is multiplied by ``lr``, so 1.0 leaves it unchanged. ``momentum=0`` ignores the previous
            step.
        likelihood: How the loss depends on the outputs: ``"categorical"``, ``"bernoulli"``, ``"gaussian"`` or a
            ``Likelihood`` object. The closure then has to return ``(loss, outputs)``, which makes the model exact.
        calibrate_damping: Whether to try values from one thousandth of ``damping`` to a thousand times ``damping`` at
            the first refresh, and to keep the best one.
    """

    adaptive_damping: bool = False
    damping_interval: int = 5
    min_damping: float = 1e-8
    max_damping: float = math.inf
    include_damping_in_model: bool = False
    reject_steps: bool = False
    quadratic_model: bool = False
    likelihood: str | Likelihood | None = None
    calibrate_damping: bool = False
    __repr__ = representation

    def __post_init__(self) -> None:
        flags = "adaptive_damping", "include_damping_in_model", "reject_steps", "quadratic_model", "calibrate_damping"
        for name in flags:
            options.flag(name, getattr(self, name))
        options.whole(1)("damping_interval", self.damping_interval)
        options.number(0.0)("min_damping", self.min_damping)
        if self.max_damping != math.inf:
            options.number(0.0, low_open=True)("max_damping", self.max_damping)
        if self.min_damping > self.max_damping:
            raise ValueError(f"min_damping={self.min_damping} must not be above max_damping={self.max_damping}")

    @property
    def needing_loss(self) -> list[str]:
        """Options that are on and need the loss from a closure."""
        return [n for n in ("adaptive_damping", "reject_steps", "calibrate_damping") if getattr(self, n)]

    @property
    def judging(self) -> list[str]:
        """Options that are on and judge a step."""
        return ["quadratic_model"] * self.quadratic_model + self.needing_loss
