"""Capture of the statistics of a step from the forward and backward passes of a training loop, without changing them.

::

    root pre-hook    a forward of the model, or of one of its parts, begins: a ``Pass`` with its number of examples
    layer hook       only if statistics are due: a tap on the layer output, holding the input
    tap, backward    (x, g) → the layer's statistic; the pass's examples are counted once
    root post-hook   the forward is over

Nothing is accumulated in the forward pass, so activation checkpointing (which runs hooks twice) and forward passes
without a backward pass have no effect. Two kinds of taps use :meth:`Capture.record`: a tensor hook in eager mode (safe
before an in-place activation) and an identity operator under ``torch.compile`` (no graph break).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from secondorder.capture.backwards import REPLACED, Backwards, are_gone
from secondorder.capture.batch import BatchInput, Input, rules
from secondorder.capture.fisher.observation import Observation
from secondorder.capture.forwards import Forwards
from secondorder.capture.gate import Gate
from secondorder.capture.hooks import ModelHooks
from secondorder.capture.layers.attention import WatchedAttention
from secondorder.capture.loss_scale import LossScale
from secondorder.capture.passes import Pass
from secondorder.capture.sites import Captured, Site
from secondorder.capture.statistics.call import Call
from secondorder.capture.step_statistics import StepStatistics
from secondorder.capture.taps import CAPTURES, SECOND_BACKWARD, Seen, in_backward

_HIGHER_ORDER = (
    "layer '{name}': its backward is differentiated again (create_graph=True), and Kronecker statistics of such a loss "
    "are not defined. Compute this term on a forward inside `with optimizer.pause_capture():`, leave the layer "
    "out with skip_layers, or use a method that needs no layer statistics."
)


class Capture:
    """Taps on the layers of a model and the statistics that they fill.

    Args:
        roots: Modules whose forward is "a forward of the model". If there are several, each is a part of the model, and
            every example passes through all of them.
        batch_dim: Dimension of an input that counts examples.
        batch_input: The argument that counts them, or a function; None to determine it from the forward pass.
        loss_scale: Scale that gradients carry.
        owner: Weak reference to the object that uses the statistics, since taps in an old graph may outlive it.
        before_forward: Returns the function that is called before each forward pass while nothing is pending, or None.
        observes: Whether statistics come from an observation instead of the backward pass of the loss.
        are_gone: Returns whether gradients were discarded; see :func:`secondorder.capture.backwards.are_gone`.

    Attributes:
        clock: The clock that measures the time of capture in a backward pass, or None.
        hooks: The hooks on the model.
        gate: Decides whether forward passes are captured.
        forwards: The forward passes since the last step.
        backwards: The backward passes since the last step.
        statistics: The statistics since the last step.
        observation: The object that pulls vectors back to the layers.
    """

    def __init__(
        self,
        roots: Iterable[nn.Module],
        batch_dim: int,
        batch_input: BatchInput | None,
        loss_scale: LossScale,
        *,
        owner: Callable[[], object | None],
        before_forward: Callable[[], Callable[[], None] | None],
        observes: bool = False,
        are_gone: Callable[[Sequence[nn.Parameter], bool], bool] = are_gone,
    ) -> None:
        modules = list(roots)
        self.batch_dim, self.batch_input, self.observes = batch_dim, batch_input, observes
        self.clock: Any = None
        self._owner, self._before_forward = owner, before_forward
        self.statistics = StepStatistics(loss_scale)
        self.forwards = Forwards(modules, batch_dim)
        self.backwards = Backwards(are_gone)
        self.observation = Observation(self.forwards, self.statistics)
        #: Whether gradients were reset while observed statistics had no backward pass yet.
        self._is_spared = False
        self.hooks = ModelHooks(modules, rules(batch_input, modules, batch_dim))
        self.gate = Gate(self.hooks.switch)
        CAPTURES[self.hooks.switch.key] = self

    # ------------------------------------------------------------------ lifecycle
    def set_sites(self, sites: Iterable[Site], watched: Iterable[WatchedAttention] = ()) -> None:
        """Tap only these layers, including projections of watched attention. Pending statistics are dropped."""
        self.discard()
        self.forwards.clear()
        self.statistics.set_sites(sites)
        found = self.statistics.sites
        self.forwards.roots.locate(found)
        self.backwards.owners = [site.owner for site in found]
        self.hooks.tap(found, watched)

    def arm(self, due: Iterable[int]) -> None:
        """Capture the given sites from now on, and no others."""
        wanted = self.statistics.due = set(due)
        self.hooks.arm(wanted)
        self.gate.arm(bool(wanted))
        self.backwards.watch(wanted)

    def close(self) -> None:
        """Remove all hooks and drop pending statistics."""
        self.arm(())
        self.set_sites(())
        self.hooks.remove()
        self.gate.is_closed = True

    def discard(self) -> None:
        """Discard the pending statistics, whose gradients were discarded."""
        self.statistics.clear()
        self.backwards.clear()
        self.forwards.discard()
        self.hooks.switch.reduced = self._is_spared = False

    def reset(self) -> None:
        """Handle a reset of gradients: discard pending statistics, unless their backward pass has not run yet.

        Observed statistics are kept if a backward pass comes before the next forward pass. Until the step, the capture
        keeps in mind that gradients may have been stored elsewhere.
        """
        if self._awaits_backward:
            self._is_spared = True
            return
        is_unclear = self.backwards.is_unclear or (bool(self.statistics.by_site) and self.backwards.accumulated)
        self.discard()
        self.backwards.is_unclear = is_unclear

    @property
    def _awaits_backward(self) -> bool:
        """Whether forwards are observed, and no gradient has been computed since the last step."""
        return self.observes and not self.backwards.has_run

    def take(self) -> Captured:
        """Return the pending statistics and start again."""
        self.statistics.flush(self.forwards)
        taken = self.statistics.take(self.forwards.roots)
        self.forwards.clear()
        self.forwards.latest = None
        self.discard()
        return taken

    def leave_out_replaced(self) -> bool:
        """Leave out this step's statistics if its gradients do not match its backward passes; return whether so."""
        if not self.backwards.were_replaced():
            return False
        self.statistics.leave_out(REPLACED)
        self.forwards.roots.clear()
        return True

    # ------------------------------------------------------------------ forward
    def prepare(self) -> None:
        """Prepare for a forward pass that begins."""
        self._drop_orphans()
        if not self.statistics.by_site and (callback := self._before_forward()) is not None:
            callback()
        if self.hooks.switch.armed:
            self.hooks.put_first()

    def _drop_orphans(self) -> None:
        """Discard pending statistics if their gradients are gone, because ``model.zero_grad()`` was called.

        Gradients that ``torch.autograd.grad`` returned were never in ``.grad``; the user adds them up.
        """
        is_pending = self.statistics.by_site or self.forwards.roots.examples
        if is_pending and self.backwards.gradients_are_gone(self.hooks.switch.reduced):
            self._drop()
        self.gate.update()

    def _drop(self) -> None:
        """Discard pending statistics although their gradients may be part of the step."""
        self.discard()
        self.backwards.is_unclear = True

    def open_pass(self, inputs: Sequence[Input], root: int = 0, examples: int | None = None) -> int:
        """Begin a forward pass of a root with inputs and the user's number of examples, and return its number."""
        number = self.forwards.resume(root, inputs, examples)
        return self._begin(self.forwards.make(self.gate.keep, root, inputs, examples)) if number is None else number

    def _begin(self, current: Pass) -> int:
        if not in_backward():
            if self._is_spared and self._awaits_backward:
                self.discard()  # there was no backward pass, so the batch was abandoned
            self.statistics.flush(self.forwards)
        return self.forwards.begin(current)

    def _stray_pass(self, root: int) -> Pass:
        """Begin a pass for everything that runs until the backward pass while the root is not called."""
        found = self.forwards.make(self.gate.keep, root)
        found.evidence.is_stray = True
        self._begin(found)
        return found

    def enter_part(self, part: nn.Module, inputs: Sequence[Input], root: int) -> None:
        """Record the input of a part of a root that is called while the root is not."""
        found = self.forwards.stray(root) or self._stray_pass(root)
        if found.evidence.is_stray:
            found.enter_part(id(part), inputs)

    def find_pass(self, token: Tensor | None, index: int) -> Pass | None:
        """Return the pass of a call of a layer; None if it is a recomputation of an unknown forward pass.

        Args:
            token: Token of the forward pass of its root; None or -1 if the root was not called.
            index: The site.
        """
        if token is not None and (number := int(token.numpy())) >= 0:
            return self.forwards.get(number)
        if in_backward():
            return self.forwards.latest
        root = self.forwards.roots.root_of(index)
        if (found := self.forwards.stray(root)) is None:
            self._drop_orphans()
            found = self._stray_pass(root)
        return found

    # ------------------------------------------------------------------ backward
    def enter_backward(self, current: Pass) -> None:
        """Record that the gradient has reached the output of ``current``, to which recomputed layers belong."""
        self.forwards.latest = current
        if self.observation.is_running or self.gate.is_paused:
            return
        self.backwards.has_run = True
        if self.observes:
            self.backwards.note_observed()

    def wants(self, index: int, again: bool = False) -> bool:
        """Return whether the running backward pass, of a recomputation or not, has the gradient of this due site.

        Raises:
            RuntimeError: If this backward pass is itself differentiated.
        """
        if index not in self.statistics.due or self.gate.is_paused or self.observes or self._owner() is None:
            return False
        if torch.is_grad_enabled():
            raise RuntimeError(_HIGHER_ORDER.format(name=self.statistics.sites[index].name))
        kind = self.backwards.kind(index, again)
        if kind is None or self.backwards.disregards(kind):
            return False
        if kind and self.backwards.only_returned:
            self._drop()  # returned gradients may have another purpose; the step checks .grad
        self.backwards.note(kind)
        return True

    def record(self, seen: Seen, g: Tensor, current: Pass | None) -> None:
        """Add the gradient ``g`` at the output of a use of a layer.

        Raises:
            RuntimeError: If this is the second backward through one forward.
        """
        timed = nullcontext() if self.clock is None else self.clock.stage("capture")
        with record_function("secondorder.capture"), timed:
            self._record(seen, g.detach(), current)

    def _record(self, seen: Seen, g: Tensor, current: Pass | None) -> None:
        self.backwards.has_run = True
        statistics, index = self.statistics, seen.site
        statistics.check_scale(g)
        unscale = statistics.loss_scale.inverse(g.device)
        if current is None:
            statistics.record(index, Call(seen.x, g, seen.adapter, unscale, part=seen.part), None)
            return
        current = self.forwards.forward_of(current, seen)
        if not current.expects(index):
            if self.backwards.accumulated:
                raise RuntimeError(SECOND_BACKWARD.format(name=statistics.sites[index].name))
            statistics.refuse(index, "torch.autograd.grad was called twice for one forward pass")
            return
        self.forwards.count(current)
        statistics.record(index, current.evidence.call_of(seen, g, unscale), current)
