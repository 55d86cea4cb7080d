"""Capture: from a training loop's own forward and backward to pending statistics, without touching either.

::

    root pre-hook    a forward begins: a ``Pass`` with its number of examples
    layer hook       only when capture is due: a tap on the layer output, holding the input
    tap, backward    (x, g) → the layer's statistic; the pass's examples are counted once
    root post-hook   the forward is over

Nothing is accumulated in forward, so activation checkpointing (which runs hooks twice) and forwards without a backward
change nothing. Two kinds of tap share one :meth:`Capture.record`: a tensor hook in eager mode (no copy of the output,
safe before an in-place activation) and an identity operator under ``torch.compile`` (no graph break).
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from secondorder.curvature.kronecker import Call
from secondorder.curvature.layers import Adapter


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
        modules: The modules that share the layer's parameters (one, unless weights are tied).
        adapter: Its shapes and rows.
        owner: The parameter whose gradient decides whether a backward counts.
        new_statistic: Makes the pending statistic of a step.
    """

    name: str
    modules: tuple[nn.Module, ...]
    adapter: Adapter
    owner: nn.Parameter
    new_statistic: Callable[[], Statistic]


class Pass:
    """One forward of the root module.

    Attributes:
        examples: N, or None if it could not be read (then each layer counts its own).
    """

    def __init__(self, examples: int | None, input_dim: int) -> None:
        self.examples = examples
        self.counted = False
        self._input_dim = input_dim
        self.calls: dict[int, int] = {}
        self.fired: dict[int, list[Call]] = {}
        self.done: dict[int, int] = {}

    def see(self, index: int, adapter: Adapter, x: Tensor) -> None:
        """Note a call of a layer; an unbatched input to the whole model is one example."""
        self.calls[index] = self.calls.get(index, 0) + 1
        if x.dim() == self._input_dim and adapter.is_unbatched(x):
            self.examples = 1


class Captured(NamedTuple):
    """What a step takes over.

    Attributes:
        statistics: By site index.
        examples: N by site index: of all forwards whose backward ran, whether or not they reached the layer.
    """

    statistics: dict[int, Statistic]
    examples: dict[int, int]


class Switch:
    """State shared by the hooks of one optimizer; plain attributes, so that a compiler can guard on them."""

    def __init__(self, key: int) -> None:
        self.key = key
        self.armed = False
        self.depth = 0
        self.token: Tensor | None = None


