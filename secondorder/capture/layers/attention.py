"""Attention as torch computes it, with its linear maps taken through projections.

``nn.MultiheadAttention`` needs no other module: :class:`WatchedAttention` reroutes the one function that it calls,
during its own forward only::

    forward pre-hook      push a mode          ┐
    MHA.forward                                │ F.multi_head_attention_forward ──► attention(projections, …)
    forward hook          pop it               ┘

:func:`attention` does what torch does, operation by operation: outputs and gradients are the same to the last bit.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from secondorder.capture.copies import OwnHook
from secondorder.capture.layers.projections import AttentionProjections, LinearMap


def attention_parts(module: nn.MultiheadAttention, projections: AttentionProjections) -> list[LinearMap]:
    """Return the parts of a multi-head attention that is computed through ``projections``.

    Args:
        module: The attention. ``bias_k`` and ``bias_v`` are not linear maps, and belong to no part.
        projections: Modules that apply its weights.

    Returns:
        The input projection (one part, or one per weight and one for their common bias) and the output projection.
    """
    thirds = ((projections.query, 0), (projections.key, 1), (projections.value, 2))
    in_bias = None if module.in_proj_bias is None else "in_proj_bias"
    if module.in_proj_weight is not None:  # queries, keys and values have one size
        parts = [LinearMap("in_proj", "in_proj_weight", in_bias, ((projections.packed, -1), *thirds), 3)]
    else:
        names = ("q_proj", "k_proj", "v_proj")
        parts = [LinearMap(n, f"{n}_weight", None, ((p, -1),)) for n, (p, _) in zip(names, thirds, strict=True)]
        if in_bias is not None:
            parts.append(LinearMap("in_proj_bias", None, in_bias, thirds, 3))
    out_bias = None if module.out_proj.bias is None else "out_proj.bias"
    return [*parts, LinearMap("out_proj", "out_proj.weight", out_bias, ((projections.out, -1),))]


# ------------------------------------------------------------------ attention, as torch computes it

_Three = tuple[Tensor, Tensor, Tensor]
_Shape = tuple[int, int, int, int]  # N, heads, L, S


def attention(
    projections: AttentionProjections,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Run ``torch.nn.functional.multi_head_attention_forward`` with its linear maps taken through ``projections``.

    Arguments are torch's, without the static keys and values, which replace projections. Outputs, gradients and the use
    of random numbers are torch's to the last bit.

    Returns:
        Output ``[L, N, E]`` and, with ``need_weights``, the weights ``[N, L, S]`` (``[N, num_heads, L, S]`` unless
        averaged); without N if ``query`` has none.

    Raises:
        AssertionError: If shapes do not fit, as torch does.
    """
    check_shapes = F._mha_shape_check  # type: ignore[attr-defined]  # not in torch's stubs
    batched = check_shapes(query, key, value, key_padding_mask, attn_mask, num_heads)
    if not batched:
        query, key, value = (t.unsqueeze(1) for t in (query, key, value))
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    length, batch, width = query.shape
    key_mask, mask, is_causal = _float_masks(key_padding_mask, attn_mask, is_causal, need_weights, query.dtype)
    if width != embed_dim_to_check or width % num_heads:
        raise AssertionError(f"expecting embed_dim {embed_dim_to_check}, a multiple of {num_heads}, but got {width}")
    if in_proj_weight is not None and not use_separate_proj_weight:
        q, k, v = _stacked(projections, (query, key, value), in_proj_weight, in_proj_bias)
    else:
        weights = [w for w in (q_proj_weight, k_proj_weight, v_proj_weight) if w is not None]
        q, k, v = _separate(projections, (query, key, value), weights, in_proj_bias)
    mask = _mask_of_heads(mask, (batch * num_heads, length, key.shape[0]))
    q, k, v, appended = _split_heads(q, k, v, (bias_k, bias_v), add_zero_attn, num_heads)
    shape = (batch, num_heads, length, k.shape[1])
    mask = _merge_masks(mask, key_mask, appended, shape)

    attend = _attend_with_weights if need_weights else _attend_fused
    context, scores = attend((q, k, v), mask, dropout_p if training else 0.0, is_causal, shape)
    context = context.reshape(length * batch, width)
    out = F.linear(context, out_proj_weight, out_proj_bias).view(length, batch, out_proj_weight.shape[0])
    # The product is torch's, of rows; the tap needs to see the batch axis.
    out = projections.out(context.view(length, batch, width), out_proj_weight, out_proj_bias, out)
    if scores is not None:
        scores = scores.view(shape)
        scores = scores.mean(dim=1) if average_attn_weights else scores
    if batched:
        return out, scores
    return out.squeeze(1), None if scores is None else scores.squeeze(0)


def _float_masks(
    key_mask: Tensor | None, mask: Tensor | None, is_causal: bool, need_weights: bool, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None, bool]:
    """Return the masks as terms to be added, and whether the causal kernel replaces one of them."""
    key_mask = F._canonical_mask(key_mask, "key_padding_mask", F._none_or_dtype(mask), "attn_mask", dtype)
    if is_causal and mask is None:
        raise RuntimeError("is_causal is a hint about attn_mask, and needs it: see generate_square_subsequent_mask")
    if is_causal and key_mask is None and not need_weights:
        return None, None, True
    mask = F._canonical_mask(mask, "attn_mask", None, "", dtype, check_other=False)
    return key_mask, mask, is_causal and key_mask is None


