"""The root modules, whose forward passes are those of the model: the model itself, or each of its parts."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from secondorder.capture.passes import Pass
    from secondorder.capture.sites import Site


class Roots:
    """Counts examples and forward passes by root. Every example passes through each root but is counted once.

    Args:
        modules: The roots. If there are several, each is a part of the model.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = [weakref.ref(module) for module in modules]
        #: The roots that contain the taps of each site.
        self._places: list[frozenset[int]] = []
        self._examples: dict[int, int] = {}
        #: Forward passes of each root since the last step, and the first of those that belong to one batch.
        self._begun: dict[int, int] = {}
        self._batches: weakref.WeakValueDictionary[int, Pass] = weakref.WeakValueDictionary()

    def __len__(self) -> int:
        """Number of roots."""
        return len(self._modules)

    def locate(self, sites: Iterable[Site]) -> None:
        """Find the roots that the layers are in."""
        inside = [set() if (root := ref()) is None else set(root.modules()) for ref in self._modules]
        self._places = [_places(site, inside) for site in sites]

    def name_of(self, root: int) -> str:
        """Type of a root."""
        return type(self._modules[root]()).__name__

    def root_of(self, index: int) -> int:
        """The first root that a site is in."""
        return min(self._places[index], default=0)

    def join(self, current: Pass) -> None:
        """Join the k-th forward passes of all parts, which belong to one batch and share calls of a shared layer."""
        if len(self._modules) < 2:
            return
        place = self._begun[current.root] = self._begun.get(current.root, -1) + 1
        first = self._batches.setdefault(place, current)
        if first is not current:
            current.join(first)

    def count(self, current: Pass) -> None:
        """Count the examples of a pass."""
        self._examples[current.root] = self._examples.get(current.root, 0) + (current.evidence.examples or 0)

    def examples_of(self, index: int) -> int:
        """Examples of the forwards that a site belongs to."""
        return max((self._examples.get(root, 0) for root in self._places[index]), default=0)

    @property
    def examples(self) -> int:
        """Examples of all forwards of the model."""
        return max(self._examples.values(), default=0)

    def clear(self) -> None:
        """Begin again, after a step."""
        self._examples.clear()
        self._begun.clear()
        self._batches.clear()


def _places(site: Site, inside: Sequence[set[nn.Module]]) -> frozenset[int]:
    if len(inside) < 2:
        return frozenset([0])
    found = {i for tap in site.taps for i, modules in enumerate(inside) if tap.module in modules}
    # The inner maps of attention are in no module, but the name begins with the number of the part.
    return frozenset(found or {int(site.name.partition(".")[0])})
