"""Recurrent layers and attention that expose their linear maps.

``torch.nn.LSTM`` and similar modules pass a complete sequence to one fused kernel. No hook sees the gates before their
nonlinearity, so a layer method cannot estimate their curvature. The modules here have the same options, the same
parameters under the same names and the same results up to rounding, but apply every weight through a
:class:`~secondorder.capture.layers.projections.Projection`, a child without parameters. :func:`expose` converts the
modules of an existing model to these classes::

    x [T, N, d] ──► ih: all steps in one product ──► gates of step t ──┐
    h of step t−1 ───────► hh: one product per step ───────────────────┴──► nonlinearity ──► h of step t

Running step by step is slower. A forward pass without an active tap (in ``eval()``, or because no statistics are due in
this training step) runs torch's kernel.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.rnn import PackedSequence

from secondorder.capture.layers.attention import attention, attention_parts
from secondorder.capture.layers.projections import AttentionProjections, LinearMap, Projection

__all__ = ["GRU", "LSTM", "RNN", "GRUCell", "LSTMCell", "MultiheadAttention", "RNNCell", "expose"]

M = TypeVar("M", bound=nn.Module)
#: The hidden state ``[N, ·]`` of one layer and direction: h, and c of an LSTM.
State = tuple[Tensor, ...]
#: The linear maps of one layer and direction: "ih", "hh" and, if h is projected, "hr".
Maps = Mapping[str, Callable[[Tensor], Tensor]]


# ------------------------------------------------------------------ modules and projections
class _Exposed(nn.Module):
    """A module that applies its weights through :class:`Projection` children."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.add_projections()

    def linear_parts(self) -> list[LinearMap]:
        """Return the linear maps of the module, with the parameters of each and the projections to tap."""
        raise NotImplementedError

    def add_projections(self) -> None:
        """Add the children, also to a module that was built with another class."""
        raise NotImplementedError


class _Recurrent(_Exposed):
    """Base of recurrent layers and cells. Maps have the names of their parameters without ``weight_`` and ``bias_``."""

    projections: nn.ModuleDict
    #: Whether the hidden state is a pair (h, c).
    _paired = False

    def _step(self, from_x: Tensor, state: State, maps: Maps) -> State:
        """Return the next state from the input's share of the gates ``[N, ·]`` and the state."""
        raise NotImplementedError

    def _names(self) -> list[str]:
        return ["ih", "hh"]

    def add_projections(self) -> None:
        self.projections = nn.ModuleDict({name: Projection() for name in self._names()}).train(self.training)

    def linear_parts(self) -> list[LinearMap]:
        parts = []
        for name in self._names():
            bias = f"bias_{name}" if getattr(self, f"bias_{name}", None) is not None else None
            projection = self.projections[name]
            assert isinstance(projection, Projection)
            parts.append(LinearMap(name, f"weight_{name}", bias, ((projection, -1),)))
        return parts

    def _map(self, name: str) -> Callable[[Tensor], Tensor]:
        # Look up the parameters once per forward pass, not per step: reading a parametrized weight computes it.
        weight, bias = getattr(self, f"weight_{name}"), getattr(self, f"bias_{name}", None)
        return functools.partial(self.projections[name], weight=weight, bias=bias)

    def _is_seen(self) -> bool:
        """Whether this forward pass has to run step by step."""
        if torch.compiler.is_compiling():
            return True  # the fused kernel breaks the graph, and a graph cannot detect that a tap becomes due
        return self.training and any(p.watched for p in self.projections.values() if isinstance(p, Projection))

    def _to_state(self, hx: Any) -> State:
        return tuple(hx) if self._paired else (hx,)

    def _from_state(self, state: State) -> Any:
        return state if self._paired else state[0]


class _LSTMStep(_Recurrent):
    _paired = True

    def _step(self, from_x: Tensor, state: State, maps: Maps) -> State:
        h, c = state
        i, f, g, o = (from_x + maps["hh"](h)).chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        return (maps["hr"](h) if "hr" in maps else h), c


class _GRUStep(_Recurrent):
    def _step(self, from_x: Tensor, state: State, maps: Maps) -> State:
        (h,) = state
        reset_x, update_x, new_x = from_x.chunk(3, 1)
        reset_h, update_h, new_h = maps["hh"](h).chunk(3, 1)
        # The reset gate multiplies the complete second map, including the bias.
        new = (new_x + (reset_x + reset_h).sigmoid() * new_h).tanh()
        return ((h - new) * (update_x + update_h).sigmoid() + new,)


class _RNNStep(_Recurrent):
    nonlinearity: str

    def _step(self, from_x: Tensor, state: State, maps: Maps) -> State:
        total = from_x + maps["hh"](state[0])
        return (total.tanh() if self.nonlinearity == "tanh" else total.relu(),)


