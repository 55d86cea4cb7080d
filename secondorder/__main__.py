"""Commands of the package, such as ``python -m secondorder estimate package.module:make_model --batch-size 32``."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from secondorder.factory import estimate
from secondorder.plan.rates import MachineRates, measure_rates


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: The arguments; None for the arguments of the command line.

    Returns:
        The exit status, 0 unless an argument is wrong.
    """
    given = _parser().parse_args(arguments)
    try:
        rates = MachineRates.load(given.rates) if given.rates else measure_rates(given.device or "cpu")
        if given.save_rates:
            rates.save(given.save_rates)
        found = estimate(
            load_target(given.target),
            inputs=tuple(parse_input(text) for text in given.input) or None,
            batch_size=given.batch_size,
            world_size=given.world_size,
            comm=given.comm,
            methods=given.methods,
            rates=rates,
            device=given.device or rates.device,
        )
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(found.to_dict(), indent=1) if given.json else found)
    return 0


def load_target(text: str) -> Any:
    """Return the object named by ``package.module:name``.

    Args:
        text: The name.

    Returns:
        The object.

    Raises:
        ValueError: If there is no colon, the module cannot be imported, or it does not have this name.
    """
    module, colon, name = text.partition(":")
    if not (module and colon and name):
        raise ValueError(f"the target must be package.module:function, got {text!r}")
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"cannot import {module!r} of the target {text!r}: {error}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"the module of the target {text!r} has no {name!r}")
        found = getattr(found, part)
    return found


def parse_input(text: str) -> Tensor:
    """Return a tensor on ``meta`` with the shape and dtype in a string such as ``32x3x32x32`` or ``4x128:int64``.

    Args:
        text: Sizes separated by ``x``, and optionally a colon and a dtype. The default dtype is float32.

    Returns:
        The tensor.

    Raises:
        ValueError: If the string is not a shape, or the dtype is unknown.
    """
    shape, _, name = text.partition(":")
    dtype = getattr(torch, name or "float32", None)
    sizes = [int(size) for size in shape.split("x") if size.isdecimal()]
    if not isinstance(dtype, torch.dtype) or len(sizes) != shape.count("x") + 1 or min(sizes) < 1:
        raise ValueError(f"an input must be a shape such as 32x3x32x32 or 4x128:int64, got {text!r}")
    return torch.empty(sizes, dtype=dtype, device="meta")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m secondorder", description="Second-order optimizers for PyTorch.")
    commands = parser.add_subparsers(required=True, metavar="command")
    one = commands.add_parser("estimate", help="estimate memory, FLOPs, time and traffic of every method on a model")
    one.add_argument("target", help="package.module:function, which returns a model or (model, inputs)")
    one.add_argument("--batch-size", type=int, help="number of examples per rank and step")
    one.add_argument("--input", action="append", default=[], help="input shape, such as 32x3x32x32 or 4x128:int64")
    one.add_argument("--world-size", type=int, help="number of ranks (default: 1)")
    one.add_argument("--comm", help="strategy, such as mem_opt or hybrid_opt:0.5 (default: comm_opt)")
    one.add_argument("--methods", nargs="+", help="names of methods (default: all)")
    one.add_argument("--device", help="device to train on, such as cuda")
    one.add_argument("--rates", help="JSON file with the rates of a machine (default: measure this machine)")
    one.add_argument("--save-rates", help="JSON file to which the rates are written")
    one.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


if __name__ == "__main__":
    sys.exit(main())
