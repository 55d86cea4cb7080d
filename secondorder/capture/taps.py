"""Hooks and taps: what sits on the user's modules, holding nothing but a key to its capture.

A copy of a model must not copy its optimizer, a pickled model must not need it, and a compiler must be able to guard on
what decides whether anything is captured. So hooks are small objects with plain attributes, and the capture behind a
key is looked up weakly; :mod:`secondorder.capture.copies` leaves them out of copies and pickles of a model.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.utils.rnn import PackedSequence
from torch.utils.hooks import RemovableHandle

from secondorder.capture.batch import Input, Rule
from secondorder.capture.copies import OwnHook

if TYPE_CHECKING:
    from secondorder.capture.capture import Capture
    from secondorder.capture.layers.adapter import Adapter
    from secondorder.capture.passes import Pass

#: Tensors among the inputs of a model that are looked at.
_MAX_INPUTS = 16
#: Captures by the key that their hooks hold.
CAPTURES: weakref.WeakValueDictionary[int, Capture] = weakref.WeakValueDictionary()

SECOND_BACKWARD = (
    "layer '{name}': a second backward ran through one forward (retain_graph=True), and statistics of the sum of "
    "two losses cannot be had from their gradients one by one. Sum the losses and call backward once, or run the extra "
    "forward inside `with optimizer.pause_capture():`."
)

PRECEDED = "a forward hook that was registered later with prepend=True ran before the optimizer's"


class Switch:
    """State shared by the hooks of one optimizer; plain attributes, so that a compiler can guard on them."""

    def __init__(self, key: int) -> None:
        self.key = key
        self.armed = False
        self.depth = 0
        #: Whether a gradient of parameters that are cut over ranks has come since the last step.
        self.reduced = False
        self.token: Tensor | None = None


class RootEnter(OwnHook):
    """Forward pre-hook of a root module, the ``number``-th of its capture, with the user's rule for its examples."""

    def __init__(self, switch: Switch, number: int = 0, rule: Rule | None = None) -> None:
        self.switch, self.number, self.rule = switch, number, rule

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Open a pass when something is due."""
        switch = self.switch
        if not module.training:
            return
        if not torch.compiler.is_compiling():
            if _in_transform():
                switch.token = None
                return
            _notify(switch)
        if not switch.armed or not torch.is_grad_enabled():
            return
        switch.depth += 1
        if switch.depth > 1:
            return  # the model called itself
        examples = -1 if self.rule is None else self.rule(args, kwargs)
        inputs = list(itertools.islice(_tensors((args, kwargs), by_sequence=True), _MAX_INPUTS))
        if not torch.compiler.is_compiling():
            switch.token = _open_pass(inputs, switch.key, self.number, examples)
        elif inputs:
            plain = [x.detach() for x in inputs]
            switch.token = torch.ops.secondorder.open_pass(plain, switch.key, self.number, examples)
        else:
            switch.token = None


class RootLeave(RootEnter):
    """Forward hook of the root module."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Close the pass; tell recomputations in backward which pass they belong to."""
        switch = self.switch
        if not switch.armed or not module.training or not torch.is_grad_enabled():
            return
        switch.depth -= 1
        if switch.depth > 0:
            return
        if switch.token is not None and not torch.compiler.is_compiling():
            _mark_output(switch, output)
        switch.token = None


class PartEnter(RootEnter):
    """Forward pre-hook of a part of a root, which may be called while the root itself is not."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note what the part was given, unless the root is running and knows better."""
        switch = self.switch
        if torch.compiler.is_compiling() or switch.depth or not module.training or _in_transform() or in_backward():
            return
        _notify(switch)
        capture = CAPTURES.get(switch.key)
        if capture is not None and switch.armed and torch.is_grad_enabled():
            inputs = [Input.of(x) for x in _tensors((args, kwargs), by_sequence=True)]
            capture.enter_part(module, inputs, self.number)


def parts_called_alone(root: nn.Module) -> list[nn.Module]:
    """The modules right below a root that hold others: those that a script may call in place of the root."""
    found, waiting = list[nn.Module](), list(root.children())
    while waiting:
        module = waiting.pop(0)
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            waiting[:0] = module.children()
        elif next(module.children(), None) is not None:
            found.append(module)
    return found


