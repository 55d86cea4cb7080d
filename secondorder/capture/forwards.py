"""Forward passes since the last step, and the assignment of calls of layers to them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor, nn

from secondorder.capture.batch import Input
from secondorder.capture.evidence import Evidence, order_of
from secondorder.capture.passes import Pass
from secondorder.capture.roots import Roots
from secondorder.capture.taps import Seen, in_backward

#: Number of forward passes without a backward pass that are kept.
_MAX_PASSES = 4096
#: Forwards that may wait to be observed though the model's outputs are gone, since others may come from them.
_WAITING_PASSES = 8


class Forwards:
    """The forward passes of a model, and how many examples they have.

    Args:
        modules: Modules whose forward is "a forward of the model".
        batch_dim: Dimension of an input that counts examples.

    Attributes:
        roots: The examples by module.
        latest: The pass that began last or, in a backward, the one that the gradient has reached.
        doubts: The evidence against the number of examples as text, since the last step.
    """

    def __init__(self, modules: Sequence[nn.Module], batch_dim: int) -> None:
        self.roots = Roots(modules)
        self.doubts: set[str] = set()
        self._batch_dim, self._order = batch_dim, order_of(modules)
        self._passes: dict[int, Pass] = {}
        self._numbers = itertools.count()
        self.latest: Pass | None = None
        #: By root, the pass that began last.
        self._open: dict[int, Pass] = {}
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Pass]:
        return iter(self._passes.values())

    # ------------------------------------------------------------------ their begin and end
    def make(self, keep: Tensor | None, root: int, inputs: Iterable[Input] = (), examples: int | None = None) -> Pass:
        """Return a new pass of a root with its inputs and, if the user has a rule, its number of examples."""
        evidence = Evidence(self._batch_dim, keep, self._order)
        evidence.enter(inputs, examples)
        return Pass(evidence, root)

    def begin(self, current: Pass) -> int:
        """Begin a forward pass and return its number."""
        number = next(self._numbers)
        for old in self.waiting()[: -_WAITING_PASSES * len(self.roots)]:
            if old.is_dropped:
                old.edges.clear()  # a forward pass that will not be observed must not keep its graph
        self._passes[number] = current
        if not in_backward():
            self.latest = self._open[current.root] = current
            self.roots.join(current)
        if len(self._passes) > _MAX_PASSES:
            # Drop the oldest forward passes without a backward pass.
            self._passes.pop(next(iter(self._passes)))
        return number

    def resume(self, root: int, inputs: Sequence[Input], examples: int | None) -> int | None:
        """Return the number of the pass that parts of a root began before its forward on the same batch, if any."""
        begun = self.stray(root)
        if begun is None or not begun.evidence.is_stray or in_backward():
            return None
        number = self._number_of(begun)
        if number is not None:
            begun.evidence.is_stray = False
            begun.evidence.enter(inputs, examples)
        return number

    def continued(self, root: int, inputs: Sequence[Tensor]) -> int | None:
        """Return the number of the last pass of a root if these inputs were computed from its outputs, as in a rollout.

        A loop over the model in the script then counts examples like a loop inside of its forward.
        """
        begun = self._open.get(root)
        if begun is None or begun.counted or begun.evidence.is_stray:
            return None
        alike = begun.evidence.is_alike(map(Input.of, inputs))
        return self._number_of(begun) if alike and begun.has_computed(inputs) else None

    def _number_of(self, wanted: Pass) -> int | None:
        return next((number for number, known in self._passes.items() if known is wanted), None)

    def stray(self, root: int) -> Pass | None:
        """The pass of a layer outside of the root's forward, if one has begun and has no backward pass yet."""
        found = self._open.get(root)
        return found if found is not None and found.is_open else None

    def discard(self) -> None:
        """Discard the passes whose examples are counted. Another backward pass through them begins again."""
        self.roots.clear()
        for number in [number for number, current in self._passes.items() if current.counted]:
            self._passes.pop(number).rewind()

    def clear(self) -> None:
        """Discard all passes."""
        self._passes.clear()
        self._open.clear()

    # ------------------------------------------------------------------ which one a call belongs to
    def get(self, number: int) -> Pass | None:
        """The pass with a number, if it is still known."""
        return self._passes.get(number)

    def forward_of(self, current: Pass, seen: Seen) -> Pass:
        """The forward pass, among those of a pass, to which a use of a layer belongs."""
        if not current.evidence.is_stray:
            return current
        with self._lock:
            known = bool(current.forwards)
            found = current.forward_of(seen.site, seen.call)
            if not known:
                self._passes.update((next(self._numbers), one) for one in current.forwards)
        return found

    def waiting(self) -> list[Pass]:
        """Forward passes whose layer outputs are waiting to be observed."""
        return [current for current in self if current.edges]

    def count(self, current: Pass) -> None:
        """Count the examples of a pass, once."""
        with self._lock:
            if not current.counted:
                self.roots.count(current)
                current.counted = True
                if doubt := current.evidence.doubt:
                    self.doubts.add(f"{self.roots.name_of(current.root)} has: {doubt}")
