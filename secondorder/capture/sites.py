"""The layers that are captured, what is captured of them, and what a step takes over."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor, nn

from secondorder.capture.layers.adapter import Tap
from secondorder.capture.statistics.call import Call


class Statistic(Protocol):
    """What a method accumulates per layer during backward."""

    @property
    def wants_whole_pass(self) -> bool:
        """Whether all calls of one forward pass must arrive together."""

    def add(self, calls: list[Call], examples: int) -> None:
        """Take in calls of one forward pass."""


class Site(NamedTuple):
    """A layer to tap.

    Attributes:
        name: Module name, for messages.
        taps: The modules whose calls are captured.
        owner: The parameter whose gradient decides whether a backward counts.
        new_statistic: Makes the pending statistic of a step.
    """

    name: str
    taps: tuple[Tap, ...]
    owner: nn.Parameter
    new_statistic: Callable[[], Statistic]


class Captured(NamedTuple):
    """What a step takes over.

    Attributes:
        statistics: By site index.
        examples: N by site index: of all forwards whose backward ran, whether or not they reached the layer.
        idle: Sites whose layer ran on no row at all.
        terms: Loss terms that were observed, 0-dim, or None.
        total: Examples of all forwards that were counted.
    """

    statistics: dict[int, Statistic]
    examples: dict[int, int]
    idle: frozenset[int] = frozenset()
    terms: Tensor | None = None
    total: int = 0