class LayerHook(OwnHook):
    """Forward hook of a layer: puts the tap on its output.

    Args:
        switch: What the hooks of the optimizer share.
        number: Position among the hooks of layers, by which an operator in a compiled graph finds it.
        index: Index of the site.
        adapter: Rows of the module's calls.
        part: Which of the Γ blocks they fill, -1 for all.
    """

    def __init__(self, switch: Switch, number: int, index: int, adapter: Adapter, part: int) -> None:
        self.switch = switch
        self.number = number
        self.index = index
        self.adapter = adapter
        self.part = part
        self.armed = False
        self.handle: RemovableHandle | None = None

    def go_first(self) -> None:
        """Move before all hooks of the module that are not of this package: they may change its output."""
        hooks = None if self.handle is None else self.handle.hooks_dict_ref()
        if self.handle is not None and hooks is not None and not self._is_first(hooks):
            hooks.move_to_end(self.handle.id, last=False)  # torch iterates over a copy

    def _is_first(self, hooks: Mapping[int, Any]) -> bool:
        for hook in hooks.values():
            if hook is self:
                return True
            if not isinstance(hook, OwnHook):
                return False
        return True  # removed

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Any:
        """Tap the output when this layer is due and will take part in a backward."""
        if not self.armed or not self.switch.armed or not module.training or not torch.is_grad_enabled():
            return None
        if not isinstance(output, Tensor) or not output.requires_grad:
            return None
        switch = self.switch
        if not self._is_first(module._forward_hooks):
            return self._refuse()
        x = self.adapter.prepare(args, kwargs)
        if torch.compiler.is_compiling():
            token = switch.token
            if token is None:
                token = torch.full((), -1, dtype=torch.int64, device="cpu")
            return torch.ops.secondorder.tap(output, x.detach(), token, switch.key, self.number)
        capture = CAPTURES.get(switch.key)
        if capture is not None and not _in_transform():
            _tap(capture, self, x, output)
        return None

    def _refuse(self) -> None:
        """Leave the layer out of this step; a compiled graph is left without the tap."""
        if torch.compiler.is_compiling():
            return
        self.go_first()
        if (capture := CAPTURES.get(self.switch.key)) is not None:
            capture.refuse(self.index, PRECEDED)


class Reduced(OwnHook):
    """Hook on a parameter that is cut over ranks: its gradient has come."""

    def __init__(self, switch: Switch) -> None:
        self.switch = switch

    def __call__(self, parameter: Tensor) -> None:
        """Note that."""
        self.switch.reduced = True


class Inert(OwnHook):
    """What release 0.1.0 put into a pickled model in the place of a hook; it is here so that such files load."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""


class Seen(NamedTuple):
    """A use of a layer in a forward pass.

    Attributes:
        site: Index of the site.
        part: Which of the Γ blocks the use fills, -1 for all.
        adapter: Rows of the use.
        x: What the adapter prepared from the input; None where it needs none.
        version: Version counter of ``x``.
        shape: Shape of the output.
        call: How many uses of the layer the forward pass had before.
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
    """Hook on the gradient of a layer output; lets go of the input as soon as it has fired."""

    __slots__ = ("capture", "current", "fired", "seen")

    def __init__(self, capture: Capture, seen: Seen, current: Pass | None) -> None:
        self.capture, self.current = capture, current
        self.seen: Seen | None = seen
        self.fired: int = seen.site

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> None:
        """Record the gradient at the layer output."""
        g = gradients[0]
        if g is None:
            return
        if not self.capture.wants(self.fired):
            return
        seen, self.seen = self.seen, None
        if seen is None:
            raise RuntimeError(SECOND_BACKWARD.format(name=self.capture.sites[self.fired].name))
        if seen.is_stale:
            self.capture.refuse(seen.site, "its input is modified in place before the backward pass")
            return
        self.capture.record(seen, g.reshape(seen.shape), self.current)


def _tap(capture: Capture, hook: LayerHook, x: Tensor, output: Tensor) -> None:
    current, call = capture.find_pass(capture.switch.token, hook.index), 0
    if current is not None and not in_backward():
        call = current.see(hook.index, hook.adapter, x)
    seen = _seen(hook, x.detach(), output.shape, call)
    # On the node that computed the values, not on the tensor: an in-place activation behind a view (a Linear on 3-D
    # input returns one) takes the gradient past the view's own hooks.
    source = output._base if output._is_view() else output
    whole = source is not None and source.grad_fn is not None and source.numel() == output.numel()
    if capture.observes:
        if current is not None and not in_backward():
            current.edges.append((get_gradient_edge(source if source is not None and whole else output), seen))
        return
    tap = EagerTap(capture, seen, current)
    if whole and source is not None and source.grad_fn is not None:
        source.grad_fn.register_prehook(tap)
    else:
        output.register_hook(lambda g: tap((g,)))


