r"""HyLo: natural gradient through the kernel of a few examples per layer, sampled or interpolated.

With the per-example gradients ``u_n = Σ_s g_ns a_nsᵀ`` of a layer (of the un-averaged loss, 1 appended to ``a`` for a
bias) over m examples, the empirical Fisher is ``F = (1/m) Σ u_n u_nᵀ``, and the Woodbury identity gives

.. math::
    (F + \lambda I)^{-1} V = \frac{1}{\lambda} \left[ V - \frac{1}{m} \hat G^\top \mathrm{diag}(M \hat\jmath) \hat A
    \right], \qquad \hat\jmath_n = \langle \hat u_n, V \rangle.

=============  ====================================  ==========================================================
mode           rows kept                             M
=============  ====================================  ==========================================================
``"sngd"``     all m                                 ``(K + λI)⁻¹``, K = ⟨u, u'⟩ / m
``"kis"``      R drawn with probability π_n ∝ ‖u_n‖²  as above, rows divided by √π_n: the mean of F̂ is F
``"kid"``      R pivots of a Cholesky factorisation  ``(S⁻¹ + K̂)⁻¹``, S = P D⁻¹ Pᵀ, K ≈ Pᵀ K̂ P + (D − λI)
``"auto"``     KID or KIS, as a policy says
=============  ====================================  ==========================================================

=====================  ==========================================
``damping``            λ
``rank_fraction``      ρ = R / m
=====================  ==========================================

Mu et al., HyLo, SC22, with its interpolation corrected; Ren & Goldfarb 2019 (arXiv 1906.02353), section 3; positions
shared within an example: Eschenhagen et al. 2023 (2311.00636).
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from secondorder import options
from secondorder.capture.fisher.heads import Head
from secondorder.capture.statistics.examples import as_rows_matrix
from secondorder.comm import CommStrategy
from secondorder.curvature.block import Block
from secondorder.curvature.example_rows import DOUBLE_ROWS, Fresh, Kept, filled
from secondorder.curvature.layer import LayerOptions, SkipRule
from secondorder.curvature.mode import SwitchedOptimizer
from secondorder.lifecycle import Directions, Group
from secondorder.linalg import kernel, selection, stacks, woodbury
from secondorder.linalg.kernel import Rows
from secondorder.methods import documentation
from secondorder.switching import GradNormChange, SwitchPolicy

_MODES = ("auto", "kid", "kis", "sngd")
#: Ranks that an energy asks for are rounded up to a multiple of this, so that few sizes occur.
_RANK_STEP = 8

#: Part of the trace of a kernel that is left to rounding.
_ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-12}


@options.complete_docstring(documentation.OPTIMIZER, documentation.LAYERS)
class HyLo(SwitchedOptimizer):
    """HyLo on every layer type that has an adapter; every other parameter follows the fallback rule.

    Args:
        damping: Damping λ, in units of the Fisher of the per-example loss, or a multiple as ``damping_mode`` says. A
            change takes effect at the next refresh. In directions that no row covers, the step is that of the gradient
            times η / λ.
        damping_mode: ``"absolute"``, or ``"relative"`` to the mean eigenvalue of the kernel of each block, which falls
            with the gradients and with the number of examples.
        normalize_damping: Whether to multiply the direction by λ, so that it does not grow when λ falls, and equals the
            gradient where λ is large.
        mode: ``"kid"`` interpolates, ``"kis"`` samples, and ``"sngd"`` keeps every example. ``"auto"`` switches between
            KID and KIS as ``switch`` says.
        switch: Policy of ``mode="auto"``, see :mod:`secondorder.switching`. If None, it is ``GradNormChange()``.
        update_steps: Number of steps between refreshes; 0 turns preconditioning off.
        rank_fraction: ρ, the fraction of the examples of a step that are kept.
        max_rank: Largest number of rows that are kept on all ranks together; each rank keeps at least one. It does not
            bound ``mode="sngd"``.
        rank_energy: Fraction of the trace of a layer's kernel that its rows have to hold. If given, it determines the
            number of rows per layer instead of ``rank_fraction``.
        kis_sampling: ``"systematic"`` (unbiased, no row twice), ``"replacement"`` (unbiased), ``"unweighted"`` (the
            published draw, biased) or ``"uniform"``.
        kid_pivoting: How the rows for interpolation are chosen: ``"cholesky"`` by the remainder of the kernel's
            diagonal, ``"qr"`` by the kernel's columns, and ``"score"`` takes the largest rows.
        kid_residual: What represents the part of the kernel that is not interpolated: its diagonal (``"diag"``), the
            full matrix (``"full"``) or nothing (``"none"``).
        approx: ``"reduce"`` uses the mean input and the summed gradient of each example; ``"expand"`` is exact.
        conv_scale: ``"exact"``, or ``"hylo"`` to divide the summed gradients of convolutions by the number of
            positions, which reproduces the published recipes.
        kfac_when_cheaper: Whether to use K-FAC's factors for a layer where R rows would take more memory or time. This
            is decided at the first refresh, and :meth:`describe` reports it.
        factor_decay: β, the weight of the old factors in the running mean, for layers that use K-FAC's factors.
        fisher: ``"empirical"`` uses the gradients of the loss, example by example, as rows. With :meth:`observe`,
            ``"mc"`` uses the gradients for targets drawn from the model, ``"curvature_prop"`` those along random signs,
            and ``"exact"``, if the loss of an example has one output, the Gauss-Newton rows. A squared error needs one
            of these three, because its own gradients vanish with the errors.
        loss_terms: Number of scalar loss terms per example (such as tokens) over which a mean runs.
        batch_size: Number of examples per step and rank. If given, the rows of ``approx="reduce"`` are allocated at
            construction, which is necessary for loading a distributed checkpoint before the first step. If None, they
            are allocated at the first refresh.
        kl_clip: κ, the bound on the step in the Fisher metric. If None, steps are not bounded.
        weight_decay_mode: ``"standard"``, or ``"reg"``, with which the decay is part of the gradient that is
            preconditioned.
        fallback: Rule for parameters without a block: ``"sgd"``, ``"adam"`` or ``"adamw"``. If None, it is the rule of
            ``graft`` if that is given, and SGD otherwise. The steps of SGD are η times the gradient, whereas those of
            blocks are of the order of η / λ; see ``normalize_damping``.
        checkpoint_curvature: How much of the curvature ``state_dict`` contains: ``"all"``, or ``"none"`` (rows are
            captured anew).

    Raises:
        ValueError: For a value out of range, a pattern that matches nothing, or without a module.
        TypeError: For a value of a wrong kind.

    Example:
        >>> import torch, secondorder
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = secondorder.HyLo(model, lr=1e-3, graft="adam", damping=0.1, damping_mode="relative")
        >>> model(torch.randn(8, 4)).square().mean().backward()
        >>> optimizer.step()
    """

    checks: ClassVar[dict[str, options.Check]] = {
        "damping": options.number(0.0, low_open=True),
        "damping_mode": options.choice("absolute", "relative"),
        "normalize_damping": options.flag,
        "mode": options.choice(*_MODES),
        "update_steps": options.whole(0),
        "rank_fraction": options.number(0.0, 1.0, low_open=True),
        "max_rank": options.whole(1),
        "rank_energy": options.number(0.0, 1.0, low_open=True, optional=True),
        "kis_sampling": options.choice(*selection.SAMPLINGS),
        "kid_pivoting": options.choice("cholesky", "qr", "score"),
        "kid_residual": options.choice("diag", "none", "full"),
        "approx": options.choice("reduce", "expand"),
        "conv_scale": options.choice("exact", "hylo"),
        "kfac_when_cheaper": options.flag,
        "factor_decay": options.number(0.0, 1.0),
        "loss_reduction": options.choice("mean", "sum"),
        "loss_terms": options.number(0.0, low_open=True),
        "kl_clip": options.number(0.0, low_open=True, optional=True),
        "weight_decay_mode": options.choice("standard", "reg"),
        "checkpoint_curvature": options.choice("all", "none"),
        "deterministic_seed": options.whole(0),
    }
    _sizes_are = "rows × (a + g)"

    def __init__(
        self,
        params: ParamsT | nn.Module | Sequence[nn.Module],
        lr: float | Tensor = 0.1,
        momentum: float = 0.9,
        *,
        module: nn.Module | Sequence[nn.Module] | None = None,
        comm: CommStrategy | None = None,
        damping: float = 1.0,
        damping_mode: str = "absolute",
        normalize_damping: bool = False,
        mode: str = "auto",
        switch: SwitchPolicy | None = None,
        update_steps: int = 10,
        rank_fraction: float = 0.1,
        max_rank: int = 1024,
        rank_energy: float | None = None,
        kis_sampling: str = "systematic",
        kid_pivoting: str = "cholesky",
        kid_residual: str = "diag",
        approx: str = "reduce",
        conv_scale: str = "exact",
        kfac_when_cheaper: bool = False,
        factor_decay: float = 0.95,
        fisher: str = "empirical",
        loss_reduction: str = "mean",
        loss_terms: float = 1,
        batch_dim: int = 0,
        batch_input: str | Callable[..., int] | None = None,
        batch_size: int | None = None,
        skip_layers: Sequence[SkipRule] | SkipRule = (),
        tied: str | None = "head",
        kl_clip: float | None = None,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        weight_decay_mode: str = "standard",
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
        options.choice("empirical", "mc", "exact", "curvature_prop")("fisher", fisher)
        self._fisher = options.FisherOptions(fisher)
        options.optional_whole(1)("batch_size", batch_size)
        if switch is not None and not isinstance(switch, SwitchPolicy):
            raise TypeError(f"switch must be a policy of secondorder.switching, got {switch!r}")
        # A policy counts what one optimizer does, so each has its own.
        self._begin_switch(GradNormChange() if switch is None else copy.deepcopy(switch))
        if switch is not None and "auto" not in _modes(params, mode):
            raise ValueError(f"mode={mode!r} never asks the policy {switch!r}: drop switch, or mode")
        self._begin_rows(batch_size)
        defaults = options.from_arguments(given, self.checks)
        chosen = LayerOptions(
            skip_layers, max_failures=max_failures, tied=tied, batch_dim=batch_dim, batch_input=batch_input
        )
        super().__init__(
            params, defaults, module=module, comm=comm, layer_options=chosen, grad_scaler=grad_scaler
        )  # fmt: skip

    def _check_group(self, group: Group) -> None:
        super()._check_group(group)
        if group["conv_scale"] == "hylo" and group["approx"] != "reduce":
            raise ValueError("conv_scale='hylo' is of summed gradients: use approx='reduce'")
        if group["kfac_when_cheaper"] and self._fisher.is_observed:
            chosen = self._fisher.fisher
            raise ValueError(f"kfac_when_cheaper=True has factors of the loss's own gradients: drop fisher={chosen!r}")
        if group["kfac_when_cheaper"] and group["rank_energy"] is not None:
            raise ValueError(
                "kfac_when_cheaper=True compares with a number of rows, which rank_energy tells only from the rows: "
                "drop one of them"
            )
        if group["weight_decay_mode"] == "reg":
            clashes = {
                "decoupled_weight_decay=True": group["decoupled_weight_decay"],
                f"inner={group['inner']!r}": options.is_adam(group["inner"]),
                f"graft={group['graft']!r}": options.is_adam(group["graft"]),
            }
            if found := options.clashing(clashes):
                raise ValueError(f"weight_decay_mode='reg' makes decay part of the gradient: drop {found}")

    # ------------------------------------------------------------------ state
    def rank_of(self, group: Mapping[str, Any], examples: int, ranks: int = 1) -> int:
        """r, the rows to keep of so many examples on each of some ranks (at most, where an energy decides)."""
        if self._mode_in(group) == "sngd":
            return examples
        fraction = 1.0 if group["rank_energy"] is not None else group["rank_fraction"]
        return selection.planned_rank(examples, fraction, max(1, group["max_rank"] // ranks))

    def _exact_vectors(self, heads: Sequence[Head], by_head: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        columns = sum(head.kind.columns(head.outputs) for head in heads)
        if columns > 1:
            raise ValueError(
                f"fisher='exact' would make {columns} rows of each example, of which HyLo keeps one: use fisher='mc' "
                "or 'curvature_prop'"
            )
        return super()._exact_vectors(heads, by_head)

    def _facts(self) -> dict[str, list[str]]:
        told = {"Fisher": [f"fisher={self._fisher.fisher!r}"]} if self._fisher.is_observed else {}
        return {**super()._facts(), **told}

    # ------------------------------------------------------------------ which mode
    def probe_errors(
        self, blocks: Sequence[Block], fresh: Mapping[Block, Fresh], ranks: Mapping[Block, int]
    ) -> list[Tensor]:
        """How far KIS is from the exact direction, on a few layers; both from this rank's examples alone."""
        asking = [b for b in blocks if b.group["mode"] == "auto"]
        usable = [b for b in asking if all(p in self._gradients_now for p in b.params)]
        count = min(self.switch.probes, len(usable))
        chosen = [usable[round(i * (len(usable) - 1) / max(count - 1, 1))] for i in range(count)]
        errors = []
        for block in chosen:
            rows, share, gradient = fresh[block].rows, fresh[block].share, self._gradient_of(block)
            rows = rows if share == 1 else kernel.scaled(rows, share**-0.5)
            matrix, norms = as_rows_matrix(rows, gradient), kernel.norms(rows)
            damping = self.damping_of(block, norms.sum(-1), fresh[block].examples)
            group, n = block.group, fresh[block].examples
            rank = ranks[block]
            if group["rank_energy"] is None:  # that of KIS, whatever the mode keeps
                most = max(1, group["max_rank"] // self.comm.sources(block.index))
                rank = min(selection.planned_rank(n, group["rank_fraction"], most), rows.n)
            kept = self._sampled(block, rows, norms, rank, "probe of ")
            inverse, _ = woodbury.damped_inverse(_widened(kernel.gram(kept)), damping)
            exact = woodbury.exact_update(rows, damping, matrix)
            off = woodbury.apply(kept, inverse, damping, matrix) - exact
            errors.append(torch.linalg.vector_norm(off) / torch.linalg.vector_norm(exact).clamp(min=1e-30))
        return errors

    def _gradient_of(self, block: Block) -> Tensor:
        return block.layer.matrix([self._gradients_now[p].to(self._precision(p)) for p in block.params])

    # ------------------------------------------------------------------ stage 4: refresh
    def refresh_rows(self, blocks: Sequence[Block], fresh: Mapping[Block, Fresh]) -> dict[Block, Tensor]:
        """Choose rows of this step and invert their kernel.

        Args:
            blocks: The blocks.
            fresh: What this step captured for each.

        Returns:
            Whether that went well, by block.
        """
        self.begin_rows(blocks)
        with self._stage("select"):
            limits = {b: self.rank_of(b.group, self._batch_size or fresh[b].examples) for b in blocks}
            # Not every example need pass a layer.
            ranks = self._by_energy(fresh, {b: min(r, fresh[b].rows.n) for b, r in limits.items()})
            kept = self.choose_rows(blocks, fresh, ranks)
            if self._batch_size is not None:
                kept = {b: filled(k, self.rank_of(b.group, self._batch_size)) for b, k in kept.items()}
        ok = self.invert_rows(kept, {b: fresh[b].ok for b in kept})
        errors = self.probe_errors(blocks, fresh, ranks)
        if errors:
            self.hear_probe(torch.stack([e.to(errors[0].device, torch.float64) for e in errors]).mean())
        return ok

    def invert_rows(self, kept: Mapping[Block, Kept], good: Mapping[Block, Tensor]) -> dict[Block, Tensor]:
        """Invert the kernels of rows, and take over those that may be used.

        Args:
            kept: The rows.
            good: Whether they may be used.

        Returns:
            Whether that went well, by block.
        """
        ok: dict[Block, Tensor] = {}
        kinds: dict[tuple[Any, ...], list[Block]] = {}
        for block, k in kept.items():
            kinds.setdefault((k.rows.n, k.rows.g.dtype, k.rows.g.device, k.core is None), []).append(block)
        for members in kinds.values():
            for some in stacks.bounded(members, lambda b: _batch(kept[b].rows) * kept[b].rows.n ** 2):
                ok |= self._invert({b: kept[b] for b in some}, good)
        return ok

    def _invert(self, kept: Mapping[Block, Kept], usable: Mapping[Block, Tensor]) -> dict[Block, Tensor]:
        """Invert the kernels of rows of one number, together, and take them over."""
        with self._stage("kernel"):
            kernels = [_widened(kernel.gram(k.rows)) for k in kept.values()]
            stack, leads = stacks.joined(kernels, 2), [x.shape[:-2] for x in kernels]
            del kernels
        with self._stage("invert"):
            cores = [k.core.to(stack.dtype) for k in kept.values() if k.core is not None]
            if cores:
                found = woodbury.interpolated_inverse(stacks.joined(cores, 2), stack)
            else:
                found = woodbury.damped_inverse(stack, stacks.joined([k.damping for k in kept.values()], 0))
            ok = {}
            for (block, k), inverse, good in zip(kept.items(), *(stacks.parted(t, leads) for t in found), strict=True):
                ok[block] = good.all() & usable[block]
                self.keep_rows(block, k.rows, inverse, k.damping, bool(cores), ok[block])
        return ok

    def choose_rows(
        self, blocks: Sequence[Block], fresh: Mapping[Block, Fresh], ranks: Mapping[Block, int]
    ) -> dict[Block, Kept]:
        """The rows to keep, as the mode of each block says."""
        kept: dict[Block, Kept] = {}
        for block in blocks:
            mode, rows = self._mode_in(block.group), fresh[block].rows
            if mode == "kid":
                continue
            norms = kernel.norms(rows)
            damping = self._damping_of(block, norms.sum(-1), fresh[block])
            kept[block] = Kept(rows if mode == "sngd" else self._sampled(block, rows, norms, ranks[block]), damping)
        kept.update(self._interpolated([b for b in blocks if b not in kept], fresh, ranks))
        return kept

    def _damping_of(self, block: Block, trace: Tensor, fresh: Fresh) -> Tensor:
        """λ of a block from the trace of the kernel of its rows, unless other ranks have rows too."""
        return self.damping_of(block, trace, fresh.examples) if fresh.damping is None else fresh.damping

    def most_rows(self, blocks: Sequence[Block]) -> dict[Block, int]:
        """r, the rows that every rank sends of each block: where an energy decides, as many as the neediest needs."""
        limits = super().most_rows(blocks)
        asked = [b for b in blocks if self._asks_energy(b)]
        if asked:
            needed = self._try_together("measuring its kernels", [len(asked), self.comm.data_world], partial(
                self._needed, {b: limits[b] for b in asked}
            ))  # fmt: skip
            limits |= {b: min(int(by_rank.max()), limits[b]) for b, by_rank in zip(asked, needed, strict=True)}
        return limits

    def _needed(self, limits: Mapping[Block, int]) -> Tensor:
        """Rows that the energies of this rank's kernels ask for, in its place ``[blocks, W]``."""
        found = self._by_energy(
            self._fresh, {b: min(r, self._fresh[b].rows.n) for b, r in limits.items() if b in self._fresh}
        )
        words = torch.zeros(len(limits), self.comm.data_world, dtype=torch.float64)
        words[:, self.comm.rank] = torch.tensor([float(found.get(b, 0)) for b in limits])
        return words

    def _asks_energy(self, block: Block) -> bool:
        return block.group["rank_energy"] is not None and self._mode_in(block.group) != "sngd"

    def _by_energy(self, fresh: Mapping[Block, Fresh], limits: dict[Block, int]) -> dict[Block, int]:
        """R of each block: the limit, or what the energy of its kernel asks for."""
        kinds: dict[tuple[Any, ...], list[Block]] = {}
        for block in limits:
            if self._asks_energy(block):
                share, rows = block.group["rank_energy"], fresh[block].rows
                kinds.setdefault((rows.n, limits[block], share, rows.g.dtype, rows.g.device), []).append(block)
        needed: dict[Block, Tensor] = {}
        for (n, limit, share, *_), members in kinds.items():
            for some in stacks.bounded(members, lambda b, n=n: _batch(fresh[b].rows) * n * n):  # type: ignore[misc]
                local, leads = self._local_kernels(some, fresh)
                found = selection.interpolate(local, limit)
                traces = local.diagonal(dim1=-2, dim2=-1).sum(-1)
                counts = selection.energy_rank(found, traces, share, _ROUNDING[local.dtype])
                needed.update(zip(some, (part.max() for part in stacks.parted(counts, leads)), strict=True))
        if needed:  # one wait for the device
            device = next(iter(needed.values())).device
            found_ranks = torch.stack([count.to(device) for count in needed.values()]).tolist()
            for block, count in zip(needed, found_ranks, strict=True):
                limits[block] = min(-(-int(count) // _RANK_STEP) * _RANK_STEP, limits[block])
        return limits

    def _local_kernels(self, blocks: Sequence[Block], fresh: Mapping[Block, Fresh]) -> tuple[Tensor, list[torch.Size]]:
        """Kernels of all examples of some blocks, stacked ``[k, n, n]``, and their leading shapes."""
        grams = [kernel.gram(fresh[b].rows) for b in blocks]
        return stacks.joined(grams, 2), [x.shape[:-2] for x in grams]

    def _sampled(self, block: Block, rows: Rows, scores: Tensor, rank: int, purpose: str = "") -> Rows:
        """Rows drawn by their scores ``[(Γ,) n]``, weighted; a draw depends on layer, refresh and rank alone."""
        place = f" on rank {self.comm.rank}" if self.comm.combines else ""
        stream = zlib.crc32(f"{purpose}{block.name}{place}".encode())
        refresh: int = self.state[block.owner]["refreshes"]
        generator = torch.Generator().manual_seed(self._runtime.seed(stream, refresh))
        drawn = selection.draw(scores, rank, block.group["kis_sampling"], generator)
        return kernel.pick(rows, drawn.index, drawn.weight.to(rows.g.dtype))

    def _interpolated(
        self, blocks: Sequence[Block], fresh: Mapping[Block, Fresh], ranks: Mapping[Block, int]
    ) -> dict[Block, Kept]:
        """Rows that interpolate the others, with S."""
        kept: dict[Block, Kept] = {}
        kinds: dict[tuple[Any, ...], list[Block]] = {}
        for block in blocks:
            group, rows = block.group, fresh[block].rows
            key = (rows.n, rows.g.dtype, rows.g.device, ranks[block], group["kid_pivoting"], group["kid_residual"])
            kinds.setdefault(key, []).append(block)
        for (n, *_, rank, pivoting, residual), members in kinds.items():
            for some in stacks.bounded(members, lambda b, n=n: _batch(fresh[b].rows) * n * n):  # type: ignore[misc]
                local, leads = self._local_kernels(some, fresh)
                traces = stacks.parted(local.diagonal(dim1=-2, dim2=-1).sum(-1), leads)
                dampings = [self._damping_of(b, t, fresh[b]) for b, t in zip(some, traces, strict=True)]
                found = selection.interpolate(local, rank, order=selection.pivots(local, rank, pivoting))
                core = selection.core(_widened(local), found, stacks.joined(dampings, 0), residual)
                parts = [stacks.parted(t, leads) for t in (found.index, found.valid, core)]
                for block, damping, index, valid, own in zip(some, dampings, *parts, strict=True):
                    rows = fresh[block].rows
                    kept[block] = Kept(kernel.pick(rows, index, valid.to(rows.g.dtype)), damping, own)
        return kept

    # ------------------------------------------------------------------ stages 5 to 7
    def precondition_rows(self, block: Block, gradient: Tensor) -> Tensor:
        """``[V − Ĝᵀ diag(M ĵ) Â] / λ``, or without the division."""
        state, rows = self.state[block.owner], self.kept_rows(block)
        matrix = as_rows_matrix(rows, gradient)
        found = woodbury.apply(rows, state["kernel"], state["kernel_damping"], matrix).reshape(gradient.shape)
        if block.group["normalize_damping"]:
            lead = state["kernel_damping"][..., None, None] if gradient.dim() > 2 else state["kernel_damping"]
            found = found * lead.to(found.dtype)
        return found

    def _sources(self, blocks: Sequence[Block], gradients: Directions, gate: Tensor | None) -> Directions:
        """What to precondition, with the decay of the parameter where that is part of it."""
        source = super()._sources(blocks, gradients, gate)
        for block in blocks:
            for p in block.params:
                group = self._group[p]
                if group["weight_decay_mode"] == "reg" and group["weight_decay"]:
                    source[p] = source[p] + group["weight_decay"] * p
        return source

    def _rule(self, p: nn.Parameter, group: Group, preconditioned: bool) -> str:
        rule = super()._rule(p, group, preconditioned)
        return "decayed" if preconditioned and rule == "sgd" and group["weight_decay_mode"] == "reg" else rule

    def _apply_rule(
        self, rule: str, params: list[nn.Parameter], group: Group, directions: list[Tensor], gate: Tensor | None
    ) -> None:
        if rule == "decayed":
            rule, group = "sgd", {**group, "weight_decay": 0.0}
        super()._apply_rule(rule, params, group, directions, gate)

    # ------------------------------------------------------------------ what it tells
    def curvature_of_rows(self, block: Block) -> Tensor:
        """F̂ of the rows that are kept, ``[(Γ,) n, n]``."""
        state, rows = self.state[block.owner], self.kept_rows(block)
        if bool(state["interpolated"]):
            return woodbury.curvature(rows, state["kernel"], state["kernel_damping"])
        return woodbury.second_moment(rows)

    def diagnostics(self) -> dict[str, Any]:
        """Counters, modes and ranks as plain numbers; reading them may wait for the device."""
        factored = bool(self._blocks) and all(self.is_factored(b) for b in self._blocks)
        modes = ["kfac" if factored else self._auto_mode] * len(self.param_groups)
        modes = [g["mode"] if g["mode"] != "auto" else mode for g, mode in zip(self.param_groups, modes, strict=True)]
        ranks = {b.name: self.kept_rows(b).n for b in self._blocks if "rows_g" in self.state[b.owner]}
        return super().diagnostics() | {
            "damping": [group["damping"] for group in self.param_groups],
            "mode": modes[0],
            "modes": modes,
            "mode_by_layer": {b.name: "kfac" if self.is_factored(b) else self._mode_in(b.group) for b in self._blocks},
            "switches": [list(switch) for switch in self._switches],
            "rank": ranks,
        }


def _modes(params: Any, mode: str) -> set[str]:
    """Modes of the groups that a constructor was given."""
    groups = [g for g in params if isinstance(g, dict)] if isinstance(params, (list, tuple)) else []
    return {str(group.get("mode", mode)) for group in groups} or {mode}


def _batch(rows: Rows) -> int:
    """Γ, or 1."""
    return rows.g.shape[:-3].numel()


def _widened(x: Tensor) -> Tensor:
    """A kernel in the precision that it is factorised in."""
    return x.double() if x.shape[-1] <= DOUBLE_ROWS else x
