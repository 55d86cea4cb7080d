"""Checkpoints of sharded training, by `torch.distributed.checkpoint`, one per rank, or gathered on one rank."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict, set_optimizer_state_dict

from tests.support.grid import only
from tests.support.oracles.ranks import STRATEGIES, assert_replicas, distance
from tests.support.pool import Pool, everywhere, on_every_rank
from tests.support.saving import dcp_load, dcp_state, raised, shifted, snapshot, through_a_file
from tests.support.sharding import Case, Wrap, alone, started, train

BREAK, END = 5, 9
EACH, HSDP = Wrap(), Wrap(replicas=2)
LAYERS = {
    "kfac": Case(),
    "ekfac": Case("ekfac_intra", keywords={"graft": "adam", "lr": 0.01}),
    "momentum": Case("ekfac_running", keywords={"momentum_mode": "pre", "power": 0.5, "lr": 0.01}),
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


def _trained(rank: int, world: int, case: Case) -> tuple[nn.Module, Any]:
    model, optimizer = started(rank, world, case)
    train(model, optimizer, case, 0, BREAK, rank, world)
    return model, optimizer


def _rest(model: nn.Module, optimizer: Any, case: Case, rank: int = 0, world: int = 1) -> Tensor:
    path = torch.stack(train(model, optimizer, case, BREAK, END, rank, world))
    optimizer.close()
    return path


def save(
    rank: int, world: int, name: str, form: str, folder: Path, gathered: bool = False, wrap: Wrap = EACH
) -> Tensor:
    """Train, save and continue."""
    case = replace(CASES[name], wrap=wrap)
    model, optimizer = _trained(rank, world, case)
    if gathered:
        optimizer.consolidate_state_dict(to=None, pieces=False)
    checkpoint.save(dcp_state(model, optimizer, form), checkpoint_id=str(folder))
    return _rest(model, optimizer, case, rank, world)


def continue_run(
    rank: int, world: int, name: str, form: str, folder: Path, gathered: bool = False, wrap: Wrap | None = EACH
) -> Tensor:
    """Load into a model that is sharded, or whole on every rank, and continue."""
    case = replace(CASES[name], wrap=wrap or EACH)
    if wrap is None:
        model = case.model()
        optimizer = case.optimizer(model, STRATEGIES["mem"](average_gradients=True))
    else:
        model, optimizer = started(rank, world, case)
    shifted(model)
    if gathered:
        optimizer.consolidate_state_dict(to=None, pieces=False)
    dcp_load(model, optimizer, form, str(folder))
    return _rest(model, optimizer, case, rank, world)


def _assert_near(path: Tensor, expected: Tensor) -> None:
    assert distance(path[:1], expected[:1]) <= 1e-11
    assert distance(path, expected) <= 1e-9


def _assert_continued(found: list[Tensor], saved: Tensor, name: str, exact: bool = False) -> None:
    assert_replicas(found)
    assert not exact or torch.equal(found[0], saved)
    _assert_near(found[0], saved)
    assert distance(found[0], alone(CASES[name])[BREAK:]) <= 1e-9


ROOT = Wrap(each=False)
#: The layout that saves, the same layout again, and others: how the model is sharded, and the number of ranks.
LAYOUTS: dict[str, list[tuple[Wrap | None, int]]] = {
    "two": [(EACH, 2), (EACH, 2), (EACH, 4), (None, 2), (None, 1)],
    "replicas": [(HSDP, 4), (HSDP, 4), (ROOT, 2), (EACH, 3)],
}


@only("two-ekfac-nested", "replicas-momentum-flat", layouts=LAYOUTS, name=list(LAYERS), form=FORMS)
def test_layers_go_on_in_every_world(
    pool: Pool, tmp_path: Path, layouts: list[tuple[Wrap | None, int]], name: str, form: str
) -> None:
    (wrap, world), *others = layouts
    saved = pool.run(save, name, form, tmp_path, wrap=wrap, world=world)[0]
    for i, (other, ranks) in enumerate(others):
        found = pool.run(continue_run, name, form, tmp_path, wrap=other, world=ranks)
        _assert_continued(found, saved, name, exact=i == 0)


@only("sparse-flat", name=list(WINDOWS), form=FORMS)
def test_windows_continue_on_the_same_ranks(pool: Pool, tmp_path: Path, name: str, form: str) -> None:
    saved = pool.run(save, name, form, tmp_path, world=2)[0]
    _assert_continued(pool.run(continue_run, name, form, tmp_path, world=2), saved, name, exact=True)


@only("layer-2", name=list(WINDOWS), world=[2, 4])
def test_windows_continue_in_every_world_after_consolidation(pool: Pool, tmp_path: Path, name: str, world: int) -> None:
    saved = pool.run(save, name, "nested", tmp_path, True, world=world)[0]
    for wrap, ranks in ((EACH, 6 - world), (None, 1)):
        found = pool.run(continue_run, name, "nested", tmp_path, wrap is not None, wrap=wrap, world=ranks)
        _assert_continued(found, saved, name)


# ---------------------------------------------------------------------------------------------------------- Without DCP
def interrupted(rank: int, world: int, name: str) -> tuple[Tensor, Tensor]:
    """The trajectory after a break, and that of another optimizer which loads the file of this rank."""
    case = CASES[name]
    model, optimizer = _trained(rank, world, case)
    own = through_a_file([model.state_dict(), snapshot(optimizer)])
    twin_model, twin = started(rank, world, case)
    shifted(twin_model).load_state_dict(own[0])
    sent = len(twin.comm.collectives.counter.records)
    twin.load_state_dict(own[1])
    assert len(twin.comm.collectives.counter.records) == sent
    return _rest(model, optimizer, case, rank, world), _rest(twin_model, twin, case, rank, world)


@only("cholesky-4", "ggt-2", name=list(CASES), world=[2, 4])
def test_every_rank_continues_from_its_own_file(pool: Pool, world: int, name: str) -> None:
    for expected, path in pool.run(interrupted, name, world=world):
        assert torch.equal(path, expected)
        assert distance(path, alone(CASES[name])[BREAK:]) <= 1e-9


def on_one_rank(rank: int, world: int, name: str, by_torch: bool) -> tuple[Any, Tensor]:
    """The full state on rank 0, after saving and loading, and the trajectory that follows.

    Either torch or the optimizer gathers the state that is sharded like the parameters.
    """
    case = CASES[name]
    model, optimizer = _trained(rank, world, case)
    optimizer.consolidate_state_dict(pieces=not by_torch)
    whole = dcp_state(model, optimizer, "nested" if by_torch else "plain", full_state_dict=True, cpu_offload=True)
    saved = through_a_file([whole["model"], whole["optim"]]) if rank == 0 else None
    return saved, _rest(model, optimizer, case, rank, world)


@only("by_torch-kfac", "gathered-sparse", by_torch={"by_torch": True, "gathered": False}, name=list(CASES))
def test_a_full_file_continues_in_one_process(pool: Pool, by_torch: bool, name: str) -> None:
    """It only contains plain tensors, so that loading needs no process group."""
    case = CASES[name]
    (weights, state), expected = pool.run(on_one_rank, name, by_torch, world=2)[0]
    model = shifted(case.model())
    model.load_state_dict(weights)
    optimizer = case.optimizer(model)
    if by_torch:
        set_optimizer_state_dict(model, optimizer, state)
    else:
        assert "partial" not in state
        optimizer.load_state_dict(state)
    _assert_near(_rest(model, optimizer, case), expected)


@pytest.mark.parametrize("name", ["kfac", "momentum", pytest.param("mfac", marks=pytest.mark.slow)])
@on_every_rank(2)
def test_a_full_file_is_distributed_to_all_ranks_only_after_consolidation(rank: int, world: int, name: str) -> None:
    """Otherwise, torch replaces missing state by that of the loading optimizer, whose zeros must not be used."""
    case = CASES[name]
    for gathered in (False, True):
        model, optimizer = _trained(rank, world, case)
        if gathered:
            optimizer.consolidate_state_dict(pieces=False)
        state = dcp_state(model, optimizer, "nested", full_state_dict=True, cpu_offload=True)
        weights, state = through_a_file([state["model"], state["optim"]]) if rank == 0 else ({}, {})
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        other, second = started(rank, world, case)
        set_model_state_dict(shifted(other), weights, options=options)
        if gathered and name in WINDOWS:
            second.consolidate_state_dict(to=None, pieces=False)  # torch ignores keys that a rank does not have
        kind, text = raised(set_optimizer_state_dict, other, second, state, options=options)
        dist.barrier()  # some ranks may have raised
        if gathered:
            assert (kind, text) == ("", "")
            expected, path = _rest(model, optimizer, case, rank, world), _rest(other, second, case, rank, world)
            _assert_near(path, expected)
            assert_replicas(everywhere(path))
        else:
            assert kind == "RuntimeError" or (rank == 0 and not kind), text
            assert not kind or "consolidate_state_dict" in text
            optimizer.close()
            second.close()