def _stacked(projections: AttentionProjections, qkv: _Three, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
    """Compute queries, keys and values ``[·, N, E]`` from one weight ``[3E, E]``, with the products of torch."""
    query, key, value = qkv
    width = query.shape[-1]
    if key.shape != value.shape:
        raise AssertionError(f"key shape {key.shape} does not match value shape {value.shape}")
    if key is value and query is key:
        return _unstack(projections.packed(query, weight, bias), 3)
    if key is not value:
        return _separate(projections, qkv, weight.chunk(3), bias)
    # Keys and values share one product, of which each tap sees its half: two products would round differently.
    w_q, w_kv = weight.split([width, 2 * width])
    b_q, b_kv = (None, None) if bias is None else bias.split([width, 2 * width])
    q = projections.query(query, w_q, b_q)
    k, v = _unstack(F.linear(key, w_kv, b_kv), 2)
    return q, projections.key(key, w_kv[:width], None, k), projections.value(value, w_kv[width:], None, v)


def _unstack(joined: Tensor, groups: int) -> tuple[Tensor, ...]:
    """Return the parts ``[·, N, E]`` of ``[·, N, groups·E]``, each contiguous."""
    parts = joined.unflatten(-1, (groups, -1)).unsqueeze(0).transpose(0, -2).squeeze(-2).contiguous()
    return tuple(parts[i] for i in range(groups))


def _separate(
    projections: AttentionProjections, qkv: _Three, weights: Sequence[Tensor], bias: Tensor | None
) -> tuple[Tensor, ...]:
    """Compute queries, keys and values ``[·, N, E]``, each from its own weight ``[E, d_in]``."""
    query, key, value = qkv
    if key.shape[:2] != value.shape[:2]:
        raise AssertionError(f"key's sequence and batch dims {key.shape[:2]} do not match value's {value.shape[:2]}")
    w_q, w_k, w_v = weights
    b_q, b_k, b_v = (None, None, None) if bias is None else bias.chunk(3)
    return projections.query(query, w_q, b_q), projections.key(key, w_k, b_k), projections.value(value, w_v, b_v)


def _mask_of_heads(mask: Tensor | None, shape: tuple[int, int, int]) -> Tensor | None:
    """Return ``[L, S]`` as ``[1, L, S]``, and ``[N·heads, L, S]`` unchanged."""
    if mask is None:
        return None
    expected = shape if mask.dim() == 3 else shape[1:]
    if mask.shape != expected:
        raise RuntimeError(f"The shape of the {mask.dim()}D attn_mask is {mask.shape}, but should be {expected}.")
    return mask if mask.dim() == 3 else mask.unsqueeze(0)


def _split_heads(
    q: Tensor, k: Tensor, v: Tensor, bias: tuple[Tensor | None, Tensor | None], add_zero_attn: bool, num_heads: int
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Return ``[N·heads, ·, E/heads]`` of each, and the number of keys that follow those of the input."""
    batch, width = q.shape[1:]
    bias_k, bias_v = bias
    if (bias_k is None) != (bias_v is None):
        raise AssertionError("bias_k and bias_v must be given together")
    if bias_k is not None and bias_v is not None:
        k, v = torch.cat([k, bias_k.repeat(1, batch, 1)]), torch.cat([v, bias_v.repeat(1, batch, 1)])
    q, k, v = (t.view(t.shape[0], batch * num_heads, width // num_heads).transpose(0, 1) for t in (q, k, v))
    if add_zero_attn:
        zeros = torch.zeros((k.shape[0], 1, k.shape[2]), dtype=k.dtype, device=k.device)
        k, v = torch.cat([k, zeros], dim=1), torch.cat([v, zeros.to(v.dtype)], dim=1)
    return q, k, v, (bias_k is not None) + add_zero_attn


def _merge_masks(mask: Tensor | None, key_mask: Tensor | None, appended: int, shape: _Shape) -> Tensor | None:
    """Merge both masks to one term ``[1 or N·heads, 1 or L, S]``; keys that were appended are never masked."""
    batch, heads, _, sources = shape
    if appended:
        mask = None if mask is None else F.pad(mask, (0, appended))
        key_mask = None if key_mask is None else F.pad(key_mask, (0, appended))
    if key_mask is None:
        return mask
    if key_mask.shape != (batch, sources):
        raise AssertionError(f"expecting key_padding_mask of shape {(batch, sources)}, but got {tuple(key_mask.shape)}")
    key_mask = key_mask.view(batch, 1, 1, sources).expand(-1, heads, -1, -1).reshape(batch * heads, 1, sources)
    return key_mask if mask is None else mask + key_mask


def _attend_with_weights(
    qkv: _Three, mask: Tensor | None, dropout_p: float, is_causal: bool, shape: _Shape
) -> tuple[Tensor, Tensor | None]:
    """Return the context ``[L, N·heads, E/heads]`` and weights ``[N·heads, L, S]``."""
    q, k, v = qkv
    scaled = q * math.sqrt(1.0 / float(q.shape[-1]))
    if mask is not None:
        weights = torch.baddbmm(mask, scaled, k.transpose(-2, -1))
    else:
        weights = torch.bmm(scaled, k.transpose(-2, -1))
    weights = F.softmax(weights, dim=-1)
    if dropout_p > 0.0:
        weights = F.dropout(weights, p=dropout_p)
    return torch.bmm(weights, v).transpose(0, 1), weights


def _attend_fused(
    qkv: _Three, mask: Tensor | None, dropout_p: float, is_causal: bool, shape: _Shape
) -> tuple[Tensor, Tensor | None]:
    """Return the context ``[L, N, heads, E/heads]`` of the fused kernel, which does not return the weights."""
    batch, heads, _, sources = shape
    if mask is not None:
        mask = mask.unsqueeze(0) if mask.shape[0] == 1 else mask.view(batch, heads, -1, sources)
    q, k, v = (t.view(batch, heads, t.shape[1], t.shape[2]) for t in qkv)
    context = F.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal)
    return context.permute(2, 0, 1, 3), None


# ------------------------------------------------------------------ attention of an unchanged module


#: The projections of every module that was ever watched, which all of its optimizers tap.
_PROJECTIONS: weakref.WeakKeyDictionary[nn.MultiheadAttention, AttentionProjections] = weakref.WeakKeyDictionary()


class WatchedAttention:
    """Lets taps see the projections of an ``nn.MultiheadAttention`` without changing it.

    The projections are no children of the module: nothing of its structure, attributes or state changes, only two hooks
    come and go with :meth:`install`.

    Attributes:
        module: The attention.
        projections: The modules to tap; they follow the module's training mode.
    """

    def __init__(self, module: nn.MultiheadAttention) -> None:
        self.module = module
        self.projections: AttentionProjections = _PROJECTIONS.setdefault(module, AttentionProjections())

    def linear_parts(self) -> list[LinearMap]:
        """Return the parts of the module; see :func:`attention_parts`."""
        return attention_parts(self.module, self.projections)

    def install(self, wanted: Callable[[], bool]) -> list[RemovableHandle]:
        """Hook the module, so that its forward calls the projections.

        Args:
            wanted: Function that is called at each forward in training mode with gradients. It lives as long as the
                hooks, so it should not keep an optimizer alive.

        Returns:
            Handles of the hooks.
        """
        route = _Route(self.projections, wanted)
        # These hooks come first on both sides, so that the mode sees as little third-party code as possible.
        enter = self.module.register_forward_pre_hook(_Enter(route), prepend=True)
        leave = self.module.register_forward_hook(_Leave(route), prepend=True, always_call=True)
        return [enter, leave]


class _Route(threading.local):
    """The state that the two hooks of one module share, and the modes that they have pushed in this thread."""

    def __init__(self, projections: AttentionProjections, wanted: Callable[[], bool]) -> None:
        self.projections = projections
        self.wanted = wanted
        #: One entry per running forward; there is more than one if the module calls itself.
        self.running: list[_Reroute | None] = []


class _Hook(OwnHook):
    def __init__(self, route: _Route) -> None:
        self.route = route


class _Enter(_Hook):
    def __call__(self, module: nn.MultiheadAttention, args: tuple[Any, ...]) -> None:
        """Push the mode, if this forward is to be captured."""
        if torch.compiler.is_compiling():
            return
        route, mode = self.route, None
        if module.training and torch.is_grad_enabled() and route.wanted():
            route.projections.train()
            mode = _Reroute(module, route)
            mode.__enter__()  # type: ignore[no-untyped-call]
        route.running.append(mode)


class _Leave(_Hook):
    def __call__(self, module: nn.MultiheadAttention, args: tuple[Any, ...], output: Any) -> None:
        """Pop the mode again, also if the forward has raised."""
        if torch.compiler.is_compiling() or not self.route.running:
            return
        mode = self.route.running.pop()
        if mode is not None:
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]


class _Reroute(TorchFunctionMode):
    """Takes the attention of one module through projections, and passes everything else on."""

    def __init__(self, module: nn.MultiheadAttention, route: _Route) -> None:
        super().__init__()
        self.module = module
        self.route = route

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not F.multi_head_attention_forward or not self._is_own(args, kwargs):
            return func(*args, **kwargs)
        projections = self.route.projections
        return attention(projections, *args, **{k: v for k, v in kwargs.items() if not k.startswith("static_")})

    def _is_own(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call uses this module's own weights, without static keys."""
        module = self.module
        if not self.route.wanted():
            return False  # left over from a keyboard interrupt, after which torch runs no hook
        if len(args) < 13 or kwargs.get("static_k") is not None or kwargs.get("static_v") is not None:
            return False
        stacked, out = args[5], args[11]
        queries = kwargs.get("q_proj_weight")
        return stacked is module.in_proj_weight and queries is module.q_proj_weight and out is module.out_proj.weight
