"""The layers that are captured, their statistics, and the statistics that a step receives."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor, nn

from secondorder.capture.layers.adapter import Tap
from secondorder.capture.statistics.call import Call


class Statistic(Protocol):
    """The statistic that a method accumulates per layer during the backward pass."""

    @property
    def wants_whole_pass(self) -> bool:
        """Whether all calls of one forward pass must arrive together."""

    def add(self, calls: list[Call], examples: int) -> None:
        """Add calls of one forward pass."""


class Site(NamedTuple):
    """A layer to tap.

    Attributes:
        name: Module name, for messages.
        taps: The modules whose calls are captured.
        owner: The parameter whose gradient determines whether a backward pass counts.
        new_statistic: Returns a new pending statistic of a step.
    """

    name: str
    taps: tuple[Tap, ...]
    owner: nn.Parameter
    new_statistic: Callable[[], Statistic]


class Captured(NamedTuple):
    """The captured statistics that a step receives.

    Attributes:
        statistics: The statistics by site index.
        examples: N by site index, over all forward passes with a backward pass, whether or not they reached the layer.
        idle: Sites whose layer ran on no row at all.
        terms: Loss terms that were observed, 0-dim, or None.
        total: Number of examples of all counted forward passes.
    """

    statistics: dict[int, Statistic]
    examples: dict[int, int]
    idle: frozenset[int] = frozenset()
    terms: Tensor | None = None
    total: int = 0
