"""The one ``step()`` that every method shares, and the parts of which an optimizer consists.

::

    closure ─► gradients ─► collect ─► learn ─► refresh ─► share ─► sources ─► propose ─► bound ─► apply
    TrustRegion  ParameterTable        preconditioner (blocks or windows)      Update

An optimizer owns these parts; none of them knows the optimizer. ``CONTRIBUTING.md`` lists the files behind each stage.
"""

from __future__ import annotations

import weakref
from collections import ChainMap
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
from secondorder.checkpoint.checkpoint import Checkpoint, KnownOptions
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
from secondorder.runtime import Clock, Runtime
from secondorder.update import Update

ReturnedT = TypeVar("ReturnedT")
CallableT = TypeVar("CallableT", bound=Callable[..., Any])
SelfT = TypeVar("SelfT", bound="SecondOrderOptimizer")


def _outside_of_graphs(function: CallableT) -> CallableT:
    """Have ``torch.compile(optimizer.step)`` run a step as it is: one graph break, the same result.

    Factorisations that fail, statistics of several sizes and messages to other ranks have no place in a graph.

    Returns:
        The function, which the compiler leaves alone.
    """
    # torch's own optimizers use the first: it does not import the compiler before a step is taken.
    return cast("CallableT", getattr(torch, "_disable_dynamo", torch.compiler.disable)(function))