class Capture:
    """Taps on the layers of a model and the statistics they fill.

    Args:
        roots: Modules whose forward is "a forward of the model".
    """

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        self.sites: list[Site] = []
        self.refused: dict[int, str] = {}
        self.grad_scaler: Any = None
        self.before_forward: Callable[[], Callable[[], None] | None] = lambda: None
        self.switch = Switch(next(_KEYS))
        _CAPTURES[self.switch.key] = self
        self._passes: dict[int, Pass] = {}
        self._pass_ids = itertools.count()
        self._latest: Pass | None = None
        self._lock = threading.Lock()
        self._pauses = 0
        self._due: set[int] = set()
        self._void: set[int] = set()
        self._nodes: dict[int, Any] = {}
        self._pending: dict[int, Statistic] = {}
        self._examples = 0
        self._own_examples: dict[int, int] = {}
        self._taps: list[LayerHook] = []
        self._tap_handles: list[RemovableHandle] = []
        self._root_handles: list[RemovableHandle] = []
        for root in roots:
            self._root_handles += [
                root.register_forward_pre_hook(RootEnter(self.switch), with_kwargs=True),
                root.register_forward_hook(RootLeave(self.switch), always_call=True),
            ]
        # A model may outlive its optimizer: its hooks then go.
        weakref.finalize(self, _retire, self.switch, self._tap_handles, self._root_handles)

    # ------------------------------------------------------------------ lifecycle
    def set_sites(self, sites: Iterable[Site]) -> None:
        """Tap these layers and no others; what is pending for the old ones is dropped."""
        for handle in self._tap_handles:
            handle.remove()
        self._tap_handles.clear()
        self.discard()
        self._passes.clear()
        self._due.clear()
        self.refused.clear()
        self.sites = list(sites)
        self._taps = [LayerHook(self.switch, i) for i in range(len(self.sites))]
        self._tap_handles += [
            module.register_forward_hook(tap, with_kwargs=True)
            for site, tap in zip(self.sites, self._taps, strict=True)
            for module in site.modules
        ]

    def arm(self, due: Iterable[int]) -> None:
        """Capture the given sites from now on, and no others."""
        self._due = set(due)
        for i, tap in enumerate(self._taps):
            tap.armed = i in self._due
        self.switch.armed = bool(self._due) and not self._pauses
        self.switch.depth, self.switch.token = 0, None
        self._nodes = {i: _gradient_node(self.sites[i].owner) for i in self._due}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let forwards inside the block pass untapped."""
        self._pauses += 1
        self.switch.armed = False
        try:
            yield
        finally:
            self._pauses -= 1
            self.switch.armed = bool(self._due) and not self._pauses

    def close(self) -> None:
        """Remove every hook and drop what is pending."""
        self.arm(())
        self.set_sites(())
        for handle in self._root_handles:
            handle.remove()
        self._root_handles.clear()

    def discard(self) -> None:
        """Forget the pending statistics (their gradients were discarded)."""
        self._pending, self._examples, self._own_examples = {}, 0, {}
        self._void.clear()
        self._passes = {i: p for i, p in self._passes.items() if not p.counted}

    @property
    def due(self) -> frozenset[int]:
        """Sites being captured."""
        return frozenset(self._due)

    @property
    def pending(self) -> Mapping[int, Statistic]:
        """Statistics captured since the last step, by site."""
        return self._pending

    def take(self) -> Captured:
        """Hand over the pending statistics and start anew."""
        self._flush()
        examples = {i: self._examples + self._own_examples.get(i, 0) for i in self._pending}
        taken = Captured(self._pending, examples)
        for index in self._pending:
            self.refused.pop(index, None)
        self._passes.clear()
        self._latest = None
        self.discard()
        return taken

    # ------------------------------------------------------------------ forward
    def drop_orphans(self) -> None:
        """Discard what is pending if its gradients are gone (``model.zero_grad()`` was called, not the optimizer's)."""
        if self._pending and all(site.owner.grad is None for site in self.sites):
            self.discard()

    def open_pass(self, examples: int | None, input_dim: int) -> int:
        """Begin a forward pass; returns its id."""
        number = next(self._pass_ids)
        current = self._passes[number] = Pass(examples, input_dim)
        if not _in_backward():
            self._flush()
            self._latest = current
        if len(self._passes) > _MAX_PASSES:
            # Forwards without a backward: the oldest can no longer matter.
            self._passes.pop(next(iter(self._passes)))
        return number

    def find_pass(self, token: Tensor | None) -> Pass | None:
        """The pass that a token names; without one, None in forward and the latest pass in a recomputation."""
        if token is not None:
            return self._passes.get(int(token.numpy()))
        return self._latest if _in_backward() else None

    def enter_backward(self, current: Pass) -> None:
        """The gradient has reached the output of ``current``: recomputed layers belong to it."""
        self._latest = current

    # ------------------------------------------------------------------ backward
    def wants(self, index: int) -> bool:
        """Whether the backward that is running belongs to the gradient of this due site.

        Returns:
            True if its gradients are to be recorded.

        Raises:
            RuntimeError: If that backward is itself being differentiated.
        """
        if index not in self._due or self._pauses:
            return False
        if torch.is_grad_enabled():
            raise RuntimeError(_HIGHER_ORDER.format(name=self.sites[index].name))
        return _is_executed(self._nodes.get(index))

    def refuse(self, index: int, reason: str) -> None:
        """Leave a layer out of this step's statistics: they would be wrong."""
        self.refused[index] = reason
        self._void.add(index)
        self._pending.pop(index, None)

    def record(self, index: int, x: Tensor | None, g: Tensor, current: Pass | None) -> None:
        """Take in the gradient ``g`` at the output of a layer whose input was ``x``.

        Raises:
            RuntimeError: If this is the second backward through one forward.
        """
        if g.dtype == torch.float16 and self.grad_scaler is None:
            self.refuse(index, _NO_SCALER)
            return
        call = Call(x if self.sites[index].adapter.has_weight else None, g.detach(), self._unscale(g.device))
        if current is None:
            self._record_alone(index, call)
        else:
            self._record_in_pass(index, call, current)

    def _record_alone(self, index: int, call: Call) -> None:
        adapter = self.sites[index].adapter
        shape = call.g.shape
        examples = 1 if adapter.is_unbatched(call.g) else shape[0]
        self._own_examples[index] = self._own_examples.get(index, 0) + examples
        self._add(index, [call], examples)

    def _record_in_pass(self, index: int, call: Call, current: Pass) -> None:
        calls = current.calls.get(index, 0)
        done = current.done.get(index, 0) + 1
        if calls and done > calls:
            raise RuntimeError(_SECOND_BACKWARD.format(name=self.sites[index].name))
        current.done[index] = done
        if current.examples is None:
            self._record_alone(index, call)
            return
        with self._lock:
            if not current.counted:
                current.counted = True
                self._examples += current.examples
        if call.g.numel() == 0:
            return  # an expert without a token says nothing about its factors
        if not self._statistic(index).wants_whole_pass:
            self._add(index, [call], current.examples)
            return
        waiting = current.fired.setdefault(index, [])
        if calls and done >= calls:
            self._add(index, [*waiting, call], current.examples)
            del current.fired[index]
        else:
            # Copies: a compiled backward reuses the memory of its activations.
            waiting.append(Call(None if call.x is None else call.x.clone(), call.g.clone(), call.unscale))

    def _flush(self) -> None:
        """Add calls that waited for others of their pass (a branch without backward, a recomputed layer)."""
        for current in self._passes.values():
            for index, calls in current.fired.items():
                self._add(index, calls, current.examples or 0)
            current.fired.clear()

    def _statistic(self, index: int) -> Statistic:
        if index not in self._pending:
            self._pending[index] = self.sites[index].new_statistic()
        return self._pending[index]

    def _add(self, index: int, calls: list[Call], examples: int) -> None:
        if index in self._void:
            return
        try:
            self._statistic(index).add(calls, examples)
        except ValueError as error:
            self.refuse(index, str(error))

    def _unscale(self, device: torch.device) -> Tensor | None:
        if self.grad_scaler is None or not self.grad_scaler.is_enabled():
            return None
        # `scale` is the public way to the loss scale as a device tensor: `get_scale` would wait for the device.
        scale: Tensor = self.grad_scaler.scale(torch.ones((), device=device))
        return scale.reciprocal()


class RootEnter:
    """Forward pre-hook of the root module."""

    def __init__(self, switch: Switch) -> None:
        self.switch = switch

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
        x = _first_tensor((args, kwargs))
        if x is None:
            switch.token = None
        elif torch.compiler.is_compiling():
            switch.token = torch.ops.secondorder.open_pass(x.detach(), switch.key)
        else:
            switch.token = _open_pass(x, switch.key)

    def __deepcopy__(self, memo: dict[int, Any]) -> Inert:
        return Inert()

    def __reduce__(self) -> tuple[type[Inert], tuple[()]]:
        return Inert, ()


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
        if switch.token is not None and not torch.compiler.is_compiling() and not _in_backward():
            _mark_output(switch, output)
        switch.token = None


class LayerHook:
    """Forward hook of a layer: puts the tap on its output."""

    def __init__(self, switch: Switch, index: int) -> None:
        self.switch = switch
        self.index = index
        self.armed = False

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Any:
        """Tap the output when this layer is due and will take part in a backward."""
        if not self.armed or not self.switch.armed or not module.training or not torch.is_grad_enabled():
            return None
        if not isinstance(output, Tensor) or not output.requires_grad:
            return None
        x = args[0] if args else kwargs["input"]
        switch = self.switch
        if torch.compiler.is_compiling():
            token = switch.token
            if token is None:
                token = torch.full((), -1, dtype=torch.int64, device="cpu")
            return torch.ops.secondorder.tap(output, x.detach(), token, switch.key, self.index)
        capture = _CAPTURES.get(switch.key)
        if capture is not None and not _in_transform():
            _tap(capture, self.index, x.detach(), output)
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> Inert:
        return Inert()

    def __reduce__(self) -> tuple[type[Inert], tuple[()]]:
        return Inert, ()


class Inert:
    """What a hook becomes in a copy of the model: the copy belongs to no optimizer."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""


class EagerTap:
    """Hook on the gradient of a layer output; lets go of the input as soon as it has fired."""

    __slots__ = ("capture", "current", "fired", "index", "shape", "version", "x")

    def __init__(self, capture: Capture, index: int, x: Tensor | None, current: Pass | None, shape: torch.Size) -> None:
        self.capture, self.index, self.x, self.current, self.shape = capture, index, x, current, shape
        self.version = 0 if x is None else x._version
        self.fired = False

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> None:
        """Record the gradient at the layer output."""
        g = gradients[0]
        if g is None:
            return
        if not self.capture.wants(self.index):
            return
        if self.fired:
            raise RuntimeError(_SECOND_BACKWARD.format(name=self.capture.sites[self.index].name))
        x, self.x, self.fired = self.x, None, True
        if x is not None and x._version != self.version:
            # Legal where autograd saved a copy (autocast); our reference has changed under us.
            self.capture.refuse(self.index, "its input is modified in place before the backward pass")
            return
        self.capture.record(self.index, x, g.reshape(self.shape), self.current)


def _tap(capture: Capture, index: int, x: Tensor, output: Tensor) -> None:
    current = capture.find_pass(capture.switch.token)
    adapter = capture.sites[index].adapter
    if current is not None and not _in_backward():
        current.see(index, adapter, x)
    tap = EagerTap(capture, index, x if adapter.has_weight else None, current, output.shape)
    # On the node that computed the values, not on the tensor: an in-place activation behind a view (a Linear on 3-D
    # input returns one) takes the gradient past the view's own hooks.
    source = output._base if output._is_view() else output
    if source is not None and source.grad_fn is not None and source.numel() == output.numel():
        source.grad_fn.register_prehook(tap)
    else:
        output.register_hook(lambda g: tap((g,)))


def _notify(switch: Switch) -> None:
    capture = _CAPTURES.get(switch.key)
    if capture is None or _in_backward():
        return  # a recomputation begins no forward of its own
    capture.drop_orphans()
    if not capture.pending and (callback := capture.before_forward()) is not None:
        callback()


def _mark_output(switch: Switch, output: Any) -> None:
    capture, tensor = _CAPTURES.get(switch.key), _first_tensor(output, with_gradient=True)
    if capture is None or tensor is None:
        return
    current = capture.find_pass(switch.token)
    if current is not None:
        reference = weakref.ref(capture)

        def enter(_: Tensor) -> None:
            if (alive := reference()) is not None:
                alive.enter_backward(current)

        tensor.register_hook(enter)


# ---------------------------------------------------------------------- operators for compiled models
def _open_pass(x: Tensor, key: int) -> Tensor:
    capture = _CAPTURES.get(key)
    number = -1 if capture is None else capture.open_pass(x.shape[0] if x.dim() else None, x.dim())
    return torch.full((), number, dtype=torch.int64)


@torch.library.custom_op("secondorder::open_pass", mutates_args=())
def _open_pass_op(x: Tensor, key: int) -> Tensor:
    return _open_pass(x, key)


@torch.library.custom_op("secondorder::tap", mutates_args=())
def _tap_op(output: Tensor, x: Tensor, token: Tensor, key: int, index: int) -> Tensor:
    capture = _CAPTURES.get(key)
    if capture is not None:
        current = capture.find_pass(token)
        if current is not None:
            current.see(index, capture.sites[index].adapter, x)
    return output.clone()


@torch.library.custom_op("secondorder::tap_backward", mutates_args=())
def _tap_backward_op(g: Tensor, x: Tensor, token: Tensor, key: int, index: int) -> Tensor:
    capture = _CAPTURES.get(key)
    if capture is not None and capture.wants(index):
        capture.record(index, x, g, capture.find_pass(token))
    return g.clone()


def _tap_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, x, token, ctx.key, ctx.index = inputs
    ctx.save_for_backward(x, token)


def _tap_gradient(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    x, token = ctx.saved_tensors
    return torch.ops.secondorder.tap_backward(g, x, token, ctx.key, ctx.index), None, None, None, None


_open_pass_op.register_fake(lambda x, key: torch.empty((), dtype=torch.int64))
_tap_op.register_fake(lambda output, x, token, key, index: torch.empty_like(output))
_tap_backward_op.register_fake(lambda g, x, token, key, index: torch.empty_like(g))
_tap_op.register_autograd(_tap_gradient, setup_context=_tap_setup)

# ---------------------------------------------------------------------- helpers
_KEYS = itertools.count()
_CAPTURES: weakref.WeakValueDictionary[int, Capture] = weakref.WeakValueDictionary()
_MAX_PASSES = 4096

_HIGHER_ORDER = (
    "layer '{name}': its backward is being differentiated itself (create_graph=True), and Kronecker statistics of such "
    "a loss are not defined. Compute that term on a forward inside `with optimizer.pause_capture():`, leave the layer "
    "out with skip_layers, or use a method that needs no layer statistics."
)
_NO_SCALER = (
    "its gradients are float16 and the loss scale is not known: pass grad_scaler= to the optimizer (for float16 without "
    "a scaler, GradScaler(enabled=False))"
)
_SECOND_BACKWARD = (
    "layer '{name}': a second backward ran through one forward (retain_graph=True), and statistics of the sum of "
    "two losses cannot be had from their gradients one by one. Sum the losses and call backward once, or run the extra "
    "forward inside `with optimizer.pause_capture():`."
)


def _retire(switch: Switch, *handles: list[RemovableHandle]) -> None:
    switch.armed = False
    for handle in itertools.chain(*handles):
        handle.remove()


def _first_tensor(value: Any, with_gradient: bool = False) -> Tensor | None:
    """The first tensor in nested containers; the first that requires a gradient, if asked for."""
    if isinstance(value, Tensor):
        return value if value.requires_grad or not with_gradient else None
    children: Iterable[Any] = ()
    if isinstance(value, (tuple, list)):
        children = value
    elif isinstance(value, Mapping):
        children = value.values()
    elif dataclasses.is_dataclass(value):
        children = [getattr(value, field.name) for field in dataclasses.fields(value)]
    for child in children:
        found = _first_tensor(child, with_gradient)
        if found is not None:
            return found
    return None


def _gradient_node(parameter: nn.Parameter) -> Any:
    return torch.autograd.graph.get_gradient_edge(parameter).node if parameter.requires_grad else None


def _is_executed(node: Any) -> bool:
    """Whether the backward that is running computes the gradient of the parameter behind ``node``.

    Tells a backward that accumulates from ``autograd.grad`` with respect to inputs, whose gradients never reach a step.

    Returns:
        False without a node.
    """
    if node is None:
        return False
    will_execute = getattr(torch._C, "_will_engine_execute_node", None)
    if will_execute is None:
        return True
    try:
        return bool(will_execute(node))
    except RuntimeError:
        # autograd.grad with respect to the parameter itself: asked for, though not to be accumulated.
        return True


def _in_backward() -> bool:
    task = getattr(torch._C, "_current_graph_task_id", None)
    return task is not None and task() != -1


def _in_transform() -> bool:
    """Whether a ``torch.func`` transform is running: its tensors are wrappers that belong to no training step."""
    peek = getattr(torch._C._functorch, "peek_interpreter_stack", None)
    return peek is not None and peek() is not None
