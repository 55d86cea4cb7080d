"""What a training run shows to its user, as text: parameters, state, messages, warnings, tables and plans.

Only public names of the package are used, and nothing here depends on which of its modules something is in.
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

Events = Mapping[int, Callable[["Training"], Any]]
_OUTER = "nn|comm|schedule|switching|diagnostics|integrations"


# ---------------------------------------------------------------------------------------------------------------------
# Text
# ---------------------------------------------------------------------------------------------------------------------


def normal(text: str) -> str:
    """A text without addresses, and without paths of modules that may move."""
    text = re.sub(r"0x[0-9a-f]{6,}", "0x…", text)
    text = re.sub(r"/\S*/secondorder/\S+?\.py(:\d+)?", "<package>", text)
    text = re.sub(r"\bport \d+|\bpid \d+", "…", text)
    return re.sub(rf"\bsecondorder\.(?!(?:{_OUTER})\b)(?:[a-z_]+\.)+(?=\w)", "secondorder.", text)


def digest(t: Tensor) -> str:
    """The bits of a tensor, of this rank's piece where it is cut."""
    t = (t.to_local() if isinstance(t, DTensor) else t).detach().cpu().contiguous()
    return hashlib.sha256(t.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def kind(t: Tensor) -> str:
    """Dtype and shape of a tensor, and how it is cut."""
    cut = f" {normal(str(t.placements))}" if isinstance(t, DTensor) else ""
    return f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}{cut}"


def plain(value: Any) -> Any:
    """Anything as JSON takes it; tuples, types and objects without a form there as text. Floats keep all their bits."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return normal(value)
    if isinstance(value, nn.Module):
        return f"module {type(value).__name__}"
    if isinstance(value, Tensor):
        return f"tensor {kind(value)} {digest(value)}"
    if isinstance(value, Mapping):
        return {str(key): plain(v) for key, v in value.items() if not str(key).endswith(("_ms", "seconds"))}
    if isinstance(value, (list, tuple)):
        return [*([] if isinstance(value, list) else ["tuple"]), *map(plain, value)]
    return normal(getattr(value, "__qualname__", None) or repr(value))


def state_of(saved: Mapping[str, Any]) -> dict[str, Any]:
    """What `state_dict` returned: per parameter a line for each entry, in their order, and all other keys."""
    names = [n for group in saved["param_groups"] for n in group.get("param_names", ())]
    entries = {
        (names[i] if isinstance(i, int) and i < len(names) else str(i)): [
            f"{key}: {kind(v)} {digest(v)}" if isinstance(v, Tensor) else f"{key}: {plain(v)}" for key, v in own.items()
        ]
        for i, own in saved["state"].items()
    }
    return {"entries": entries, "others": {k: plain(v) for k, v in saved.items() if k != "state"}}


def hooks_of(model: nn.Module) -> dict[str, list[int]]:
    """Numbers of hooks of each module (before and after its forward and its backward) and of its own parameters."""
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return {
        name: [*(len(getattr(m, k)) for k in kinds), sum(map(_own_hooks, m.parameters(recurse=False)))]
        for name, m in model.named_modules()
    }


def _own_hooks(p: Tensor) -> int:
    return sum(len(getattr(p, key, None) or ()) for key in ("_backward_hooks", "_post_accumulate_grad_hooks"))


# ---------------------------------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Training:
    """A model that is trained.

    Attributes:
        model: Called with inputs; parameters are read from it.
        optimizer: Of its parameters.
        batch: Inputs and targets of a step, this rank's.
        way: How a step is taken: ``plain``, ``observe``, ``loss`` (a closure), or ``outputs`` (one that returns them).
        micro: Micro-batches of a step.
        before: What is done before a step.
        extra: What events want to have in the trace.
    """

    model: nn.Module
    optimizer: Any
    batch: Callable[[int], tuple[Tensor, Tensor]]
    way: str = "plain"
    micro: int = 1
    before: Events = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    def step(self, step: int) -> float:
        """One step; its loss."""
        if step in self.before:
            self.before[step](self)
        if self.way in ("loss", "outputs"):
            found = self.optimizer.step(lambda: self._closure(step))
            return float((found[0] if isinstance(found, tuple) else found).detach())
        self.optimizer.zero_grad()
        inputs, targets = self.batch(step)
        losses = [
            self._backward(x, y) for x, y in zip(inputs.chunk(self.micro), targets.chunk(self.micro), strict=True)
        ]
        self.optimizer.step()
        return sum(losses)

    def _backward(self, inputs: Tensor, targets: Tensor) -> float:
        outputs = self.model(inputs)
        if self.way == "observe":
            self.optimizer.observe(outputs, "categorical")
        loss = loss_of(outputs, targets) / self.micro
        loss.backward()
        return float(loss.detach())

    def _closure(self, step: int) -> Any:
        inputs, targets = self.batch(step)
        self.optimizer.zero_grad()
        outputs = self.model(inputs)
        loss = loss_of(outputs, targets)
        loss.backward()
        return (loss, outputs) if self.way == "outputs" else loss


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


# ---------------------------------------------------------------------------------------------------------------------
# The trace
# ---------------------------------------------------------------------------------------------------------------------


@contextmanager
def ranges(found: list[str]) -> Iterator[None]:
    """Names of the profiler's ranges that this thread enters, indented by depth."""
    enter, leave, thread, depth = record_function.__enter__, record_function.__exit__, threading.get_ident(), 0

    def entered(self: record_function) -> Any:
        nonlocal depth
        if threading.get_ident() == thread:
            found.append("  " * depth + self.name)
            depth += 1
        return enter(self)

    def left(self: record_function, *args: Any) -> Any:
        nonlocal depth
        depth -= threading.get_ident() == thread
        return leave(self, *args)

    record_function.__enter__, record_function.__exit__ = entered, left
    try:
        yield
    finally:
        record_function.__enter__, record_function.__exit__ = enter, leave


