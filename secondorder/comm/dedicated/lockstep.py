"""The arithmetic of lockstep mode: when a version of the curvature is estimated, inverted and used.

An epoch is ``T`` steps. Version k of the factors is estimated in epoch k from the parameters of its start, inverted in
epoch k + 1, and used from step ``(k + 2) T`` on, until version k + 1 replaces it at ``(k + 3) T``::

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

#: Number of epochs from the start of the epoch that estimates a version to the start of the epoch that uses it.
DELAY = 2


def ends_epoch(steps: int, period: int) -> bool:
    """Whether an epoch has ended after this number of steps."""
    return steps > 0 and steps % period == 0


def shuffled(items: Iterable[ItemT], seed: int, version: int) -> list[ItemT]:
    """Return items in the order in which a version of them is processed: random, but the same in every run."""
    order = list(items)
    random.Random(f"{seed}/{version}").shuffle(order)
    return order
