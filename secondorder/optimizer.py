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
from secondorder.direction import Directing, Directions, rate
from secondorder.lifecycle import Group, module_and_params
from secondorder.linalg import all_true_on_cpu, full_precision

log = logging.getLogger("secondorder")


class SecondOrderOptimizer(Checkpointing, Reporting, Directing):
    """Base of all methods: a method supplies its statistic and a few verbs, never its own ``step``.

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
            lr = rate(group["lr"]) if rule == "adamw" else self._fallback_lr(group)
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
            tensors, directions, buffers, lr=rate(group["lr"]), momentum=momentum, weight_decay=decay,
            nesterov=group["nesterov"] and momentum > 0, decoupled=decoupled, gate=gate,
        )  # fmt: skip

    def _fallback_lr(self, group: Group) -> Any:
        """The fallback's own rate, moved by the schedule of ``lr`` in proportion."""
        own = group["fallback_lr"]
        if own is None:
            if group["graft"] is not None:
                return rate(group["lr"])
            own = 1e-3
        return own * (rate(group["lr"]) / group["fallback_base_lr"]) if group["fallback_base_lr"] else own

    def _count_updates(self, gradients: Directions) -> None:
        torch._foreach_add_([self.state[p]["step"] for p in gradients], 1.0)

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
                stacklevel=5,  # past the two wrappers that torch puts around `step`
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
