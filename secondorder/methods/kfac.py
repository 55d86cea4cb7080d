r"""K-FAC: Kronecker-factored approximate curvature.

For a layer with weight ``[W | b]``, input ``a`` (1 appended for the bias) and gradient ``g`` at its output, the
Fisher's block is approximated by ``F = G ⊗ A`` with ``A = E[a aᵀ]`` and ``G = E[g gᵀ]``, and the gradient matrix ∇
becomes

.. math::
    V = Q_G \left[ (Q_G^\top \nabla Q_A) \oslash (s_G s_A^\top + \lambda) \right] Q_A^\top
    \qquad\text{or}\qquad V = (G + \tfrac{\sqrt\lambda}{\pi} I)^{-1} \nabla (A + \pi\sqrt\lambda I)^{-1}.

=====================  ==========================================
``damping``            λ
``factor_decay``       β of the running factors, weight of the old
``kl_clip``            κ of ``ν = min(1, √(κ / |Σ η² ⟨V, ∇⟩|))``
=====================  ==========================================

Martens & Grosse 2015 (arXiv 1503.05671); convolutions: Grosse & Martens 2016 (1602.01407); positions shared within an
example: Eschenhagen et al. 2023 (2311.00636); ``ν``: Pauloski et al. 2020 (2007.00784).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from secondorder import linalg, options
from secondorder.comm import CommStrategy
from secondorder.curvature import statistics
from secondorder.curvature.block import Block, SkipRule
from secondorder.curvature.capture import Statistic
from secondorder.curvature.kronecker import KroneckerSums
from secondorder.layerwise import LayerOptimizer
from secondorder.lifecycle import Group

#: Matrices above this size are factorised one by one: a batch would only cost memory.
_BATCH_LIMIT = 512
#: Damping when none is given: a multiple of the mean eigenvalue of each block, or λ if the mode is given as absolute.
_RELATIVE, _ABSOLUTE = 10.0, 1e-3
#: Intervals when none is given.
_INTERVALS = {"factor_update_steps": 10, "inv_update_steps": 100}


class KFAC(LayerOptimizer):
    """K-FAC on ``Linear`` and convolution layers; every other parameter follows the fallback rule.

    Args:
        params: A module, or what ``torch.optim`` takes together with ``module``.
        lr: Learning rate η, a number or a tensor of one element.
        momentum: Heavy-ball momentum on the preconditioned gradient.
        module: Module to hook when ``params`` is not one.
        comm: Communication strategy; None means one process.
        damping: λ, in the unit of the Fisher of the per-example loss (or a multiple, see ``damping_mode``). Unset: 10
            times the mean eigenvalue of each block, which is safe whatever the scale of the loss.
        damping_mode: ``"absolute"``, or ``"relative"`` to the mean eigenvalue of each block. Unset: absolute when
            ``damping`` is given.
        damping_split: ``"exact"`` adds λ to the eigenvalues of ``G ⊗ A``, ``"pi"`` splits it over the factors. Unset:
            exact for eigen, pi for cholesky.
        inverse_method: ``"eigen"`` (λ acts at once) or ``"cholesky"`` (half the work per step, a refresh many times
            cheaper; λ acts at the next refresh).
        factor_decay: β, weight of the old factors in the running mean.
        factor_update_steps: F, steps between updates of the factors. Unset: 10.
        inv_update_steps: K, steps between refreshes; 0 turns preconditioning off. Unset: 100.
        stagger: Spread the refreshes of the blocks over the interval.
        refresh_warmup: Update factors on every step of the first interval, and refresh at 0, 1, 2, 4, 8, … in it: the
            curvature of a fresh network changes a thousandfold in its first hundred steps. Unset: on unless an interval
            is given, which is then kept to exactly.
        approx: ``"expand"`` treats shared positions as independent, ``"reduce"`` averages inputs and sums gradients.
        loss_reduction: ``"mean"`` or ``"sum"`` over the examples, as the loss does.
        loss_terms: Scalar loss terms per example that a mean runs over (tokens).
        skip_layers: Names, patterns, types or modules to leave out, with all below them.
        kl_clip: κ, bound on the step in the Fisher metric; None disables.
        nesterov: Nesterov momentum.
        weight_decay: Weight decay.
        decoupled_weight_decay: Apply decay to the parameter instead of the direction.
        maximize: Maximize the objective.
        foreach: As in ``torch.optim``.
        fallback: Rule of parameters without a block, ``"sgd"`` or ``"adamw"``; unset follows ``graft``, else SGD.
        fallback_lr: Learning rate of the AdamW fallback, scheduled in proportion to ``lr``; unset: ``lr`` when
            grafting, else 1e-3.
        fallback_betas: Its β₁ and β₂.
        fallback_eps: Its ε.
        inner: Rule that takes the preconditioned gradient, ``"sgd"`` or ``"adamw"``.
        graft: ``"sgd"`` or ``"adam"``: each block takes the step size of that rule, so that its schedule carries over.
        clip_norm: Bound on the norm of the direction over all blocks.
        clip_value: Bound on each entry of the direction.
        grad_scaler: ``torch.amp.GradScaler`` of float16 training.
        checkpoint_curvature: What ``state_dict`` holds: ``"all"``, ``"factors"`` (inverses are recomputed at load) or
            ``"none"`` (estimated anew).
        max_failures: Failed refreshes of a layer in a row before an error.

    Raises:
        ValueError: For a value out of range, a pattern that matches nothing, or without a module.
        TypeError: For a value of a wrong kind.
        NotImplementedError: In a process group of more than one rank.

    Example:
        >>> import torch, secondorder
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = secondorder.KFAC(model, lr=0.1)
        >>> model(torch.randn(8, 4)).square().mean().backward()
        >>> optimizer.step()
    """

    checks: ClassVar[dict[str, options.Check]] = {
        "damping": options.number(0.0, low_open=True),
        "damping_mode": options.choice("absolute", "relative"),
        "damping_split": options.choice(None, "exact", "pi"),
        "inverse_method": options.choice("eigen", "cholesky"),
        "factor_decay": options.number(0.0, 1.0),
        "factor_update_steps": options.whole(1),
        "inv_update_steps": options.whole(0),
        "approx": options.choice("expand", "reduce"),
        "loss_reduction": options.choice("mean", "sum"),
        "loss_terms": options.number(0.0, low_open=True),
        "kl_clip": options.number(0.0, low_open=True, optional=True),
    }
    kinds: ClassVar[dict[str, str]] = {
        "factor_a": "factors",
        "factor_g": "factors",
        "factor_weight": "buffers",
        "factor_updates": "buffers",
        "refreshes": "buffers",
        "basis_a": "second_order",
        "basis_g": "second_order",
        "eigenvalues_a": "second_order",
        "eigenvalues_g": "second_order",
        "inverse_a": "second_order",
        "inverse_g": "second_order",
    }

    #: Whether `damping_mode` was left to the constructor.
    _mode_by_default = False

    def __init__(
        self,
        params: ParamsT | nn.Module,
        lr: float | Tensor = 0.1,
        momentum: float = 0.9,
        *,
        module: nn.Module | None = None,
        comm: CommStrategy | None = None,
        damping: float | None = None,
        damping_mode: str | None = None,
        damping_split: str | None = None,
        inverse_method: str = "eigen",
        factor_decay: float = 0.95,
        factor_update_steps: int | None = None,
        inv_update_steps: int | None = None,
        stagger: bool = False,
        refresh_warmup: bool | None = None,
        approx: str = "expand",
        loss_reduction: str = "mean",
        loss_terms: float = 1,
        skip_layers: Sequence[SkipRule] | SkipRule = (),
        kl_clip: float | None = 1e-3,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        maximize: bool = False,
        foreach: bool | None = None,
        fallback: str | None = None,
        fallback_lr: float | None = None,
        fallback_betas: tuple[float, float] = (0.9, 0.999),
        fallback_eps: float = 1e-8,
        inner: str = "sgd",
        graft: str | None = None,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        grad_scaler: Any = None,
        checkpoint_curvature: str = "all",
        max_failures: int = 10,
    ) -> None:
        given = locals()
        group_options = (*options.COMMON, *self.checks)
        defaults = {name: given[name] for name in group_options}
        if refresh_warmup is None:
            refresh_warmup = factor_update_steps is None and inv_update_steps is None
        for name, steps in _INTERVALS.items():
            defaults[name] = steps if defaults[name] is None else defaults[name]
        self._mode_by_default = damping_mode is None  # before the base class adds the groups
        defaults["damping"], defaults["damping_mode"] = _resolve_damping(damping, damping_mode)
        super().__init__(
            params,
            defaults,
            module=module,
            comm=comm,
            skip_layers=skip_layers,
            stagger=stagger,
            refresh_warmup=refresh_warmup,
            grad_scaler=grad_scaler,
            max_failures=max_failures,
        )
        self._warn_intervals()

    # ------------------------------------------------------------------ the verbs
    def curvature_spec(self, block: Block, group: Mapping[str, Any]) -> dict[str, Tensor | int]:
        """Factors, what is derived from them, and counters."""
        shape_a, shape_g = block.adapter.factor_shapes()
        dtype = self._precision(block.owner)

        def zeros(shape: Sequence[int], dtype: torch.dtype = dtype) -> Tensor:
            return torch.empty(tuple(shape), dtype=dtype, device="meta")

        spec: dict[str, Tensor | int] = {"factor_a": zeros(shape_a), "factor_g": zeros(shape_g)}
        spec["factor_weight"] = zeros((), torch.float64)
        spec["factor_updates"] = spec["refreshes"] = 0
        if group["inverse_method"] == "eigen":
            spec |= {"basis_a": zeros(shape_a), "basis_g": zeros(shape_g)}
            spec |= {"eigenvalues_a": zeros(shape_a[:-1]), "eigenvalues_g": zeros(shape_g[:-1])}
        else:
            spec |= {"inverse_a": zeros(shape_a), "inverse_g": zeros(shape_g)}
        return spec

    def new_statistic(self, block: Block, group: Group) -> KroneckerSums:
        """Empty sums of a block."""
        owner = block.owner
        return KroneckerSums(block.adapter, group["approx"], self._precision(owner), owner.device)

    def update_estimate(self, block: Block, statistic: Statistic, examples: int, gate: Tensor | None) -> Tensor:
        """Scale the sums per datum and fold them into the running factors."""
        sums, group, state = cast(KroneckerSums, statistic), block.group, self.state[block.owner]
        totals = list(sums.finish())
        scale_g = statistics.gradient_scale(examples, group["loss_reduction"], group["loss_terms"])
        scales = [1 / max(sums.rows, 1), scale_g]
        finite = statistics.all_finite(totals)
        ok = finite if gate is None else finite & gate
        running, weight = [state["factor_a"], state["factor_g"]], state["factor_weight"]
        statistics.ratio_ema_(running, weight, totals, scales, examples, group["factor_decay"], ok)
        return finite

    def refresh(self, blocks: Sequence[Block], host_checks: bool) -> Tensor:
        """Factorise the factors of some blocks; one that fails keeps its last good result."""
        ok: dict[Block, Tensor] = {}
        for method, work in (("eigen", self._eigen_batches), ("cholesky", self._cholesky_batches)):
            chosen = [b for b in blocks if b.group["inverse_method"] == method]
            if chosen:
                ok.update(zip(chosen, work(chosen, host_checks).unbind(), strict=True))
        return torch.stack([ok[b] for b in blocks])

    def precondition(self, block: Block, gradient: Tensor) -> Tensor:
        """``(G ⊗ A + λI)⁻¹ vec(∇)``, or its factored form."""
        state, group = self.state[block.owner], block.group
        if group["inverse_method"] == "cholesky":
            return statistics.solve_factored(gradient, state["inverse_a"], state["inverse_g"], self._workspace)
        values_a, values_g = state["eigenvalues_a"], state["eigenvalues_g"]
        damping = statistics.effective_damping(
            group["damping"], group["damping_mode"], values_a.mean(-1) * values_g.mean(-1)
        )
        if group["damping_split"] == "pi":
            add_a, add_g = statistics.pi_damping(values_a.mean(-1), values_g.mean(-1), damping)
            values_a, values_g = values_a + add_a[..., None], values_g + add_g[..., None]
            damping = torch.zeros_like(damping)
        bases = state["basis_a"], values_a, state["basis_g"], values_g
        return statistics.solve_eigen(gradient, *bases, damping, self._workspace)

    def block_curvature(self, block: Block) -> Tensor:
        """``G ⊗ A``; block-diagonal over the groups of a grouped convolution."""
        a, g = self.state[block.owner]["factor_a"], self.state[block.owner]["factor_g"]
        if block.adapter.groups == 1:
            return torch.kron(g.contiguous(), a.contiguous())
        return torch.block_diag(*(torch.kron(g_i, a_i) for g_i, a_i in zip(g, a, strict=True)))  # type: ignore[no-any-return]

    # ------------------------------------------------------------------ refresh in detail
    def _eigen_batches(self, blocks: Sequence[Block], host_checks: bool) -> Tensor:
        jobs = [(b, side, self.state[b.owner][f"factor_{side}"]) for b in blocks for side in "ag"]
        found = _batched(
            [matrix for *_, matrix in jobs],
            lambda stack: _pack(linalg.eigh_psd(stack, host_checks)),
        )
        ok = torch.stack([good for _, good in found]).view(len(blocks), 2).all(1)
        for (block, side, _), ((values, vectors), _) in zip(jobs, found, strict=True):
            good = ok[blocks.index(block)]
            _adopt(self.state[block.owner][f"eigenvalues_{side}"], values, good)
            _adopt(self.state[block.owner][f"basis_{side}"], vectors, good)
        return ok

    def _cholesky_batches(self, blocks: Sequence[Block], host_checks: bool) -> Tensor:
        damped = [x for b in blocks for x in self._damped_factors(b)]
        found = _batched(damped, lambda stack: _pack(linalg.inverse_pd(stack, host_checks)))
        ok = torch.stack([good for _, good in found]).view(len(blocks), 2).all(1)
        for i, block in enumerate(blocks):
            for side, ((inverse,), _) in zip("ag", found[2 * i : 2 * i + 2], strict=True):
                _adopt(self.state[block.owner][f"inverse_{side}"], inverse, ok[i])
        return ok

    def _damped_factors(self, block: Block) -> tuple[Tensor, Tensor]:
        """``A + π√λ I`` and ``G + √λ/π I``."""
        state, group = self.state[block.owner], block.group
        a, g = state["factor_a"], state["factor_g"]
        mean_a, mean_g = (x.diagonal(dim1=-2, dim2=-1).mean(-1) for x in (a, g))
        damping = statistics.effective_damping(group["damping"], group["damping_mode"], mean_a * mean_g)
        add_a, add_g = statistics.pi_damping(mean_a, mean_g, damping)
        return statistics.add_to_diagonal(a, add_a), statistics.add_to_diagonal(g, add_g)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; see the base class.

        Raises:
            ValueError: If options of the group exclude each other.
        """
        if isinstance(param_group, dict):
            param_group = dict(param_group)
            for name in ("damping", "damping_mode", *_INTERVALS):
                if name in param_group and param_group[name] is None:
                    del param_group[name]
            if self._mode_by_default and "damping" in param_group:
                # A number given as damping is λ itself unless a mode is given with it.
                param_group.setdefault("damping_mode", "absolute")
        merged = {**self.defaults, **param_group} if isinstance(param_group, dict) else self.defaults
        if merged["inverse_method"] == "cholesky" and merged["damping_split"] == "exact":
            raise ValueError(
                "damping_split='exact' needs the eigenvalues: use inverse_method='eigen', or damping_split='pi' with "
                "inverse_method='cholesky'"
            )
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        """What copies keep."""
        return {**super().__getstate__(), "_mode_by_default": self._mode_by_default}

    def _warn_intervals(self) -> None:
        for i, group in enumerate(self.param_groups):
            refresh, update = group["inv_update_steps"], group["factor_update_steps"]
            if refresh % update:
                warnings.warn(
                    f"group {i}: inv_update_steps={refresh} is not a multiple of factor_update_steps={update}: some "
                    "refreshes will use factors that are a few steps old",
                    stacklevel=3,
                )


