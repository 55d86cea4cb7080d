"""Builds optimizers from the plain values of a recipe or a command line."""

import ast
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from benchmarks.recipes.types import Setting, Settings
from secondorder import GGT, MFAC, LowRank, SparseMFAC, TopK, create
from secondorder.methods.names import METHODS, resolve
from secondorder.methods.presets import PRESETS
from secondorder.preconditioners.keywords import OBJECTS, flat_names

_WINDOWED = (MFAC, SparseMFAC, GGT)


def sgd(model: nn.Module, **settings: Any) -> Optimizer:
    return torch.optim.SGD(model.parameters(), **settings)


def adamw(model: nn.Module, **settings: Any) -> Optimizer:
    betas = (settings.pop("beta1", 0.9), settings.pop("beta2", 0.999))
    return torch.optim.AdamW(model.parameters(), betas=betas, **settings)


def second_order(name: str, model: nn.Module, **settings: Any) -> Optimizer:
    method = PRESETS[name].method if name in PRESETS else METHODS[resolve(name).method]
    keywords = window_keywords(settings) if method in _WINDOWED else layer_keywords(settings)
    if "kid_residual" in keywords:
        keywords["kid_residual"] = keywords["kid_residual"] or "none"  # the command line parses "none" as None
    params: Any = model
    if "plain_layers" in keywords:
        params, keywords["module"] = orthogonal_groups(model, keywords), model
    return create(name, params, **from_flat(method, keywords))


def from_flat(method: Callable[..., Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of a constructor for plain settings, such as those of a command line or a file.

    The names of settings are keywords, keys of parameter groups, or names of :func:`flat_names`.
    """
    known, found = inspect.signature(method).parameters, dict(settings)
    own: dict[str, dict[str, Any]] = {}
    for key, (name, option) in flat_names(method).items():
        if key in found and not isinstance(found[key], OBJECTS[name]) and (key == name or key not in known):
            own.setdefault(name, {})[option.name] = found.pop(key)
    return found | {name: OBJECTS[name](**values) for name, values in own.items()}


def orthogonal_groups(model: nn.Module, keywords: dict[str, Any]) -> list[dict[str, Any]]:
    """Return two parameter groups: layers with orthogonalized steps, and all others, with their own learning rate."""
    rules = [(_layer_type(rule), rule) for rule in str(keywords.pop("plain_layers")).split(",")]
    own = {"lr": keywords.pop("plain_lr"), "momentum": keywords.pop("plain_momentum", keywords["momentum"])}
    groups: list[dict[str, Any]] = [{"params": [], "orthogonalize": True}, {"params": [], **own}]
    for name, module in model.named_modules():
        plain = any(isinstance(module, kind) if kind else rule == name for kind, rule in rules)
        groups[plain]["params"] += module.parameters(recurse=False)
    return [group for group in groups if group["params"]]


_FALLBACK_BETAS = {"fallback_beta1": 0.9, "fallback_beta2": 0.999}  # the constructors' own defaults


def layer_keywords(settings: Settings) -> dict[str, Any]:
    keywords = _with_dtypes(settings)
    betas = {key: keywords.pop(key, default) for key, default in _FALLBACK_BETAS.items()}
    if not betas.keys().isdisjoint(settings):
        keywords["betas"] = tuple(betas.values())
    if "skip_layers" in keywords and keywords["skip_layers"] is None:
        keywords["skip_layers"] = ()  # the command line parses "none" as None
    if isinstance(keywords.get("skip_layers"), str):
        rules = [rule.strip() for rule in keywords["skip_layers"].split(",")]
        keywords["skip_layers"] = [_layer_type(rule) or rule for rule in rules if rule]
    return keywords


def _layer_type(name: str) -> type[nn.Module] | None:
    found = getattr(nn, name, None)
    return found if isinstance(found, type) and issubclass(found, nn.Module) else None


_TOP_K = tuple(field.name for field in fields(TopK))
_DTYPES = ("window_dtype", "value_dtype", "factor_dtype", "inv_dtype", "orthogonal_dtype")
_BETAS = {"beta1": 0.0, "beta2": 1.0}  # GGT's own defaults


def window_keywords(settings: Settings) -> dict[str, Any]:
    keywords = _with_dtypes(settings)
    top_k = {key: keywords.pop(key) for key in _TOP_K if key in keywords}
    rank = keywords.pop("rank", None)
    if top_k and rank is not None:
        raise ValueError(f"rank={rank} asks for LowRank and {', '.join(top_k)} for TopK: give one of them")
    if top_k:
        keywords["compression"] = TopK(**top_k)
    elif rank is not None:
        keywords["compression"] = LowRank(rank)
    betas = {key: keywords.pop(key, default) for key, default in _BETAS.items()}
    if not betas.keys().isdisjoint(settings):
        keywords["betas"] = (betas["beta1"], betas["beta2"])
    return keywords


def _with_dtypes(settings: Settings) -> dict[str, Any]:
    return {key: _dtype(key, value) if key in _DTYPES else value for key, value in settings.items()}


def _dtype(key: str, value: Setting) -> torch.dtype | None:
    found = getattr(torch, value, None) if isinstance(value, str) else None
    if value is not None and not isinstance(found, torch.dtype):
        raise ValueError(f"{key} must be the name of a dtype, such as bfloat16, got {value!r}")
    return found


_WORDS: dict[str, Setting] = {"true": True, "false": False, "none": None}


def parse_settings(pairs: Sequence[str]) -> dict[str, Setting]:
    settings: dict[str, Setting] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key.isidentifier():
            raise ValueError(f"a setting must look like key=value, got {pair!r}")
        settings[key] = _parse_value(text)
    return settings


def settings_of(text: str) -> dict[str, Setting]:
    """Return the settings of a text in the form of the command line, such as ``lr=0.1 momentum=0.9``."""
    return parse_settings(text.split())


def split_settings(text: str) -> tuple[str, dict[str, Setting]]:
    """Return the name of an optimizer and the settings after the colon, as in ``adamw:lr=1e-3,beta2=0.99``."""
    name, _, changes = text.partition(":")
    return name, parse_settings(changes.split(",")) if changes else {}


def _parse_value(text: str) -> Setting:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        value = ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
    if not isinstance(value, float | int | bool | str | None):
        raise ValueError(f"a setting must be a number, a word, true, false or none, got {text!r}")
    return value
