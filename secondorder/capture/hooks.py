"""Hooks on the user's modules, which hold only a key to their capture.

A copy of a model must not copy its optimizer, a pickled model must not need it, and a compiler must be able to guard on
the condition of a capture. Hooks are therefore small objects with plain attributes, and the capture for a key is looked
up weakly. :mod:`secondorder.capture.copies` leaves hooks out of copies and pickles of a model.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from secondorder.capture.backwards import is_cut
from secondorder.capture.batch import Input, Rule, Use
from secondorder.capture.copies import OwnHook, conceal, remove
from secondorder.capture.layers.attention import WatchedAttention
from secondorder.capture.sites import Site
from secondorder.capture.taps import (
    CAPTURES,
    MAX_INPUTS,
    Switch,
    in_backward,
    in_transform,
    leave_pass,
    open_pass,
    prepare,
    put_tap,
    tensors_in,
)

if TYPE_CHECKING:
    from secondorder.capture.layers.adapter import Adapter

PRECEDED = "a forward hook that was registered later with prepend=True ran before the optimizer's"
_KEYS = itertools.count()


class RootEnter(OwnHook):
    """Forward pre-hook of a root module, the ``number``-th of its capture, with the user's rule for its examples."""

    def __init__(self, switch: Switch, number: int = 0, rule: Rule | None = None) -> None:
        self.switch, self.number, self.rule = switch, number, rule

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a pass if statistics are due."""
        switch, compiles = self.switch, torch.compiler.is_compiling()
        if not module.training or torch.compiler.is_exporting():
            return
        if not compiles:
            if in_transform():
                switch.token = None
                return
            prepare(switch)
        if not torch.is_grad_enabled() or (compiles and not switch.armed):
            return
        switch.depth += 1
        if switch.depth > 1 or not switch.armed:  # the model called itself, or nothing is due
            return
        examples = -1 if self.rule is None else self.rule(args, kwargs)
        inputs = list(itertools.islice(tensors_in((args, kwargs), by_sequence=True), MAX_INPUTS))
        if not compiles:
            switch.token = open_pass(inputs, switch.key, self.number, examples)
        elif inputs:
            plain = [x.detach() for x in inputs]
            switch.token = torch.ops.secondorder.open_pass(plain, switch.key, self.number, examples)
        else:
            switch.token = None


class RootLeave(RootEnter):
    """Forward hook of the root module."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """End the pass, and record the pass for recomputations in the backward pass."""
        switch = self.switch
        if not switch.depth or not module.training or not torch.is_grad_enabled():
            return
        switch.depth -= 1
        if switch.depth > 0 or not switch.armed:
            return
        if switch.token is not None and not torch.compiler.is_compiling():
            leave_pass(switch, output)
        switch.token = None


class PartEnter(RootEnter):
    """Forward pre-hook of a part of a root, which may be called while the root itself is not."""

    #: Whether a layer of the part is tapped. Other parts may have other batches.
    is_tapped = False

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the inputs of the part, unless the root is running."""
        switch = self.switch
        if torch.compiler.is_compiling() or switch.depth or not module.training or in_transform() or in_backward():
            return
        prepare(switch)
        capture = CAPTURES.get(switch.key)
        if capture is not None and self.is_tapped and switch.armed and torch.is_grad_enabled():
            inputs = [Input.of(x) for x in tensors_in((args, kwargs), by_sequence=True)]
            capture.enter_part(module, inputs, self.number)


class RecurrentEnter(RootEnter):
    """Forward pre-hook of a recurrent layer, whose input shows which dimension counts examples."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the input as evidence, unless it is packed or without a batch."""
        if torch.compiler.is_compiling() or in_backward() or in_transform() or self.switch.token is None:
            return
        x, axis = args[0] if args else kwargs.get("input"), int(not module.batch_first)
        capture = CAPTURES.get(self.switch.key)
        current = None if capture is None else capture.forwards.get(int(self.switch.token.numpy()))
        if current is not None and isinstance(x, Tensor) and x.dim() == 3:
            current.evidence.note(Use(-1, tuple(x.shape), (axis, 1 - axis), False, False, 1, False))


def _parts_called_alone(root: nn.Module) -> list[nn.Module]:
    """The child modules of a root that contain others, which a script may call instead of the root."""
    found, waiting = list[nn.Module](), list(root.children())
    while waiting:
        module = waiting.pop(0)
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            waiting[:0] = module.children()
        elif next(module.children(), None) is not None:
            found.append(module)
    return found


