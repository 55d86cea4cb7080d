"""When a version of the curvature is estimated, inverted and used in lockstep. Arithmetic only.

An epoch is ``T`` steps. Version k of the factors is estimated in epoch k from the parameters of its start, inverted in
epoch k + 1, and used from step ``(k + 2) T`` on, until version k + 1 takes its place at ``(k + 3) T``::

    epoch          0          1          2          3
    gradients      –          –          with 0     with 1
    factors        version 0  version 1  version 2  version 3
    inverses                  version 0  version 1  version 2
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import TypeVar

ItemT = TypeVar("ItemT")

#: Epochs from the start of the epoch in which a version is estimated to the one in which it is used.
DELAY = 2


def ends_epoch(steps: int, period: int) -> bool:
    """Whether an epoch has ended after this number of steps."""
    return steps > 0 and steps % period == 0


def version_of(step: int, period: int) -> int | None:
    """Version that a step uses; None before the first."""
    version = step // period - DELAY
    return version if version >= 0 else None


def age_of(step: int, period: int) -> int | None:
    """Steps between the parameters behind the version that a step uses and that step, from 2T to 3T − 1."""
    version = version_of(step, period)
    return None if version is None else step - version * period


def shuffled(items: Iterable[ItemT], seed: int, version: int) -> list[ItemT]:
    """Items in the order in which a version of them is worked on: random, but the same in every run."""
    order = list(items)
    random.Random(f"{seed}/{version}").shuffle(order)
    return order
