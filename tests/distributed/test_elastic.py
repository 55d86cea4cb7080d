"""Saved in one world under one strategy, gone on with in another: the same path as if nothing had happened.

One process saves for all after `consolidate_state_dict`; the file is read in the safe mode of `torch.load`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.support.grid import only
from tests.support.oracles.ranks import METHODS, Run, distance
from tests.support.pool import Pool
from tests.support.saving import Saved, shifted, snapshot, started, through_a_file, train

# Factors every 2 steps and refreshes every 4: after the break one step as before, an update, and a refresh. Rows are
# renewed every 3 steps, from other examples in another world: only what comes before is the same there.
BREAK, END, ROWS_END = 5, 10, 6
QUICK = ("kfac_eigen", "ekfac_intra", "hylo_kid", "mfac", "mfac_sparse")
STRATEGIES = {1: ("mem",), 2: ("comm", "mem"), 3: ("comm", "mem", "chief"), 4: ("comm", "mem", "hybrid_half")}
OF_FACTORS = ("comm_owner", "mem_replicated", "local_factors", "chief", "chief_inverses")


class Checkpoint(NamedTuple):
    """What was saved, and the path of the run that went on.

    Attributes:
        run: The run.
        model: State of the model.
        optimizer: State of the optimizer.
        path: Parameters ``[END - BREAK, P]`` after each of the steps that follow.
    """

    run: Run
    model: Saved
    optimizer: Saved
    path: Tensor


def last_step(method: str) -> int:
    return ROWS_END if method.startswith("hylo") else END


def save(rank: int, world: int, strategy: str, methods: tuple[str, ...]) -> list[Checkpoint]:
    found = []
    for method in methods:
        run = Run(method=method)
        model, optimizer = started(rank, strategy, run)
        train(model, optimizer, rank, world, run, 0, BREAK)
        optimizer.consolidate_state_dict()
        saved = through_a_file((model.state_dict(), snapshot(optimizer)))
        path = train(model, optimizer, rank, world, run, BREAK, last_step(method))
        found.append(Checkpoint(run, *saved, torch.stack(path)))
        optimizer.close()
    return found


def go_on(rank: int, world: int, strategy: str, checkpoints: list[Checkpoint]) -> list[Tensor]:
    paths = []
    for run, model_state, state, path in checkpoints:
        model, optimizer = started(rank, strategy, run)
        shifted(model).load_state_dict(model_state)
        before = len(optimizer.comm.collectives.counter.records)
        optimizer.load_state_dict(state)
        assert len(optimizer.comm.collectives.counter.records) == before
        paths.append(torch.stack(train(model, optimizer, rank, world, run, BREAK, BREAK + len(path))))
        optimizer.close()
    return paths


def judge(checkpoints: list[Checkpoint], paths: list[list[Tensor]], exact: bool) -> None:
    """Every rank goes on alike; the first step to 1e-10, and to the bit where nothing has changed."""
    for i, checkpoint in enumerate(checkpoints):
        for of_rank in paths:
            assert torch.equal(of_rank[i], paths[0][i]), checkpoint.run.method
        if exact:
            assert torch.equal(paths[0][i], checkpoint.path), checkpoint.run.method
        assert distance(paths[0][i][:1], checkpoint.path[:1]) < 1e-10, checkpoint.run.method
        assert distance(paths[0][i], checkpoint.path) < 1e-9, checkpoint.run.method


@pytest.fixture(scope="module")
def saved_at_two(pool: Pool) -> dict[str, list[Checkpoint]]:
    """Checkpoints of two ranks by strategy."""
    return {strategy: pool.run(save, strategy, QUICK, world=2)[0] for strategy in ("comm", "mem")}


LAYOUTS = {f"{strategy}-{world}": (strategy, world) for world, names in STRATEGIES.items() for strategy in names}


@only("mem-comm-2", "comm-mem-3", "mem-hybrid_half-4", before=["comm", "mem"], layout=LAYOUTS)
def test_from_two_ranks_to_others(
    pool: Pool, saved_at_two: dict[str, list[Checkpoint]], before: str, layout: tuple[str, int]
) -> None:
    after, world = layout
    checkpoints = [c for c in saved_at_two[before] if after != "chief" or c.run.method.startswith(("kfac", "ekfac"))]
    judge(checkpoints, pool.run(go_on, after, checkpoints, world=world), exact=(world, after) == (2, before))


WAYS = {"1-4": (1, "mem", 4, "hybrid_half"), "4-2": (4, "hybrid_half", 2, "mem"), "4-1": (4, "mem", 1, "comm")}


@only("4-2", way=WAYS)
def test_from_other_worlds(pool: Pool, way: tuple[int, str, int, str]) -> None:
    old, before, new, after = way
    checkpoints = pool.run(save, before, ("kfac_cholesky", "ekfac_running", "ggt"), world=old)[0]
    judge(checkpoints, pool.run(go_on, after, checkpoints, world=new), exact=False)


@pytest.mark.slow
@pytest.mark.parametrize("after", [1, 2, 3, 4])
@pytest.mark.parametrize("before", [1, 2, 3, 4])
def test_every_method_from_every_world_to_every_other(pool: Pool, before: int, after: int) -> None:
    for old in STRATEGIES[before]:
        methods = tuple(m for m in METHODS if old != "chief" or m.startswith(("kfac", "ekfac")))
        checkpoints = pool.run(save, old, methods, world=before, timeout=200)[0]
        for new in STRATEGIES[after]:
            fit = [c for c in checkpoints if new != "chief" or c.run.method.startswith(("kfac", "ekfac"))]
            paths = pool.run(go_on, new, fit, world=after, timeout=200)
            judge(fit, paths, exact=(before, old) == (after, new))


@pytest.mark.slow
@pytest.mark.parametrize("after", OF_FACTORS)
@pytest.mark.parametrize("before", OF_FACTORS)
def test_strategies_that_say_where_factors_are(pool: Pool, before: str, after: str) -> None:
    """The estimate of `local_factors` is another one: only the step that makes none is the same."""
    checkpoints = pool.run(save, before, ("kfac_eigen", "kfac_cholesky", "ekfac_intra"), world=2)[0]
    if "local_factors" in (before, after) and before != after:
        checkpoints = [c._replace(path=c.path[:1]) for c in checkpoints if c.run.method.startswith("kfac")]
    judge(checkpoints, pool.run(go_on, after, checkpoints, world=2), exact=before == after)


def lean_path(rank: int, world: int, strategy: str, run: Run, saved: Any) -> Any:
    """The path from a checkpoint; without one, what is saved after a refresh, and the path that follows."""
    model, optimizer = started(rank, strategy, run)
    if saved is not None:
        shifted(model).load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        return torch.stack(train(model, optimizer, rank, world, run, BREAK, END))
    train(model, optimizer, rank, world, run, 0, BREAK)
    optimizer.consolidate_state_dict()
    saved = through_a_file((model.state_dict(), snapshot(optimizer)))
    return saved, torch.stack(train(model, optimizer, rank, world, run, BREAK, END))


LEAN = {
    "none": ("kfac_eigen", {"checkpoint_curvature": "none"}),
    "kfac": ("kfac_eigen", {"checkpoint_curvature": "factors"}),
    "running": ("ekfac_running", {"checkpoint_curvature": "factors"}),
    "intra": ("ekfac_intra", {"checkpoint_curvature": "factors", "scale_update_steps": 2}),
}


@pytest.mark.parametrize("kind", LEAN)
def test_checkpoints_without_curvature_load_alike_everywhere(pool: Pool, kind: str) -> None:
    """What they leave out is found anew, the same in every world; from the factors as if nothing had happened."""
    run = Run("mlp", *LEAN[kind])
    saved, expected = pool.run(lean_path, "mem", run, None, world=2)[0]
    reference = expected
    for world, strategy in ((2, "comm"), (1, "mem"), (4, "hybrid_half"))[: None if kind == "none" else 2]:
        paths = pool.run(lean_path, strategy, run, saved, world=world)
        if kind == "none" and reference is expected:
            reference = paths[0]
        assert all(torch.equal(path, paths[0]) for path in paths)
        assert distance(paths[0], reference) < 1e-9
