"""A simulated accelerator: tensors that compute on the CPU, cannot be mixed with CPU tensors, and record every wait.

A :class:`SimulatedTensor` reports the device ``lazy``, a type with a device guard in every build of torch, and wraps a
CPU tensor that Python code does not see. Inside a :class:`SimulatedDevice`, every operator on such a tensor runs on the
wrapped one. It is recorded as a wait if a GPU would make the host wait: if it reads a number, if its shape depends on
values, if it is a blocking copy, or if it waits for an event of the same step.

::

    with SimulatedDevice() as device:
        model = device.put(model)
        ...                                         # train; the backward pass runs on this thread
        device.next_step()
        assert device.waits == []
"""

import traceback
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

from secondorder.linalg import gates

aten = torch.ops.aten
KIND = "lazy"

#: Operators for whose result, or the shape of the result, the host has to wait.
WAITING = {
    aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default, aten.nonzero.default,
    aten.masked_select.default, aten.unique_dim.default, aten._unique2.default, aten.unique_consecutive.default,
    aten.repeat_interleave.Tensor,
}  # fmt: skip
COPIES = {aten._to_copy.default: "non_blocking", aten.copy_.default: 2}


class SimulatedTensor(Tensor):
    """A tensor that reports the device ``lazy`` but computes on the CPU."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "SimulatedTensor":
        made = Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            device=torch.device(KIND, 0),
        )  # fmt: skip
        made.held = held
        return made

    def __repr__(self) -> str:
        return f"SimulatedTensor({self.held!r})"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} outside of the simulated device")


class SimulatedEvent:
    """An event of the simulated device, which is complete after the step that recorded it."""

    def __init__(self, owner: "SimulatedDevice") -> None:
        self.owner, self.step = owner, -1

    def record(self, stream: Any = None) -> None:
        self.step = self.owner.step

    def query(self) -> bool:
        return self.step < self.owner.step

    def synchronize(self) -> None:
        if not self.query():
            self.owner.note("an event of the same step")


class SimulatedDevice(TorchDispatchMode):
    """The simulated device, a context manager.

    Args:
        lacking: Operators that the device does not support, and the errors that they raise.

    Attributes:
        waits: Pairs of a step, and the operator and place that made the host wait.
        step: Number of calls of :meth:`next_step`.
        calls: Number of operators that are not views, each of which would launch a kernel.
    """

    device = torch.device(KIND, 0)

    def __init__(self, lacking: Mapping[Any, Exception] | None = None) -> None:
        super().__init__()
        self.lacking = dict(lacking or {})
        self.waits: list[tuple[int, str]] = []
        self.step = self.calls = 0
        self._around = ExitStack()

    def __enter__(self) -> "SimulatedDevice":
        self._around.enter_context(mock.patch.object(torch, "Event", _event_type(self)))
        self._around.enter_context(mock.patch.object(gates, "FUSED", (*gates.FUSED, KIND)))
        self._around.enter_context(torch.autograd.set_multithreading_enabled(False))
        # Make `torch.tensor(..., device=...)` a copy that is dispatched as an operator, and not one inside C++.
        before = torch._C._only_lift_cpu_tensors()
        self._around.callback(torch._C._set_only_lift_cpu_tensors, before)
        torch._C._set_only_lift_cpu_tensors(True)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._around.close()

    def next_step(self) -> None:
        """End a step, after which all operators of that step are complete."""
        self.step += 1

    def note(self, what: str) -> None:
        frames = [f"{f.filename}:{f.lineno}" for f in traceback.extract_stack() if "/secondorder/" in f.filename]
        self.waits.append((self.step, f"{what} at {['elsewhere', *frames][-1]}"))

    def tensor(self, value: Tensor) -> Tensor:
        """Return a copy of a CPU tensor on the device, which requires a gradient if the original does."""
        return SimulatedTensor(value.detach().clone()).requires_grad_(value.requires_grad)

    def put(self, model: nn.Module) -> nn.Module:
        """Move the parameters and buffers of a model to the device, and return the model."""
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                module._parameters[name] = nn.Parameter(self.tensor(parameter), parameter.requires_grad)
            for name, buffer in list(module.named_buffers(recurse=False)):
                module._buffers[name] = self.tensor(buffer)
        return model

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        wants = kwargs.get("device")
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        simulated = any(map(_is_simulated, leaves))
        asked = wants is not None and torch.device(wants).type == KIND
        if not simulated and not asked:
            return func(*args, **kwargs)
        if func in self.lacking:
            raise self.lacking[func]
        self.calls += not func.is_view
        copies = func in COPIES
        if not copies:
            self._refuse_mixtures(func, leaves)
        if func in WAITING or (func in _INDEXING and _has_mask(args)):
            self.note(str(func))
        to_host = copies and self._note_copy(func, args, kwargs)
        held = tree_map_only(SimulatedTensor, lambda x: x.held, (args, kwargs))
        if asked:
            held[1]["device"] = torch.device("cpu")
        result = func(*held[0], **held[1])
        if copies and held[1].get("device") is not None and simulated != asked and _same(result, held[0][0]):
            result = result.clone()
        if to_host:
            return args[0] if func is aten.copy_.default else result
        wrapped = tree_map_only(Tensor, SimulatedTensor, result)
        return return_and_correct_aliasing(func, args, kwargs, wrapped) if simulated else wrapped

    def _note_copy(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
        """Record a blocking copy between host and device; return whether the result is on the host."""
        if func is aten.copy_.default:
            to, source = args[0], args[1]
            blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
            to_host, crossing = not _is_simulated(to), _is_simulated(to) != _is_simulated(source)
        else:
            wants = kwargs.get("device")
            blocking = not kwargs.get("non_blocking", False)
            goes_to = _is_simulated(args[0]) if wants is None else torch.device(wants).type == KIND
            to_host, crossing = not goes_to, goes_to != _is_simulated(args[0])
        if crossing and blocking:
            self.note(f"{func} that blocks")
        return to_host

    @staticmethod
    def _refuse_mixtures(func: Any, leaves: list[Tensor]) -> None:
        """Raise as a GPU does: only CPU tensors without dimensions may be mixed with tensors on the device."""
        strangers = [x for x in leaves if not _is_simulated(x) and x.dim() > 0 and x.numel() > 0]
        if strangers and any(map(_is_simulated, leaves)) and func not in _INDEXING:
            raise RuntimeError(
                f"{func}: expected all tensors to be on the same device, but found {KIND}:0 and "
                f"{strangers[0].device} {tuple(strangers[0].shape)}"
            )


_INDEXING = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default}


def _event_type(owner: "SimulatedDevice") -> type:
    """Return a replacement of ``torch.Event`` whose instances are simulated if their device is."""

    class Event(torch.Event):
        def __new__(cls, device: Any = None, **keywords: Any) -> Any:
            if torch.device(device or "cpu").type == KIND:
                return SimulatedEvent(owner)
            return super().__new__(cls, device, **keywords)

    return Event


def _is_simulated(x: Any) -> bool:
    return isinstance(x, SimulatedTensor)


def _same(result: Any, given: Any) -> bool:
    return isinstance(result, Tensor) and isinstance(given, Tensor) and result.data_ptr() == given.data_ptr()


def _has_mask(args: Any) -> bool:
    """Whether one of the indices is a mask, whose nonzero entries the host has to count."""
    return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1])