class LayerHook(OwnHook):
    """Forward hook of a layer, which inserts the tap on its output.

    Args:
        switch: The state that the hooks of the optimizer share.
        number: Position among the hooks of layers, by which an operator in a compiled graph finds it.
        index: Index of the site.
        adapter: Rows of the module's calls.
        part: Index of the block, of Γ, that they fill; -1 for all.
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
        """Move before all third-party hooks of the module, because they may change its output."""
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
        """Tap the output if this layer is due and will take part in a backward pass."""
        if not self.armed or not self.switch.armed or not module.training or not torch.is_grad_enabled():
            return None
        if not isinstance(output, Tensor) or not output.requires_grad or torch.compiler.is_exporting():
            return None
        switch = self.switch
        if output.is_nested or not self._is_first(module._forward_hooks):
            return self._refuse("its output is a nested tensor" if output.is_nested else PRECEDED)
        x = self.adapter.prepare(args, kwargs)
        if torch.compiler.is_compiling():
            token = switch.token
            if token is None:
                token = torch.full((), -1, dtype=torch.int64, device="cpu")
            return torch.ops.secondorder.tap(output, x.detach(), token, switch.key, self.number)
        capture = CAPTURES.get(switch.key)
        if capture is not None and not in_transform():
            put_tap(capture, self, x, output)
        return None

    def _refuse(self, reason: str) -> None:
        """Leave the layer out of this step. In a compiled graph, leave out the tap."""
        if torch.compiler.is_compiling():
            return
        self.go_first()
        if (capture := CAPTURES.get(self.switch.key)) is not None:
            capture.statistics.refuse(self.index, reason)


class Reduced(OwnHook):
    """Hook on a sharded parameter, which is called when its gradient has arrived."""

    def __init__(self, switch: Switch) -> None:
        self.switch = switch

    def __call__(self, parameter: Tensor) -> None:
        """Record the arrival of the gradient."""
        self.switch.reduced = True


class ModelHooks:
    """All hooks of one capture.

    Args:
        roots: Modules whose forward is "a forward of the model".
        counted_by: The user's rule for the number of examples of each root.

    Attributes:
        switch: The state that the hooks share.
        taps: Hooks of layers. Operators in compiled graphs refer to them by position.
    """

    def __init__(self, roots: Sequence[nn.Module], counted_by: Sequence[Rule | None]) -> None:
        self.switch = Switch(next(_KEYS))
        self.taps: list[LayerHook] = []
        self._parts: list[tuple[weakref.ref[nn.Module], PartEnter]] = []
        self._tap_handles: list[RemovableHandle] = []
        self._root_handles: list[RemovableHandle] = []
        for number, (root, rule) in enumerate(zip(roots, counted_by, strict=True)):
            # Run before the hook of fully_shard, which replaces the sharded parameters by complete ones.
            first = any(is_cut(p) for p in root.parameters())
            self._root_handles += [
                root.register_forward_pre_hook(RootEnter(self.switch, number, rule), with_kwargs=True, prepend=first),
                root.register_forward_hook(RootLeave(self.switch, number), always_call=True),
            ]
            for rnn in (module for module in root.modules() if isinstance(module, nn.RNNBase)):
                self._root_handles.append(rnn.register_forward_pre_hook(RecurrentEnter(self.switch), with_kwargs=True))
            for part in _parts_called_alone(root):
                enter = PartEnter(self.switch, number)
                self._parts.append((weakref.ref(part), enter))
                self._root_handles.append(part.register_forward_pre_hook(enter, with_kwargs=True, prepend=first))
        conceal(self._root_handles)
        # A model may outlive its optimizer, in which case the hooks are removed.
        weakref.finalize(self, _retire, self.switch, self._tap_handles, self._root_handles)

    def tap(self, sites: Sequence[Site], watched: Iterable[WatchedAttention]) -> None:
        """Tap only these layers, and watch the attention modules that have some of them as projections."""
        remove(self._tap_handles)
        self._tap_handles.clear()
        self.taps.clear()
        owners, switch = {site.owner for site in sites}, self.switch
        for reference, enter in self._parts:
            part = reference()
            enter.is_tapped = part is not None and any(p in owners for p in part.parameters())
        for i, site in enumerate(sites):
            for module, part_of_weight, adapter in site.taps:
                tap = LayerHook(switch, len(self.taps), i, adapter, part_of_weight)
                self.taps.append(tap)
                # Run before every other hook: others may change the output, and one of them ends the pass of a root.
                tap.handle = module.register_forward_hook(tap, with_kwargs=True, prepend=True)
                self._tap_handles.append(tap.handle)
            if is_cut(site.owner):
                self._tap_handles.append(site.owner.register_post_accumulate_grad_hook(Reduced(switch)))
        for attention in watched:
            self._tap_handles += attention.install(lambda: switch.armed)
        conceal(self._tap_handles)

    def arm(self, due: Container[int]) -> None:
        """Tap the layers of these sites in forward passes that begin from now on."""
        for tap in self.taps:
            tap.armed = tap.index in due
        self.switch.depth, self.switch.token = 0, None

    def put_first(self) -> None:
        """Move taps that are due before forward hooks that the user has since registered before them."""
        for tap in self.taps:
            if tap.armed:
                tap.go_first()

    def remove(self) -> None:
        """Remove all hooks permanently."""
        self.tap((), ())
        remove(self._root_handles)
        self._root_handles.clear()


def _retire(switch: Switch, *handles: list[RemovableHandle]) -> None:
    switch.armed = False
    remove(itertools.chain(*handles))
