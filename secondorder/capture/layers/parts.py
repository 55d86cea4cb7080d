"""The weights that a module applies, and where each can be captured: one part per weight, usually one per module.

Most layers are one part, captured at the module itself. Attention and recurrent layers apply several weights inside one
module, and each is captured at a separate ``Projection``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import nn

from secondorder.capture.layers.adapter import Adapter
from secondorder.capture.layers.attention import WatchedAttention
from secondorder.capture.layers.handwritten import HandwrittenNorm, recognise
from secondorder.capture.layers.norms import NormAdapter
from secondorder.capture.layers.others import StackedAdapter
from secondorder.capture.layers.projections import LinearMap
from secondorder.capture.layers.registry import find_adapter


class WeightUse(NamedTuple):
    """One weight of a module.

    Attributes:
        suffix: Suffix that the block's name adds to the module's; empty for the module's only part.
        weight: The weight, or None.
        bias: The bias, or None.
        taps: Modules to tap, and which of the Γ blocks their calls fill (-1 for all).
        make: Function that creates the adapter, given whether weight and bias are trained.
        holder: The module that holds the parameters.
    """

    suffix: str
    weight: nn.Parameter | None
    bias: nn.Parameter | None
    taps: tuple[tuple[nn.Module, int], ...]
    make: Callable[[bool, bool], Adapter]
    holder: nn.Module


def parts_of(module: nn.Module, norm_curvature: str) -> tuple[list[WeightUse], str]:
    """Return the parts of a module, or none and the reason as text."""
    inner = _linear_parts(module)
    name = type(module).__name__
    if inner is not None:
        found = [_linear_part(module, part) for part in inner]
        hidden = [part.weight_name for part, made in zip(inner, found, strict=True) if made is None]
        if hidden:
            return [], f"{name}.{hidden[0]} is parametrized"
        return [part for part in found if part is not None], f"no linear map of {name} applies it"
    if isinstance(module, nn.MultiheadAttention):
        return [], f"{name} overrides MultiheadAttention.forward"
    kind, reason = find_adapter(module)
    if kind is None:
        norm = recognise(module)
        return ([], reason) if norm is None else ([_norm_part(module, norm, norm_curvature)], "")
    own = module._parameters
    if kind.weight_name not in own:
        return [], f"{name}.{kind.weight_name} is parametrized"
    if any(p is not None and p.is_complex() for p in own.values()):
        return [], "its parameters are complex"
    if {n for n, p in own.items() if p is not None} - {kind.weight_name, kind.bias_name}:
        return [], f"{name} has parameters besides {kind.weight_name} and {kind.bias_name}"

    def make(has_weight: bool, has_bias: bool) -> Adapter:
        extra = (norm_curvature,) if issubclass(kind, NormAdapter) else ()
        return kind(module, has_weight, has_bias, *extra)

    bias = own.get(kind.bias_name) if kind.bias_name is not None else None
    return [WeightUse("", own[kind.weight_name], bias, ((module, -1),), make, module)], ""


def _norm_part(module: nn.Module, norm: HandwrittenNorm, norm_curvature: str) -> WeightUse:
    own = module._parameters

    def make(has_weight: bool, has_bias: bool) -> Adapter:
        return norm.adapter(has_weight, has_bias, norm_curvature)

    bias = own[norm.shift] if norm.shift is not None else None
    return WeightUse("", own[norm.scale], bias, ((module, -1),), make, module)


def inner_modules(root: nn.Module) -> set[nn.Module]:
    """Return the modules whose weights are parts of a module around them."""
    return {
        child
        for module in root.modules()
        if _linear_parts(module) is not None
        for child in module.modules()
        if child is not module
    }


def _linear_parts(module: nn.Module) -> list[LinearMap] | None:
    """Return the linear maps that a module computes without calling a module for them; None for any other module."""
    own = getattr(type(module), "linear_parts", None)
    if own is not None:
        found: list[LinearMap] = own(module)
        return found
    if isinstance(module, nn.MultiheadAttention) and type(module).forward is nn.MultiheadAttention.forward:
        return WatchedAttention(module).linear_parts()
    return None


def _linear_part(module: nn.Module, part: LinearMap) -> WeightUse | None:
    weight, bias = _parameter(module, part.weight_name), _parameter(module, part.bias_name)
    if weight is None and (bias is None or part.weight_name is not None):
        return None
    d_in = weight.shape[1] if weight is not None else 0
    whole = weight if weight is not None else bias
    assert whole is not None
    d_out, groups = whole.shape[0] // part.groups, part.groups
    return WeightUse(
        part.suffix, weight, bias, part.taps,
        lambda has_weight, has_bias: StackedAdapter(d_in, d_out, groups, has_weight, has_bias),
        module.get_submodule((part.weight_name or part.bias_name or "").rpartition(".")[0]),
    )  # fmt: skip


def _parameter(module: nn.Module, name: str | None) -> nn.Parameter | None:
    """Return a parameter by its dotted name; None if it is something else (parametrized)."""
    if name is None:
        return None
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path)._parameters.get(leaf)


def watched_attention(root: nn.Module, tapped: set[nn.Module]) -> list[WatchedAttention]:
    """Return the attention modules with tapped projections: these run only while the module is watched."""
    found = [
        WatchedAttention(module)
        for module in root.modules()
        if isinstance(module, nn.MultiheadAttention) and type(module).forward is nn.MultiheadAttention.forward
    ]
    return [watched for watched in found if any(projection in tapped for projection in watched.projections.children())]