# ------------------------------------------------------------------ cells
class _Cell(_Recurrent):
    """A single time step, with input ``[N, d]`` or ``[d]`` and state ``[N, H]`` or ``[H]``."""

    hidden_size: int

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        """Compute the result of the torch class of the same name."""
        if not self._is_seen():
            return super().forward(input, hx)
        if input.dim() not in (1, 2):
            raise ValueError(f"{type(self).__name__}: Expected input to be 1D or 2D, got {input.dim()}D instead")
        batched = input.dim() == 2
        x = input if batched else input.unsqueeze(0)
        expected = (x.shape[0], self.hidden_size)
        if hx is None:
            state: State = (x.new_zeros(expected),) * (1 + self._paired)
        else:
            state = tuple(h if batched else h.unsqueeze(0) for h in self._to_state(hx))
        for h in state:
            if h.shape != expected:  # it would be broadcast
                raise RuntimeError(f"{type(self).__name__}: Expected hidden size {expected}, got {tuple(h.shape)}")
        state = self._step(self._map("ih")(x), state, {"hh": self._map("hh")})
        return self._from_state(state if batched else tuple(h.squeeze(0) for h in state))


class LSTMCell(_LSTMStep, _Cell, nn.LSTMCell):
    """:class:`torch.nn.LSTMCell` with its linear maps exposed."""


class GRUCell(_GRUStep, _Cell, nn.GRUCell):
    """:class:`torch.nn.GRUCell` with its linear maps exposed."""


class RNNCell(_RNNStep, _Cell, nn.RNNCell):
    """:class:`torch.nn.RNNCell` with its linear maps exposed."""


