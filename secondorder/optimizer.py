"""The base class of all methods, with the ``step()`` that they share and the parts of an optimizer.

::

    closure ─► gradients ─► collect ─► learn ─► refresh ─► share ─► sources ─► propose ─► bound ─► apply
    TrustRegion  ParameterTable        preconditioner (blocks or windows)      Update

An optimizer owns these parts, and none of them refers to it. ``CONTRIBUTING.md`` lists the files behind each stage.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, ClassVar, TypeVar, cast, overload

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from secondorder import options
from secondorder.capture.capture import Capture
from secondorder.capture.fisher.likelihood import Likelihood
from secondorder.capture.loss_scale import LossScale
from secondorder.checkpoint.checkpoint import Checkpoint
from secondorder.comm.join import JOIN_DISABLED, Joinable, JoinHook, UnevenInputs, joining_group
from secondorder.comm.layout import is_cut
from secondorder.comm.names import default_strategy
from secondorder.comm.strategy import CommStrategy, Unit
from secondorder.curvature.wrappers import as_root, clean_name, unwrap
from secondorder.diagnostics.report import Report, representation
from secondorder.diagnostics.step_record import StepRecord
from secondorder.parallel.session import RankSession
from secondorder.parallel.shards import require_separate_parameters
from secondorder.parameters import Directions, Group, ParameterTable
from secondorder.plan.plan import Plan
from secondorder.plan.planner import dry_run, holdings_of_rules
from secondorder.preconditioners.allocation import Allocator
from secondorder.preconditioners.group_options import GroupOptions
from secondorder.preconditioners.parts import Shared
from secondorder.preconditioners.recipe import Recipe
from secondorder.runtime import Clock, Runtime, outside_of_graphs
from secondorder.update import Update

ReturnedT = TypeVar("ReturnedT")
SelfT = TypeVar("SelfT", bound="SecondOrderOptimizer")


class SecondOrderOptimizer(Optimizer, Joinable):
    """Base class of all methods. It runs the stages of a step and applies the first-order rules at its end.

    A method supplies a recipe and the checks of its own options, but never its own ``step``.

    Args:
        given: The arguments of the method's constructor by name. ``params``, ``module``, ``comm``, ``grad_scaler`` and
            the options of groups are used. Only ``params``, ``lr`` and the options in ``checks`` are required.
        recipe: The parts that are specific to the method.

    Raises:
        ValueError: If an option is invalid, the method needs a module and has none, or the options of ranks differ.
        RuntimeError: If not all ranks of a process group construct the optimizer.

    Attributes:
        comm: The communication strategy.
        preconditioner: The curvature, which carries out the stages of a step.
        loss_scale: The loss scale of float16 training.
        group_options: The options of groups: their checks, their defaults, and rules about combinations.
    """

    comm: CommStrategy
    #: Checks of the options that only this method has.
    checks: ClassVar[dict[str, options.Check]] = {}
    # The class needs it too, because copies are made without the constructor.
    _join_config = JOIN_DISABLED

    def __init__(self, given: Mapping[str, Any], recipe: Recipe) -> None:
        self._recipe, self.group_options = recipe, GroupOptions(type(self), recipe.rules)
        own = recipe.defaults(given, self.checks)
        root, params = recipe.find_module(type(self).__name__, given["params"], given.get("module"))
        self._begin(given.get("comm"))
        super().__init__(params, self.group_options.defaults(own))
        once = given.keys() & {"overlap", "partition", "compression"}  # options that no group has
        self.group_options.chosen = {**{name: given[name] for name in once}, **given.get("objects", {})}
        require_separate_parameters(type(self).__name__, root, [p for g in self.param_groups for p in g["params"]])
        if given.get("comm") is None and any(is_cut(p) for g in self.param_groups for p in g["params"]):
            self.comm = default_strategy(cut=True)  # sharded parameters have another default
        self._assemble()
        self.comm.claim(self)
        try:
            self.loss_scale.set(given.get("grad_scaler"), self.comm.averages)
            self._connect(root)
            self.loss_scale.require_common(self.comm.averages)
            self._table.shards.require_fitting_strategy()
            self.comm.admit(self)
            self._join_ranks()
        except BaseException:
            self.close()  # remove the hooks of an optimizer that was rejected
            raise
        self._table.warn_uncovered(self.preconditioner.covered)
        self.group_options.warn_without_effect(self.param_groups)

    # ------------------------------------------------------------------ the parts
    def _begin(self, comm: CommStrategy | None) -> None:
        """Create the parts that torch needs when it adds the groups."""
        if comm is not None and not isinstance(comm, CommStrategy):
            raise TypeError(f"comm must be a CommStrategy, got {comm!r}")
        self.comm = comm if comm is not None else default_strategy()
        self.loss_scale = LossScale()
        self._runtime, self._record = Runtime(), StepRecord()
        allocating, entries = self._recipe.allocating, dict(self._recipe.catalog)
        self._table = ParameterTable(type(self).__name__, allocating, entries=entries)

    def _assemble(self, kept: Mapping[str, Any] | None = None) -> None:
        """Create the parts that depend on the strategy. A copy passes what the original preconditioner kept."""
        method, comm, table, runtime, recipe = type(self).__name__, self.comm, self._table, self._runtime, self._recipe
        follow = weakref.WeakMethod(self._follow_forward)
        self.preconditioner = recipe.precondition(Shared(method, comm, table, runtime, self.loss_scale, follow), kept)
        table.interval = self.preconditioner.refresh_interval
        self._update = Update(table, self.preconditioner)
        self._trust = recipe.judge(self.preconditioner, self._update)
        curvature, divided = recipe.checkpoint_adapters(self.preconditioner)
        checkpoint = Checkpoint(
            comm, table, runtime, curvature, self._update.keys, self.group_options, self.defaults, divided
        )
        session = RankSession(comm, table, runtime)

        def place(units: Sequence[Unit]) -> None:
            checkpoint.gathered.tensors.clear()  # other ranks may own these tensors from now on
            session.place(units)

        self._checkpoint, self._session = checkpoint, session
        self._inputs = UnevenInputs(comm, table, {*self.defaults, "betas"})  # groups always have betas
        self._allocator = Allocator(table, runtime, self.preconditioner, self._update, place)
        self.role_worker = recipe.worker(self.preconditioner, weakref.WeakMethod(self._advance))

    def _tabulate(self) -> None:
        """Update the parts with everything that the user or ``load_state_dict`` may have replaced."""
        self._runtime.renew(self.state, self.param_groups)
        self._table.groups = self.param_groups
        self._table.state = cast("MutableMapping[nn.Parameter, dict[str, Any]]", self.state)

    def _connect(self, root: nn.Module | None) -> None:
        """Make a plan for a module, and register hooks on it if the method needs them."""
        self._trust.check_module(root)
        self._tabulate()
        self._table.root = None if root is None else unwrap(root)
        self.preconditioner.plan.clear([p for group in self.param_groups for p in group["params"]])
        self._allocator.rebuild()
        self.preconditioner.hooks.hook()
        self._table.is_followed = True

    def _follow_forward(self) -> None:
        """Apply changes of intervals and frozen layers since the last step to the forward pass that begins."""
        self.group_options.check_changes(self.param_groups)
        self._tabulate()
        if not self._table.is_gathered():
            self._allocator.synchronize()
        self.preconditioner.hooks.follow_schedule()

    @property
    def grad_scaler(self) -> Any:
        """The loss scaler of float16 training, whose scale is divided out of the statistics. Set it at any time."""
        return self.loss_scale.scaler

    @grad_scaler.setter
    def grad_scaler(self, scaler: Any) -> None:
        self.loss_scale.set(scaler, self.comm.averages)

    # ------------------------------------------------------------------ groups
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters. Options that it does not set have their defaults.

        A window method extends the existing rows with zeros.

        Raises:
            ValueError: If an option of the group is out of range.
            TypeError: If an option of the group has the wrong type.
            RuntimeError: If a larger window does not fit into free memory, or cannot be sharded. A window method does
                not add the group then.
        """
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, got {type(param_group)}")
        is_late = bool(self._table.group_of)  # False while the constructor adds its groups
        group = self.group_options.completed(param_group, self.defaults, self.param_groups, is_late)
        super().add_param_group(self._table.named_like_the_others(group))
        group = self.param_groups[-1]
        group.setdefault("fallback_base_lr", float(group["lr"]))
        if is_late:
            self._tabulate()
            try:
                self.preconditioner.hooks.replanned(self._allocator.rebuild())
            except BaseException:
                self.preconditioner.plan.take_back(group)
                raise
        self.group_options.rules.added(self.param_groups, self.steps)
        if is_late:
            self.group_options.warn_without_effect([group])

    def check_groups(self, groups: list[Group]) -> None:
        """Check new values of ``param_groups`` for options that exclude each other, without changing anything.

        Raises:
            ValueError: If options of a group exclude each other, or groups that share curvature have different options.
        """
        for group in groups:
            self.group_options.rules.check(group, groups)

    # ------------------------------------------------------------------ copies and ends
    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles: everything except the module, the hooks and the loss scaler."""
        found, table = super().__getstate__(), self._table
        state = self.preconditioner.plan.state_of_copies(cast("Any", self.state))
        kept = {
            "names": dict(table.names),
            "comm": self.comm,
            "step": self.steps,
            "betas": self.group_options.betas,
            "chosen": self.group_options.chosen,
            "entries": dict(table.entries),
            "recipe": self._recipe.copied(self.preconditioner),
            "curvature": self.preconditioner.kept(),
        }
        return {**found, "state": state, "_kept": kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy."""
        state = dict(state)
        kept = state.pop("_kept", None)
        defaults = dict(state.get("defaults", {}))
        super().__setstate__(state)
        if defaults:  # torch may have added entries
            self.defaults.clear()
            self.defaults.update(defaults)
        if kept is not None:
            self._restore(kept)
        self.group_options.fill(self.param_groups, self.defaults)
        self._tabulate()
        if kept is not None:
            self._allocator.rebuild()

    def _restore(self, kept: dict[str, Any]) -> None:
        self._recipe = kept["recipe"]
        self.group_options = GroupOptions(type(self), self._recipe.rules)
        self.group_options.betas, self.group_options.chosen = kept["betas"], kept.get("chosen", {})
        self._begin(kept["comm"])
        self._table.names, self._runtime.step = kept["names"], kept["step"]
        self._table.entries.update(kept["entries"])
        self._tabulate()
        self._table.regroup()
        self._assemble(kept["curvature"])

    def attach(self, module: nn.Module | Sequence[nn.Module]) -> None:
        """Connect to a module, or to the parts of a model, after ``copy.deepcopy``, unpickling or :meth:`detach`.

        If the optimizer holds none of the module's parameters, because both were copied separately, its parameters are
        replaced by the parameters of the module with the same names and shapes.

        Raises:
            ValueError: If the module does not have matching parameters.
            TypeError: If the argument is neither a module nor a list of modules.
        """
        root = as_root(module)
        mine, theirs = {p for g in self.param_groups for p in g["params"]}, dict(root.named_parameters())
        if not mine & set(theirs.values()):
            self.preconditioner.plan.replace(self._table.repoint({clean_name(n): p for n, p in theirs.items()}))
        self.detach()
        self._table.names.clear()
        self.comm.claim(self)
        self._connect(root)

    def detach(self) -> None:
        """Remove all hooks of this optimizer. Hooks of other optimizers on the same module stay. Idempotent."""
        self._table.is_followed = False
        self.preconditioner.detach()

    def close(self) -> None:
        """Remove all hooks and close the communication strategy. Idempotent."""
        try:
            self.comm.close()  # this may take steps without data
        finally:
            self.detach()
            self._session.close()

    def __enter__(self: SelfT) -> SelfT:
        """Return the optimizer. Leaving the block closes it."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Close."""
        if error is not None:
            self.comm.abandon(error)
        self.close()

    # ------------------------------------------------------------------ capture
    @property
    def capture(self) -> Capture:
        """The object that captures the statistics of the blocks.

        Raises:
            RuntimeError: If the optimizer was closed, or is a copy without a module.
            AttributeError: If the method captures nothing, as is the case for window methods.
        """
        return self.preconditioner.hooks.capture

    @property
    def fisher(self) -> str:
        """The Fisher estimate: the argument ``fisher``, and ``"empirical"`` for window methods."""
        return self._recipe.fisher.kind

    @property
    def blocks(self) -> Mapping[str, Any]:
        """The blocks by module name; for a window method, the windows by name."""
        return self.preconditioner.plan.by_name

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients and the statistics captured since the last step.

        Statistics from ``observe`` stay until the backward pass of the same forward pass.
        """
        super().zero_grad(set_to_none)
        self.preconditioner.hooks.spare()

    def pause_capture(self) -> AbstractContextManager[None]:
        """Capture no statistics from forward passes inside the ``with`` block."""
        return self.preconditioner.hooks.pause()

    def mask(self, keep: Tensor | None) -> AbstractContextManager[None]:
        """Exclude padding from the statistics of forward passes inside the ``with`` block.

        If the input of a layer has the leading dimensions of the mask, transposed or flattened dimensions included, its
        rows are left out where the mask is False. Other layers, such as those after pooling, are not affected. The mask
        has no effect on window methods.

        Args:
            keep: Mask ``[N, S]``, True (or 1, as in attention masks) for real positions; None for no mask.

        Raises:
            TypeError: If the mask is not a tensor of bools or integers. A mask of floats is one to add to scores.
            ValueError: If the mask has another shape.

        Returns:
            The context manager.
        """
        return self.preconditioner.hooks.mask(keep)

    def observe(
        self,
        outputs: Tensor | Sequence[Tensor],
        likelihood: str | Likelihood | Sequence[str | Likelihood],
        targets: Tensor | None | Sequence[Tensor | None] = None,
    ) -> None:
        """Estimate the Fisher from the model's own predictions, for ``fisher`` other than ``"empirical"``.

        Call this between the forward pass and ``loss.backward()``, for every micro-batch. It pulls vectors of the loss
        curvature back to the layers in separate backward passes, which do not change ``.grad``, the graph or the random
        state. It does nothing for window methods, or if the Fisher needs no such pass or no statistics are due.

        Args:
            outputs: The outputs of the model, logits ``[N, …]``; a sequence for a model with several heads.
            likelihood: ``"categorical"``, ``"bernoulli"``, ``"gaussian"`` (a summed squared error) or an object, such
                as ``Categorical(class_dim=1)``; one per head.
            targets: Targets, which are used only to find entries that the loss ignores; one per head.

        Raises:
            ValueError: If a likelihood is unknown, or the exact Fisher needs too many passes.
            TypeError: If an argument has the wrong type.
            RuntimeError: If the outputs do not come from a captured forward pass, or their graph has been freed.
        """
        self.preconditioner.hooks.observe(outputs, likelihood, targets)

    def keep_directions(self) -> AbstractContextManager[dict[str, Tensor]]:
        """Keep the preconditioned directions of the steps inside the ``with`` block for inspection.

        Momentum and the learning rate are applied to these directions. Each step replaces the directions of the step
        before. Blocks can be nested; a step fills the dicts of all open blocks with the same tensors.

        Returns:
            A context manager, which yields a dict of directions by parameter name that each step fills.

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
        return self._record.directions()

    def time_stages(self, clock: Clock | None) -> None:
        """Time the stages of the following steps with a clock, such as ``secondorder.diagnostics.StageClock``.

        Args:
            clock: The clock, or None to stop.
        """
        self._runtime.clock = clock
        self.preconditioner.hooks.time_stages(clock)

    # ------------------------------------------------------------------ ranks
    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook that ``Join`` calls on a rank that has no data left.

        Args:
            **kwargs: Arguments of ``Join``, which are not used.

        Returns:
            The hook.

        Raises:
            NotImplementedError: If a rank without data cannot take part in the steps of the others.
        """
        reason = self._trust.why_not_joinable() or self._inputs.why_not_joinable(self.loss_scale.multiplies)
        if reason is not None:
            raise NotImplementedError(f"{type(self).__name__} cannot take part in Join: {reason}")
        return self._inputs.hook(self)

    @property
    def join_device(self) -> torch.device:
        """Device of the messages of ``Join``."""
        return self._inputs.device

    @property
    def join_process_group(self) -> Any:
        """Group of the messages of ``Join``, which is the default group, as for ``DistributedDataParallel``."""
        return joining_group()

    def reason_against_roles(self) -> str | None:
        """Return why ranks of several roles cannot run this method, or None if they can."""
        return self.group_options.rules.reason_against_roles(self.param_groups)

    # ------------------------------------------------------------------ the step
    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], ReturnedT]) -> ReturnedT: ...

    @outside_of_graphs  # its sizes, failures and messages depend on data
    @torch.no_grad()
    def step(self, closure: Callable[[], ReturnedT] | None = None) -> ReturnedT | None:
        """Perform one optimization step.

        Args:
            closure: Reevaluates the model and returns the loss. It is called once, with gradients enabled. Options that
                judge a step by the loss call it again; with them, it may also return ``(loss, outputs)``.

        Returns:
            The return value of the closure.

        Raises:
            RuntimeError: If a layer method has no module (after a copy), its refresh failed ``max_failures`` times, an
                option needs a closure and there is none, or no parameter of the groups is in the module any more.
            TypeError: If a value of the wrong type was written into a group. Nothing is changed then.
            ValueError: If such a value is out of range, or another option excludes it.
        """
        curvature = self.preconditioner
        self.group_options.check_changes(self.param_groups)
        self._tabulate()
        curvature.hooks.begin_step(self._allocator.synchronize)
        self._join_ranks()
        self._checkpoint.gathered.tensors.clear()  # this step replaces the gathered state
        self.comm.begin_step()
        returned = self._trust.evaluate(closure)
        curvature.hooks.check_gradients()
        self._join_ranks()  # the forward pass of a closure may have found other layers
        if not self.comm.updates:
            self._estimate_only()
            return returned
        if self._inputs.average_gradients(self):
            self._follow_forward()  # as the other ranks did in their forward pass
        gradients = self._table.gradients()
        self._session.compare_start(gradients)
        if not gradients:
            self._table.require_live()
            curvature.hooks.discard()
            return returned
        with self._runtime.stage("reduce"):
            statistics = curvature.collect()
        with self._runtime.stage("statistics"):
            ok, gate = self._record.gate(curvature.acceptable(gradients))
            curvature.inspected(gradients)
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
                self._record.watch_damping(curvature.report, type(self).__name__, self.steps)
        self._advance()
        return returned

    def _join_ranks(self) -> None:
        """Compare plans with the other ranks if necessary, and recompute curvature that a checkpoint left out."""
        self._trust.refuse()
        if not self._session.is_connected:
            if self._join_config.enable and self.comm.combines:
                raise RuntimeError(
                    "layers were frozen, unfrozen or moved inside Join, where ranks without data cannot follow: change "
                    "them before or after it"
                )
            self._session.connect({**self.preconditioner.facts(), **self.group_options.rules.facts()})
        self.preconditioner.recover()

    def _estimate_only(self) -> None:
        """Take the step of a rank that estimates curvature for other ranks."""
        if self.comm.stopped:
            self.preconditioner.hooks.discard()
            return
        with self._runtime.stage("reduce"):
            statistics = self.preconditioner.collect()
        with self._runtime.stage("statistics"):
            self.preconditioner.learn(statistics, self._table.gradients(), None)
        self._advance()

    # ------------------------------------------------------------------ checkpoints
    @property
    def warned_of_partial(self) -> bool:
        """Whether ``state_dict`` has warned that it is partial. Set it to True if a partial state is intended."""
        return self._checkpoint.warned_of_partial

    @warned_of_partial.setter
    def warned_of_partial(self, known: bool) -> None:
        self._checkpoint.warned_of_partial = known

    def state_dict(self) -> dict[str, Any]:
        """Return the state by parameter and the options of groups, in the format of ``torch.optim``.

        The option ``checkpoint_curvature`` selects the curvature in it. No message is sent, so a single rank may call
        this. If curvature is spread over the ranks, the dict contains only the part of this rank and is marked as
        ``"partial"``; the same rank of an equal world can load it again. To save everything on one rank, call
        :meth:`consolidate_state_dict` on all ranks first.

        Returns:
            The state.
        """
        self._tabulate()
        self._checkpoint.curvature.settle(self._allocator.synchronize)
        self._allocator.follow_changed()
        self._allocator.allocate_rules()
        hooks = self._optimizer_state_dict_post_hooks.copy()
        self._optimizer_state_dict_post_hooks.clear()
        try:
            packed = self._checkpoint.completed(super().state_dict())
        finally:
            self._optimizer_state_dict_post_hooks.update(hooks)
        for post in hooks.values():  # they receive the complete state
            replaced = post(self, packed)
            packed = packed if replaced is None else replaced
        return packed

    def consolidate_state_dict(self, to: int | None = 0, *, pieces: bool = True) -> None:
        """Gather the curvature of all ranks on one rank, whose ``state_dict()`` is complete until the next step.

        Call this on all ranks. The copies are kept on the CPU, and only on the rank ``to``.

        Args:
            to: The rank that gathers the curvature; None for all ranks. Use None for distributed checkpoints of sharded
                windows that another number of ranks will load. Before such a load, use it again before you make the
                state dict to load into.
            pieces: Whether to gather momentum and moments of parameters that ``fully_shard`` has sharded too. Set it to
                False before functions of ``torch.distributed.checkpoint``, which gather these themselves.

        Raises:
            ValueError: If there is no such rank.
            RuntimeError: If not all ranks call this within the timeout of the process group.
        """
        self._checkpoint.require_module()
        self._checkpoint.gathered.require_rank(to)
        if self.comm.combines:
            self.comm.meet("consolidate_state_dict()")
            self._join_ranks()
            self._tabulate()
            self._checkpoint.gathered.gather(to, self.steps, pieces=pieces)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state. It is checked completely before anything is changed, and every tensor is copied.

        A complete state loads with any number of ranks and any strategy; every rank takes its part without messages.

        Raises:
            ValueError: If the state does not match the optimizer. The message lists the differences.
            RuntimeError: If the state is the part of another rank, or if this is a copy of a layer method that has not
                been attached to a module yet.
        """
        self._checkpoint.require_module()
        if self._table.signature:  # a part of a layer may be frozen by now, which changes its block
            self._allocator.synchronize()
        state_dict = dict(state_dict)
        for pre in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre(self, state_dict)
            if replaced is not None:
                state_dict = replaced
        self._tabulate()
        self._checkpoint.install(self._checkpoint.read(state_dict, self._allocator.rebuild))
        self._session.has_compared = False  # check that every rank has loaded the same step
        first = self._table.first
        self._runtime.step = 0 if first is None else int(self.state[first].get("global_step", 0))
        self._tabulate()
        self._checkpoint.curvature.loaded(self._allocator.rebuild)
        for post in self._optimizer_load_state_dict_post_hooks.values():
            post(self)

    # ------------------------------------------------------------------ stages 5 to 7: directions, their size, update
    def _move(self, gradients: Directions, gate: Tensor | None, *, quiet: bool = False) -> None:
        """Update the parameters. A quiet step is hidden from profilers, and its directions are not kept."""
        stage = (lambda _: nullcontext()) if quiet else self._runtime.stage
        update = self._update
        update.count(gradients)
        with stage("precondition"):
            sources = update.sources(gradients, gate)
            directions = update.bound(self.preconditioner.propose(gradients, sources, gate), sources)
            if not quiet:
                self._record.keep(directions, self._table.names)
        with stage("update"):
            directions, size = self._trust.size(gradients, directions)
            update.apply(gradients, directions, gate, size)

    def _advance(self) -> None:
        """End a step."""
        self._runtime.step += 1
        if self._table.first is not None:
            self.state[self._table.first]["global_step"] = self.steps
        self.comm.end_step()
        if self._runtime.clock is not None:
            self._runtime.clock.end_step()
        self._allocator.synchronize()
        self.preconditioner.end_step()

    # ------------------------------------------------------------------ reading
    def dense_curvature(self, name: str) -> Tensor:
        """Return the undamped curvature of a layer as a dense matrix ``[n, n]`` over row-major ``vec([W | b])``.

        Args:
            name: Module name, or, for a window method, parameter name. Prefixes of wrappers are optional.

        Returns:
            The matrix, where ``n`` is the number of parameters of the layer.

        Raises:
            ValueError: If no layer or parameter with curvature has this name.
            RuntimeError: If there is no estimate yet, or part of it is on other ranks.
        """
        self._tabulate()
        return self.preconditioner.report.dense(name)

    @property
    def steps(self) -> int:
        """Number of steps taken, including those before a loaded checkpoint and those that dropped their batch.

        Steps without gradients do not count.
        """
        return self._runtime.step

    @property
    def module(self) -> nn.Module | None:
        """The module that the optimizer follows; None if there is none, as in a copy or after ``detach``."""
        return self._table.module

    @property
    def stage_clock(self) -> Clock | None:
        """The clock that was passed to ``time_stages``; None if the stages are not timed."""
        return self._runtime.clock

    def parameter_name(self, p: nn.Parameter) -> str:
        """Return the name of a parameter, as it is used by ``describe`` and ``keep_directions``."""
        return self._table.names[p]

    def _report(self) -> Report:
        self._tabulate()
        return Report(self.preconditioner, self._runtime)

    def describe(self) -> str:
        """Return a table with one row per parameter: its block or its fallback and the reason, sizes, owner, bytes."""
        return self._report().describe()

    def __repr__(self) -> str:
        """Return the ``repr`` of ``torch.optim``, without default options and with equal groups shown once."""
        options = self.group_options
        return representation(type(self), self.param_groups, self.defaults, options.betas, options.chosen)

    def memory_usage(self) -> dict[str, int]:
        """Return the bytes that the optimizer holds on this rank, by kind and with a ``"total"``."""
        return self._report().memory_usage()

    def plan(
        self, world_size: int | None = None, comm: CommStrategy | None = None, batch_size: int | None = None
    ) -> Plan:
        """Predict what every rank will store, send and compute, based only on shapes. Nothing is run or sent.

        The number of ranks may be any number, for example thousands. The plan describes the steps after the warm-up.
        Bytes sent are counted as in a run: the payload of messages with padding.

        Args:
            world_size: Number of ranks. If None, it is the size of the process group.
            comm: Strategy, which is neither bound nor changed. If None, it is the strategy of this optimizer.
            batch_size: Number of examples per rank and step, on which the rows of HyLo and the FLOPs of statistics
                depend. If None, it is the number in the last refresh.

        Returns:
            The plan. ``print`` shows it as a table.

        Raises:
            TypeError: If a value has the wrong type.
            ValueError: If a value is out of range.
            NotImplementedError: If the strategy has no plan, or cannot run this optimizer.
        """
        others = holdings_of_rules(self._table, self._update.keys, self._report().kind)
        return dry_run(self.preconditioner, others, self.reason_against_roles, world_size, comm, batch_size)

    def diagnostics(self) -> dict[str, Any]:
        """Return measurements of the last step and the current curvature as plain numbers.

        Values by layer do not include layers whose curvature is on other ranks. The call may wait for the device, but
        never for another rank, and changes nothing.

        Returns:
            A dict that ``json.dumps`` accepts. The page "Diagnostics" of the documentation explains every key.
        """
        self._tabulate()
        clock = self._runtime.clock
        return {
            "step": self.steps,
            "skipped_steps": self._record.skipped,
            "stage_ms": {} if clock is None else clock.last_step(),
            **self.preconditioner.report.diagnostics(),
            **self._update.diagnostics(),
            **self._trust.diagnostics(),
        }
