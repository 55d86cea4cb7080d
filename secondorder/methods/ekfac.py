r"""EK-FAC: eigenvalue-corrected Kronecker factorisation.

K-FAC's factors give bases ``Q_A`` and ``Q_G``. K-FAC takes the products of their eigenvalues for the curvature along
each pair of eigenvectors; EK-FAC measures it there, as the second moment of per-example gradients:

.. math::
    s = \tfrac1N \sum_n (Q_G^\top \nabla_n Q_A)^{\circ 2}, \qquad
    V = Q_G \left[ (Q_G^\top \nabla Q_A) \oslash (s + \lambda)^p \right] Q_A^\top .

Of all curvatures that are diagonal in that basis this one is the closest to the exact block, and it has its trace.

=======================  =======================================================
``damping``              λ
``power``                p: 1 is the natural gradient, 1/2 whitens as Adam does
``scale_decay``          β of s, weight of the old
``momentum``             with ``momentum_mode="pre"``: β₁ of the gradient's mean
=======================  =======================================================

With ``estimator="running"``, ``power=0.5`` and ``momentum_mode="pre"`` it is Adam in the eigenbasis of the Fisher,
where SOAP (Vyas et al. 2024, arXiv 2409.11321) is Adam in that of gradient products::

    m ← β₁ m + (1 − β₁) ∇        v ← β v + (1 − β)(Q_Gᵀ ∇ Q_A)²        V = Q_G [(Q_Gᵀ m̂ Q_A) ⊘ (√v̂ + ε)] Q_Aᵀ

George et al. 2018 (arXiv 1806.03884); positions of an example: Eschenhagen et al. 2023 (2311.00636).
"""

# bridge: verbs that take blocks with factors
# mypy: disable-error-code="override"

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from secondorder import options
from secondorder.capture.fisher.likelihood import Likelihood
from secondorder.comm import CommStrategy
from secondorder.curvature.extremes import Extremes, of_values
from secondorder.curvature.factorization import Found, joint_ok
from secondorder.curvature.kronecker import FactoredBlock
from secondorder.curvature.layer import SkipRule
from secondorder.curvature.schema import COUNTER, Entry, Place, Schema, shaped
from secondorder.lifecycle import Directions, Group
from secondorder.linalg import eigenbasis
from secondorder.methods import documentation
from secondorder.preconditioners.scale import ScalingOptimizer, is_adam


