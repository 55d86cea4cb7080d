"""Capture: from a training loop's own forward and backward to pending statistics, without touching either.

::

    root pre-hook    a forward of the model, or of one of its parts, begins: a ``Pass`` with its number of examples
    layer hook       only when capture is due: a tap on the layer output, holding the input
    tap, backward    (x, g) → the layer's statistic; the pass's examples are counted once
    root post-hook   the forward is over

Nothing is accumulated in forward, so activation checkpointing (which runs hooks twice) and forwards without a backward
change nothing. Two kinds of tap share one :meth:`Capture.record`: a tensor hook in eager mode (no copy of the output,
safe before an in-place activation) and an identity operator under ``torch.compile`` (no graph break).
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function
from torch.utils.hooks import RemovableHandle

from secondorder.capture.backwards import ALWAYS, REPLACED, Backwards, accumulates
from secondorder.capture.batch import BatchInput, Input, rules
from secondorder.capture.copies import conceal, remove
from secondorder.capture.fisher.observation import Observation
from secondorder.capture.layers.projections import WatchedAttention
from secondorder.capture.loss_scale import UNKNOWN, LossScale
from secondorder.capture.passes import Pass, order_of
from secondorder.capture.roots import Roots
from secondorder.capture.sites import Captured, Site, Statistic
from secondorder.capture.statistics.kronecker import Call
from secondorder.capture.taps import (
    CAPTURES,
    SECOND_BACKWARD,
    LayerHook,
    PartEnter,
    Reduced,
    RootEnter,
    RootLeave,
    Seen,
    Switch,
    in_backward,
    parts_called_alone,
)

_KEYS = itertools.count()
#: Forwards without a backward that are remembered.
_MAX_PASSES = 4096
#: Forwards that may wait to be observed though the model's own outputs are gone: something may have been computed from
#: them.
_WAITING_PASSES = 8

_HIGHER_ORDER = (
    "layer '{name}': its backward is being differentiated itself (create_graph=True), and Kronecker statistics of such "
    "a loss are not defined. Compute that term on a forward inside `with optimizer.pause_capture():`, leave the layer "
    "out with skip_layers, or use a method that needs no layer statistics."
)


class Capture(Observation):
    """Taps on the layers of a model and the statistics they fill.

    Args:
        roots: Modules whose forward is "a forward of the model"; of several, each a part of it, which every example
            passes through.
        batch_dim: Dimension of an input that counts examples.
        batch_input: The argument that counts them, or a function that does; None to judge by the forward pass.
        loss_scale: Scale that gradients carry.

    Attributes:
        batch_dim: As given.
        batch_input: As given.
        loss_scale: As given.
        keep: Which positions of the forwards that begin now are real, ``[N, S]``; None for all.
    """

    def __init__(
        self, roots: Iterable[nn.Module], batch_dim: int, batch_input: BatchInput | None, loss_scale: LossScale
    ) -> None:
        self.sites: list[Site] = []
        self.refused: dict[int, str] = {}
        #: Sites whose layer ran on no row at all since the last step.
        self.idle: set[int] = set()
        self.loss_scale = loss_scale
        loss_scale.register(self)
        #: Whether float16 gradients came of which nobody knows the scale.
        self.scale_is_unknown = False
        #: Whether gradients were reset while something was observed that no backward has reached.
        self._is_spared = False
        #: Whether statistics come from :meth:`observe` instead of the backward pass of the loss.
        self.observes = False
        self.batch_dim, self.batch_input = batch_dim, batch_input
        #: What speaks against the number of examples that was taken, in words, since the last step.
        self.doubts: set[str] = set()
        #: Times what capture costs a backward pass, if anybody asked.
        self.clock: Any = None
        self.keep: Tensor | None = None
        self._backward_ran = False
        self._backwards = Backwards()
        #: Weak reference to the optimizer: taps in an old graph may outlive it.
        self.owner: Callable[[], object | None] = lambda: self
        self.before_forward: Callable[[], Callable[[], None] | None] = lambda: None
        self.switch: Switch = Switch(next(_KEYS))
        CAPTURES[self.switch.key] = self
        self._passes: dict[int, Pass] = {}
        self._pass_ids = itertools.count()
        self._latest: Pass | None = None
        #: By root, the pass that began last.
        self._open: dict[int, Pass] = {}
        self._lock = threading.Lock()
        self._pauses = 0
        self._observing = False
        self._terms: Tensor | None = None
        #: Whether capture was paused since the last step: then a layer without statistics is no surprise.
        self.was_paused = False
        self._due: set[int] = set()
        self._void: set[int] = set()
        self._nodes: dict[int, Any] = {}
        self._pending: dict[int, Statistic] = {}
        self._own_examples: dict[int, int] = {}
        #: Hooks of layers; operators in compiled graphs know them by their position.
        self._parts: list[weakref.ref[nn.Module]] = []
        #: By identity, the parts of the model that have a layer which is tapped.
        self._tapped_parts: set[int] = set()
        self.taps: list[LayerHook] = []
        self._tap_handles: list[RemovableHandle] = []
        self._root_handles: list[RemovableHandle] = []
        modules = list(roots)
        counted_by = rules(batch_input, modules, batch_dim)
        self._roots = Roots(modules)
        self._order = order_of(modules)
        for number, (root, rule) in enumerate(zip(modules, counted_by, strict=True)):
            # Before that of fully_shard, which puts whole parameters in the place of those that are trained.
            first = any(_is_cut(p) for p in root.parameters())
            self._root_handles += [
                root.register_forward_pre_hook(RootEnter(self.switch, number, rule), with_kwargs=True, prepend=first),
                root.register_forward_hook(RootLeave(self.switch, number), always_call=True),
            ]
            parts = parts_called_alone(root)
            self._parts += [weakref.ref(part) for part in parts]
            self._root_handles += [
                part.register_forward_pre_hook(PartEnter(self.switch, number), with_kwargs=True, prepend=first)
                for part in parts
            ]
        conceal(self._root_handles)
        # A model may outlive its optimizer: its hooks then go.
        weakref.finalize(self, _retire, self.switch, self._tap_handles, self._root_handles)

    # ------------------------------------------------------------------ lifecycle
    def set_sites(self, sites: Iterable[Site], watched: Iterable[WatchedAttention] = ()) -> None:
        """Tap these layers and no others; what is pending for the old ones is dropped.

        Args:
            sites: The layers.
            watched: Attention modules among whose projections some of the taps are.
        """
        remove(self._tap_handles)
        self._tap_handles.clear()
        self.discard()
        self._passes.clear()
        self._open.clear()
        self._due.clear()
        self.refused.clear()
        self.sites = list(sites)
        self.taps.clear()
        self._roots.locate(self.sites)
        owners = {site.owner for site in self.sites}
        known = [found for ref in self._parts if (found := ref()) is not None]
        self._tapped_parts = {id(found) for found in known if any(p in owners for p in found.parameters())}
        for i, site in enumerate(self.sites):
            for module, part, adapter in site.taps:
                tap = LayerHook(self.switch, len(self.taps), i, adapter, part)
                self.taps.append(tap)
                # Before every other hook: those may change the output, and one of them closes the pass of a root.
                handle = module.register_forward_hook(tap, with_kwargs=True, prepend=True)
                self._tap_handles.append(handle)
                tap.handle = handle
            if _is_cut(site.owner):
                self._tap_handles.append(site.owner.register_post_accumulate_grad_hook(Reduced(self.switch)))
        switch = self.switch
        for attention in watched:
            self._tap_handles += attention.install(lambda: switch.armed)
        conceal(self._tap_handles)

    def arm(self, due: Iterable[int]) -> None:
        """Capture the given sites from now on, and no others."""
        self._due = set(due)
        for tap in self.taps:
            tap.armed = tap.index in self._due
        self.switch.armed = bool(self._due) and not self._pauses
        self.switch.depth, self.switch.token = 0, None
        self._nodes = {i: _gradient_node(self.sites[i].owner) for i in self._due}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let forwards inside the block pass untapped."""
        self._pauses += 1
        self.was_paused = True
        self.switch.armed = False
        try:
            yield
        finally:
            self._pauses -= 1
            self.switch.armed = bool(self._due) and not self._pauses

    @contextmanager
    def masked(self, keep: Tensor | None) -> Iterator[None]:
        """Let forwards inside the block know which positions are real."""
        before, self.keep = self.keep, keep
        try:
            yield
        finally:
            self.keep = before

    def close(self) -> None:
        """Remove every hook and drop what is pending."""
        self.arm(())
        self.set_sites(())
        remove(self._root_handles)
        self._root_handles.clear()

    @property
    def is_closed(self) -> bool:
        """Whether its hooks were removed, for good."""
        return not self._root_handles

    def discard(self) -> None:
        """Forget the pending statistics (their gradients were discarded)."""
        self._pending, self._own_examples = {}, {}
        self._roots.clear()
        self._backward_ran = self.scale_is_unknown = self.switch.reduced = self._is_spared = False
        self._terms = None
        self._backwards.clear()
        self._void.clear()
        self._passes = {i: p for i, p in self._passes.items() if not p.counted}

    def give_up(self) -> None:
        """Discard what is pending; until the step, remember that its gradients may have been kept elsewhere."""
        is_unclear = self._backwards.is_unclear or (bool(self._pending) and self._backwards.accumulated)
        self.discard()
        self._backwards.is_unclear = is_unclear

    @property
    def is_paused(self) -> bool:
        """Whether forwards pass untapped."""
        return self._pauses > 0

    @property
    def awaits_backward(self) -> bool:
        """Whether forwards are observed, and no gradient has been computed since the last step."""
        return self.observes and not self._backward_ran

    def spare(self) -> None:
        """Keep what was observed though gradients are reset, if a backward comes before the next forward."""
        self._is_spared = True

    @property
    def due(self) -> frozenset[int]:
        """Sites being captured."""
        return frozenset(self._due)

    @property
    def pending(self) -> Mapping[int, Statistic]:
        """Statistics captured since the last step, by site."""
        return self._pending

    def follow_scale(self, changes: bool) -> None:
        """Leave out what was captured at a scale that was not known then.

        Args:
            changes: Whether the scale is another than before.
        """
        if self.scale_is_unknown or (changes and (self._pending or self._void)):
            self.leave_out()  # better no statistics than some of a wrong size

    def leave_out(self, reason: str | None = None) -> None:
        """Leave the statistics of this step out, those captured already and those to come; its examples count.

        Args:
            reason: What to tell the user; None if there is nothing to tell.
        """
        self._pending.clear()
        self._void.update(range(len(self.sites)))
        self.refused = {i: why for i, why in self.refused.items() if why != UNKNOWN}
        if reason is None:
            self.was_paused = True
        else:
            self.refused.update(dict.fromkeys(self._due, reason))

    def take(self) -> Captured:
        """Hand over the pending statistics and start anew."""
        self._flush()
        examples = {i: self._roots.examples_of(i) + self._own_examples.get(i, 0) for i in self._pending}
        taken = Captured(self._pending, examples, frozenset(self.idle), self._terms, self._roots.examples)
        self.idle.clear()
        for index in self._pending:
            self.refused.pop(index, None)
        self._passes.clear()
        self._open.clear()
        self._latest = None
        self.discard()
        return taken

    # ------------------------------------------------------------------ forward
    def put_taps_first(self) -> None:
        """Move taps that are due before forward hooks that the user has put before them since."""
        for tap in self.taps:
            if tap.armed:
                tap.go_first()

    def drop_orphans(self) -> None:
        """Discard what is pending if its gradients are gone (``model.zero_grad()`` was called, not the optimizer's).

        Those that ``torch.autograd.grad`` returned were never in ``.grad``, and are the user's to add up.
        """
        if (
            (self._pending or self._roots.examples)
            and self._backward_ran
            and not self._backwards.only_returned
            and self._gradients_are_gone()
        ):
            self._drop()

    def _gradients_are_gone(self) -> bool:
        """Whether no parameter has a gradient; those that ``fully_shard`` cuts are elsewhere until they are reduced."""
        return all(s.owner.grad is None and (self.switch.reduced or not _is_cut(s.owner)) for s in self.sites)

    def _drop(self) -> None:
        """Discard what is pending, though its gradients may be part of the step."""
        self.discard()
        self._backwards.is_unclear = True

    def open_pass(self, inputs: Sequence[Input], root: int = 0, examples: int | None = None) -> int:
        """Begin a forward of a root with these inputs, and the user's number of examples; returns its id."""
        begun = self._open.get(root)
        if begun is not None and begun.is_stray and begun.is_open and not in_backward():
            # Parts of the model ran before it did, on the same batch.
            number = next((number for number, known in self._passes.items() if known is begun), None)
            if number is not None:  # it may be too old to be known
                begun.is_stray = False
                begun.enter(inputs, examples)
                return number
        return self._begin(Pass(inputs, self.batch_dim, self.keep, root, self._order, examples))

    def stray_pass(self, index: int) -> Pass:
        """The pass of a layer that is called while its root is not: what runs up to the backward is one pass."""
        root = self._roots.root_of(index)
        if (found := self._stray(root)) is None:
            self.drop_orphans()
            found = Pass((), self.batch_dim, self.keep, root, self._order)
            found.is_stray = True
            self._begin(found)
        return found

    def enter_part(self, part: nn.Module, inputs: Sequence[Input], root: int) -> None:
        """Note the input to a part of a root that is called while the root is not."""
        if id(part) not in self._tapped_parts:
            return  # it may be of another batch
        if (found := self._stray(root)) is None:
            found = Pass((), self.batch_dim, self.keep, root, self._order)
            found.is_stray = True
            self._begin(found)
        if found.is_stray:
            found.enter_part(id(part), inputs)

    def forward_of(self, current: Pass, seen: Seen) -> Pass:
        """The forward among those of a pass that a use of a layer belongs to."""
        if not current.is_stray:
            return current
        with self._lock:
            known = bool(current.forwards)
            found = current.forward_of(seen.site, seen.call)
            if not known:
                self._passes.update((next(self._pass_ids), one) for one in current.forwards)
        return found

    def _stray(self, root: int) -> Pass | None:
        """The pass that a layer outside of the root's forward belongs to, if one has begun and no backward has come."""
        found = self._open.get(root)
        return found if found is not None and found.is_open else None

    def _begin(self, current: Pass) -> int:
        number = next(self._pass_ids)
        for old in self.observable()[: -_WAITING_PASSES * len(self._roots)]:
            if old.is_dropped:
                old.edges.clear()  # a forward that nobody will observe must not keep its graph
        self._passes[number] = current
        if not in_backward():
            if self._is_spared and self.awaits_backward:
                self.discard()  # no backward came: the batch was given up
            self._flush()
            self._latest = self._open[current.root] = current
            self._roots.join(current)
        if len(self._passes) > _MAX_PASSES:
            # Forwards without a backward: the oldest can no longer matter.
            self._passes.pop(next(iter(self._passes)))
        return number

    def pass_of(self, token: Tensor) -> Pass | None:
        """The pass that a token names, if it is known still."""
        return self._passes.get(int(token.numpy()))

    def find_pass(self, token: Tensor | None, index: int) -> Pass | None:
        """The pass of a call of a layer.

        Args:
            token: What its root's forward left; None or -1 if that has not been called.
            index: The site.

        Returns:
            The pass; None if the call is a recomputation of a forward that nobody knows.
        """
        number = -1 if token is None else int(token.numpy())
        if number >= 0:
            return self._passes.get(number)
        return self._latest if in_backward() else self.stray_pass(index)

    def enter_backward(self, current: Pass) -> None:
        """The gradient has reached the output of ``current``: recomputed layers belong to it."""
        self._latest = current
        if self._observing or self._pauses:
            return
        self._backward_ran = True
        if self.observes:
            # What was observed is added up already, whatever this backward does with its gradients.
            for kind in {accumulates(node) for node in self._nodes.values()} - {None}:
                if self._backwards.returned if kind else self._backwards.accumulated:
                    self._backwards.mix()
                self._note_backward(bool(kind))

    def _note_backward(self, accumulated: bool) -> None:
        self._backwards.note(accumulated)
        if accumulated and self._backwards.is_unclear:
            self._backwards.remember_later([site.owner for site in self.sites])

    def leave_out_replaced(self) -> bool:
        """Leave the statistics of this step out if its gradients are not those of the backward passes behind them.

        Returns:
            Whether that was so.
        """
        if not self._backwards.were_replaced([site.owner for site in self.sites]):
            return False
        self.leave_out(REPLACED)
        self._roots.clear()
        return True

    # ------------------------------------------------------------------ backward
    def wants(self, index: int) -> bool:
        """Whether the backward that is running belongs to the gradient of this due site.

        Returns:
            True if its gradients are to be recorded.

        Raises:
            RuntimeError: If that backward is itself being differentiated.
        """
        if index not in self._due or self._pauses or self.observes or self.owner() is None:
            return False
        if torch.is_grad_enabled():
            raise RuntimeError(_HIGHER_ORDER.format(name=self.sites[index].name))
        kind = accumulates(self._nodes.get(index))
        return kind is not None and self._counts(kind)

    def _counts(self, accumulated: bool) -> bool:
        """Whether a backward counts that accumulates gradients, or else returns them; the others may be discarded."""
        if not accumulated and self._backwards.accumulated:
            # What this one returns may be for another purpose: .grad will tell at the step.
            if not self._backwards.is_unclear:
                self._backwards.is_unclear = True
                self._backwards.remember([site.owner for site in self.sites])
            return False
        if accumulated and self._backwards.only_returned:
            self._drop()  # likewise
        self._note_backward(accumulated)
        return True

    def refuse(self, index: int, reason: str) -> None:
        """Leave a layer out of this step's statistics: they would be wrong."""
        self.refused[index] = reason
        self._void.add(index)
        self._pending.pop(index, None)

    def record(self, seen: Seen, g: Tensor, current: Pass | None) -> None:
        """Take in the gradient ``g`` at the output of a use of a layer.

        Raises:
            RuntimeError: If this is the second backward through one forward.
        """
        timed = nullcontext() if self.clock is None else self.clock.stage("capture")
        with record_function("secondorder.capture"), timed:
            self._record(seen, g, current)

    def _record(self, seen: Seen, g: Tensor, current: Pass | None) -> None:
        self._backward_ran = True
        if g.dtype == torch.float16 and self.loss_scale.scaler is None and not self.scale_is_unknown:
            # Layers that run in float32 carry the same scale, and nothing in them tells.
            self.scale_is_unknown = True
            self.leave_out(UNKNOWN)
        x, adapter = seen.x, seen.adapter
        keep, shared, unclear = None, False, False
        if current is not None:
            current = self.forward_of(current, seen)
            x, g = current.lay_out(x, g, adapter)
            keep, shared = current.mask_for(g, adapter), current.is_shared(x, g, adapter)
            unclear = current.is_unclear(x, g, adapter)
        unscale = self.loss_scale.inverse(g.device)
        call = Call(x, g.detach(), adapter, unscale, keep, seen.part, shared=shared, unclear=unclear)
        if current is None:
            self._record_alone(seen.site, call)
        else:
            self._record_in_pass(seen.site, call, current)

    def _record_alone(self, index: int, call: Call) -> None:
        examples = 1 if call.adapter.is_unbatched(call.g if call.x is None else call.x) else call.g.shape[0]
        self._own_examples[index] = self._own_examples.get(index, 0) + examples
        self._add(index, [call], examples)

    def _record_in_pass(self, index: int, call: Call, current: Pass) -> None:
        calls = current.calls.get(index, 0)
        done = current.done.get(index, 0) + 1
        if calls and done > calls:
            raise RuntimeError(SECOND_BACKWARD.format(name=self.sites[index].name))
        current.done[index] = done
        self._count(current)
        if current.examples is None:
            self._record_alone(index, call)
            return
        if call.g.numel() == 0:
            self.idle.add(index)  # an expert without a token says nothing about its factors
            return
        if index in self._void:
            return
        if not self._statistic(index).wants_whole_pass:
            self._add(index, [call], current.examples)
            return
        waiting = current.fired.setdefault(index, [])
        if calls and done >= calls:
            self._add(index, [*waiting, call], current.examples)
            del current.fired[index]
        else:
            # Copies: a compiled backward reuses the memory of its activations.
            waiting.append(call._replace(x=None if call.x is None else call.x.clone(), g=call.g.clone()))

    # ------------------------------------------------------------------ pending statistics
    def _count(self, current: Pass) -> None:
        """Count the examples of a pass, once."""
        with self._lock:
            if not current.counted:
                self._roots.count(current)
                current.counted = True
                if current.doubt:
                    self.doubts.add(f"{self._roots.name_of(current.root)} has: {current.doubt}")

    def _flush(self) -> None:
        """Add calls that waited for others of their pass (a branch without backward, a recomputed layer)."""
        for current in self._passes.values():
            for index, calls in current.fired.items():
                self._add(index, calls, current.examples or 0)
            current.fired.clear()

    def _statistic(self, index: int) -> Statistic:
        if index not in self._pending:
            self._pending[index] = self.sites[index].new_statistic()
        return self._pending[index]

    def _add(self, index: int, calls: list[Call], examples: int) -> None:
        if index in self._void:
            return
        try:
            self._statistic(index).add(calls, examples)
        except ValueError as error:
            self.refuse(index, str(error))


def _retire(switch: Switch, *handles: list[RemovableHandle]) -> None:
    switch.armed = False
    remove(itertools.chain(*handles))


def _is_cut(parameter: nn.Parameter) -> bool:
    return hasattr(parameter, "device_mesh")


def _gradient_node(parameter: nn.Parameter) -> Any:
    if parameter.requires_grad and _is_cut(parameter):
        return ALWAYS
    return torch.autograd.graph.get_gradient_edge(parameter).node if parameter.requires_grad else None
