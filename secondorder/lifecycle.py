"""The life of an optimizer: its blocks, hooks and state allocation; freezing, copies, attach and close."""

from __future__ import annotations

import warnings
import weakref
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from secondorder import options
from secondorder.comm import CommStrategy, Local
from secondorder.curvature.block import Block, SkipRule, clean_name, plan_blocks, unwrap
from secondorder.curvature.capture import Capture, Site, Statistic
from secondorder.linalg import Workspace

Group = dict[str, Any]
SelfT = TypeVar("SelfT", bound="Lifecycle")


class Lifecycle(Optimizer):
    """Blocks of a module, their hooks and their state, from construction to ``close``."""

    #: Checks of the options that only this method has.
    checks: ClassVar[dict[str, options.Check]] = {}
    #: Kind in ``memory_usage()`` by state key; every key here is curvature.
    kinds: ClassVar[dict[str, str]] = {}

    @abstractmethod
    def curvature_spec(self, block: Block, group: Mapping[str, Any]) -> dict[str, Tensor | int]:
        """Curvature state of a block before any data: numbers, and ``meta`` tensors for what is allocated as zeros."""

    @abstractmethod
    def new_statistic(self, block: Block, group: Group) -> Statistic:
        """An empty pending statistic of a block."""

    def _begin_life(
        self,
        skip: Sequence[SkipRule] | SkipRule,
        stagger: bool,
        refresh_warmup: bool,
        max_failures: int,
        comm: CommStrategy | None,
    ) -> None:
        if isinstance(skip, (str, type, nn.Module)):
            skip = [skip]
        if not isinstance(skip, Iterable):
            raise TypeError(f"skip_layers must be a rule or a sequence of rules, got {skip!r}")
        if comm is not None and not isinstance(comm, CommStrategy):
            raise TypeError(f"comm must be a CommStrategy, got {comm!r}")
        self._skip: list[SkipRule] = list(skip)
        self._stagger, self._refresh_warmup, self._max_failures = stagger, refresh_warmup, max_failures
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
        self._signature: list[tuple[object, ...]] = []
        self._failures: dict[str, int] = {}
        self._unjudged: list[tuple[list[Block], Tensor, torch.Event]] = []
        self._failed_at: dict[str, int] = {}
        self._failed_refreshes = 0
        self._skipped_steps = 0
        self._skipped_on_device: Tensor | int = 0
        self._skipped_statistics: dict[str, int | Tensor] = {}
        self._kl_factor: Tensor | None = None
        self._warned: set[str] = set()
        self._workspace = Workspace()
        self._armed_for: list[tuple[int, int]] = []

    def _connect(self, root: nn.Module) -> None:
        """Plan the blocks of a module and hook them."""
        self._root = unwrap(root)
        self._rebuild()
        self._hook()

    def _hook(self) -> None:
        assert self._root is not None
        self.comm.bind([b.name for b in self._blocks])
        if self._capture is None:
            self._capture = Capture([self._root])
            self._capture.before_forward = weakref.WeakMethod(self._follow_schedule)
        self._capture.set_sites(self._site(b) for b in self._blocks)
        self._closed = False
        self._arm()

    def _site(self, block: Block) -> Site:
        reference = weakref.ref(self)  # the hooks must not keep the optimizer alive

        def new_statistic() -> Statistic:
            optimizer = reference()
            assert optimizer is not None
            return optimizer.new_statistic(block, block.group)

        return Site(block.name, block.modules, block.adapter, block.owner, new_statistic)

    def _rebuild(self) -> bool:
        """Plan the blocks anew and allocate what is missing; state that still fits is kept.

        Returns:
            Whether the blocks changed. Hooks of equal blocks stay: a compiled model would not see new ones.
        """
        assert self._root is not None
        self._group = {p: g for g in self.param_groups for p in g["params"]}
        self._first = next(iter(self._group))
        plan = plan_blocks(self._root, [p for p in self._group if p.requires_grad], self._skip)
        changed = [b.signature for b in plan.blocks] != [b.signature for b in self._blocks]
        if changed:
            self._blocks = plan.blocks
            self._block_of = {p: b for b in self._blocks for p in b.params}
        for block in self._blocks:
            block.group = self._group[block.owner]
        self._reasons, self._skipped_by_user = plan.reasons, plan.skipped_by_user
        self._name_parameters()
        self._signature = self._layout()
        for p in self._group:
            self._init_parameter(p)
        self.state[self._first].setdefault("global_step", self._t)
        return changed

    def _name_parameters(self) -> None:
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
        if not p.requires_grad:
            return  # a frozen layer keeps its estimate for when it is unfrozen
        wanted: dict[str, Tensor | int] = {}
        if block is not None and block.owner is p:
            wanted = self.curvature_spec(block, group)
        stale = any(k in state and shape_of(state[k]) != shape_of(v) for k, v in wanted.items())
        for key in [k for k in state if k in self.kinds and (k not in wanted or stale)]:
            del state[key]
        for key, value in wanted.items():
            if not isinstance(value, Tensor):
                state.setdefault(key, value)
            elif key not in state:
                state[key] = torch.zeros_like(value, device=p.device)
            else:  # the model was moved or cast
                state[key] = state[key].to(p.device, value.dtype)
        self._init_rule(p, group)
        for key in set(state) - set(wanted) - {"step", "global_step"}:
            state[key] = state[key].to(p.device, p.dtype)

    def _init_rule(self, p: nn.Parameter, group: Group) -> None:
        """Allocate what the parameter's usual rule keeps, so that state never depends on which gradients came first."""
        for key in self._rule_keys(p, group):
            self._rule_state(p, key)

    def _rule_keys(self, p: nn.Parameter, group: Mapping[str, Any]) -> tuple[str, ...]:
        """State of the first-order rule that a parameter usually follows."""
        covered = p in self._block_of
        adam = "adam" in (group["graft"] or group["inner"]) if covered else group["fallback"] == "adamw"
        if adam:
            return "exp_avg", "exp_avg_sq"
        return ("momentum_buffer",) if group["momentum"] else ()

    def _layout(self) -> list[tuple[object, ...]]:
        """What the blocks and their state depend on and a user may change between steps."""
        members = [(g, p) for g in self.param_groups for p in g["params"]]
        return [(id(g), id(p), p.requires_grad, p.dtype, p.device) for g, p in members]

    def _sync_blocks(self) -> None:
        """Follow layers that were frozen, unfrozen, moved or cast since the last step."""
        if self._layout() != self._signature:
            if self._rebuild():
                self._hook()
            self._arm()

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
            raise RuntimeError(self._is_a_copy())
        return self._capture

    def _is_a_copy(self) -> str:
        return f"this {type(self).__name__} is a copy and has no module to capture from: call attach(module) first"

    @property
    def grad_scaler(self) -> Any:
        """The loss scaler whose scale is divided out of captured gradients; may be set at any time."""
        return self._scaler

    @grad_scaler.setter
    def grad_scaler(self, scaler: Any) -> None:
        if scaler is not None and not (hasattr(scaler, "scale") and hasattr(scaler, "is_enabled")):
            raise TypeError(f"grad_scaler must be a torch.amp.GradScaler, got {scaler!r}")
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
        self.detach()
        self._names.clear()
        self._blocks = []
        self._connect(root)

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

    def __enter__(self: SelfT) -> SelfT:
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
            TypeError: If it is of a wrong kind.
        """
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, got {type(param_group)}")
        param_group = {k: v if k == "params" else options.plain(v) for k, v in param_group.items()}
        merged = {**self.defaults, **param_group}
        if param_group.get("fallback") is None and ("graft" in param_group or "fallback" in param_group):
            merged["fallback"] = options.resolve_fallback(None, merged["graft"])
            param_group["fallback"] = merged["fallback"]
        options.validate(merged, {**options.COMMON, **self.checks})
        super().add_param_group(self._named_like_the_others(param_group))
        group = self.param_groups[-1]
        group.setdefault("fallback_base_lr", float(group["lr"]))
        if self._root is not None and self._rebuild() and self._capture is not None:
            self._hook()

    def _named_like_the_others(self, param_group: dict[str, Any]) -> dict[str, Any]:
        """Name the parameters of a late group when the others have names: torch wants all or none."""
        params = param_group["params"]
        if isinstance(params, set):
            return param_group  # torch refuses it, with its own words
        params = [params] if isinstance(params, Tensor) else list(params)
        named = bool(self.param_groups) and "param_names" in self.param_groups[0]
        if not named or any(isinstance(p, tuple) for p in params):
            return {**param_group, "params": params}
        inside = {p: clean_name(n) for n, p in self._root.named_parameters()} if self._root is not None else {}
        i = len(self.param_groups)
        return {**param_group, "params": [(inside.get(p, f"group{i}.{j}"), p) for j, p in enumerate(params)]}

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles keep: everything but the module, the hooks and the loss scaler."""
        kept = dict(super().__getstate__())
        kept["_kept"] = {
            "names": dict(self._names),
            "skip": [self._name_of(rule) if isinstance(rule, nn.Module) else rule for rule in self._skip],
            "stagger": self._stagger,
            "refresh_warmup": self._refresh_warmup,
            "max_failures": self._max_failures,
            "comm": self.comm,
            "t": self._t,
        }
        return kept

    def _name_of(self, module: nn.Module) -> str:
        assert self._root is not None
        return next(clean_name(name) for name, m in self._root.named_modules() if m is unwrap(module))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy; it needs :meth:`attach` before the next step."""
        state = dict(state)
        kept = state.pop("_kept", None)
        defaults = dict(state.get("defaults", {}))
        super().__setstate__(state)
        if defaults:
            self.defaults = defaults
        if kept is not None:
            self._begin_life(kept["skip"], kept["stagger"], kept["refresh_warmup"], kept["max_failures"], kept["comm"])
            self._names, self._t = kept["names"], kept["t"]
            self._group = {p: g for g in self.param_groups for p in g["params"]}
            self._first = next(iter(self._group))
        for group in self.param_groups:
            for key in (*options.COMMON, *self.checks):
                if key in self.defaults:
                    group.setdefault(key, self.defaults[key])
            group.setdefault("fallback_base_lr", float(group["lr"]))

    def _rule_state(self, p: nn.Parameter, key: str) -> Tensor:
        state = self.state[p]
        if key not in state:
            state[key] = torch.zeros_like(p, memory_format=torch.preserve_format)
        return cast(Tensor, state[key])

    def _moments(self, params: Sequence[nn.Parameter]) -> tuple[list[Tensor], list[Tensor]]:
        return [self._rule_state(p, "exp_avg") for p in params], [self._rule_state(p, "exp_avg_sq") for p in params]

    def _steps_of(self, p: nn.Parameter) -> float:
        return float(self.state[p]["step"].numpy())

    def _arm(self) -> None:
        """Have captured what the coming step will use."""
        capture = self._capture
        if capture is not None:
            self._armed_for = self._schedule()
            capture.grad_scaler = self.grad_scaler
            capture.arm(b.index for b in self._blocks if self._capture_is_due(b))

    def _schedule(self) -> list[tuple[int, int]]:
        return [(g["inv_update_steps"], g["factor_update_steps"]) for g in self.param_groups]

    def _follow_schedule(self) -> None:
        """Let intervals and frozen layers that changed since the last step act on the forward that begins."""
        self._sync_blocks()
        if self._schedule() != self._armed_for:
            self._arm()

    def _capture_is_due(self, block: Block) -> bool:
        group = block.group
        if group["inv_update_steps"] == 0:
            return False
        warming = self._refresh_warmup and self._t < group["inv_update_steps"]
        due: bool = warming or self._t % group["factor_update_steps"] == 0
        return due or self.state[block.owner]["factor_updates"] == 0

    @staticmethod
    def _precision(p: Tensor) -> torch.dtype:
        return torch.float64 if p.dtype == torch.float64 else torch.float32


def shape_of(value: Any) -> tuple[int, ...] | None:
    """Shape of a tensor, None for anything else."""
    return tuple(value.shape) if isinstance(value, Tensor) else None


def module_and_params(method: str, params: Any, module: nn.Module | None) -> tuple[nn.Module, Any]:
    """The module to hook and the parameters to train, from the two first ways to give them."""
    if isinstance(params, nn.Module):
        if module is not None and module is not params:
            raise ValueError(f"{method}: give the module once, first or as module=")
        module = params
        params = list(unwrap(module).named_parameters())
        if not params:
            raise ValueError(f"{method}: the module {type(module).__name__} has no parameters")
    if module is None:
        raise ValueError(
            f"{method} needs the module whose layers it covers: pass the module first, {method}(model, lr=...), "
            f"or name it beside the groups, {method}(params, module=model)"
        )
    if not isinstance(module, nn.Module):
        raise TypeError(f"module= must be an nn.Module, got {type(module).__name__}")
    if isinstance(module, nn.DataParallel):
        raise NotImplementedError(
            f"{method}: nn.DataParallel copies the model to several devices in one process, where nothing can be "
            "captured; use one device, or one process per device"
        )
    return module, params


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