# Where the root is a class of the user's, torch runs its hooks outside of the graph, and would try to compile what they
# call. The lazy form of the decorator is torch's own; it does not import the compiler.
_outside_of_graphs = getattr(torch, "_disable_dynamo", torch.compiler.disable)


def _seen(hook: LayerHook, x: Tensor, shape: torch.Size, call: int = 0) -> Seen:
    kept = x if hook.adapter.needs_input else None
    return Seen(hook.index, hook.part, hook.adapter, kept, 0 if kept is None else kept._version, shape, call)


@_outside_of_graphs  # type: ignore[untyped-decorator]
def _notify(switch: Switch) -> None:
    capture = CAPTURES.get(switch.key)
    if capture is None or in_backward():
        return  # a recomputation begins no forward of its own
    capture.drop_orphans()
    if not capture.pending and (callback := capture.before_forward()) is not None:
        callback()
    if switch.armed:
        capture.put_taps_first()


@_outside_of_graphs  # type: ignore[untyped-decorator]
def _mark_output(switch: Switch, output: Any) -> None:
    if in_backward() or switch.token is None:
        return
    capture = CAPTURES.get(switch.key)
    current = None if capture is None else capture.pass_of(switch.token)
    if capture is None or current is None:
        return
    outputs = list(_tensors(output))
    current.leave(outputs)
    for tensor in outputs:
        if tensor.requires_grad:
            tensor.register_hook(_entrance(weakref.ref(capture), current))


def _entrance(reference: weakref.ref[Capture], current: Pass) -> Callable[[Tensor], None]:
    """A hook that tells the capture which pass a backward has entered."""

    def enter(_: Tensor) -> None:
        if (alive := reference()) is not None:
            alive.enter_backward(current)

    return enter


# ------------------------------------------------------------------ operators for compiled models
def _open_pass(inputs: Sequence[Tensor], key: int, root: int, examples: int) -> Tensor:
    capture, number = CAPTURES.get(key), -1
    if capture is not None:
        number = capture.open_pass([Input.of(x) for x in inputs], root, None if examples < 0 else examples)
    return torch.full((), number, dtype=torch.int64)


@torch.library.custom_op("secondorder::open_pass", mutates_args=())
def _open_pass_op(inputs: Sequence[Tensor], key: int, root: int, examples: int) -> Tensor:
    return _open_pass(inputs, key, root, examples)


def _find_hook(key: int, number: int) -> tuple[Capture | None, LayerHook | None]:
    """A capture and one of its hooks, as far as they are still there: a graph may outlive both."""
    capture = CAPTURES.get(key)
    if capture is None or number >= len(capture.taps):
        return capture, None
    return capture, capture.taps[number]


@torch.library.custom_op("secondorder::tap", mutates_args=())
def _tap_op(output: Tensor, x: Tensor, token: Tensor, key: int, number: int) -> Tensor:
    capture, hook = _find_hook(key, number)
    if capture is not None and hook is not None:
        current = capture.find_pass(token, hook.index)
        if current is not None:
            current.is_one |= current.is_stray  # a compiled call does not tell its backward which one it was
            current.see(hook.index, hook.adapter, x)
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
def _tensors(value: Any, by_sequence: bool = False) -> Iterator[Tensor]:
    """The tensors in nested containers; of packed sequences one row each, if asked for ``by_sequence``."""
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
        yield from _tensors(child, by_sequence)


def in_backward() -> bool:
    """Whether an autograd backward is running: a forward now is a recomputation."""
    task = getattr(torch._C, "_current_graph_task_id", None)
    return task is not None and task() != -1


def _in_transform() -> bool:
    """Whether a ``torch.func`` transform is running: its tensors are wrappers that belong to no training step."""
    peek = getattr(torch._C._functorch, "peek_interpreter_stack", None)
    return peek is not None and peek() is not None
