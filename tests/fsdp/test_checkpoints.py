"""Checkpoints of sharded training: by `torch.distributed.checkpoint`, rank by rank, or gathered on one rank."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
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

from tests.distributed.oracle import STRATEGIES, assert_replicas, distance
from tests.distributed.pool import Pool
from tests.distributed.saving import raised, shifted, through_a_file
from tests.fsdp.wrapping import Case, Wrap, alone, flat, started, train

BREAK, END = 5, 9
EACH = Wrap()
LAYERS = {
    "kfac": Case(),
    "ekfac": Case("ekfac_intra", keywords={"graft": "adam", "lr": 0.01}),
    "cholesky": Case("kfac_cholesky", keywords={"fallback": "adamw"}),
}
WINDOWS = {
    "mfac": Case("mfac"),
    "sparse": Case("mfac_sparse", keywords={"graft": "adam", "lr": 0.01}),
    "ggt": Case("ggt", keywords={"betas": (0.9, 0.9)}),
    "layer": Case("mfac", keywords={"partition": "layer"}),
}
CASES = LAYERS | WINDOWS
FORMS = ("nested", "flat")


def _options(form: str, **keywords: Any) -> StateDictOptions:
    return StateDictOptions(flatten_optimizer_state_dict=form == "flat", **keywords)


def _state(model: nn.Module, optimizer: Any, form: str) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*partial")
        optim = get_optimizer_state_dict(model, optimizer, options=_options(form))
    return {"model": get_model_state_dict(model), "optim": optim}


def save(
    rank: int, world: int, names: list[str], form: str, folder: str, gathered: bool, wrap: Wrap = EACH
) -> dict[str, Tensor]:
    """Train, save, and train on."""
    paths = {}
    for name in names:
        case = replace(CASES[name], wrap=wrap)
        model, optimizer = started(rank, world, case)
        train(model, optimizer, case, 0, BREAK, rank, world)
        if gathered:
            optimizer.consolidate_state_dict(to=None)
        checkpoint.save(_state(model, optimizer, form), checkpoint_id=str(Path(folder, name)))
        paths[name] = torch.stack(train(model, optimizer, case, BREAK, END, rank, world))
        optimizer.close()
    return paths


def go_on(
    rank: int, world: int, names: list[str], form: str, folder: str, gathered: bool, wrap: Wrap | None = EACH
) -> dict[str, Tensor]:
    """Read into a model that is sharded, or whole on every rank, and train on."""
    paths = {}
    for name in names:
        if wrap is None:
            case = replace(CASES[name], strategy="mem")
            model = case.model()
            optimizer = case.optimizer(model, STRATEGIES["mem"](average_gradients=True))
        else:
            case = replace(CASES[name], wrap=wrap)
            model, optimizer = started(rank, world, case)
        shifted(model)
        if gathered:
            optimizer.consolidate_state_dict(to=None)
        state = _state(model, optimizer, form)
        checkpoint.load(state, checkpoint_id=str(Path(folder, name)))
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optim"], options=_options(form))
        paths[name] = torch.stack(train(model, optimizer, case, BREAK, END, rank, world))
        optimizer.close()
    return paths


def _judge(found: list[dict[str, Tensor]], saved: dict[str, Tensor], exact: bool = False) -> None:
    for name, expected in saved.items():
        assert_replicas([paths[name] for paths in found])
        path = found[0][name]
        assert not exact or torch.equal(path, expected), name
        assert distance(path[:1], expected[:1]) <= 1e-12, name
        assert distance(path, expected) <= 1e-9, name
        assert distance(path, alone(CASES[name])[BREAK:]) <= 1e-9, name


@pytest.mark.parametrize("form", FORMS)
def test_layers_go_on_in_every_world(pool: Pool, tmp_path: Path, form: str) -> None:
    """Saved by two sharded ranks; read by two, four and one, and by two that hold the model whole."""
    names = list(LAYERS)
    saved = pool.run(save, names, form, str(tmp_path), False, world=2)[0]
    _judge(pool.run(go_on, names, form, str(tmp_path), False, world=2), saved, exact=True)
    _judge(pool.run(go_on, names, form, str(tmp_path), False, world=4), saved)
    _judge(pool.run(go_on, names, form, str(tmp_path), False, None, world=2), saved)
    _judge(pool.run(go_on, names, form, str(tmp_path), False, None, world=1), saved)


@pytest.mark.parametrize("form", FORMS)
def test_layers_of_four_ranks_go_on_with_fewer(pool: Pool, tmp_path: Path, form: str) -> None:
    names = list(LAYERS)
    saved = pool.run(save, names, form, str(tmp_path), False, Wrap(replicas=2), world=4)[0]
    _judge(pool.run(go_on, names, form, str(tmp_path), False, Wrap(replicas=2), world=4), saved, exact=True)
    _judge(pool.run(go_on, names, form, str(tmp_path), False, Wrap(each=False), world=2), saved)
    _judge(pool.run(go_on, names, form, str(tmp_path), False, world=3), saved)


@pytest.mark.parametrize("form", FORMS)
def test_windows_go_on_with_the_same_ranks(pool: Pool, tmp_path: Path, form: str) -> None:
    names = list(WINDOWS)
    saved = pool.run(save, names, form, str(tmp_path), False, world=2)[0]
    _judge(pool.run(go_on, names, form, str(tmp_path), False, world=2), saved, exact=True)


@pytest.mark.parametrize("world", [2, 4])
def test_windows_go_everywhere_once_gathered(pool: Pool, tmp_path: Path, world: int) -> None:
    names = list(WINDOWS)
    saved = pool.run(save, names, "nested", str(tmp_path), True, world=world)[0]
    _judge(pool.run(go_on, names, "nested", str(tmp_path), True, world=6 - world), saved)
    _judge(pool.run(go_on, names, "nested", str(tmp_path), False, None, world=1), saved)


# ---------------------------------------------------------------------------------------------------------------------
# Without DCP
# ---------------------------------------------------------------------------------------------------------------------


def broken_off(rank: int, world: int, names: list[str]) -> dict[str, tuple[Any, Any, Tensor]]:
    """State of a rank through a file, its model, and the path that follows."""
    found = {}
    for name in names:
        case = CASES[name]
        model, optimizer = started(rank, world, case)
        train(model, optimizer, case, 0, BREAK, rank, world)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*partial")
            own = through_a_file([model.state_dict(), optimizer.state_dict()])
        twin_model, twin = started(rank, world, case)
        shifted(twin_model).load_state_dict(own[0])
        sent = len(twin.comm.collectives.counter.records)
        twin.load_state_dict(own[1])
        assert len(twin.comm.collectives.counter.records) == sent  # loading sends nothing
        expected = torch.stack(train(model, optimizer, case, BREAK, END, rank, world))
        path = torch.stack(train(twin_model, twin, case, BREAK, END, rank, world))
        found[name] = torch.equal(path, expected), distance(path, alone(case)[BREAK:])
        optimizer.close()
        twin.close()
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_every_rank_goes_on_from_its_own_file(pool: Pool, world: int) -> None:
    for of_rank in pool.run(broken_off, list(CASES), world=world):
        for name, (same, error) in of_rank.items():
            assert same, name
            assert error <= 1e-9, name


def of_another_rank(rank: int, world: int, names: list[str]) -> list[tuple[str, str]]:
    """What a rank says to the state of its neighbour."""
    answers = []
    for name in names:
        case = CASES[name]
        model, optimizer = started(rank, world, case)
        train(model, optimizer, case, 0, 1, rank, world)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*partial")
            own = optimizer.state_dict()
        own["partial"] = {f"rank {1 - rank} of 2 under MemOpt()": True} if name in LAYERS else own["partial"]
        before = flat(model)
        if name in LAYERS:
            answers.append(raised(optimizer.load_state_dict, own))
        assert torch.equal(flat(model), before)
        optimizer.close()
    return answers


def test_state_of_another_rank_is_refused(pool: Pool) -> None:
    for answers in pool.run(of_another_rank, ["kfac"], world=2):
        for kind, text in answers:
            assert kind == "RuntimeError"
            assert "consolidate_state_dict()" in text


def full_state(rank: int, world: int, names: list[str]) -> dict[str, Any]:
    """``full_state_dict=True`` on rank 0, with curvature gathered there; and the path that follows."""
    found = {}
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    for name in names:
        case = CASES[name]
        model, optimizer = started(rank, world, case)
        train(model, optimizer, case, 0, BREAK, rank, world)
        optimizer.consolidate_state_dict()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*partial")
            state = get_optimizer_state_dict(model, optimizer, options=options)
        whole = get_model_state_dict(model, options=options)
        path = torch.stack(train(model, optimizer, case, BREAK, END, rank, world))
        found[name] = (through_a_file([whole, state]), path) if rank == 0 else None
        optimizer.close()
    return found


def test_a_whole_checkpoint_of_rank_0_goes_on_in_one_process(pool: Pool) -> None:
    """A file of plain tensors, which needs no process group to be read."""
    found = pool.run(full_state, list(CASES), world=2)[0]
    for name, case in CASES.items():
        (weights, state), expected = found[name]
        model = shifted(case.model())
        model.load_state_dict(weights)
        optimizer = case.optimizer(model)
        set_optimizer_state_dict(model, optimizer, state)
        path = torch.stack(train(model, optimizer, case, BREAK, END))
        assert distance(path[:1], expected[:1]) <= 1e-12, name
        assert distance(path, expected) <= 1e-9, name
