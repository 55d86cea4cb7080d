"""Replays of a forward pass, unchanged or along a direction, without side effects or for forward-mode products.

A forward pass depends on parameters, inputs, buffers and random generators. :class:`Moment` stores the last two, so a
replay draws the same dropout masks and uses the same running statistics, and restores everything afterwards.
:func:`recorded` stores the inputs of the forward passes of a training step. :func:`output_change` runs one of them
again with dual numbers to compute ``J d``, the change of the outputs when the parameters move along ``d``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.hooks import RemovableHandle

from secondorder.capture.batch import Input, Rule, count_examples
from secondorder.capture.fisher.likelihood import Likelihood
from secondorder.capture.taps import in_backward, tensors_in, tensors_of

Directions = Mapping[nn.Parameter, Tensor]

_REMEDY = "return the loss alone from the closure, or drop likelihood=, to use the curvature of the method instead"


class Moment:
    """The current random generators and buffers of a module.

    Args:
        module: Module whose buffers to keep.
        devices: Devices whose generators to keep in addition to the CPU's.
    """

    def __init__(self, module: nn.Module, devices: Iterable[torch.device]) -> None:
        self._module, self._devices = module, set(devices)
        self._cpu = torch.get_rng_state()
        self._others = {
            d: torch.get_device_module(d).get_rng_state(d) for d in self._devices if d.type in ("cuda", "xpu")
        }
        self._buffers = [
            (owner, name, buffer, buffer.detach().clone())
            for owner in module.modules()
            for name, buffer in owner.named_buffers(recurse=False, remove_duplicate=False)
        ]

    def restore(self) -> None:
        """Restore the generators and the buffers, in place."""
        torch.set_rng_state(self._cpu)
        for device, state in self._others.items():
            torch.get_device_module(device).set_rng_state(state, device)
        with torch.no_grad():
            for owner, name, buffer, kept in self._buffers:
                buffer.copy_(kept)
                setattr(owner, name, buffer)

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Restore this moment for the ``with`` block, and the present state after it."""
        present = Moment(self._module, self._devices)
        self.restore()
        try:
            yield
        finally:
            present.restore()


@dataclass
class Forward:
    """A forward pass of a module, which can be run again.

    Attributes:
        args: Positional arguments.
        kwargs: Keyword arguments.
        autocast: Device type, whether autocast was on, and its dtype.
        moment: Generators and buffers at its start.
        output: The value that it returned.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: list[tuple[str, bool, torch.dtype]]
    moment: Moment
    output: Any = None

    def examples(self, dim: int, rule: Rule | None) -> int:
        """Count the examples by the user's rule, or from arguments and outputs; return 0 if nothing determines them."""
        if rule is not None:
            return rule(self.args, self.kwargs)
        inputs = [Input.of(x) for x in tensors_in((self.args, self.kwargs))]
        return count_examples(inputs, [tuple(x.shape) for x in tensors_of(self.output)], (), dim).n or 0


@contextmanager
def recorded(module: nn.Module, devices: set[torch.device], *, on: bool = True) -> Iterator[list[Forward]]:
    """Yield a list to which the forward passes with gradients of a module are appended inside the ``with`` block.

    Compiled models run eagerly inside it, because hooks that are added after compilation would not be called. Nothing
    is recorded unless ``on``.
    """
    found: list[Forward] = []
    if not on:
        yield found
        return
    running: list[Forward | None] = []

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        wanted = not running and torch.is_grad_enabled() and not in_backward()
        running.append(Forward(args, kwargs, _autocast(devices), Moment(module, devices)) if wanted else None)

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        current = running.pop()
        if current is not None:
            current.output = output
            found.append(current)

    # These hooks run first, because other hooks may change the arguments and change them again in a replay.
    handles: list[RemovableHandle] = [
        module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True),
        module.register_forward_hook(leave),
    ]
    try:
        with eager():
            yield found
    finally:
        for handle in handles:
            handle.remove()


@dataclass
class Evaluated:
    """A recorded forward together with those of its outputs that the loss was computed from.

    Attributes:
        forward: The forward.
        outputs: Outputs that the loss was computed from, detached.
        targets: Targets in the form that the loss takes, or None if they are not known.
    """

    forward: Forward
    outputs: Tensor
    targets: Tensor | None

    def __post_init__(self) -> None:
        """Find the outputs among the returned values; only their position and geometry are kept."""
        storage = self.outputs.untyped_storage().data_ptr()
        leaves = tensors_of(self.forward.output)
        same = [i for i, leaf in enumerate(leaves) if leaf is self.outputs]
        same += [
            i
            for i, leaf in enumerate(leaves)
            if leaf.untyped_storage().data_ptr() == storage and leaf.dtype == self.outputs.dtype
        ]
        if not same:
            raise RuntimeError(
                f"the outputs of shape {tuple(self.outputs.shape)} that the closure returned are not among what the "
                "model returned: return the model's own tensor, or a view of it, not a converted or computed one; or "
                + _REMEDY
            )
        leaf, self._place = leaves[same[0]], same[0]
        self._strides = leaf.stride()
        self._view = (self.outputs.shape, self.outputs.stride(), self.outputs.storage_offset() - leaf.storage_offset())
        self.outputs, self.forward.output = self.outputs.detach(), None

    def pick(self, output: Any) -> tuple[Tensor, Tensor | None]:
        """Return the same outputs and their tangent, from the result of a replay with dual numbers."""
        primal, tangent = forward_ad.unpack_dual(tensors_of(output)[self._place])
        return self._same_view(primal), None if tangent is None else self._same_view(tangent)

    def _same_view(self, x: Tensor) -> Tensor:
        laid_out = torch.empty_strided(x.shape, self._strides, dtype=x.dtype, device=x.device).copy_(x)
        shape, strides, offset = self._view
        return laid_out.as_strided(shape, strides, offset)


