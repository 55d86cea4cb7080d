"""The life of an optimizer: names, groups and state allocation; freezing, moving, copies, attach and close."""

from __future__ import annotations

from abc import abstractmethod
from collections import ChainMap
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from secondorder import options
from secondorder.adaptation.no_trust import NoTrust
from secondorder.capture.loss_scale import LossScale
from secondorder.checkpoint.checkpoint import Checkpoint, KnownOptions
from secondorder.comm.join import UnevenInputs
from secondorder.comm.layout import is_cut
from secondorder.comm.names import default_strategy
from secondorder.comm.strategy import CommStrategy, Unit
from secondorder.curvature.damping_watch import DampingWatch
from secondorder.curvature.schema import Schema
from secondorder.curvature.wrappers import as_root, clean_name
from secondorder.parallel.session import RankSession
from secondorder.parallel.shards import require_separate_parameters
from secondorder.parameters import RULE_KEYS, Group, ParameterTable, check_keys, warn_without_effect
from secondorder.preconditioners.base import CurvatureState, DividedState, Preconditioner
from secondorder.runtime import Clock, Runtime
from secondorder.update import Update

if TYPE_CHECKING:
    from secondorder.adaptation.trust_region import TrustRegion

State = dict[str, Tensor | int]
SelfT = TypeVar("SelfT", bound="Lifecycle")


