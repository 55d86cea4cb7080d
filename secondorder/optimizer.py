"""The one ``step()`` that every method shares, with its lifecycle and state."""

from __future__ import annotations

import logging
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, cast, overload

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, ParamsT
from torch.profiler import record_function

from secondorder import checkpoint, options, update
from secondorder.comm import CommStrategy, Local
from secondorder.curvature.block import Block, Plan, SkipRule, clean_name, plan_blocks, unwrap
from secondorder.curvature.capture import Capture, Captured, Site, Statistic
from secondorder.curvature.statistics import all_finite
from secondorder.diagnostics.describe import Row, human_bytes, render
from secondorder.linalg import all_true_on_cpu, full_precision

log = logging.getLogger("secondorder")

Group = dict[str, Any]
Directions = dict[nn.Parameter, Tensor]


class SecondOrderOptimizer(Optimizer):
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
        grad_scaler: Loss scaler of float16 training.
        max_failures: Failed refreshes of a block in a row before an error.

    Raises:
        ValueError: Without a module, or for a bad option.
        NotImplementedError: In a process group of more than one rank.
    """

    #: Checks of the options that only this method has.
    checks: ClassVar[dict[str, options.Check]] = {}
    #: Kind in ``memory_usage()`` by state key.
    kinds: ClassVar[dict[str, str]] = {}

    def __init__(
        self,
        params: ParamsT | nn.Module,
        defaults: dict[str, Any],
        *,
        module: nn.Module | None,
        comm: CommStrategy | None,
        skip_layers: Sequence[SkipRule],
        stagger: bool,
        grad_scaler: Any,
        max_failures: int,
    ) -> None:
        root, given = _module_and_params(type(self).__name__, params, module)
        options.flag("stagger", stagger)
        options.whole(1)("max_failures", max_failures)
        defaults["fallback"] = options.resolve_fallback(defaults["fallback"], defaults["graft"])
        options.validate(defaults, {**options.COMMON, **self.checks})
        self._begin_life(skip_layers, stagger, max_failures, comm)
        super().__init__(given, defaults)
        self._connect(root, grad_scaler)
        self._warn_uncovered()

    # ------------------------------------------------------------------ what a method supplies
    @abstractmethod
    def curvature_spec(self, block: Block, group: Mapping[str, Any]) -> dict[str, Tensor | int]:
        """Initial curvature state of a block; tensors on the device of its owner."""

    @abstractmethod
    def new_statistic(self, block: Block, group: Group) -> Statistic:
        """An empty pending statistic of a block."""

    @abstractmethod
    def update_estimate(self, block: Block, statistic: Statistic, examples: int, gate: Tensor | None) -> Tensor:
        """Fold a statistic into the running estimate; returns whether it was finite (0-dim bool)."""

    @abstractmethod
    def refresh(self, blocks: Sequence[Block], host_checks: bool) -> Tensor:
        """Recompute what preconditioning needs from the estimates; returns ``ok [len(blocks)]``."""

    @abstractmethod
    def precondition(self, block: Block, gradient: Tensor) -> Tensor:
        """Apply the inverse curvature of a block to a gradient matrix ``[(Γ,) n_g, n_a]``."""

    @abstractmethod
    def block_curvature(self, block: Block) -> Tensor:
        """The undamped curvature of a block as a dense matrix."""

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
        """Drop a batch with a non-finite gradient whole: on the CPU by not stepping, elsewhere by a gate on the device."""
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
            if finite.device.type == "cpu" and not all_true_on_cpu(finite):
                self._skipped_statistics[block.name] = self._skipped_statistics.get(block.name, 0) + 1
                continue
            self.state[block.owner]["factor_updates"] += 1

    # ------------------------------------------------------------------ stage 4: refresh
    def _refresh_due(self) -> list[int]:
        due = [b for b in self._blocks if self._refresh_is_due(b)]
        if not due:
            return []
        on_cpu = all(b.owner.device.type == "cpu" for b in due)
        # The first factorisation of a block is always looked at; later ones on a device only through their results.
        first = any(self.state[b.owner]["refreshes"] == 0 for b in due)
        with full_precision(due[0].owner.device):
            ok = self.refresh(due, on_cpu or first)
        if on_cpu or first:
            self._judge(due, ok.cpu())
        for block in due:
            if self._failures.get(block.name, 0) == 0:
                self.state[block.owner]["refreshes"] += 1
        return [b.index for b in due]

    def _refresh_is_due(self, block: Block) -> bool:
        state, interval = self.state[block.owner], self._group_of(block)["inv_update_steps"]
        if interval == 0 or state["factor_updates"] == 0:
            return False
        phase = block.index * interval // len(self._blocks) if self._stagger else 0
        return state["refreshes"] == 0 or (self._t - phase) % interval == 0

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
        return (
            self._group_of(block)["inv_update_steps"] > 0
            and self.state[block.owner]["refreshes"] > 0
            and all(p in gradients for p in block.params)
        )

    def _directions(self, gradients: Directions, gate: Tensor | None) -> Directions:
        """Preconditioned, bounded directions of the parameters of active blocks."""
        active = [b for b in self._blocks if self._active(b, gradients)]
        if not active:
            return {}
        source = self._adam_sources(active, gradients, gate)
        directions: Directions = {}
        for block in active:
            with full_precision(block.owner.device):
                matrix = block.matrix([source[p].to(self._precision(p)) for p in block.params])
                parts = block.split(self.precondition(block, matrix))
            directions.update(zip(block.params, parts, strict=True))
        parameters = list(directions)
        shared = self.comm.share_directions(list(directions.values()))
        directions = dict(zip(parameters, shared, strict=True))
        self._guard(active, directions, source)
        self._kl_clip(directions, gradients)
        self._graft(active, directions, gradients)
        self._clip(directions)
        return {p: d.to(p.dtype) for p, d in directions.items()}

    def _adam_sources(self, blocks: Sequence[Block], gradients: Directions, gate: Tensor | None) -> Directions:
        """What to precondition: the gradient, or Adam's bias-corrected first moment where Adam gives the size."""
        source = {p: gradients[p] for b in blocks for p in b.params}
        for group in self.param_groups:
            members = [p for p in group["params"] if p in source and self._is_adam_grafted(p)]
            if not members:
                continue
            means, squares = self._moments(members)
            update.adam_moments_([gradients[p] for p in members], means, squares, group["fallback_betas"], gate)
            for p, mean in zip(members, means, strict=True):
                source[p] = mean / (1 - group["fallback_betas"][0] ** self._steps_of(p))
        return source

    def _guard(self, blocks: Sequence[Block], directions: Directions, source: Directions) -> None:
        """A block whose direction is not finite takes its gradient for this step."""
        finite = [all_finite([directions[p] for p in b.params]) for b in blocks]
        if all(f.device.type == "cpu" for f in finite) and all_true_on_cpu(torch.stack(finite)):
            return
        for block, good in zip(blocks, finite, strict=True):
            for p in block.params:
                directions[p] = torch.where(good, directions[p], source[p].to(directions[p].dtype))

    def _kl_clip(self, directions: Directions, gradients: Directions) -> None:
        clipped = [p for p in directions if self._group[p].get("kl_clip") and self._group[p]["graft"] is None]
        if not clipped:
            return
        products = [update.inner_product(directions[p], gradients[p].to(directions[p].dtype)) for p in clipped]
        lrs = [self._group[p]["lr"] for p in clipped]
        for limit in {self._group[p]["kl_clip"] for p in clipped}:
            factor = update.kl_clip_factor(products, lrs, limit)
            self._kl_factor = factor
            members = [directions[p] for p in clipped if self._group[p]["kl_clip"] == limit]
            torch._foreach_mul_(members, factor)

    def _graft(self, blocks: Sequence[Block], directions: Directions, gradients: Directions) -> None:
        """Give each block the step size of the rule named by ``graft``."""
        for block in blocks:
            rule = self._group_of(block)["graft"]
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
        return state["exp_avg"] / (1 - beta1**step) / root

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
            for rule in ("plain", "sgd", "adamw", "fallback_adamw"):
                members = [p for p in group["params"] if p in gradients and self._rule(p, group, directions) == rule]
                for part in _foreach_parts(members, group["foreach"]):
                    self._apply_rule(rule, part, group, [directions.get(p, gradients[p]) for p in part], gate)

    def _rule(self, p: nn.Parameter, group: Group, directions: Directions) -> str:
        """First-order rule of a parameter in this step."""
        block = self._block_of.get(p)
        if p in directions:
            return "plain" if group["graft"] == "adam" else str(group["inner"])
        if block is not None and (group["inv_update_steps"] == 0 or group["graft"] is not None):
            return "adamw" if "adam" in (group["graft"] or group["inner"]) else "sgd"
        return "fallback_adamw" if group["fallback"] == "adamw" else "sgd"

    def _apply_rule(
        self, rule: str, params: list[nn.Parameter], group: Group, directions: list[Tensor], gate: Tensor | None
    ) -> None:
        tensors = cast("list[Tensor]", params)
        decay = group["weight_decay"]
        if rule in ("adamw", "fallback_adamw"):
            means, squares = self._moments(params)
            lr = group["lr"] if rule == "adamw" else self._fallback_lr(group)
            lists = [_as_real(x) for x in (tensors, directions, means, squares)]
            steps = [self._steps_of(p) for p in params]
            betas, eps = group["fallback_betas"], group["fallback_eps"]
            update.adamw_(*lists, steps, lr=lr, betas=betas, eps=eps, weight_decay=decay, gate=gate)
            return
        momentum = 0.0 if rule == "plain" else group["momentum"]
        buffers = [self._rule_state(p, "momentum_buffer") for p in params] if momentum else None
        decoupled = group["decoupled_weight_decay"]
        update.sgd_(
            tensors, directions, buffers, lr=group["lr"], momentum=momentum, weight_decay=decay,
            nesterov=group["nesterov"] and momentum > 0, decoupled=decoupled, gate=gate,
        )  # fmt: skip

    def _fallback_lr(self, group: Group) -> Any:
        """The fallback's own rate, moved by the schedule of ``lr`` in proportion."""
        own = group["fallback_lr"]
        if own is None:
            if group["graft"] is not None:
                return group["lr"]
            own = 1e-3
        return own * (group["lr"] / group["fallback_base_lr"]) if group["fallback_base_lr"] else own

    def _rule_state(self, p: nn.Parameter, key: str) -> Tensor:
        state = self.state[p]
        if key not in state:
            state[key] = torch.zeros_like(p, memory_format=torch.preserve_format)
        return cast(Tensor, state[key])

    def _moments(self, params: Sequence[nn.Parameter]) -> tuple[list[Tensor], list[Tensor]]:
        return [self._rule_state(p, "exp_avg") for p in params], [self._rule_state(p, "exp_avg_sq") for p in params]

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

    def _arm(self) -> None:
        """Have captured what the coming step will use."""
        capture = self._capture
        if capture is not None:
            capture.grad_scaler = self.grad_scaler
            capture.arm(b.index for b in self._blocks if self._capture_is_due(b))

    def _capture_is_due(self, block: Block) -> bool:
        group = self._group_of(block)
        if group["inv_update_steps"] == 0:
            return False
        return self.state[block.owner]["factor_updates"] == 0 or self._t % group["factor_update_steps"] == 0

    def _warn_uncaptured(self, captured: Captured, gradients: Directions) -> None:
        """Say once, by name, which layers have a gradient but nothing captured though it was due."""
        assert self._capture is not None
        missed = {}
        for i in self._capture.due | set(self._capture.refused):
            block = self._blocks[i]
            if i not in captured.statistics and block.name not in self._warned and block.owner in gradients:
                missed[block.name] = self._capture.refused.get(i, "its hooks did not run")
        if missed:
            self._warned.update(missed)
            lines = "; ".join(f"{name}: {reason}" for name, reason in missed.items())
            warnings.warn(
                f"{type(self).__name__}: nothing was captured for layers that have a gradient, so they follow the fallback "
                f"or an old estimate ({lines}). Usual causes: the model was in eval mode, or torch.compile ran it before "
                "the optimizer was made (then make the optimizer first, or call torch.compiler.reset()).",
                stacklevel=3,
            )

    # ------------------------------------------------------------------ lifecycle
    def _begin_life(
        self, skip: Sequence[SkipRule], stagger: bool, max_failures: int, comm: CommStrategy | None
    ) -> None:
        if isinstance(skip, (str, type, nn.Module)):
            raise TypeError(f"skip_layers must be a sequence of rules, got {skip!r}")
        self._skip: list[SkipRule] = list(skip)
        self._stagger, self._max_failures = stagger, max_failures
        self.comm: CommStrategy = comm if comm is not None else Local()
        self._scaler: Any = None
        self._t = 0
        self._capture: Capture | None = None
        self._root: nn.Module | None = None
        self._closed = False
        self._blocks: list[Block] = []
        self._block_of: dict[nn.Parameter, Block] = {}
        self._group: dict[nn.Parameter, Group] = {}
        self._reasons: dict[nn.Parameter, str] = {}
        self._names: dict[nn.Parameter, str] = {}
        self._skipped_by_user: set[nn.Parameter] = set()
        self._signature: tuple[bool, ...] = ()
        self._failures: dict[str, int] = {}
        self._failed_refreshes = 0
        self._skipped_steps = 0
        self._skipped_on_device: Tensor | int = 0
        self._skipped_statistics: dict[str, int] = {}
        self._kl_factor: Tensor | None = None
        self._warned: set[str] = set()

    def _connect(self, root: nn.Module, grad_scaler: Any) -> None:
        self._root = unwrap(root)
        self._scaler = grad_scaler
        self._rebuild()
        self.comm.bind([b.name for b in self._blocks])
        self._hook()

    def _hook(self) -> None:
        if self._capture is not None:
            self._capture.close()
        assert self._root is not None
        sites = [self._site(b) for b in self._blocks]
        self._capture = Capture([self._root], sites)
        self._closed = False
        self._arm()

    def _site(self, block: Block) -> Site:
        return Site(
            block.name, block.modules, block.adapter, block.owner,
            lambda: self.new_statistic(block, self._group_of(block)),
        )  # fmt: skip

    def _rebuild(self) -> None:
        """Plan the blocks anew and allocate what is missing; state that still fits is kept."""
        assert self._root is not None
        self._group = {p: g for g in self.param_groups for p in g["params"]}
        self._first = next(iter(self._group))
        trained = [p for p in self._group if p.requires_grad]
        plan = plan_blocks(self._root, trained, self._skip)
        self._adopt_plan(plan)
        self._signature = self._trainable()
        for p in self._group:
            self._init_parameter(p)
        self.state[self._first].setdefault("global_step", self._t)

    def _adopt_plan(self, plan: Plan) -> None:
        self._blocks, self._reasons, self._skipped_by_user = plan.blocks, plan.reasons, plan.skipped_by_user
        self._block_of = {p: b for b in self._blocks for p in b.params}
        assert self._root is not None
        inside = {p: clean_name(n) for n, p in self._root.named_parameters()}
        for i, group in enumerate(self.param_groups):
            given = group.get("param_names")
            for j, p in enumerate(group["params"]):
                self._names[p] = given[j] if given else inside.get(p, f"group {i} parameter {j}")
                if p not in inside:
                    self._reasons[p] = "not a parameter of the hooked module"
                elif not p.requires_grad:
                    self._reasons[p] = "frozen"

    def _init_parameter(self, p: nn.Parameter) -> None:
        state, group, block = self.state[p], self._group[p], self._block_of.get(p)
        state.setdefault("step", torch.zeros((), dtype=torch.float32))
        wanted: dict[str, Tensor | int] = {}
        if block is not None and block.owner is p:
            wanted = self.curvature_spec(block, group)
        stale = any(k in state and _shape(state[k]) != _shape(v) for k, v in wanted.items())
        for key in [k for k in state if k in self.kinds and (k not in wanted or stale)]:
            del state[key]
        for key, value in wanted.items():
            state.setdefault(key, value)
        if p.requires_grad:
            self._init_rule(p, group)

    def _init_rule(self, p: nn.Parameter, group: Group) -> None:
        """Allocate what the parameter's usual rule keeps, so that state never depends on which gradients came first."""
        covered = p in self._block_of
        adam = ("adam" in (group["graft"] or group["inner"])) if covered else group["fallback"] == "adamw"
        if adam:
            self._moments([p])
        elif group["momentum"]:
            self._rule_state(p, "momentum_buffer")

    def _trainable(self) -> tuple[bool, ...]:
        return tuple(p.requires_grad for g in self.param_groups for p in g["params"])

    def _sync_blocks(self) -> None:
        """Follow layers that were frozen or unfrozen since the last step."""
        if self._trainable() != self._signature:
            self._rebuild()
            self._hook()

    def _warn_uncovered(self) -> None:
        """Name once, by reason, the parameters that get no curvature without the user having asked for it."""
        by_reason: dict[str, list[str]] = {}
        for p, name in self._names.items():
            if p not in self._block_of and p not in self._skipped_by_user and p.requires_grad:
                by_reason.setdefault(self._reasons.get(p, "not covered"), []).append(name)
        if by_reason:
            text = "; ".join(f"{reason}: {_some(names)}" for reason, names in by_reason.items())
            warnings.warn(
                f"{type(self).__name__}: some parameters get no curvature and follow the fallback rule ({text}). "
                "describe() lists every parameter; name them in skip_layers to silence this.",
                stacklevel=4,
            )

    def _require_capture(self) -> Capture:
        if self._capture is None:
            if self._closed:
                raise RuntimeError(f"this {type(self).__name__} was closed; call attach(module) to train on")
            raise RuntimeError(
                f"this {type(self).__name__} is a copy and has no module to capture from: call attach(module) first"
            )
        return self._capture

    @property
    def grad_scaler(self) -> Any:
        """The loss scaler whose scale is divided out of captured gradients; may be set at any time."""
        return self._scaler

    @grad_scaler.setter
    def grad_scaler(self, scaler: Any) -> None:
        self._scaler = scaler
        if self._capture is not None:
            self._capture.grad_scaler = scaler

    @property
    def blocks(self) -> dict[str, Block]:
        """Blocks by module name."""
        return {b.name: b for b in self._blocks}

    def attach(self, module: nn.Module) -> None:
        """Hook a module again, after ``copy.deepcopy``, unpickling or :meth:`detach`.

        If the optimizer holds none of the module's parameters (both were copied separately), its parameters are
        replaced by the module's of the same names and shapes.

        Raises:
            ValueError: If the module has no parameters that fit.
        """
        root = unwrap(module)
        mine, theirs = {p for g in self.param_groups for p in g["params"]}, dict(root.named_parameters())
        if not mine & set(theirs.values()):
            self._repoint({clean_name(n): p for n, p in theirs.items()})
        self._names.clear()
        self._root = root
        self._rebuild()
        self.comm.bind([b.name for b in self._blocks])
        self._hook()

    def _repoint(self, theirs: dict[str, nn.Parameter]) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                name = clean_name(self._names.get(p, ""))
                if name not in theirs or theirs[name].shape != p.shape:
                    raise ValueError(f"attach: the module has no parameter '{name}' of shape {tuple(p.shape)}")
        for group in self.param_groups:
            new = [theirs[clean_name(self._names[p])] for p in group["params"]]
            for old, p in zip(group["params"], new, strict=True):
                self.state[p] = self.state.pop(old)
            group["params"] = new

    def detach(self) -> None:
        """Remove every hook of this optimizer; another one on the same module keeps its own. Idempotent."""
        if self._capture is not None:
            self._capture.close()
            self._capture = None
            self._closed = True

    def close(self) -> None:
        """Remove every hook and end what the strategy runs. Idempotent."""
        self.detach()

    def __enter__(self) -> SecondOrderOptimizer:
        """The optimizer itself; leaving the block closes it."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close."""
        self.close()

    @contextmanager
    def pause_capture(self) -> Iterator[None]:
        """Capture nothing of the forwards that run inside the ``with`` block."""
        capture = self._capture
        if capture is None:
            yield
            return
        with capture.paused():
            yield

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; parameters that the module does not hold follow the fallback.

        Raises:
            ValueError: If an option of the group is out of range.
        """
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, got {type(param_group)}")
        merged = {**self.defaults, **param_group}
        if "fallback" not in param_group and "graft" in param_group:
            merged["fallback"] = options.resolve_fallback(None, merged["graft"])
            param_group = {**param_group, "fallback": merged["fallback"]}
        options.validate(merged, {**options.COMMON, **self.checks})
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group.setdefault("fallback_base_lr", _base_lr(group["lr"]))
        if self._root is not None:
            self._rebuild()
            self._hook()

    # ------------------------------------------------------------------ state
    def state_dict(self) -> dict[str, Any]:
        """State by parameter and group options, as ``torch.optim``; curvature as ``checkpoint_curvature`` says."""
        for p, group in self._group.items():
            if p.requires_grad:
                self._init_rule(p, group)
        packed = super().state_dict()
        kept = self.param_groups[0]["checkpoint_curvature"]
        if kept != "all":
            dropped = {k for k, kind in self.kinds.items() if kept == "none" or kind == "second_order"}
            packed["state"] = {
                i: {k: v for k, v in s.items() if k not in dropped} if isinstance(s, dict) else s
                for i, s in packed["state"].items()
            }
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; everything is checked before anything is changed, and every tensor is copied.

        Raises:
            ValueError: If the dict does not fit, with the list of what differs.
        """
        state_dict = dict(state_dict)
        for pre in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre(self, state_dict)
            if replaced is not None:
                state_dict = replaced
        groups = [{**self._group_defaults(live), **given} for live, given in self._paired(state_dict)]
        loaded = self._checked_state(state_dict["state"], groups)
        for live, given in zip(self.param_groups, groups, strict=True):
            kept = {"params": live["params"]}
            if "param_names" in live:
                kept["param_names"] = live["param_names"]
            live.clear()
            live.update({k: _copied(v) for k, v in given.items() if k != "param_names"}, **kept)
        for p, found in loaded.items():
            self.state[p] = found
        self._t = int(self.state[self._first].get("global_step", 0))
        self._finish_load()
        for post in self._optimizer_load_state_dict_post_hooks.values():
            post(self)

    def _paired(self, state_dict: dict[str, Any]) -> Iterator[tuple[Group, Group]]:
        if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= set(state_dict):
            raise ValueError("not an optimizer state_dict: it needs 'state' and 'param_groups'")
        self._refuse(checkpoint.compare_groups(state_dict["param_groups"], self.param_groups))
        return zip(self.param_groups, state_dict["param_groups"], strict=True)

    def _group_defaults(self, live: Group) -> Group:
        return {**self.defaults, "fallback_base_lr": live["fallback_base_lr"]}

    def _checked_state(self, found: Mapping[Any, Any], groups: list[Group]) -> dict[nn.Parameter, dict[str, Any]]:
        """The loaded state by parameter, copied; nothing of the optimizer is touched."""
        for group in groups:
            options.validate(group, {**options.COMMON, **self.checks})
        lines: list[str] = []
        loaded: dict[nn.Parameter, dict[str, Any]] = {}
        for live, given in zip(self.param_groups, groups, strict=True):
            for p, i in zip(live["params"], given["params"], strict=True):
                spec = self._expected_state(p, given)
                theirs = dict(found.get(i, {}))
                required = {k: v for k, v in spec.items() if not self._may_lack(k, given)}
                shapes = {k: _shape(v) for k, v in required.items()}
                shapes.update({k: _shape(v) for k, v in spec.items() if k in theirs})
                lines += checkpoint.compare_states(theirs, shapes, tuple(p.shape), f"parameter '{self._names[p]}'")
                if not lines:
                    loaded[p] = {k: checkpoint.adopt_value(k, v, spec.get(k), p) for k, v in theirs.items()}
        self._refuse(lines)
        return loaded

    def _expected_state(self, p: nn.Parameter, group: Group) -> dict[str, Tensor | int]:
        expected: dict[str, Tensor | int] = {"step": torch.zeros(())}
        if p is self._first:
            expected["global_step"] = 0
        block = self._block_of.get(p)
        if block is not None and block.owner is p:
            expected.update(self.curvature_spec(block, group))
        if p.requires_grad:
            covered = block is not None
            adam = ("adam" in (group["graft"] or group["inner"])) if covered else group["fallback"] == "adamw"
            keys = ("exp_avg", "exp_avg_sq") if adam else ("momentum_buffer",) if group["momentum"] else ()
            expected.update(dict.fromkeys(keys, p))
        return expected

    def _may_lack(self, key: str, group: Group) -> bool:
        kind, kept = self.kinds.get(key), group["checkpoint_curvature"]
        return kind is not None and (kept == "none" or (kept == "factors" and kind == "second_order"))

    def _refuse(self, lines: list[str]) -> None:
        if lines:
            shown = "\n  ".join(lines[:20])
            more = f"\n  … and {len(lines) - 20} more" if len(lines) > 20 else ""
            raise ValueError(f"this state_dict does not fit the optimizer; nothing was loaded:\n  {shown}{more}")

    def _finish_load(self) -> None:
        """Complete what a checkpoint may leave out, and follow the loaded options."""
        lacking = []
        for block in self._blocks:
            state = self.state[block.owner]
            for key, value in self.curvature_spec(block, self._group_of(block)).items():
                if key not in state:
                    state[key] = value
                    if self.kinds.get(key) == "second_order" and block not in lacking:
                        lacking.append(block)
        self._rebuild()
        renewed = [b for b in lacking if self.state[b.owner]["factor_updates"] > 0]
        if renewed:
            with torch.no_grad(), full_precision(renewed[0].owner.device):
                self.refresh(renewed, True)
        if self._capture is not None:
            self._hook()

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles keep: everything but the module, the hooks and the loss scaler."""
        kept = dict(super().__getstate__())
        kept["_kept"] = {
            "names": dict(self._names),
            "skip": [r for r in self._skip if not isinstance(r, nn.Module)],
            "skipped": {p: r for p, r in self._reasons.items() if p in self._skipped_by_user},
            "stagger": self._stagger,
            "max_failures": self._max_failures,
            "comm": self.comm,
            "t": self._t,
        }
        return kept

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy; it needs :meth:`attach` before the next step."""
        state = dict(state)
        kept = state.pop("_kept", None)
        super().__setstate__(state)
        if kept is not None:
            self._begin_life(kept["skip"], kept["stagger"], kept["max_failures"], kept["comm"])
            self._names, self._t = kept["names"], kept["t"]
            self._group = {p: g for g in self.param_groups for p in g["params"]}
            self._first = next(iter(self._group))
        for group in self.param_groups:
            for key, value in self.defaults.items():
                group.setdefault(key, value)
            group.setdefault("fallback_base_lr", _base_lr(group["lr"]))

    # ------------------------------------------------------------------ what it tells about itself
    def describe(self) -> str:
        """A table with one row per parameter: the block that covers it or the fallback and why, sizes, owner, bytes."""
        rows = [self._row(p) for p in self._group]
        usage = {k: v for k, v in self.memory_usage().items() if v}
        footer = ["state: " + ", ".join(f"{k} {human_bytes(v)}" for k, v in usage.items())]
        return render(f"{type(self).__name__} · {len(self._blocks)} blocks", rows, footer)

    def _row(self, p: nn.Parameter) -> Row:
        block = self._block_of.get(p)
        factors = owner = ""
        if block is None:
            treatment = self._reasons.get(p, "not covered")
            if p.requires_grad:
                treatment = f"{self._group[p]['fallback']} fallback: {treatment}"
        else:
            refused = self._capture.refused.get(block.index) if self._capture is not None else None
            treatment = f"block '{block.name}' ({type(block.modules[0]).__name__})"
            if refused:
                treatment = f"{self._group[p]['fallback']} fallback: {refused}"
            lead = f"{block.adapter.groups}×" if block.adapter.groups > 1 else ""
            factors, owner = f"{lead}{block.adapter.n_a}, {block.adapter.n_g}", f"rank {self.comm.owner(block.index)}"
        nbytes = sum(v.nbytes for v in self.state[p].values() if isinstance(v, Tensor))
        return Row(self._names[p], tuple(p.shape), treatment, factors, owner, nbytes)

    def memory_usage(self) -> dict[str, int]:
        """Bytes that the optimizer holds on this rank, by kind, with ``"total"``."""
        usage = dict.fromkeys((*dict.fromkeys(self.kinds.values()), "momentum", "fallback", "pending", "buffers"), 0)
        for p in self._group:
            for key, value in self.state[p].items():
                if isinstance(value, Tensor):
                    usage[self._kind(p, key)] += value.nbytes
        if self._capture is not None:
            usage["pending"] = sum(int(getattr(s, "nbytes", 0)) for s in self._capture.pending.values())
        usage["total"] = sum(usage.values())
        return usage

    def _kind(self, p: nn.Parameter, key: str) -> str:
        if key in self.kinds:
            return self.kinds[key]
        if key in checkpoint.RULE_KEYS:
            return "fallback" if key != "momentum_buffer" and p not in self._block_of else "momentum"
        return "buffers"

    def dense_curvature(self, name: str) -> Tensor:
        """The undamped curvature of a block as a dense ``[n, n]`` matrix over row-major ``vec([W | b])``.

        Args:
            name: Module name as in ``named_modules()``; wrapper prefixes may be left out.

        Raises:
            ValueError: If no block has this name.
            RuntimeError: If nothing was captured for it yet.
        """
        block = self.blocks.get(clean_name(name))
        if block is None:
            raise ValueError(f"no block is named '{name}'; there are: {', '.join(self.blocks) or 'none'}")
        if self.state[block.owner]["factor_updates"] == 0:
            raise RuntimeError(f"nothing was captured for layer '{name}' yet: take a step first")
        return self.block_curvature(block)

    def diagnostics(self) -> dict[str, Any]:
        """Counters and factors as plain numbers; reading them may wait for the device."""
        return {
            "step": self._t,
            "skipped_steps": self._skipped_steps + int(self._skipped_on_device),
            "skipped_statistics": sum(self._skipped_statistics.values()),
            "skipped_statistics_by_layer": dict(self._skipped_statistics),
            "refresh_failures": self._failed_refreshes,
            "kl_clip_factor": None if self._kl_factor is None else float(self._kl_factor),
        }

    # ------------------------------------------------------------------ small helpers
    def _group_of(self, block: Block) -> Group:
        return self._group[block.owner]

    def _is_adam_grafted(self, p: nn.Parameter) -> bool:
        return self._group[p]["graft"] == "adam" and p in self._block_of

    @staticmethod
    def _precision(p: Tensor) -> torch.dtype:
        return torch.float64 if p.dtype == torch.float64 else torch.float32


def _module_and_params(method: str, params: Any, module: nn.Module | None) -> tuple[nn.Module, Any]:
    """The module to hook and the parameters to train, from the two first ways to give them."""
    if isinstance(params, nn.Module):
        if module is not None and module is not params:
            raise ValueError(f"{method}: give the module once, first or as module=")
        named = [(clean_name(n), p) for n, p in params.named_parameters()]
        if not named:
            raise ValueError(f"{method}: the module {type(params).__name__} has no parameters")
        return params, named
    if module is None:
        raise ValueError(
            f"{method} needs the module whose layers it covers: pass the module first, {method}(model, lr=...), or name it "
            f"beside the groups, {method}(params, module=model)"
        )
    if not isinstance(module, nn.Module):
        raise TypeError(f"module= must be an nn.Module, got {type(module).__name__}")
    return module, params


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


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) else None


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _base_lr(lr: Any) -> float:
    return float(lr)


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