# ------------------------------------------------------------------ layers
class _Layers(_Recurrent, nn.RNNBase):
    """A stack of layers over time; input is ``[T, N, d]``, ``[N, T, d]`` (``batch_first``), ``[T, d]`` or packed."""

    def _names(self) -> list[str]:
        return [name.removeprefix("weight_") for name in self._flat_weights_names if name.startswith("weight_")]

    def forward(self, input: Tensor | PackedSequence, hx: Any = None) -> tuple[Any, Any]:
        """Compute the result of the torch class of the same name."""
        if not self._is_seen():
            outputs: tuple[Any, Any] = super().forward(input, hx)
            return outputs
        if isinstance(input, PackedSequence):
            return self._forward_packed(input, hx)
        if input.dim() not in (2, 3):
            raise ValueError(f"{type(self).__name__}: Expected input to be 2D or 3D, got {input.dim()}D instead")
        batched, batch_dim = input.dim() == 3, 0 if self.batch_first else 1
        x = input if batched else input.unsqueeze(batch_dim)
        state = self._first_state(x, hx, None, batched)
        output, state = self._run(x.transpose(0, 1) if self.batch_first else x, None, state)
        output = output.transpose(0, 1) if self.batch_first else output
        if not batched:
            output, state = output.squeeze(batch_dim), tuple(s.squeeze(1) for s in state)
        return output, self._from_state(state)

    def _forward_packed(self, input: PackedSequence, hx: Any) -> tuple[PackedSequence, Any]:
        x, sizes, order, back = input
        hx = hx if hx is None else self.permute_hidden(hx, order)
        output, state = self._run(x, sizes.tolist(), self._first_state(x, hx, sizes, True))
        return PackedSequence(output, sizes, order, back), self.permute_hidden(self._from_state(state), back)

    def _first_state(self, x: Tensor, hx: Any, sizes: Tensor | None, batched: bool) -> State:
        """Return ``[layers·directions, N, ·]``: the given state, checked as torch does, or zeros."""
        if hx is None:
            shapes = [self.get_expected_hidden_size(x, sizes)]
            if self._paired:
                shapes.append((*shapes[0][:2], self.hidden_size))
            state: State = tuple(x.new_zeros(shape) for shape in shapes)
        else:
            state = self._to_state(hx)
            if any(s.dim() != (3 if batched else 2) for s in state):
                found = " and ".join(f"{s.dim()}-D" for s in state)
                raise RuntimeError(f"For input {'with' if batched else 'without'} a batch dimension hx is {found}")
            state = state if batched else tuple(s.unsqueeze(1) for s in state)
        if not torch.compiler.is_compiling():
            self._update_flat_weights()
        self.check_forward_args(x, self._from_state(state), sizes)
        return state

    def _run(self, x: Tensor, sizes: list[int] | None, state: State) -> tuple[Tensor, State]:
        """Return the output of all layers, like x, and the last state of every sequence, like ``state``.

        Args:
            x: ``[T, N, d]``, or packed ``[Σ sizes, d]``.
            sizes: Number of active sequences at each step of packed data.
            state: ``[layers·directions, N, ·]``.
        """
        dtypes = self._dtypes(x, sizes, state)
        finals: list[State] = []
        for layer in range(self.num_layers):
            if layer:
                x = F.dropout(x, self.dropout, self.training)
            outputs = []
            for suffix in ("", "_reverse") if self.bidirectional else ("",):
                first = tuple(s[len(finals)] for s in state)
                kinds = ("ih", "hh", "hr") if self.proj_size else ("ih", "hh")
                maps = {kind: self._map(f"{kind}_l{layer}{suffix}") for kind in kinds}
                output, final = self._scan(x, sizes, first, maps, reverse=bool(suffix))
                outputs.append(output)
                finals.append(final)
            x = torch.cat(outputs, -1) if self.bidirectional else outputs[0]
        parts = zip(zip(*finals, strict=True), dtypes[1:], strict=True)
        return x.to(dtypes[0]), tuple(torch.stack(part).to(dtype) for part, dtype in parts)

    def _dtypes(self, x: Tensor, sizes: list[int] | None, state: State) -> list[torch.dtype]:
        """Return the data types in which torch's kernel returns the output and each part of the state.

        On a CPU, the effect of autocast on recurrent layers depends on the type of the layer, on projections, on the
        lengths of packed sequences, and on the processor, since some have no LSTM kernel of lower precision. Therefore
        run torch's kernel on one or two steps of one or two examples, which raises torch's error if there is no kernel.
        Otherwise, a training step that captures would pass, and the next one would fail. The arguments are those of
        :meth:`_run`.
        """
        kind, count = x.device.type, 1 + len(state)
        if not torch.is_autocast_enabled(kind):
            return [x.dtype] * count
        if kind != "cpu" or torch.compiler.is_compiling() or not x.numel():
            return [x.dtype if self.mode == "GRU" and kind == "cpu" else torch.get_autocast_dtype(kind)] * count
        kernel = getattr(torch, self.mode.lower())
        # Without dropout, the kernel draws no random numbers.
        options = (self._flat_weights, self.bias, self.num_layers, 0.0, self.training, self.bidirectional)
        few = [1] if sizes is None or sizes[0] == sizes[-1] else [2, 1]  # sequences of equal length use another kernel
        first = self._from_state(tuple(s[:, : few[0]] for s in state))
        if sizes is None:
            found = kernel(x[:1, :1], first, *options, False)
        else:
            found = kernel(x[: sum(few)], torch.tensor(few), first, *options)
        return [tensor.dtype for tensor in found]

    def _scan(
        self, x: Tensor, sizes: list[int] | None, first: State, maps: Maps, reverse: bool
    ) -> tuple[Tensor, State]:
        """Run one direction of one layer, and return its output ``[T, N, ·]`` or packed, and the last states."""
        # Packed rows have no axis of examples, since only three axes indicate one.
        from_x = maps["ih"](x) if sizes is None else maps["ih"](x[None])[0]
        steps: Sequence[Tensor] = from_x.unbind(0) if sizes is None else from_x.split(sizes)
        if not steps:
            raise RuntimeError("Expected sequence length to be larger than 0 in RNN")
        steps = steps[::-1] if reverse else steps
        # Packed sequences are sorted by length. Forward, the last rows end first; backward, they start last.
        state = _rows(first, 0, steps[0].shape[0])
        ended: list[State] = []
        outputs: list[Tensor] = []
        for step in steps:
            alive, before = step.shape[0], state[0].shape[0]
            if alive < before:
                ended.append(_rows(state, alive, before))
                state = _rows(state, 0, alive)
            elif alive > before:
                state = _join([state, _rows(first, before, alive)])
            state = self._step(step, state, maps)
            outputs.append(state[0])
        outputs = outputs[::-1] if reverse else outputs
        return torch.stack(outputs) if sizes is None else torch.cat(outputs), _join([state, *ended[::-1]])


def _rows(state: State, start: int, end: int) -> State:
    return state if (start, end) == (0, state[0].shape[0]) else tuple(s[start:end] for s in state)


def _join(states: list[State]) -> State:
    return states[0] if len(states) == 1 else tuple(torch.cat(parts) for parts in zip(*states, strict=True))


class LSTM(_LSTMStep, _Layers, nn.LSTM):
    """:class:`torch.nn.LSTM` with its linear maps exposed."""


class GRU(_GRUStep, _Layers, nn.GRU):
    """:class:`torch.nn.GRU` with its linear maps exposed."""