class _Log(logging.Handler):
    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(f"{record.levelname}: {normal(record.getMessage())}")


@contextmanager
def warned(found: list[str], logged: list[str]) -> Iterator[None]:
    """Kinds and texts of warnings in their order, whose line each is said to be about, and what is logged."""
    logger, handler = logging.getLogger("secondorder"), _Log(logged)
    logger.addHandler(handler)
    logger.propagate = False
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = True
    for w in caught:
        path = Path(w.filename)
        if not {"torch", "importlib"} & set(path.parts):
            place = "package" if "secondorder" in path.parts else path.stem
            found.append(f"{w.category.__name__} at {place}: {normal(str(w.message))}")


def messages_of(optimizer: Any) -> list[str]:
    """The messages that this rank has sent so far."""
    counter = getattr(getattr(optimizer.comm, "collectives", None), "counter", None)
    return [] if counter is None else [
        f"{r.stage} {r.kind} of {r.size}: {r.numel} {str(r.dtype).removeprefix('torch.')}" for r in counter.records
    ]  # fmt: skip


def path(training: Training, first: int, last: int, trace: dict[str, Any]) -> None:
    """Take some steps, and append each to the trace."""
    for key in ("losses", "bits", "stages", "messages"):
        trace.setdefault(key, [])
    for step in range(first, last):
        sent, found = len(messages_of(training.optimizer)), []
        with ranges(found):
            trace["losses"].append(training.step(step).hex())
        trace["bits"].append({name: digest(p) for name, p in training.model.named_parameters()})
        trace["stages"].append(found)
        trace["messages"].append(messages_of(training.optimizer)[sent:])


def tables(optimizer: Any) -> dict[str, Any]:
    """Return the reports of an optimizer about itself."""
    return {
        "groups": [{**plain(g), "params": len(g["params"])} for g in optimizer.param_groups],
        "defaults": plain(optimizer.defaults),
        "describe": normal(optimizer.describe()).splitlines(),
        "memory": plain(optimizer.memory_usage()),
        "diagnostics": plain(optimizer.diagnostics()),
        "repr": normal(repr(optimizer)).splitlines(),
    }


def plans_of(optimizer: Any, wanted: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Return the plans, or the text of the error where there is none."""
    found: dict[str, Any] = {}
    for name, arguments in wanted.items():
        try:
            found[name] = plain(optimizer.plan(*arguments).to_dict())
        except Exception as error:  # any error belongs to the trace
            found[name] = text_of(error)
    return found


def text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {normal(str(error))}"


def trace_of(
    build: Callable[[], Training],
    steps: int,
    plans: Mapping[str, tuple[Any, ...]] | None = None,
    middle: Callable[[Training, int, dict[str, Any]], Any] | None = None,
) -> dict[str, Any]:
    """Everything that a run shows.

    Args:
        build: Makes the model and its optimizer.
        steps: Number of steps.
        plans: Arguments of `plan` by a name of each.
        middle: What is done after half of the steps; it gets the training, the next step and the trace.

    Returns:
        The trace; of a run that raised, what there was until then, and what it raised.
    """
    return watched(lambda trace: _fill(trace, build(), steps, plans or {}, middle))


def watched(fill: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """Return the trace that a function fills, with the warnings, the error and the random state at the end."""
    trace: dict[str, Any] = {}
    torch.manual_seed(0)
    said, logged = list[str](), list[str]()
    with warned(said, logged):
        try:
            fill(trace)
        except Exception as error:  # any error belongs to the trace
            trace["error"] = text_of(error)
    return trace | {"warnings": said, "log": logged, "random": digest(torch.get_rng_state())}


def _fill(trace: dict[str, Any], training: Training, steps: int, plans: Any, middle: Any) -> None:
    half = steps // 2
    optimizer = training.optimizer
    trace["fresh"] = {"state": state_of(optimizer.state_dict()), **tables(optimizer)}
    path(training, 0, half, trace)
    trace["half"] = {"state": state_of(optimizer.state_dict()), "memory": plain(optimizer.memory_usage())}
    if middle is not None:
        middle(training, half, trace)
    path(training, half, steps, trace)
    optimizer = training.optimizer  # an event may have put another in its place
    trace["state"] = state_of(optimizer.state_dict())
    trace["live"] = {
        name: [f"{key}: {kind(v) if isinstance(v, Tensor) else type(v).__name__}" for key, v in own.items()]
        for name, p in training.model.named_parameters()
        if (own := optimizer.state.get(p))
    }
    trace |= tables(optimizer)
    trace["plans"] = plans_of(optimizer, plans)
    trace["hooks"] = hooks_of(training.model)
    trace["extra"] = plain(training.extra)
    optimizer.close()
    trace["hooks at the end"] = hooks_of(training.model)
