"""Takes steps of an optimizer on the ``meta`` device and records their state and the operators that they dispatch.

The steps execute the same code as a real run. Each kind of step in one interval is taken once.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from secondorder.plan.tally import TORCH, Cost, Tally
from secondorder.preconditioners.layers import LayerPreconditioner
from secondorder.preconditioners.windows import WindowPreconditioner

#: The largest number of kinds of steps to take. If there are more kinds, evenly spaced ones are taken.
_KINDS = 8
#: Number of intervals that precede the steps.
_LATER = 3

Costs = Mapping[Cost, float]
StageCosts = Mapping[str, Mapping[Cost, int]]


class Steps(NamedTuple):
    """Measurements of steps on the ``meta`` device.

    Attributes:
        memory: Bytes of the state after the first step, by kind and with a ``"total"``.
        costs: Number of operators per step of each cost, by stage, as the mean over one interval.
    """

    memory: dict[str, int]
    costs: dict[str, Costs]


def on_meta(model: nn.Module) -> nn.Module:
    """Return a copy of a model on the ``meta`` device, without copying its data."""
    known: dict[int, Any] = {}
    for module in model.modules():
        for value in (*module.parameters(recurse=False), *module.buffers(recurse=False), *vars(module).values()):
            if isinstance(value, nn.Parameter):
                known[id(value)] = nn.Parameter(value.detach().to("meta"), value.requires_grad)
            elif isinstance(value, Tensor):
                known[id(value)] = value.detach().to("meta")
    copy: nn.Module = deepcopy(model, known)
    return copy.train()


def take_steps(
    build: Callable[[nn.Module], Optimizer], model: nn.Module, inputs: Any, device: str, tally: Tally
) -> tuple[Any, Steps]:
    """Return an optimizer of a model on ``meta`` and the measurements of some steps as on another type of device.

    The caller has to close the optimizer.

    Raises:
        RuntimeError: If the model does not run on ``meta``.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about values are meaningless without values
        optimizer: Any = build(model)
        _suit(optimizer, device)
        curvature = getattr(optimizer, "preconditioner", None)
        if curvature is not None:
            optimizer.time_stages(tally)
        step = partial(_step, optimizer, model, inputs, tally)
        step()
        memory = memory_of(optimizer)
        if isinstance(curvature, LayerPreconditioner):
            return optimizer, Steps(memory, _mean(_layer_steps(curvature, step)))
        if isinstance(curvature, WindowPreconditioner):
            for unit in curvature.plan.units:
                unit.window.filled = unit.window.m
        return optimizer, Steps(memory, _mean([(1.0, step())]))


def _step(optimizer: Any, model: nn.Module, inputs: Any, tally: Tally) -> StageCosts:
    """Take a step and return the operators of each stage."""

    def closure() -> Tensor:
        outputs = _outputs(model, inputs)
        if getattr(optimizer, "fisher", "empirical") != "empirical":
            optimizer.observe(outputs[0], "gaussian")
        loss = torch.stack([x.float().square().mean() for x in outputs]).sum()
        loss.backward()
        return loss

    with tally:
        tally.take()
        if hasattr(optimizer, "preconditioner"):
            optimizer.step(closure)
        else:
            closure()
            with tally.stage(TORCH):
                optimizer.step()
        optimizer.zero_grad()
        return tally.take()


def _layer_steps(
    curvature: LayerPreconditioner[Any], step: Callable[[], StageCosts]
) -> Iterator[tuple[float, StageCosts]]:
    """Take a step of each kind, and yield the share of this kind among all steps together with its operators."""
    for t, share in list(_kinds(curvature)):
        curvature.go_to(t)
        curvature.hooks.arm()
        yield share, step()


def _mean(steps: Iterable[tuple[float, StageCosts]]) -> dict[str, Costs]:
    """Return the mean number of operators per step."""
    mean: dict[str, dict[Cost, float]] = {}
    for share, found in steps:
        for stage, costs in found.items():
            own = mean.setdefault(stage, {})
            for cost, number in costs.items():
                own[cost] = own.get(cost, 0.0) + number * share
    return dict(mean)


def memory_of(optimizer: Any) -> dict[str, int]:
    """Return the bytes of the state of an optimizer, by kind and with a ``"total"``."""
    if hasattr(optimizer, "memory_usage"):
        return dict(optimizer.memory_usage())
    usage = {"momentum": 0, "buffers": 0}
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor):
                usage["buffers" if key == "step" else "momentum"] += value.nbytes
    return {**usage, "total": sum(usage.values())}


def _suit(optimizer: Any, device: str) -> None:
    """Make an optimizer choose the options that it would choose on a device."""
    choose_for = getattr(getattr(getattr(optimizer, "group_options", None), "rules", None), "choose_for", None)
    if choose_for is not None:
        choose_for(device, optimizer.param_groups)
    for group in optimizer.param_groups:
        if device == "cpu" and group.get("foreach") is None:
            group["foreach"] = False


def _outputs(model: nn.Module, inputs: Any) -> list[Tensor]:
    """Return the outputs of a model that depend on its parameters, or only the loss if the model returns its loss.

    Raises:
        RuntimeError: If the model does not run on ``meta``, or no output depends on its parameters.
    """
    try:
        outputs = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError) as error:
        raise RuntimeError(f"the model does not run on the meta device with these inputs: {error}") from error
    found = tree_leaves(dict(outputs) if isinstance(outputs, dict) else outputs)
    trained = [x for x in found if isinstance(x, Tensor) and x.requires_grad]
    if not trained:
        raise RuntimeError("no output of the model depends on its parameters")
    return [x for x in trained if x.dim() == 0] or trained


def _kinds(curvature: LayerPreconditioner[Any]) -> Iterator[tuple[int, float]]:
    """Yield one step of each kind in an interval, with the share of steps of this kind."""
    period = min(math.lcm(1, *curvature.schedule.intervals()), 10_000)
    alike: dict[Hashable, list[int]] = {}
    for t in range(_LATER * period, (_LATER + 1) * period):
        alike.setdefault(_kind(curvature, t), []).append(t)
    chosen = list(alike.values())
    if len(chosen) > _KINDS:
        chosen = [chosen[i * len(chosen) // _KINDS] for i in range(_KINDS)]
    total = sum(map(len, chosen))
    yield from ((steps[0], len(steps) / total) for steps in chosen)


def _kind(curvature: LayerPreconditioner[Any], t: int) -> Hashable:
    """Return a key of the work that is due in a step."""
    curvature.go_to(t)
    blocks = curvature.plan.blocks
    due = [(i, *blocks[i].sums(own)) for i, own in curvature.schedule.find_due().items()]
    refreshed = tuple(b.index for b in blocks if curvature.is_due(b))
    return tuple(due), refreshed, tuple(b.index for b in blocks if curvature.directions.is_ready(b))