class RNN(_RNNStep, _Layers, nn.RNN):
    """:class:`torch.nn.RNN` with its linear maps exposed."""


# ------------------------------------------------------------------ attention
class MultiheadAttention(_Exposed, nn.MultiheadAttention):
    """:class:`torch.nn.MultiheadAttention` with its linear maps exposed. Results are bit-for-bit the same.

    Optimizers also support torch's own module. Use this class for models under ``torch.compile``, where they cannot.
    """

    projections: AttentionProjections

    def add_projections(self) -> None:
        self.projections = AttentionProjections().train(self.training)

    def linear_parts(self) -> list[LinearMap]:
        return attention_parts(self, self.projections)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the result of :class:`torch.nn.MultiheadAttention`."""
        masks = (key_padding_mask, need_weights, attn_mask)
        if not self.training or query.is_nested or key.is_nested or value.is_nested:
            return super().forward(query, key, value, *masks, average_attn_weights, is_causal)
        turned = self.batch_first and query.dim() == 3
        inputs = _time_first(query, key, value) if turned else (query, key, value)
        sizes = (self.embed_dim, self.num_heads)
        inner = (self.in_proj_weight, self.in_proj_bias, self.bias_k, self.bias_v, self.add_zero_attn, self.dropout)
        outer = (self.out_proj.weight, self.out_proj.bias, self.training)
        apart = (not self._qkv_same_embed_dim, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        arguments: list[Any] = [*inputs, *sizes, *inner, *outer, *masks, *apart, average_attn_weights, is_causal]
        output, weights = attention(self.projections, *arguments)
        return output.transpose(0, 1) if turned else output, weights


def _time_first(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Swap the first two dims. Identical tensors stay identical, since this decides which products are combined."""
    q = query.transpose(0, 1)
    if value is not key:
        return q, key.transpose(0, 1), value.transpose(0, 1)
    k = q if key is query else key.transpose(0, 1)
    return q, k, k


# ------------------------------------------------------------------ conversion
_EXPOSED: dict[type[nn.Module], type[_Exposed]] = {
    nn.LSTM: LSTM,
    nn.GRU: GRU,
    nn.RNN: RNN,
    nn.LSTMCell: LSTMCell,
    nn.GRUCell: GRUCell,
    nn.RNNCell: RNNCell,
    nn.MultiheadAttention: MultiheadAttention,
}


def expose(model: M) -> M:
    """Convert the recurrent layers, cells and attention of a model to the classes of this module, in place.

    Parameters remain the same objects under the same names, and hooks remain. Only the class of a module changes, and a
    child ``projections`` without parameters is added. A second call does nothing. A module with an overridden
    ``forward`` or with parametrized weights is not converted, and a warning names it.

    Args:
        model: Any module, including a single layer.

    Returns:
        The model.
    """
    left = []
    for name, module in list(model.named_modules()):
        base = next((kind for kind in _EXPOSED if isinstance(module, kind)), None)
        if base is None or isinstance(module, _Exposed):
            continue
        reason = _obstacle(module, base)
        if reason:
            left.append(f"{name or 'the module'} ({reason})")
            continue
        module.__class__ = _exposed_class(_EXPOSED[base], type(module))
        module.add_projections()
    if left:
        warnings.warn(
            f"expose() does not convert {', '.join(left)}. Build them from the classes of secondorder.nn to give them "
            "curvature, or name them in skip_layers",
            stacklevel=2,
        )
    return model


def _obstacle(module: nn.Module, base: type[nn.Module]) -> str:
    """Return why a module must keep its class; an empty string if there is no reason."""
    if is_parametrized(module):
        return "its weights are parametrized"
    if type(module).forward is not base.forward or "forward" in vars(module):
        return f"{type(module).__name__} has a forward of its own"
    return ""


_JOINED: dict[tuple[type, type], type] = {}


def _exposed_class(exposed: type, original: type) -> type:
    """Return ``exposed``, or a class that also has the members of a subclass of the torch class."""
    if _EXPOSED.get(original) is exposed:
        return exposed
    if (exposed, original) not in _JOINED:
        members = {"__module__": original.__module__, "__doc__": original.__doc__, "__reduce_ex__": _reduce_joined}
        _JOINED[exposed, original] = type(original.__name__, (exposed, original), members)
    return _JOINED[exposed, original]


def _reduce_joined(self: nn.Module, protocol: int) -> tuple[Any, ...]:
    """Pickle an instance by its two bases, because their joint class exists in no module."""
    return (_new_joined, type(self).__bases__, *object.__reduce_ex__(self, protocol)[2:])


def _new_joined(exposed: type, original: type) -> Any:
    cls: Any = _exposed_class(exposed, original)
    return cls.__new__(cls)
