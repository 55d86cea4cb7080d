"""The one ``step()`` that every method shares."""

from __future__ import annotations

import logging
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast, overload

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT
from torch.profiler import record_function

from secondorder import options, update
from secondorder.checkpoint import Checkpointing
from secondorder.comm import CommStrategy
from secondorder.curvature.block import Block, SkipRule
from secondorder.curvature.capture import Captured, Statistic
from secondorder.curvature.statistics import all_finite
from secondorder.diagnostics.report import Reporting
from secondorder.lifecycle import Group, module_and_params
from secondorder.linalg import all_true_on_cpu, full_precision

log = logging.getLogger("secondorder")

Directions = dict[nn.Parameter, Tensor]


class SecondOrderOptimizer(Checkpointing, Reporting):
    """Base of all methods: a method supplies its statistic and four verbs, never its own ``step``.

    The verbs: :meth:`curvature_spec` (state of a block), :meth:`new_statistic`, :meth:`update_estimate`,
    :meth:`refresh`, :meth:`precondition`.

    Args:
        params: What ``torch.optim`` takes, or a module.
        defaults: Group options.
        module: Module to hook when ``params`` is not one.
        comm: Communication strategy; None means one process.
        skip_layers: Layers to leave out.
        stagger: Spread refreshes over the interval.
        refresh_warmup: Refresh often at first.
        grad_scaler: Loss scaler of float16 training.
        max_failures: Failed refreshes of a block in a row before an error.

    Raises:
        ValueError: Without a module, or for a bad option.
        NotImplementedError: In a process group of more than one rank.
    """

    def __init__(
        self,
        params: ParamsT | nn.Module,
        defaults: dict[str, Any],
        *,
        module: nn.Module | None,
        comm: CommStrategy | None,
        skip_layers: Sequence[SkipRule] | SkipRule,
        stagger: bool,
        refresh_warmup: bool,
        grad_scaler: Any,
        max_failures: int,
    ) -> None:
        root, given = module_and_params(type(self).__name__, params, module)
        options.flag("stagger", stagger)
        options.flag("refresh_warmup", refresh_warmup)
        options.whole(1)("max_failures", max_failures)
        defaults = {key: options.plain(value) for key, value in defaults.items()}
        defaults["fallback"] = options.resolve_fallback(defaults["fallback"], defaults["graft"])
        options.validate(defaults, {**options.COMMON, **self.checks})
        self._begin_life(skip_layers, stagger, refresh_warmup, max_failures, comm)
        super().__init__(given, defaults)
        self.grad_scaler = grad_scaler
        self._connect(root)
        self._warn_uncovered()

    # ------------------------------------------------------------------ what a method supplies
    @abstractmethod
    def update_estimate(self, block: Block, statistic: Statistic, examples: int, gate: Tensor | None) -> Tensor:
        """Fold a statistic into the running estimate; returns whether it was finite (0-dim bool)."""

    @abstractmethod
    def precondition(self, block: Block, gradient: Tensor) -> Tensor:
        """Apply the inverse curvature of a block to a gradient matrix ``[(Γ,) n_g, n_a]``."""

    # ------------------------------------------------------------------ the step
    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Perform one optimization step.

        Args:
            closure: Re-evaluates the model and returns the loss; called once, with gradients enabled.

        Returns:
            What the closure returned.

        Raises:
            RuntimeError: If the optimizer lost its module (after a copy), or a refresh failed ``max_failures`` times.
        """
        capture = self._require_capture()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradients = self._gradients()
        if not gradients:
            capture.discard()
            return loss
        with record_function("secondorder.statistics"):
            captured = self.comm.reduce_statistics(capture.take())
            ok, gate = self._inspect(gradients)
            if ok:
                self._update_estimates(captured, gate)
        if ok:
            self._warn_uncaptured(captured, gradients)
            with record_function("secondorder.refresh"):
                self.comm.share_curvature(self._refresh_due())
            self._count_updates(gradients)
            with record_function("secondorder.precondition"):
                directions = self._directions(gradients, gate)
            with record_function("secondorder.update"):
                self._apply(gradients, directions, gate)
        self._advance()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients, and with them the statistics captured since the last step."""
        super().zero_grad(set_to_none)
        if self._capture is not None:
            self._capture.discard()

    # ------------------------------------------------------------------ stages 0 to 3: gradients and statistics
    def _gradients(self) -> Directions:
        """Dense gradients, negated in groups that maximize."""
        found: Directions = {}
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    grad = p.grad.to_dense() if p.grad.layout != torch.strided else p.grad
                    found[p] = -grad if group["maximize"] else grad
        return found

    def _inspect(self, gradients: Directions) -> tuple[bool, Tensor | None]:
        """Drop a batch with a non-finite gradient whole: on the CPU by not stepping, else by a gate on the device."""
        finite = all_finite([torch.view_as_real(g) if g.is_complex() else g for g in gradients.values()])
        if finite.device.type == "cpu":
            good = all_true_on_cpu(finite)
            self._skipped_steps += not good
            return good, None
        self._skipped_on_device = self._skipped_on_device + (~finite).to(torch.int64)
        return True, finite

    def _update_estimates(self, captured: Captured, gate: Tensor | None) -> None:
        for index, statistic in captured.statistics.items():
            block, examples = self._blocks[index], captured.examples[index]
            if examples == 0:
                continue
            finite = self.update_estimate(block, statistic, examples, gate)
            on_cpu = finite.device.type == "cpu"
            dropped = not all_true_on_cpu(finite) if on_cpu else (~finite).to(torch.int64)
            if dropped is not False:
                self._skipped_statistics[block.name] = self._skipped_statistics.get(block.name, 0) + dropped
            if dropped is not True:
                self.state[block.owner]["factor_updates"] += 1

    # ------------------------------------------------------------------ stage 4: refresh
    def _refresh_due(self) -> list[int]:
        due = [b for b in self._blocks if self._refresh_is_due(b)]
        if not due:
            return []
        for blocks, outcome, arrived in self._unjudged:
            arrived.synchronize()
            self._judge(blocks, outcome)
        self._unjudged.clear()
        due, look = self._with_estimates(due)
        if not due:
            return []
        with full_precision(due[0].owner.device):
            ok = self.refresh(due, look)
        if look:
            self._judge(due, ok.cpu())
        else:
            # Judged at the next refresh, when the answer has long arrived and nobody waits for it.
            arrived = torch.Event(ok.device)
            outcome = ok.to("cpu", non_blocking=True)
            arrived.record()
            self._unjudged.append((due, outcome, arrived))
        for block in due:
            state = self.state[block.owner]
            if block.name in self._failures:
                self._failed_at[block.name] = state["factor_updates"]
            else:
                state["refreshes"] += 1
        return [b.index for b in due]

    def _with_estimates(self, due: list[Block]) -> tuple[list[Block], bool]:
        """Blocks that have an estimate, and whether the host looks at how their refresh ends.

        It does on the CPU, where that is free, and on a device at the first refresh of a block and after a failure.

        Returns:
            The blocks, and whether to look.
        """
        if all(b.owner.device.type == "cpu" for b in due):
            return due, True
        new = [b for b in due if self.state[b.owner]["refreshes"] == 0]
        if new:
            weights = torch.stack([self.state[b.owner]["factor_weight"] for b in new]).cpu().numpy()
            for block, weight in zip(new, weights, strict=True):
                if weight == 0:  # its only batch was not finite
                    self.state[block.owner]["factor_updates"] = 0
                    due = [b for b in due if b is not block]
        return due, bool(new) or any(b.name in self._failures for b in due)

    def _refresh_is_due(self, block: Block) -> bool:
        state, interval = self.state[block.owner], block.group["inv_update_steps"]
        if interval == 0 or state["factor_updates"] == 0:
            return False
        if state["refreshes"] == 0:  # the same factors would only fail again
            return bool(state["factor_updates"] > self._failed_at.get(block.name, 0))
        if self._refresh_warmup and self._t < interval:
            return self._t & (self._t - 1) == 0
        phase = block.index * interval // len(self._blocks) if self._stagger else 0
        return bool((self._t - phase) % interval == 0)

    def _judge(self, blocks: Sequence[Block], ok: Tensor) -> None:
        """Count refreshes that failed in a row, and give up at ``max_failures``."""
        for block, good in zip(blocks, ok.numpy(), strict=True):
            if good:
                self._failures.pop(block.name, None)
                continue
            count = self._failures[block.name] = self._failures.get(block.name, 0) + 1
            self._failed_refreshes += 1
            log.warning("refresh of layer %r failed (%d in a row); its last good one stays", block.name, count)
            if count >= self._max_failures:
                raise RuntimeError(
                    f"the factors of layer '{block.name}' could not be factorised {count} times in a row, even with "
                    "jitter and in float64. Raise damping, lower lr, or leave the layer out with skip_layers."
                )

    # ------------------------------------------------------------------ stages 5 and 6: directions
    def _active(self, block: Block, gradients: Directions) -> bool:
        """Whether a block preconditions in this step."""
        ready = block.group["inv_update_steps"] > 0 and self.state[block.owner]["refreshes"] > 0
        return bool(ready) and all(p in gradients for p in block.params)

    def _directions(self, gradients: Directions, gate: Tensor | None) -> Directions:
        """Preconditioned, bounded directions of the parameters of active blocks."""
        active = [b for b in self._blocks if self._active(b, gradients)]
        if not active:
            return {}
        source = self._adam_sources(active, gradients, gate)
        directions: Directions = {}
        with full_precision(active[0].owner.device):
            for block in active:
                matrix = block.matrix([source[p].to(self._precision(p)) for p in block.params])
                parts = block.split(self.precondition(block, matrix))
                directions.update(zip(block.params, parts, strict=True))
        parameters = list(directions)
        shared = self.comm.share_directions(list(directions.values()))
        directions = dict(zip(parameters, shared, strict=True))
        self._kl_clip(directions, self._guard(active, directions, source))
        self._graft(active, directions, gradients)
        self._clip(directions)
        return {p: d.to(p.dtype) for p, d in directions.items()}

    def _adam_sources(self, blocks: Sequence[Block], gradients: Directions, gate: Tensor | None) -> Directions:
        """What to precondition: the gradient, or Adam's bias-corrected first moment where Adam gives the size."""
        source = {p: gradients[p] for b in blocks for p in b.params}
        for group in self.param_groups:
            members = [p for p in group["params"] if p in source and self._grafts_adam(p)]
            if not members:
                continue
            means, squares = self._moments(members)
            update.adam_moments_([gradients[p] for p in members], means, squares, group["fallback_betas"], gate)
            for p, mean in zip(members, means, strict=True):
                source[p] = mean / (1 - group["fallback_betas"][0] ** self._steps_of(p))
        return source

    def _grafts_adam(self, p: nn.Parameter) -> bool:
        return bool(self._block_of[p].group["graft"] == "adam")

    def _guard(self, blocks: Sequence[Block], directions: Directions, source: Directions) -> Directions:
        """A block whose direction is not finite takes its gradient for this step.

        Returns:
            ``⟨direction, source⟩`` by parameter: they are not finite where a direction is not, and kl-clip needs them.
        """
        products = {p: update.inner_product(d, source[p].to(d.dtype)) for p, d in directions.items()}
        finite = torch.isfinite(torch.stack([x.to(torch.float32) for x in products.values()]))
        if finite.device.type == "cpu" and all_true_on_cpu(finite):
            return products
        for block in blocks:
            good = torch.isfinite(torch.stack([products[p] for p in block.params])).all()
            for p in block.params:
                plain = source[p].to(directions[p].dtype)
                directions[p] = torch.where(good, directions[p], plain)
                products[p] = torch.where(good, products[p], update.inner_product(plain, plain))
        return products

    def _kl_clip(self, directions: Directions, products: Directions) -> None:
        clipped = [p for p in directions if self._group[p].get("kl_clip") and not self._grafted(p)]
        if not clipped:
            return
        terms, lrs = [products[p] for p in clipped], [_rate(self._group[p]["lr"]) for p in clipped]
        for limit in {self._group[p]["kl_clip"] for p in clipped}:
            self._kl_factor = factor = update.kl_clip_factor(terms, lrs, limit)
            torch._foreach_mul_([directions[p] for p in clipped if self._group[p]["kl_clip"] == limit], factor)

    def _grafted(self, p: nn.Parameter) -> bool:
        return self._block_of[p].group["graft"] is not None

    def _graft(self, blocks: Sequence[Block], directions: Directions, gradients: Directions) -> None:
        """Give each block the step size of the rule named by ``graft``."""
        for block in blocks:
            rule = block.group["graft"]
            if rule is None:
                continue
            own = [directions[p] for p in block.params]
            wanted = [gradients[p] for p in block.params]
            if rule == "adam":
                wanted = [self._adam_step(p) for p in block.params]
            size, length = (torch.linalg.vector_norm(update.norms(x)) for x in (wanted, own))
            torch._foreach_mul_(own, torch.where(length > 0, size / length, torch.ones_like(length)).to(own[0].dtype))

    def _adam_step(self, p: nn.Parameter) -> Tensor:
        (beta1, beta2), eps = self._group[p]["fallback_betas"], self._group[p]["fallback_eps"]
        state, step = self.state[p], self._steps_of(p)
        (root,) = update.adam_denominators([state["exp_avg_sq"]], [step], beta2, eps)
        return cast("Tensor", state["exp_avg"] / (1 - beta1**step) / root)

    def _clip(self, directions: Directions) -> None:
        limited = [p for p in directions if self._group[p]["clip_norm"] is not None]
        if limited:
            total = torch.linalg.vector_norm(update.norms([directions[p] for p in limited]))
            for p in limited:
                directions[p].mul_((self._group[p]["clip_norm"] / (total + 1e-12)).clamp(max=1).to(directions[p].dtype))
        for p, direction in directions.items():
            if (bound := self._group[p]["clip_value"]) is not None:
                direction.clamp_(-bound, bound)

    # ------------------------------------------------------------------ stage 7: update
    def _apply(self, gradients: Directions, directions: Directions, gate: Tensor | None) -> None:
        for group in self.param_groups:
            by_rule: dict[str, list[nn.Parameter]] = {}
            for p in group["params"]:
                if p in gradients:
                    by_rule.setdefault(self._rule(p, group, p in directions), []).append(p)
            for rule, members in by_rule.items():
                for part in _foreach_parts(members, group["foreach"]):
                    self._apply_rule(rule, part, group, [directions.get(p, gradients[p]) for p in part], gate)

    def _rule(self, p: nn.Parameter, group: Group, preconditioned: bool) -> str:
        """First-order rule of a parameter in this step."""
        block = self._block_of.get(p)
        if block is None:
            return "fallback_adamw" if group["fallback"] == "adamw" else "sgd"
        graft = block.group["graft"]
        if preconditioned:
            return "plain" if graft == "adam" else str(group["inner"])
        if group["inv_update_steps"] == 0 or graft is not None or group["inner"] == "adamw":
            return "adamw" if "adam" in (graft or group["inner"]) else "sgd"
        return "fallback_adamw" if group["fallback"] == "adamw" else "sgd"

    def _apply_rule(
        self, rule: str, params: list[nn.Parameter], group: Group, directions: list[Tensor], gate: Tensor | None
    ) -> None:
        tensors = cast("list[Tensor]", params)
        decay = group["weight_decay"]
        if rule in ("adamw", "fallback_adamw"):
            means, squares = self._moments(params)
            lr = _rate(group["lr"]) if rule == "adamw" else self._fallback_lr(group)
            update.adamw_(
                _as_real(tensors), _as_real(directions), _as_real(means), _as_real(squares),
                [self._steps_of(p) for p in params], lr=lr, betas=group["fallback_betas"], eps=group["fallback_eps"],
                weight_decay=decay, gate=gate,
            )  # fmt: skip
            return
        momentum = 0.0 if rule == "plain" else group["momentum"]
        buffers = [self._rule_state(p, "momentum_buffer") for p in params] if momentum else None
        decoupled = group["decoupled_weight_decay"]
        update.sgd_(
            tensors, directions, buffers, lr=_rate(group["lr"]), momentum=momentum, weight_decay=decay,
            nesterov=group["nesterov"] and momentum > 0, decoupled=decoupled, gate=gate,
        )  # fmt: skip

    def _fallback_lr(self, group: Group) -> Any:
        """The fallback's own rate, moved by the schedule of ``lr`` in proportion."""
        own = group["fallback_lr"]
        if own is None:
            if group["graft"] is not None:
                return _rate(group["lr"])
            own = 1e-3
        return own * (_rate(group["lr"]) / group["fallback_base_lr"]) if group["fallback_base_lr"] else own

    def _count_updates(self, gradients: Directions) -> None:
        torch._foreach_add_([self.state[p]["step"] for p in gradients], 1.0)

    def _steps_of(self, p: nn.Parameter) -> float:
        return float(self.state[p]["step"].numpy())

    # ------------------------------------------------------------------ stage 10: schedule
    def _advance(self) -> None:
        self._t += 1
        self.state[self._first]["global_step"] = self._t
        self._sync_blocks()
        self._arm()

    def _warn_uncaptured(self, captured: Captured, gradients: Directions) -> None:
        """Say once, by name, which layers have a gradient but nothing captured though it was due."""
        assert self._capture is not None
        missed = {}
        if self._capture.was_paused:
            self._capture.was_paused = False
            return
        for i in self._capture.due | set(self._capture.refused):
            block = self._blocks[i]
            if i not in captured.statistics and block.name not in self._warned and block.owner in gradients:
                missed[block.name] = self._capture.refused.get(i, "its hooks did not run")
        if missed:
            self._warned.update(missed)
            lines = "; ".join(f"{name}: {reason}" for name, reason in missed.items())
            warnings.warn(
                f"{type(self).__name__}: nothing was captured for layers that have a gradient, so they follow the "
                f"fallback or an old estimate ({lines}). Usual causes: the model was in eval mode, or torch.compile "
                "ran it before the optimizer was made (then make the optimizer first, or call torch.compiler.reset()).",
                stacklevel=3,
            )


def _foreach_parts(params: list[nn.Parameter], foreach: bool | None) -> Iterator[list[nn.Parameter]]:
    """Lists to update in one call: all of one device and dtype, or one by one (torch's default on the CPU)."""
    if not params:
        return
    if foreach is False or (foreach is None and params[0].device.type == "cpu"):
        yield from ([p] for p in params)
        return
    kinds: dict[tuple[torch.device, torch.dtype], list[nn.Parameter]] = {}
    for p in params:
        kinds.setdefault((p.device, p.dtype), []).append(p)
    yield from kinds.values()


def _as_real(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.view_as_real(t) if t.is_complex() else t for t in tensors]


def _rate(lr: Any) -> Any:
    """A learning rate as a number or a 0-dim tensor."""
    return lr.reshape(()) if isinstance(lr, Tensor) else lr
