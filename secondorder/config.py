"""Options of constructors that belong together and stay the same for the life of an optimizer.

Each class has good defaults, so that a user names only what should differ, as in
``KFAC(model, storage=StorageOptions(packed=True))``. Their representation shows only what differs from the defaults.
A name in brackets at the end of a field is the key of parameter groups that it sets, which may differ between groups
and can be scheduled.
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

_T = TypeVar("_T")


def _option(default: _T, *, key: str | None = None, was: str | None = None) -> _T:
    """Declare a field with the key of parameter groups that it sets, and with the keyword that it once was."""
    found: Any = field(default=default, metadata={"key": key, "was": was or key})
    return found  # type: ignore[no-any-return]


def representation(self: Any) -> str:
    """Return the call without the fields that have their defaults."""
    changed = (f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default)
    return f"{type(self).__name__}({', '.join(changed)})"


@dataclass(frozen=True, repr=False)
class FisherOptions:
    """Which Fisher is estimated. ``fisher="mc"`` is short for ``fisher=FisherOptions("mc")``.

    Args:
        kind: ``"empirical"``, ``"mc"``, ``"exact"``, ``"curvature_prop"`` or ``"forward_only"``.
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
    """When and how bases and inverses are computed again.

    Args:
        stagger: Whether to spread the refreshes of the blocks over the interval.
        warmup: Whether to update the factors at every step of the first interval, and to refresh at its steps 0, 1, 2,
            4, 8, …, because the curvature of a new network changes a thousandfold in its first hundred steps. If None,
            it is on unless an interval is given, which is then kept exactly.
        max_failures: Number of consecutive failed refreshes of a layer after which an error is raised.
        basis_update: For EKFAC: ``"eigh"``, or ``"qr"``, orthogonal iteration from the last basis (``basis_update``).
        full_every: For EKFAC with ``"qr"``: number of refreshes between two that use ``eigh`` (``full_every``).
    """

    stagger: bool = False
    warmup: bool | None = _option(None, was="refresh_warmup")
    max_failures: int = 10
    basis_update: str = _option("eigh", key="basis_update")
    full_every: int = _option(20, key="full_every")
    __repr__ = representation

    def __post_init__(self) -> None:
        options.flag("stagger", self.stagger)
        options.optional_flag("warmup", self.warmup)
        options.whole(1)("max_failures", self.max_failures)


