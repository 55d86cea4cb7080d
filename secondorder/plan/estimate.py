"""Estimates the memory, FLOPs, time and traffic of a step of several methods on the ``meta`` device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from secondorder import options
from secondorder.comm.strategy import CommStrategy
from secondorder.plan.meta_steps import Costs, on_meta, take_steps
from secondorder.plan.rates import MachineRates, measure_rates
from secondorder.plan.tally import Tally
from secondorder.plan.words import aligned, bytes_in_words, flops_in_words

Builder = Callable[[nn.Module], Optimizer]
#: Stages of a step that are divided among ranks, with the stage of ``plan()`` that determines each rank's share.
_DIVIDED = {"refresh": "refresh", "select": "refresh", "kernel": "refresh", "invert": "refresh",
            "precondition": "precondition"}  # fmt: skip
#: Kinds of bytes in the order of the columns.
_KINDS = ("factors", "second_order", "scale", "rows", "kernel", "window", "error", "gram", "momentum", "fallback",
          "pending", "workspace", "buffers")  # fmt: skip


@dataclass(frozen=True)
class MethodEstimate:
    """The estimated cost of one method. Each number is that of the rank with the largest one.

    Attributes:
        memory: Bytes of the state after the first step, by kind of ``memory_usage()`` and with a ``"total"``.
        flops: FLOPs per step by stage; ``"model"`` is the forward and backward pass.
        flops_ratio: FLOPs per step divided by those of SGD.
        seconds: Seconds per step, without communication.
        slowdown: Seconds per step divided by those of SGD.
        sent: Bytes passed to collectives per step, without the gradients that ``DistributedDataParallel`` averages.
        failure: Why the method cannot train this model. If it is set, everything else is empty or 0.
    """

    memory: dict[str, int] = field(default_factory=dict)
    flops: dict[str, float] = field(default_factory=dict)
    flops_ratio: float = 0.0
    seconds: float = 0.0
    slowdown: float = 0.0
    sent: float = 0.0
    failure: str | None = None


@dataclass(frozen=True)
class Estimate:
    """The estimated costs of several methods. ``print`` shows them as a table.

    Attributes:
        methods: The estimate of each method, by name.
        parameters: Number of parameters of the model.
        batch_size: Number of examples per rank and step.
        world_size: Number of ranks.
        comm: The strategy as text.
        rates: The rates of the machine.
    """

    methods: dict[str, MethodEstimate]
    parameters: int
    batch_size: int
    world_size: int
    comm: str
    rates: MachineRates

    def to_dict(self) -> dict[str, Any]:
        """Return the estimate as a dict that ``json.dumps`` accepts."""
        return asdict(self)

    def __str__(self) -> str:
        """Return a table with one row per method."""
        where = f"{self.world_size} ranks, {self.comm}" if self.world_size > 1 else "1 rank"
        title = f"{self.parameters:,} parameters · {self.batch_size} examples per rank · {where} · {self.rates.device}"
        good = {name: found for name, found in self.methods.items() if found.failure is None}
        kinds = [kind for kind in _KINDS if any(found.memory.get(kind) for found in good.values())]
        head = ["method", *kinds, "total", "FLOPs", "/ SGD", "slowdown", "sent"]
        rows = [
            [
                name,
                *(bytes_in_words(found.memory.get(kind, 0)) if found.memory.get(kind) else "-" for kind in kinds),
                bytes_in_words(found.memory["total"]),
                flops_in_words(sum(found.flops.values())),
                f"{found.flops_ratio:.2f}",
                f"{found.slowdown:.2f}",
                bytes_in_words(found.sent) if self.world_size > 1 else "-",
            ]
            for name, found in good.items()
        ]
        failed = [f"{name}: {found.failure}" for name, found in self.methods.items() if found.failure is not None]
        return "\n".join([title, *aligned([head, *rows]), *failed, *self._footer()])

    def _footer(self) -> Iterator[str]:
        yield "Memory is the total of memory_usage() after one step. FLOPs and time are means over one refresh"
        yield "interval, without the warm-up. The slowdown is the time of a step divided by that of a step of SGD,"
        yield "without data loading."
        if self.world_size > 1:
            yield "Each number is that of the rank with the largest one. Bytes sent are those of the curvature, without"
            yield "the gradients. The slowdown does not include the time of communication."


def estimate_methods(
    model: nn.Module,
    inputs: Any,
    builders: Mapping[str, Builder],
    reference: Builder,
    batch_size: int | None = None,
    world_size: int | None = None,
    comm: CommStrategy | None = None,
    rates: MachineRates | None = None,
    device: torch.device | str | None = None,
) -> Estimate:
    """Estimate the costs of several methods for a model. The model is neither changed nor run.

    Args:
        model: The model, on any device.
        inputs: The inputs of the model: a tensor, a tuple, a dict or None; see :func:`batch_of`.
        builders: Functions that build the optimizer of a model, by the name of the method.
        reference: The function that builds the optimizer with which the others are compared.
        batch_size: Number of examples per rank; None for the number in the inputs.
        world_size: Number of ranks; None for one.
        comm: Strategy; None for ``CommOpt()``.
        rates: Rates of the machine; None to measure them.
        device: The device to train on; None for the device of the model.

    Returns:
        The estimate.

    Raises:
        ValueError: If a value is out of range, the model has no parameters, or the inputs are not known.
        TypeError: If a value has the wrong type.
        RuntimeError: If the model does not run on the ``meta`` device.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model must be a torch.nn.Module, got {type(model).__name__}")
    options.optional_whole(1)("batch_size", batch_size)
    options.optional_whole(1)("world_size", world_size)
    if rates is not None and not isinstance(rates, MachineRates):
        raise TypeError(f"rates must be a MachineRates, got {rates!r}")
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(f"the model has no parameters to train: {type(model).__name__}")
    place = _device_of(model, device)
    rates = rates or _rates_of(place)
    batch, examples = batch_of(model, inputs, batch_size)
    world = _World(world_size or 1, comm, examples)
    copy, tally = on_meta(model), Tally()
    basis = _one(reference, copy, batch, place.type, tally, world, rates)
    found = {name: _tried(build, copy, batch, place.type, tally, world, rates) for name, build in builders.items()}
    compared = {name: _compared(one, basis) for name, one in found.items()}
    parameters = sum(p.numel() for p in model.parameters())
    return Estimate(compared, parameters, examples, world.size, world.name, rates)


