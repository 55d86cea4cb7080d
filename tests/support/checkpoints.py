"""One driver of runs that stop and are continued elsewhere, and all ways to transfer a run."""

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from tests.support.methods import Method
from tests.support.saving import through_a_file
from tests.support.tasks import Task, assert_identical, train, values

Pair = tuple[nn.Module, Any]  # a model and its optimizer
Build = Callable[[], Pair]
Run = Callable[[nn.Module, Any, int, int], None]  # takes the steps from the first number to the second
Way = Callable[[Build, nn.Module, Any], Pair]


def builder(method: Method, task: Task, dtype: torch.dtype = torch.float64, **keywords: Any) -> Build:
    """Return a function that builds a model of a task and its optimizer, before the first step."""

    def build() -> Pair:
        model = task.model(dtype)
        return model, method.build(model, **keywords)

    return build


def steps_of(task: Task) -> Run:
    """Return a function that trains on the batches of a task."""
    return lambda model, optimizer, first, last: train(model, optimizer, task, last - first, start=first)


def size_of_the_file(saved: Any) -> int:
    file = io.BytesIO()
    torch.save(saved, file)
    return len(file.getvalue())


def needed(method: Method, model: nn.Module) -> dict[str, nn.Module]:
    """Arguments that a class needs in addition to parameters."""
    return {"module": model} if method.layerwise else {}


#: Constructors with default options, as in a user's first script.
DEFAULT_BUILDS: dict[str, Callable[[Method, nn.Module], Any]] = {
    "module": lambda method, model: method.cls(model),
    "parameters": lambda method, model: method.cls(model.parameters(), **needed(method, model)),
    "named": lambda method, model: method.cls(model.named_parameters(), **needed(method, model)),
    "groups": lambda method, model: method.cls(
        [{"params": list(module.parameters())} for module in model.children() if list(module.parameters())],
        **needed(method, model),
    ),
}

# -------------------------------------------------------------------------------------------- Ways to transfer a run


def by_file(build: Build, model: nn.Module, optimizer: Any) -> Pair:
    """Load as a new process does. Parameters start far away, so that missing values are noticed."""
    other, second = build()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    other.load_state_dict(through_a_file(model.state_dict()))
    second.load_state_dict(through_a_file(optimizer.state_dict()))
    return other, second


def by_dcp(build: Build, model: nn.Module, optimizer: Any, *, flat: bool) -> Pair:
    """Load by parameter name with `torch.distributed.checkpoint`."""
    form = StateDictOptions(flatten_optimizer_state_dict=flat)
    other, second = build()
    other.load_state_dict(model.state_dict())
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=form))
    set_optimizer_state_dict(other, second, saved, options=form)
    return other, second


def as_a_copy(build: Build, model: nn.Module, optimizer: Any, *, copier: Callable[[Any], Any]) -> Pair:
    """Copy model and optimizer together, and attach the copy, because hooks are not copied."""
    other, second = copier((model, optimizer))
    second.attach(other)
    return other, second


def through_pickle(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


COPIERS = {
    "deepcopy": copy.deepcopy,
    "pickle": through_pickle,
    "torch.save": partial(through_a_file, weights_only=False),
}
COPIES: dict[str, Way] = {name: partial(as_a_copy, copier=copier) for name, copier in COPIERS.items()}
DCP: dict[str, Way] = {"dcp": partial(by_dcp, flat=False), "flat dcp": partial(by_dcp, flat=True)}

# ----------------------------------------------------------------------------------------------------------- The driver


def assert_same_run(actual: Pair, expected: Pair) -> None:
    """Parameters and state are bitwise equal."""
    assert_identical(values(actual[0]), values(expected[0]))
    assert_identical(actual[1].state_dict(), expected[1].state_dict())


def assert_goes_on(build: Build, run: Run, stop: int, end: int, way: Way = by_file) -> Pair:
    """Stop a run, transfer it, and continue both: they are equal at once and in the end. Return the transferred run.

    The two runs are independent: while the first one trains, the second one does not change.
    """
    first = build()
    run(*first, 0, stop)
    second = way(build, *first)
    assert_same_run(second, first)
    kept = copy.deepcopy((values(second[0]), second[1].state_dict()))
    run(*first, stop, end)
    assert_identical((values(second[0]), second[1].state_dict()), kept)
    run(*second, stop, end)
    assert_same_run(second, first)
    return second