@options.complete_docstring(documentation.OPTIMIZER, documentation.LAYERS, documentation.FACTORS)
class EKFAC(ScalingOptimizer):
    """EK-FAC on every layer type that has an adapter; every other parameter follows the fallback rule.

    With ``estimator="intra"`` every rank that has examples of a layer keeps its bases, whether or not it preconditions
    the layer.

    Args:
        momentum: Coefficient of the momentum that ``momentum_mode`` selects.
        estimator: Estimator of the scale: ``"intra"`` squares the gradients of single examples; ``"running"`` squares
            the mean gradient, which costs nothing but has a bias that grows with the batch.
        scale_decay: β of the scale. If None, it is ``factor_decay``.
        scale_update_steps: Number of steps between updates of the scale.
        scale_batch_size: Number of examples of each micro-batch, drawn at random, that contribute to the scale. If
            None, all of them do.
        token_is_example: Whether to treat each position of linear layers and embeddings as an example of its own.
        transport: How the scale is carried over to a new basis: ``"project"`` keeps the operator, ``"kfac"`` starts
            again from the products of eigenvalues, ``"recompute"`` from the batch of the step, and ``"none"`` keeps the
            scale by index.
        basis_update: ``"eigh"``, or ``"qr"`` for orthogonal iteration from the last basis.
        full_every: Number of refreshes between two that use ``eigh``, with ``basis_update="qr"``.
        loss_terms: Number of outputs over which the loss of an example is a mean (squared error, binary cross-entropy).
            Leave it at 1 for a mean over tokens, which is the loss of the example itself; :meth:`observe` counts them.
        momentum_mode: ``"post"`` applies heavy-ball momentum to the preconditioned gradient; ``"pre"`` preconditions
            the running mean of the gradients. With ``"pre"`` and ``estimator="running"``, the scale is that of the mean
            gradient: with ``power=0.5``, steps are as long as Adam's, and ``eps`` replaces ``damping``.
        nesterov: Whether to use Nesterov momentum. With ``momentum_mode="pre"``, the mean of the gradient and the
            running mean, weighted by the momentum, is preconditioned.

    Raises:
        ValueError: For a value out of range, a pattern that matches nothing, options that exclude each other, or
            without a module.
        TypeError: For a value of a wrong kind.
        RuntimeError: If the ranks of a process group do not all construct it; ``ValueError`` on all if they differ.

    Example:
        >>> import torch, secondorder
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = secondorder.EKFAC(model, lr=0.1)
        >>> model(torch.randn(8, 4)).square().mean().backward()
        >>> optimizer.step()
    """

    checks: ClassVar[dict[str, options.Check]] = {
        **ScalingOptimizer.checks,
        "estimator": options.choice("intra", "running"),
        "scale_decay": options.number(0.0, 1.0, optional=True),
        "scale_update_steps": options.whole(1),
        "scale_batch_size": options.optional_whole(1),
        "token_is_example": options.flag,
        "transport": options.choice("project", "kfac", "none", "recompute"),
        "momentum_mode": options.choice("post", "pre"),
    }
    #: What belongs to the scale is where the scale is.
    catalog: ClassVar[Schema] = {
        **ScalingOptimizer.catalog,
        "off_diagonal": Entry(0, "buffers", Place.CURVATURE),
        "scale": Entry(0, "scale", Place.CURVATURE),
        "scale_weight": Entry(0, "buffers", Place.CURVATURE),
        "scale_unit": Entry(0, "buffers", Place.CURVATURE),
        "scale_updates": COUNTER,
        "scale_step": COUNTER,
        "gradient_momentum": Entry(0, "momentum", Place.OWN),
        "gradient_updates": Entry(0, "momentum", Place.OWN),
    }
    allocating: ClassVar[tuple[str, ...]] = (
        "max_factor_dim", "decay_per_step", "basis_update", "momentum_mode", "transport", "estimator",
    )  # fmt: skip

    def __init__(
        self,
        params: ParamsT | nn.Module | Sequence[nn.Module],
        lr: float | Tensor = 0.1,
        momentum: float = 0.9,
        *,
        module: nn.Module | Sequence[nn.Module] | None = None,
        comm: CommStrategy | None = None,
        damping: float | None = None,
        damping_mode: str | None = None,
        factor_decay: float = 0.95,
        factor_update_steps: int | None = None,
        inv_update_steps: int | None = None,
        factor_dtype: torch.dtype = torch.float32,
        inv_dtype: torch.dtype = torch.float32,
        factor_storage: str = "dense",
        stagger: bool = False,
        overlap: bool = False,
        refresh_warmup: bool | None = None,
        estimator: str = "intra",
        scale_decay: float | None = None,
        scale_update_steps: int = 1,
        scale_batch_size: int | None = None,
        token_is_example: bool = False,
        transport: str = "project",
        basis_update: str = "eigh",
        full_every: int = 20,
        approx: str = "expand",
        fisher: str = "empirical",
        fisher_samples: int = 1,
        loss_reduction: str = "mean",
        loss_terms: float = 1,
        batch_dim: int = 0,
        batch_input: str | Callable[..., int] | None = None,
        skip_layers: Sequence[SkipRule] | SkipRule = (),
        norm_curvature: str = "unit",
        tied: str | None = "head",
        max_factor_dim: int | str | None = "auto",
        weighting: str = "samples",
        burnin_steps: int = 0,
        decay_per_step: bool = False,
        factor_batch_size: int | None = None,
        factor_positions: int | None = None,
        weight_decay_in_curvature: bool = False,
        power: float = 1.0,
        orthogonalize: bool = False,
        orthogonal_dtype: torch.dtype = torch.float32,
        kl_clip: float | None = 1e-3,
        adaptive_damping: bool = False,
        damping_interval: int = 5,
        min_damping: float = 1e-8,
        max_damping: float = math.inf,
        include_damping_in_model: bool = False,
        reject_steps: bool = False,
        quadratic_model: bool = False,
        likelihood: str | Likelihood | None = None,
        calibrate_damping: bool = False,
        momentum_mode: str = "post",
        nesterov: bool = False,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
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
        checkpoint_curvature: str = "all",
        max_failures: int = 10,
        deterministic_seed: int = 0,
    ) -> None:
        given = locals()
        self._begin_scales()
        super().__init__(given)

    def _restore(self, kept: dict[str, Any]) -> None:
        super()._restore(kept)
        self._begin_scales()
        self._bases_to_send = set(kept["bases_to_send"])

    def _kept_by_copies(self) -> dict[str, Any]:
        return {**super()._kept_by_copies(), "bases_to_send": set(self._bases_to_send)}

    def _check_group(self, group: Group) -> None:
        super()._check_group(group)
        fisher, running = self._fisher.fisher, group["estimator"] == "running"
        if self._layer_options.overlap and group["basis_update"] == "qr":
            raise ValueError("overlap=True factorises anew, basis_update='qr' improves the basis of now: drop one")
        if fisher == "forward_only":
            raise ValueError("fisher='forward_only' measures no gradients, of which EKFAC's scale is made: use KFAC")
        if running:
            unused = {
                "transport='recompute'": group["transport"] == "recompute",
                "token_is_example=True": group["token_is_example"],
                f"scale_batch_size={group['scale_batch_size']}": group["scale_batch_size"] is not None,
            }
            found = options.clashing(unused)
            if found:
                raise ValueError(f"estimator='running' looks at no example: drop {found}")
        if running and fisher != "empirical":
            raise ValueError(
                f"estimator='running' squares the gradient of the loss, which is no sample of fisher={fisher!r}: use "
                "estimator='intra'"
            )
        if is_adam(group):
            chosen = self._adaptation
            clashes = {
                "adaptive_damping=True": chosen.adaptive_damping,
                "calibrate_damping=True": chosen.calibrate_damping,
                "weight_decay_in_curvature=True": group["weight_decay_in_curvature"],
            }
            found = options.clashing(clashes)
            if found:
                raise ValueError(
                    "estimator='running', momentum_mode='pre' and power=0.5 are Adam in an eigenbasis, which has "
                    f"eps and no damping: drop {found}"
                )
        if group["momentum_mode"] == "pre":
            clashes = {
                f"graft={group['graft']!r}": group["graft"] is not None,
                f"inner={group['inner']!r}": options.is_adam(group["inner"]),
                "quadratic_model=True": self._adaptation.quadratic_model,
                f"momentum={group['momentum']}": group["momentum"] >= 1,
            }
            found = options.clashing(clashes)
            if found:
                raise ValueError(f"momentum_mode='pre' excludes {found}")

    # ------------------------------------------------------------------ state
    def schema(self, block: FactoredBlock, group: Mapping[str, Any], held: Mapping[str, Any]) -> Schema:
        """Factors, bases, scale and counters."""
        adapter = block.adapter
        lead = (adapter.groups,) if adapter.groups > 1 else ()
        likes: dict[str, Tensor | int] = {
            "scale": self.zeros(block, (*lead, adapter.n_g, adapter.n_a)),
            "scale_weight": self.zeros(block, (), torch.float64),
            "scale_updates": 0,
        }
        if group["decay_per_step"]:
            likes["scale_step"] = max(self._t - 1, 0)
        if group["transport"] == "kfac":
            likes["scale_unit"] = self.zeros(block, (), torch.float64)
        return block.factor_schema(group) | self.basis_schema(block, group) | shaped(self.catalog, likes)

    def _curvature_schema(self, p: nn.Parameter, group: Mapping[str, Any], held: Mapping[str, Any]) -> Schema:
        found = super()._curvature_schema(p, group, held)
        block = self._block_of.get(p)
        if block is not None and group["momentum_mode"] == "pre":
            mean = torch.empty(p.shape, dtype=self._precision(p), device="meta")
            found = found | shaped(self.catalog, {"gradient_momentum": mean, "gradient_updates": 0})
        return found

    def _rule_keys(self, p: nn.Parameter, group: Mapping[str, Any]) -> tuple[str, ...]:
        if self._covers(p) and self._options(p)["momentum_mode"] == "pre":
            return ()
        return super()._rule_keys(p, group)

    # ------------------------------------------------------------------ refresh
    def refresh_some(self, blocks: Sequence[FactoredBlock], host_checks: bool) -> Tensor:
        """Bring the bases of some blocks up to date, and their scales into the new bases."""
        found = self.new_bases(blocks, host_checks)
        ok = joint_ok(found, blocks)
        for block, good in zip(blocks, ok.unbind(), strict=True):
            state = self.state[block.owner]
            values = {side: self.eigenvalues_found(block, side, found) for side in "ag"}
            product = values["g"][..., :, None] * values["a"][..., None, :]
            if state["scale_updates"] == 0:
                # A placeholder of weight 0: nothing of it survives the first measurement.
                block.adopt_tensor("scale", product, good)
            elif not self._loading:
                self._carry_over(block, found, product, good)
            for side in "ag":
                block.adopt_tensor(f"eigenvalues_{side}", values[side], good)
                for basis in found[block, side][0][1:2]:
                    block.adopt_tensor(f"basis_{side}", basis, good)
            if not self._loading:
                state["scale"].copy_(self.pooled(block, state["scale"]))
        for block, (sums, _) in self._late.items():
            if block in blocks and not self.comm.combines:
                self._measure_late(block, sums, ok[blocks.index(block)])
        return ok

    def _carry_over(
        self, block: FactoredBlock, found: Mapping[tuple[FactoredBlock, str], Found], product: Tensor, good: Tensor
    ) -> None:
        """Bring the scale from the old bases into those that were found."""
        state, mode = self.state[block.owner], block.group["transport"]
        if mode == "kfac":
            block.adopt_tensor("scale", product, good)
            block.adopt_tensor("scale_weight", state["scale_unit"], good)  # as one update
            return
        if mode == "none":
            moved = state["scale"]
            for side, axis in (("a", -1), ("g", -2)):
                for order in found[block, side][0][2:3]:  # the columns that a QR refresh sorted
                    index = order.reshape(state[f"eigenvalues_{side}"].shape)
                    index = index[..., None, :] if axis == -1 else index[..., :, None]
                    moved = moved.gather(axis, index.expand_as(moved))
        else:
            overlaps = []
            for side in "ag":
                old, new = block.basis(side), found[block, side][0][1:2]
                overlaps.append(eigenbasis.overlap(old, new[0].reshape(old.shape)) if old is not None and new else None)
            moved = eigenbasis.transport(state["scale"], *overlaps)
        block.adopt_tensor("scale", moved, good)

    # ------------------------------------------------------------------ stage 5: directions
    def _sources(self, blocks: Sequence[FactoredBlock], gradients: Directions, gate: Tensor | None) -> Directions:
        """What to precondition; with ``momentum_mode="pre"`` the bias-corrected running mean of gradients."""
        source = super()._sources(blocks, gradients, gate)
        for block in blocks:
            if block.group["momentum_mode"] != "pre":
                continue
            for p in block.params:
                beta, mean = self._group[p]["momentum"], self._local_state(p, "gradient_momentum")
                gradient = gradients[p].to(mean.dtype)
                mean.lerp_(gradient if gate is None else torch.where(gate, gradient, mean), 1 - beta)
                self.state[p]["gradient_updates"] += 1
                source[p] = mean / (1 - beta ** self.state[p]["gradient_updates"])
                if self._group[p]["nesterov"]:
                    source[p] = gradient.lerp(source[p], beta)
        return source

    def precondition(self, block: FactoredBlock, gradient: Tensor) -> Tensor:
        """``Q_G [(Q_Gᵀ ∇ Q_A) ⊘ (s + λ)^p] Q_Aᵀ``."""
        group, s = block.group, self.state[block.owner]["scale"]
        rotated = self._rotated.get(block)
        like_adam = is_adam(group)
        mean = s.mean((-2, -1))
        damping = torch.full_like(mean, group["eps"]) if like_adam else block.damping_of(mean)
        chosen = self._layer_options
        kept = block.factors.kept_in(chosen.factor_dtype), block.factors.kept_in(chosen.inv_dtype)
        return eigenbasis.precondition(
            gradient if rotated is None else rotated,
            block.basis("a"),
            block.basis("g"),
            s,
            damping,
            group["power"],
            self._runtime.workspace,
            damp_root=like_adam,
            is_rotated=rotated is not None,
            silent=eigenbasis.is_rounding(s, *self.singular_values(block), kept) if like_adam else None,
        )

    def _rule(self, p: nn.Parameter, group: Group, preconditioned: bool) -> str:
        if preconditioned and self._options(p)["momentum_mode"] == "pre":
            return "plain"
        return super()._rule(p, group, preconditioned)

    # ------------------------------------------------------------------ what it tells
    def block_curvature(self, block: FactoredBlock) -> Tensor:
        """``(Q_G ⊗ Q_A) diag(vec s) (Q_G ⊗ Q_A)ᵀ``; block-diagonal over the groups of a grouped convolution."""
        found = eigenbasis.dense(self.state[block.owner]["scale"], block.basis("a"), block.basis("g"))
        if block.adapter.groups > 1:
            found = cast(Tensor, torch.block_diag(*found))
        return block.adapter.natural_order(found)

    def extremes(self, block: FactoredBlock) -> Extremes | None:
        """λ of a block and the extreme entries of its damped scale; None if the scale is on other ranks."""
        s: Tensor | None = self.state[block.owner].get("scale")
        if s is None:
            return None
        if is_adam(block.group):  # ε is added to the root
            return Extremes(torch.full_like(s.mean((-2, -1)), block.group["eps"]))
        return of_values(s.amin((-2, -1)), s.amax((-2, -1)), block.damping_of(s.mean((-2, -1))))

    def block_damping(self, block: FactoredBlock) -> Tensor:
        """λ of a block as the damping of its quadratic model."""
        return block.tikhonov(self.state[block.owner]["scale"].mean((-2, -1)))

    def curvature_product(self, block: FactoredBlock, matrix: Tensor) -> Tensor:
        """``Q_G ((Q_Gᵀ X Q_A) ∘ s) Q_Aᵀ`` of a matrix ``X [(Γ,) n_g, n_a]``, undamped."""
        bases = block.basis("a"), block.basis("g")
        return eigenbasis.rotate_back(eigenbasis.rotate(matrix, *bases) * self.state[block.owner]["scale"], *bases)