@dataclass(frozen=True, repr=False)
class StorageOptions:
    """How factors, bases and inverses are stored.

    Args:
        factor_dtype: Precision in which the factors A and G are stored. ``torch.float32`` stores the factors of float64
            parameters in float64. ``torch.bfloat16`` takes half the memory, but eigenvalues below 1/256 of the largest
            one are lost to rounding.
        inv_dtype: Precision in which bases and inverses are stored, with the choices of ``factor_dtype``. Products with
            bfloat16 bases or inverses are still computed in float32.
        packed: Whether to store A and G as triangles. This takes half the memory; the full matrices exist only while a
            refresh needs them.
        max_factor_dim: Largest number of rows of a factor that is stored as a matrix; of larger factors only the
            diagonal is stored. None sets no bound. ``"auto"`` is 8192, except on a CPU, where it is 4096 with
            ``inverse_method="cholesky"`` of KFAC and 2048 otherwise (``max_factor_dim``).
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
    """Which examples and positions contribute to the factors, and how their running means are weighted.

    Args:
        batch_size: Number of examples of each micro-batch, drawn at random, that contribute to the factors. If None,
            all of them do. It cannot be combined with ``mask()`` (``factor_batch_size``).
        positions: Number of positions of each example (pixels or tokens), drawn at random, that contribute to the
            factors. If None, all of them do (``factor_positions``).
        weighting: Weight of a batch in the running means: ``"samples"`` weights it by its number of examples,
            ``"update"`` gives every batch the weight 1 (``weighting``).
        burnin_steps: Number of first updates of the running means that all have the same weight, β = 1
            (``burnin_steps``).
        decay_per_step: Whether to raise β to the power of the interval, so that it is the decay per step
            (``decay_per_step``).
        weight_decay: Whether to count ``weight_decay`` as curvature, which adds it to λ
            (``weight_decay_in_curvature``).
        norm_curvature: Blocks of normalization layers: ``"unit"`` takes the scale and the shift of a unit together,
            ``"diagonal"`` takes each entry separately.
        tied: Which use of a weight that serves both as an embedding and as an output head provides the statistics of
            its block: ``"head"`` or ``"embedding"``. If None, the weight is left to the fallback.
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
    """How the examples of a batch are counted.

    Args:
        dim: Dimension of the model's input that indexes the examples.
        input: Name of the argument of the model's ``forward`` whose dimension ``dim`` indexes the examples, or a
            function that takes the arguments of ``forward`` and returns the number of examples. If None, the first
            tensor is used, unless the outputs and the layers of the model agree on another number.
        loss_terms: Number of scalar terms of the loss of an example over which it is a mean, such as the outputs of a
            squared error. Leave it at 1 for a mean over tokens, which are examples of their own; ``observe()`` counts
            the terms itself (``loss_terms``).
        size: For HyLo: number of examples per step and rank. If given, the rows of ``approx="reduce"`` are allocated at
            construction, which is necessary for loading a distributed checkpoint before the first step. If None, they
            are allocated at the first refresh.
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
    """How the inverse of a block is formed. ``inverse_method="cholesky"`` is short for ``InverseOptions("cholesky")``.

    Args:
        method: ``"eigen"`` or ``"cholesky"`` (``inverse_method``).
        damping_split: ``"exact"`` adds λ to the eigenvalues of ``G ⊗ A``; ``"pi"`` splits it between the two factors
            (Martens & Grosse 2015, section 6.3). If None, it is ``"exact"`` for ``"eigen"`` and ``"pi"`` for
            ``"cholesky"`` (``damping_split``).
    """

    method: str = _option("eigen", key="inverse_method")
    damping_split: str | None = _option(None, key="damping_split")
    __repr__ = representation


@dataclass(frozen=True, repr=False)
class ScaleOptions:
    """How EKFAC measures the scale of its eigenbasis.

    Args:
        decay: β of the scale; None for ``factor_decay`` (``scale_decay``).
        update_steps: Number of steps between updates of the scale (``scale_update_steps``).
        batch_size: Number of examples of each micro-batch, drawn at random, that contribute to the scale; None for all
            (``scale_batch_size``).
        token_is_example: Whether to treat each position of linear layers and embeddings as an example of its own
            (``token_is_example``).
        transport: How the scale is carried over to a new basis: ``"project"`` keeps the operator, ``"kfac"`` starts
            again from the products of eigenvalues, ``"recompute"`` from the batch of the step, and ``"none"`` keeps the
            scale by index (``transport``).
    """

    decay: float | None = _option(None, key="scale_decay")
    update_steps: int = _option(1, key="scale_update_steps")
    batch_size: int | None = _option(None, key="scale_batch_size")
    token_is_example: bool = _option(False, key="token_is_example")
    transport: str = _option("project", key="transport")
    __repr__ = representation


@dataclass(frozen=True, repr=False)
class RowOptions:
    """Which rows HyLo keeps.

    Args:
        max_rank: Largest number of rows that are kept on all ranks together; each rank keeps at least one. It does not
            bound ``mode="sngd"`` (``max_rank``).
        energy: Fraction of the trace of a layer's kernel that its rows have to hold. If given, it determines the number
            of rows per layer instead of ``rank_fraction`` (``rank_energy``).
        sampling: ``"systematic"`` (unbiased, no row twice), ``"replacement"`` (unbiased), ``"unweighted"`` (the
            published draw, biased) or ``"uniform"``, for KIS (``kis_sampling``).
        pivoting: How KID chooses rows: ``"cholesky"`` by the remainder of the kernel's diagonal, ``"qr"`` by the
            kernel's columns, and ``"score"`` takes the largest rows (``kid_pivoting``).
        residual: What represents the part of the kernel that KID does not interpolate: its diagonal (``"diag"``), the
            full matrix (``"full"``) or nothing (``"none"``) (``kid_residual``).
        conv_scale: ``"exact"``, or ``"hylo"`` to divide the summed gradients of convolutions by the number of
            positions, which reproduces the published recipes (``conv_scale``).
        normalize_damping: Whether to multiply the direction by λ, so that it does not grow when λ falls, and equals the
            gradient where λ is large (``normalize_damping``).
        kfac_when_cheaper: Whether to use K-FAC's factors for a layer where R rows would take more memory or time. This
            is decided at the first refresh, and ``describe()`` reports it (``kfac_when_cheaper``).
        factor_decay: β, the weight of the old factors in the running mean, for layers that use K-FAC's factors
            (``factor_decay``).
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
    """What a window of past gradients contains, and how it is solved.

    Args:
        dtype: Precision of dense rows and of low-rank factors. If None, it is float32, and float64 for float64
            parameters.
        skip_norm_layers: Whether to leave the parameters of normalization layers (without a module, all vectors) to the
            fallback.
        skip_biases: Whether to leave biases (without names, all vectors) to the fallback.
        divisor: For M-FAC: what the sum over rows is divided by, the number of rows that are filled (``"count"``), or m
            (``"window"``). The published code uses m, with which updates are up to m times larger at first (``scale``).
        solver: For M-FAC: ``"cholesky"``, ``"eigh"``, which leaves out directions that consist of rounding errors, or
            ``"auto"``, which uses Cholesky, and ``eigh`` where nearly dependent rows would leave less than 2 digits (on
            a GPU, ten steps later) (``solver``).
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
    """The rule for parameters that are not preconditioned. ``fallback="adamw"`` is short for a rule with defaults.

    Args:
        rule: ``"sgd"``, ``"adam"`` or ``"adamw"``. If None, it is the rule of ``graft`` if that is given, and SGD
            otherwise (``fallback``).
        lr: Learning rate if the rule is Adam's. It follows the schedule of the optimizer's ``lr`` in proportion. If
            None, it is that ``lr`` when grafting and 1e-3 otherwise (``fallback_lr``).
        betas: For GGT, whose own ``betas`` are those of its momentum and window: β₁ and β₂ of Adam's rule, wherever
            ``graft``, ``inner`` or ``fallback`` names it; None for 0.9 and 0.999 (``fallback_betas``). The other
            methods have one option ``betas`` for all of them.
        eps: For GGT: ε of Adam's rule; None for 1e-8 (``fallback_eps``).
    """

    rule: str | None = _option(None, key="fallback")
    lr: float | None = _option(None, key="fallback_lr")
    betas: tuple[float, float] | None = _option(None, key="fallback_betas")
    eps: float | None = _option(None, key="fallback_eps")
    __repr__ = representation


@dataclass(frozen=True, repr=False)
class ClipOptions:
    """Bounds on the direction of a step. ``clip=1.0`` is short for ``clip=ClipOptions(norm=1.0)``.

    Args:
        norm: Upper bound on the norm of the direction over all blocks or windows. If None, the norm is not clipped
            (``clip_norm``).
        value: Upper bound on the absolute value of each entry of the direction. If None, entries are not clipped
            (``clip_value``).
    """

    norm: float | None = _option(None, key="clip_norm")
    value: float | None = _option(None, key="clip_value")
    __repr__ = representation


@dataclass(frozen=True, repr=False)
class AdaptationOptions:
    """What is adapted to the loss. All of it needs ``step(closure)``.

    The adapted damping is the key ``damping`` of parameter groups. A schedule of it needs milestones,
    ``ParamScheduler(optimizer, damping={0: 1.0, 1000: 0.1})``, and λ is adapted further from each.

    Args:
        adaptive_damping: Whether to adjust λ every ``damping_interval`` steps by how well the quadratic model predicted
            the change of the loss. This evaluates the closure once more at those steps.
        damping_interval: T, the number of steps between two adjustments of λ.
        min_damping: Lower bound of an adapted λ.
        max_damping: Upper bound of an adapted λ.
        include_damping_in_model: Whether the quadratic model that judges λ includes the term ``½ λ ‖δ‖²``.
        reject_steps: Whether to undo a step that increased the loss or made it non-finite, and to increase λ. This
            evaluates the closure once more at every step.
        quadratic_model: Whether to take the learning rate and the momentum of each step from the quadratic model. Its
            step is multiplied by ``lr``, so that 1.0 leaves it unchanged; ``momentum=0`` ignores the previous step.
        likelihood: Relation of the loss to the outputs: ``"categorical"``, ``"bernoulli"``, ``"gaussian"`` or an
            object. With a closure that returns ``(loss, outputs)``, the quadratic model is then exact.
        calibrate_damping: Whether to try values from a thousandth to a thousand times ``damping`` at the first refresh,
            and to keep the best one.
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
        """Options that are on and need a closure."""
        return [n for n in ("adaptive_damping", "reject_steps", "calibrate_damping") if getattr(self, n)]

    @property
    def judging(self) -> list[str]:
        """Options that are on and judge a step."""
        return ["quadratic_model"] * self.quadratic_model + self.needing_loss
