"""Training that is interrupted, saved, loaded in another world or under another strategy, and continued."""

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.support.oracles import ranks
from tests.support.oracles.ranks import STRATEGIES, TASKS, Run, build, optimizer_on, train
from tests.support.pool import device_of

Saved = dict[str, Any]


def started(rank: int, strategy: str, run: Run, **keywords: Any) -> tuple[nn.Module, Any]:
    """A model, and its optimizer under a strategy that averages gradients itself."""
    model = TASKS[run.task].model(device_of(rank))
    return model, build(run.method, model, STRATEGIES[strategy](average_gradients=True, **keywords), **run.keywords)


def snapshot(optimizer: Any) -> Saved:
    """A copy of the state that this rank saves, without the warning that it is only a part."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*partial")
        return copy.deepcopy(optimizer.state_dict())


def through_a_file(saved: Any, weights_only: bool = True) -> Any:
    """Save to a file, and load it."""
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def dcp_options(form: str, **keywords: Any) -> StateDictOptions:
    """Options of a nested or flat state by parameter names."""
    return StateDictOptions(flatten_optimizer_state_dict=form == "flat", **keywords)


def dcp_state(model: nn.Module, optimizer: Any, form: str, **keywords: Any) -> dict[str, Any]:
    """The states of a model and its optimizer by parameter names, or the optimizer's own if the form is "plain"."""
    options = dcp_options(form, **keywords)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*partial")
        plain = form == "plain"
        optim = optimizer.state_dict() if plain else get_optimizer_state_dict(model, optimizer, options=options)
    return {"model": get_model_state_dict(model, options=options), "optim": optim}


def dcp_load(model: nn.Module, optimizer: Any, form: str, folder: str) -> None:
    """Load the part of this rank from files that any number of ranks have written."""
    state = dcp_state(model, optimizer, form)
    checkpoint.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    if form == "plain":
        optimizer.load_state_dict(state["optim"])
    else:
        set_optimizer_state_dict(model, optimizer, state["optim"], options=dcp_options(form))


def shifted(model: nn.Module) -> nn.Module:
    """Move the parameters of a model far away from the checkpoint, so that missing values are noticed."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    return model


def trained(
    rank: int,
    world: int,
    strategy: str,
    run: Run | list[Run],
    hook: Callable[..., Any] | None = None,
    dense: bool = False,
    **keywords: Any,
) -> dict[str, Any]:
    """The trajectory, the curvature (if ``dense``) and the counters of a rank after a run under DDP.

    There may be a run for each rank, and a communication hook of DDP; ``keywords`` are those of the strategy.
    """
    own = run[rank] if isinstance(run, list) else run
    model = DDP(TASKS[own.task].model(device_of(rank)))
    if hook is not None:
        model.register_comm_hook(None, hook)
    with optimizer_on(model, strategy, own, **keywords) as optimizer:
        path = ranks.path_of(model, optimizer, rank, world, own)
        blocks = {} if own.method in ranks.WINDOWED else optimizer.blocks
        states = [optimizer.state[block.owner] for block in blocks.values()]
        return {
            "path": path,
            "curvature": ranks.curvatures(optimizer) if dense else {},
            "owners": {name: optimizer.comm.owner(block.index) for name, block in blocks.items()},
            "bases": sum(v.numel() for state in states for key, v in state.items() if key.startswith("basis_")),
            "stored": optimizer.memory_usage(),
            "sent": optimizer.comm.collectives.counter.bytes_by_stage(),
            "skipped": optimizer.diagnostics()["skipped_steps"],
        }


def paths_of(found: list[dict[str, Any]]) -> list[Tensor]:
    return [of_rank["path"] for of_rank in found]


def interrupted(rank: int, world: int, strategy: str, run: Run, at: int) -> tuple[Saved, Saved, Tensor]:
    """The saved states of the optimizer and the model of a rank, and the trajectory ``[steps, P]`` that follows."""
    model, optimizer = started(rank, strategy, run)
    train(model, optimizer, rank, world, run, 0, at)
    saved = through_a_file(snapshot(optimizer)), through_a_file(model.state_dict())
    path = torch.stack(train(model, optimizer, rank, world, run, at, run.steps))
    optimizer.close()
    return *saved, path


def resumed(
    rank: int, world: int, strategy: str, run: Run, saved: list[tuple[Saved, Saved, Tensor]], at: int
) -> Tensor:
    """Load what the same rank saved, without communication; return the trajectory that follows."""
    model, optimizer = started(rank, strategy, run)
    shifted(model).load_state_dict(saved[rank][1])
    before = len(optimizer.comm.collectives.counter.records)
    optimizer.load_state_dict(saved[rank][0])
    assert len(optimizer.comm.collectives.counter.records) == before
    path = torch.stack(train(model, optimizer, rank, world, run, at, run.steps))
    optimizer.close()
    return path


def raised(call: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[str, str]:
    """The type and message of the error that a call raises, or empty strings."""
    try:
        call(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""
