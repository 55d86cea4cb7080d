"""Strategies by name, for command lines and configuration files: ``"mem_opt"``, ``"hybrid_opt:0.5"``."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any

import torch

from secondorder.comm.chief_only import ChiefOnly
from secondorder.comm.comm_opt import CommOpt
from secondorder.comm.dedicated.workers import DedicatedWorkers
from secondorder.comm.hybrid_opt import HybridOpt
from secondorder.comm.local_factors import LocalFactors
from secondorder.comm.mem_opt import MemOpt
from secondorder.comm.strategy import CommStrategy, Local, world_size
from secondorder.options import bare_name

#: The constructor for each name.
STRATEGIES: Mapping[str, Callable[..., CommStrategy]] = {
    "local": Local,
    "comm_opt": CommOpt,
    "mem_opt": MemOpt,
    "hybrid_opt": HybridOpt,
    "local_factors": LocalFactors,
    "chief_only": ChiefOnly,
    "dedicated_workers": DedicatedWorkers,
}

_WORDS: Mapping[str, Any] = {"true": True, "false": False, "none": None}


def from_name(text: str) -> CommStrategy:
    """Build a strategy from its name, optionally followed by a colon and its arguments.

    Args:
        text: ``"comm_opt"``, ``"mem_opt"``, ``"hybrid_opt:0.5"``, ``"local_factors"``, ``"chief_only"``,
            ``"dedicated_workers"`` or ``"local"``, in any case and with ``-`` or ``_``. Arguments are written as in
            Python and separated by commas. Strings need no quotes; ``true``, ``false``, ``none`` and the names of
            dtypes have their usual meaning. Examples are ``"chief_only:deliver=inverses"``,
            ``"mem_opt:wire_dtype=bfloat16"`` and ``"dedicated_workers:gradient=[0, 1], factor=[2], inverse=[3]"``.

    Returns:
        A new strategy.

    Raises:
        ValueError: If there is no such strategy, or it does not accept these arguments.
        TypeError: If ``text`` is not a string.

    Example:
        >>> import secondorder
        >>> secondorder.comm.from_name("mem_opt")
        MemOpt()
    """
    if not isinstance(text, str):
        raise TypeError(f"the name of a strategy must be a string, got {text!r}")
    name, _, written = text.partition(":")
    key = bare_name(name)
    known = {bare_name(name): build for name, build in STRATEGIES.items()}
    if key not in known:
        raise ValueError(f"unknown strategy {name!r}: choose from {', '.join(STRATEGIES)}")
    arguments, keywords = _arguments(text, written)
    try:
        return known[key](*arguments, **keywords)
    except TypeError as err:
        raise ValueError(f"comm={text!r}: {err}") from err


def default_strategy(cut: bool = False) -> CommStrategy:
    """Return the strategy for ``comm=None``: ``CommOpt`` in a process group of more than one rank.

    Args:
        cut: Whether parameters are sharded over the ranks (FSDP2), with which the strategy is ``MemOpt``.

    Returns:
        A new strategy.
    """
    if world_size() == 1:
        return Local()
    return MemOpt() if cut else CommOpt()


def _arguments(text: str, written: str) -> tuple[list[Any], dict[str, Any]]:
    """Parse positional and named arguments, written as between the parentheses of a call."""
    try:
        call = ast.parse(f"f({written})", mode="eval").body
        if not isinstance(call, ast.Call) or any(keyword.arg is None for keyword in call.keywords):
            raise ValueError("no list of arguments")
        return [_value(node) for node in call.args], {str(k.arg): _value(k.value) for k in call.keywords}
    except (SyntaxError, ValueError) as err:
        raise ValueError(f"the arguments of comm={text!r} must be written as in Python, name=value or a value") from err


def _value(node: ast.expr) -> Any:
    """Evaluate a literal or a bare word."""
    if not isinstance(node, ast.Name):
        return ast.literal_eval(node)
    if node.id.lower() in _WORDS:
        return _WORDS[node.id.lower()]
    dtype = getattr(torch, node.id, None)
    return dtype if isinstance(dtype, torch.dtype) else node.id
