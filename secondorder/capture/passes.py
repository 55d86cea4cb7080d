"""One forward pass of a model: the calls of its layers, and the gradients that have arrived for them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from secondorder.capture.batch import Input, Use
from secondorder.capture.evidence import Evidence

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd.graph import GradientEdge

    from secondorder.capture.layers.adapter import Adapter
    from secondorder.capture.statistics.call import Call
    from secondorder.capture.taps import Seen


#: Number of nodes of a graph that are searched for the outputs of an earlier pass.
_SEARCHED = 64


class _Step(NamedTuple):
    """The input of a call of a layer outside of the model's own forward, and whether it comes from parameters."""

    use: Use
    is_computed: bool


class Pass:
    """One forward of a root module, or of parts of it that are called without it.

    Args:
        evidence: The evidence about the examples of the pass.
        root: Number of the root module.

    Attributes:
        is_one: Whether a stray pass is one forward pass, however often its layers are called.
        forwards: The forward passes of which a stray pass consists, if there are several.
        edges: The edges where gradients of layer outputs can be computed, if they are observed.
    """

    def __init__(self, evidence: Evidence, root: int) -> None:
        self.evidence, self.root, self._mark = evidence, root, object()
        self.counted = self.is_one = self.observed = self._has_left = False
        self.forwards: list[Pass] = []
        self._steps: dict[int, list[_Step]] = {}
        self._entered: dict[int, list[Sequence[Input]]] = {}
        #: Weak references to the outputs of the model.
        self._outputs: list[Callable[[], object | None]] = []
        self.calls: dict[int, int] = {}
        self.fired: dict[int, list[Call]] = {}
        self.done: dict[int, int] = {}
        self.edges: list[tuple[GradientEdge, Seen]] = []

    def join(self, other: Pass) -> None:
        """Join the batch of the forward pass of another root, since a layer may be used by both."""
        self.calls, self.fired, self.done = other.calls, other.fired, other.done

    def enter_part(self, part: int, inputs: Sequence[Input]) -> None:
        """Record the inputs of a part of the model, after that of a layer which the script called before any part."""
        if self._steps and not self._entered and inputs:
            use = next(iter(self._steps.values()))[0].use
            if use.rows in inputs[0].shape[:2] and not (use.one_hot and len(use.shape) < 2):
                self.evidence.enter([Input(use.shape, use.one_hot)])
        self._entered.setdefault(part, []).append(inputs)
        self.evidence.enter(inputs)

    def leave(self, outputs: Iterable[Tensor]) -> None:
        """Record the outputs of the model; nothing if it raised an error."""
        self._has_left = True
        found = [tensor for tensor in outputs if tensor.requires_grad]
        self._outputs += [weakref.ref(tensor) for tensor in found]
        for node in _nodes_of(found):
            node.metadata.setdefault(self._mark, True)
        self.evidence.leave(tuple(tensor.shape) for tensor in found)

    def begin(self, inputs: Iterable[Tensor]) -> None:
        """Mark the inputs, because an output that is one of them was not computed by the pass."""
        for node in _nodes_of(inputs):
            node.metadata[self._mark] = False

    def has_computed(self, tensors: Iterable[Tensor]) -> bool:
        """Return whether tensors come from the outputs of the pass within a few operators."""
        nodes = _nodes_of(tensors)
        for _ in range(_SEARCHED):
            if not nodes or nodes[0].metadata.get(self._mark):
                return bool(nodes)
            nodes += [node for node, _ in nodes.pop(0).next_functions if node is not None]
        return False

    def record_call(self, index: int, adapter: Adapter, x: Tensor) -> int:
        """Record a call of a layer, and return the number of earlier calls."""
        call = self.calls.get(index, 0)
        self.calls[index] = call + 1
        use = self.evidence.record_use(index, adapter, x)
        if self.evidence.is_stray:
            self._steps.setdefault(index, []).append(_Step(use, x.requires_grad))
        return call

    def expects(self, index: int) -> bool:
        """Record a backward pass through a use of a layer, and return whether the use is known or was not counted."""
        calls, done = self.calls.get(index, 0), self.done.get(index, 0) + 1
        self.done[index] = done
        return not calls or done <= calls

    def rewind(self) -> None:
        """Forget the backward passes so far."""
        self.counted = False
        self.done.clear()
        self.fired.clear()

    def forward_of(self, index: int, call: int) -> Pass:
        """Return the forward pass of a call of a layer, which is the pass itself or one of those of which it consists.

        A script that calls parts of a model may do so for several batches before one backward pass. Every layer is then
        called equally often, and never on results of an earlier round.
        """
        if not self.counted:
            rounds = {len(steps) for steps in self._steps.values()}
            repeats = all(len({step.is_computed for step in steps}) == 1 for steps in self._steps.values())
            if len(rounds) == 1 and rounds != {1} and repeats and not self.is_one:
                self.forwards = [self._round(i) for i in range(rounds.pop())]
                self.counted = True  # as its forwards
            self._steps.clear()
        return self.forwards[call] if self.forwards else self

    def _round(self, number: int) -> Pass:
        every = len(next(iter(self._steps.values())))
        found = Pass(self.evidence.renewed(), self.root)
        found.evidence.enter(x for entered in self._entered.values() if len(entered) == every for x in entered[number])
        for index, steps in self._steps.items():
            found.calls[index] = 1
            found.evidence.note(steps[number].use)
        return found

    @property
    def is_open(self) -> bool:
        """Whether a part that is called now may belong to the pass, which had no backward pass and has live outputs."""
        return not self.counted and (not self._has_left or any(output() is not None for output in self._outputs))

    @property
    def is_dropped(self) -> bool:
        """Whether no outputs exist any more while the pass still waits to be observed."""
        return bool(self.edges and self._outputs) and all(output() is None for output in self._outputs)


def _nodes_of(tensors: Iterable[Tensor]) -> list[Any]:
    return [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
