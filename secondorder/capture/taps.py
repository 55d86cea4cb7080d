"""Taps, which hooks insert into the graphs of autograd as tensor hooks or as operators of compiled models."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn.utils.rnn import PackedSequence

from secondorder.capture.batch import Input
from secondorder.runtime import outside_of_graphs

if TYPE_CHECKING:
    from secondorder.capture.capture import Capture
    from secondorder.capture.hooks import LayerHook
    from secondorder.capture.layers.adapter import Adapter
    from secondorder.capture.passes import Pass

#: Number of tensors among the inputs of a model that are considered.
MAX_INPUTS = 64
#: Captures by the key that their hooks hold.
CAPTURES: weakref.WeakValueDictionary[int, Capture] = weakref.WeakValueDictionary()

SECOND_BACKWARD = (
    "layer '{name}': a second backward ran through one forward (retain_graph=True), and statistics of the sum of "
    "two losses cannot be computed from separate gradients. Sum the losses and call backward once, or run the extra "
    "forward inside `with optimizer.pause_capture():`."
)


class Switch:
    """State shared by the hooks of one optimizer; plain attributes, so that a compiler can guard on them."""

    def __init__(self, key: int) -> None:
        self.key = key
        self.armed = False
        self.depth = 0
        #: Whether a gradient of a sharded parameter has arrived since the last step.
        self.reduced = False
        self.token: Tensor | None = None


class Seen(NamedTuple):
    """A use of a layer in a forward pass.

    Attributes:
        site: Index of the site.
        part: Which of the Γ blocks the use fills, -1 for all.
        adapter: Rows of the use.
        x: The tensor that the adapter prepared from the input; None if it needs none.
        version: Version counter of ``x``.
        shape: Shape of the output.
        call: Number of earlier uses of the layer in the forward pass.
    """

    site: int
    part: int
    adapter: Adapter
    x: Tensor | None
    version: int
    shape: torch.Size
    call: int = 0

    @property
    def is_stale(self) -> bool:
        """Whether the input was changed in place since (legal where autograd saved a copy, as under autocast)."""
        return self.x is not None and self.x._version != self.version


class EagerTap:
    """Hook on the gradient of a layer output, which releases the input once the gradients of the step have fired it."""

    __slots__ = ("again", "capture", "current", "fired", "seen")

    def __init__(self, capture: Capture, seen: Seen, current: Pass | None) -> None:
        self.capture, self.current = capture, current
        self.seen: Seen | None = seen
        self.fired: int = seen.site
        self.again = in_backward()

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> None:
        """Record the gradient at the layer output."""
        g = gradients[0]
        if g is None or not self.capture.wants(self.fired, self.again):
            return
        seen = self.seen
        if seen is None:
            raise RuntimeError(SECOND_BACKWARD.format(name=self.capture.statistics.sites[self.fired].name))
        if self.capture.backwards.accumulated:  # those of the step may follow gradients that were returned
            self.seen = None
        if seen.is_stale:
            self.capture.statistics.refuse(seen.site, "its input is modified in place before the backward pass")
            return
        self.capture.record(seen, g.reshape(seen.shape), self.current)


def put_tap(capture: Capture, hook: LayerHook, x: Tensor, output: Tensor) -> None:
    """Insert a tap on the output of a layer, or record the edge where its gradient can be computed."""
    current, call = capture.find_pass(capture.hooks.switch.token, hook.index), 0
    if current is not None and not in_backward():
        call = current.record_call(hook.index, hook.adapter, x)
    seen = _seen(hook, x.detach(), output.shape, call)
    # Use the node that computed the values, not the tensor: an in-place activation after a view (a Linear on 3-D
    # input returns one) makes the gradient bypass the hooks of the view.
    source = output._base if output._is_view() else output
    whole = source is not None and source.grad_fn is not None and source.output_nr == 0 and _is_reshaped(output, source)
    if capture.observes:
        if current is not None and not in_backward():
            current.edges.append((get_gradient_edge(source if source is not None and whole else output), seen))
        return
    tap = EagerTap(capture, seen, current)
    if whole and source is not None and source.grad_fn is not None:
        source.grad_fn.register_prehook(tap)
    else:
        output.register_hook(lambda g: tap((g,)))


def _is_reshaped(view: Tensor, base: Tensor) -> bool:
    """Whether a view has all entries of its base in the same order."""
    axes, others = ([(n, s) for n, s in zip(x.shape, x.stride(), strict=True) if n > 1] for x in (view, base))
    return axes == others or (view.numel() == base.numel() and view.is_contiguous() and base.is_contiguous())


def _seen(hook: LayerHook, x: Tensor, shape: torch.Size, call: int = 0) -> Seen:
    kept = x if hook.adapter.needs_input else None
    return Seen(hook.index, hook.part, hook.adapter, kept, 0 if kept is None else kept._version, shape, call)


@outside_of_graphs  # torch would compile what the hooks of a root of a user-defined class call
def prepare(switch: Switch) -> None:
    """Prepare a capture for a forward pass that begins."""
    capture = CAPTURES.get(switch.key)
    if capture is not None and not in_backward():  # a recomputation does not begin a new forward pass
        capture.prepare()


@outside_of_graphs
def leave_pass(switch: Switch, output: Any) -> None:
    """Record the outputs of a forward pass, with a hook that reports when a backward pass enters it."""
    if in_backward() or switch.token is None:
        return
    capture = CAPTURES.get(switch.key)
    current = None if capture is None else capture.forwards.get(int(switch.token.numpy()))
    if capture is None or current is None:
        return
    outputs = tensors_of(output)
    current.leave(outputs)
    for tensor in outputs:
        if tensor.grad_fn is not None:  # a parameter would keep the hook
            tensor.register_hook(_entrance(weakref.ref(capture), current))


def _entrance(reference: weakref.ref[Capture], current: Pass) -> Callable[[Tensor], None]:
    """Return a hook that reports to the capture which pass a backward pass has entered."""

    def enter(_: Tensor) -> None:
        if (alive := reference()) is not None:
            alive.enter_backward(current)

    return enter


# ------------------------------------------------------------------ operators for compiled models
def open_pass(inputs: Sequence[Tensor], key: int, root: int, examples: int) -> Tensor:
    """Begin a forward pass of a root, and return the number of the pass; -1 if the capture no longer exists."""
    capture, number = CAPTURES.get(key), -1
    if capture is not None:
        is_alone = capture.observes or capture.gate.keep is not None or in_backward()
        last = None if is_alone else capture.forwards.continued(root, inputs)
        found = [Input.of(x) for x in inputs]
        number = capture.open_pass(found, root, None if examples < 0 else examples) if last is None else last
        if last is None and (current := capture.forwards.get(number)) is not None:
            current.begin(inputs)
    return torch.full((), number, dtype=torch.int64)


@torch.library.custom_op("secondorder::open_pass", mutates_args=())
def _open_pass_op(inputs: Sequence[Tensor], key: int, root: int, examples: int) -> Tensor:
    return open_pass(inputs, key, root, examples)


def _find_hook(key: int, number: int) -> tuple[Capture | None, LayerHook | None]:
    """Return a capture and one of its hooks if they still exist, since a graph may outlive both."""
    capture = CAPTURES.get(key)
    if capture is None or number >= len(capture.hooks.taps):
        return capture, None
    return capture, capture.hooks.taps[number]


@torch.library.custom_op("secondorder::tap", mutates_args=())
def _tap_op(output: Tensor, x: Tensor, token: Tensor, key: int, number: int) -> Tensor:
    capture, hook = _find_hook(key, number)
    if capture is not None and hook is not None:
        current = capture.find_pass(token, hook.index)
        if current is not None:
            current.is_one |= current.evidence.is_stray  # a compiled call has no number in its backward pass
            current.record_call(hook.index, hook.adapter, x)
    return output.clone()


@torch.library.custom_op("secondorder::tap_backward", mutates_args=())
def _tap_backward_op(g: Tensor, x: Tensor, token: Tensor, key: int, number: int) -> Tensor:
    capture, hook = _find_hook(key, number)
    if capture is not None and hook is not None and capture.wants(hook.index):
        capture.record(_seen(hook, x, g.shape), g, capture.find_pass(token, hook.index))
    return g.clone()


def _tap_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, x, token, ctx.key, ctx.number = inputs
    ctx.save_for_backward(x, token)


def _tap_gradient(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    x, token = ctx.saved_tensors
    g = torch.ops.secondorder.tap_backward(g, x, token, ctx.key, ctx.number)
    return g, None, None, None, None


_open_pass_op.register_fake(lambda inputs, key, root, examples: torch.empty((), dtype=torch.int64))
_tap_op.register_fake(lambda output, x, token, key, number: torch.empty_like(output))
_tap_backward_op.register_fake(lambda g, x, token, key, number: torch.empty_like(g))
_tap_op.register_autograd(_tap_gradient, setup_context=_tap_setup)


# ------------------------------------------------------------------ helpers
def tensors_in(value: Any, by_sequence: bool = False) -> Iterator[Tensor]:
    """The tensors in nested containers. With ``by_sequence``, packed sequences have one row each."""
    if isinstance(value, Tensor):
        yield value
        return
    children: Iterable[Any] = ()
    if by_sequence and isinstance(value, PackedSequence):
        children = (value.data[: int(value.batch_sizes[0])],)
    elif isinstance(value, (tuple, list)):
        children = value
    elif isinstance(value, Mapping):
        children = value.values()
    elif dataclasses.is_dataclass(value):
        children = [getattr(value, field.name) for field in dataclasses.fields(value)]
    for child in children:
        yield from tensors_in(child, by_sequence)


def tensors_of(output: Any) -> list[Tensor]:
    """The tensors in an output, which may be an object of any class with tensors in its attributes."""
    is_known = isinstance(output, (Tensor, tuple, list, Mapping)) or not hasattr(output, "__dict__")
    return list(tensors_in(output if is_known else [*vars(output).values()]))


def in_backward() -> bool:
    """Whether an autograd backward pass is running, so that a forward pass is a recomputation."""
    task = getattr(torch._C, "_current_graph_task_id", None)
    return task is not None and task() != -1


def in_transform() -> bool:
    """Whether a ``torch.func`` transform or a trace is running, whose tensors belong to no training step."""
    peek = getattr(torch._C._functorch, "peek_interpreter_stack", None)
    is_traced = bool(torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]
    return is_traced or (peek is not None and peek() is not None)