class Lifecycle(Optimizer):
    """Parameters, their names and their state, from construction to ``close``."""

    #: Checks of the options that only this method has.
    checks: ClassVar[dict[str, options.Check]] = {}
    #: Rules about several options of a group.
    rules: options.GroupRules = options.GroupRules()
    #: The first-order rules, which need to know what curvature covers.
    _update: Update
    #: What judges steps by their loss.
    _trust: NoTrust | TrustRegion = NoTrust()

    # ------------------------------------------------------------------ what a family of methods supplies
    @property
    @abstractmethod
    def preconditioner(self) -> Preconditioner:
        """The stages of a step over all curvature."""

    @property
    @abstractmethod
    def catalog(self) -> Schema:
        """Entries of the states of curvature, by key, as far as they are the same in every state."""

    @abstractmethod
    def _plan(self) -> bool:
        """Find what curvature covers, for the groups as they are now; returns whether that changed."""

    @abstractmethod
    def _allocate(self, p: nn.Parameter) -> None:
        """Allocate the curvature state of a parameter; what is there and still fits is kept."""

    def _allocating(self) -> tuple[str, ...]:
        """Options of a group that decide how much state its parameters have."""
        return ()

    def _follow(self, replanned: bool) -> None:
        """Act on a plan that was made anew."""

    def _kept_by_copies(self) -> dict[str, Any]:
        """Attributes that copies and pickles keep."""
        own = {"names": dict(self._table.names), "comm": self.comm, "t": self._t, "rules": self.rules}
        return {**own, "entries": dict(self.entries), "betas": self._default_betas}

    # ------------------------------------------------------------------ birth
    def _begin_life(self, comm: CommStrategy | None) -> None:
        if comm is not None and not isinstance(comm, CommStrategy):
            raise TypeError(f"comm must be a CommStrategy, got {comm!r}")
        self.comm: CommStrategy = comm if comm is not None else default_strategy()
        self._is_default_strategy = comm is None
        #: The catalog, and what schemas have added: parameters that are frozen have no schema.
        self.entries: Schema = dict(self.catalog)
        self.loss_scale = LossScale()
        self._runtime = Runtime()
        self._table = ParameterTable(type(self).__name__, self._allocating(), entries=self.entries)
        #: β₁ and β₂ of a group that does not give its own; the defaults have them only where Adam sets the step.
        self._default_betas: tuple[float, float] = options.DEFAULTS["betas"]
        self._checked: list[Group] = []
        self._skipped_steps = 0
        self._skipped_on_device: Tensor | int = 0
        #: What the blocks of `keep_directions` that are open have kept, the innermost last.
        self._kept_directions: list[dict[str, Tensor]] = []
        self._watch = DampingWatch()

    def _restore(self, kept: dict[str, Any]) -> None:
        """Take :meth:`_kept_by_copies` back."""
        self._begin_life(kept["comm"])
        self._table.names, self._t, self._default_betas = kept["names"], kept["t"], kept["betas"]
        self.rules = kept["rules"]
        self.entries.update(kept["entries"])
        self._tabulate()
        self._table.regroup()
        self._open_session()

    def _tabulate(self) -> None:
        """Give the parts what the user or ``load_state_dict`` may have replaced."""
        self._runtime.renew(self.state, self.param_groups)
        self._table.groups = self.param_groups
        self._table.state = cast("MutableMapping[nn.Parameter, dict[str, Any]]", self.state)

    def _fit_strategy(self, module: nn.Module | None) -> None:
        """Shard curvature as well if parameters are sharded and nobody chose a strategy."""
        params = [p for group in self.param_groups for p in group["params"]]
        require_separate_parameters(type(self).__name__, module, params)
        if self._is_default_strategy and any(is_cut(p) for p in params):
            self.comm = default_strategy(cut=True)
        self._open_session()

    def _open_session(self) -> None:
        self._session = RankSession(self.comm, self._table, self._runtime)
        self._inputs = UnevenInputs(self.comm, self._table, list(self.defaults))

    @abstractmethod
    def _join_ranks(self) -> None:
        """Meet the other ranks if that is needed."""

    def _place(self, units: Sequence[Unit]) -> None:
        self._checkpoint.gathered.tensors.clear()
        self._session.place(units)

    def _make_checkpoint(
        self,
        curvature: CurvatureState,
        rules: options.GroupRules | None = None,
        divided: DividedState | None = None,
    ) -> None:
        defaults = ChainMap(self.defaults, {"betas": self._default_betas})
        known = KnownOptions(self.checks, defaults, rules or options.GroupRules())
        parts = self.comm, self._table, self._runtime, curvature
        self._checkpoint = Checkpoint(type(self).__name__, *parts, self._update.keys, known, divided)

    @property
    def _t(self) -> int:  # bridge
        return self._runtime.step

    @_t.setter
    def _t(self, step: int) -> None:  # bridge
        self._runtime.step = step

    def _rebuild(self) -> bool:
        """Plan anew and allocate what is missing; state that still fits is kept.

        Returns:
            Whether the plan changed.
        """
        self._tabulate()
        table = self._table
        table.regroup()
        table.find_shards(self.comm)
        changed = self._plan() if table.group_of else False
        table.name_parameters()
        table.note_plan()
        table.forget_replaced(self._t)
        for p in table.group_of:
            self._init_parameter(p)
        if table.first is not None:
            self.state[table.first].setdefault("global_step", self._t)
        return changed

    @property
    def _is_cut(self) -> bool:
        """Whether parameters are sharded over ranks."""
        return self._table.shards.is_sharded

    def _init_parameter(self, p: nn.Parameter) -> None:
        state = self.state[p]
        state.setdefault("step", torch.zeros((), dtype=torch.float32))
        if not p.requires_grad:
            return  # a frozen layer keeps its estimate for when it is unfrozen
        self._allocate(p)
        self._update.allocate(p, self._table.group_of[p])
        for key in set(state) & set(RULE_KEYS):
            state[key] = state[key].to(p.device, p.dtype)

    def time_stages(self, clock: Clock | None) -> None:
        """Have a clock time the stages of the steps to come, such as a ``secondorder.diagnostics.StageClock``.

        Args:
            clock: The clock, or None to stop.
        """
        self._runtime.clock = clock

    # ------------------------------------------------------------------ what may change between steps
    def _synchronize(self) -> None:
        """Follow parameters that were frozen, unfrozen, moved or cast since the last step."""
        if self._table.layout() != self._table.signature:
            self._follow(self._rebuild())

    def _follow_replaced(self) -> None:
        """Follow parameters that a trainer has put in the place of others since the last step."""
        if self._table.was_replaced:
            self._synchronize()

    @property
    def grad_scaler(self) -> Any:
        """The loss scaler of float16 training, divided out of what is captured; may be set at any time."""
        return self.loss_scale.scaler

    @grad_scaler.setter
    def grad_scaler(self, scaler: Any) -> None:
        self.loss_scale.set(scaler, self.comm.averages)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; options that it does not give take their default.

        Raises:
            ValueError: If an option of the group is out of range.
            TypeError: If it is of a wrong kind.
        """
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, got {type(param_group)}")
        param_group = self.rules.complete(param_group, self.defaults, self.param_groups if self._table.group_of else [])
        param_group = {k: v if k == "params" else options.plain(v) for k, v in param_group.items()}
        param_group = {"betas": self._default_betas, **options.renamed(param_group, self.checks)}
        check_keys(type(self), param_group, {*options.COMMON, *self.checks})
        merged = {**self.defaults, **param_group}
        if param_group.get("fallback") is None and ("graft" in param_group or "fallback" in param_group):
            merged["fallback"] = options.resolve_fallback(None, merged["graft"])
            param_group["fallback"] = merged["fallback"]
        options.validate(merged, {**options.COMMON, **self.checks})
        self.rules.check(merged, self.param_groups)
        super().add_param_group(self._table.named_like_the_others(param_group))
        group = self.param_groups[-1]
        group.setdefault("fallback_base_lr", float(group["lr"]))
        if self._table.group_of:  # not while the constructor adds its groups
            warn_without_effect(type(self), [group])
            self._follow(self._rebuild())

    def _check_changed_options(self) -> None:
        """Refuse what was written into a group since the last step, as the constructor would, before anything changes.

        Raises:
            TypeError: For a value of a wrong kind.
            ValueError: For a value out of range, or for options that exclude each other.
        """
        found = options.check_changes(self.param_groups, self._checked, {**options.COMMON, **self.checks})
        if found is not None:
            for group in self.param_groups:
                self.rules.check(group, self.param_groups)
            self._checked = found

    # ------------------------------------------------------------------ copies
    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles keep: everything but the module, the hooks and the loss scaler."""
        return {**super().__getstate__(), "_kept": self._kept_by_copies()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy."""
        state = dict(state)
        kept = state.pop("_kept", None)
        defaults = dict(state.get("defaults", {}))
        super().__setstate__(state)
        if defaults:
            self.defaults = defaults
        for group in self.param_groups:
            group.update(betas=group.get("betas", options.DEFAULTS["betas"]))
            for key in (*options.COMMON, *self.checks):
                if key in self.defaults:
                    group.setdefault(key, self.defaults[key])
            group.setdefault("fallback_base_lr", float(group["lr"]))
        if kept is not None:
            self._restore(kept)
        else:
            self._tabulate()

    def attach(self, module: nn.Module | Sequence[nn.Module]) -> None:
        """Follow a module, or the parts of a model, again, after ``copy.deepcopy``, unpickling or :meth:`detach`.

        If the optimizer holds none of the module's parameters (both were copied separately), its parameters are
        replaced by the module's of the same names and shapes.

        Raises:
            ValueError: If the module has no parameters that fit.
            TypeError: If it is no module and no list of modules.
        """
        root = as_root(module)
        mine, theirs = {p for g in self.param_groups for p in g["params"]}, dict(root.named_parameters())
        if not mine & set(theirs.values()):
            self.preconditioner.replace(self._table.repoint({clean_name(n): p for n, p in theirs.items()}))
        self.detach()
        self._table.names.clear()
        self.comm.claim(self)
        self._connect(root)

    @abstractmethod
    def _connect(self, root: nn.Module | None) -> None:
        """Plan for a module, and hook it where that is needed."""

    def detach(self) -> None:
        """Remove every hook of this optimizer; another one on the same module keeps its own. Idempotent."""
        self._table.is_followed = False

    def close(self) -> None:
        """Remove every hook and end what the strategy runs. Idempotent."""
        try:
            self.comm.close()  # may take steps without data
        finally:
            self.detach()
            self._session.close()

    def __enter__(self: SelfT) -> SelfT:
        """The optimizer itself; leaving the block closes it."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Close."""
        if error is not None:
            self.comm.abandon(error)
        self.close()

    @contextmanager
    def pause_capture(self) -> Iterator[None]:
        """Capture nothing of the forwards that run inside the ``with`` block."""
        yield

    @contextmanager
    def keep_directions(self) -> Iterator[dict[str, Tensor]]:
        """Keep the preconditioned directions of the steps inside the ``with`` block, for a look at them.

        They are what momentum and the learning rate are applied to; a later step replaces those of an earlier one.
        Blocks can be nested: a step fills the dicts of all that are open, with the same tensors.

        Yields:
            A dict that each step fills: direction by parameter name.

        Example:
            >>> import torch, secondorder
            >>> model = torch.nn.Linear(4, 2)
            >>> optimizer = secondorder.MFAC(model, lr=0.1)
            >>> model(torch.randn(8, 4)).square().mean().backward()
            >>> with optimizer.keep_directions() as kept:
            ...     optimizer.step()
            >>> sorted(kept)
            ['bias', 'weight']
        """
        kept = dict[str, Tensor]()
        self._kept_directions.append(kept)
        try:
            yield kept
        finally:
            self._kept_directions = [other for other in self._kept_directions if other is not kept]