def _resolve_damping(damping: float | None, mode: str | None) -> tuple[float, str]:
    if damping is None:
        return (_ABSOLUTE, mode) if mode == "absolute" else (_RELATIVE, "relative" if mode is None else mode)
    return damping, "absolute" if mode is None else mode


def _pack(results: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Tensor]:
    return results[:-1], results[-1]


def _adopt(current: Tensor, found: Tensor, good: Tensor) -> None:
    current.copy_(torch.where(good, found.reshape(current.shape), current))


def _batched(matrices: Sequence[Tensor], factorise: Any) -> list[tuple[tuple[Tensor, ...], Tensor]]:
    """Factorise matrices ``[(Γ,) n, n]`` in stacks of one size; results in the given order, ``ok`` 0-dim."""
    results: list[tuple[tuple[Tensor, ...], Tensor] | None] = [None] * len(matrices)
    for stack in _stacks(matrices):
        parts = [matrices[i].reshape(-1, *matrices[i].shape[-2:]) for i in stack]
        tensors, ok = factorise(parts[0] if len(parts) == 1 else torch.cat(parts))
        start = 0
        for i, part in zip(stack, parts, strict=True):
            stop = start + len(part)
            results[i] = tuple(t[start:stop] for t in tensors), ok[start:stop].all()
            start = stop
    return [r for r in results if r is not None]


def _stacks(matrices: Sequence[Tensor]) -> Iterable[list[int]]:
    sizes: dict[Any, list[int]] = {}
    for i, matrix in enumerate(matrices):
        n = matrix.shape[-1]
        key: Any = (n, matrix.dtype, matrix.device) if n <= _BATCH_LIMIT else i
        sizes.setdefault(key, []).append(i)
    return sizes.values()
