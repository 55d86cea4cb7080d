"""Decides whether forward passes are captured, and which of their positions are real."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from secondorder.capture.taps import Switch


class Gate:
    """Arms the hooks of a capture while statistics are due and the user has not paused it.

    Args:
        switch: The switch of the hooks.

    Attributes:
        is_closed: Whether the hooks were removed permanently.
        was_paused: Whether the user paused capture since the last step, which explains layers without statistics.
    """

    def __init__(self, switch: Switch) -> None:
        self.is_closed = self.was_paused = self._is_due = False
        self._switch, self._pauses = switch, 0
        self._keep: Tensor | None = None
        self._leader: weakref.ref[Gate] | None = None

    def follow(self, leader: Gate) -> None:
        """Follow another gate: be closed together with it, and leave out the same positions."""
        self._leader = weakref.ref(leader)

    @property
    def is_paused(self) -> bool:
        """Whether forward passes are not captured now."""
        leader = None if self._leader is None else self._leader()
        if self._leader is not None and (leader is None or leader.is_closed or leader.is_paused):
            return True
        return self._pauses > 0

    @property
    def keep(self) -> Tensor | None:
        """Mask of the real positions of forward passes that begin now, ``[N, S]``; None for all."""
        if self._leader is None:
            return self._keep
        leader = self._leader()
        return None if leader is None else leader.keep

    def arm(self, is_due: bool) -> None:
        """Capture forward passes from now on if anything is due."""
        self._is_due = is_due
        self.update()

    def update(self) -> None:
        """Arm or disarm the hooks according to the current state."""
        self._switch.armed = self._is_due and not self.is_paused

    @contextmanager
    def paused(self, by_user: bool = True) -> Iterator[None]:
        """Capture nothing from forward passes inside the ``with`` block."""
        self._pauses += 1
        self.was_paused |= by_user
        self.update()
        try:
            yield
        finally:
            self._pauses -= 1
            self.update()

    @contextmanager
    def masked(self, keep: Tensor | None) -> Iterator[None]:
        """Set the real positions of forward passes inside the ``with`` block."""
        before, self._keep = self._keep, keep
        try:
            yield
        finally:
            self._keep = before