def _rates_of(device: torch.device) -> MachineRates:
    """Return the measured rates of a device."""
    try:
        return measure_rates(device)
    except (AssertionError, RuntimeError) as error:  # torch has no such device here
        raise ValueError(
            f"the speed of {device.type!r} cannot be measured on this machine ({error}): pass the rates of a machine "
            "that has this device, or device='cpu'"
        ) from error


@dataclass(frozen=True)
class _World:
    """The ranks of the imagined run."""

    size: int
    comm: CommStrategy | None
    examples: int

    @property
    def name(self) -> str:
        return "CommOpt()" if self.comm is None else repr(self.comm)


def _tried(build: Builder, *given: Any) -> MethodEstimate:
    """Return the estimate of a method, or the reason why there is none."""
    try:
        return _one(build, *given)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return MethodEstimate(failure=str(error).partition("\n")[0])


def _one(
    build: Builder, model: nn.Module, inputs: Any, device: str, tally: Tally, world: _World, rates: MachineRates
) -> MethodEstimate:
    """Return the estimate of a method before it is compared with the reference."""
    optimizer, steps = take_steps(build, model, inputs, device, tally)
    try:
        memory, costs, sent = steps.memory, steps.costs, 0.0
        if world.size > 1 and hasattr(optimizer, "plan"):
            memory, costs, sent = _in_world(optimizer, memory, costs, world)
    finally:
        if hasattr(optimizer, "close"):
            optimizer.close()
    flops = {stage: sum(cost.flops * number for cost, number in own.items()) for stage, own in costs.items()}
    seconds = sum(rates.seconds(own, stage) for stage, own in costs.items())
    return MethodEstimate(memory, {k: v for k, v in flops.items() if v}, 0.0, seconds, 0.0, sent)