class SecondOrderOptimizer(Optimizer, Joinable):
    """Base of all methods: the stages of a step, in their order, and the first-order rules that end it.

    A method supplies a recipe and the checks of its own options, never its own ``step``.

    Args:
        given: The arguments of the method's constructor by name. ``params``, ``module``, ``comm``, ``grad_scaler`` and
            the options of groups are used. Of these, only ``params``, ``lr`` and the options in ``checks`` are needed.
        recipe: What is special about the method.

    Raises:
        ValueError: For a bad option, or without a module where the method needs one.
        RuntimeError: If the ranks of a process group do not all construct it; ``ValueError`` on all if they differ.

    Attributes:
        comm: The communication strategy.
        preconditioner: The stages of a step over all curvature.
        loss_scale: The loss scale of float16 training.
        group_options: The options of groups: their checks, their defaults, and rules about several of them.
    """

    comm: CommStrategy
    #: Checks of the options that only this method has.
    checks: ClassVar[dict[str, options.Check]] = {}
    # Of the class too, as copies are made without the constructor.
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
            self.comm = default_strategy(cut=True)  # nobody chose a strategy, and sharded parameters want another one
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
            self.close()  # a model keeps no hooks of an optimizer that was refused
            raise
        self._table.warn_uncovered(self.preconditioner.covered)
        self.group_options.warn_without_effect(self.param_groups)

    # ------------------------------------------------------------------ the parts
    def _begin(self, comm: CommStrategy | None) -> None:
        """Make the parts that torch needs when it adds the groups."""
        if comm is not None and not isinstance(comm, CommStrategy):
            raise TypeError(f"comm must be a CommStrategy, got {comm!r}")
        self.comm = comm if comm is not None else default_strategy()
        self.loss_scale = LossScale()
        self._runtime, self._record = Runtime(), StepRecord()
        allocating, entries = self._recipe.allocating, dict(self._recipe.catalog)
        self._table = ParameterTable(type(self).__name__, allocating, entries=entries)

    def _assemble(self, kept: Mapping[str, Any] | None = None) -> None:
        """Make the parts that depend on the strategy, for a copy with what the preconditioner of the original kept."""
        method, comm, table, runtime, recipe = type(self).__name__, self.comm, self._table, self._runtime, self._recipe
        follow = weakref.WeakMethod(self._follow_forward)
        self.preconditioner = recipe.precondition(Shared(method, comm, table, runtime, self.loss_scale, follow), kept)
        self._update = Update(table, self.preconditioner)
        self._trust = recipe.judge(self.preconditioner, self._update)
        known = KnownOptions(self.checks, ChainMap(self.defaults, {"betas": self.group_options.betas}), recipe.rules)
        saved, divided = recipe.saved(self.preconditioner)
        checkpoint = Checkpoint(method, comm, table, runtime, saved, self._update.keys, known, divided)
        session = RankSession(comm, table, runtime)

        def place(units: Sequence[Unit]) -> None:
            checkpoint.gathered.tensors.clear()  # other ranks may own them from now on
            session.place(units)

        self._checkpoint, self._session = checkpoint, session
        self._inputs = UnevenInputs(comm, table, list(self.defaults))
        self._allocator = Allocator(table, runtime, self.preconditioner, self._update, place)
        self.role_worker = recipe.worker(self.preconditioner, weakref.WeakMethod(self._advance))

    def _tabulate(self) -> None:
        """Give the parts what the user or ``load_state_dict`` may have replaced."""
        self._runtime.renew(self.state, self.param_groups)
        self._table.groups = self.param_groups
        self._table.state = cast("MutableMapping[nn.Parameter, dict[str, Any]]", self.state)

    def _connect(self, root: nn.Module | None) -> None:
        """Plan for a module, and hook it where that is needed."""
        self._trust.check_module(root)
        self._tabulate()
        self._table.root = None if root is None else unwrap(root)
        self.preconditioner.plan.clear([p for group in self.param_groups for p in group["params"]])
        self._allocator.rebuild()
        self.preconditioner.hooks.hook()
        self._table.is_followed = True

    def _follow_forward(self) -> None:
        """Let intervals and frozen layers that changed since the last step act on the forward that begins."""
        self.group_options.check_changes(self.param_groups)
        self._tabulate()
        if not self._table.is_gathered():
            self._allocator.synchronize()
        self.preconditioner.hooks.follow_schedule()

    @property
    def grad_scaler(self) -> Any:
        """The loss scaler of float16 training, divided out of what is captured; may be set at any time."""
        return self.loss_scale.scaler

    @grad_scaler.setter
    def grad_scaler(self, scaler: Any) -> None:
        self.loss_scale.set(scaler, self.comm.averages)

    # ------------------------------------------------------------------ groups
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; options that it does not give take their default.

        A window method adds zeros for its columns to the existing rows.

        Raises:
            ValueError: If an option of the group is out of range.
            TypeError: If it is of a wrong kind.
            RuntimeError: If a larger window does not fit into free memory, or cannot be sharded. A window method does
                not add the group then.
        """
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, got {type(param_group)}")
        is_late = bool(self._table.group_of)  # and not while the constructor adds its groups
        group = self.group_options.completed(param_group, self.defaults, self.param_groups, is_late)
        super().add_param_group(self._table.named_like_the_others(group))
        group = self.param_groups[-1]
        group.setdefault("fallback_base_lr", float(group["lr"]))
        if is_late:
            self.group_options.warn_without_effect([group])
            self._tabulate()
            try:
                self.preconditioner.hooks.replanned(self._allocator.rebuild())
            except RuntimeError:
                self.preconditioner.plan.take_back(group)
                raise
        self.group_options.rules.added(self.param_groups, self.steps)

    def check_groups(self, groups: list[Group]) -> None:
        """Refuse what ``param_groups`` is to become if options exclude each other; nothing is changed.

        Raises:
            ValueError: If options of a group exclude each other, or groups disagree where they share curvature.
        """
        for group in groups:
            self.group_options.rules.check(group, groups)

    # ------------------------------------------------------------------ copies and ends
    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles keep: everything but the module, the hooks and the loss scaler."""
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
        if defaults:  # torch has added to them
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
            self.preconditioner.plan.replace(self._table.repoint({clean_name(n): p for n, p in theirs.items()}))
        self.detach()
        self._table.names.clear()
        self.comm.claim(self)
        self._connect(root)

    def detach(self) -> None:
        """Remove every hook of this optimizer; another one on the same module keeps its own. Idempotent."""
        self._table.is_followed = False
        self.preconditioner.detach()

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

    # ------------------------------------------------------------------ capture
    @property
    def capture(self) -> Capture:
        """What captures the statistics of the blocks.

        Raises:
            RuntimeError: If the optimizer was closed, or is a copy without a module.
            AttributeError: If the method captures nothing, as those with windows.
        """
        return self.preconditioner.hooks.capture

    @property
    def fisher(self) -> str:
        """Which Fisher is estimated: the argument of this name, and ``"empirical"`` for a window of gradients."""
        return self._recipe.fisher.kind

    @property
    def blocks(self) -> Mapping[str, Any]:
        """Blocks by module name; the windows of a window method by their names."""
        return self.preconditioner.plan.by_name

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients, and with them the statistics captured since the last step.

        Between ``observe`` and the backward of the same forward there are no gradients of it yet: what was observed
        stays.
        """
        super().zero_grad(set_to_none)
        self.preconditioner.hooks.spare()

    def pause_capture(self) -> AbstractContextManager[None]:
        """Capture nothing of the forwards that run inside the ``with`` block."""
        return self.preconditioner.hooks.pause()

    def mask(self, keep: Tensor | None) -> AbstractContextManager[None]:
        """Keep padding out of the statistics of the forwards that run inside the ``with`` block.

        Rows of layers whose input has the leading dimensions of the mask (or its transpose, or both in one) are left
        out where it is False; other layers, such as those after pooling, are not touched. It has no effect on windows.

        Args:
            keep: ``[N, S]``, True (or 1, as attention masks have it) for real positions; None for no mask.

        Raises:
            TypeError: If it is no tensor of bools or integers; a mask of floats is one to be added to scores.
            ValueError: If its shape is another.

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
        """Estimate the Fisher of the model's own predictions, for ``fisher`` other than ``"empirical"``.

        To be called between the forward and ``loss.backward()``, for every micro-batch. It pulls vectors of the loss
        curvature back to the layers in passes of its own, which leave ``.grad``, the graph and the random state of
        the program as they were. Where the Fisher needs no such pass, or nothing is due, it does nothing; so it is for
        window methods.

        Args:
            outputs: What the model returned, logits ``[N, …]``; a sequence for a model with several heads.
            likelihood: ``"categorical"``, ``"bernoulli"``, ``"gaussian"`` (a summed squared error) or an object, such
                as ``Categorical(class_dim=1)``; one per head.
            targets: Only to find entries that the loss ignores; one per head.

        Raises:
            ValueError: If a likelihood is unknown, or the exact Fisher needs too many passes.
            TypeError: If an argument is of a wrong kind.
            RuntimeError: If the outputs do not come from a forward that was captured, or their graph is gone.
        """
        self.preconditioner.hooks.observe(outputs, likelihood, targets)

    def keep_directions(self) -> AbstractContextManager[dict[str, Tensor]]:
        """Keep the preconditioned directions of the steps inside the ``with`` block, for a look at them.

        They are what momentum and the learning rate are applied to; a later step replaces those of an earlier one.
        Blocks can be nested: a step fills the dicts of all that are open, with the same tensors.

        Returns:
            The context manager of a dict that each step fills: direction by parameter name.

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
        """Have a clock time the stages of the steps to come, such as a ``secondorder.diagnostics.StageClock``.

        Args:
            clock: The clock, or None to stop.
        """
        self._runtime.clock = clock
        self.preconditioner.hooks.time_stages(clock)

    # ------------------------------------------------------------------ ranks
    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What ``Join`` calls on a rank that has no data left.

        Args:
            **kwargs: Those of ``Join``; none is used.

        Returns:
            The hook.

        Raises:
            NotImplementedError: If such a rank cannot take the steps of the others.
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
        """Group of the messages of ``Join``: the default one, as of ``DistributedDataParallel``."""
        return joining_group()

    def reason_against_roles(self) -> str | None:
        """Return why ranks of several roles cannot serve this method, or None if they can."""
        return self.group_options.rules.reason_against_roles(self.param_groups)

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
        self.group_options.check_changes(self.param_groups)
        self._tabulate()
        curvature.hooks.begin_step(self._allocator.synchronize)
        self._join_ranks()
        self._checkpoint.gathered.tensors.clear()  # of a state that this step replaces
        self.comm.begin_step()
        returned = self._trust.evaluate(closure)
        curvature.hooks.check_gradients()
        self._join_ranks()  # the forward of a closure may have found other layers
        if not self.comm.updates:
            self._estimate_only()
            return returned
        if self._inputs.average_gradients(self):
            self._follow_forward()  # as the others did in their forward
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
        """Meet the other ranks if that is needed, and find what a checkpoint has left out."""
        self._trust.refuse()
        if not self._session.is_connected:
            if self._join_config.enable and self.comm.combines:
                raise RuntimeError(
                    "layers were frozen, unfrozen or moved inside Join, where ranks without data cannot follow: do "
                    "that before or after it"
                )
            self._session.connect({**self.preconditioner.facts(), **self.group_options.rules.facts()})
        self.preconditioner.recover()

    def _estimate_only(self) -> None:
        """The step of a rank that estimates curvature for others."""
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
        self._checkpoint.curvature.settle(self._allocator.synchronize)
        self._allocator.follow_replaced()
        self._allocator.allocate_rules()
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
            self._checkpoint.gathered.gather(to, self.steps, pieces=pieces)

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
        self._allocator.follow_replaced()
        state_dict = dict(state_dict)
        for pre in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre(self, state_dict)
            if replaced is not None:
                state_dict = replaced
        self._tabulate()
        self._checkpoint.install(self._checkpoint.read(state_dict, self._allocator.rebuild))
        self._session.has_compared = False  # every rank must have loaded the same step
        first = self._table.first
        self._runtime.step = 0 if first is None else int(self.state[first].get("global_step", 0))
        self._tabulate()
        self._checkpoint.curvature.loaded(self._allocator.rebuild)
        for post in self._optimizer_load_state_dict_post_hooks.values():
            post(self)

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
        """The undamped curvature of a layer as a dense ``[n, n]`` matrix over row-major ``vec([W | b])``.

        Args:
            name: Module name as in ``named_modules()``, or that of a parameter of a window method; wrapper prefixes
                may be left out.

        Returns:
            The matrix, ``n`` being the number of parameters of the layer.

        Raises:
            ValueError: If nothing that curvature covers has this name.
            RuntimeError: If there is no estimate yet, or a part of it is on other ranks.
        """
        self._tabulate()
        return self.preconditioner.report.dense(name)

    @property
    def steps(self) -> int:
        """Number of steps taken, with those before a checkpoint that was loaded. Without gradients none is taken."""
        return self._runtime.step

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
        options = self.group_options
        return representation(type(self), self.param_groups, self.defaults, options.betas, options.chosen)

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
            TypeError: If a value has the wrong type.
            ValueError: If a value is out of range.
            NotImplementedError: For a strategy that has no plan, or that cannot serve this optimizer.
        """
        others = holdings_of_rules(self._table, self._update.keys, self._report().kind)
        return dry_run(self.preconditioner, others, self.reason_against_roles, world_size, comm, batch_size)

    def diagnostics(self) -> dict[str, Any]:
        """What is going on, as plain numbers; layers whose curvature is on other ranks are left out of those by layer.

        Reading may wait for the device, never for another rank, and changes nothing.

        Returns:
            A dict that ``json.dumps`` takes; every key is explained on the page "Diagnostics" of the documentation.
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


def _unnamed(stage: str) -> AbstractContextManager[None]:
    """Give a stage no name."""
    return nullcontext()
