"""The capture of the statistics of blocks: hooks, and the statistics for the next step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from secondorder.capture.backwards import REPLACED
from secondorder.capture.capture import Capture
from secondorder.capture.fisher.fisher import ModelFisher, resolved
from secondorder.capture.fisher.observation import NothingObservedError
from secondorder.capture.layers.parts import watched_attention
from secondorder.capture.sites import Captured, Site, Statistic
from secondorder.capture.statistics.measurement import Reduced
from secondorder.curvature.block import Block, Due
from secondorder.curvature.wrappers import forwarded
from secondorder.parameters import Directions
from secondorder.preconditioners.capture_warnings import CaptureWarnings
from secondorder.preconditioners.hooks import check_mask
from secondorder.preconditioners.parts import Setting
from secondorder.runtime import Clock

if TYPE_CHECKING:
    from secondorder.preconditioners.block_plan import BlockPlan
    from secondorder.preconditioners.capture_schedule import CaptureSchedule


class LayerCapture:
    """Hooks the layers of blocks and captures the statistics that the next step uses.

    Args:
        setting: The parts of the optimizer that it uses.
        plan: The blocks.
        schedule: The schedule of the measurements of a step.
        rows_per_example: The largest number of rows of each example that a method can use, or None for no limit.

    Attributes:
        is_closed: Whether hooks were removed.
        due: The measurements of the next step, by index of the blocks whose statistics it uses on any rank.
    """

    def __init__(
        self, setting: Setting, plan: BlockPlan[Any], schedule: CaptureSchedule[Any], rows_per_example: int | None
    ) -> None:
        self._setting, self._plan, self._schedule = setting, plan, schedule
        self._fisher = ModelFisher(setting.fisher, setting.runtime, rows_per_example)
        #: Intervals that determined which statistics the next step uses.
        self._armed_for: list[tuple[Any, ...]] = []
        self.is_closed = False
        self.due: dict[int, Due] = {}
        self._capture: Capture | None = None
        self._warnings = CaptureWarnings(setting.method, plan)

    # ------------------------------------------------------------------ hooks
    def is_a_copy(self) -> str:
        """Return what to do with a copy that has no module."""
        return f"this {self._setting.method} is a copy and has no module to capture from: call attach(module) first"

    @property
    def is_hooked(self) -> bool:
        """Whether the layers of the module are hooked."""
        return self._capture is not None

    @property
    def capture(self) -> Capture:
        """The object that captures the statistics of the blocks.

        Raises:
            RuntimeError: If the optimizer was closed, or is a copy without a module.
        """
        if self._capture is None:
            if self.is_closed:
                raise RuntimeError(f"this {self._setting.method} was closed; call attach(module) to continue training")
            raise RuntimeError(self.is_a_copy())
        return self._capture

    def hook(self) -> None:
        """Hook the layers of the blocks."""
        root, blocks = self._setting.table.root, self._plan.blocks
        assert root is not None
        if self._capture is None:
            setting, chosen = self._setting, self._setting.layers
            self._capture = Capture(
                forwarded(root),
                chosen.batch.dim,
                chosen.batch.input,
                setting.loss_scale,
                owner=weakref.ref(self),
                before_forward=setting.before_forward,
                observes=setting.fisher.is_observed,
            )
            self._capture.clock = setting.runtime.clock
        sites = [self._site(b) for b in blocks]
        self._capture.set_sites(sites, watched_attention(root, {tap.module for b in blocks for tap in b.layer.taps}))
        self.is_closed = False
        self.arm()

    def _site(self, block: Block) -> Site:
        reference = weakref.ref(self)  # the hooks must not keep blocks and their state alive

        def new_statistic() -> Statistic:
            own = reference()
            assert own is not None
            return block.statistic(own.due[block.index])

        return Site(block.label, block.layer.taps, block.owner, new_statistic)

    def arm(self) -> None:
        """Capture the statistics that the next step uses."""
        if self._capture is not None:
            captures = self._setting.comm.captures
            self._armed_for, self.due = self._schedule.chosen_intervals(), self._schedule.find_due()
            self._capture.arm(i for i in self.due if captures(i))

    def replanned(self, changed: bool) -> None:
        """Hook the layers of new blocks, if there are any, and capture the statistics that the next step uses."""
        if changed and self.is_hooked:
            self.hook()
        self.arm()

    def begin_step(self, synchronize: Callable[[], None]) -> None:
        """Reject a step without a module. Its forward pass has already applied changes since the last step."""
        _ = self.capture

    def follow_schedule(self) -> None:
        """Apply intervals that changed since the last step to the forward pass that begins."""
        if self._schedule.chosen_intervals() != self._armed_for:
            self.arm()

    def time_stages(self, clock: Clock | None) -> None:
        """Time the capture with a clock, or stop timing."""
        if self._capture is not None:
            self._capture.clock = clock

    def detach(self) -> None:
        """Remove all hooks. Idempotent."""
        if self._capture is not None:
            self._capture.close()
            self._capture = None
            self.is_closed = True

    @contextmanager
    def pause(self, by_user: bool = True) -> Iterator[None]:
        """Capture nothing from forward passes inside the ``with`` block.

        Args:
            by_user: Whether the next step may lack statistics for this reason.
        """
        capture = self._capture
        if capture is None:
            yield
            return
        were_replaced = capture.backwards.were_replaced()
        try:
            with capture.gate.paused(by_user):
                yield
        finally:
            if not were_replaced:
                capture.backwards.remember()

    @contextmanager
    def mask(self, keep: Tensor | None) -> Iterator[None]:
        """Exclude padding from the statistics of forward passes inside the ``with`` block."""
        check_mask(keep)
        if self._capture is None:
            yield
            return
        with self._capture.gate.masked(None if keep is None else keep.bool().clone()):
            yield

    def observe(self, outputs: Any, likelihood: Any, targets: Any = None) -> None:
        """Pull vectors of the loss curvature back to the layers if the Fisher is that of the model."""
        heads, kinds, given = resolved(outputs, likelihood, targets)
        if not self._setting.fisher.is_observed:
            return
        capture, table, comm = self.capture, self._setting.table, self._setting.comm
        trains = table.root is None or any(part.training for part in forwarded(table.root))
        if capture.gate.is_paused or not capture.statistics.due or not trains:
            return
        rank = comm.data_rank if comm.combines else None
        is_sum = table.groups[0]["loss_reduction"] == "sum"
        try:
            self._fisher.observe(capture, heads, kinds, given, is_sum=is_sum, rank=rank)
        except NothingObservedError:
            # Layers without an estimate are due in every step, also those on which no output depends.
            has_estimate = [block.has_estimate for block in self._plan.blocks]
            if any(has_estimate[i] for i in capture.statistics.due) or not any(has_estimate):
                raise

    # ------------------------------------------------------------------ what was captured
    def take(self) -> Captured:
        """Return the statistics captured since the last step."""
        capture = self.capture
        self._setting.loss_scale.infer(capture.statistics, self._setting.comm.averages)
        taken = capture.take()
        self._warnings.warn_of_doubts(capture)
        return taken

    def discard(self) -> None:
        """Discard the statistics captured since the last step."""
        if self._capture is not None:
            self._capture.discard()

    def spare(self) -> None:
        """Discard the statistics captured since the last step, unless their backward pass has not run yet."""
        if self._capture is not None:
            self._capture.reset()

    def refused(self, block: Block) -> str | None:
        """Return why nothing can be captured for a block, or None."""
        return self._capture.statistics.refused.get(block.index) if self._capture is not None else None

    def refuse(self, block: Block, reason: str) -> None:
        """Record why the statistics of a block cannot be used."""
        self.capture.statistics.refused[block.index] = reason

    @property
    def nbytes(self) -> int:
        """Bytes of statistics that wait for the next step."""
        pending = self._capture.statistics.by_site.values() if self._capture is not None else ()
        return sum(int(getattr(s, "nbytes", 0)) for s in pending)

    def end_step(self) -> None:
        """Store the gradient of the step, and prepare for the next step."""
        self._fisher.end_step()
        self._warnings.remember_gradient()
        self.arm()

    def check_gradients(self) -> None:
        """Leave out the statistics of backward passes whose gradients were replaced."""
        if self._capture is not None and self._capture.leave_out_replaced():
            self._warnings.warn(REPLACED)

    def warn_uncaptured(self, reduced: Reduced, gradients: Directions) -> None:
        """Warn once about the layers that have a gradient but no statistics although they were due."""
        self._warnings.warn_of_missing(self.capture, reduced, gradients)