def _in_world(
    optimizer: Any, memory: dict[str, int], costs: dict[str, Costs], world: _World
) -> tuple[dict[str, int], dict[str, Costs], float]:
    """Return the memory, the operators and the bytes sent, each for the rank with the most."""
    alone = optimizer.plan(world_size=1, batch_size=world.examples).ranks[0]
    ranks = optimizer.plan(world_size=world.size, comm=world.comm, batch_size=world.examples).ranks
    fullest = max(ranks, key=lambda rank: sum(rank.stored.values())).stored
    stored = {
        kind: memory[kind] - alone.stored.get(kind, 0) + fullest.get(kind, 0) for kind in memory if kind != "total"
    }
    shares = {
        stage: max(rank.flops.get(stage, 0.0) for rank in ranks) / alone.flops[stage]
        for stage in ("refresh", "precondition")
        if alone.flops.get(stage)
    }
    divided = {stage: _share_of(own, shares.get(_DIVIDED.get(stage, ""), 1.0)) for stage, own in costs.items()}
    return {**stored, "total": sum(stored.values())}, divided, max(sum(rank.sent.values()) for rank in ranks)


def _share_of(costs: Costs, share: float) -> Costs:
    """Return fewer operators, or operators with more work if the rows of several ranks are combined."""
    if share <= 1:
        return {cost: number * share for cost, number in costs.items()}
    return {c._replace(flops=c.flops * share, nbytes=round(c.nbytes * share)): number for c, number in costs.items()}


def _compared(found: MethodEstimate, basis: MethodEstimate) -> MethodEstimate:
    """Return the estimate of a method with its ratios to the reference."""
    if found.failure is not None:
        return found
    ratio = sum(found.flops.values()) / max(1.0, sum(basis.flops.values()))
    return MethodEstimate(found.memory, found.flops, ratio, found.seconds, found.seconds / basis.seconds, found.sent)


# ---------------------------------------------------------------------- inputs
def batch_of(model: nn.Module, inputs: Any, batch_size: int | None) -> tuple[Any, int]:
    """Return the arguments of a model on ``meta``, and the number of examples in them.

    Args:
        model: The model.
        inputs: A tensor, or a tuple, list or dict of arguments; None if the model begins with a linear layer.
        batch_size: Number of examples; None for the size of the first dimension of the first tensor.

    Returns:
        A tuple or a dict of arguments, and the number of examples.

    Raises:
        ValueError: If the inputs are not known.
    """
    if inputs is None:
        first = next((m for m in model.modules() if next(iter(m.parameters(recurse=False)), None) is not None), None)
        if not isinstance(first, nn.Linear) or batch_size is None:
            raise ValueError(
                f"the inputs of {type(model).__name__} are not known: pass inputs=, or --input such as 32x3x32x32"
            )
        inputs = torch.empty(batch_size, first.in_features, dtype=first.weight.dtype, device="meta")
    given = (inputs,) if isinstance(inputs, Tensor) else inputs if isinstance(inputs, dict) else tuple(inputs)
    tensors = [x for x in tree_leaves(given) if isinstance(x, Tensor) and x.dim()]
    if not tensors:
        raise ValueError(f"the inputs contain no tensor with a batch dimension, got {inputs!r}")
    given_size = tensors[0].shape[0]
    examples = batch_size or given_size

    def moved(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        x = x.detach().to("meta")
        return x.new_empty((examples, *x.shape[1:])) if x.dim() and x.shape[0] == given_size else x

    return tree_map(moved, given), examples


def made_on_meta(maker: Callable[[], Any]) -> tuple[nn.Module, Any]:
    """Return the model that a function makes on the ``meta`` device, and its inputs if the function returns any.

    Args:
        maker: Returns a model, or a model and its inputs.

    Raises:
        TypeError: If ``maker`` is not a function, or returns something else.
        RuntimeError: If ``maker`` fails on ``meta``.
    """
    if not callable(maker):
        raise TypeError(f"the model must be a torch.nn.Module or a function that returns one, got {maker!r}")
    try:
        with torch.device("meta"):
            made = maker()
    except (RuntimeError, NotImplementedError) as error:
        raise RuntimeError(
            f"the model cannot be built on the meta device: {error}. Pass a model that is already built"
        ) from error
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise TypeError(f"the function must return a torch.nn.Module or (model, inputs), got {type(made).__name__}")
    return model, inputs


def _device_of(model: nn.Module, device: torch.device | str | None) -> torch.device:
    """Return the device to train on: the one passed, or else the model's, or else the accelerator or the CPU."""
    if device is not None:
        return torch.device(device)
    own = next(model.parameters()).device
    if own.type != "meta":
        return own
    return torch.accelerator.current_accelerator() or torch.device("cpu")