@torch.no_grad()
def output_change(module: nn.Module, evaluated: Evaluated, direction: Directions, at: Directions) -> Tensor:
    """Return ``J d``, the change of the outputs of a forward pass when the parameters move along a direction.

    Args:
        module: The module.
        evaluated: Its recorded forward.
        direction: d by parameter. Parameters that the module does not have are ignored.
        at: Values of parameters that have moved since the forward pass.

    Raises:
        RuntimeError: If part of the model has no forward-mode derivative.
    """
    forward = evaluated.forward
    with forward.moment.replayed(), _differentiable(forward.autocast), forward_ad.dual_level():
        values = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
        for name, p in module.named_parameters():
            value = at.get(p, p).detach()
            tangent = direction.get(p)
            values[name] = value if tangent is None else forward_ad.make_dual(value, tangent.to(value.dtype))
        handle = nn.modules.module.register_module_forward_pre_hook(_Guard(values.values()))
        try:
            output = torch.func.functional_call(module, values, forward.args, forward.kwargs)
        except (NotImplementedError, RuntimeError) as error:
            if not any(word in str(error) for word in ("forward AD", "forward mode AD", "forward-mode", "jvp")):
                raise
            raise RuntimeError(
                f"the exact quadratic model differentiates the model in forward mode, and part of it cannot: {error}. "
                f"Write that part with other operators (give a custom autograd.Function a jvp), or {_REMEDY}."
            ) from error
        finally:
            handle.remove()
        outputs, tangent = evaluated.pick(output)
    return torch.zeros_like(outputs) if tangent is None else tangent


class _Guard:
    """Global pre-hook that raises an error where torch would drop the tangents of a module's parameters silently."""

    def __init__(self, values: Iterable[Tensor]) -> None:
        self._duals = {id(x) for x in values if forward_ad.unpack_dual(x).tangent is not None}

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Compare the tangents here with those outside."""
        for p in module.parameters(recurse=False):
            if id(p) in self._duals and forward_ad.unpack_dual(p).tangent is None:
                raise RuntimeError(
                    f"forward-mode derivatives of the parameters of {type(module).__name__} are lost, because a custom "
                    "autograd.Function, such as a checkpoint with use_reentrant=True, calls it"
                )


def exact_products(
    module: nn.Module,
    evaluations: Sequence[Evaluated],
    likelihood: Likelihood,
    directions: Sequence[Directions],
    at: Directions,
    *,
    mean: bool,
) -> Tensor:
    """Return ``⟨d_i, C d_j⟩ [k, k]`` with the Gauss-Newton matrix C of the loss over some forwards.

    Args:
        module: The module.
        evaluations: Its forwards, micro-batches of one batch.
        likelihood: Likelihood of the loss, given the outputs.
        directions: ``d_i``, k of them.
        at: Values of parameters that have moved since the forward passes.
        mean: Whether the loss is a mean over its terms; otherwise it is their sum.
    """
    device = evaluations[0].outputs.device
    total = torch.zeros(len(directions), len(directions), dtype=torch.float64, device=device)
    terms: int | Tensor = 0
    for one in evaluations:
        wide = torch.promote_types(one.outputs.dtype, torch.float32)
        tangents = [output_change(module, one, d, at).to(wide) for d in directions]
        products = [likelihood.hessian_product(one.outputs.to(wide), one.targets, t) for t in tangents]
        rows = [torch.stack([_inner(t, h) for h in products]) for t in tangents]
        total += torch.stack(rows).to(total)
        terms = terms + likelihood.terms(one.outputs, one.targets)
    return (total + total.mT) / (2 * terms if mean else 2)


@contextmanager
def kept_gradients(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Restore the ``.grad`` of parameters after the ``with`` block: the same tensors with the same values."""
    kept = [(p, p.grad, None if p.grad is None else p.grad.detach().clone()) for p in dict.fromkeys(parameters)]
    try:
        yield
    finally:
        with torch.no_grad():
            for p, grad, values in kept:
                p.grad = grad
                if grad is not None and values is not None:
                    grad.copy_(values)


@contextmanager
def _differentiable(autocast: Sequence[tuple[str, bool, torch.dtype]]) -> Iterator[None]:
    """Use the autocast of the recorded forward pass, and only kernels that have a forward-mode derivative."""
    fast = torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as stack:
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast)
        torch.backends.mha.set_fastpath_enabled(False)
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(eager())
        for kind, enabled, dtype in autocast:
            stack.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=False))
        yield


@contextmanager
def eager() -> Iterator[None]:
    """Run compiled callables eagerly, if anything was compiled in this process."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def _autocast(devices: Iterable[torch.device]) -> list[tuple[str, bool, torch.dtype]]:
    kinds = sorted({"cpu", *(d.type for d in devices)})
    return [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]


def _inner(x: Tensor, y: Tensor) -> Tensor:
    return (x.to(torch.float64) * y.to(torch.float64)).sum()
