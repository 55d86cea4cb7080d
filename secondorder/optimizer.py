"""The one ``step()`` that every method shares.

::

    closure ─► gradients ─► collect ─► learn ─► refresh ─► share ─► sources ─► propose ─► bound ─► apply
    TrustRegion  ParameterTable        preconditioner (blocks or windows)      Update

An optimizer owns these parts; none of them knows the optimizer. ``CONTRIBUTING.md`` lists the files behind each stage.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar, cast, overload

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from secondorder import options
from secondorder.capture.statistics.averages import all_finite
from secondorder.comm.join import JOIN_DISABLED, Joinable, JoinHook, joining_group
from secondorder.comm.strategy import CommStrategy
from secondorder.diagnostics.report import Report, representation
from secondorder.frames import depth_of_caller
from secondorder.lifecycle import Lifecycle
from secondorder.linalg.dense import all_true_on_cpu
from secondorder.parameters import Directions, Group, warn_without_effect
from secondorder.plan.plan import Plan
from secondorder.plan.planner import dry_run, holdings_of_rules
from secondorder.runtime import Clock

ReturnedT = TypeVar("ReturnedT")
CallableT = TypeVar("CallableT", bound=Callable[..., Any])


def _outside_of_graphs(function: CallableT) -> CallableT:
    """Have ``torch.compile(optimizer.step)`` run a step as it is: one graph break, the same result.

    Factorisations that fail, statistics of several sizes and messages to other ranks have no place in a graph.

    Returns:
        The function, which the compiler leaves alone.
    """
    # torch's own optimizers use the first: it does not import the compiler before a step is taken.
    return cast("CallableT", getattr(torch, "_disable_dynamo", torch.compiler.disable)(function))


class SecondOrderOptimizer(Lifecycle, Joinable):
    """Base of all methods: the stages of a step, in their order, and the first-order rules that end it.

    Two families fill the stages in: ``LayerOptimizer`` with statistics captured per layer, ``WindowOptimizer`` with a
    window of past gradients. A method supplies a few verbs, never its own ``step``.

    Args:
        params: What ``torch.optim`` takes.
        defaults: Group options.
        module: The module, if there is one.
        grad_scaler: Loss scaler of float16 training.

    Raises:
        ValueError: For a bad option.
        RuntimeError: If the ranks of a process group do not all construct it; ``ValueError`` on all if they differ.
    """

    # Of the class too, as copies are made without the constructor.
    _join_config = JOIN_DISABLED

    def __init__(
        self, params: ParamsT, defaults: dict[str, Any], *, module: nn.Module | None, grad_scaler: Any
    ) -> None:
        defaults = {key: options.plain(value) for key, value in defaults.items()}
        defaults["fallback"] = options.resolve_fallback(defaults["fallback"], defaults["graft"])
        options.validate(defaults, {**options.COMMON, **self.checks})
        self._default_betas = defaults["betas"]
        if not self._cycles_betas(defaults):
            del defaults["betas"]  # schedulers cycle them where the defaults have them, and else the momentum
        super().__init__(params, defaults)
        self._fit_strategy(module)
        self.comm.claim(self)
        try:
            self.grad_scaler = grad_scaler
            self._connect(module)
            self.loss_scale.require_common(self.comm.averages)
            self._table.shards.require_fitting_strategy()
            self.comm.admit(self)
            self._join_ranks()
        except BaseException:
            self.close()  # a model keeps no hooks of an optimizer that was refused
            raise
        self._table.warn_uncovered(self.preconditioner.covered)
        warn_without_effect(type(self), self.param_groups)

    def _cycles_betas(self, defaults: Group) -> bool:
        """Whether a scheduler that cycles the momentum acts on β₁, as with AdamW, instead of ``momentum``."""
        return options.is_adam(defaults["graft"] or defaults["inner"])

    def check_groups(self, groups: list[Group]) -> None:
        """Refuse what ``param_groups`` is to become if options exclude each other; nothing is changed.

        Raises:
            ValueError: If options of a group exclude each other, or groups disagree where they share curvature.
        """
        live = [*self.param_groups]
        self.param_groups[:] = groups  # they are compared with each other, and not with those of now
        try:
            for group in groups:
                self.rules.check(group, groups)
        finally:
            self.param_groups[:] = live

    # ------------------------------------------------------------------ what a family supplies
    @abstractmethod
    def _prepare(self) -> None:
        """Follow what has changed since the last step, and refuse a step that cannot be taken."""

    def _why_not_joinable(self) -> str | None:
        """Why a rank without data cannot take the steps of the others inside ``Join``, if it cannot."""
        if (reason := self._trust.why_not_joinable()) is not None:
            return reason
        if not self.comm.takes_joiners:
            return f"{type(self.comm).__name__} has ranks without data; let those with data take equally many steps"
        if self._is_cut:
            return "fully_shard computes no forward without all ranks; give them equally many batches"
        if self.loss_scale.multiplies:
            return "its grad_scaler leaves steps out where there is data; train in bfloat16, which needs no scaler"
        if self.comm.data_world < self.comm.world:
            return f"under {self.comm!r} some ranks never have data; give the others equally many batches"
        return None

    def _follow_schedule(self) -> None:
        """Let options that changed since the last step act on the forward that begins."""

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What ``Join`` calls on a rank that has no data left.

        Args:
            **kwargs: Those of ``Join``; none is used.

        Returns:
            The hook.

        Raises:
            NotImplementedError: If such a rank cannot take the steps of the others.
        """
        reason = self._why_not_joinable()
        if reason is not None:
            raise NotImplementedError(f"{type(self).__name__} cannot take part in Join: {reason}")
        return self._inputs.hook(self)

    @property
    def join_device(self) -> torch.device:
        """Device of the messages of ``Join``."""
        return self._inputs.device

    @property
    def join_process_group(self) -> Any:
        """Group of the messages of ``Join``: the default one, as of ``DistributedDataParallel``."""
        return joining_group()

    # ------------------------------------------------------------------ the step
    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], ReturnedT]) -> ReturnedT: ...

    @_outside_of_graphs
    @torch.no_grad()
    def step(self, closure: Callable[[], ReturnedT] | None = None) -> ReturnedT | None:
        """Perform one optimization step.

        Args:
            closure: Re-evaluates the model and returns the loss; called once, with gradients enabled. Options that
                judge a step by its loss call it again, and take ``(loss, outputs)`` too.

        Returns:
            What the closure returned.

        Raises:
            RuntimeError: If a layer method lost its module (after a copy), its refresh failed ``max_failures`` times,
                an option needs a closure and there is none, or the module has other parameters than at construction.
            TypeError: If a value of a wrong kind was written into a group; nothing has changed then.
            ValueError: If it is out of range, or excluded by another option.
        """
        curvature = self.preconditioner
        self._check_changed_options()
        self._prepare()
        self._join_ranks()
        self._checkpoint.gathered.tensors.clear()  # of a state that this step replaces
        self.comm.begin_step()
        returned = self._trust.evaluate(closure)
        curvature.check_gradients()
        self._join_ranks()  # the forward of a closure may have found other layers
        if not self.comm.updates:
            self._estimate_only()
            return returned
        if self._inputs.average_gradients(self):
            self._follow_schedule()  # as the others did in their forward
        gradients = self._table.gradients()
        self._session.compare_start(gradients)
        if not gradients:
            self._table.require_live()
            curvature.discard()
            return returned
        with self._runtime.stage("reduce"):
            statistics = curvature.collect()
        with self._runtime.stage("statistics"):
            ok, gate = self._inspect(gradients)
            if ok:
                curvature.learn(statistics, gradients, gate)
            else:
                self._trust.dropped()
                curvature.drop()
        if ok:
            with self._runtime.stage("refresh"):
                refreshed = curvature.refresh_due()
            with self._runtime.stage("share"):
                curvature.share(refreshed)
            self._trust.take(partial(self._move, gradients, gate), gradients, gate)
            if not self._trust.adapts_damping:
                self._watch_damping()
        self._advance()
        return returned

    def _watch_damping(self) -> None:
        """Warn once, early in training, if the damping hides the curvature of all that is covered."""
        if not self._watch.has_measured and (damped := self.preconditioner.report.damped(self._t)) is not None:
            self._watch.measure(damped)
        if (text := self._watch.verdict(type(self).__name__)) is not None:
            warnings.warn(text, stacklevel=depth_of_caller())

    def _join_ranks(self) -> None:
        """Meet the other ranks if that is needed, and find what a checkpoint has left out."""
        self._trust.refuse()
        if not self._session.is_connected:
            if self._join_config.enable and self.comm.combines:
                raise RuntimeError(
                    "layers were frozen, unfrozen or moved inside Join, where ranks without data cannot follow: do "
                    "that before or after it"
                )
            self._session.connect(self._facts())
        self.preconditioner.recover()

    def _facts(self) -> dict[str, list[str]]:
        """What must be equal on all ranks apart from the groups, in words."""
        return self.preconditioner.facts()

    def _estimate_only(self) -> None:
        """The step of a rank that estimates curvature for others."""
        if self.comm.stopped:
            self.preconditioner.discard()
            return
        with self._runtime.stage("reduce"):
            statistics = self.preconditioner.collect()
        with self._runtime.stage("statistics"):
            self.preconditioner.learn(statistics, self._table.gradients(), None)
        self._advance()

    # ------------------------------------------------------------------ checkpoints
    @property
    def warned_of_partial(self) -> bool:
        """Whether the user knows that `state_dict` is partial, of which it warns once; set it where that is meant."""
        return self._checkpoint.warned_of_partial

    @warned_of_partial.setter
    def warned_of_partial(self, known: bool) -> None:
        self._checkpoint.warned_of_partial = known

    def state_dict(self) -> dict[str, Any]:
        """State by parameter and group options, as ``torch.optim``; curvature as ``checkpoint_curvature`` says.

        No message is sent, so one rank may call it alone. Where curvature is spread over the ranks, the dict has what
        this rank holds, and says so under ``"partial"``: the same rank of an equal world can load it again. Call
        :meth:`consolidate_state_dict` on all ranks first to save everything on one.

        Returns:
            The state.
        """
        self._tabulate()
        self._checkpoint.curvature.settle(self._synchronize)
        self._follow_replaced()
        for p, group in self._table.group_of.items():
            if p.requires_grad and self._table.signature:  # a copy without its module does not know its rules
                self._update.allocate(p, group)
        return self._checkpoint.completed(super().state_dict())

    def consolidate_state_dict(self, to: int | None = 0, *, pieces: bool = True) -> None:
        """Gather the curvature of all ranks on one, whose ``state_dict()`` is complete until the next step.

        To be called on all ranks. The copies are kept on the CPU, and only on the rank that asked for them.

        Args:
            to: The rank; None for all of them. Checkpoints that all ranks write and read together need that for windows
                in parts, if they are to be read in another world: there before the state dict to read into is made too.
            pieces: Of parameters that ``fully_shard`` has cut, gather momentum and moments too. False before the
                functions of ``torch.distributed.checkpoint``, which all ranks call and which gather these themselves.

        Raises:
            ValueError: If there is no such rank.
            RuntimeError: If not all ranks call it, after the timeout of the process group.
        """
        self._checkpoint.require_module()
        self._checkpoint.gathered.require_rank(to)
        if self.comm.combines:
            self.comm.meet("consolidate_state_dict()")
            self._join_ranks()
            self._tabulate()
            self._checkpoint.gathered.gather(to, self._t, pieces=pieces)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; everything is checked before anything is changed, and every tensor is copied.

        A complete one loads under any number of ranks and any strategy: every rank takes the part that it holds. No
        message is sent.

        Raises:
            ValueError: If the dict does not fit, with the list of what differs.
            RuntimeError: If it has a part of the curvature only and that of other ranks, or if this is a copy of a
                layer method that was not attached to a module yet.
        """
        self._checkpoint.require_module()
        self._follow_replaced()
        state_dict = dict(state_dict)
        for pre in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre(self, state_dict)
            if replaced is not None:
                state_dict = replaced
        self._tabulate()
        self._checkpoint.install(self._checkpoint.read(state_dict, self._rebuild))
        self._session.has_compared = False  # every rank must have loaded the same step
        self._t = 0 if self._table.first is None else int(self.state[self._table.first].get("global_step", 0))
        self._tabulate()
        self._checkpoint.curvature.loaded(self._rebuild)
        for post in self._optimizer_load_state_dict_post_hooks.values():
            post(self)

    # ------------------------------------------------------------------ stages 0 and 1: gradients
    def _inspect(self, gradients: Directions) -> tuple[bool, Tensor | None]:
        """Drop a batch with a non-finite gradient whole: on the CPU by not stepping, else by a gate on the device."""
        finite = self._acceptable(gradients)
        if finite.device.type == "cpu":
            good = all_true_on_cpu(finite)
            self._skipped_steps += not good
            return good, None
        self._skipped_on_device = self._skipped_on_device + (~finite).to(torch.int64)
        return True, finite

    def _acceptable(self, gradients: Directions) -> Tensor:
        """Whether a step can use the gradients, a 0-dim bool tensor."""
        return self._table.shards.everywhere(all_finite(_as_real(list(gradients.values()))))

    # ------------------------------------------------------------------ stages 5 to 7: directions, their size, update
    def _move(self, gradients: Directions, gate: Tensor | None, *, quiet: bool = False) -> None:
        """Move the parameters by a step; profilers do not see that of a quiet one, and its directions are not kept."""
        stage: Callable[[str], AbstractContextManager[None]] = _unnamed if quiet else self._runtime.stage
        update = self._update
        update.count(gradients)
        with stage("precondition"):
            sources = update.sources(gradients, gate)
            directions = update.bound(self.preconditioner.propose(gradients, sources, gate), sources)
            if not quiet:
                self._keep(directions)
        with stage("update"):
            directions, size = self._trust.size(gradients, directions)
            update.apply(gradients, directions, gate, size)

    def _keep(self, directions: Directions) -> None:
        if self._kept_directions:
            found = {self._table.names[p]: d.clone() for p, d in directions.items()}
            for kept in self._kept_directions:
                kept.update(found)

    def _advance(self) -> None:
        self._t += 1
        if self._table.first is not None:
            self.state[self._table.first]["global_step"] = self._t
        self.comm.end_step()
        if self._runtime.clock is not None:
            self._runtime.clock.end_step()
        self._synchronize()

    # ------------------------------------------------------------------ reading
    @abstractmethod
    def dense_curvature(self, name: str) -> Tensor:
        """Curvature of a layer as a dense matrix."""

    @property
    def steps(self) -> int:
        """Number of steps taken, with those before a checkpoint that was loaded. Without gradients none is taken."""
        return self._t

    @property
    def module(self) -> nn.Module | None:
        """The module that the optimizer follows; None without one, as in a copy or after ``detach``."""
        return self._table.module

    @property
    def stage_clock(self) -> Clock | None:
        """The clock that ``time_stages`` was given; None if the stages are not timed."""
        return self._runtime.clock

    def parameter_name(self, p: nn.Parameter) -> str:
        """Name of a parameter of the groups, as ``describe`` shows it and ``keep_directions`` uses it."""
        return self._table.names[p]

    def _report(self) -> Report:
        self._tabulate()
        return Report(self._table, self.preconditioner, self.comm, self._runtime)

    def describe(self) -> str:
        """A table with one row per parameter: the block that covers it or the fallback and why, sizes, owner, bytes."""
        return self._report().describe()

    def __repr__(self) -> str:
        """As in ``torch.optim``, without the options that have the constructor's default; equal groups stand once."""
        return representation(type(self), self.param_groups, self.defaults, self._default_betas)

    def memory_usage(self) -> dict[str, int]:
        """Bytes that the optimizer holds on this rank, by kind, with ``"total"``."""
        return self._report().memory_usage()

    def plan(
        self, world_size: int | None = None, comm: CommStrategy | None = None, batch_size: int | None = None
    ) -> Plan:
        """What every rank of a world will store, send and compute, from shapes alone: nothing runs, nothing is sent.

        The world may be an imagined one, of thousands of ranks. Steps are those of a run that has long begun. Bytes
        sent are as the counter of a run counts them: the payload of messages, padding included.

        Args:
            world_size: Number of ranks; unset: those of the process group.
            comm: Strategy; unset: the optimizer's own. It is neither bound nor changed.
            batch_size: Examples per rank of a step, for what depends on them (the rows of HyLo); unset: as in the last
                refresh.

        Returns:
            The plan; ``print`` shows it as a table.

        Raises:
            TypeError: For a value of a wrong kind.
            ValueError: For a value out of range.
            NotImplementedError: For a strategy that has no plan, or that cannot serve this optimizer.
        """
        others = holdings_of_rules(self._table, self._update.keys, self._report().kind)
        reason_against_roles = getattr(self, "reason_against_roles", None)
        return dry_run(self.preconditioner, others, reason_against_roles, world_size, comm, batch_size)

    def diagnostics(self) -> dict[str, Any]:
        """Counters and factors as plain numbers; reading them may wait for the device."""
        return {
            "step": self._t,
            "skipped_steps": self._skipped_steps + int(self._skipped_on_device),
            "stage_ms": {} if self._runtime.clock is None else self._runtime.clock.last_step(),
        }


def _unnamed(stage: str) -> AbstractContextManager[None]:
    """Give a stage no name."""
    return nullcontext()


def _as_real(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
